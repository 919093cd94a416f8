"""A region: one call of a rematerialized function, with all that a recompute needs; and the state of one run of it.

The tensors that a run gets from outside are its *operands*: the tensor leaves of the arguments and, under torch.func,
captured tensors that a transform follows. All other captured tensors are saved by the region itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import torch

from .._ambient.ambient import Ambient
from .._captured.captured import Captured, Path, find
from .._captured.variables import Variables, bound
from .._core import private, trees
from .._core.known import Known
from .._core.lines import user_line
from .._core.ranges import in_range
from .._core.state import first_run, own_work, recomputing, state
from .._core.tensors import is_left_from_vmap
from .arguments import Arguments, Outputs
from .around import Around
from .error_context import with_region
from .guards import NO_GUARDS, Guards, Stale, apart, as_before, same, twice_below
from .options import UNFINISHED, Options, refuse_unfinished
from .turns import turn

T = TypeVar("T")


class Run:
    """The base class of runs. On its own, a recompute that skips and restores nothing."""

    __slots__ = ("log",)

    recorder: Any = None  # records the operations of a first run under a policy
    replay: Any = None  # the dispatch mode of a recompute under a policy
    watch: Any = None  # sees the torch functions that a first run under torch.func calls
    must_restart = False  # it has read a value that it skips

    def __init__(self) -> None:
        self.log: Any = None  # the operation log of ``debug=True``

    def mode(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Return the dispatch mode for the run, or None. ``inputs`` come from outside of the region."""
        return None

    def escaped(self) -> bool:
        """Whether a skipped value is still referenced after the run."""
        return False

    def carry_out(self, operands: Sequence[torch.Tensor], go: Callable[[Run], T]) -> T:
        """Recompute, in as many attempts as needed."""
        return go(self)


class FirstRun(Run):
    """A first run."""

    __slots__ = ("recorder", "watch")

    def __init__(self, recorder: Any, watch: Any = None) -> None:
        super().__init__()
        self.recorder, self.watch = recorder, watch

    def mode(self, inputs: Sequence[torch.Tensor]) -> Any:
        if self.recorder is not None:
            self.recorder.bind(inputs)
        return self.recorder


_on_cpu = attrgetter("is_cpu")


class Region:
    """One call of ``fn(*args, **kwargs)``."""

    is_pullback = False

    __slots__ = (
        "ambient",
        "arguments",
        "arity",
        "around",
        "bindings",
        "captured_inputs",
        "captured_operands",
        "code",
        "fn",
        "graded",
        "ids",
        "kinds",
        "known",
        "mapped",
        "number",
        "options",
        "outputs",
        "paths",
        "ran",
        "record",
        "same",
        "search_result",
        "tensors",
        "twice",
        "uses_func",
        "variables",
    )  # fmt: skip

    def __init__(
        self, fn: Callable, arguments: Arguments, tensors: list, options: Options, known: Known, around: Around | None
    ) -> None:
        self.fn, self.options, self.known = fn, options, known
        self.arguments, self.tensors = arguments, tensors
        self.code, self.number = user_line(4)  # the user's line that called it; a `Line` would be one more object
        self.around = around  # the hooks around it, with their positions at its start, for `restart`
        self.search_result: Captured | None = None  # the result of `search`
        self.variables: Sequence[Variables] = ()  # the variables that the function reads
        # Most regions have none of these. Few objects for each region keep the garbage collector's work small.
        self.captured_operands: Sequence[torch.Tensor] = ()  # captured tensors that are operands
        self.paths: Sequence[Path] = ()  # of the captured tensors in `captured_inputs`
        self.ids: Sequence[int] = ()  # the ids of these, by which `variables` refer to them
        self.bindings: Mapping[int, tuple[Path, int]] = {}  # id of a captured tensor -> path, index of an operand
        self.captured_inputs: Guards = NO_GUARDS  # captured tensors that are not operands
        self.same: Sequence[tuple[int, int]] = ()  # pairs of operands and captured tensors that are one tensor
        self.twice: Sequence[int] = ()  # operands that are another operand or a captured tensor below the levels
        self.outputs = Outputs(options)
        self.ran = False
        self.kinds: tuple = ()  # of the torch.func levels that it was called under, the bottom one first
        self.uses_func = False  # its function calls torch.func transforms, so it can't run under saved-tensor hooks
        self.graded = False  # its first run must restore the ``grad`` levels
        self.mapped = False  # it must run under ``vmap`` levels at which no operand is batched
        self.record: Any = None  # of the first run under a policy, when it has ended
        self.arity = len(self.tensors)
        self.ambient: Ambient | None = None

    root = property(lambda self: self)

    # --- before the first run -------------------------------------------------------------------------------------

    def open(self, follow: Callable[[torch.Tensor], bool] | None = None, around: Around | None = None) -> None:
        """Record the ambient state and the captured tensors, as they are now.

        Captured tensors for which ``follow`` is true become operands. The region saves the other captured tensors,
        through the hooks ``around`` if they accept them. The state is recorded last, as hooks may draw random numbers.
        """
        found, generators = self.search_result or self.search(), self.arguments.generators()
        self._find_captured(found, generators, follow)
        self.arity = len(self.tensors) + len(self.captured_operands)
        tensors: list[Any] = [*self.tensors, *self.captured_inputs.tensors, *self.captured_operands]
        devices = () if all(map(_on_cpu, tensors)) else {t.device for t in tensors}
        if around is not None:
            around.take_captured(self.captured_inputs)
        self.ambient = Ambient.capture(devices, generators, self.options.preserve_rng_state)

    def search(self) -> Captured:
        """Find what the function captures."""
        self.search_result = found = find(self.fn, *self.arguments.searched())
        self.variables = found.variables
        return found

    def _find_captured(self, found: Captured, generators: list[torch.Generator], follow: Any) -> None:
        captured_inputs: dict[int, tuple[Path, torch.Tensor]] = {}
        bindings: dict[int, tuple[Path, int]] = {}
        self.captured_operands = captured = list[torch.Tensor]()
        index = {id(t): i for i, t in enumerate(self.tensors)} if follow else {}
        for path, value in found.tensors:
            if not isinstance(value, torch.Tensor):
                generators.append(value)
            elif is_left_from_vmap(value):
                continue  # a module has stored it, as its last activation
            elif follow is not None and (id(value) in index or follow(value)):
                if id(value) not in index:
                    index[id(value)] = len(self.tensors) + len(captured)
                    captured.append(value)
                bindings.setdefault(id(value), (path, index[id(value)]))
            else:
                captured_inputs.setdefault(id(value), (path, value))
        self.bindings = bindings
        if not captured_inputs:
            return
        paths, tensors = zip(*captured_inputs.values())
        self.ids, self.paths = list(captured_inputs), paths
        self.captured_inputs = Guards(tensors, lambda i: f"captured {paths[i]}", found.buffers)
        self.captured_inputs.watch_gradients()
        self.same = same(self.operands(), tensors)

    def operands(self) -> list[torch.Tensor]:
        """Return the operands that the caller of the region passed."""
        return [*self.tensors, *self.captured_operands]

    def forget(self) -> None:
        """Release the operands, which the recompute gets from its caller, and the captured tensors."""
        self.tensors, self.captured_operands = [], []
        if self.search_result is not None:
            self.search_result.release()
        self.search_result = self.around = None

    def name(self, i: int) -> str:
        """The name of the i-th operand in errors."""
        if i < len(self.arguments.positions):
            return self.arguments.name(i)
        return next((f"captured {path}" for path, index in self.bindings.values() if index == i), "a captured tensor")

    # --- running ----------------------------------------------------------------------------------------------------

    def call(self, operands: Sequence[torch.Tensor], mode: Any, log: Any = None, again: bool = False) -> Any:
        """Call the function with these operands in place of the arguments."""
        args, kwargs = self.arguments.filled(operands)
        return self._called(args, kwargs, mode, log, again)

    def _called(self, args: Sequence, kwargs: dict, mode: Any, log: Any, again: bool) -> Any:
        alone = mode is None and log is None
        if alone and again and not state.own_work:
            return self._call(args, kwargs, again)
        with own_work(False) if again else first_run():
            if alone:
                return self._call(args, kwargs, again)
            with mode or nullcontext(), log or nullcontext():
                return self._call(args, kwargs, again)

    def _call(self, args: Sequence, kwargs: dict, again: bool) -> Any:
        contexts, fn = self.options.contexts, self.fn
        if private.profiling():
            fn = in_range(fn, "recompute" if again else "forward")
        result = fn(*args, **kwargs) if contexts is None else contexts.run(fn, args, kwargs, again)
        if isinstance(result, UNFINISHED):
            refuse_unfinished(self.fn, result)
        return result

    def first(self, args: tuple, kwargs: dict, run: Run) -> Any:
        """The first run, on the user's own arguments."""
        self.ran = True
        result = self._called(args, kwargs, run.mode(self._from_outside(self.tensors)), run.log, again=False)
        self.outputs.spec = trees.flatten(result)[1]
        return result

    def _from_outside(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [*operands, *(tensor for tensor in self.captured_inputs.tensors if tensor is not None)]

    def call_again(self, operands: Sequence[torch.Tensor], run: Run) -> Any:
        """Recompute the result, with the ambient state and the captured tensors of the first run."""
        return self._again(apart(operands, self.twice), run)

    def _again(self, operands: Sequence[torch.Tensor], run: Run) -> Any:
        try:
            return self._recompute(operands, run)
        except Exception as error:
            raise with_region(error, self)  # noqa: B904

    def _recompute(self, operands: Sequence[torch.Tensor], run: Run) -> Any:
        assert self.ambient is not None
        with turn(), recomputing(self.options.override), self.ambient.restored():
            captured = self.captured_inputs.captured_again()
            if self.same:
                operands, captured = as_before(operands, captured, self.same)
            tensors = {**self._followed(operands), **dict(zip(self.ids, captured))}
            stale = self.captured_inputs.stale()
            with bound(self.variables, tensors), Stale(stale) if stale else nullcontext():
                return self.call(operands, run.mode([*operands, *captured]), run.log, again=True)

    def run(self, operands: Sequence[torch.Tensor], run: Run) -> list[torch.Tensor]:
        """Run or recompute for the func lowering. Return the new tensors; ``outputs`` records the other results."""
        if self.ran:
            captured = twice_below(
                operands, operands, self.captured_inputs.tensors, self.same
            )  # levels may have hidden these
            operands = apart(operands, {*self.twice, *captured})
            result = run.carry_out(operands, partial(self._again, operands))
            return self.outputs.compare(result, operands)
        self.ran = True
        self.twice = twice_below(operands, self.operands(), self.captured_inputs.tensors, self.same)
        operands = apart(operands, self.twice)
        if run.watch is not None:
            run.watch.gets(operands)
        with self._bound_first(operands), run.watch or nullcontext():
            result = self.call(operands, run.mode(self._from_outside(operands)), run.log)
        return self.outputs.record(result, operands)

    def _bound_first(self, operands: Sequence[torch.Tensor]) -> Any:
        """For a first run: bind variables of captured tensors that a transform follows to the operands."""
        if not self.bindings:
            return nullcontext()
        return bound(self.variables, {**self._found(), **self._followed(operands)}, keep_changes=True)

    def _followed(self, operands: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        return {key: operands[i] for key, (_, i) in self.bindings.items()}

    def _found(self) -> dict[int, torch.Tensor]:
        """The captured tensors by their ids."""
        assert self.search_result is not None
        return {id(tensor): tensor for _, tensor in self.search_result.tensors}

    def restart(self) -> None:
        """Undo the effects of a first run that was abandoned, so that it can start again."""
        assert self.ambient is not None
        self.ambient.rewind()
        self.captured_inputs.roll_back()
        bound(self.variables, self._found()).put()
        if self.around is not None:
            self.around.undo()
        self.ran = False

    def check_result(self, result: Any) -> None:
        """Compare the structure of a recompute's result with the first one."""
        self.outputs.check_structure(result)
