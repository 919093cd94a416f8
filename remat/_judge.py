"""A policy at work: asked about each operation, as far as possible once for all of its calls."""

from __future__ import annotations

import functools
from typing import Any

from ._leaves import If
from ._policy import Policy, Verdict
from ._torch import selective_context
from ._values import UNTOLD, Step, Value


class Judge:
    """What a policy says of the values of a region."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.by_name = bool(policy.mentioned_names)
        self._asks = _asks(policy)
        # A predicate is asked each time anyway, may be made for one region alone, and may hold tensors.
        self._verdicts: dict[Any, Verdict | None] = {} if self._asks else _table(policy)

    def verdict_for(self, func: Any) -> Verdict | None:
        """The verdict on all unnamed values that an operation makes, if there is one."""
        if func not in self._verdicts:
            self._verdicts[func] = self.policy.verdict_for(func)
        return self._verdicts[func]

    def of(self, step: Step, args: tuple, kwargs: dict, result: Any) -> Verdict:
        """The verdict on what a step has made, as long as it has no names."""
        func = step.func
        if step.result is UNTOLD or step.facts.makes_nothing:
            return Verdict.RECOMPUTE
        ctx, args, kwargs = (selective_context(result), args, kwargs) if self._asks else (None, (), {})
        if self.by_name:
            step.question = ctx, func, args, kwargs
        verdict = self.verdict_for(func)
        return self.policy.judge(ctx, func, args, kwargs, frozenset()) if verdict is None else verdict

    def again(self, step: Step, value: Value) -> Verdict:
        """The verdict on one of these values, which has got a name."""
        if step.question is None:
            return value.verdict
        return self.policy.judge(*step.question, frozenset(value.names))


def _asks(policy: Policy) -> bool:
    """Whether it has predicates, which want the arguments of operations."""
    return isinstance(policy, If) or any(map(_asks, policy._parts()))


@functools.lru_cache(maxsize=256)
def _table(policy: Policy) -> dict[Any, Verdict | None]:
    """The policy's verdicts on operations, filled as they are met."""
    return {}
