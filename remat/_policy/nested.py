"""Policies of nested regions: a nested region may save what the outer policy or its own policy saves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .policy import Policy
from .verdict import RECOMPUTE, Ask, Verdict, Verdicts


@dataclass(frozen=True)
class Within(Policy):
    """The policy of a region inside another region with a policy.

    A value that only the inner policy saves is handed to the outer region, which releases it when its run ends.
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
    """Return the effective policy of a region with ``policy`` that is called inside a region with policy ``outer``."""
    if outer is None or outer == policy:
        return policy
    return outer if policy.saves_nothing else Within(outer, policy)
