"""A budget as a policy: how many bytes a region may save, instead of which values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .._core.amounts import parse_amount
from ..errors import PolicyError
from .policy import Policy
from .verdict import RECOMPUTE, SAVE, Ask, Verdict, Verdicts

COSTS = ("roofline", "flops", "time")


class Chosen(NamedTuple):
    """A choice made earlier: the names of its program's operators, and the steps whose results are saved."""

    operators: tuple[str, ...]
    steps: frozenset[int]


@dataclass(frozen=True)
class Budget(Policy):
    """The policy that saves at most ``amount``, chosen to minimize the recompute. It can't be combined with others."""

    amount: int | str | float
    cost: str | Callable = "roofline"
    chosen: Chosen | None = None

    is_budget = True
    ignores_operators = True

    def __post_init__(self) -> None:
        self.nbytes(0)
        if not callable(self.cost) and self.cost not in COSTS:
            raise PolicyError(
                f"The cost of a budget must be one of {', '.join(map(repr, COSTS))}, or a function "
                f"`(op, args, kwargs, result)`; got {self.cost!r}."
            )

    def nbytes(self, whole: int) -> int:
        """Return how many bytes a region may save if it saves ``whole`` bytes without remat.

        Raises:
            PolicyError: the amount is invalid.
        """
        try:
            return parse_amount(self.amount, whole, "The amount of a budget")
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
