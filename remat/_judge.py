"""A policy at work: asked about each operation, as far as possible once for all of its calls."""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

from torch.utils.checkpoint import SelectiveCheckpointContext

from ._facts import Facts
from ._leaves import If, Names, Preset
from ._policy import Policy, Verdict

Question: TypeAlias = tuple[Any, Any, tuple, dict]  # what a policy is asked: a context, the operation, its arguments


class Judge:
    """What a policy says of the values of regions."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.by_name = policy.judges_names
        self.asks = asks(policy)
        # Verdicts on operations without names, and on those with names, filled as they are met.
        self._verdicts: dict[Facts, Verdict | None] = {}
        self._named: dict[tuple[Any, frozenset[str]], Verdict] = {}

    def verdict_for(self, facts: Facts) -> Verdict | None:
        """The verdict on all unnamed values that an operation makes, if there is one."""
        try:
            return self._verdicts[facts]
        except KeyError:
            verdict = self._verdicts[facts] = self.policy.verdict_for(facts.func)
            return verdict

    def on(self, question: Question, names: frozenset[str] = frozenset()) -> Verdict:
        """The verdict on a value with these names. Without predicates, the context and the arguments are not wanted."""
        if self.asks:
            return self.policy.judge(*question, names)
        verdict = self._named.get((question[1], names))
        if verdict is None:
            verdict = self._named[question[1], names] = self.policy.judge(*question, names)
        return verdict


def judge_of(policy: Policy) -> Judge:
    """The judge of a policy. One with predicates, which may hold tensors, may be made for one region alone."""
    return Judge(policy) if asks(policy) else _remembered(policy)


_remembered = functools.lru_cache(maxsize=256)(Judge)


def question(func: Any, args: tuple, kwargs: dict, result: Any) -> Question:
    """What predicates are asked about a call; torch 2.11 knows no ``op_output``."""
    try:
        return SelectiveCheckpointContext(is_recompute=False, op_output=result), func, args, kwargs
    except TypeError:
        return SelectiveCheckpointContext(is_recompute=False), func, args, kwargs


def is_by_name(policy: Policy) -> bool:
    """Whether it does not care for operations."""
    parts = policy._parts()
    if parts:
        return all(map(is_by_name, parts))
    return isinstance(policy, Names) or (isinstance(policy, Preset) and policy.is_constant)


def asks(policy: Policy) -> bool:
    """Whether it hangs on the arguments of operations, as predicates do."""
    return has_predicate(policy) or (isinstance(policy, Preset) and policy.asks) or any(map(asks, policy._parts()))


def has_predicate(policy: Policy) -> bool:
    """Whether a user's function is a part of it."""
    return isinstance(policy, If) or any(map(has_predicate, policy._parts()))
