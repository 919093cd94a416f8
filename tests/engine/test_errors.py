"""Mistakes raise errors that say where they are and what to do, and that leave all state as it was."""

from __future__ import annotations

import copy
import inspect
import pickle
import random
import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

import remat as package
from remat import (
    CaptureError,
    MutationError,
    PolicyError,
    RecomputeMismatchError,
    RematError,
    disable_remat,
    is_recomputing,
    policies,
    remat,
)
from remat._core import private
from remat._core.state import state

ERRORS = [CaptureError, MutationError, PolicyError, RecomputeMismatchError, RematError]
ADVICE = "A region's function must be deterministic. Look for Python state that changed between the runs"


def same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def backward(f: Callable, x: Tensor | None = None) -> Tensor:
    x = leaf(3) if x is None else x
    return torch.autograd.grad(f(x).sum(), x)[0]


def line_of(fn: Callable, text: str) -> str:
    """``file:line (name)`` of the line of `fn` that has `text`."""
    lines, first = inspect.getsourcelines(fn)
    (i,) = (i for i, line in enumerate(lines) if text in line)
    return f"{fn.__code__.co_filename}:{first + i} ({fn.__name__})"


# --- the errors themselves --------------------------------------------------------------------------


@pytest.mark.parametrize("cls", ERRORS)
def test_one_family_of_picklable_errors(cls: type) -> None:
    assert issubclass(cls, RematError) and issubclass(cls, RuntimeError)
    assert getattr(package, cls.__name__) is cls and cls.__doc__
    for again in (
        pickle.loads(pickle.dumps(cls("what happened"))),
        copy.deepcopy(cls("what happened")),
    ):
        assert type(again) is cls and again.args == ("what happened",)


def test_a_raised_error_is_picklable() -> None:
    w = torch.ones(3)
    loss = remat(lambda x: (x * w).sin().exp().sum())(leaf(3))
    w.add_(1)
    with pytest.raises(RematError) as raised:
        loss.backward()
    again = pickle.loads(pickle.dumps(raised.value))
    assert type(again) is MutationError and str(again) == str(raised.value)


# --- a recompute that differs from the first run ----------------------------------------------------


def saves_more(x: Tensor) -> Tensor:
    y = x.sin().exp()
    return y.cos().sin() if is_recomputing() else y.cos()


def saves_less(x: Tensor) -> Tensor:
    y = x.sin()
    return y.cos() if is_recomputing() else y.exp().cos()


def saves_nothing(x: Tensor) -> Tensor:
    return x + 1 if is_recomputing() else x.sin().exp()


def other_shape(x: Tensor) -> Tensor:
    y = x.sin().expand(2, 3) if is_recomputing() else x.sin()
    return y.exp()


def other_dtype(x: Tensor) -> Tensor:
    y = x.sin().double() if is_recomputing() else x.sin()
    return y.exp()


def other_values(x: Tensor) -> Tensor:
    y = x.sin() * (2 if is_recomputing() else 1)
    return y.exp().sin()


def other_tree(x: Tensor) -> Any:
    y = x.sin().exp()
    return [y, y] if is_recomputing() else y


def other_keys(x: Tensor) -> Any:
    y = x.sin().exp()
    return {"b": y} if is_recomputing() else {"a": y}


def test_more_tensors() -> None:
    with pytest.raises(RecomputeMismatchError) as raised:
        backward(remat(saves_more, early_stop=False))
    message = str(raised.value)
    assert message.startswith(
        "The region saved 3 tensors for its backward in the forward, and one more in the recompute, at "
    )
    assert line_of(saves_more, "return y.cos().sin() if") in message
    assert ADVICE in message


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize(
    "fn, check, counts",
    [
        (saves_nothing, "metadata", (2, 0)),
        (saves_nothing, "values", (2, 0)),
        (saves_nothing, "none", (2, 0)),
        (saves_less, "none", (3, 2)),
    ],
)
def test_fewer_tensors(fn: Callable, check: str, counts: tuple, early_stop: bool) -> None:
    # There is no value to continue with, so this is an error whatever the check.
    with pytest.raises(RecomputeMismatchError) as raised:
        backward(remat(fn, early_stop=early_stop, determinism_check=check))
    message = str(raised.value)
    assert message.startswith(
        f"The region saved {counts[0]} tensors for its backward in the forward, and only {counts[1]} in the recompute. "
    )
    assert ADVICE in message


@pytest.mark.parametrize("check", ["metadata", "values"])
def test_another_operation_of_the_same_shape(check: str) -> None:
    with pytest.raises(RecomputeMismatchError, match=r"Tensor 1 .* of ExpBackward0") as raised:
        backward(remat(saves_less, determinism_check=check))
    assert line_of(saves_less, "return y.cos() if") in str(raised.value)


class Same(torch.autograd.Function):
    """Returns its input, as the hooks of FSDP do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "Function": Same.apply,
    "Function of another class": type("Anew", (Same,), {}).apply,
    "clone": Tensor.clone,
    "view": lambda x: x.view_as(x),
}


@pytest.mark.parametrize("check", ["metadata", "values"])
@pytest.mark.parametrize("now", SAME)
@pytest.mark.parametrize("before", SAME)
def test_hooks_that_pass_tensors_through_in_one_run(before: str, now: str, check: str) -> None:
    """By means of autograd Functions. An operation of torch that runs in only one of the runs is another path."""
    layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).requires_grad_(False)
    for layer in layers:
        layer.register_forward_pre_hook(
            lambda module, args: (SAME[now if is_recomputing() else before](args[0]).cos(),)
        )
    x = leaf(2, 3)
    expected = backward(lambda x: layers(x).sin(), x)
    f = remat(lambda x: layers(x).sin(), determinism_check=check)
    if "itself" in (before, now) and not {before, now}.isdisjoint({"clone", "view"}):
        with pytest.raises(RecomputeMismatchError, match=r"(Clone|View)Backward0"):
            backward(f, x)
    else:
        same(backward(f, x), expected)


@pytest.mark.parametrize("check", ["metadata", "values"])
@pytest.mark.parametrize(
    "fn, before, now",
    [
        (other_shape, r"float32\[3\]", r"float32\[2, 3\]"),
        (other_dtype, r"float32\[3\]", r"float64\[3\]"),
    ],
)
def test_other_metadata(fn: Callable, before: str, now: str, check: str) -> None:
    with pytest.raises(RecomputeMismatchError) as raised:
        backward(remat(fn, determinism_check=check))
    message = str(raised.value)
    assert re.match(
        rf"Tensor 1 that the region saved for its backward was {before}.* in the forward and {now}.* in the "
        rf"recompute, at ",
        message,
    )
    assert line_of(fn, "return y.exp()") in message
    assert ADVICE in message


def test_other_values() -> None:
    x = leaf(3)
    with pytest.raises(RecomputeMismatchError, match=r"float32\[3\].* with checksum [0-9a-f]+ in the"):
        backward(remat(other_values, determinism_check="values"), x)
    # The default compares metadata only.
    assert not torch.equal(backward(remat(other_values), x), backward(other_values, x))


def jagged() -> Tensor:
    return torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)], layout=torch.jagged, requires_grad=True)


def test_values_of_jagged_tensors() -> None:
    n = jagged()
    f: Callable = lambda n: (torch.tanh(n.sin()) * n).values()
    same(backward(remat(f, determinism_check="values"), n).values(), backward(f, n).values())
    with pytest.raises(RecomputeMismatchError, match="with checksum"):
        backward(remat(lambda n: other_values(n).values(), determinism_check="values"), n)


class Recurrent(nn.Module):
    """An LSTM; with ``other`` the recompute gets another input."""

    def __init__(self, other: bool = False) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, 2, batch_first=True, bidirectional=True)
        self.other = other

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x * 2 if self.other and is_recomputing() else x)[0]


def used_memory() -> None:
    """Leave bytes in the memory that later tensors get."""
    del [torch.randn(n, n) for n in range(1, 60)][:]


@pytest.mark.parametrize("policy", [None, policies.save_matmuls, policies.save_ops("aten.mkldnn_rnn_layer")], ids=str)
def test_values_of_an_lstm(policy: Any) -> None:
    """Its kernel for the CPU leaves a part of its workspace as it was."""
    module, x = Recurrent(), leaf(3, 4, 6)
    inputs = [x, *module.parameters()]
    expected = torch.autograd.grad(module(x).sum(), inputs)
    for _ in range(5):
        used_memory()
        out = remat(module, policy=policy, determinism_check="values")(x)
        used_memory()
        same(torch.autograd.grad(out.sum(), inputs), expected)


def test_other_values_of_an_lstm_are_noticed() -> None:
    with pytest.raises(RecomputeMismatchError, match="with checksum"):
        backward(remat(Recurrent(other=True), determinism_check="values"), leaf(3, 4, 6))


def test_one_bit_and_the_order_count_for_values() -> None:
    for change in (lambda y: y.flip(0), lambda y: y.nextafter(torch.tensor(9.0))):

        def fn(x: Tensor) -> Tensor:
            y = x.sin()
            return (change(y.detach()) if is_recomputing() else y.detach()) * x

        with pytest.raises(RecomputeMismatchError, match="checksum"):
            backward(remat(fn, determinism_check="values"))


@pytest.mark.parametrize("fn", [saves_more, other_values])
def test_check_none_compares_nothing(fn: Callable) -> None:
    x = leaf(3)
    for early_stop in (True, False):
        f = remat(fn, determinism_check="none", early_stop=early_stop)
        assert backward(f, x).shape == x.shape


@pytest.mark.parametrize("check", ["metadata", "values"])
@pytest.mark.parametrize("fn", [torch.sin, lambda x: (x.sin().half().float() @ x).exp() * x])
def test_no_false_alarm(fn: Callable, check: str) -> None:
    x = leaf(3)
    f = remat(fn, determinism_check=check, early_stop=False)
    same(backward(f, x), backward(fn, x))
    same(torch.func.grad(lambda x: f(x).sum())(x), torch.func.grad(lambda x: fn(x).sum())(x))


def leaves_sum(tree: Any) -> Tensor:
    if isinstance(tree, dict):
        tree = list(tree.values())
    return sum(t.sum() for t in tree) if isinstance(tree, list) else tree.sum()


@pytest.mark.parametrize(
    "fn, sentence",
    [
        (other_tree, "output was a single value and is now a list of 2."),
        (other_keys, "output was a dict with ['a'] and is now a dict with ['b']."),
    ],
)
@pytest.mark.parametrize("take", ["autograd", "func"])
def test_other_structure_of_the_output(fn: Callable, sentence: str, take: str) -> None:
    f = remat(fn, early_stop=False)
    x = leaf(3).detach()
    with pytest.raises(RecomputeMismatchError) as raised:
        if take == "autograd":
            x.requires_grad_()
            torch.autograd.grad(leaves_sum(f(x)), x)
        else:
            torch.func.grad(lambda x: leaves_sum(f(x)))(x)
    text, _, region = str(raised.value).partition("\nThe region is ")
    assert text == (
        f"The region returned a different structure in the recompute: {sentence} A region's function must return the "
        f"same structure in each run: look for a branch on Python state that changed between the runs."
    )
    assert region.startswith(f"{fn.__name__} called at {__file__}:")


@pytest.mark.parametrize(
    "fn, way",
    [
        (fn, way)
        for fn in (saves_less, saves_nothing, other_shape, other_dtype)
        for way in ("grad", "vmap(grad)", "hessian", "jacrev")
        if way != "hessian" or fn in (other_shape, other_dtype)
    ],
)
def test_mismatch_under_torch_func(fn: Callable, way: str) -> None:
    def loss(x: Tensor) -> Tensor:
        return remat(fn)(x).sum()

    take = {
        "grad": torch.func.grad(loss),
        "vmap(grad)": lambda x: torch.vmap(torch.func.grad(loss))(x.expand(2, 3)),
        "hessian": torch.func.hessian(loss),
        "jacrev": torch.func.jacrev(remat(fn)),
    }[way]
    with pytest.raises(RecomputeMismatchError, match="A region's function must be deterministic"):
        take(torch.randn(3))


@pytest.mark.parametrize("fn", [saves_less, saves_nothing], ids=lambda fn: fn.__name__)
def test_values_are_compared_under_vmap_of_a_backward(fn: Callable) -> None:
    def loss(x: Tensor) -> Tensor:
        return remat(fn, determinism_check="values")(x).sum()

    with pytest.raises(RecomputeMismatchError, match="A region's function must be deterministic"):
        torch.func.hessian(loss)(torch.randn(3))


def test_output_that_differs_under_torch_func_is_named() -> None:
    def fn(x: Tensor) -> Any:
        y = x.sin().exp()
        return {"logits": [y, y.bfloat16() if is_recomputing() else y * 2]}

    def loss(x: Tensor) -> Tensor:
        return sum(t.sum() for t in remat(fn)(x)["logits"])

    with pytest.raises(RecomputeMismatchError) as raised:
        torch.vmap(torch.func.grad(torch.func.grad(loss)))(torch.randn(2))
    assert str(raised.value).startswith(
        "output['logits'][1] was float32[] in the region's forward and bfloat16[] in the recompute."
    )


def test_output_that_differs_without_a_gradient_is_named() -> None:
    def fn(x: Tensor) -> Any:
        scale = torch.ones(2 if is_recomputing() else ())
        return {"logits": [x.sin(), scale]}

    def loss(x: Tensor) -> Tensor:
        return remat(fn)(x)["logits"][0].sum()

    with pytest.raises(RecomputeMismatchError) as raised:
        torch.func.grad(torch.func.grad(loss))(torch.ones(()))
    assert re.match(r"output\['logits'\]\[1\] was float32\[\] in .* and float32\[2\] in the re", str(raised.value))


@pytest.mark.parametrize("early_stop", [True, False])
def test_debug_names_the_first_operation_that_differs(early_stop: bool) -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        if is_recomputing():
            y = y.tanh()
        else:
            y = y.sigmoid()
        return y.exp()

    with pytest.raises(RecomputeMismatchError) as raised:
        backward(remat(fn, debug=True, early_stop=early_stop))
    message = str(raised.value)
    assert f"aten.sigmoid.default -> float32[3] at {line_of(fn, 'y.sigmoid()')}" in message
    assert f"aten.tanh.default -> float32[3] at {line_of(fn, 'y.tanh()')}" in message


POLICIES = [None, policies.save_matmuls, policies.everything_saveable, policies.offload(policies.save_matmuls)]


class Square(torch.autograd.Function):
    """Saves its input: the hooks that it calls run under modes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad * ctx.saved_tensors[0]


@pytest.mark.parametrize("check", ["metadata", "values"])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_debug_logs_only_the_operations_of_the_function(policy: Any, check: str) -> None:
    """Not the operations that compare and save tensors."""
    w = torch.randn(3, 3)

    def fn(x: Tensor) -> Tensor:
        return (Square.apply((x @ w).sin()) @ w).cos()

    def other(x: Tensor) -> Tensor:
        y = Square.apply((x @ w).sin()) @ w
        return (y.tanh() if is_recomputing() else y.sigmoid()).cos()

    x = leaf(2, 3)
    same(backward(remat(fn, policy=policy, determinism_check=check, debug=True), x), backward(fn, x))
    if policy is not policies.everything_saveable:
        with pytest.raises(RecomputeMismatchError, match=r"Operation 4 .*\n.*aten.sigmoid.*\n.*aten.tanh"):
            backward(remat(other, policy=policy, determinism_check=check, debug=True, early_stop=False), x)


def test_debug_with_a_backward_pass_inside() -> None:
    """It needs a recompute in the middle of the first run, whose operations are not part of that run."""

    def fn(x: Tensor) -> Tensor:
        h = x.sin()
        (g,) = torch.autograd.grad((h * x.exp()).cos().sum(), x, create_graph=True)
        return g * h.tanh()

    x = leaf(4)
    for middle in (lambda x: x, lambda x: x * 2):
        same(backward(lambda x: remat(fn, debug=True)(middle(x)), x), backward(lambda x: fn(middle(x)), x))


# Two runs, and the operations in the log of the second when it is found to differ.
WITH_LOGS: dict[str, tuple[Callable, Callable, list[str]]] = {
    "another operation": (lambda x: x.sin().exp(), lambda x: x.cos().exp(), ["cos"]),
    "another shape": (lambda x: x.sin().exp(), lambda x: x[:1].sin().exp(), ["slice"]),
    "one more": (lambda x: x.sin().exp(), lambda x: x.sin().exp().exp(), ["sin", "exp", "exp"]),
    "one less": (lambda x: x.sin().exp(), lambda x: x.sin(), ["sin"]),
    "one that saves nothing": (lambda x: x.sin().exp(), lambda x: (x.detach() * 2, x.sin().exp())[1], ["mul"]),
    "other values": (lambda x: (x * 2).sin().exp(), lambda x: (x * 3).sin().exp(), ["mul"]),
    "another tree": (lambda x: x.sin().exp(), lambda x: [x.sin().exp()], ["sin", "exp"]),
}


@pytest.mark.parametrize("policy", [None, policies.save_ops("aten.sin")], ids=str)
@pytest.mark.parametrize("kind", WITH_LOGS)
@pytest.mark.parametrize("transform", ["autograd", "func.grad", "in a region"])
def test_debug_gives_the_logs_of_both_runs(kind: str, policy: Any, transform: str) -> None:
    first, again, log = WITH_LOGS[kind]

    def fn(x: Tensor) -> Any:
        return again(x) if len(runs) else first(x)

    options: dict[str, Any] = {"debug": True, "early_stop": False, "determinism_check": "values"}
    region = remat(fn, policy=policy, **options)
    outer = remat(lambda x: region(x), **options) if transform == "in a region" else region
    runs: list[bool] = []

    def loss(x: Tensor) -> Tensor:
        out = outer(x).sum()
        runs.append(True)
        return out

    with pytest.raises(RecomputeMismatchError) as raised:
        torch.func.grad(loss)(torch.ones(3)) if transform == "func.grad" else loss(leaf(3)).backward()
    assert raised.value.logs is not None
    found = []
    for entries in raised.value.logs:
        for entry in entries:  # what ran, what it made, and the line that called it
            assert re.fullmatch(
                r"aten\.\w+\.\w+(\(.*\))? -> float32\[\d\] at \S+test_errors\.py:\d+ \(<lambda>\)", entry
            ), entry
        found.append([entry.split(".")[1] for entry in entries])
    assert found == [["mul"] * (kind == "other values") + ["sin", "exp"], log]


def test_logs_exist_only_with_debug() -> None:
    with pytest.raises(RecomputeMismatchError) as raised:
        backward(remat(lambda x: x[:1].sin().exp() if is_recomputing() else x.sin().exp()))
    assert raised.value.logs is None and RecomputeMismatchError("").logs is None


def test_debug_without_a_difference() -> None:
    x, fn = leaf(3), lambda x: x.sin().exp().cos()
    same(backward(remat(fn, debug=True), x), backward(fn, x))


# --- arguments of the wrong kind --------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["dots", "nothing_saveable", 3, True, {"a": 1}, object()])
@pytest.mark.parametrize("decorate", [lambda **o: remat(torch.sin, **o), remat])
def test_policy_error_at_decoration(policy: Any, decorate: Callable) -> None:
    with pytest.raises(PolicyError, match=re.escape(repr(policy))):
        decorate(policy=policy)
    with pytest.raises(ValueError):
        decorate(policy=policy)


@pytest.mark.parametrize("fn", [3, "sin", torch.ones(3), [torch.sin], object()])
def test_not_a_callable(fn: Any) -> None:
    with pytest.raises(TypeError, match="remat takes a function or another callable, got"):
        remat(fn)
    with pytest.raises(TypeError, match="remat takes a function or another callable, got"):
        remat()(fn)


def test_a_class_is_not_a_function() -> None:
    with pytest.raises(TypeError, match="not the class Linear: wrap an instance, or its method"):
        remat(nn.Linear)


@pytest.mark.parametrize("check", ["value", "default", None, True, 1, "", ["metadata"]])
def test_bad_determinism_check(check: Any) -> None:
    with pytest.raises((ValueError, TypeError)) as raised:
        remat(torch.sin, determinism_check=check)
    assert "determinism_check must be one of 'metadata', 'values', 'none'" in str(raised.value)
    assert repr(check) in str(raised.value)


@pytest.mark.parametrize("option", ["preserve_rng_state", "early_stop", "debug"])
@pytest.mark.parametrize("value", [None, 1, "yes", torch.tensor(True)])
def test_bad_flag(option: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{option} must be True or False, got "):
        remat(torch.sin, **{option: value})


def test_unknown_and_positional_options() -> None:
    for option in ("prevent_cse", "static_argnums", "use_reentrant", "context_fn", "polcy"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
            remat(torch.sin, **{option: None})
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
            remat(**{option: None})
    with pytest.raises(TypeError, match="positional-only"):
        remat(fn=torch.sin)
    for other in (None, policies.save_matmuls, torch.ones(3)):
        with pytest.raises(TypeError, match="takes from 0 to 1 positional arguments but 2 were given"):
            remat(torch.sin, other)


def test_a_wrong_call_raises_the_functions_own_error() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    with pytest.raises(TypeError, match="missing 1 required positional argument: 'y'"):
        remat(fn)(leaf(3))


# --- is_recomputing and disable_remat ---------------------------------------------------------------


def test_is_recomputing() -> None:
    seen = []

    def fn(x: Tensor) -> Tensor:
        seen.append(is_recomputing())
        return x.sin().exp()

    assert not is_recomputing()
    backward(remat(fn))
    assert seen == [False, True]
    seen.clear()
    torch.func.grad(lambda x: remat(fn)(x).sum())(torch.randn(3))
    assert seen == [False, True] and not is_recomputing()
    seen.clear()
    inner = remat(fn)
    backward(remat(lambda x: inner(x).sin()))
    # The outer region is recomputed, then the inner one for the slots of that run.
    assert seen[0] is False and all(seen[1:]) and len(seen) <= 3 and not is_recomputing()


def test_is_recomputing_is_thread_local() -> None:
    seen = []

    def fn(x: Tensor) -> Tensor:
        if is_recomputing():
            thread = threading.Thread(target=lambda: seen.append(is_recomputing()))
            thread.start()
            thread.join()
        return x.sin().exp()

    backward(remat(fn))
    assert seen == [False]


def test_disable_remat() -> None:
    runs = []

    def fn(x: Tensor) -> Tensor:
        runs.append(is_recomputing())
        return x.sin().exp().cos()

    f, x = remat(fn), leaf(3)
    expected = backward(fn, x)
    runs.clear()
    with disable_remat():
        same(backward(f, x), expected)
        same(torch.func.grad(lambda x: f(x).sum())(x), expected)
        with disable_remat():
            pass
        same(torch.vmap(torch.func.grad(f))(x), expected)
    assert runs == [False] * 3
    backward(f, x)
    assert runs[3:] == [False, True]


def test_disable_remat_is_reset_after_an_exception_and_leaves_older_regions() -> None:
    runs = []

    def fn(x: Tensor) -> Tensor:
        runs.append(is_recomputing())
        return x.sin().exp().cos()

    x = leaf(3)
    loss = remat(fn)(x).sum()
    with pytest.raises(KeyError), disable_remat():
        loss.backward()
        raise KeyError
    assert runs == [False, True]
    backward(remat(fn), x)
    assert runs == [False, True, False, True]


def test_disable_remat_as_a_decorator_and_around_nested_regions() -> None:
    runs = []

    def fn(x: Tensor) -> Tensor:
        runs.append(is_recomputing())
        return x.sin().exp()

    inner = remat(fn)

    @remat
    def outer(x: Tensor) -> Tensor:
        with disable_remat():
            y = inner(x)
        return inner(y)

    x = leaf(3)
    expected = backward(lambda x: fn(fn(x)), x)
    runs.clear()
    same(backward(outer, x), expected)
    assert runs[:2] == [False, False]

    @disable_remat()
    def off(x: Tensor) -> Tensor:
        return inner(x)

    runs.clear()
    backward(off, x)
    assert runs == [False]


# --- state is restored after errors ----------------------------------------------------------------


class Boom(Exception):
    pass


class Interrupt(BaseException):
    pass


MODULE = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.BatchNorm1d(3, affine=False))


def surroundings() -> dict[str, Any]:
    bits = np.random.get_state()
    return {
        "hooks": private.top_hooks(True),
        "hooks switch": private.hooks_disabled_message(),
        "levels": private.transforms_active(),
        "level": private.current_level(),
        "dual level": private.dual_level_active(),
        "torch generator": torch.get_rng_state().tolist(),
        "python generator": random.getstate(),
        "numpy generator": (bits[0], bits[1].tolist(), *bits[2:]),
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        ),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "defaults": (torch.get_default_dtype(), torch.get_default_device()),
        "attention": torch.backends.cuda.flash_sdp_enabled(),
        "function modes": torch.overrides._len_torch_function_stack(),
        "dispatch modes": torch.utils._python_dispatch._len_torch_dispatch_stack(),
        "recomputing": is_recomputing(),
        "parameters": [id(p) for p in (*MODULE.parameters(), *MODULE.buffers())],
        "watch": state.watch,
        "own work": state.own_work,
        "override": state.override,
    }


def assert_as_before(before: dict[str, Any], but: tuple[str, ...] = ()) -> None:
    after = surroundings()
    for name, value in before.items():
        assert name in but or after[name] == value, name


class Failing:
    """A function that raises at the end of its first run if `at` is 0, of its recompute if `at` is 1."""

    def __init__(self, at: int, error: type[BaseException] = Boom) -> None:
        self.at, self.error = at, error
        type(self).runs = 0  # an attribute of the class, which is not restored
        self.module = MODULE

    def __call__(self, x: Tensor) -> Tensor:
        type(self).runs = self.runs + 1 if is_recomputing() else 0
        y = nn.functional.dropout(self.module[0](x).sin(), 0.5)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            if self.runs == self.at:
                raise self.error("in the region")
        return y.exp().cos() * random.random() * float(np.random.rand())


def plain(f: Callable, x: Tensor) -> Any:
    out = f(x.requires_grad_())
    return lambda: torch.autograd.grad(out.sum(), x)


def with_hooks_around(f: Callable, x: Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        out = f(x.requires_grad_())
    return lambda: torch.autograd.grad(out.sum(), x)


def nested(f: Callable, x: Tensor) -> Any:
    return plain(remat(lambda x: f(x.sin()).sin()), x)


def swapped(f: Callable, x: Tensor) -> Any:
    names = dict(MODULE.named_parameters())
    others = {name: torch.randn_like(p, requires_grad=True) for name, p in names.items()}

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MODULE

        def forward(self, x: Tensor) -> Tensor:
            return f(x)

    others = {f"inner.{name}": other for name, other in others.items()}
    out = functional_call(Calls(), others, (x.requires_grad_(),))
    return lambda: torch.autograd.grad(out.sum(), [x, others["inner.0.weight"]])


def func_grad(f: Callable, x: Tensor) -> Any:
    return lambda: torch.func.grad(lambda x: f(x).sum())(x)


def func_vjp(f: Callable, x: Tensor) -> Any:
    out, pull = torch.func.vjp(f, x)
    return lambda: pull(torch.ones_like(out))


def per_sample(f: Callable, x: Tensor) -> Any:
    grad = torch.func.grad(lambda row: f(row).sum())
    return lambda: torch.vmap(grad, randomness="different")(x)


def second_order(f: Callable, x: Tensor) -> Any:
    def first(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: f(x).sum())(x).sum()

    return lambda: torch.func.grad(first)(x)


def forward_over_reverse(f: Callable, x: Tensor) -> Any:
    grad = torch.func.grad(lambda x: f(x).sum())
    return lambda: torch.func.jvp(grad, (x,), (torch.ones_like(x),))


WAYS = [
    plain, with_hooks_around, nested, swapped, func_grad, func_vjp, per_sample, second_order,
    forward_over_reverse,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("error", [Boom, Interrupt, KeyboardInterrupt, StopIteration])
def test_after_an_exception_in_the_region(way: Callable, at: int, error: type[BaseException]) -> None:
    x = torch.randn(2, 3)
    f = Failing(at, error)
    r = remat(f)
    before = surroundings()
    with pytest.raises(error, match="in the region"):
        way(r, x)()
    assert f.runs == at
    # What the first run drew stays drawn, as without remat; the recompute draws nothing.
    drawn = ("torch generator", "python generator", "numpy generator")
    assert_as_before(before, but=drawn)
    torch.manual_seed(0)
    f.at = -10
    expected = torch.manual_seed(5), random.seed(5), np.random.seed(5)
    actual = way(r, x.clone())()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    expected = way(f, x.clone())() if way is not swapped else actual
    same(actual, expected)


@pytest.mark.parametrize("way", [plain, with_hooks_around, nested, func_vjp])
def test_a_failed_recompute_moves_no_generator(way: Callable) -> None:
    x = torch.randn(2, 3)
    f = Failing(1)
    pull = way(remat(f), x)
    before = surroundings()
    with pytest.raises(Boom):
        pull()
    assert_as_before(before)


def test_a_failed_backward_can_be_tried_again() -> None:
    x = leaf(2, 3)
    f = Failing(1)
    loss = remat(f)(x).sum()
    with pytest.raises(Boom):
        torch.autograd.grad(loss, x, retain_graph=True)
    (actual,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert f.runs == 2
    same(torch.autograd.grad(loss, x)[0], actual)
    assert actual.count_nonzero() > 0


@pytest.mark.parametrize("way", [plain, with_hooks_around, nested, swapped, func_vjp])
def test_after_an_exception_in_another_threads_backward(way: Callable) -> None:
    x = torch.randn(2, 3)
    pull = way(remat(Failing(1)), x)
    here, there = surroundings(), []

    def target() -> None:
        before = surroundings()
        try:
            pull()
        except Boom:
            there.append("raised")
        assert_as_before(before)
        there.append("as before")

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    assert there == ["raised", "as before"]
    assert_as_before(here)


@pytest.mark.parametrize("error", [MutationError, RecomputeMismatchError])
@pytest.mark.parametrize("way", [plain, with_hooks_around, nested, func_vjp])
def test_after_an_error_of_the_package(error: type, way: Callable) -> None:
    w = torch.ones(3)

    def fn(x: Tensor) -> Tensor:
        y = (x * w).sin()
        if error is RecomputeMismatchError and is_recomputing():
            y = y.double()
        return nn.functional.dropout(y, 0.5).exp().cos()

    pull = way(remat(fn), torch.randn(2, 3))
    if error is MutationError:
        w.add_(1)
    before = surroundings()
    with pytest.raises(error):
        pull()
    assert_as_before(before)


def test_hooks_of_the_user_stay_on_top() -> None:
    pack, unpack = (lambda t: t), (lambda t: t)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        before = private.top_hooks(True)
        with pytest.raises(Boom):
            remat(Failing(0))(leaf(2, 3))
        loss = remat(Failing(1))(leaf(2, 3)).sum()
        with pytest.raises(Boom):
            loss.backward()
        assert private.top_hooks(True) == before
    assert private.top_hooks(True) is None


def test_hooks_that_the_user_disabled_stay_disabled() -> None:
    x = leaf(2, 3)
    f = Failing(1)
    out = remat(f)(x)
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks, says the user"):
        with pytest.raises(Boom):
            out.sum().backward()
        assert private.hooks_disabled_message() == "no hooks, says the user"
    assert private.hooks_disabled_message() is None


class Counting(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("at", [0, 1])
def test_function_modes_of_the_user(at: int) -> None:
    mode = Counting()
    with mode:
        before = surroundings()
        with pytest.raises(Boom):
            plain(remat(Failing(at)), torch.randn(2, 3))()
        with pytest.raises(Boom):
            func_grad(remat(Failing(at)), torch.randn(2, 3))()
        drawn = ("torch generator", "python generator", "numpy generator")
        assert_as_before(before, but=drawn)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("way", [plain, func_grad, per_sample])
def test_under_autocast_and_other_settings(at: int, way: Callable) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), disable_remat() if at > 1 else nullcontext():
            before = surroundings()
            with pytest.raises(Boom):
                way(remat(Failing(at)), torch.randn(2, 3, dtype=torch.float32))()
            drawn = ("torch generator", "python generator", "numpy generator")
            assert_as_before(before, but=drawn)
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_exception_in_a_hook_of_the_backward() -> None:
    x = leaf(2, 3)
    h = x * 1

    def hook(grad: Tensor) -> None:
        raise Boom

    h.register_hook(hook)
    loss = remat(Failing(9))(h).sum()
    before = surroundings()
    with pytest.raises(Boom):
        loss.backward()
    assert_as_before(before)


def test_the_users_traceback_leads_to_the_users_line() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.sin().exp()
        if is_recomputing():
            raise Boom("here")
        return y.cos()

    with pytest.raises(Boom) as raised:
        backward(remat(fn))
    assert raised.traceback[-1].name == "fn"
    assert raised.value.__cause__ is None


@pytest.mark.parametrize("check", ["metadata", "values"])
def test_tensors_without_content(check: str) -> None:
    x = torch.ones(3, 3, device="meta", requires_grad=True)
    remat(lambda x: (x @ x).sin().exp().sum(), determinism_check=check)(x).backward()
    assert x.grad is not None and x.grad.shape == (3, 3)


def test_debug_compares_constants() -> None:
    """Equal operations on other numbers save tensors that look the same."""
    setting = {"factor": 2.0}
    x = torch.randn(4, requires_grad=True)
    y = remat(lambda x: (x * setting["factor"]).exp(), debug=True)(x).sum()
    setting["factor"] = 3.0
    with pytest.raises(
        RecomputeMismatchError, match=r"In the forward: aten\.mul\.Tensor\(2\.0\) -> float32\[4\]"
    ) as raised:
        y.backward()
    assert "In the recompute: aten.mul.Tensor(3.0) -> float32[4]" in str(raised.value)
    assert "debug=True" not in str(raised.value)
