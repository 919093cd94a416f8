"""Results that nothing seems to need, in a run again: tensors that get their content only when it is read after all."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ._errors import RecomputeMismatchError
from ._torch import as_subclass, without_overrides
from ._values import Layout, Step, holder, tensors


class LateCall:
    """An operation that was put off, with its arguments."""

    __slots__ = ("args", "kwargs", "step")

    def __init__(self, step: Step, args: tuple, kwargs: dict) -> None:
        self.step, self.args, self.kwargs = step, args, kwargs


class Late:
    """The tensors without content, by their storages. None of them is kept alive."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref, Layout, LateCall]] = {}

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, tensor: torch.Tensor, layout: Layout, call: LateCall) -> None:
        """A tensor that is the ``layout.i``-th new one of a call that was put off."""
        storage = holder(tensor)
        key, entries = id(storage), self._entries

        def gone(ref: weakref.ref) -> None:
            if key in entries and entries[key][0] is ref:
                del entries[key]

        self._entries[key] = weakref.ref(storage, gone), layout, call

    def _find(self, tensor: torch.Tensor) -> tuple | None:
        storage = holder(tensor)
        entry = self._entries.get(id(storage))
        return entry if entry is not None and entry[0]() is storage else None

    def is_full(self, tensor: torch.Tensor) -> None:
        """It got its content in another way."""
        if self._find(tensor) is not None:
            del self._entries[id(holder(tensor))]

    def fill(self, read: Iterable[torch.Tensor]) -> None:
        """Run what was put off, as these tensors are read."""
        if not self._entries:
            return
        for tensor in read:
            entry = self._find(tensor)
            if entry is not None:
                self._run(entry[2])

    def fill_all(self, but: Iterable[torch.Tensor]) -> None:
        """Fill all that are still there."""
        for tensor in but:
            self.is_full(tensor)
        while self._entries:
            self._run(next(iter(self._entries.values()))[2])

    def _run(self, call: LateCall) -> None:
        """Run a call for all of its tensors that are still there."""
        if call.step.draws:
            raise RecomputeMismatchError(
                f"The region reads random numbers of {call.step.func} when it is run again that it did not read in its "
                f"forward. A region must do the same each time: look for Python state that changed between the runs."
            )
        mine = [(ref, layout) for ref, layout, other in self._entries.values() if other is call]
        self.fill(tensors((call.args, call.kwargs)))
        outs = dict(_contents(call.step.result, call.step.func(*call.args, **call.kwargs)))
        for ref, layout in mine:
            storage = ref()
            if storage is not None:
                empty = torch.empty(0, dtype=layout.dtype, device=layout.device)
                empty.set_(storage, layout.offset, layout.size, layout.stride).copy_(outs[layout.i])
                self._entries.pop(id(storage), None)

    def mark(self, result: Any) -> Any:
        """Make those tensors of a result that have no content fill themselves where torch hands out their memory."""
        if isinstance(result, torch.Tensor):
            return self._marked(result) if self._find(result) is not None else result
        if type(result) in (tuple, list):
            return type(result)(map(self.mark, result))
        return result

    def _marked(self, tensor: torch.Tensor) -> torch.Tensor:
        marked = as_subclass(LateTensor, tensor)
        marked.late = weakref.ref(self)
        return marked


def _contents(template: Any, result: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """The new tensors of a result, by their numbers."""
    if isinstance(template, Layout):
        yield template.i, result
    elif type(template) in (tuple, list):
        for item, part in zip(template, result):
            yield from _contents(item, part)


class LateTensor(torch.Tensor):
    """A tensor without content. Operations on it are seen by the dispatcher, these are not."""

    late: weakref.ref[Late]
    _READERS = frozenset({"numpy", "tolist", "data_ptr", "__array__", "__dlpack__"})

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", None) in cls._READERS:
            for tensor in tensors(args):
                late = tensor.late() if isinstance(tensor, LateTensor) else None
                if late is not None:
                    late.fill([tensor])
        with without_overrides():
            return func(*args, **(kwargs or {}))
