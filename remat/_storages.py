"""Which value each storage holds now."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ._bulk import gone
from ._facts import tensors
from ._residual import memory
from ._state import unseen
from ._values import New, holder, is_dense, place_of

if TYPE_CHECKING:
    from typing import Self

    from ._program import Known, View

# Constants up to this size are compared, so that one can stand for another in a run again.
CONSTANT_BYTES = 4096


class Storages:
    """The numbers of the values that storages hold. Keeps none of them alive.

    Of each tensor that was met it is remembered on which storage it lies and how, as that takes long to find out. Not
    even that is needed where a value is read from the very tensor that it was made as, its *original*, or from a view
    of that which the last run made too.
    """

    def __init__(self) -> None:
        self.count = 0  # of values
        self.known: dict[Known, Callable[[], torch.Tensor | None]] = {}  # originals and views, weak, until they change
        self.unmet: dict[Known, tuple | None] = {}  # those of these of which no more is noted yet; their forms
        self._views: dict[int, View] = {}  # by the tensor's id: the known views
        self.constants: dict[int, torch.Tensor | None] = {}  # made out of sight by the function; copies of small ones
        self.tracked: set[int] = set()  # those of these that require grad
        self._homes: dict[int, list] = {}  # by the storage's id: a weak reference to it, and its number
        self._tensors: dict[int, tuple] = {}  # by the tensor's id: the same, its home, its form, the storage's id

    def number(self) -> int:
        """The number of a new value."""
        self.count += 1
        return self.count - 1

    def is_made(self, number: int, tensor: torch.Tensor, form: tuple | None) -> None:
        """Note that a value was made as a tensor of this form, of which more is noted when that is asked for."""
        self.known[number] = weakref.ref(tensor)
        self.unmet[number] = form

    def is_shown(self, view: View, tensor: torch.Tensor) -> None:
        """The same with a view."""
        self.known[view] = weakref.ref(tensor)
        self.unmet[view] = view.form
        self._views[id(tensor)] = view

    def known_as(self, tensor: torch.Tensor) -> Known | None:
        """What a tensor is known as, if it is."""
        for known in self._views.get(id(tensor)), self.find(tensor):
            if known is not None and self.known.get(known, gone)() is tensor:
                return known
        return None

    def newest(self, tensor: torch.Tensor) -> int | None:
        """The number of a value, if this is a known view of it or one of the newest originals, as what is named is."""
        view = self._views.get(id(tensor))
        if view is not None and self.known.get(view, gone)() is tensor:
            return view.value
        for number in range(self.count - 1, self.count - 4, -1):
            if self.known.get(number, gone)() is tensor:
                return number
        return None

    def meet(self) -> None:
        """Note what storages the known ones lie on, before another tensor may be all that is left of one."""
        if not self.unmet:
            return
        unmet, self.unmet = self.unmet, {}
        for known, form in unmet.items():
            tensor = self.known.get(known, gone)()
            if tensor is None:
                continue
            new = place_of(tensor) if form is None else (tensor.untyped_storage(), form)
            if isinstance(known, int):
                self.add((tensor, *new), known)
            else:
                storage, form = new
                home = self._homes.get(id(storage))
                if home is None or home[0]() is not storage:  # the original is gone
                    self._homes[id(storage)] = [weakref.ref(storage), known.value]
                self._remember(tensor, storage, form)

    def _stop_views(self) -> None:
        """Something has changed that they may show."""
        if self._views:
            self.meet()
            for view in self._views.values():
                self.known.pop(view, None)
            self._views.clear()

    def enter_all(self, tensors: list[torch.Tensor]) -> tuple[int, ...]:
        """Number tensors, in order, as the originals of their values; returns their offsets.

        There are none, and nothing is numbered, if some have no storage or share it.
        """
        try:
            storages = list(map(torch.Tensor.untyped_storage, tensors))
        except RuntimeError:
            return ()
        if len(set(map(id, storages))) < len(storages):
            return ()
        self.count = len(tensors)
        self.enter_again(range(self.count), tensors)
        return tuple([int(tensor.storage_offset()) for tensor in tensors])

    def enter_again(self, numbers: Sequence[int], tensors: list[torch.Tensor]) -> None:
        """The same with numbers that are known, none of them twice."""
        self.known.update(zip(numbers, map(weakref.ref, tensors)))
        self.unmet.update(dict.fromkeys(numbers))

    def find(self, tensor: torch.Tensor) -> int | None:
        """The number of what a tensor's storage holds, None for a storage that is not known."""
        known = self._tensors.get(id(tensor))
        if known is not None and known[0]() is tensor and known[3] == id(tensor.untyped_storage()):
            return known[1][1]
        home = self._home(holder(tensor))
        return None if home is None else home[1]

    def enter(self, tensor: torch.Tensor) -> int:
        """The number of what a tensor's storage holds, a new one if the storage is not known."""
        storage = holder(tensor)
        home = self._home(storage)
        if home is None:
            home = self._homes[id(storage)] = [weakref.ref(storage), self.number()]
        return home[1]

    def look(self, tensor: torch.Tensor) -> tuple[int | None, tuple | None]:
        """The same, and the tensor's form."""
        known = self._tensors.get(id(tensor))
        if known is not None and known[0]() is tensor and known[3] == id(tensor.untyped_storage()):
            return known[1][1], known[2]
        storage, form = place_of(tensor)
        home = self._home(storage)
        return (None if home is None else home[1]), form

    def _home(self, storage: Any) -> list | None:
        if self.unmet:
            self.meet()
        home = self._homes.get(id(storage))
        return home if home is not None and home[0]() is storage else None

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether its storage was met."""
        try:
            return self._home(tensor.untyped_storage()) is not None
        except RuntimeError:
            return self._home(tensor) is not None

    def get(self, tensor: torch.Tensor) -> int:
        """The number of what a tensor's storage holds; one that is not known comes from outside."""
        return self._met(tensor)[1][1]

    def bind(self, tensor: torch.Tensor, number: int) -> None:
        """Note what the storage of a tensor holds from now on."""
        storage, form = place_of(tensor)
        self.put(storage, number)
        self._remember(tensor, storage, form)

    def put(self, storage: Any, number: int) -> None:
        """The same with the storage."""
        home = self._home(storage)
        if home is None:
            self._homes[id(storage)] = [weakref.ref(storage), number]
        else:
            self.known.pop(home[1], None)
            home[1] = number
            self._stop_views()

    def add(self, new: New, number: int) -> None:
        """Note what a storage holds that wasn't known, and the tensor on it."""
        tensor, storage, form = new
        key = id(storage)
        self._homes[key] = home = [weakref.ref(storage), number]
        if form is not None:
            self.known[number] = ref = weakref.ref(tensor)
            self._tensors[id(tensor)] = ref, home, form, key

    def _remember(self, tensor: torch.Tensor, storage: Any, form: tuple | None) -> tuple:
        key = id(storage)
        known = weakref.ref(tensor), self._homes[key], form, key
        if form is not None:
            self._tensors[id(tensor)] = known
        return known

    def forget(self, tensor: torch.Tensor) -> None:
        """It may lie in another way from now on."""
        number = self.find(tensor)
        if number is not None:
            self.known.pop(number, None)
        self._stop_views()
        self._tensors.pop(id(tensor), None)

    def new(self, result: Any) -> list[New]:
        """The tensors of a result that have storages of their own, which aren't known."""
        if isinstance(result, torch.Tensor):
            return [] if self.knows(result) else [(result, *place_of(result))]
        found: dict[int, New] = {}
        for tensor in tensors(result):
            storage, form = place_of(tensor)
            if self._home(storage) is None:
                found.setdefault(id(storage), (tensor, storage, form))
        return [*found.values()]

    def outside(self, known: Collection[int]) -> Self:
        """Those alone that are still there and hold other values than these: what is made out of sight."""
        found = self.copy(but=known)
        found._homes = {key: home for key, home in found._homes.items() if home[0]() is not None}
        return found

    def values(self) -> list[int]:
        """What all storages hold that are still there."""
        self.meet()
        return [number for ref, number in self._homes.values() if ref() is not None]

    def where(self, number: int) -> Any:
        """The storage that holds a value, None if none does any more."""
        return next((ref() for ref, held in self._homes.values() if held == number), None)

    def copy(self, but: Collection[int] = ()) -> Self:
        """The same, to go on with, without those that hold certain values. No tensors are known."""
        found = type(self)()
        found.count = self.count
        found.constants, found.tracked = self.constants.copy(), self.tracked.copy()
        found._homes = {key: [*home] for key, home in self._homes.items() if home[1] not in but}
        return found

    def _met(self, tensor: torch.Tensor) -> tuple:
        """What is remembered of a tensor from now on."""
        storage, form = place_of(tensor)
        if self._home(storage) is None:
            number = self.number()
            self.put(storage, number)
            self.constants[number] = _constant(tensor)
            if tensor.requires_grad:
                self.tracked.add(number)
        return self._remember(tensor, storage, form)


def _constant(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy of a small one; a parameter was not made by the function."""
    if (
        tensor.requires_grad
        or isinstance(tensor, torch.nn.Parameter)
        or not is_dense(tensor)
        or tensor.device.type != "cpu"
    ):
        return None
    if tensor.untyped_storage().nbytes() > CONSTANT_BYTES:
        return None
    with unseen():
        return memory(tensor).clone()
