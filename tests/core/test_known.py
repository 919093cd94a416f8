"""What is remembered of a function and of passes, and the lines of the user's code that called it."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from remat import disable_remat, is_disabled, is_recomputing
from remat._core import lines, signatures
from remat._core.known import known_of
from remat._core.state import first_run, overriding, own_work, recomputing, state, within

# All its modules are equal, and have no truth value.
Equal = type("Equal", (nn.Linear,), {"__eq__": lambda *_: True, "__hash__": lambda self: 1, "__bool__": None})
MODULE = Equal(2, 2)
wrapped: Any = lambda fn: lambda x: fn(x)

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
        assert state.own_work
        assert (state.unseen, state.policies, state.checkpointing, state.filling) == (False, (), True, 2)
    assert (state.unseen, state.policies, state.checkpointing, state.own_work) == (False, (), False, False)
    with overriding(debug=True):
        assert state.override == {"debug": True} and not is_disabled()
        with disable_remat():
            assert state.override == {"debug": True, "disabled": True} and is_disabled()
            with recomputing(None, 1), first_run(2):
                assert is_recomputing() and not is_disabled() and state.recomputing_here and state.logs == (1, 2)
        assert state.override == {"debug": True} and not is_disabled() and not is_recomputing()


def test_state_that_compiled_code_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo can guard only attributes that each thread has from the start."""
    with disable_remat():
        assert state.disabled
        with recomputing(None, ()):
            assert not state.disabled
    assert not state.disabled
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with disable_remat(), within(recomputing_here=True):
        assert is_disabled() and is_recomputing() and state.override is None and not state.recomputing
    assert not is_disabled() and not is_recomputing() and known_of(MODULE) is not known_of(MODULE)


def test_a_warning_is_given_once_for_each_code_and_shown_once_for_each_line() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i, key in enumerate("aab"):
            known_of(wrapped(i)).warn_once(key, f"{key}{i}")
    assert [str(each.message) for each in caught] == ["a0", "b2"] and not known_of(wrapped(1)).compiles
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            eval(compile("warn('first')", "<frozen importlib>", "eval"), {"warn": lines.warn})  # as in an import
        lines.warn("other", lines.Line(wrapped.__code__, 7))
        lines.warn("nowhere", lines.Line(None, 0))
    assert [str(each.message) for each in caught] == ["first", "other", "nowhere"]
    assert [each.filename for each in caught] == [__file__, __file__, "<unknown>"] and caught[1].lineno == 7
    assert str(lines.Line(None, 0)) == "an unknown line"
    assert [signatures.accepts(fn, [1]) for fn in (abs, lambda: 1, getattr)] == [True, False, None]
    taken = [signatures.accepts(wrapped(wrapped), kwargs={name: 1}, more=True) for name in ("x", "y")]
    assert taken == [True, False] and not signatures.accepts(lambda x, y: x, [1])


@signatures.lists_arguments
def public(fn: Callable, *args: Any, times: int = 1) -> Any:
    return fn(times)


def test_an_error_about_the_arguments_of_a_public_function_lists_them() -> None:
    assert public(abs, times=-2) == 2
    with pytest.raises(TypeError, match=r"^Call it as `public\(fn, times=...\)`: .*unexpected.*'time'\.$"):
        public(abs, time=2)
    with pytest.raises(TypeError, match=r"^can only concatenate"):
        public(lambda times: "" + times)
