"""Policies as values: what they are made of, how they are combined, and what users may give for one."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

from torch.utils.checkpoint import CheckpointPolicy

from ..errors import PolicyError
from . import operators
from .predicates import checked_predicate
from .verdict import OFFLOAD, RECOMPUTE, SAVE, Ask, Rule, Verdict, Verdicts, unknown


class Policy(Rule):
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

    def __or__(self, other: PolicyLike) -> Policy:
        return Either(self, as_policy(other))

    def __ror__(self, other: PolicyLike) -> Policy:
        return Either(as_policy(other), self)

    def __and__(self, other: PolicyLike) -> Policy:
        return Both(self, as_policy(other))

    def __rand__(self, other: PolicyLike) -> Policy:
        return Both(as_policy(other), self)

    def __invert__(self) -> Policy:
        return Opposite(self)


# --- leaves; those of names are in `names.py` ---------------------------------------------------------------------


@dataclass(frozen=True)
class Ops(Policy):
    """What some operators make, or all overloads of a name such as ``aten::mm``."""

    ops: frozenset[Any]

    def __repr__(self) -> str:
        return f"policies.save_ops({', '.join(operators.expressions(self.ops))})"

    def __reduce__(self) -> Any:  # operators can't be pickled
        return as_policy, (sorted(map(operators.full_name, self.ops)),)

    def _evaluate(self, op: Any, names: frozenset[str], ask: Ask) -> Verdict:
        return SAVE if op in self.ops or operators.packet_name(op) in self.ops else RECOMPUTE

    def _possible(self, named: bool) -> Verdicts:
        return frozenset((SAVE, RECOMPUTE) if self.ops else (RECOMPUTE,))

    ignores_operators = property(lambda self: not self.ops)
    mentioned_ops = property(lambda self: self.ops)


@dataclass(frozen=True)
class If(Policy):
    """What a predicate says."""

    predicate: Callable[..., Any] = field(hash=False)  # an object that is called needn't have one

    asks = has_predicate = True
    ignores_operators = False

    def __repr__(self) -> str:
        return f"policies.save_if({getattr(self.predicate, '__qualname__', None) or repr(self.predicate)})"

    def _evaluate(self, op: Any, names: frozenset[str], ask: Ask) -> Verdict | None:
        return ask(self.predicate)

    def _possible(self, named: bool) -> Verdicts:
        return frozenset((RECOMPUTE, SAVE, OFFLOAD))


# --- trees --------------------------------------------------------------------------------------------------------

_OTHER = "any other operator"  # one that no policy mentions


@dataclass(frozen=True)
class _Pair(Policy):
    left: Policy
    right: Policy

    _sign: ClassVar[str]
    _remedy: ClassVar[str]

    def __post_init__(self) -> None:
        """Try the policy on what it mentions, and on what it doesn't: that raises if the sides are in conflict."""
        _check_parts(self)
        for op in (*self.mentioned_ops, _OTHER):
            self.verdict_for(op)
        for name in (*(pattern.replace("*", "") for pattern in self.mentioned_names), "any other name"):
            self._evaluate(_OTHER, frozenset((name,)), unknown)

    def __repr__(self) -> str:
        return f"{_bracketed(self.left, self._binds)} {self._sign} {_bracketed(self.right, self._binds + 1)}"

    @staticmethod
    @abstractmethod
    def _join(a: Verdict, b: Verdict) -> Verdict:
        """The verdict on a value by those of the two sides."""

    def _possible(self, named: bool) -> Verdicts:
        pairs = itertools.product(self.left._possible(named), self.right._possible(named))
        return frozenset(self._join(a, b) for a, b in pairs)  # as torch 2.11 can trace it

    def _parts(self) -> tuple[Policy, ...]:
        return (self.left, self.right)

    def _evaluate(self, op: Any, names: frozenset[str], ask: Ask) -> Verdict | None:
        a = self.left._evaluate(op, names, ask)
        if a is RECOMPUTE and self._join(a, SAVE) is a:  # whatever the other one says
            return a
        b = self.right._evaluate(op, names, ask)
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


class Both(_Pair):
    """What both of two policies keep. The second is asked only about what the first keeps."""

    _binds = 1
    _sign = "&"
    _remedy = "To offload what both keep, write `policies.offload(p) & q`."

    @staticmethod
    def _join(a: Verdict, b: Verdict) -> Verdict:
        return b if b is RECOMPUTE else a


@dataclass(frozen=True)
class _Turned(Policy):
    policy: Policy

    @staticmethod
    @abstractmethod
    def _turn(verdict: Verdict) -> Verdict: ...

    def __post_init__(self) -> None:
        _check_parts(self)

    def _parts(self) -> tuple[Policy, ...]:
        return (self.policy,)

    def _evaluate(self, op: Any, names: frozenset[str], ask: Ask) -> Verdict | None:
        verdict = self.policy._evaluate(op, names, ask)
        return None if verdict is None else self._turn(verdict)

    def _possible(self, named: bool) -> Verdicts:
        return frozenset(map(self._turn, self.policy._possible(named)))


class Opposite(_Turned):
    """What a policy does not keep."""

    _binds = 2

    @staticmethod
    def _turn(verdict: Verdict) -> Verdict:
        return SAVE if verdict is RECOMPUTE else RECOMPUTE

    def __repr__(self) -> str:
        return f"~{_bracketed(self.policy, self._binds)}"


class Offload(_Turned):
    """What a policy keeps, in host memory."""

    @staticmethod
    def _turn(verdict: Verdict) -> Verdict:
        return RECOMPUTE if verdict is RECOMPUTE else OFFLOAD

    def __repr__(self) -> str:
        return f"policies.offload({self.policy!r})"


@dataclass(frozen=True)
class Preset(_Turned):
    """What a policy keeps, under the name that it has in ``remat.policies``."""

    name: str

    has_predicate = False  # of a user

    @staticmethod
    def _turn(verdict: Verdict) -> Verdict:
        return verdict

    def __repr__(self) -> str:
        return f"policies.{self.name}"

    def __reduce__(self) -> str:
        return self.name


#: What is accepted as a policy, namely one of ``remat.policies``, operators in a list, a tuple or a set, a function as
#: torch's selective checkpoint takes it, or None, which saves nothing.
PolicyLike: TypeAlias = (
    "Policy | list[Any] | tuple[Any, ...] | set[Any] | frozenset[Any] | Callable[..., bool | CheckpointPolicy] | None"
)
Preset.__module__ = "remat.policies"  # where pickle finds them, by their names as it finds functions


def _check_parts(policy: Policy) -> None:
    for part in policy._parts():
        if part.by_step:
            raise PolicyError(f"A budget decides alone what is kept: {part!r} can't be a part of another policy.")


def _bracketed(policy: Policy, binds: int) -> str:
    return repr(policy) if policy._binds >= binds else f"({policy!r})"


# --- what users give ----------------------------------------------------------------------------------------------

NOTHING = Preset(Ops(frozenset()), "nothing_saveable")


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
    if value is None:
        return NOTHING
    if isinstance(value, (list, tuple, set, frozenset)):
        return saving(value)
    return If(checked_predicate(value))


def saving(ops: Iterable[Any], resolve: Callable[[Any], frozenset[Any]] = operators.resolve) -> Ops:
    """The policy that saves what these operators make, in whichever way they are written."""
    if any(isinstance(op, Policy) for op in ops):
        raise PolicyError(f"Policies are put together by `p | q` and `p & q`, not in a list: {ops!r}.")
    return Ops(frozenset().union(*map(resolve, ops)))
