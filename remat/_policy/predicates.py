"""The check that a user's function can be a policy, and the error messages for anything else."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from .._core import private
from .._core.lines import accepts
from ..errors import PolicyError, shown
from . import operators

_EXPECTED = (
    "A policy is one of remat.policies (such as `policies.save_matmuls` or `policies.save_only_these_names('q')`), a "
    "list of operators, or a function `(ctx, op, *args, **kwargs)` that returns a bool or a "
    "torch.utils.checkpoint.CheckpointPolicy"
)
# The public names of `remat.policies`, for hints.
_CONSTANTS = """
    checkpoint_dots checkpoint_dots_with_no_batch_dims dots_saveable dots_with_no_batch_dims_saveable
    everything_saveable nothing_saveable save_attention save_collectives save_convolutions save_matmuls
    save_matmuls_without_batch_dims
"""
_CONSTRUCTORS = """
    budget offload offload_dot_with_no_batch_dims save_and_offload_only_these_names save_any_names_but_these
    save_anything_except_these_names save_from_both_policies save_if save_only_these_names save_ops
"""
PUBLIC_NAMES = sorted((_CONSTANTS + _CONSTRUCTORS).split())


def checked_predicate(value: Any) -> Callable:
    """Return ``value`` if it can be called with a context, an operator and the operator's arguments.

    Raises:
        PolicyError: it can't be called so; the message says what was expected.
    """
    function = getattr(value, "func", value)  # the function of a functools.partial
    if isinstance(private.overload_of(value), private.OPERATORS):
        raise PolicyError(f"{_EXPECTED}. For one operator write `policies.save_ops(...)`; got {shown(value)}.")
    if not callable(value) or isinstance(value, (type, torch.nn.Module)):
        raise PolicyError(f"{_EXPECTED}; got {shown(value)}.{_of_text(value) if isinstance(value, str) else ''}")
    name = getattr(function, "__name__", "")
    if getattr(function, "__module__", None) == "remat.policies" and name in PUBLIC_NAMES:
        raise PolicyError(f"policies.{name} returns a policy: call it, as in `policies.{name}(...)`.")
    if function is torch.utils.checkpoint.create_selective_checkpoint_contexts:
        raise PolicyError(f"{_EXPECTED}; give the function or list itself, without {function.__name__}.")
    if (getattr(value, "__module__", None) or "").partition(".")[0] == "jax":
        raise PolicyError(f"{_EXPECTED}; got JAX's {value!r}.{_nearest(name)}")
    fits = accepts(value, *range(9))  # a context, an operator and several arguments of the operator
    if fits is None:
        fits = not operators.operator_like(value)
    if not fits:
        raise PolicyError(f"A policy is called with `(ctx, op, *args, **kwargs)`, which {shown(value)} doesn't accept.")
    return value


def _of_text(text: str) -> str:
    if re.fullmatch(r"\s*[\d.]+\s*[KMGT]?i?B\s*", text):
        return f" For an amount of memory write `policies.budget({text!r})`."
    named = f"for values named by checkpoint_name write `policies.save_only_these_names({text!r})`."
    return f"{near} Or {named}" if (near := _nearest(text)) else f" F{named[1:]}"


def _nearest(text: str) -> str:
    wanted = text.rpartition(".")[2].strip().lower().replace("-", "_")
    if wanted in PUBLIC_NAMES:
        near = [wanted]
    else:
        near = difflib.get_close_matches(wanted, PUBLIC_NAMES, n=3, cutoff=0.6)
        if len(wanted) > 2:
            containing = [name for name in PUBLIC_NAMES if wanted in name]
            near = [*sorted(containing, key=lambda name: (name.find(wanted), len(name))), *near]
    shown = [f"policies.{name}{'(...)' * (name in _CONSTRUCTORS.split())}" for name in dict.fromkeys(near)][:3]
    return f" Did you mean {' or '.join(shown)}?" if shown else ""
