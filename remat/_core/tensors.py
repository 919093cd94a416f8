"""Tensors that are made of other tensors or wrap one, and the memory layout of tensors."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD

from . import private
from .state import unseen


def type_text(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Dtype and shape, as ``float32[2, 3]``."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def is_wrapper_call(types: tuple[type, ...]) -> bool:
    """Whether an operation is on tensors that are made of other tensors, by torch's protocol for wrapper subclasses."""
    return any(hasattr(cls, "__tensor_flatten__") for cls in types)


def is_plain(tensor: Any) -> bool:
    """Whether a tensor is not made of other tensors."""
    return not hasattr(type(tensor), "__tensor_flatten__")


def has_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values: one on the device ``meta`` and a fake one have none."""
    return not (tensor.is_meta or isinstance(tensor, private.FakeTensor))


def all_parts(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The plain tensors below all levels that these tensors are made of."""
    return [part for tensor in tensors for part in parts(tensor)]


def parts(tensor: Any) -> list[torch.Tensor]:
    """The plain tensors below all levels that a tensor is made of."""
    if not isinstance(tensor, torch.Tensor):
        return []  # DTensor lists its mesh too
    tensor = bottom(tensor)
    if is_plain(tensor):
        return [tensor]
    return [part for name in tensor.__tensor_flatten__()[0] for part in parts(getattr(tensor, name))]


def bottom(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor below all levels, on which kernels run."""
    while private.is_wrapped(tensor):
        tensor = private.unwrap_once(tensor)
    return tensor


def chain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor and all tensors that it wraps, down to the plain one."""
    yield tensor
    while private.is_wrapped(tensor):
        tensor = private.unwrap_once(tensor)
        yield tensor


def history(nodes: list[Any], ends: Collection[Any] = ()) -> Iterator[Any]:
    """The nodes of autograd to which a graph leads from these, up to the ends."""
    seen = {None}
    for node in nodes:  # the list grows meanwhile
        if node not in seen:
            seen.add(node)
            yield node
            nodes += [after for after, _ in node.next_functions if node not in ends]


def is_left_from_vmap(tensor: torch.Tensor) -> bool:
    """Whether a tensor was made at a ``vmap`` level that has ended, so that nothing can read it."""
    if not private.is_wrapped(tensor):
        return False
    active = [level.level() for level in private.interpreter_stack() or () if level.key().value == private.VMAP]
    return any(private.is_batched(each) and private.level_of(each) not in active for each in chain(tensor))


def is_in_graph(tensor: torch.Tensor) -> bool:
    """Whether autograd follows a tensor. ``requires_grad`` of a view made under ``no_grad`` is only its base's."""
    if not (tensor.requires_grad and tensor.is_leaf and private.base_of(tensor) is not None):
        return tensor.requires_grad
    with torch.enable_grad(), unseen():
        node = tensor.view_as(tensor).grad_fn
    return node is not None and node.next_functions[0][0] is not None


def requires_grad_somewhere(tensor: torch.Tensor) -> bool:
    """Whether a tensor requires grad at any of its levels. A batched or dual wrapper doesn't show it."""
    return any(each.requires_grad for each in chain(tensor))


def is_followed_below(level: int, tensor: torch.Tensor) -> bool:
    """Whether a level below this one, or autograd itself, differentiates a tensor, and this level does not."""
    tensor = private.unwrap_if_dead(tensor)
    while private.level_of(tensor) > level:
        tensor = private.unwrap_once(tensor)
    here = tensor.requires_grad and private.level_of(tensor) == level
    return not here and requires_grad_somewhere(tensor)


def bare(tensor: torch.Tensor) -> torch.Tensor:
    """A grad-level wrapper without its history at that level; ``detach`` would cut it from those below too."""
    tensor = private.unwrap_if_dead(tensor)
    if not private.is_grad_wrapper(tensor):
        return tensor
    return private.wrap_grad(private.unwrap_once(tensor), private.level_of(tensor))


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without its history, but with its tangent, which ``detach`` drops."""
    return fwAD.make_dual(*(part.detach() for part in fwAD.unpack_dual(tensor))) if is_dual(tensor) else tensor.detach()


def as_leaf(tensor: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
    """A new leaf, with the values and the tangent of a tensor."""
    leaf = tensor.detach().requires_grad_(requires_grad)
    return fwAD.make_dual(leaf, fwAD.unpack_dual(tensor).tangent) if is_dual(tensor) else leaf


def is_differentiable(tensor: torch.Tensor) -> bool:
    """Whether a tensor of this dtype can have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_recorded(tensor: torch.Tensor) -> bool:
    """Whether autograd follows a tensor, or its tangent of the active forward-mode level."""
    return tensor.requires_grad or (is_dual(tensor) and fwAD.unpack_dual(tensor).tangent.requires_grad)


def is_dual(tensor: torch.Tensor) -> bool:
    """Whether a tensor carries a tangent of the active forward-mode level. Sparse and nested tensors can't."""
    return private.dual_level_active() and is_dense(tensor) and fwAD.unpack_dual(tensor).tangent is not None


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has sizes and strides on one storage."""
    return tensor.layout is torch.strided and not tensor.is_nested


def holder(tensor: torch.Tensor) -> Any:
    """What represents a tensor's memory: its storage, or the tensor itself if it is sparse and so has none."""
    return tensor.untyped_storage() if is_dense(tensor) else tensor


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """The number of elements in memory from a tensor's first to its last."""
    return 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, stride))


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that a tensor spans, as a vector. It is smaller than the tensor if the tensor is expanded."""
    return tensor.as_strided((span(tensor.shape, tensor.stride()),), (1,))


def overlapping(tensors: dict[int, torch.Tensor], others: Iterable[torch.Tensor] = ()) -> set[int]:
    """The numbers of those that are in the others' storages, or share memory, or whose elements alternate."""
    storages = {holder(part) for tensor in others for part in parts(tensor)}
    extents = [(i, *_extent(part)) for i, tensor in tensors.items() for part in parts(tensor) if is_dense(part)]
    found = {i for i, storage, *_ in extents if storage in storages}
    for (i, storage, start, stop), (j, other, begin, end) in itertools.combinations(extents, 2):
        if i != j and storage is other and max(start, begin) < min(stop, end):
            found |= {i, j}
    return found


def _extent(tensor: torch.Tensor) -> tuple[torch.UntypedStorage, int, int]:
    """A tensor's storage, and the byte at which its elements start and the one at which they stop."""
    start, count = int(tensor.storage_offset()), span(tensor.shape, tensor.stride())
    return tensor.untyped_storage(), start * tensor.itemsize, (start + count) * tensor.itemsize


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same layout, expanded and with gaps if the tensor is."""
    copy = tensor.clone()
    if not is_dense(tensor) or private.is_wrapped(tensor) or not is_plain(tensor) or copy.stride() == tensor.stride():
        return copy
    return memory(tensor).clone().as_strided(tensor.shape, tensor.stride())


def laid_out(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """The tensor with these strides: the tensor itself, or a copy with zeros in the gaps."""
    if tensor.stride() == stride:
        return tensor
    copy = tensor.new_zeros(span(tensor.shape, stride)).as_strided(tensor.shape, stride)
    once = tuple(slice(1 if step == 0 else None) for step in stride)  # of an expanded dimension
    copy[once].copy_(tensor[once])
    return copy


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a tensor as bytes, without the dtype and without lazy conjugation or negation."""
    storage = tensor.untyped_storage()
    with private.without_dispatch():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a contiguous tensor in host memory, read without modes and levels."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
