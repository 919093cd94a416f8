"""A policy at work: asked about each operation, as far as possible once for all of its calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, TypeAlias

from torch.utils.checkpoint import SelectiveCheckpointContext

from .._core.facts import Facts
from .verdict import Rule, Verdict

Question: TypeAlias = tuple[Any, Any, tuple, dict]  # what a policy is asked: a context, the operation, its arguments


class Judge:
    """What a policy says of the values of regions."""

    def __init__(self, policy: Rule) -> None:
        self.policy = policy
        self.judges_names = policy.judges_names
        self.asks = policy.asks
        # The verdict on all unnamed values that an operation makes, if there is one; and on values with names.
        self.verdict_for: Callable[[Facts], Verdict | None] = cache(lambda facts: policy.verdict_for(facts.func))
        self._named: Callable[[Any, frozenset[str]], Verdict]
        self._named = cache(lambda op, names: policy.judge(None, op, (), {}, names))

    def on(self, question: Question, names: frozenset[str] = frozenset()) -> Verdict:
        """The verdict on a value with these names. Without predicates, the context and the arguments are not wanted."""
        if self.asks:
            return self.policy.judge(*question, names)
        return self._named(question[1], names)


def judge_of(policy: Rule) -> Judge:
    """The judge of a policy. One with predicates, which may hold tensors, may be made for one region alone."""
    return Judge(policy) if policy.asks else _remembered(policy)


_remembered = lru_cache(maxsize=256)(Judge)


def question(func: Any, args: tuple, kwargs: dict, result: Any) -> Question:
    """What predicates are asked about a call; torch 2.11 knows no ``op_output``."""
    try:
        return SelectiveCheckpointContext(is_recompute=False, op_output=result), func, args, kwargs
    except TypeError:
        return SelectiveCheckpointContext(is_recompute=False), func, args, kwargs
