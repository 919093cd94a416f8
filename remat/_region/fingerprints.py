"""Fingerprints: what is compared between a tensor of the first run and the same tensor of a recompute.

Those of saved tensors are tuples that `LOOKS` makes and `is_other` compares; those of results are `Metadata`, which
`fingerprint` makes and `!=` compares. In plain autograd a recompute compares only the structure of its result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from .._core.private import saved_look, tracing, version, without_levels
from .._core.state import within
from .._core.tensors import bottom, has_data, parts, type_text


class Metadata(tuple):
    """The dtype, shape and device of a tensor; of a saved tensor also its kind of node; optionally a checksum."""

    __slots__ = ()

    def __str__(self) -> str:
        dtype, shape, device, maker, checksum = self
        where = "" if device.type == "cpu" else f" on {device}"
        made = "" if maker is None else f" of {maker}"
        values = "" if checksum is None else f" with checksum {checksum:x}"
        return f"{type_text(dtype, shape)}{where}{made}{values}"


def fingerprint(tensor: torch.Tensor, check: str) -> Any:
    """What this ``determinism_check`` compares."""
    values = checksum(tensor) if check == "values" else None
    return Metadata((tensor.dtype, tensor.shape, tensor.device, None, values))


def _look(tensor: torch.Tensor) -> tuple:
    try:
        return (*saved_look(tensor), tensor.stride())
    except RuntimeError:  # an inference tensor has no version, a sparse one no strides
        return tensor.dtype, tensor.shape, tensor.device, type(tensor.grad_fn), version(tensor), stride_of(tensor)


def stride_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a tensor, None if it has none."""
    try:
        return tensor.stride()
    except RuntimeError:  # sparse tensors have none
        return None


# Of saved tensors: dtype, shape, device, type of the node that made the tensor (another one means that the recompute
# took another path), version, strides, and with "values" a checksum.
LOOKS: dict[str, Callable[[torch.Tensor], tuple]] = {
    "metadata": _look,
    "values": lambda tensor: (*_look(tensor), checksum(tensor)),
    "none": lambda tensor: (None, None, None, type(None), version(tensor), None),
}
maker_of, version_of = itemgetter(3), itemgetter(4)


def is_other(before: tuple, now: tuple, maker: type) -> bool:
    """Whether two fingerprints of a saved tensor that are unequal mean that the recompute took another path.

    Versions may differ: a view of a tensor from outside has the version of that tensor. So may what an operation, the
    ``maker`` of tensors saved just before, leaves as it was: a part of a recurrent network's workspace, or attention's
    random seeds without dropout. With dropout, other seeds change its result, which is saved too.
    """
    dtype, shape, device, before_maker, _, _, *values = before
    dtype_now, shape_now, device_now, maker_now, _, _, *values_now = now
    is_workspace = dtype is torch.uint8 and maker.__name__ in _HAVE_WORKSPACE
    is_seed = dtype in _SEEDS and shape.numel() <= 2 and "Attention" in maker.__name__
    values_differ = values != values_now and not (is_workspace or is_seed)
    if (dtype, shape, device) != (dtype_now, shape_now, device_now) or values_differ:
        return True
    return not _may_be_the_same(before_maker, maker_now) or _moves(before) != _moves(now)


def _moves(saved: tuple) -> list[int] | None:
    """The strides, without those of dimensions of size one, which don't matter."""
    _, shape, _, _, _, stride, *_ = saved
    return None if stride is None or 0 in shape else [step for n, step in zip(shape, stride) if n != 1]


def _may_be_the_same(before: type, now: type) -> bool:
    """Whether nodes of these types may represent the same computation.

    A tensor may have no node because a backward pass inside the region detached it. A Python autograd Function may
    return a tensor that another node computed: hooks of modules insert such Functions, sometimes in one run only, as
    FSDP's hooks do. And its class may be created anew in each run.
    """
    known = not issubclass(before, _UNKNOWN) and not issubclass(now, _UNKNOWN)
    return before is now or not known or {before.__name__, now.__name__} <= _MOVES


_UNKNOWN = type(None), BackwardCFunction
_MOVES = {  # these compute nothing, and the rules of ``vmap`` choose among them by a tensor's memory layout
    "CatBackward0", "CloneBackward0", "ReshapeAliasBackward0", "StackBackward0", "UnsafeViewBackward0", "ViewBackward0",
}  # fmt: skip


_HAVE_WORKSPACE = {"CudnnRnnBackward0", "MiopenRnnBackward0", "MkldnnRnnLayerBackward0"}
_SEEDS = {torch.int64, torch.uint64}


def describe(saved: tuple, other: tuple) -> str:
    """Describe the fingerprint of a saved tensor, with strides if they differ from ``other``'s at equal shapes."""
    dtype, shape, device, maker, _, stride, *values = saved
    _, other_shape, _, other_maker, _, other_stride, *_ = other
    name = maker.__name__
    if maker is type(None):
        name = None if other_maker is maker else "no recorded operation (such as an input)"
    metadata = str(Metadata((dtype, shape, device, name, *(values or [None]))))
    return metadata if stride == other_stride or shape != other_shape else f"{metadata} with strides {stride}"


def checksum(tensor: torch.Tensor) -> int:
    """Return a sum of a tensor's bits, weighted by position, modulo 2**64. Batched tensors are taken as a whole.

    With ``determinism_check="values"`` it is compared; a `Guard` has one of an inference tensor, which has no version.
    """
    if tracing():  # the trace would record it
        return 0
    # With `filling` the recompute of an outer region notices that a value is read which it has skipped.
    with torch.no_grad(), within(unseen=True, filling=sys.maxsize), without_levels():
        data, total = bottom(tensor).detach(), 0
        for part in filter(has_data, parts(data.values() if data.is_nested else data)):
            words = bits((part.to_dense() if part.layout is not torch.strided else part).contiguous())
            words = words.reshape(-1).to(torch.int64)
            # An odd multiplier per position: any single change, and any swap of two unequal words, changes the sum.
            weights = torch.arange(words.numel(), device=words.device, dtype=torch.int64) * 2654435761 * 2 + 1
            total = 31 * total + int((words * weights).sum())
        return total & 0xFFFFFFFFFFFFFFFF


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as integers of its element size; a complex tensor gets one more dimension."""
    tensor = tensor.resolve_conj().resolve_neg()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.view(_INTEGERS[tensor.element_size()])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
