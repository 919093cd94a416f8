"""What is remembered of a function, and the lines of the user's code that called it."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat._core import known, lines
from remat._core.known import known_of


def wrapped(fn: Any) -> Callable:
    return lambda x: fn(x)


def test_nothing_that_is_known_stays_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "_ENTRIES", 3)
    monkeypatch.setattr(known, "_of_codes", {})
    codes, modules = [], []
    for _ in range(10):
        scope: dict[str, Any] = {"module": nn.Linear(1, 1)}
        exec("def fn(x): return x", scope)
        known_of(scope["fn"]), known_of(scope["module"]), known_of(wrapped(scope["module"]))
        codes.append(weakref.ref(scope["fn"].__code__))
        modules.append(weakref.ref(scope["module"]))
        scope.clear()
    assert sum(code() is not None for code in codes) <= 3 and not any(module() for module in modules)


def test_a_line_is_that_of_the_user() -> None:
    called: list[lines.Line] = []
    module = nn.Sequential(nn.Identity())
    module.register_forward_hook(lambda *args: called.append(lines.user_line(2)))
    remat.remat(module)(torch.ones(1))
    number = test_a_line_is_that_of_the_user.__code__.co_firstlineno + 4
    assert str(called[0]) == f"{__file__}:{number} (test_a_line_is_that_of_the_user)"


def test_a_warning_is_shown_once_for_each_line() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            lines.warn("first")
        lines.warn("other", lines.Line(wrapped.__code__, 7))
        lines.warn("nowhere", lines.Line(None, 0))
    assert [str(each.message) for each in caught] == ["first", "other", "nowhere"]
    assert [each.filename for each in caught] == [__file__, __file__, "<unknown>"] and caught[1].lineno == 7
    assert str(lines.Line(None, 0)) == "an unknown line"
