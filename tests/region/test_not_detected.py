"""The list in docs/reference/what_remat_cant_detect.md: each row is true, and `determinism_check="values"` finds it.

If one of these cases becomes correct, or an error, delete its row.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from cases import rand, run_program
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from remat import RecomputeMismatchError, override, remat

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "what_remat_cant_detect.md"
OBJECT, NUMBERS, NUMBER, CAPTURED = SimpleNamespace(k=2.0), {"k": 2.0}, 2.0, torch.tensor(2.0, dtype=torch.float64)


class Holder:
    def __init__(self) -> None:
        self.k, self.other, self.numbers = 2.0, SimpleNamespace(k=2.0), [2.0]

    def __call__(self, x: Tensor) -> Tensor:
        return of(x, self.k)

    def of_other(self, x: Tensor) -> Tensor:
        return of(x, self.other.k)

    def of_numbers(self, x: Tensor) -> Tensor:
        return of(x, self.numbers[0])


class Shared:
    k = 2.0

    def __call__(self, x: Tensor) -> Tensor:
        return of(x, self.k)


class Calls:
    def __call__(self, x: Tensor) -> Tensor:
        return self.another(x)

    def another(self, x: Tensor) -> Tensor:
        return of(x, NUMBER)


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k, self.numbers, self.inner = 2.0, {"k": 2.0}, nn.Identity()
        self.inner.k = 2.0
        self.weight = nn.Parameter(torch.ones(()))
        self.weight.k, self.weight.numbers = 2.0, [2.0]

    def forward(self, x: Tensor) -> Tensor:
        return of(x, self.k * self.numbers["k"] * self.inner.k)


class DoubledSines(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.sin.default else out


class DoubledMethods(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is Tensor.sin else out


def of(x: Tensor, factor: Any) -> Tensor:
    return (x * factor).sin().exp()


@contextmanager
def changed(target: Any, name: Any, value: Any = 3.0) -> Iterator[None]:
    """Set an attribute or an item of an object temporarily."""
    held = target if isinstance(target, (dict, list)) else vars(target)
    before, held[name] = held[name], value
    try:
        yield
    finally:
        held[name] = before


@contextmanager
def written(write: Callable[[float], Any]) -> Iterator[None]:
    write(3.0)
    try:
        yield
    finally:
        write(2.0)


@contextmanager
def environment() -> Iterator[None]:
    os.environ["REMAT_TEST"] = "3"
    try:
        yield
    finally:
        del os.environ["REMAT_TEST"]


def variable() -> tuple[Callable, Callable]:
    k = 2.0

    def fn(x: Tensor) -> Tensor:
        return of(x, k)

    @contextmanager
    def change() -> Iterator[None]:
        nonlocal k
        k = 3.0
        yield
        k = 2.0

    return fn, change


def captured(holder: Any, read: Callable) -> Callable[[Tensor], Tensor]:
    return lambda x: of(x, read(holder))


# A program: a function, a context around its forward, and one around its backward.
Program = tuple[Callable, Callable, Callable]


def later(fn: Callable, change: Callable) -> Program:
    return fn, nullcontext, change


HOLDER, MODULE, CELL, LIST, MEMBERS = Holder(), Module(), SimpleNamespace(k=2.0), [2.0], {2.0}
IMPORTED, CONTEXT = ModuleType("remat_test_imported"), ContextVar("k", default=2.0)
CAPTURED.k = IMPORTED.k = 2.0
ROWS: dict[str, list[Program]] = {
    "attributes of objects (variables or arguments) that are not modules and hold no tensors": [
        later(lambda x: of(x, OBJECT.k), lambda: changed(OBJECT, "k")),
        later(lambda x: of(x, getattr(OBJECT, "k")), lambda: changed(OBJECT, "k")),  # noqa: B009
        later(captured(CELL, lambda held: held.k), lambda: changed(CELL, "k")),
        later(lambda x, given=OBJECT: of(x, given.k), lambda: changed(OBJECT, "k")),
    ],
    "numbers and strings in a list or dict, except in those of a module or of the object that is called": [
        later(lambda x: of(x, NUMBERS["k"]), lambda: changed(NUMBERS, "k")),
        later(captured(LIST, lambda held: held[0]), lambda: changed(LIST, 0)),
    ],
    "attributes of tensors, except numbers and strings in those of a module's parameters and buffers": [
        later(lambda x: of(x, CAPTURED.k), lambda: changed(CAPTURED, "k")),
        later(lambda x: of(x, MODULE.weight.numbers[0]), lambda: changed(MODULE.weight.numbers, 0)),
    ],
    "attributes of classes and of imported Python modules, context variables, sets": [
        later(Shared(), lambda: written(lambda value: setattr(Shared, "k", value))),
        later(lambda x: of(x, IMPORTED.k), lambda: changed(IMPORTED, "k")),
        later(lambda x: of(x, CONTEXT.get()), lambda: written(CONTEXT.set)),
        later(lambda x: of(x, sum(MEMBERS)), lambda: written(lambda value: (MEMBERS.clear(), MEMBERS.add(value)))),
    ],
    "globals of a function that the region calls through an object, a class or an imported module, as in `other.method(x)` or `utils.helper(x)`; methods that `forward` calls on `self` are covered, but not what these call": [  # noqa: E501
        later(Calls(), lambda: changed(_globals(), "NUMBER")),
    ],
    "memory that is changed through `.data` or NumPy": [
        later(lambda x: of(x, CAPTURED), lambda: written(CAPTURED.data.fill_)),
        later(lambda x: of(x, CAPTURED), lambda: written(lambda value: CAPTURED.numpy().fill(value))),
    ],
    "environment variables, files, the time, random numbers from other sources than torch, Python and NumPy": [
        later(lambda x: of(x, float(os.environ.get("REMAT_TEST", "2"))), environment),
        later(lambda x: of(x, 1 + secrets.randbelow(10**9) / 10**9), nullcontext),
    ],
    "a dispatch or function mode that changes values, and is active only in the forward pass": [
        (lambda x: of(x, 2), DoubledSines, nullcontext),
        (lambda x: of(x, 2), DoubledMethods, nullcontext),
    ],
    "settings of one backend's precision, such as `torch.backends.cuda.matmul.fp32_precision`": [],
}
PROGRAMS = [pytest.param(program, id=f"{row[:30]}-{i}") for row in ROWS for i, program in enumerate(ROWS[row])]


def gradients(wrap: Callable, program: Program) -> tuple[Tensor, Tensor]:
    """The gradients of the region, affected by the change, and of the plain function, which ran before the change."""
    fn, forward, backward = program
    x = rand(3)
    with forward():
        out, again = wrap(fn)(x).sum(), fn(x).sum()
    with backward():
        return torch.autograd.grad(out, x)[0], torch.autograd.grad(again, x)[0]


@pytest.mark.parametrize("program", PROGRAMS)
def test_change_is_not_detected(program: Program) -> None:
    found, expected = gradients(remat, program)
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("how", ["option", "override"])
def test_checksums_detect_the_change(program: Program, how: str) -> None:
    fn, forward, backward = program
    with nullcontext() if how == "option" else override(determinism_check="values"), forward():
        out = remat(fn, determinism_check="values" if how == "option" else "metadata")(rand(3)).sum()
    with backward(), pytest.raises(RecomputeMismatchError, match="checksum"):
        out.backward()


def test_precision_by_backend_is_not_restored() -> None:
    run_program(
        """
import torch
from remat import remat

seen = []
x = torch.ones(3, 3, requires_grad=True)
out = remat(lambda x: (seen.append(torch.backends.cuda.matmul.fp32_precision), x.sin().exp() @ x)[1])(x).sum()
torch.backends.cuda.matmul.fp32_precision = "tf32"
out.backward()
assert seen == ["none", "tf32"], seen
"""
    )


# What the text above the table promises to be correct.
RIGHT: dict[str, Callable[[], Program]] = {
    "variable of a closure": lambda: later(*variable()),
    "global variable": lambda: later(lambda x: of(x, NUMBER), lambda: changed(_globals(), "NUMBER")),
    "attribute of a module": lambda: later(MODULE, lambda: changed(MODULE, "k")),
    "number in a dict of a module": lambda: later(MODULE, lambda: changed(MODULE.numbers, "k")),
    "attribute of the object that is called": lambda: later(HOLDER, lambda: changed(HOLDER, "k")),
    "attribute of a method's self": lambda: later(HOLDER.__call__, lambda: changed(HOLDER, "k")),
    "attribute of an object that it holds": lambda: later(HOLDER.of_other, lambda: changed(HOLDER.other, "k")),
    "number in a list that it holds": lambda: later(HOLDER.of_numbers, lambda: changed(HOLDER.numbers, 0)),
    "attribute of a parameter of a module": lambda: later(
        lambda x: of(x, MODULE.weight.k), lambda: changed(MODULE.weight, "k")
    ),
    "attribute of a module in a module": lambda: later(MODULE, lambda: changed(MODULE.inner, "k")),
}


def _globals() -> dict[str, Any]:
    return globals()


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_restored(name: str) -> None:
    found, expected = gradients(remat, RIGHT[name]())
    assert torch.equal(found, expected)


def test_the_list_has_these_rows() -> None:
    section = DOCS.read_text().partition("## What is not restored")[2]
    assert re.findall(r"^\| (.+?) \| .+ \|$", section, re.MULTILINE)[1:] == list(ROWS)
