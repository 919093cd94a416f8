"""What a program gives with rematerialization and without: values, gradients, generators, tensors that it changes."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .._core.lines import Line, is_library
from .._core.parts import parts
from .preserved import Overwritten
from .program import Program
from .rows import tensor_text


@dataclass(frozen=True)
class Difference:
    """One thing that is other with rematerialization: ``what`` it is, and ``how`` it differs."""

    what: str
    how: str

    def __str__(self) -> str:
        return f"{self.what}: {self.how}"


@dataclass(frozen=True, repr=False)
class CheckResult:
    """What :func:`remat.check` has found. It is true if all is the same.

    Attributes:
        differences: what is other with rematerialization.
        error: with which the program failed, without its traceback.
        line: the user's line at which it failed, if there is one.
        fails_without_remat: whether it fails without rematerialization, too.
        reproducible: whether two runs without rematerialization give the same; only tried where there are differences.
        counts: how many results, gradients and changed tensors were compared, beside the generators.
        rounding: the largest difference that is taken for rounding, as a part of the largest number in its tensor.
    """

    differences: tuple[Difference, ...] = ()
    error: Exception | None = None
    line: str = ""
    fails_without_remat: bool = False
    reproducible: bool = True
    counts: Mapping[str, int] | None = None
    rounding: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it runs, and gives the same with rematerialization and without."""
        return self.error is None and not self.differences

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.error is not None:
            text = "It fails without remat too:" if self.fails_without_remat else "It fails with remat alone:"
            line = f"\n  at {self.line}" if self.line else ""
            return f"{text}\n  {type(self.error).__name__}: {self.error}{line}"
        if self.ok:
            how = f"within rounding ({self.rounding:.0e} of the largest number)" if self.rounding else "to the last bit"
            counts = [f"{n} {what}{'s' * (n != 1)}" for what, n in (self.counts or {}).items() if n]
            return f"The same with remat and without it, {how}: {', '.join(counts)} and the random generators."
        lines = ["It differs with remat:", *(f"  {difference}" for difference in self.differences)]
        if not self.reproducible:
            lines.append("Two runs without remat differ too, so that this may not be due to it.")
        return "\n".join(lines)

    __repr__ = __str__


@dataclass(frozen=True)
class Outcome:
    """What one run gave: by what each is called."""

    results: dict[str, Any]
    changed: dict[str, torch.Tensor]
    generators: dict[str, bytes]  # their states


def compared(program: Program, without: Callable[[], Any], with_remat: Callable[[], Any]) -> CheckResult:
    """Run it both ways. Each is a context manager that yields the function to run."""
    try:
        expected = _outcome(program, without)
    except Exception as error:
        return _failure(error, True)
    try:
        found = _outcome(program, with_remat)
    except Exception as error:
        return _failure(error, False)
    differences, rounding = _differences(expected, found)
    gradients = sum(name.startswith("gradient of ") for name in found.results)
    counts = {
        "result": len(found.results) - gradients,
        "gradient": gradients,
        "changed tensor": len(found.changed),
    }
    reproducible = not differences or _is_as(expected, program, without)
    return CheckResult(tuple(differences), reproducible=reproducible, counts=counts, rounding=rounding)


def _is_as(expected: Outcome, program: Program, without: Callable[[], Any]) -> bool:
    """Whether another run gives the same."""
    try:
        return not _differences(expected, _outcome(program, without))[0]
    except Exception:
        return False


def _outcome(program: Program, way: Callable[[], Any]) -> Outcome:
    subject = program.subject
    with subject.preserved() as overwritten, way() as fn:
        results = dict(program.results(fn))
        return Outcome(results, _changed(program, overwritten), subject.generator_states())


def _changed(program: Program, overwritten: Overwritten) -> dict[str, torch.Tensor]:
    """The tensors that the program has written to, or put into the place of others."""
    subject = program.subject
    before = {id(tensor) for _, tensor in subject.captured}
    now = [(f"argument {name}", tensor) for name, tensor in zip(subject.names, subject.tensors)] + subject.read_now()
    return {
        f"{name} after the run": tensor.detach().clone()
        for name, tensor in now
        if overwritten.wrote(tensor) or (id(tensor) not in before and not name.startswith("argument "))
    }


def _failure(error: Exception, without: bool) -> CheckResult:
    lines = [Line(frame.f_code, n) for frame, n in traceback.walk_tb(error.__traceback__) if not is_library(frame)]
    seen: Any = error
    while seen is not None:  # tracebacks hold all that their frames hold
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
    return CheckResult(error=error, line=str(lines[-1]) if lines else "", fails_without_remat=without)


def _differences(expected: Outcome, found: Outcome) -> tuple[list[Difference], float]:
    differences, rounding = list[Difference](), 0.0
    for before, now in ((expected.results, found.results), (expected.changed, found.changed)):
        for name in {**before, **now}:
            if name not in before or name not in now:
                there = "without" if name in before else "with"
                differences.append(Difference(name, f"is there {there} remat alone"))
                continue
            how, part = _difference(before[name], now[name])
            rounding = max(rounding, part)
            if how:
                differences.append(Difference(name, how))
    for name, state in expected.generators.items():
        if found.generators.get(name) != state:
            differences.append(Difference(name, "has another state after the run, so it drew other numbers"))
    return differences, rounding


def _difference(a: Any, b: Any) -> tuple[str, float]:
    """How two values differ, empty if they don't; and by which part of the largest number if that is rounding."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) or not _equal(a, b):
            return f"{_short(a)} without remat, {_short(b)} with it", 0.0
        return "", 0.0
    if tensor_text(a) != tensor_text(b) or a.device != b.device:
        return f"{tensor_text(a)} on {a.device} without remat, {tensor_text(b)} on {b.device} with it", 0.0
    rounding = 0.0
    for x, y in zip(parts(a), parts(b)):
        x, y = (each.detach().to_dense() if each.layout is not torch.strided else each.detach() for each in (x, y))
        other = (x != y) & ~((x != x) & (y != y))  # a NaN is the same as a NaN
        count = int(other.sum())
        if not count:
            continue
        if x.is_floating_point() or x.is_complex():
            off, largest = (x - y)[other].abs().max().item(), x.abs().nan_to_num(posinf=0.0).max().item()
            if off <= _ROUNDING.get(x.dtype, 1e-5) * largest:
                rounding = max(rounding, off / largest)
                continue
            return f"{count} of {x.numel()} numbers differ, by up to {off:.3g}", 0.0
        return f"{count} of {x.numel()} numbers differ", 0.0
    return "", rounding


_ROUNDING = {torch.float64: 1e-12, torch.complex128: 1e-12, torch.float16: 1e-2, torch.bfloat16: 2e-2}


def _equal(a: Any, b: Any) -> bool:
    """Whether two values are the same, of which only plain ones are compared."""
    return type(a) is type(b) and (not isinstance(a, _PLAIN) or a == b or a != a)


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return tensor_text(value)
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
