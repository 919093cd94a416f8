"""What a policy decides about the operations and the names of one first run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .._core.facts import Facts
from .._core.lines import Line
from .._policy.policy import Policy, Verdict
from .._policy.predicates import Question, question
from .._policy.warnings import Warned
from .program import Step
from .values import UNDESCRIBED


def is_judged(result: Any, facts: Facts) -> bool:
    """Whether the policy decides about a result: not if it can't be described, or is uninitialized memory."""
    return result is not UNDESCRIBED and not facts.makes_nothing


class Verdicts:
    """The decisions of a policy in one first run."""

    def __init__(self, policy: Policy, own: Policy, warned: Warned) -> None:
        self.policy = policy
        self.own, self.warned = own, warned  # the region's own policy, without those of enclosing regions
        self.judges_names = policy.judges_names
        self.names: dict[int, dict[str, Line]] = {}  # the names of each value
        self.given: dict[str, Line] = {}  # all names that were given in the region
        self.around: list[Facts] = []  # operations on wrapper subclasses that are executing the current operation
        self._questions: dict[int, Question] = {}  # arguments for predicates, if they are called again with names

    def on_operation(self, made: Iterable[int], facts: Facts, args: tuple, kwargs: dict, result: Any) -> Verdict | None:
        """Return the verdict on an operation whose results these steps have made, or None if they are recomputed."""
        if facts in self.around:
            return None
        asked: Question = question(facts.func, args, kwargs, result) if self.policy.asks else (None, facts.func, (), {})
        if self.judges_names:
            self._questions.update(dict.fromkeys(made, asked))
        verdict = self.policy.verdict_for(facts.func) or self.policy.judge(*asked, frozenset())
        return None if verdict is Verdict.RECOMPUTE else verdict

    def on_name(self, value: int, number: int, step: Step, name: str, line: Line) -> Verdict | None:
        """Return the verdict on a value that got a name, or None if its names don't change the verdict."""
        names = self.names.setdefault(value, {})
        names.setdefault(name, line)
        if not (self.judges_names and is_judged(step.result, step.facts)):
            return None
        asked: Question = self._questions.get(number, (None, step.facts.func, (), {}))
        return self.policy.judge(*asked, frozenset(names))

    def release(self) -> None:
        """Drop the references to tensors."""
        self._questions.clear()
