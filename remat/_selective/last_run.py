"""The last run of a function under a policy: operations are compared with it, which is faster than to analyse them.

The comparison only saves time. It doesn't change the log.
"""

from __future__ import annotations

from typing import Any

import torch

from .._core.lines import Line
from .log import Entry, Log
from .program import Program
from .storages import Storages

_PROGRAMS = 16  # remembered for one function, one for each of its policies


class LastRun:
    """The comparison of a run with the program of the last one. ``programs`` are those of the function, by judge."""

    def __init__(self, programs: dict[Any, Program], judge: Any) -> None:
        self._programs, self._judge = programs, judge
        self._program = programs.get(judge)  # None as soon as this run differs from it

    def entry(
        self, number: int, storages: Storages, func: Any, args: tuple, kwargs: dict, result: Any, read: list
    ) -> Entry | None:
        """Return the entry of an operation that is simple and equal to the last run's next one; extend ``read``."""
        step = None if self._program is None else self._program.step(number)
        if step is None or step.func is not func or not step.is_simple or not storages.is_call_of(step, args, kwargs):
            return None
        operands = [args[position] for position, _, _ in step.operands]
        differentiated = any(tensor.requires_grad for tensor in operands)
        new = storages.new(result)
        if (
            len(new) != 1
            or new[0][2] != step.result.form
            or step.outs[0] != storages.count
            or step.entry.under != (differentiated, torch.is_grad_enabled())
        ):
            return None
        tensor, storage, _ = new[0]
        storages.add((tensor, storage, step.result.form), storages.number())  # reuse the step's equal form
        read += operands
        return step.entry

    def compare(self, number: int, entry: Entry) -> None:
        """Compare the entry of an operation that `entry` has not recognized."""
        if self._program is not None and not self._program.starts_with(number, entry):
            self._program = None

    def line(self, number: int) -> Line | None:
        """Return the line that called this operation in the last run, or None if this run differs from it."""
        return None if self._program is None else self._program.log.lines[number]

    def program(self, log: Log) -> Program:
        """Return the program of this run so far. It is the last run's if the two have not differed."""
        return Program(log) if self._program is None else self._program

    def close(self, log: Log) -> Program:
        """Return the program of this run, which has ended, and remember it."""
        if self._program is not None and self._program.is_of(log):
            return self._program
        program = Program(log)
        if program.lasts:
            if len(self._programs) >= _PROGRAMS and self._judge not in self._programs:
                self._programs.clear()
            self._programs[self._judge] = program
        return program
