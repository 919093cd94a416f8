"""The evaluation of a policy for each operation, cached across calls where the policy has no predicates."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, TypeAlias

from torch.utils.checkpoint import SelectiveCheckpointContext

from .._core.facts import Facts
from .policy import Policy, Verdict

Question: TypeAlias = tuple[Any, Any, tuple, dict]  # a predicate's arguments: context, operator, args, kwargs


class Judge:
    """A policy together with a cache of its verdicts."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.judges_names = policy.judges_names
        self.asks = policy.asks
        # The verdict on every unnamed value that an operator makes, or None if a predicate decides each time.
        self.verdict_for: Callable[[Facts], Verdict | None] = cache(lambda facts: policy.verdict_for(facts.func))


def judge_of(policy: Policy) -> Judge:
    """Return the judge of a policy. It is not cached for predicates, as these may hold references to tensors."""
    return Judge(policy) if policy.asks else _remembered(policy)


_remembered = lru_cache(maxsize=256)(Judge)


def question(func: Any, args: tuple, kwargs: dict, result: Any) -> Question:
    """Return the arguments for predicates about a call. In torch 2.11 the context has no ``op_output``."""
    try:
        return SelectiveCheckpointContext(is_recompute=False, op_output=result), func, args, kwargs
    except TypeError:
        return SelectiveCheckpointContext(is_recompute=False), func, args, kwargs
