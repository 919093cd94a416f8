"""``debug=True``: the operations of a region's runs, compared one by one, with the user's source lines."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .._core.facts import facts_of
from .._core.lines import user_line
from .._core.private import DispatchMode
from .._core.ranges import Ranges
from .._core.state import state
from .._region.fingerprints import fingerprint
from ..errors import RecomputeMismatchError

# The engine detaches tensors too, so the number of these operations differs between runs.
_IGNORED = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


class Operation(NamedTuple):
    """An operation: its name and constants, its result, and the user's line."""

    op: str
    result: str
    line: str

    def __str__(self) -> str:
        return f"{self.op} -> {self.result} at {self.line}"


class OpLog(DispatchMode):
    """The operations of a run. Those of a recompute are compared one by one with the log of the ``first`` run."""

    def __init__(self, first: OpLog | None = None) -> None:
        self.first = first
        self.entries: list[Operation] = []
        self.recomputed: list[Operation] = []  # by the last recompute
        self.ranges = Ranges()
        if first is not None:
            first.recomputed = self.entries

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, facts = kwargs or {}, facts_of(func)
        if facts.marks:
            return self.ranges.mark(func, args, kwargs)
        result = facts.run(*args, **kwargs)
        if self in state.logs and func not in _IGNORED and not (state.unseen or self.ranges):
            operation = Operation(_called(func, args, kwargs), _describe(result), str(user_line()))
            self.entries.append(operation)
            if self.first is not None:
                self._compare(len(self.entries) - 1, operation)
        return result

    @property
    def count(self) -> int:
        return len(self.entries)

    def go_back(self, count: int) -> None:
        del self.entries[count:]

    def __enter__(self) -> OpLog:
        self.entries.clear()  # of an attempt that was abandoned
        state.logs = *state.logs, self  # until the state of the run ends
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if self.first is not None and exception[0] is None:
            self._compare(len(self.entries), None)  # no operation is missing, if the run wasn't stopped early

    def texts(self) -> tuple[list[str], list[str]]:
        return [*map(str, self.entries)], [*map(str, self.recomputed)]

    def _compare(self, i: int, now: Operation | None) -> None:
        """Compare the i-th operation of this run, or None after the last one, with that of the first run."""
        assert self.first is not None
        entries = self.first.entries
        before = entries[i] if i < len(entries) else None
        if (before and before[:2]) != (now and now[:2]):
            raise RecomputeMismatchError(
                f"Operation {i} of the region differs between its runs.\n"
                f"  In the forward: {before or 'there was none'}\n"
                f"  In the recompute: {now or 'there is none'}\n"
                f"A region's function must be deterministic: look at what decides between these two lines."
            )


def _called(func: Any, args: Any, kwargs: Any) -> str:
    """The operator, with the constants among its arguments: two runs with different constants differ."""
    leaves = [leaf for arg in args for leaf in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    constants = [repr(leaf) for leaf in leaves if type(leaf) in _CONSTANTS]
    constants += [f"{name}={value!r}" for name, value in kwargs.items() if type(value) in _CONSTANTS]
    return f"{func}({', '.join(constants)})" if constants else str(func)


_CONSTANTS = {bool, int, float, complex, str, torch.dtype}


def _describe(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        if result.is_nested:  # a strided one has no sizes, and the sizes of a jagged one differ between runs
            return f"nested {result.dtype}"
        return str(fingerprint(result, "metadata"))
    if isinstance(result, (tuple, list)):
        return "(" + ", ".join(map(_describe, result)) + ")"
    return type(result).__name__
