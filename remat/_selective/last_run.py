"""The last run of a function under a policy: while the next one does the same, it is compared with that, not analysed.

What is taken over from it changes nothing but the time that takes.
"""

from __future__ import annotations

from typing import Any

import torch

from .._core.lines import Line
from .log import Entry, Log
from .program import Program
from .storages import Storages

_PROGRAMS = 16  # of one function, for which a program is remembered


class LastRun:
    """What such runs remember, by what judges for their policies."""

    def __init__(self, programs: dict[Any, Program], judge: Any) -> None:
        self._programs, self._judge = programs, judge
        self._program = programs.get(judge)  # None as soon as this run does something else

    def entry(
        self, number: int, storages: Storages, func: Any, args: tuple, kwargs: dict, result: Any, read: list
    ) -> Entry | None:
        """What an operation did, if it is simple and did what came next in the last run; adds what it has read."""
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
        storages.add((tensor, storage, step.result.form), storages.number())  # the form that is there already
        read += operands
        return step.entry

    def compare(self, number: int, entry: Entry) -> None:
        """Another operation has done this."""
        if self._program is not None and not self._program.starts_with(number, entry):
            self._program = None

    def line(self, number: int) -> Line | None:
        """Where the operation was called, as far as this run has done the same."""
        return None if self._program is None else self._program.log.lines[number]

    def program(self, log: Log) -> Program:
        """What follows from the log of this run so far: known if it is that of the last one."""
        return Program(log) if self._program is None else self._program

    def close(self, log: Log) -> Program:
        """The same when the run has ended, to be remembered."""
        if self._program is not None and self._program.is_of(log):
            return self._program
        program = Program(log)
        if program.lasts:
            if len(self._programs) >= _PROGRAMS and self._judge not in self._programs:
                self._programs.clear()
            self._programs[self._judge] = program
        return program
