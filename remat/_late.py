"""Results that nothing seems to need, in a run again: tensors that get their content only when it is read after all."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ._errors import RecomputeMismatchError
from ._facts import mapped, tensors
from ._state import alias, state, unseen
from ._streams import resumed, streams_for
from ._torch import as_subclass, without_levels, without_overrides
from ._values import Layout, holder

if TYPE_CHECKING:
    from ._program import Step


class LateCall:
    """An operation that was put off, with its arguments and the streams on which it was called."""

    __slots__ = ("args", "kwargs", "step", "streams")

    def __init__(self, step: Step, args: tuple, kwargs: dict) -> None:
        # Without their history, which would hold the graph of the run.
        self.step, self.args, self.kwargs = step, mapped(alias, args), mapped(alias, kwargs)
        self.streams = streams_for(tensors((args, kwargs)))

    def draw(self) -> None:
        """Run it for the generator's sake alone."""
        own = torch.clone if self.step.facts.writes else alias
        with resumed(self.streams):
            self.step.func(*mapped(own, self.args), **mapped(own, self.kwargs))


class Late:
    """The tensors without content, by their storages. None of them is kept alive."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref, Layout, LateCall]] = {}
        self.number = 0  # that of the replay
        self.running = False  # operations that were put off run now

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, tensor: torch.Tensor, layout: Layout, call: LateCall) -> None:
        """A tensor that is the ``layout.i``-th new one of a call that was put off."""
        tensor.fill_(torch.nan)  # if it is read in a way that can't be seen, that shows
        for key in [key for key, (ref, _, _) in self._entries.items() if ref() is None]:
            del self._entries[key]  # and with it the arguments of its call
        storage = holder(tensor)
        self._entries.pop(id(storage), None)  # a dead one may have had that id: its place isn't for a later call
        self._entries[id(storage)] = weakref.ref(storage), layout, call

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

    def settle(self, but: Iterable[torch.Tensor] = ()) -> None:
        """The run has ended: fill what somebody else holds. ``but`` are those that nobody reads."""
        unread = {id(holder(tensor)) for tensor in but}
        # From the last one, as calls hold their arguments.
        for key in reversed(list(self._entries)):
            entry = self._entries.get(key)
            if entry is not None and key not in unread and entry[0]() is not None:
                self._run(entry[2])
            self._entries.pop(key, None)

    def _run(self, call: LateCall) -> None:
        """Run a call for all of its tensors that are still there."""
        if call.step.draws:
            raise RecomputeMismatchError(
                f"The region reads random numbers of {call.step.func} when it is run again that it did not read in its "
                f"forward. A region must do the same each time: look for Python state that changed between the runs."
            )
        mine = {key: entry for key, entry in self._entries.items() if entry[2] is call}
        self.fill(tensors((call.args, call.kwargs)))
        before, late, self.running, state.late = self.running, state.late, True, self.number
        with resumed(call.streams):
            try:
                with torch.no_grad(), without_levels(), unseen(False):
                    outs = dict(_contents(call.step.result, call.step.func(*call.args, **call.kwargs)))
            finally:
                self.running, state.late = before, late
            for key, (ref, layout, _) in mine.items():
                storage = ref()
                if storage is not None:
                    with unseen():
                        layout.on(storage).copy_(outs[layout.i])
                self._entries.pop(key, None)

    def mark(self, result: Any) -> Any:
        """Make those tensors of a result that have no content fill themselves where torch hands out their memory."""
        if isinstance(result, torch.Tensor):
            return self._marked(result) if self._find(result) is not None else result
        if type(result) in (tuple, list):
            return type(result)(map(self.mark, result))
        return result

    def _marked(self, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not torch.Tensor:
            return tensor  # a FakeTensor has no content anyway
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
    _READERS = frozenset(
        {"numpy", "tolist", "data_ptr", "__array__", "__dlpack__", "__repr__", "__format__", "__reduce_ex__", "storage"}
    )

    def fill_itself(self) -> None:
        """Get the content, if it has none yet."""
        late = self.late()
        if late is not None:
            late.fill([self])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", None) in cls._READERS:
            for tensor in tensors(args):
                if isinstance(tensor, LateTensor):
                    tensor.fill_itself()
        with without_overrides():
            return func(*args, **(kwargs or {}))
