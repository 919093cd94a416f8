"""Guards: the inputs and captured tensors that a region saves for its recomputes, as they were before its first run.

A recompute starts only if these tensors still have the values of the first run, or from a copy that was made before
the region itself changed them (batch-norm statistics, counters).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from .._core import host_memory, private
from .._core.devices import NEAR, is_capturing
from .._core.facts import tensors as tensors_in
from .._core.host_memory import Group, Offloaded
from .._core.state import alias, own_work, state, unseen
from .._core.tensors import copied, holder, is_dense, is_dual, is_in_graph, parts, span
from ..errors import MutationError
from .fingerprints import bits, checksum, fingerprint
from .hooks import Hooks, Packed, drop_gradient_hooks, in_torch_checkpoint, of_region

# Tensors up to this size that don't require grad are copied before the first run, as the region may change them.
COPY_BYTES = 16 * 1024
# So are vectors, such as running statistics, and buffers of modules up to this size.
COPY_LARGER_BYTES = 1024 * 1024


class Held:
    """A tensor that autograd saves as it is, since it exists without the region. It must not be changed."""

    __slots__ = ("base", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, base: Guard | None = None) -> None:
        self.tensor: Any = tensor
        self.base = base  # the guarded tensor of which it is a view, so that it takes no memory
        self.version = _version(tensor)

    def saved(self) -> torch.Tensor:
        """Return the tensor for a backward. Raises MutationError if it has been changed since."""
        if not self.is_as_before:
            raise MutationError(self.message())
        return self.tensor

    @property
    def is_as_before(self) -> bool:
        return _version(self.tensor) == self.version

    def message(self) -> str:
        if self.base is not None:
            return self.base.message()
        return (
            f"A captured tensor, {fingerprint(self.tensor, 'metadata')}, was changed in place after the region's "
            f"forward and before its backward. Change it after the backward, or give the region a copy."
        )


class Guard(Held):
    """A tensor as it was before a region's first run, which is its ``i``-th; ``name(i)`` is its name in errors."""

    __slots__ = ("_copy", "_differs", "_hooks", "_i", "_name", "dual", "leaf", "lost", "packed", "requires_grad")

    def __init__(self, tensor: torch.Tensor, name: Callable[[int], str], i: int, limit: int) -> None:
        super().__init__(tensor)
        self._name, self._i = name, i
        self.requires_grad = tensor.requires_grad
        self.leaf = _leafness(tensor)
        hooks = private.backward_hooks(tensor)
        self._hooks = hooks and hooks.copy()
        self.packed: Packed | None = None  # what hooks around the region have made of it
        self._copy: torch.Tensor | None = None
        self._differs: _Comparison | None = None
        self.lost = False  # the region has changed it, and it was not copied
        self.dual: list[Guard] | None = None  # of its primal and tangent, which are freed when their level ends
        if is_dual(tensor):
            self.dual = [Guard(t, name, i, limit) for t in fwAD.unpack_dual(tensor)]
        elif not self.requires_grad and is_small(tensor, limit):
            with own_work():  # not a read: in the recompute of an outer region it may be `Stale`
                self._copy = copied(tensor.detach())

    @property
    def copy(self) -> torch.Tensor | None:
        """The value before the first run, from which a recompute starts, if the region has changed it."""
        if self._differs is not None:
            differs, self._differs = bool(self._differs), None
            self._copy = self._copy if differs else None
        return self._copy

    @property
    def stale(self) -> torch.Tensor | None:
        """The tensor, if it has changed since, and no copy of the old value is left. It must not be read."""
        if self.copy is not None or self.lost:
            return None
        if self.packed is not None:
            outer = self.packed.contents
            return outer.stale if isinstance(outer, Guard) else None
        return None if self.is_as_before else self.tensor

    @property
    def name(self) -> str:
        return self._name(self._i)

    def close(self) -> bool:
        """End the first run: release what isn't needed, and return whether the region has changed the tensor."""
        changed = not self.is_as_before
        if changed:
            if not self.tensor.is_leaf:
                raise MutationError(f"{self.name} {CHANGED}")
            self.lost = self._copy is None
        elif self._copy is not None:
            self._compare(self._copy)
        if self.packed is not None:
            if isinstance(self.packed.contents, Offloaded):
                self.packed.contents.settle()
            if self._copy is None:
                self.tensor = None
        return changed

    def _compare(self, copy: torch.Tensor) -> None:
        """Release the copy if the tensor equals it. Versions don't show what batch norm or `.data` has changed."""
        tensor = self.tensor
        if not (tensor.is_floating_point() or tensor.numel() == 1) or not is_small(tensor, COPY_BYTES):
            self._copy = None
        elif tensor.device.type in NEAR:
            self._copy = copy if _may_differ(tensor, copy) else None
        elif not (isinstance(tensor, private.FakeTensor) or is_capturing()):
            self._differs = _Comparison(tensor, copy)

    def get(self) -> torch.Tensor:
        """Return the tensor, as it was before the first run. Raises MutationError if it has been changed since."""
        if self.packed is not None and self.copy is None:
            return self.packed.get()
        return self.checked(self.tensor)

    def checked(self, tensor: Any, first: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``tensor``, which is the guarded one, or a copy of the old value if the region changed it.

        Or ``tensor`` is an alias of the ``first`` one, perhaps with a version counter of its own.
        """
        if self.lost:
            raise MutationError(
                f"{self.name} was changed in place by the region itself, so the region can't be recomputed from the "
                f"old value. Of tensors that don't require grad, those of up to 16 KiB, and vectors and buffers of up "
                f"to 1 MiB, are copied first. Give the region a copy: `.clone()`, or change the tensor outside of it."
            )
        if self.copy is not None:
            with private.without_levels():
                return copied(self.copy)
        if _version(tensor if first is None else first) != self.version:
            raise MutationError(self.message())
        return tensor

    def saved(self) -> torch.Tensor:
        """Return the tensor as autograd saved it. Like autograd, ignore changes that versions don't show."""
        if self.copy is not None and self.is_as_before:
            return self.tensor
        return self.get()

    def message(self) -> str:
        advice = _OF_PARAMETERS if self.requires_grad and self.leaf else _OF_OTHERS
        return (
            f"{self.name} was changed in place between the region's forward and its backward, which recomputes the "
            f"region and would give wrong gradients. {advice}"
        )

    def again(self) -> torch.Tensor:
        """Return the tensor for a recompute: cut from its autograd graph, with its tangent."""
        tensor = self.get()
        if self.dual is not None:
            return fwAD.make_dual(*(each.again() for each in self.dual))
        result = cut(tensor, self.requires_grad, self.leaf)
        if self._hooks:  # backward passes inside of the region call them
            private.set_backward_hooks(result, self._hooks)
        return result

    def captured_again(self, accumulated: bool) -> torch.Tensor:
        """Return a captured tensor for a recompute: itself if possible, so that no variable changes.

        ``accumulated``: a backward pass inside the region has added to gradients, so a parameter is replaced.
        """
        added_to = accumulated and self.requires_grad
        other = self.copy is not None or self.lost or self.packed is not None or self.dual is not None
        if not (added_to or other) and self.tensor.requires_grad is self.requires_grad:
            return self.tensor
        stale = self.stale
        return self.again() if stale is None else cut(stale, self.requires_grad, self.leaf)


class Guards(list[Guard]):
    """The guards of some tensors. ``name(i)`` is the name of the i-th in errors; ``buffers`` are ids of buffers."""

    __slots__ = ("_grads", "accumulated", "first_hook")

    def __init__(self, tensors: Sequence[torch.Tensor], name: Callable, buffers: Collection[int] = ()) -> None:
        limits = [COPY_LARGER_BYTES if id(tensor) in buffers else COPY_BYTES for tensor in tensors]
        super().__init__([Guard(tensor, name, i, limits[i]) for i, tensor in enumerate(tensors)])
        self.first_hook = RemovableHandle.next_id  # hooks that a first run registers have this id or a higher one
        self._grads: list[tuple[int, int]] | None = None
        self.accumulated = False  # a backward pass inside the region may have added to the .grad of one of them

    @property
    def tensors(self) -> list[Any]:
        return [guard.tensor for guard in self]

    def note_gradients(self) -> None:
        """Note the gradients before the first run; after it, set ``accumulated`` if they have changed."""
        grads = [t.grad for t in self.tensors if t.requires_grad and t.is_leaf]
        now = [(0, 0) if g is None else (id(g), private.version(g)) for g in grads]
        if self._grads is None:
            self._grads = now
        else:
            self.accumulated |= now != self._grads
            self._grads = None

    def hand_over(self, hooks: Hooks, uses: Iterable[int], counted: Collection[int] = ()) -> None:
        """Pass the tensors at these indices to the saved-tensor hooks around the region, once for each use.

        Autograd does so with what it saves. What the hooks make of the ``counted`` ones is dropped.
        """
        for i in uses:
            guard = self[i]
            packed = Packed(private.unwrap_if_dead(guard.tensor), hooks, of_region(hooks) is not None)
            if i not in counted:
                guard.packed = guard.packed or packed  # what they make of it the first time is kept

    def offload(self) -> None:
        """Move activations to host memory. Device memory is freed if no other reference keeps it alive."""
        hooks = functools.partial(Offloaded, group=Group()), Offloaded.get
        tensors = map(private.unwrap_if_dead, self.tensors)
        stay = [host_memory.stays(t) or (t.requires_grad and t.is_leaf) for t in tensors]
        self.hand_over(hooks, [i for i, stays in enumerate(stay) if not stays])

    def roll_back(self) -> None:
        """Undo what an abandoned first run did to values and hooks. MutationError if a value was not copied."""
        drop_gradient_hooks(self.tensors, self.first_hook)
        with torch.no_grad(), private.without_levels():
            for guard in self:
                if guard.copy is None:
                    guard.lost = not guard.is_as_before
                    guard.checked(guard.tensor)
                elif _may_differ(guard.tensor, guard.copy):
                    (guard.tensor.data if guard.is_as_before else guard.tensor).copy_(guard.copy)  # as batch norm does

    def watched(self, again: Sequence[torch.Tensor]) -> AbstractContextManager:
        """Within, reads of tensors that were changed since are errors. ``again`` are the tensors of the recompute."""
        stale = {id(tensor): guard.message() for guard, tensor in zip(self, again) if guard.stale is not None}
        return Stale(stale) if stale else nullcontext()

    @contextmanager
    def kept(self, again: Sequence[torch.Tensor]) -> Iterator[None]:
        """Within, a recompute may change ``requires_grad`` of its tensors, as it may stop before it is switched back.

        And batch norm may write to statistics, though the first run changed none of their values. Copies may stay
        changed: the recompute may save them.
        """
        switches = [tensor.requires_grad for tensor in again]
        statistics = [t for guard, t in zip(self, again) if _may_be_statistics(t) and guard.copy is None]
        if statistics:
            with own_work(), unseen(), private.without_levels():
                before = [(tensor, _version(tensor), copied(tensor)) for tensor in statistics]
        try:
            yield
        finally:
            for tensor, requires_grad in zip(again, switches):
                if tensor.requires_grad is not requires_grad:
                    tensor.requires_grad_(requires_grad)
            if statistics:
                with own_work(), unseen(), private.without_levels():
                    for tensor, version, value in before:
                        if _version(tensor) == version:  # batch norm leaves no trace in it
                            tensor.data.copy_(value)


def hand_operands(hooks: Hooks | None, operands: Guards, uses: Iterable[tuple[int, int]] | None = None) -> None:
    """Pass a region's operands to the hooks around it. A recompute of the outer region may need nothing else.

    Hooks of a region or of torch's checkpoint get an operand once for each use of it: their recompute may find two
    tensors where this run finds one, and must pass the same number.
    """
    if hooks is not None:
        each: Iterable[int] = range(len(operands))
        if uses is not None and (of_region(hooks) is not None or in_torch_checkpoint()):
            each = [i for _, i in uses]
        operands.hand_over(hooks, each)


def hand_captured(hooks: Hooks | None, captured_inputs: Guards) -> None:
    """Pass captured tensors to the hooks around a region, except those that stay alive."""
    if hooks is not None and len(captured_inputs):
        tensors, is_counted = captured_inputs.tensors, in_torch_checkpoint()
        # An outer region refers to a parameter without packing it, as it has not made it.
        stay = {i for i, t in enumerate(tensors) if t.is_leaf and (t.requires_grad or of_region(hooks) is None)}
        # The recompute of torch's checkpoint may find other tensors, as no region around it binds variables then.
        takes_all = is_counted or getattr(hooks[0], "takes_all", False)
        each = [i for i in range(len(tensors)) if takes_all or i not in stay]
        captured_inputs.hand_over(hooks, each, counted=stay if is_counted else ())


def close(operands: Guards, captured_inputs: Guards) -> None:
    """End a first run. MutationError if it changed a tensor in place that is not a leaf, or some that share memory."""
    captured_inputs.note_gradients()
    changed = {id(guard.tensor): guard for guard in (*operands, *captured_inputs) if guard.close() and not guard.lost}
    if len({id(holder(guard.tensor)) for guard in changed.values()}) < len(changed):
        raise MutationError(
            "A region changes tensors in place that share memory, of which a recompute would get separate copies. "
            "Use out-of-place operations, or let the region read and change them through one of them only."
        )
    # The history of a captured tensor may lead to earlier regions, which captured tensors, and so on.
    for guard in captured_inputs:
        if guard.tensor is not None and not guard.leaf:
            guard.tensor = alias(guard.tensor)


class Stale(TorchFunctionMode):
    """Raises an error if a recompute reads a captured tensor that was changed since, with the message for its id."""

    def __init__(self, messages: Mapping[int, str]) -> None:
        self.messages = messages

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (tensors_in(result) or getattr(func, "__name__", None) in _READERS) and not state.own_work:
            for tensor in tensors_in((args, kwargs)):
                if id(tensor) in self.messages:
                    raise MutationError(self.messages[id(tensor)])
        return result


_READERS = {  # these return no tensor; others that don't return shapes and the like
    "item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__array__", "__bool__", "__complex__",
    "__contains__", "__dlpack__", "__float__", "__index__", "__int__", "__setitem__",
}  # fmt: skip


def cut(tensor: torch.Tensor, requires_grad: bool, leaf: bool | None) -> torch.Tensor:
    """Cut a tensor from its graph. A non-leaf stays a non-leaf, since inner regions decide by it what to save.

    A tensor that autograd doesn't follow, though it requires grad, stays so: operations save less for it.
    """
    if not requires_grad:
        return tensor.detach() if tensor.requires_grad else tensor
    result = tensor.detach().requires_grad_()
    if leaf:
        if type(tensor) is torch.nn.Parameter:
            result.__class__ = torch.nn.Parameter
            result.__dict__.update(tensor.__dict__)
        return result
    with torch.set_grad_enabled(leaf is not None):  # `view_as` would change strides of dimensions of size 1
        return result[...] if result.layout is torch.strided else result.clone()


def _version(tensor: torch.Tensor) -> int:
    """What differs after a change in place: the version counter; of inference tensors, which have none, a checksum."""
    try:
        return private.raw_version(tensor)
    except RuntimeError:
        return -1 - checksum(tensor)


def _leafness(tensor: torch.Tensor) -> bool | None:
    """Whether a tensor is a leaf; None if ``is_leaf`` is true but autograd doesn't follow the tensor."""
    return tensor.is_leaf and (not tensor.requires_grad or is_in_graph(tensor) or None)


def is_small(tensor: torch.Tensor, limit: int) -> bool:
    """Whether a tensor has at most ``limit`` bytes in memory, or is a vector of up to ``COPY_LARGER_BYTES``."""
    if not is_dense(tensor):
        return False
    size = max(tensor.numel(), span(tensor.shape, tensor.stride()))
    return size * tensor.element_size() <= (COPY_LARGER_BYTES if tensor.dim() <= 1 else limit)


def _may_be_statistics(tensor: torch.Tensor) -> bool:
    # A wrapper, which an inner region hands over, may be one of a level that has ended, which can't be written to.
    is_vector = tensor.dim() == 1 and tensor.is_floating_point() and not private.is_wrapped(tensor)
    return is_vector and not tensor.requires_grad and is_small(tensor, COPY_BYTES)


class _Comparison:
    """Whether a tensor on a device differs from its copy: queued now, read in a recompute, so that nothing waits."""

    __slots__ = ("_copied", "_flag")

    def __init__(self, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        with torch.no_grad(), own_work(), unseen(), private.without_levels():
            pairs = zip(parts(tensor), parts(copy))
            flag = torch.stack([(bits(a.detach()) != bits(b)).any() for a, b in pairs]).any()
            streams = host_memory.has_streams(flag.device)
            self._flag = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=streams)
            self._flag.copy_(flag, non_blocking=streams)
            self._copied = torch.accelerator.current_stream(flag.device).record_event() if streams else None

    def __bool__(self) -> bool:
        if self._copied is not None:
            self._copied.synchronize()
        return self._flag.item() is True


def _may_differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors with the same metadata may have different values; those of fake tensors always may."""
    if a.is_meta and type(a) is torch.Tensor:
        return False
    with own_work(), unseen():
        return isinstance(a, private.FakeTensor) or not all(map(torch.equal, parts(a), parts(b)))


CHANGED = (
    "requires grad and was changed in place by the region, which can't be recomputed from the new value. Use the "
    "out-of-place operation, and return the result if it is needed outside; or change a copy: `.clone()`."
)
BEHIND = (
    "A backward pass inside a region goes on behind {}, through a graph which the region's recompute doesn't have. "
    "Compute it inside of the region, or pass its `.detach()`."
)
_OF_PARAMETERS = "The usual cause is an `optimizer.step()` between the two: call it after the backward."
_OF_OTHERS = "Change it after the backward, use the out-of-place operation, or give the region a copy: `.clone()`."
NO_GUARDS = Guards([], str)
