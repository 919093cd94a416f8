"""The policies that trees are made of, and what is made into one where a user gives something else."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch.utils.checkpoint

from . import _ops, _torch
from ._errors import PolicyError
from ._names import is_named
from ._policy import OFFLOAD, RECOMPUTE, SAVE, Ask, Policy, Verdict, Verdicts


@dataclass(frozen=True)
class Preset(Policy):
    """A constant of ``remat.policies``, by its name there: everything, nothing, or a group of operators."""

    name: str

    def __repr__(self) -> str:
        return f"policies.{self.name}"

    def __reduce__(self) -> Any:
        return preset, (self.name,)

    @property
    def is_constant(self) -> bool:
        """Whether it says the same of all values."""
        return self.name in _CONSTANTS

    def _evaluate(self, op: Any, names: frozenset[str], ask: Ask) -> Verdict | None:
        if self.is_constant:
            return _CONSTANTS[self.name]
        if self.asks and _ops.packet_name(op) == "aten::bmm":
            return ask(_is_unbatched_einsum)
        return SAVE if _ops.packet_name(op) in _ops.GROUPS[self.name] else RECOMPUTE

    @property
    def asks(self) -> bool:
        """Whether the arguments of operations matter, as they do to predicates."""
        return self.name == "save_matmuls_without_batch_dims"

    def _possible(self, named: bool) -> Verdicts:
        return frozenset((_CONSTANTS[self.name],) if self.is_constant else (SAVE, RECOMPUTE))

    def _mentioned(self) -> Iterator[Any]:
        return _ops.members(_ops.GROUPS.get(self.name, frozenset()))


def _is_unbatched_einsum(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether a ``bmm`` is how ``torch.einsum`` computes a product of two matrices: with a batch dimension of size 1.

    Its arguments are as those of a user's own ``bmm``. Only the Python function that called it tells them apart.
    """
    if not args or args[0].shape[0] != 1:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not torch.functional.einsum.__code__:
        frame = frame.f_back
    return frame is not None


_CONSTANTS = {"nothing_saveable": RECOMPUTE, "everything_saveable": SAVE}


@functools.cache
def preset(name: str) -> Preset:
    """The one preset of that name, also when it comes out of a pickle or a copy."""
    return Preset(name)


@dataclass(frozen=True)
class Ops(Policy):
    """What some operators make."""

    ops: frozenset[Any]

    def __repr__(self) -> str:
        return f"policies.save_ops({', '.join(_ops.expressions(self.ops))})"

    def __reduce__(self) -> Any:  # operators can't be pickled
        return _ops_named, tuple(sorted(map(_ops.text, self.ops)))

    def _evaluate(self, op: Any, names: frozenset[str], ask: Ask) -> Verdict:
        return SAVE if op in self.ops else RECOMPUTE

    def _possible(self, named: bool) -> Verdicts:
        return frozenset((SAVE, RECOMPUTE) if self.ops else (RECOMPUTE,))

    def _mentioned(self) -> Iterator[Any]:
        return iter(self.ops)


def _ops_named(*names: str) -> Ops:
    return Ops(frozenset(map(_ops.find, names)))


@dataclass(frozen=True)
class Names(Policy):
    """Values by their names: how unnamed ones, those with a name that matches, and the other named ones fare."""

    kind: str
    patterns: tuple[str, ...] = field(compare=False)
    key: frozenset[str] = field(init=False)  # their order is for reading only

    def __post_init__(self) -> None:
        for pattern in self.patterns:
            if not isinstance(pattern, str) or not pattern:
                raise PolicyError(
                    f"policies.{self.kind} takes names, which are strings that aren't empty, as in "
                    f"`policies.{self.kind}('q', 'k*')`; got {pattern!r}."
                )
        object.__setattr__(self, "key", frozenset(self.patterns))

    def __repr__(self) -> str:
        return f"policies.{self.kind}({', '.join(map(repr, self.patterns))})"

    def _evaluate(self, op: Any, names: frozenset[str], ask: Ask) -> Verdict:
        unnamed, matched, unmatched = _KINDS[self.kind]
        if not names:
            return unnamed
        return matched if any(is_named(name, pattern) for pattern in self.patterns for name in names) else unmatched

    def _possible(self, named: bool) -> Verdicts:
        unnamed, matched, unmatched = _KINDS[self.kind]
        if not named:
            return frozenset((unnamed,))
        return frozenset((matched,) * bool(self.patterns) + (unmatched,) * ("*" not in self.patterns))

    def _patterns(self) -> Iterator[str]:
        return iter(self.patterns)


_KINDS = {
    "save_only_these_names": (RECOMPUTE, SAVE, RECOMPUTE),
    "save_any_names_but_these": (RECOMPUTE, RECOMPUTE, SAVE),
    "save_anything_except_these_names": (SAVE, RECOMPUTE, SAVE),
}


@dataclass(frozen=True)
class If(Policy):
    """What a predicate says."""

    predicate: Callable = field(hash=False)  # an object that is called needn't have one

    def __repr__(self) -> str:
        return f"policies.save_if({getattr(self.predicate, '__qualname__', None) or repr(self.predicate)})"

    def _evaluate(self, op: Any, names: frozenset[str], ask: Ask) -> Verdict | None:
        return ask(self.predicate)

    def _possible(self, named: bool) -> Verdicts:
        return frozenset((RECOMPUTE, SAVE, OFFLOAD))


# --- what users give ----------------------------------------------------------------------------------------------

_EXPECTED = (
    "A policy is one of remat.policies (such as `policies.save_matmuls` or `policies.save_only_these_names('q')`), a "
    "list of operators, or a function `(ctx, op, *args, **kwargs)` that returns a bool or a "
    "torch.utils.checkpoint.CheckpointPolicy"
)
_OPERATORS = (_torch.OpOverload, _torch.OpOverloadPacket, _torch.HigherOrderOperator)


def made_from(value: Any) -> Policy:
    """What ``as_policy`` makes of anything but a policy."""
    if value is None:
        return preset("nothing_saveable")
    if isinstance(value, (list, tuple, set, frozenset)):
        return made_from_ops(value)
    if callable(value) and not isinstance(value, type):
        return made_from_predicate(value)
    raise PolicyError(f"{_EXPECTED}; got {value!r}.{_nearest(value) if isinstance(value, str) else ''}")


def made_from_ops(ops: Any, resolve: Callable = _ops.resolve) -> Ops:
    """The policy that saves what these operators make, in whichever way they are written."""
    for op in ops:
        if isinstance(op, Policy):
            raise PolicyError(f"Policies are put together by `p | q` and `p & q`, not in a list: {ops!r}.")
    return Ops(frozenset().union(*map(resolve, ops)))


def made_from_predicate(value: Any) -> If:
    """The policy of a predicate, if it can be one."""
    function = getattr(value, "func", value)  # of a partial
    if isinstance(_torch.overload_of(value), _OPERATORS):
        raise PolicyError(f"{_EXPECTED}. For one operator write `policies.save_ops(...)`; got {value!r}.")
    for name, constructor in _public().items():
        if function is constructor:
            raise PolicyError(f"policies.{name} makes policies: call it, as in `policies.{name}(...)`.")
    if function is torch.utils.checkpoint.create_selective_checkpoint_contexts:
        raise PolicyError(f"{_EXPECTED}; give the function or list itself, without {function.__name__}.")
    if (getattr(value, "__module__", None) or "").partition(".")[0] == "jax":
        raise PolicyError(f"{_EXPECTED}; got JAX's {value!r}.{_nearest(getattr(value, '__name__', ''))}")
    if not callable(value) or isinstance(value, (type, torch.nn.Module)):
        raise PolicyError(f"{_EXPECTED}; got {value!r}.")
    if not _takes_operators(value):
        raise PolicyError(f"{_EXPECTED}; {value!r} can't be called with these arguments.")
    return If(value)


def _takes_operators(function: Callable) -> bool:
    """Whether a function can be called with a context, an operator and any number of arguments of that."""
    try:
        inspect.signature(function).bind(*range(9))
    except ValueError:  # written in C
        return not _ops.operator_like(function)
    except TypeError:
        return False
    return True


def _public() -> dict[str, Any]:
    from . import policies  # which is built on this file

    return {name: getattr(policies, name) for name in policies.__all__}


def _nearest(text: str) -> str:
    wanted, public = text.rpartition(".")[2].strip().lower().replace("-", "_"), _public()
    near = [wanted] if wanted in public else difflib.get_close_matches(wanted, public, n=3, cutoff=0.6)
    if wanted not in public and len(wanted) > 2:
        within = sorted((name for name in public if wanted in name), key=lambda name: (name.find(wanted), len(name)))
        near = list(dict.fromkeys(within + near))[:3]
    shown = [f"policies.{name}" + ("" if isinstance(public[name], Policy) else "(...)") for name in near]
    return f" Did you mean {' or '.join(shown)}?" if shown else ""
