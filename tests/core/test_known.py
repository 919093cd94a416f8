"""What is remembered of a function and of passes, and the lines of the user's code that called it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from remat._core import lines
from remat._core.known import known_of
from remat._core.state import first_run, own_work, state, within

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


def test_state_that_is_set_for_a_time() -> None:
    with within(unseen=True, policies=(1,), recordings=(1, 2)), within(policies=()), first_run(()), own_work():
        assert (state.unseen, state.policies, state.checkpointing, state.filling) == (False, (), True, 2)
    assert (state.unseen, state.policies, state.checkpointing, state.own_work) == (False, (), False, False)


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
    assert [lines.accepts(fn, [1]) for fn in (abs, lambda: 1, getattr)] == [True, False, None]
