"""Verdicts: what becomes of a value between forward and backward, by which rule, and by a user's predicate.

A rule is evaluated in two ways: for good, when predicates are asked, and in advance, when what they would say is
unknown (``None``). What is known in advance can be cached, and shows contradictions when a policy is made.
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
    """What becomes of a value between forward and backward."""

    RECOMPUTE = "recompute"
    SAVE = "save"
    OFFLOAD = "offload"


RECOMPUTE, SAVE, OFFLOAD = Verdict.RECOMPUTE, Verdict.SAVE, Verdict.OFFLOAD
Verdicts = frozenset[Verdict]
Ask = Callable[[Callable[..., Any]], "Verdict | None"]  # takes a predicate


class Rule(ABC):
    """What says of every value in a region whether it may be kept, and what is certain of all values."""

    @abstractmethod
    def _evaluate(self, op: Any, names: frozenset[str], ask: Ask) -> Verdict | None:
        """The verdict on a value, or None where it hangs on a predicate for which ``ask`` has none."""

    @abstractmethod
    def _possible(self, named: bool) -> Verdicts:
        """The verdicts that values with names, or those without, may get."""

    def _parts(self) -> tuple[Rule, ...]:
        """The rules that it is made of."""
        return ()

    def judge(
        self, ctx: Any, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: frozenset[str]
    ) -> Verdict:
        """The verdict on a value.

        Args:
            ctx: passed on to predicates.
            op: the operator that made it, an ``OpOverload`` or a ``HigherOrderOperator``.
            args: the positional arguments of that.
            kwargs: its keyword arguments.
            names: the names that the value was given with ``checkpoint_name`` so far.

        Raises:
            PolicyError: the value would be both saved and offloaded, or a predicate gave an answer that is none.
        """
        verdict = self._evaluate(op, names, lambda predicate: _answer(predicate, ctx, op, args, kwargs))
        assert verdict is not None
        return verdict

    def verdict_for(self, op: Any) -> Verdict | None:
        """The verdict on every unnamed value that ``op`` makes, or None where a predicate must be asked each time."""
        return self._evaluate(op, frozenset(), unknown)

    @cached_property
    def asks(self) -> bool:
        """Whether the arguments of operations matter, which predicates are asked about."""
        return any(part.asks for part in self._parts())

    @property
    def has_predicate(self) -> bool:
        """Whether a user's function is a part of it."""
        return any(part.has_predicate for part in self._parts())

    @property
    def ignores_operators(self) -> bool:
        """Whether operators don't matter."""
        return all(part.ignores_operators for part in self._parts())

    @property
    def judges_names(self) -> bool:
        """Whether the names of a value may matter, also where it mentions none."""
        return any(part.judges_names for part in self._parts())

    @property
    def saves_everything(self) -> bool:
        """Whether every value is saved, for certain."""
        return self._possible(named=False) | self._possible(named=True) == {SAVE}

    @cached_property
    def saves_nothing(self) -> bool:
        """Whether no value is ever kept."""
        return self._possible(named=False) | self._possible(named=True) == {RECOMPUTE}

    @property
    def mentioned_names(self) -> tuple[str, ...]:
        """The patterns of names that it mentions, in order, each once."""
        return tuple(dict.fromkeys(name for part in self._parts() for name in part.mentioned_names))

    @property
    def mentioned_ops(self) -> Collection[Any]:
        """The operators that it mentions, or their names."""
        return {op for part in self._parts() for op in part.mentioned_ops}


def unknown(predicate: Callable) -> None:
    """The verdict of a predicate before it is asked."""
    return None


def _answer(predicate: Callable, ctx: Any, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Verdict:
    """The verdict of a predicate, which returns a bool or one of torch's policies.

    Raises:
        PolicyError: it returns something else.
    """
    found = predicate(ctx, op, *args, **kwargs)
    if isinstance(found, bool):
        return Verdict.SAVE if found else Verdict.RECOMPUTE
    if isinstance(found, CheckpointPolicy):  # by name, for not every torch can offload
        return Verdict[found.name.partition("_")[2].removeprefix("CPU_")]
    raise PolicyError(
        f"A predicate must return True, False or a torch.utils.checkpoint.CheckpointPolicy; "
        f"{getattr(predicate, '__qualname__', predicate)} returned {found!r} for {op}."
    )
