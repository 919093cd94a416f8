"""Policies as values: a tree that says of every value in a region whether it may be kept, and how trees are combined.

A tree is walked in two ways: for good, when predicates are asked, and in advance, when what they would say is unknown
(``None``). What is known in advance can be cached, and shows contradictions when a policy is made.
"""

from __future__ import annotations

import enum
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.utils.checkpoint

from ._errors import PolicyError


class Verdict(enum.Enum):
    """What becomes of a value between forward and backward."""

    RECOMPUTE = "recompute"
    SAVE = "save"
    OFFLOAD = "offload"


RECOMPUTE, SAVE, OFFLOAD = Verdict.RECOMPUTE, Verdict.SAVE, Verdict.OFFLOAD
Verdicts = frozenset[Verdict]
Ask = Callable[[Callable], "Verdict | None"]  # takes a predicate


class Policy(ABC):
    """What a region may keep between its forward and its backward. The policies are made by ``remat.policies``.

    Policies are values: they compare equal by what they say, can be hashed, pickled and copied, and print as the
    expression that makes them. ``p | q`` keeps what either keeps, ``p & q`` what both keep (``q`` is asked only about
    what ``p`` keeps), and ``~p`` saves what ``p`` does not keep. Where one side would save a value and the other
    offload it, that is an error.

    Example:
        >>> import torch
        >>> from remat import policies
        >>> policies.save_matmuls | policies.save_only_these_names("q", "k*")
        policies.save_matmuls | policies.save_only_these_names('q', 'k*')
        >>> ~policies.save_attention & [torch.ops.aten.mm]
        ~policies.save_attention & policies.save_ops(torch.ops.aten.mm)
    """

    _binds = 3  # how tightly its expression holds together

    @abstractmethod
    def _evaluate(self, op: Any, names: frozenset[str], ask: Ask) -> Verdict | None:
        """The verdict on a value, or None where it hangs on a predicate for which ``ask`` has none."""

    @abstractmethod
    def _possible(self, named: bool) -> Verdicts:
        """The verdicts that values with names, or those without, may get."""

    def _parts(self) -> tuple[Policy, ...]:
        return ()

    def _patterns(self) -> Iterator[str]:
        """The patterns of names that it mentions."""
        return itertools.chain.from_iterable(part._patterns() for part in self._parts())

    def _mentioned(self) -> Iterator[Any]:
        """The operators that it mentions, at least one of each name."""
        return itertools.chain.from_iterable(part._mentioned() for part in self._parts())

    def judge(self, ctx: Any, op: Any, args: tuple, kwargs: Mapping[str, Any], names: frozenset[str]) -> Verdict:
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
        return self._evaluate(op, frozenset(), _unknown)

    @property
    def judges_names(self) -> bool:
        """Whether the names of a value may matter, also where it mentions none."""
        parts = self._parts()
        if parts:
            return any(part.judges_names for part in parts)
        return self._possible(named=True) != self._possible(named=False)

    @property
    def saves_everything(self) -> bool:
        """Whether every value is saved, for certain."""
        return self._possible(named=False) | self._possible(named=True) == {SAVE}

    @property
    def saves_nothing(self) -> bool:
        """Whether no value is ever kept."""
        return self._possible(named=False) | self._possible(named=True) == {RECOMPUTE}

    @property
    def mentioned_names(self) -> tuple[str, ...]:
        """The patterns of names that the policy mentions, in order, each once."""
        return tuple(dict.fromkeys(self._patterns()))

    def __or__(self, other: Any) -> Policy:
        return Either(self, as_policy(other))

    def __ror__(self, other: Any) -> Policy:
        return Either(as_policy(other), self)

    def __and__(self, other: Any) -> Policy:
        return Both(self, as_policy(other))

    def __rand__(self, other: Any) -> Policy:
        return Both(as_policy(other), self)

    def __invert__(self) -> Policy:
        return Opposite(self)


def as_policy(value: Any) -> Policy:
    """The policy that a user means by what is given where a policy is wanted.

    Args:
        value: a policy, None (nothing is kept), operators in a list, tuple or set, or a function with the signature
            of torch's selective checkpoint, ``(ctx, op, *args, **kwargs) -> bool | CheckpointPolicy``.

    Raises:
        PolicyError: it is none of these; the message says what was expected.

    Example:
        >>> as_policy(None)
        policies.nothing_saveable
        >>> as_policy(["aten.mm"])
        policies.save_ops(torch.ops.aten.mm)
    """
    if isinstance(value, Policy):
        return value
    from ._leaves import made_from  # which is built on this file

    return made_from(value)


def _unknown(predicate: Callable) -> None:
    return None


def _answer(predicate: Callable, ctx: Any, op: Any, args: tuple, kwargs: Mapping[str, Any]) -> Verdict:
    answer = predicate(ctx, op, *args, **kwargs)
    if isinstance(answer, bool):
        return SAVE if answer else RECOMPUTE
    if isinstance(answer, torch.utils.checkpoint.CheckpointPolicy):  # by name, for not every torch can offload
        return {"SAVE": SAVE, "RECOMPUTE": RECOMPUTE, "CPU_OFFLOAD": OFFLOAD}[answer.name.partition("_")[2]]
    raise PolicyError(
        f"A predicate must return True, False or a torch.utils.checkpoint.CheckpointPolicy; "
        f"{getattr(predicate, '__qualname__', predicate)} returned {answer!r} for {op}."
    )


# --- combinations -------------------------------------------------------------------------------------------------


class _Other:
    """An operator that no policy mentions."""

    def name(self) -> str:
        return "other::other"

    def __str__(self) -> str:
        return "any other operator"


@dataclass(frozen=True)
class _Pair(Policy):
    left: Policy
    right: Policy

    _sign: ClassVar[str]
    _remedy: ClassVar[str]

    def __post_init__(self) -> None:
        """Try the policy on what it mentions, and on what it doesn't: that raises if the sides are in conflict."""
        verdicts = (part._possible(named) for part in self._parts() for named in (False, True))
        if not {SAVE, OFFLOAD} <= set(itertools.chain.from_iterable(verdicts)):
            return
        other = _Other()
        for op in (*self._mentioned(), other):
            self.verdict_for(op)
        for name in (*(pattern.replace("*", "") for pattern in self._patterns()), "any other name"):
            self._evaluate(other, frozenset((name,)), _unknown)

    def __repr__(self) -> str:
        return f"{_within(self.left, self._binds)} {self._sign} {_within(self.right, self._binds + 1)}"

    @staticmethod
    @abstractmethod
    def _join(a: Verdict, b: Verdict) -> Verdict:
        """The verdict on a value by those of the two sides."""

    def _possible(self, named: bool) -> Verdicts:
        pairs = itertools.product(self.left._possible(named), self.right._possible(named))
        return frozenset(self._join(a, b) for a, b in pairs)

    def _parts(self) -> tuple[Policy, ...]:
        return (self.left, self.right)

    def _joined(self, a: Verdict | None, b: Verdict | None, op: Any, names: frozenset[str]) -> Verdict | None:
        if {a, b} == {SAVE, OFFLOAD}:
            saver, offloader = (self.left, self.right) if a is SAVE else (self.right, self.left)
            named = f" named {', '.join(map(repr, sorted(names)))}" if names else ""
            raise PolicyError(
                f"A value{named} made by {op} would be saved by p = {saver!r} and offloaded by q = {offloader!r}. "
                f"{self._remedy}"
            )
        return None if a is None or b is None else self._join(a, b)


class Either(_Pair):
    """What one of two policies keeps."""

    _binds = 0
    _sign = "|"
    _remedy = "To offload it, exclude it from the first: `(p & ~q) | q`."

    @staticmethod
    def _join(a: Verdict, b: Verdict) -> Verdict:
        return b if a is RECOMPUTE else a

    def _evaluate(self, op: Any, names: frozenset[str], ask: Ask) -> Verdict | None:
        return self._joined(self.left._evaluate(op, names, ask), self.right._evaluate(op, names, ask), op, names)


class Both(_Pair):
    """What both of two policies keep. The second is asked only about what the first keeps."""

    _binds = 1
    _sign = "&"
    _remedy = "To offload what both keep, write `policies.offload(p) & q`."

    @staticmethod
    def _join(a: Verdict, b: Verdict) -> Verdict:
        return RECOMPUTE if b is RECOMPUTE else a

    def _evaluate(self, op: Any, names: frozenset[str], ask: Ask) -> Verdict | None:
        first = self.left._evaluate(op, names, ask)
        if first is RECOMPUTE:
            return first
        return self._joined(first, self.right._evaluate(op, names, ask), op, names)


@dataclass(frozen=True)
class _Turned(Policy):
    policy: Policy

    _turned: ClassVar[dict[Verdict, Verdict]]

    def _parts(self) -> tuple[Policy, ...]:
        return (self.policy,)

    def _evaluate(self, op: Any, names: frozenset[str], ask: Ask) -> Verdict | None:
        verdict = self.policy._evaluate(op, names, ask)
        return None if verdict is None else self._turned[verdict]

    def _possible(self, named: bool) -> Verdicts:
        return frozenset(self._turned[verdict] for verdict in self.policy._possible(named))


class Opposite(_Turned):
    """What a policy does not keep."""

    _binds = 2
    _turned: ClassVar = {RECOMPUTE: SAVE, SAVE: RECOMPUTE, OFFLOAD: RECOMPUTE}

    def __repr__(self) -> str:
        return f"~{_within(self.policy, self._binds)}"


class Offloaded(_Turned):
    """What a policy keeps, in host memory."""

    _turned: ClassVar = {RECOMPUTE: RECOMPUTE, SAVE: OFFLOAD, OFFLOAD: OFFLOAD}

    def __repr__(self) -> str:
        return f"policies.offload({self.policy!r})"


def _within(policy: Policy, binds: int) -> str:
    return repr(policy) if policy._binds >= binds else f"({policy!r})"
