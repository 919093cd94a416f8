"""Policies: their verdicts on values, their classes, how they are combined, and conversions to them.

For a value of a region, predicates are called. In advance, when a policy is created, their verdicts are unknown: None.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeAlias, cast

from torch.utils.checkpoint import CheckpointPolicy

from .._core.amounts import parse_amount
from ..errors import PolicyError
from . import operators
from .predicates import SIGNATURE, Question, checked_predicate


class Verdict(enum.Enum):
    """What happens to a value between the forward pass and the backward pass."""

    RECOMPUTE = "recompute"
    SAVE = "save"
    OFFLOAD = "offload"


RECOMPUTE, SAVE, OFFLOAD = Verdict.RECOMPUTE, Verdict.SAVE, Verdict.OFFLOAD
Ask = Callable[[Callable[..., Any]], "Verdict | None"]  # calls a predicate, or returns None where it is unknown


def _answer(asked: Question, predicate: Callable) -> Verdict:
    """A predicate's verdict, or a PolicyError. It is called once for each operation, also if its value gets names."""
    op, answers = asked.op, asked.answers
    if id(predicate) in answers:
        return answers[id(predicate)]
    try:
        found = predicate(asked.ctx, op, *asked.args, **asked.kwargs)
    except (AttributeError, TypeError) as error:  # binary operators would hide a TypeError
        raise PolicyError(
            f"The predicate {getattr(predicate, '__qualname__', predicate)} failed for {op}: {error}. {SIGNATURE}"
        ) from error
    if isinstance(found, bool):
        verdict = SAVE if found else RECOMPUTE
    elif isinstance(found, CheckpointPolicy):  # converted by name, as older versions of torch have no offloading
        verdict = Verdict[found.name.partition("_")[2].removeprefix("CPU_")]
    else:
        raise PolicyError(
            f"A predicate must return True, False or a torch.utils.checkpoint.CheckpointPolicy; "
            f"{getattr(predicate, '__qualname__', predicate)} returned {found!r} for {op}."
        )
    return answers.setdefault(id(predicate), verdict)


class Policy(ABC):
    """Which values a region may save between its forward and its backward pass. ``remat.policies`` has all policies.

    Policies can be compared, hashed, pickled and copied. Those of ``remat.policies`` print as the expression that
    creates them. ``p | q`` saves what either policy saves, ``p & q`` what both save (``q`` judges only values that
    ``p`` saves), and ``~p`` saves what ``p`` does not save. If one side would save a value and the other would offload
    it, that is an error.

    Example:
        >>> import torch
        >>> from remat import policies
        >>> policies.save_matmuls | policies.save_only_these_names("q", "k*")
        policies.save_matmuls | policies.save_only_these_names('q', 'k*')
        >>> ~policies.save_attention & [torch.ops.aten.mm]
        ~policies.save_attention & policies.save_ops(torch.ops.aten.mm)
    """

    __match_args__: tuple[str, ...] = ()  # the names of its fields
    _binds = 3  # the precedence of its expression

    @abstractmethod
    def _evaluate(self, op: Any, names: frozenset[str], ask: Ask) -> Verdict | None:
        """Return the verdict on a value, or None where it depends on a predicate for which ``ask`` returns None."""

    def _parts(self) -> tuple[Policy, ...]:
        """Return the policies that this policy combines: fields of it, as torch 2.11 can't trace `vars`."""
        fields = [getattr(self, name) for name in self.__match_args__]
        return tuple([part for part in fields if isinstance(part, Policy)])

    def __post_init__(self) -> None:
        for part in self._parts():
            if isinstance(part, Budget):
                raise PolicyError(f"A budget can't be combined with another policy: {part!r} decides alone.")

    def judge(self, asked: Question, names: frozenset[str] = frozenset()) -> Verdict:
        """Return the verdict on a value with these names."""
        return cast(Verdict, self._evaluate(asked.op, names, partial(_answer, asked)))

    def verdict_for(self, op: Any, names: frozenset[str] = frozenset()) -> Verdict | None:
        """Return the verdict on every result of ``op`` with these names, or None where a predicate decides it."""
        return self._evaluate(op, names, lambda predicate: None)

    @cached_property
    def predicates(self) -> tuple[Callable[..., Any], ...]:
        """The functions that are called with the arguments of operations, so that runs can't be compared."""
        return tuple([predicate for part in self._parts() for predicate in part.predicates])

    @property
    def judges_names(self) -> bool:
        """Whether verdicts may depend on names, even if the policy mentions no name."""
        return any(part.judges_names for part in self._parts())

    @property
    def saves_nothing(self) -> bool:
        """Whether it is known that no value is saved or offloaded."""
        return bool(self._parts()) and all(part.saves_nothing for part in self._parts())

    @cached_property
    def mentioned_names(self) -> tuple[str, ...]:
        """The patterns of names that the policy mentions, in order, without duplicates."""
        return tuple(dict.fromkeys(name for part in self._parts() for name in part.mentioned_names))

    @property
    def mentioned_ops(self) -> Collection[Any]:
        """The operators that the policy mentions, or their names."""
        return {op for part in self._parts() for op in part.mentioned_ops}

    def __or__(self, other: PolicyLike) -> Policy:
        return Pair(self, "|", as_policy(other))

    def __ror__(self, other: PolicyLike) -> Policy:
        return Pair(as_policy(other), "|", self)

    def __and__(self, other: PolicyLike) -> Policy:
        return Pair(self, "&", as_policy(other))

    def __rand__(self, other: PolicyLike) -> Policy:
        return Pair(as_policy(other), "&", self)

    def __invert__(self) -> Policy:
        return Opposite(self)

    def __bool__(self) -> NoReturn:  # `p or q` would silently be `p`
        raise TypeError("A policy is neither true nor false. Combine: `p | q`, `p & q`, `~p`; compare with None.")


@dataclass(frozen=True)
class Ops(Policy):
    """Saves the results of operators. A name such as ``aten::mm`` means all its overloads."""

    ops: frozenset[Any]

    def __repr__(self) -> str:
        return f"policies.save_ops({', '.join(operators.expressions(self.ops))})"

    def __reduce__(self) -> Any:  # operators can't be pickled
        return as_policy, (sorted(map(operators.full_name, self.ops)),)

    def _evaluate(self, op: Any, names: frozenset[str], ask: Ask) -> Verdict:
        return SAVE if op in self.ops or operators.packet_name(op) in self.ops else RECOMPUTE

    saves_nothing = property(lambda self: not self.ops)
    mentioned_ops = property(lambda self: self.ops)


@dataclass(frozen=True)
class If(Policy):
    """Saves the values that a predicate accepts."""

    predicate: Callable[..., Any] = field(hash=False)  # a callable object may not be hashable

    predicates = property(lambda self: (self.predicate,))

    def __repr__(self) -> str:
        return f"policies.save_if({getattr(self.predicate, '__qualname__', None) or repr(self.predicate)})"

    def _evaluate(self, op: Any, names: frozenset[str], ask: Ask) -> Verdict | None:
        return ask(self.predicate)


_OTHER, _OTHER_NAME = "any other operator", "any other name"  # that no policy mentions


@dataclass(frozen=True)
class Pair(Policy):
    """Saves what either policy saves (``|``), or what both save (``&``): the second judges what the first saves."""

    left: Policy
    sign: str
    right: Policy

    _binds = property(lambda self: "|&".index(self.sign))

    def __post_init__(self) -> None:
        """Evaluate the policy for the operators and names it mentions, and for others: a conflict raises an error."""
        super().__post_init__()
        for op in (*sorted(self.mentioned_ops, key=lambda op: len(str(op))), _OTHER):
            self.verdict_for(op)
        for name in (*(pattern.replace("*", "") for pattern in self.mentioned_names), _OTHER_NAME):
            self.verdict_for(_OTHER, frozenset((name,)))

    def __repr__(self) -> str:
        return f"{_bracketed(self.left, self._binds)} {self.sign} {_bracketed(self.right, self._binds + 1)}"

    def _evaluate(self, op: Any, names: frozenset[str], ask: Ask) -> Verdict | None:
        both_must_save = self.sign == "&"
        a = self.left._evaluate(op, names, ask)
        if a is RECOMPUTE and both_must_save:
            return a
        b = self.right._evaluate(op, names, ask)
        if {a, b} == {SAVE, OFFLOAD}:
            saver, offloader = (self.left, self.right) if a is SAVE else (self.right, self.left)
            named = f" named {', '.join(map(repr, sorted(names)))}" if names and _OTHER_NAME not in names else ""
            made = "" if op is _OTHER else f" made by {op}"
            raise PolicyError(
                f"A value{named}{made} would be saved by p = {saver!r} and offloaded by q = {offloader!r}. "
                f"{_REMEDIES[self.sign]}"
            )
        if a is None or b is None:
            return None
        return b if both_must_save or a is RECOMPUTE else a


_REMEDIES = {
    "|": "To offload it, exclude it from p: `(p & ~q) | q`.",
    "&": "To offload what both save, write `policies.offload(p) & q`.",
}


@dataclass(frozen=True)
class _Turned(Policy):
    policy: Policy

    # For each verdict of the policy its own.
    _verdicts: ClassVar[Mapping[Verdict | None, Verdict]] = {each: each for each in Verdict}

    def _evaluate(self, op: Any, names: frozenset[str], ask: Ask) -> Verdict | None:
        return self._verdicts.get(self.policy._evaluate(op, names, ask))


class Opposite(_Turned):
    """Saves what a policy does not save."""

    _binds = 2
    _verdicts: ClassVar = {RECOMPUTE: SAVE, SAVE: RECOMPUTE, OFFLOAD: RECOMPUTE}
    saves_nothing = False

    def __repr__(self) -> str:
        return f"~{_bracketed(self.policy, self._binds)}"


class Offload(_Turned):
    """Saves in host memory what a policy saves."""

    _verdicts: ClassVar = {RECOMPUTE: RECOMPUTE, SAVE: OFFLOAD, OFFLOAD: OFFLOAD}

    def __repr__(self) -> str:
        return f"policies.offload({self.policy!r})"


@dataclass(frozen=True)
class Preset(_Turned):
    """A policy with a name in ``remat.policies``."""

    name: str
    doc: InitVar[str] = ""

    def __post_init__(self, doc: str) -> None:
        object.__setattr__(self, "__doc__", doc)  # for `help` of the preset itself

    def __repr__(self) -> str:
        return f"policies.{self.name}"

    def __reduce__(self) -> str:
        return self.name

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(f"{self!r} is a policy itself, without parentheses: `remat.remat(fn, policy={self!r})`.")


#: What is accepted as a policy: one of ``remat.policies``, operators in a list, tuple or set, a function as in
#: torch's selective checkpoint, or None, which saves nothing.
PolicyLike: TypeAlias = (
    Policy | list[Any] | tuple[Any, ...] | set[Any] | frozenset[Any] | Callable[..., bool | CheckpointPolicy] | None
)
Preset.__module__ = "remat.policies"  # where pickle looks up presets, by their names


def _bracketed(policy: Policy, binds: int) -> str:
    return repr(policy) if policy._binds >= binds else f"({policy!r})"


NOTHING = Preset(Ops(frozenset()), "nothing_saveable", "Saves the inputs of a region only, as ``policy=None`` does.")


def as_policy(value: Any) -> Policy:
    """Convert a `PolicyLike` to a policy. PolicyError if it is something else; the message says what was expected."""
    if isinstance(value, Policy):
        return value
    if value is None:
        return NOTHING
    if isinstance(value, (list, tuple, set, frozenset)):
        return saving(value)
    return If(checked_predicate(value))


def saving(ops: Iterable[Any], resolve: Callable[[Any], frozenset[Any]] = operators.resolve) -> Ops:
    """Return the policy that saves the results of these operators, however they are written."""
    if any(isinstance(op, Policy) for op in ops):
        raise PolicyError(f"A list can't contain policies: combine them by `p | q` or `p & q`; got {ops!r}.")
    return Ops(frozenset().union(*map(resolve, ops)))


@dataclass(frozen=True)
class Within(Policy):
    """The policy of a region inside another one, which gets what only the inner policy saves, until its run ends."""

    outer: Policy
    inner: Policy

    def _evaluate(self, op: Any, names: frozenset[str], ask: Ask) -> Verdict | None:
        verdict = self.outer._evaluate(op, names, ask)
        return self.inner._evaluate(op, names, ask) if verdict is RECOMPUTE else verdict


def effective(outer: Policy | None, policy: Policy) -> Policy:
    """Return the effective policy of a region with ``policy`` that is called inside a region with policy ``outer``."""
    if outer is None or outer == policy:
        return policy
    return outer if policy.saves_nothing else Within(outer, policy)


# The kinds of costs of a budget, with their units for tables and plots.
UNITS = {"roofline": ", us", "flops": ", FLOP", "time": ", us"}


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

    def __post_init__(self) -> None:
        self.nbytes(0)
        if not callable(self.cost) and self.cost not in UNITS:
            raise PolicyError(
                f"The cost of a budget must be one of {', '.join(map(repr, UNITS))}, or a function "
                f"`(op, args, kwargs, result)`; got {self.cost!r}."
            )

    def nbytes(self, whole: int) -> int:
        """Return how many bytes a region may save if it saves ``whole`` bytes without remat."""
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
