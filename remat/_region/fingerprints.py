"""What is compared between a tensor of the first run and the same tensor of a later one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from .._core.parts import bottom
from .._core.private import NO_VERSION, raw_version, saved_look, without_levels
from .._core.state import unseen
from .left_out import LeftOutTensor

CHECKS = ("metadata", "values", "none")


class Metadata(tuple):
    """Dtype, shape and device of a tensor, for a saved one also what made it, and its checksum if asked for."""

    __slots__ = ()

    def __str__(self) -> str:
        dtype, shape, device, maker, checksum = self
        where = "" if device.type == "cpu" else f" on {device}"
        made = "" if maker is None else f" of {maker}"
        values = "" if checksum is None else f" with checksum {checksum:x}"
        return f"{str(dtype).removeprefix('torch.')}{list(shape)}{where}{made}{values}"


def fingerprint(tensor: torch.Tensor, check: str) -> Any:
    """What ``determinism_check`` compares; None where it compares nothing."""
    if check == "none":
        return None
    values = checksum(tensor) if check == "values" else None
    return Metadata((tensor.dtype, tensor.shape, tensor.device, None, values))


def _look(tensor: torch.Tensor) -> tuple:
    return (*saved_look(tensor), _stride(tensor))


def _stride(tensor: torch.Tensor) -> tuple[int, ...] | None:
    try:
        return tensor.stride()
    except RuntimeError:  # sparse ones have none
        return None


# The same of a tensor that is saved, with the kind of node that made it, as another one tells of another path, with its
# version and its strides. Inference tensors have no version: for them this is a RuntimeError.
LOOKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "metadata": _look,
    "values": lambda tensor: (*_look(tensor), checksum(tensor)),
    "none": lambda tensor: (None, None, None, type(None), raw_version(tensor)),
}


def look_at(tensor: torch.Tensor, check: str) -> tuple:
    """The same, also of an inference tensor."""
    try:
        return LOOKS[check](tensor)
    except RuntimeError:
        look = tensor.dtype, tensor.shape, tensor.device, type(tensor.grad_fn), NO_VERSION, _stride(tensor)
        return (*look, checksum(tensor)) if check == "values" else look


def is_other(before: tuple, now: tuple) -> bool:
    """Whether two fingerprints of a saved tensor that aren't equal tell of another path.

    Versions may differ: that of a view of a tensor outside is that tensor's.
    """
    if before[:3] != now[:3] or before[6:] != now[6:] or not _may_be_the_same(before[3], now[3]):
        return True
    return before[5:6] != now[5:6] and _moves(before) != _moves(now)


def _moves(saved: tuple) -> list[int] | None:
    """The strides that matter: no other element is reached in a dimension of one."""
    _, shape, _, _, _, stride, *_ = saved
    return None if stride is None or 0 in shape else [step for n, step in zip(shape, stride) if n != 1]


def _may_be_the_same(before: type, now: type) -> bool:
    """Whether nodes of these kinds may stand for the same computation.

    A tensor without a node may be what a backward pass inside the region has cut from its history. An autograd Function
    of Python may hand on what another node computed: hooks of modules insert such ones, at times in one run alone, as
    those of FSDP do. And its class may be made anew in each run.
    """
    told = not issubclass(before, _UNTOLD) and not issubclass(now, _UNTOLD)
    return before is now or not told or {before.__name__, now.__name__} <= _MOVES


_UNTOLD = type(None), BackwardCFunction
_MOVES = {  # these compute nothing, and the rules of ``vmap`` choose among them by how a tensor lies in memory
    "CatBackward0", "CloneBackward0", "ReshapeAliasBackward0", "StackBackward0", "UnsafeViewBackward0", "ViewBackward0",
}  # fmt: skip


def describe(saved: tuple, other: tuple) -> str:
    """A fingerprint of a saved tensor in words, with strides if those of the other one differ."""
    dtype, shape, device, maker, _, stride, *values = saved
    name = None if maker is type(None) else maker.__name__
    metadata = str(Metadata((dtype, shape, device, name, values[0] if values else None)))
    same = stride == other[5] or shape != other[1]
    return metadata if same else f"{metadata} with strides {stride}"


def checksum(tensor: torch.Tensor) -> int:
    """A sum of the tensor's bits in 32-bit words, weighted by position, modulo 2**64; batched ones as a whole."""
    with torch.no_grad(), unseen(), without_levels():
        data = bottom(tensor)
        if isinstance(data, LeftOutTensor):  # by a recompute around
            data.check()
        data = data.detach()
        data = (data.to_dense() if data.layout is not torch.strided else data).contiguous()
        words = bits(data).reshape(-1).to(torch.int64)
        if words.is_meta:  # it has none
            return 0
        # An odd multiplier per position: any single change, and any swap of two unequal words, changes the sum.
        weights = torch.arange(words.numel(), device=words.device, dtype=torch.int64) * 2654435761 * 2 + 1
        return int((words * weights).sum()) & 0xFFFFFFFFFFFFFFFF


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers in a tensor as integers of their size, those of a complex one in a dimension more."""
    tensor = tensor.resolve_conj().resolve_neg()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.view(_INTEGERS[tensor.element_size()])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
