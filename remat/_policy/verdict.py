"""Verdicts (a value is recomputed, saved or offloaded) and rules, which return verdicts on values.

A rule is evaluated in two ways. For a value of a region, predicates are called. In advance, the verdicts of predicates
are unknown (``None``). Verdicts known in advance can be cached, and reveal contradictions when a policy is created.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy

from ..errors import PolicyError


class Verdict(enum.Enum):
    """What happens to a value between the forward pass and the backward pass."""

    RECOMPUTE = "recompute"
    SAVE = "save"
    OFFLOAD = "offload"


RECOMPUTE, SAVE, OFFLOAD = Verdict.RECOMPUTE, Verdict.SAVE, Verdict.OFFLOAD
Verdicts = frozenset[Verdict]
Ask = Callable[[Callable[..., Any]], "Verdict | None"]  # calls a predicate, or returns None where it is unknown


class Rule(ABC):
    """The base class of policies: it returns a verdict on every value, and what is certain about all values."""

    is_budget = False  # whether a first run, when it ends, chooses the saved steps for later runs of the same program

    @abstractmethod
    def _evaluate(self, op: Any, names: frozenset[str], ask: Ask) -> Verdict | None:
        """Return the verdict on a value, or None where it depends on a predicate for which ``ask`` returns None."""

    @abstractmethod
    def _possible(self, named: bool) -> Verdicts:
        """Return the verdicts that named values, or unnamed values, may get."""

    def _parts(self) -> tuple[Rule, ...]:
        """Return the rules that this rule combines."""
        return ()

    def judge(
        self, ctx: Any, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: frozenset[str]
    ) -> Verdict:
        """Return the verdict on a value.

        Args:
            ctx: the context for predicates.
            op: the operator that computed the value, an ``OpOverload`` or a ``HigherOrderOperator``.
            args: the operator's positional arguments.
            kwargs: the operator's keyword arguments.
            names: the names that ``checkpoint_name`` has given to the value so far.

        Raises:
            PolicyError: the value would be both saved and offloaded, or a predicate returned an invalid answer.
        """
        verdict = self._evaluate(op, names, lambda predicate: _answer(predicate, ctx, op, args, kwargs))
        assert verdict is not None
        return verdict

    def verdict_for(self, op: Any) -> Verdict | None:
        """Return the verdict on every unnamed result of ``op``, or None where a predicate decides in each call."""
        return self._evaluate(op, frozenset(), unknown)

    @cached_property
    def asks(self) -> bool:
        """Whether predicates must be called with the arguments of each operation."""
        return any(part.asks for part in self._parts())

    @property
    def has_predicate(self) -> bool:
        """Whether the rule contains a user's function."""
        return any(part.has_predicate for part in self._parts())

    @property
    def ignores_operators(self) -> bool:
        """Whether verdicts don't depend on operators."""
        return all(part.ignores_operators for part in self._parts())

    @property
    def judges_names(self) -> bool:
        """Whether verdicts may depend on names, even if the rule mentions no name."""
        return any(part.judges_names for part in self._parts())

    @property
    def saves_everything(self) -> bool:
        """Whether every value is certainly saved."""
        return self._possible(named=False) | self._possible(named=True) == {SAVE}

    @cached_property
    def saves_nothing(self) -> bool:
        """Whether no value is ever saved or offloaded."""
        return self._possible(named=False) | self._possible(named=True) == {RECOMPUTE}

    @property
    def mentioned_names(self) -> tuple[str, ...]:
        """The patterns of names that the rule mentions, in order, without duplicates."""
        return tuple(dict.fromkeys(name for part in self._parts() for name in part.mentioned_names))

    @property
    def mentioned_ops(self) -> Collection[Any]:
        """The operators that the rule mentions, or their names."""
        return {op for part in self._parts() for op in part.mentioned_ops}


def unknown(predicate: Callable) -> None:
    """Return None, the verdict of any predicate in advance."""
    return None


def _answer(predicate: Callable, ctx: Any, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Verdict:
    """Call a predicate, which returns a bool or a ``CheckpointPolicy``, and return its verdict.

    Raises:
        PolicyError: the predicate returns something else.
    """
    found = predicate(ctx, op, *args, **kwargs)
    if isinstance(found, bool):
        return Verdict.SAVE if found else Verdict.RECOMPUTE
    if isinstance(found, CheckpointPolicy):  # converted by name, as older versions of torch have no offloading
        return Verdict[found.name.partition("_")[2].removeprefix("CPU_")]
    raise PolicyError(
        f"A predicate must return True, False or a torch.utils.checkpoint.CheckpointPolicy; "
        f"{getattr(predicate, '__qualname__', predicate)} returned {found!r} for {op}."
    )
