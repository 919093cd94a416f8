"""A policy at work: asked about each operation, as far as possible once for all of its calls."""

from __future__ import annotations

import functools
from typing import Any

from torch.utils.checkpoint import SelectiveCheckpointContext

from ._leaves import If
from ._policy import Policy, Verdict
from ._values import UNTOLD, Step, Value


@functools.lru_cache(maxsize=256)
class Judge:
    """What a policy says of the values of regions."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.by_name = bool(policy.mentioned_names)
        self._asks = _asks(policy)
        # Verdicts on operations without names, and on those with names, filled as they are met.
        self._verdicts: dict[Any, Verdict | None] = {}
        self._named: dict[tuple[Any, frozenset[str]], Verdict] = {}

    def verdict_for(self, func: Any) -> Verdict | None:
        """The verdict on all unnamed values that an operation makes, if there is one."""
        try:
            return self._verdicts[func]
        except KeyError:
            verdict = self._verdicts[func] = self.policy.verdict_for(func)
            return verdict

    def of(self, step: Step, args: tuple, kwargs: dict, result: Any) -> Verdict:
        """The verdict on what a step has made, as long as it has no names."""
        func = step.func
        if step.result is UNTOLD or step.facts.makes_nothing:
            return Verdict.RECOMPUTE
        verdict = self.verdict_for(func)
        if self._asks:
            ctx = _context(result)
            if self.by_name:
                step.question = ctx, func, args, kwargs
            if verdict is None:
                return self.policy.judge(ctx, func, args, kwargs, frozenset())
        elif self.by_name:
            step.question = None, func, (), {}
        assert verdict is not None
        return verdict

    def again(self, step: Step, value: Value) -> Verdict:
        """The verdict on one of these values, which has got a name."""
        if step.question is None:
            return value.verdict
        names = frozenset(value.names)
        if self._asks:
            return self.policy.judge(*step.question, names)
        verdict = self._named.get((step.func, names))
        if verdict is None:
            verdict = self._named[step.func, names] = self.policy.judge(*step.question, names)
        return verdict


def _asks(policy: Policy) -> bool:
    """Whether it has predicates, which want the arguments of operations."""
    return isinstance(policy, If) or any(map(_asks, policy._parts()))


def _context(result: Any) -> SelectiveCheckpointContext:
    """What torch's selective checkpoint gives a policy function; torch 2.11 knows no ``op_output``."""
    try:
        return SelectiveCheckpointContext(is_recompute=False, op_output=result)
    except TypeError:
        return SelectiveCheckpointContext(is_recompute=False)
