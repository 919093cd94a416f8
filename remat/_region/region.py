"""A region: one call of a rematerialized function, with all that a recompute needs; and the state of one run of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from logging import DEBUG
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from .._ambient.ambient import Ambient
from .._core import private, trees
from .._core.known import Known
from .._core.lines import Line, user_line
from .._core.ranges import in_range
from .._core.state import first_run, recomputing, state, within
from .._policy.predicates import AnswerLog
from ..errors import MutationError, RematError
from .arguments import Arguments, Outputs
from .error_context import LOGGER, log_saved, with_region
from .fingerprints import stride_of
from .guards import hand_captured
from .hooks import Hooks
from .inputs import Inputs
from .options import UNFINISHED, Options
from .turns import turn


@dataclass(slots=True)
class Run:
    """A first run, or a recompute. A subclass takes several attempts."""

    log: Any = None  # the operation log of ``debug=True``
    recorder: Any = None  # records the operations of a first run under a policy
    watch: Any = None  # sees the torch functions that a first run under torch.func calls
    replay: Any = None  # skips and restores operations in a recompute under a policy

    def carry_out(self, operands: Sequence[torch.Tensor], go: Callable[[Run], Any]) -> Any:
        """Recompute, in as many attempts as needed."""
        return go(self)


_NOTHING = nullcontext()


class Region:
    """One call of ``fn(*args, **kwargs)``."""

    __slots__ = (
        "ambient", "answers", "fn", "graded", "inputs", "kinds", "known", "line", "options", "outputs", "ran", "record",
        "uses_func",
    )  # fmt: skip

    def __init__(
        self, fn: Callable, arguments: Arguments, tensors: list, options: Options, known: Known, kinds: tuple = (),
        uses_func: bool = False,
    ) -> None:  # fmt: skip
        self.fn, self.options, self.known = fn, options, known
        self.line: Line = user_line(4)  # the user's line that called it
        self.inputs = Inputs(fn, arguments, tensors)
        self.outputs = Outputs(options)
        self.ambient: Ambient | None = None  # at its start
        self.answers = AnswerLog()  # of the predicates in regions inside it, in its first run
        self.ran = False
        self.record: Any = None  # of the first run under a policy, when it has ended
        self.kinds = kinds  # of the torch.func levels that it was called under, the bottom one first
        self.uses_func = uses_func  # its function calls torch.func transforms, so it can't run under saved-tensor hooks
        self.graded = False  # its first run must restore the ``grad`` levels

    root = property(lambda self: self)

    def open(self, follow: Callable[[torch.Tensor], bool] | None = None, outer: Hooks | None = None) -> None:
        """Record the ambient state and the captured tensors, as they are now.

        Captured tensors for which ``follow`` is true become operands. The region saves the other captured tensors,
        through the hooks ``outer`` if they accept them. The state is recorded last, as hooks may draw random numbers.
        """
        inputs = self.inputs
        generators = inputs.find(follow)
        devices = {tensor.device for tensor in inputs.with_captured(inputs.operands) if not tensor.is_cpu}
        hand_captured(outer, inputs.captured)
        self.ambient = Ambient(devices, generators, self.options.preserve_rng_state)

    def calls_func(self) -> None:
        """Note that it calls torch.func, which only its backward showed: that of an autograd Function may."""
        self.uses_func = True

    def forget(self) -> None:
        """Release what only the first run needs, which has ended."""
        if self.ran and LOGGER.isEnabledFor(DEBUG) and not state.recomputing:
            log_saved(self)
        self.inputs.release()

    def _called(self, args: Sequence, kwargs: dict, run: Run, inputs: Sequence[torch.Tensor], again: bool) -> Any:
        """Call the function, in its first run or ``again``. The ``inputs`` come from outside of the region."""
        contexts, fn = self.options.contexts, self.fn
        mode = run.recorder or run.replay
        if mode is not None:
            mode.bind(inputs)
        span = in_range(fn, "recompute" if again else "forward") if private.profiling() else _NOTHING
        torch.clear_autocast_cache()  # so that all runs cast the weights that they read, and the casts are freed
        try:
            outer = within(own_work=False) if again else first_run(self.answers)
            with outer, mode or _NOTHING, run.log or _NOTHING, span:
                result = fn(*args, **kwargs) if contexts is None else contexts.run(fn, args, kwargs, again)
        finally:
            torch.clear_autocast_cache()
        if isinstance(result, UNFINISHED):
            name = getattr(self.fn, "__name__", type(self.fn).__name__)
            raise TypeError(
                f"{name} returned a {type(result).__name__}, whose body would run outside the region. Return its "
                f"values, as in `list(...)`."
            )
        return result

    def first(self, args: tuple, kwargs: dict, run: Run) -> Any:
        """The first run, on the user's own arguments."""
        self.ran = True
        result = self._called(args, kwargs, run, self.inputs.with_captured(self.inputs.operands), again=False)
        self.outputs.spec = trees.flatten(result)[1]
        return result

    def call_again(self, operands: Sequence[torch.Tensor], run: Run) -> Any:
        """Recompute the result, with the ambient state and the captured tensors of the first run."""
        assert self.ambient is not None
        inputs = self.inputs
        try:
            with turn(), recomputing(self.options.override, AnswerLog(self.answers)), self.ambient.restored():
                first_hook = RemovableHandle.next_id
                operands, captured = inputs.again(operands)
                variables, watched = inputs.bound_again(operands, captured), inputs.captured.watched(captured)
                with variables, watched, inputs.captured.kept(captured):
                    args, kwargs = inputs.arguments.filled(operands)
                    result = self._called(args, kwargs, run, [*operands, *captured], again=True)
                several = self.graded or len(self.kinds) > 1
                # The first run refused hooks on what required grad in it; more tensors may in a recompute.
                if RemovableHandle.next_id != first_hook and several and private.GRAD in self.kinds:
                    raise RematError(
                        "A region under torch.func registers a hook in its recompute, in which other tensors require "
                        "grad than in its forward. Register it outside of the region, or write an autograd Function."
                    )
                return result
        except Exception as error:
            raise with_region(error, self)  # noqa: B904

    def run(self, operands: Sequence[torch.Tensor], run: Run) -> list[torch.Tensor]:
        """Run for the func lowering, or recompute. Return the new tensors; ``outputs`` records the other results."""
        inputs = self.inputs
        if self.ran:
            operands = inputs.kept_apart(operands)
            return self.outputs.compare(run.carry_out(operands, partial(self.call_again, operands)), operands)
        self.ran = True
        operands = inputs.apart(operands)
        forms = [(t.shape, stride_of(t)) for t in operands] if private.JVP in self.kinds else ()
        run.watch.gets(operands)
        with inputs.bound_first(operands), within(watch=run.watch), run.watch:
            args, kwargs = filled = inputs.arguments.filled(operands)
            before = iter(inputs.arguments.contents(filled))
            result = self._called(args, kwargs, run, inputs.with_captured(operands), again=False)
        # What was only removed, as by `batch.pop("x")`, is no value that the caller needs.
        if not all(each in before for each in inputs.arguments.contents(filled)):
            raise MutationError(
                "A region under torch.func, or one that calls it, changes a list, a dict or another container among "
                "its arguments, of which it gets a copy. Return the new values from the function."
            )
        if any((t.shape, stride_of(t)) != form for t, form in zip(operands, forms)):
            raise MutationError(
                "A region under torch.func.jvp changes the shape or strides of an argument or a captured tensor in "
                "place (`t_`, `squeeze_`, `resize_`), which code outside wouldn't see. Use the out-of-place operation."
            )
        return self.outputs.record(result, operands)

    def restart(self, uses_func: bool = False, graded: bool = False) -> None:
        """Undo the effects of a first run that was abandoned, so that it can start again, now with what it needs.

        What the hooks around it have got they keep: the recompute of an outer region abandons this run too.
        """
        assert self.ambient is not None
        self.uses_func, self.graded = uses_func, graded
        self.ambient.rewind()
        self.inputs.roll_back()
        self.ran, self.record = False, None
        self.answers.clear()
