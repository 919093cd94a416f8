"""A policy at work: asked about each operation, as far as possible once for all of its calls."""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

from torch.utils.checkpoint import SelectiveCheckpointContext

from ._facts import Facts
from ._verdict import Rule, Verdict

Question: TypeAlias = tuple[Any, Any, tuple, dict]  # what a policy is asked: a context, the operation, its arguments


class Judge:
    """What a policy says of the values of regions."""

    def __init__(self, policy: Rule) -> None:
        self.policy = policy
        self.by_name = policy.judges_names
        self.asks = policy.asks
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


def judge_of(policy: Rule) -> Judge:
    """The judge of a policy. One with predicates, which may hold tensors, may be made for one region alone."""
    return Judge(policy) if policy.asks else _remembered(policy)


_remembered = functools.lru_cache(maxsize=256)(Judge)


def question(func: Any, args: tuple, kwargs: dict, result: Any) -> Question:
    """What predicates are asked about a call; torch 2.11 knows no ``op_output``."""
    try:
        return SelectiveCheckpointContext(is_recompute=False, op_output=result), func, args, kwargs
    except TypeError:
        return SelectiveCheckpointContext(is_recompute=False), func, args, kwargs
