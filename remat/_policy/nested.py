"""Policies of nested regions: what the outer policy keeps is kept, and beyond that what the inner one keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .policy import Policy
from .verdict import RECOMPUTE, Ask, Verdict, Verdicts


@dataclass(frozen=True)
class Within(Policy):
    """The policy of a region inside of others.

    What the inner policy alone lets be kept is handed to the outer region, which keeps it no longer than its own run.
    """

    outer: Policy
    inner: Policy

    def _evaluate(self, op: Any, names: frozenset[str], ask: Ask) -> Verdict | None:
        verdict = self.outer._evaluate(op, names, ask)
        return self.inner._evaluate(op, names, ask) if verdict is RECOMPUTE else verdict

    def _possible(self, named: bool) -> Verdicts:
        return self.outer._possible(named) | self.inner._possible(named)

    def _parts(self) -> tuple[Policy, ...]:
        return self.outer, self.inner


def within(outer: Policy | None, policy: Policy) -> Policy:
    """The policy of a region with this one that is called inside of one with the policy ``outer``."""
    if outer is None or outer == policy:
        return policy
    return outer if policy.saves_nothing else Within(outer, policy)
