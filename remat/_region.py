"""A region: one call of a rematerialized function, with all that it takes to run it again.

The tensors that a run is given from outside are its *operands*: the tensor leaves of the arguments and, under
torch.func, captured tensors that a transform follows. All other captured tensors are the region's own to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from . import _torch, _tree
from ._ambient import Ambient
from ._captured import Found, find
from ._contents import is_put_back, snapshots
from ._engine import mark
from ._errors import CaptureError
from ._intercept import Interceptor, made_inside
from ._kept import Kept
from ._memory import Memory
from ._nested import within
from ._outputs import Outputs
from ._places import Place
from ._plan import Plan
from ._policy import Policy
from ._rebound import rebound
from ._record import Record
from ._recorder import Open, Recorder
from ._replay import Replay
from ._state import own_work, recomputing, state
from ._trace import Retrace, Trace
from .policies import nothing_saveable

# Leaves that hold no tensor, the most frequent ones: they aren't searched for captured tensors.
_PLAIN = frozenset([type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Generator])


@dataclass(frozen=True, slots=True)
class Options:
    """How a region is run; see :func:`remat.remat`."""

    preserve_rng_state: bool = True
    determinism_check: str = "metadata"
    early_stop: bool = True
    debug: bool = False
    policy: Policy | None = None


class Region:
    """One call of ``fn(*args, **kwargs)``."""

    key: tuple = ()  # how a region was derived from it

    __slots__ = (
        "ambient", "arguments", "arity", "bindings", "captured", "cells", "consts", "contents", "devices", "fixed",
        "fn", "found", "holders", "inherited", "kinds", "leaves", "log", "mapped", "memory", "options", "outputs",
        "places", "plan", "positions", "ran", "record", "replay", "spec", "swapped", "trace", "undo_record", "uses",
        "watch",
    )  # fmt: skip

    def __init__(self, fn: Callable, args: tuple, kwargs: dict, options: Options, memory: Memory) -> None:
        leaves, self.spec = _tree.flatten((args, kwargs))
        self.fn = fn
        self.options = options
        self.memory = memory
        # One operand for each tensor: a function may ask whether two arguments are the same one.
        first: dict[int, int] = {}
        self.positions: list[int] = []  # of the leaves, each tensor once
        self.uses: list[tuple[int, int]] = []  # position of a leaf, index of its operand
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                self.uses.append((position, first.setdefault(id(leaf), len(first))))
                if len(first) > len(self.positions):
                    self.positions.append(position)
        self.arguments: list[torch.Tensor] = [leaves[i] for i in self.positions]
        for position, _ in self.uses:
            leaves[position] = None
        self.leaves = leaves
        found = find(fn, *(leaf for leaf in leaves if type(leaf) not in _PLAIN))
        self.found: Found | None = found
        self.cells = found.cells
        self.contents = [snapshot for snapshot in found.contents if is_put_back(snapshot)]
        self.holders: list[tuple[Place, Any]] = []  # the places on the way to captured tensors
        self.fixed: list[tuple[Place, torch.Tensor, int]] = []  # captured where they can't be exchanged; versions
        self.captured: list[torch.Tensor] = []  # the operands beyond the arguments
        self.swapped: list[torch.Tensor] = []  # the first of these, without a place: swapped where they're read
        self.inherited = state.interceptors[-1].swaps if state.interceptors else {}
        self.places: list[Place] = []  # of the other captured tensors
        self.bindings: list[tuple[Place, int]] = []  # place -> index of an operand
        self.consts: Kept | None = None
        self.outputs = Outputs(options)
        self.ran = False
        self.kinds: tuple = ()  # of the torch.func levels that it was called under, the bottom one first
        self.mapped = False  # it must run under ``vmap`` levels at which no operand is batched
        self.trace: Trace | None = None  # of the first run, where runs again may need it
        self.record: Record | None = None  # of the first run, under a policy
        self.plan: Plan | None = None  # of a run again, if not all is wanted
        self.replay: Replay | None = None
        self.log: Any = None  # notes or compares the operations of a run
        self.devices: set[torch.device] = set()
        self.arity = len(self.positions)
        self.watch: Any = None  # set where captured tensors without a place must be found
        self.ambient: Ambient | None = None

    root = property(lambda self: self)
    uses_func = property(lambda self: self.memory.uses_func)

    # --- before the first run -------------------------------------------------------------------------------------

    def open(self, follow: Callable[[torch.Tensor], bool] | None = None) -> None:
        """Record the ambient state and the captured tensors, as they are now.

        Captured tensors for which ``follow`` is true become operands, the others are kept as they are.
        """
        tensors = []
        generators = [leaf for leaf in self.leaves if isinstance(leaf, torch.Generator)]
        places, bindings, captured = [], [], list(self.swapped)
        index = {id(t): i for i, t in enumerate([*self.arguments, *captured])} if follow else {}
        assert self.found is not None
        self.holders, self.fixed = self.found.holders(), []
        for place, value in self.found.places:
            if not isinstance(value, torch.Tensor):
                generators.append(value)
            elif not place.settable:
                if follow is None or not follow(value):  # else it is swapped where it is read
                    self.fixed.append((place, value, _torch.version(value)))
            elif follow is not None and follow(value):
                if id(value) not in index:
                    index[id(value)] = len(self.positions) + len(captured)
                    captured.append(value)
                bindings.append((place, index[id(value)]))
            else:
                tensors.append(value)
                places.append(place)
        self.places, self.bindings, self.captured = places, bindings, captured
        self.arity = len(self.positions) + len(captured)
        self.consts = Kept(tensors, lambda i: f"captured {places[i].path}", self.memory.changing)
        self.devices = {t.device for t in (*self.arguments, *tensors, *captured)}
        self.undo_record = mark()
        own = self.options.policy or nothing_saveable
        policy = within(state.policies[-1] if state.policies else None, own)
        fake = any(isinstance(t, _torch.FakeTensor) for t in (*self.arguments, *tensors, *captured))
        plain = policy.saves_nothing or fake
        self.record = None if plain else Record(policy, self.memory, own.mentioned_names)
        self.ambient = Ambient.capture(self.devices, generators, self.options.preserve_rng_state)

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make captured tensors that have no place operands: they are swapped wherever they are read."""
        self.swapped.extend(tensors)

    def take_suspects(self) -> dict[int, torch.Tensor]:
        """What the watch of the last run suspects."""
        suspects = {} if self.watch is None else self.watch.suspects
        self.watch = None
        return suspects

    def check_left_behind(self, outs: Sequence[torch.Tensor]) -> None:
        """After a first run: tensors that leave the function in another way than as results have lost their levels.

        Raises:
            CaptureError: it left one behind that a transform differentiates.
        """
        transform = _torch.TransformType
        if self.watch is None or (self.kinds and transform.Grad not in self.kinds and transform.Jvp not in self.kinds):
            return  # what vmap leaves behind is of no use without remat either
        known = {id(t) for t in (*outs, *self.operands())}
        values = (*self.leaves, *(value for _, value in self.outputs.entries))
        for place, value in find(self.fn, *(v for v in values if type(v) not in _PLAIN)).places:
            if isinstance(value, torch.Tensor) and id(value) not in known and self.watch.has_lost(value):
                raise CaptureError(
                    f"A region under torch.func left a tensor of shape {tuple(value.shape)} in {place.path}, where its "
                    f"derivatives would be lost. Return it from the function, or leave `.detach()` of it behind."
                )

    def operands(self) -> list[torch.Tensor]:
        """The operands, as the caller of the region knows them."""
        return [*self.arguments, *self.captured]

    def forget(self) -> None:
        """Let go of the operands: whoever runs the region again brings them."""
        self.arguments, self.captured = [], []
        self.found = self.watch = None  # a watch knows its region

    def name(self, i: int) -> str:
        """What the i-th operand is called in an error."""
        if i < len(self.positions):
            args = _tree.paths(self.spec, "")[self.positions[i]]
            return "argument " + (f"args{args[3:]}" if args.startswith("[0]") else f"kwargs{args[3:]}")
        for place, index in self.bindings:
            if index == i:
                return f"captured {place.path}"
        return "a captured tensor"

    # --- running ----------------------------------------------------------------------------------------------------

    def call(self, operands: Sequence[torch.Tensor], mode: Any) -> Any:
        """The function's own result, from these operands in the places of the arguments."""
        leaves = list(self.leaves)
        for position, index in self.uses:
            leaves[position] = operands[index]
        args, kwargs = _tree.unflatten(self.spec, leaves)
        made_inside(operands)
        with own_work(False), mode, self.log or nullcontext():
            return self.fn(*args, **kwargs)

    def first(self, args: tuple, kwargs: dict) -> Any:
        """The first run, on the user's own arguments."""
        self.ran = True
        with own_work(False), self._recorder(self.arguments, alone=True), self.log or nullcontext():
            result = self.fn(*args, **kwargs)
        self.outputs.spec = _tree.flatten(result)[1]
        return result

    def call_again(self, operands: Sequence[torch.Tensor], trace: Trace | None = None) -> Any:
        """The same once more: the ambient state and the captured tensors are those of the first run."""
        assert self.ambient is not None
        with ExitStack() as stack:
            stack.enter_context(recomputing())
            stack.enter_context(self.ambient.restored())
            captured = self._captured_again()
            stack.enter_context(self._bound_again(operands, captured))
            stack.enter_context(self._swapped(operands, trace))
            return self._replayed(operands, captured)

    def run(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The new tensors among the results; the other results are left in ``outputs``. For the func lowering."""
        if self.ran:
            result = self.call_again(operands, None if self.trace is None else Retrace(self.trace))
            return self.outputs.compare(result, operands)
        self.ran = True
        with self._bound(operands), self._swapped(operands, self.trace):
            result = self.call(operands, self._recorder(operands))
        return self.outputs.record(result, operands)

    def _bound(self, operands: Sequence[torch.Tensor]) -> Any:
        return rebound([(place, operands[i]) for place, i in self.bindings], keep_changes=True)

    def _recorder(self, operands: Sequence[torch.Tensor], alone: bool = False) -> Any:
        """What watches a first run under a policy; ``alone`` without transforms."""
        if self.record is None or self.consts is None:
            return nullcontext()
        self.record.bind([*operands, *(t for t in self.consts.tensors if t is not None)])
        return Open(self.record) if alone and self.record.look_away() else Recorder(self.record)

    def _replayed(self, operands: Sequence[torch.Tensor], captured: list[torch.Tensor]) -> Any:
        if self.record is None or not self.record.tells:
            return self.call(operands, nullcontext())
        self.replay = replay = Replay(self.record, self.plan or self.record.plan(), [*operands, *captured])
        result = self.call(operands, replay)
        if self.plan is None:  # else whoever made the plan does it, when all that the run has made is gone
            replay.finish(None if self.options.determinism_check == "values" else result)
            self.replay = None
        return result

    def _captured_again(self) -> list[torch.Tensor]:
        assert self.consts is not None
        return [self.consts.captured_again(i) for i in range(len(self.consts))]

    def _bound_again(self, operands: Sequence[torch.Tensor], captured: list[torch.Tensor]) -> Any:
        values = [*snapshots(self.contents), *self.holders, *((place, operands[i]) for place, i in self.bindings)]
        values += zip(self.places, captured)
        return rebound(values, cells=self.cells)

    def _swapped(self, operands: Sequence[torch.Tensor], trace: Trace | None) -> Any:
        own = dict(zip(map(id, self.swapped), operands[len(self.positions) :]))
        # What it captures may have been changed, as long as it does not read it.
        stale = self._stale() if self.ran else {}
        if own or self.inherited or stale or trace is not None or self.watch is not None:
            return Interceptor(own, self.inherited, self.watch, trace, stale)
        return nullcontext()

    def _stale(self) -> dict[int, str]:
        assert self.consts is not None
        stale = self.consts.stale()
        for place, tensor, version in self.fixed:
            if _torch.version(tensor) != version:
                stale[id(tensor)] = (
                    f"captured {place.path} was changed in place by the region or after it, and is held where it can't "
                    f"be exchanged for its old value. Pass it to the region as an argument, or hold it in a list."
                )
        return stale

    def restart(self) -> None:
        """Undo what a first run that was given up has drawn from the generators."""
        assert self.ambient is not None and self.consts is not None
        self.ambient.rewind()
        self.consts.roll_back()
        rebound([*snapshots(self.contents), *self.holders], cells=self.cells).__enter__()  # for good
        self.undo_record()
        self.ran = False

    def check_result(self, result: Any) -> None:
        """Compare the structure of a run again's result with the first one."""
        self.outputs.check_structure(result)
