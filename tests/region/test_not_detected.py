"""The list in docs/reference/what_remat_cant_detect.md: each row is true, and `determinism_check="values"` finds it.

If one of these cases becomes correct, or an error, delete its row.
"""

import itertools
import os
import re
import secrets
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from functools import partial
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from cases import ROOT, rand, setting
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from remat import RecomputeMismatchError, override, remat

DOCS = ROOT / "docs" / "reference" / "what_remat_cant_detect.md"
NUMBER, CAPTURED = 2.0, torch.tensor(2.0, dtype=torch.float64)
IMPORTED, CONTEXT, MEMBERS = ModuleType("remat_test_imported"), ContextVar("k", default=2.0), {2.0}
NUMBERS, QUEUE, ARRAY = itertools.count(2), deque([2.0]), numpy.array([2.0])
CAPTURED.k, IMPORTED.k, GET = 2.0, 2.0, (TABLE := {"k": 2.0}).get
MANY, TABLE_OF_MANY = [2.0] * 1001, dict.fromkeys(range(1001), 2.0)


class Holder:
    k = 2.0

    def calls_another(self, x: Tensor) -> Tensor:
        return self.calls_a_third(x)

    def calls_a_third(self, x: Tensor) -> Tensor:
        return of(x, NUMBER)


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is Tensor.sin else out


def of(x: Tensor, factor: Any) -> Tensor:
    return (x * factor).sin().exp()


written = lambda write: setting(write, 3.0, 2.0)
item = lambda container, key: partial(written, lambda value: container.__setitem__(key, value))
attribute = lambda target, name: partial(written, lambda value: setattr(target, name, value))

# A program: a function, a context around its forward, and one around its backward.
Program = tuple[Callable, Callable, Callable]
later: Callable[[Callable, Callable], Program] = lambda fn, change: (fn, nullcontext, change)

HOLDER, MODULE, GLOBALS, PRECISION = Holder(), nn.Module(), globals(), torch.backends.cuda.matmul
MODULE.weight = nn.Parameter(torch.ones(()))
MODULE.weight.numbers = [2.0]
OWNED = nn.Module()
OWNED.factor = 2.0
OWNER, OPTIMIZER = weakref.ref(OWNED), torch.optim.SGD(MODULE.parameters(), lr=2.0)
SCRIPTED = torch.jit.script(nn.Linear(1, 1, bias=False).double().requires_grad_(False))
ROWS: dict[str, list[Program]] = {
    "attributes of tensors, except numbers and strings in those of a module's parameters and buffers": [
        later(lambda x: of(x, CAPTURED.k), attribute(CAPTURED, "k")),
        later(lambda x: of(x, MODULE.weight.numbers[0]), item(MODULE.weight.numbers, 0)),
    ],
    "attributes of classes and of imported Python modules, context variables, sets": [
        later(lambda x: of(x, HOLDER.k), attribute(Holder, "k")),
        later(lambda x: of(x, IMPORTED.k), attribute(IMPORTED, "k")),
        later(lambda x: of(x, CONTEXT.get()), partial(written, CONTEXT.set)),
        later(lambda x: of(x, sum(MEMBERS)), partial(written, lambda value: (MEMBERS.clear(), MEMBERS.add(value)))),
    ],
    "a list or dict of which the function has only a bound method, such as `get = table.get`": [
        later(lambda x: of(x, GET("k")), item(TABLE, "k")),
    ],
    "entries of a list or dict that has more than 1,000 numbers, strings and the like": [
        later(lambda x: of(x, MANY[0]), item(MANY, 0)),
        later(lambda x: of(x, TABLE_OF_MANY[0]), item(TABLE_OF_MANY, 0)),
    ],
    "objects that only a weak reference leads to; attributes of objects of torch's or Python's classes, such as an optimizer": [  # noqa: E501
        later(lambda x: of(x, OWNER().factor), attribute(OWNED, "factor")),
        later(lambda x: of(x, OPTIMIZER.param_groups[0]["lr"]), item(OPTIMIZER.param_groups[0], "lr")),
    ],
    "iterators and generators, which each run advances; deques and NumPy arrays": [
        later(lambda x: of(x, next(NUMBERS)), nullcontext),
        later(lambda x: of(x, QUEUE[0]), item(QUEUE, 0)),
        later(lambda x: of(x, ARRAY[0]), item(ARRAY, 0)),
    ],
    "globals of a function that the region calls through an object, a class or an imported module, as in `other.method(x)` or `utils.helper(x)`; methods that `forward` calls on `self` are covered, but not what these call": [  # noqa: E501
        later(HOLDER.calls_another, item(GLOBALS, "NUMBER")),
    ],
    "buffers and parameters of TorchScript modules": [
        later(lambda x: of(x, SCRIPTED(torch.ones(1).double())),
              partial(written, lambda value: setattr(SCRIPTED, "weight", CAPTURED.new_full((1, 1), value)))),
    ],
    "memory of tensors that is changed through `.data` or NumPy": [
        later(lambda x: of(x, CAPTURED), partial(written, CAPTURED.data.fill_)),
        later(lambda x: of(x, CAPTURED), partial(written, lambda value: CAPTURED.numpy().fill(value))),
    ],
    'a captured tensor that is changed in place, and read only by formatting (`f"{x:.2f}"`) or `pickle`': [
        later(lambda x: of(x, float(f"{CAPTURED:.2f}")), partial(written, CAPTURED.fill_)),
    ],
    "environment variables, files, the time, random numbers from other sources than torch, Python and NumPy, and seeds "
    "from the system (`torch.seed()`, `np.random.default_rng()`)": [
        later(lambda x: of(x, float(os.environ.get("REMAT_TEST", "2"))),
              partial(written, lambda value: os.environ.__setitem__("REMAT_TEST", str(value)))),
        later(lambda x: of(x, 1 + secrets.randbelow(10**9) / 10**9), nullcontext),
        later(lambda x: of(x, 1 + numpy.random.default_rng().random()), nullcontext),
        later(lambda x: of(x, 1 + torch.rand((), generator=(g := torch.Generator(), g.seed())[0]).item()), nullcontext),
    ],
    "a dispatch or function mode that changes values, and is active only in the forward pass": [
        (lambda x: of(x, 2), Doubled, nullcontext),
    ],
    "settings of one backend's precision, such as `torch.backends.cuda.matmul.fp32_precision`": [
        later(lambda x: of(x, 3 if PRECISION.fp32_precision == "tf32" else 2),
              partial(written, lambda value: setattr(PRECISION, "fp32_precision", "none" if value == 2 else "tf32"))),
    ],
}  # fmt: skip
PROGRAMS = [pytest.param(program, id=f"{row[:30]}-{i}") for row in ROWS for i, program in enumerate(ROWS[row])]


def gradients(program: Program) -> tuple[Tensor, Tensor]:
    """The gradients of the region, affected by the change, and of the plain function, which ran before the change."""
    fn, forward, backward = program
    x = rand(3)
    with forward():
        out, again = remat(fn)(x).sum(), fn(x).sum()
    with backward():
        return torch.autograd.grad(out, x)[0], torch.autograd.grad(again, x)[0]


@pytest.mark.parametrize("program", PROGRAMS)
def test_only_checksums_detect_the_change(program: Program) -> None:
    found, expected = gradients(program)
    assert not torch.equal(found, expected)
    with override(determinism_check="values"), pytest.raises(RecomputeMismatchError, match="checksum"):
        gradients(program)


def test_the_list_has_these_rows() -> None:
    section = DOCS.read_text().partition("## What is not restored")[2]
    assert re.findall(r"^\| (.+?) \| .+ \|$", section, re.MULTILINE)[1:] == list(ROWS)


def test_a_region_that_calls_torch_func_starts_again_after_effects_that_are_not_restored() -> None:
    seen, numbers, queue, members = list[int](), itertools.count(), deque[int](), set[int]()

    def step(x: Tensor) -> Tensor:
        seen.append(1)
        queue.append(next(numbers))
        members.add(len(members))
        return torch.func.grad(lambda x: x.sin().sum())(x)

    remat(step)(rand(3))
    assert (len(seen), [*queue], len(members), next(numbers)) == (1, [0, 1], 2, 2)


def test_a_list_that_only_a_variable_holds_keeps_what_a_recompute_adds() -> None:
    seen, state, x = list[float](), {"seen": list[float]()}, rand(3)
    for fn, factor in (
        (lambda x: seen.append(1.0) or of(x, len(seen)), 3),
        (lambda x: state["seen"].append(1.0) or of(x, len(state["seen"])), 2),
    ):
        remat(fn)(x).sum().backward()
        assert torch.equal(remat(fn)(x), of(x, factor))
