"""Functions as policies: what they are called with, and the error messages for what can't be a policy."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Sequence
from inspect import isfunction
from typing import Any, NamedTuple

import torch.utils.checkpoint
from torch.utils.checkpoint import SelectiveCheckpointContext

from .._core import private
from .._core.signatures import accepts
from ..errors import PolicyError, shown
from . import operators

_EXPECTED = (
    "A policy is one of remat.policies (such as `policies.save_matmuls` or `policies.save_only_these_names('q')`), a "
    "list of operators, or a function `(ctx, op, *args, **kwargs)` that returns a bool or a "
    "torch.utils.checkpoint.CheckpointPolicy"
)
SIGNATURE = (
    "A predicate is called as (ctx, op, *args, **kwargs), as in torch's selective checkpoint. If it is written for "
    "JAX, as (prim, *avals, **params), `prim` gets the context, and the operator is the next argument."
)


class Question(NamedTuple):
    """What a policy is asked about a call: a predicate's arguments, and the answers so far by predicates' ids."""

    ctx: Any
    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    answers: dict[int, Any]


def question(func: Any, args: tuple, kwargs: dict, result: Any) -> Question:
    """Return the question about a call. In torch 2.11 the context has no ``op_output``."""
    try:
        context = SelectiveCheckpointContext(is_recompute=False, op_output=result)
    except TypeError:
        context = SelectiveCheckpointContext(is_recompute=False)
    return Question(context, func, args, kwargs, {})


class AnswerLog(list[tuple[Any, Any]]):
    """The verdicts of predicates in regions inside a region, in one run of it. A recompute repeats those of the first.

    A predicate that counts its calls would decide differently. Each verdict is next to the operator that it is about.
    """

    def __init__(self, first: Sequence[tuple[Any, Any]] = ()) -> None:
        self.first = first  # those of the first run

    def verdict(self, op: Any, ask: Callable[[], Any]) -> Any:
        """Return the next verdict: that of the first run, or what ``ask`` returns if that ran another operator."""
        before, verdict = self.first[self.count] if self.count < len(self.first) else (None, None)
        verdict = verdict if before == op else ask()
        self.append((op, verdict))
        return verdict

    count = property(len)

    def go_back(self, count: int) -> None:
        """Forget later verdicts: an inner run was abandoned, which asks again when it starts again."""
        del self[count:]


def checked_predicate(value: Any) -> Callable:
    """Return ``value`` if it can be called with a context, an operator and the operator's arguments, else raise."""
    function = getattr(value, "func", value)  # the function of a functools.partial
    if isinstance(private.overload_of(value), private.OPERATORS):
        raise PolicyError(f"{_EXPECTED}. For one operator write `policies.save_ops(...)`; got {shown(value)}.")
    if not callable(value) or isinstance(value, (type, torch.nn.Module)):
        raise PolicyError(f"{_EXPECTED}; got {shown(value)}.{_of_text(value) if isinstance(value, str) else ''}")
    name = getattr(function, "__name__", "")
    written, public = _public().get(name, ("", None))
    if public is function:
        raise PolicyError(f"{written} returns a policy: call it, as in `{written}(...)`.")
    if function is torch.utils.checkpoint.create_selective_checkpoint_contexts:
        raise PolicyError(f"{_EXPECTED}; give the function or list itself, without {function.__name__}.")
    if str(getattr(value, "__module__", "")).partition(".")[0] == "jax":
        raise PolicyError(f"{_EXPECTED}; got JAX's {value!r}.{_nearest(name)}")
    fits = accepts(value, range(9))  # a context, an operator and several arguments of the operator
    if fits is False or (fits is None and operators.operator_like(value)):
        raise PolicyError(f"A policy is called with `(ctx, op, *args, **kwargs)`, which {shown(value)} doesn't accept.")
    return value


def _of_text(text: str) -> str:
    if re.fullmatch(r"\s*[\d.]+\s*[KMGT]?i?B\s*", text):
        return f" For an amount of memory write `policies.budget({text!r})`."
    named = f"for values named by checkpoint_name write `policies.save_only_these_names({text!r})`."
    return f"{near} Or {named}" if (near := _nearest(text)) else f" F{named[1:]}"


def _nearest(text: str) -> str:
    names = _public()
    wanted = text.rpartition(".")[2].strip().lower().replace("-", "_")
    near = [wanted]
    if wanted not in names:
        containing = [name for name in names if len(wanted) > 2 and wanted in name]
        near = sorted(containing, key=lambda name: (name.find(wanted), len(name)))
        near += difflib.get_close_matches(wanted, names, n=3, cutoff=0.6)
    found = (names[name] for name in dict.fromkeys(near))
    calls = [f"{written}{'(...)' * isfunction(public)}" for written, public in found][:3]
    return f" Did you mean {' or '.join(calls)}?" if calls else ""


def _public() -> dict[str, tuple[str, Any]]:
    """The public policies and functions that make some, by name: each as it is written, and itself."""
    modules = (sys.modules[f"remat.{name}"] for name in ("checkpoint_policies", "policies"))
    return {name: (f"{m.__name__[6:]}.{name}", getattr(m, name)) for m in modules for name in m.__all__}
