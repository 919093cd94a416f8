"""What is remembered of a function and of passes, and the lines of the user's code that called it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from remat import RematError
from remat._core import lines
from remat._core.known import known_of
from remat._core.passes import PassGroup

# All its modules are equal, and have no truth value.
Equal = type("Equal", (nn.Linear,), {"__eq__": lambda *_: True, "__hash__": lambda self: 1, "__bool__": None})
MODULE = Equal(2, 2)


def wrapped(fn: Any) -> Callable:
    return lambda x: fn(x)


PAIRS: dict[str, tuple[Any, Any, bool]] = {  # two functions, and whether they share what is known of their code
    "functions of one code": (wrapped(1), wrapped(2), True),
    "functions of two codes": (wrapped(1), lambda x: x, False),
    "equal modules": (MODULE, Equal(2, 2), False),
    "partials of one code": (functools.partial(wrapped(1)), functools.partial(wrapped(2)), True),
    "partials of one module": (functools.partial(MODULE), functools.partial(MODULE.forward), True),
    "objects": (torch.relu, torch.relu, False),
}


@pytest.mark.parametrize("name", PAIRS)
def test_functions_share_what_is_known_of_the_code_that_they_run(name: str) -> None:
    first, second, shared = PAIRS[name]
    assert (known_of(first) is known_of(second)) is shared
    assert known_of(MODULE) is known_of(MODULE.forward) and (known_of(first) is known_of(first)) is (name != "objects")


def test_a_value_is_for_one_pass_of_a_group() -> None:
    group, value = PassGroup(), Equal(1, 1)
    y = torch.ones(3, requires_grad=True) * 2
    y.register_hook(lambda grad: group.take(value))
    y.sum().backward(retain_graph=True)
    group.take(value)  # outside of a pass
    with pytest.raises(RematError, match="Two backward passes in one GraphExecGroup need the same value"):
        y.sum().backward()


def test_a_warning_is_new_once_for_each_code() -> None:
    found = [known_of(wrapped(i)).is_new_warning(warning) for i, warning in enumerate("aab")]
    assert found == [True, False, True]


def test_a_warning_is_shown_once_for_each_line() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            eval(compile("warn('first')", "<frozen importlib>", "eval"), {"warn": lines.warn})  # as in an import
        lines.warn("other", lines.Line(wrapped.__code__, 7))
        lines.warn("nowhere", lines.Line(None, 0))
    assert [str(each.message) for each in caught] == ["first", "other", "nowhere"]
    assert [each.filename for each in caught] == [__file__, __file__, "<unknown>"] and caught[1].lineno == 7
    assert str(lines.Line(None, 0)) == "an unknown line"
