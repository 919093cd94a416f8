"""A budget as a policy: how much memory a region may keep, in place of what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .._core.amounts import as_bytes
from ..errors import PolicyError
from .policy import Policy
from .verdict import RECOMPUTE, SAVE, Ask, Verdict, Verdicts

COSTS = ("roofline", "flops", "time")


class Chosen(NamedTuple):
    """A choice that was made before: the operators of its program, by their names, and the steps to keep."""

    operators: tuple[str, ...]
    steps: frozenset[int]


@dataclass(frozen=True)
class Budget(Policy):
    """So many bytes may be kept, of whatever saves the most recomputation. It decides alone."""

    amount: int | str | float
    cost: str | Callable = "roofline"
    chosen: Chosen | None = None

    by_step = True
    ignores_operators = True

    def __post_init__(self) -> None:
        self.nbytes(0)
        if not callable(self.cost) and self.cost not in COSTS:
            raise PolicyError(
                f"The cost of a budget is one of {', '.join(map(repr, COSTS))}, or a function of an operator, its "
                f"arguments, its keyword arguments and its result; got {self.cost!r}."
            )

    def nbytes(self, whole: int) -> int:
        """The bytes that may be kept of a region that keeps so many without remat.

        Raises:
            PolicyError: the amount is none.
        """
        try:
            return as_bytes(self.amount, whole, "The amount of a budget")
        except (TypeError, ValueError) as error:
            raise PolicyError(str(error)) from None

    def __repr__(self) -> str:
        cost = "" if self.cost == "roofline" else f", cost={self.cost!r}"
        chosen = "" if self.chosen is None else f" as chosen for {len(self.chosen.operators)} operations"
        return f"policies.budget({self.amount!r}{cost}){chosen}"

    def _evaluate(self, op: Any, names: frozenset[str], ask: Ask) -> Verdict | None:
        return None

    def _possible(self, named: bool) -> Verdicts:
        return frozenset((SAVE, RECOMPUTE))
