"""Compares a program with and without rematerialization: values, gradients, generators, tensors that it changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any

import torch

from .._core.amounts import count_text
from .._core.lines import Line, is_library
from .._core.state import disable_remat
from .._core.tensors import parts
from ..errors import shown
from .origins import tensor_text
from .program import NOT_DIFFERENTIATED, Program, Way


@dataclass(frozen=True)
class Difference:
    """One difference between the two runs: ``what`` differs, and ``how``."""

    what: str
    how: str

    def __str__(self) -> str:
        return f"{self.what}: {self.how}"


@dataclass(frozen=True, repr=False)
class CheckResult:
    """The result of :func:`remat.check`. It is true if the program runs and nothing differs.

    Attributes:
        differences: what differs with rematerialization.
        error: the exception that the program raised, without its traceback.
        line: the line of user code that raised it, if there is one.
        fails_without_remat: whether the program also fails without rematerialization.
        reproducible: whether two runs without rematerialization agree; tested only if there are differences.
        counts: how many results, gradients and changed tensors were compared.
        rounding: the largest difference that counts as rounding, relative to the largest number in its tensor.
        note: what was not compared.
    """

    differences: tuple[Difference, ...] = ()
    error: Exception | None = None
    line: str = ""
    fails_without_remat: bool = False
    reproducible: bool = True
    counts: Mapping[str, int] | None = None
    rounding: float = 0.0
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether the program runs, and nothing differs with rematerialization."""
        return self.error is None and not self.differences

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.error is not None:
            text = "Fails without remat too:" if self.fails_without_remat else "Fails only with remat:"
            line = f"\n  at {self.line}" if self.line else ""
            return f"{text}\n  {type(self.error).__name__}: {self.error}{line}"
        if self.ok:
            rounding = f", within rounding ({self.rounding:.0e} of the largest number)"
            same = f"Equal with and without remat{rounding}" if self.rounding else "Identical with and without remat"
            counts = [count_text(n, what) for what, n in (self.counts or {}).items() if n]
            return f"{same}: {', '.join(counts)} and the random generators.{self.note and f' {self.note}'}"
        lines = ["Different with remat:", *(f"  {difference}" for difference in self.differences)]
        if not self.reproducible:
            lines.append("Two runs without remat differ too, so remat may not be the cause.")
        return "\n".join(lines)

    __repr__ = __str__


class _State(bytes):
    """The state of a random generator."""


def checked(program: Program, ways: Sequence[Way]) -> CheckResult:
    """Run the program without regions, and each of the other ways."""
    runs: list[dict[str, Any]] = []
    for fn, around in ((program.fn, disable_remat), *ways):
        try:
            runs.append(_outcome(program, fn, around))
            if program.turns_to_arguments():
                runs = [_outcome(program, fn, around)]
        except Exception as error:
            found = [Line(frame.f_code, n) for frame, n in walk_tb(error.__traceback__) if not is_library(frame)]
            # A traceback keeps the variables of its frames alive.
            error = error.with_traceback(None)
            return CheckResult(error=error, line=str(found[-1]) if found else "", fails_without_remat=not runs)
    compared = [_differences(runs[0], run) for run in runs[1:]]
    differences = next((each for each, _ in compared if each), [])
    rounding = max(part for _, part in compared)
    names = [name for name, value in runs[1].items() if not isinstance(value, _State)]
    gradients = sum(name.startswith("gradient of ") for name in names)
    changed = sum(name.endswith(" after the run") for name in names)
    counts = {"result": len(names) - gradients - changed, "gradient": gradients, "changed tensor": changed}
    reproducible = not differences
    if differences:
        with suppress(Exception):
            reproducible = not _differences(runs[0], _outcome(program, program.fn, disable_remat))[0]
    note = "" if program.transform is not None or program.has_gradients else NOT_DIFFERENTIATED
    return CheckResult(tuple(differences), reproducible=reproducible, counts=counts, rounding=rounding, note=note)


def _outcome(program: Program, fn: Callable, context: Callable[[], Any]) -> dict[str, Any]:
    """The values of one run, by name, with copies of the tensors that it has changed in place or assigned."""
    before = {id(tensor) for _, tensor in program.captured}
    with program.preserved() as overwritten, context():
        results = program.run(fn, keep=True)
        states = {name: _State(state) for name, state in program.generator_states().items()}
        changed = {
            f"{name} after the run": tensor.detach().clone()
            for name, tensor in (*zip(program.names, program.tensors), *program.read_now())
            if overwritten.changed(tensor) or (id(tensor) not in before and not name.startswith("argument "))
        }
        return {**dict(results), **changed, **states}


def _differences(before: dict[str, Any], now: dict[str, Any]) -> tuple[list[Difference], float]:
    differences, rounding = list[Difference](), 0.0
    for name in {**before, **now}:
        if name not in before or name not in now:
            differences.append(Difference(name, f"exists only {'without' if name in before else 'with'} remat"))
            continue
        how, part = _difference(before[name], now[name])
        rounding = max(rounding, part)
        if how:
            differences.append(Difference(name, how))
    return differences, rounding


def _difference(a: Any, b: Any) -> tuple[str, float]:
    """How two values differ (empty if they don't), and their rounding difference relative to the largest number."""
    if isinstance(a, _State):
        return "" if a == b else "is in a different state after the run", 0.0
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        # Of objects that aren't plain values only the types are compared.
        is_equal = type(a) is type(b) and (not isinstance(a, _PLAIN) or a == b or a != a)
        return "" if is_equal else f"{shown(a)} without remat, {shown(b)} with it", 0.0
    if tensor_text(a) != tensor_text(b) or a.device != b.device:
        return f"{tensor_text(a)} on {a.device} without remat, {tensor_text(b)} on {b.device} with it", 0.0
    rounding = 0.0
    for x, y in zip(parts(a), parts(b)):
        x, y = (each.detach().to_dense() if each.layout is not torch.strided else each.detach() for each in (x, y))
        other = (x != y) & ~((x != x) & (y != y))  # NaN equals NaN here
        if not (count := int(other.sum())):
            continue
        how = f"{count} of {x.numel()} numbers differ"
        if not (x.is_floating_point() or x.is_complex()):
            return how, 0.0
        off, largest = (x - y)[other].abs().max().item(), x.abs().nan_to_num(posinf=0.0).max().item()
        if not off <= _ROUNDING.get(x.dtype, 1e-5) * largest:
            return f"{how}, by up to {off:.3g}", 0.0
        rounding = max(rounding, off / largest)
    return "", rounding


_ROUNDING = {torch.float64: 1e-12, torch.complex128: 1e-12, torch.float16: 1e-2, torch.bfloat16: 2e-2}
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
