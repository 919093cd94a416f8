"""The run again of a region, which fills the slots of its first run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from contextlib import ExitStack, contextmanager
from itertools import chain, compress
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd.forward_ad as fwAD
from torch.utils.hooks import RemovableHandle

from . import _torch
from ._determinism import describe, is_other, look_at, user_line
from ._errors import RecomputeMismatchError
from ._hooks import drop_gradient_hooks, hooks_allowed
from ._parts import bare
from ._slots import Slot, Stop
from ._state import alias, as_in_forward, state
from ._streams import resumed
from ._torch import modes_that_see

if TYPE_CHECKING:
    from ._engine import Frame


class Saved(list[torch.Tensor]):
    """What a run again has saved, where its ``append`` is the hook: regions inside know by the owner who is around."""


class Filler:
    """One run again of a region: hooks that count what it saves and put it into the slots that are alive."""

    __slots__ = (
        "alias", "count", "difference", "ending", "frame", "last", "look", "root", "slots", "stopped", "value",
        "wanted",
    )  # fmt: skip

    def __init__(self, frame: Frame, slots: list[Any], wanted: Slot) -> None:
        self.wanted = wanted
        self.value: torch.Tensor | None = None  # of the wanted slot, which another thread may empty
        self.frame = frame
        self.root = frame.region.root
        self.look = frame.look
        self.alias: Callable[[torch.Tensor], torch.Tensor] = alias
        self.slots = slots
        self.count = 0
        self.stopped = False
        self.ending: int | None = None  # after so many steps it stops
        self.difference: str | None = None
        self.last = len(slots) - 1
        while not slots[self.last]:
            self.last -= 1

    def run(self) -> None:
        contexts = self._contexts()
        before = torch.is_grad_enabled()
        _torch.set_grad_enabled(True)
        try:
            if not contexts:
                return self._run()
            with ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context)
                self._run()
        finally:
            _torch.set_grad_enabled(before)

    def _contexts(self) -> list[Any]:
        """What a run again has to be shielded from, or given back: nothing, in a plain backward pass."""
        frame = self.frame
        contexts: list[Any] = []
        if _torch.transforms_active():
            contexts.append(_torch.without_levels())
        if _torch.batched_backward_depth():
            contexts.append(_outside_of_batched_backward())
        if not _torch.is_torch_function_enabled():
            contexts.append(_torch.torch_function_enabled())
        if _torch.hooks_disabled_message() is not None:
            contexts.append(hooks_allowed(whoever_forbids=True))
        if (frame.operands.duals or frame.consts.duals) and not _torch.dual_level_active():
            contexts.append(fwAD.dual_level())
        if frame.streams:
            contexts.append(resumed(frame.streams))
        return contexts

    def _run(self) -> None:
        frame = self.frame
        if frame.noted or frame.policies or frame.log is not None or modes_that_see():
            return self._run_under(self._pack_and_tell)
        self.alias = torch.Tensor.detach
        intact = frame.operands.as_they_were and frame.consts.as_they_were
        if frame.to_end and intact and not frame.inside and None not in self.slots:
            saved = Saved()
            self._run_under(saved.append, saved)
            if self._filled_at_once(saved):
                return
            self.count = 0
        self._run_under(self.pack)  # it says what the difference is, if it is there again

    def _run_under(self, pack: Callable[[torch.Tensor], Any], saved: Sized = ()) -> None:
        frame, root = self.frame, self.root
        frame.consts.accumulated |= frame.inside
        operands = frame.operands.all_again()
        trace, root.trace = root.trace, None  # saved tensors are counted here
        result = None
        replay = root.log = None if frame.log is None else frame.log.replay()
        if frame.record is not None and frame.record.tells:
            root.plan = frame.record.plan(slot for slot in self.slots if slot)
        hooks = RemovableHandle.next_id
        _torch.push_hooks(pack, _same)
        try:
            if frame.policies or frame.open or state.policies or state.unseen or state.filling:
                with as_in_forward(frame.policies, filling=frame.open):
                    result = frame.region.call_again(operands)
            else:
                result = frame.region.call_again(operands)
        except (Stop, Exception):
            # TorchScript makes another exception of a stop; and it may be another region's.
            if not self.stopped:
                raise
        finally:
            _torch.pop_hooks()
            drop_gradient_hooks(chain(frame.consts.tensors, (t for _, t, _ in root.fixed)), hooks)
            again, root.replay = root.replay, None
            root.log, root.trace, root.plan = None, trace, None
        if not (self.stopped or (saved and frame.options.early_stop)):
            self.count = self.count or len(saved)
            self._check_end(result, replay)
        del operands, result
        if again is not None:
            again.finish()

    def _filled_at_once(self, saved: Saved) -> bool:
        """Fill the slots after a run that had no reason to stop; False if it saved other tensors, or changed one."""
        if len(saved) != len(self.slots):
            return False
        slots, chosen = list(filter(None, self.slots)), list(compress(saved, self.slots))
        before = list(map(_fingerprint, slots))
        try:
            now = list(map(self.look, chosen))
        except RuntimeError:  # an inference tensor
            return False
        if before != now and (any(map(is_other, before, now)) or any(map(_is_changed, before, now))):
            return False
        values = list(map(torch.Tensor.detach, chosen))
        self.value = values[slots.index(self.wanted)]
        for slot, look, value in zip(slots, now, values):
            slot.version = look[4]
            slot.value = value  # last, as another thread may be waiting for it
        return True

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        index = self.count
        self.count = index + 1
        if index >= len(self.slots):
            return self._one_more(tensor)
        slot = self.slots[index]
        if not slot:  # it is read only by a backward pass inside; a leaf refers to nothing, so it may stay itself
            return tensor if tensor.is_leaf else alias(tensor)
        value = self.alias(tensor)
        watched = slot.first is not None
        now = look_at(tensor, self.frame.check) if watched else self.look(tensor)
        if now != slot.fingerprint:
            self._compare(index, slot.fingerprint, now)
        slot.version = _torch.version(value) if watched else now[4]
        slot.value = value  # last, as another thread may be waiting for it
        if slot is self.wanted:
            self.value = value
        if index == self.last:
            self._end()
        return value

    def _pack_and_tell(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same where levels of torch.func, or a run that skips operations, have to do with it."""
        if _torch.is_wrapped(tensor):
            return bare(tensor)
        replay = self.root.replay
        if self.ending is not None and replay is not None and replay.position >= self.ending:
            self._stop()
        if replay is not None and replay.late and self.count < len(self.slots) and self.slots[self.count]:
            replay.late.fill([tensor])
        return self.pack(tensor)

    def _one_more(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.stopped:
            raise Stop
        if self.frame.check != "none" and not self.frame.open:
            raise RecomputeMismatchError(self._too_many())
        return alias(tensor)

    def _compare(self, index: int, before: tuple, now: tuple) -> None:
        if is_other(before, now):
            self.difference = self.difference or self._differs(index, before, now)
            if self.frame.log is None:  # else the operation that comes next tells more
                raise RecomputeMismatchError(self.difference)

    def _end(self) -> None:
        """All slots are filled."""
        if self.difference is not None:
            raise RecomputeMismatchError(self.difference)
        if self.frame.options.early_stop:
            # The operation that runs now may fill what it has saved: then it must run to its end.
            early = [slot.source.after for slot in self.slots[max(0, self.last - 2) :] if slot and slot.early]
            self.ending = max(early, default=None)
            if self.ending is None:
                self._stop()

    def _stop(self) -> None:
        self.stopped = True
        self.count = len(self.slots)
        raise Stop

    def _check_end(self, result: Any, replay: Any) -> None:
        if replay is not None:
            replay.check_end()
        if self.frame.check == "none" or self.frame.open:
            return
        if self.difference is not None:
            raise RecomputeMismatchError(self.difference)
        if self.count < len(self.slots):
            raise RecomputeMismatchError(self.too_few())
        self.frame.region.check_result(result)

    def _differs(self, index: int, before: Any, now: Any) -> str:
        return (
            f"Tensor {index} that the region saved for its backward was {describe(before)} in the forward and is "
            f"{describe(now)} when the region was run again, at {user_line()}. {_ADVICE}"
        )

    def _too_many(self) -> str:
        return (
            f"The region saved {len(self.slots)} tensors for its backward in the forward, and one more when it was "
            f"run again, at {user_line()}. {_ADVICE}"
        )

    def too_few(self) -> str:
        return (
            f"The region saved {len(self.slots)} tensors for its backward in the forward, and only {self.count} when "
            f"it was run again. {_ADVICE}"
        )


@contextmanager
def _outside_of_batched_backward() -> Iterator[None]:
    depth = _torch.batched_backward_depth()
    _torch.set_batched_backward_depth(0)
    try:
        yield
    finally:
        _torch.set_batched_backward_depth(depth)


_ADVICE = (
    "A region must do the same each time. Look for Python state that changed between the runs, a branch on values that "
    "are random or not reproducible, a cache, or saved-tensor hooks around that change values; "
    "`remat(..., debug=True)` shows the first operation that differs."
)


_fingerprint = attrgetter("fingerprint")


def _is_changed(before: tuple, now: tuple) -> bool:
    """Whether a tensor was changed in place after it was saved."""
    return before[4] != now[4]


def _same(value: torch.Tensor) -> torch.Tensor:
    return value
