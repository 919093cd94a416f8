"""`remat.compat.checkpoint` and `checkpoint_sequential` compared with torch's: each option, in equal calls of both."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import pickle
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from cases import Batch, Case, Point, assert_same, cases, rand
from cases import module as made
from functorch.compile import make_boxed_func
from side_by_side import Runs, assert_rows_have_tests, both, is_torch, values_and_grads
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

import remat.compat
from benchmarks.measure import assert_freed_without_gc, count_ops, held_bytes, leaked_bytes
from remat import MutationError, PolicyError, RecomputeMismatchError, policies
from remat.compat import checkpoint, checkpoint_sequential


def deep(x: Tensor) -> Tensor:
    """Saves four tensors; the last one is the result of the third operation."""
    return x.sin().exp().sin().cos()


def sines_of_backward(out: Tensor) -> int:
    """The number of sines that the backward recomputes; the derivative of the cosine is one more."""
    return count_ops(out.sum().backward)["aten.sin"] - 1


# --- public names -----------------------------------------------------------------------------------------------------


def test_every_public_name_exists() -> None:
    names = set(torch.utils.checkpoint.__all__) - {"CheckpointFunction"}
    assert names <= set(remat.compat.__all__)
    own = {"checkpoint", "checkpoint_sequential"}
    for name in names - own:
        assert getattr(remat.compat, name) is getattr(torch.utils.checkpoint, name), name
    for name in own:
        assert getattr(remat.compat, name) is not getattr(torch.utils.checkpoint, name), name


def test_signatures() -> None:
    """All of torch's parameters in order, plus `policy` and those that this version of torch doesn't have yet."""
    for name in ("checkpoint", "checkpoint_sequential"):
        ours = dict(inspect.signature(getattr(remat.compat, name)).parameters)
        theirs = dict(inspect.signature(getattr(torch.utils.checkpoint, name)).parameters)
        assert ours.pop("policy").default is None
        later = {"preserve_rng_state": True, "respect_saved_tensors_hooks": None} if name == "checkpoint" else {}
        for option, default in later.items():
            if option not in theirs:
                assert ours.pop(option).default is default
        assert list(ours) == list(theirs)
        assert [p.kind for p in ours.values()] == [p.kind for p in theirs.values()]
        assert ours.pop("use_reentrant").default is False
        if name == "checkpoint":
            assert ours.pop("function").default is None  # the decorator form
        for parameter in ours.values():
            assert parameter.default == theirs[parameter.name].default, parameter


def test_errors_are_subclasses_of_torchs() -> None:
    for error in (RecomputeMismatchError, MutationError, PolicyError):
        assert issubclass(error, CheckpointError)


# --- calls ------------------------------------------------------------------------------------------------------------


@cases()
def test_every_case(case: Case) -> None:
    def graded(fn: Callable) -> Any:
        with case.state():
            args = case.make_args()
            return values_and_grads(fn, *args, inputs=case.inputs(args)) if case.inputs(args) else fn(*args)

    try:
        expected = graded(case.fn)
    except RuntimeError:  # no result depends on an input
        return
    assert_same(graded(functools.partial(checkpoint, case.fn)), expected)


def nested(batch: Batch, weights: dict, point: Point, flag: bool, *, scale: float = 1.0, name: Any = None) -> Any:
    h = (batch.x @ weights["w"][0]).tanh() * scale
    return {"h": h if flag else -h, "point": Point(point.x * h.sum(), name), "none": None, "n": 3}


def nested_arguments() -> tuple[tuple, dict, list[Tensor]]:
    x, w, y = rand(2, 3), rand(3, 3, seed=1), rand(2, seed=2)
    args = Batch(x, "b"), {"w": [w]}, Point(y, "unused"), False
    return args, {"scale": 2.0, "name": "text"}, [x, w, y]


@both
def test_arguments_and_results(module: Any) -> None:
    args, kwargs, inputs = nested_arguments()
    runs = Runs(nested)
    found = values_and_grads(lambda: module.checkpoint(runs, *args, use_reentrant=False, **kwargs), inputs=inputs)
    assert_same(found, values_and_grads(lambda: nested(*args, **kwargs), inputs=inputs))
    assert runs.count == 2


@both
def test_what_is_saved_and_what_is_recomputed(module: Any) -> None:
    x = rand(64)
    assert held_bytes(lambda x: module.checkpoint(deep, x, use_reentrant=False), x) == x.nbytes  # the result
    out = module.checkpoint(deep, x, use_reentrant=False)
    assert sines_of_backward(out) == 2
    assert leaked_bytes(lambda: torch.autograd.grad(module.checkpoint(deep, x, use_reentrant=False).sum(), x)) == 0


@both
@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_without_grad_it_is_a_plain_call(module: Any, off: Callable) -> None:
    entered: list[str] = []

    @contextlib.contextmanager
    def noted(name: str) -> Any:
        entered.append(name)
        yield

    x = rand(3)
    with off():
        out = module.checkpoint(deep, x, use_reentrant=False, context_fn=lambda: (noted("first"), noted("again")))
    assert not out.requires_grad
    assert_same(out, deep(x).detach())
    assert entered == []


@both
def test_modules_methods_and_captured_tensors(module: Any) -> None:
    layer = made(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)))
    w, x = rand(3, 3, seed=1), rand(2, 3)
    inputs = [x, w, *layer.parameters()]
    for fn in (layer, layer.forward, lambda x: (layer(x) @ w).sin(), functools.partial(F.linear, weight=w)):
        found = values_and_grads(lambda x: module.checkpoint(fn, x, use_reentrant=False), x, inputs=inputs)
        assert_same(found, values_and_grads(fn, x, inputs=inputs))


@both
def test_double_backward_and_a_retained_graph(module: Any) -> None:
    def second(fn: Callable) -> Any:
        x = rand(3)
        out = fn(x).sum()
        (first,) = torch.autograd.grad(out, x, create_graph=True)
        (again,) = torch.autograd.grad(out, x, retain_graph=True)
        return first, again, torch.autograd.grad(first.sin().sum(), x)

    assert_same(second(lambda x: module.checkpoint(deep, x, use_reentrant=False)), second(deep))


@both
def test_a_region_in_a_region(module: Any) -> None:
    inner, outer = Runs(deep), Runs(lambda x: module.checkpoint(inner, x.sin(), use_reentrant=False).sin())
    x = rand(3)
    found = values_and_grads(lambda x: module.checkpoint(outer, x, use_reentrant=False), x)
    assert_same(found, values_and_grads(lambda x: deep(x.sin()).sin(), x))
    assert (outer.count, inner.count) == (2, 3)


@both
def test_exceptions_of_the_function_propagate(module: Any) -> None:
    def fails(x: Tensor) -> Tensor:
        raise KeyError("user")

    x = rand(3)
    with pytest.raises(KeyError, match="user"):
        module.checkpoint(fails, x, use_reentrant=False)
    assert_same(
        values_and_grads(lambda x: module.checkpoint(deep, x, use_reentrant=False), x), values_and_grads(deep, x)
    )


@both
def test_an_input_changed_after_the_call_is_an_error(module: Any) -> None:
    x = rand(3)
    h = x * 2
    out = module.checkpoint(deep, h, use_reentrant=False)
    h.add_(1)
    with pytest.raises(RuntimeError, match=r"in.?place") as raised:
        out.sum().backward()
    assert is_torch(module) or isinstance(raised.value, MutationError)


@both
def test_what_is_not_a_function(module: Any) -> None:
    with pytest.raises(TypeError):
        module.checkpoint(3, rand(3), use_reentrant=False)
    with pytest.raises(TypeError):
        module.checkpoint(None, rand(3), use_reentrant=False)


# --- the decorator ----------------------------------------------------------------------------------------------------


@checkpoint(use_reentrant=False, policy=policies.save_matmuls)
def decorated(x: Tensor, policy: float = 1.0, debug: bool = False) -> Tensor:
    """Its keyword arguments have the names of options."""
    return x.sin().exp() * policy * (2 if debug else 1)


def test_decorator() -> None:
    x = rand(3)
    found = values_and_grads(lambda x: decorated(x, policy=3.0, debug=True), x)
    assert_same(found, values_and_grads(lambda x: x.sin().exp() * 3.0 * 2, x))
    assert decorated.__name__ == "decorated"
    assert decorated.__doc__ == "Its keyword arguments have the names of options."
    assert list(inspect.signature(decorated).parameters) == ["x", "policy", "debug"]
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    runs = Runs(deep)
    checkpoint()(runs)(x).sum().backward()
    assert runs.count == 2


def test_decorator_of_a_method() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 3).double()
            self.runs = 0

        @checkpoint(use_reentrant=False)
        def forward(self, x: Tensor) -> Tensor:
            return self.lin(x).tanh() * self.lin.weight.sum()

    model, x = Model(), rand(2, 3)
    inputs = [x, *model.parameters()]
    found = values_and_grads(model, x, inputs=inputs)
    assert_same(found, values_and_grads(lambda x: model.lin(x).tanh() * model.lin.weight.sum(), x, inputs=inputs))
    assert held_bytes(model, x) == 6 * 8


def test_decorator_takes_only_options() -> None:
    with pytest.raises(ValueError, match="no option scale"):
        checkpoint(use_reentrant=False, scale=2.0)


def test_a_parameter_named_policy() -> None:
    def fn(x: Tensor, policy: float) -> Tensor:
        return (x * policy).sin().exp()

    x = rand(3)
    expected = values_and_grads(lambda x: fn(x, 2.0), x)
    for call in (
        lambda x: checkpoint(fn, x, 2.0, use_reentrant=False),
        lambda x: checkpoint(functools.partial(fn, policy=2.0), x, use_reentrant=False),
        lambda x: checkpoint(use_reentrant=False)(fn)(x, policy=2.0),
    ):
        assert_same(values_and_grads(call, x), expected)
    with pytest.raises(PolicyError):
        checkpoint(fn, x, policy=2.0, use_reentrant=False)


# --- use_reentrant ----------------------------------------------------------------------------------------------------


def test_use_reentrant() -> None:
    x = rand(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({}, {"use_reentrant": None}, {"use_reentrant": False}):
            assert_same(values_and_grads(lambda x: checkpoint(deep, x, **options), x), values_and_grads(deep, x))
            assert_same(checkpoint_sequential([deep, deep], 2, x, **options), deep(deep(x)))
    for call in (
        lambda: checkpoint(deep, x, use_reentrant=True),
        lambda: checkpoint(use_reentrant=True)(deep)(x),
        lambda: checkpoint_sequential([deep], 1, x, True),
    ):
        with pytest.raises(ValueError, match=r"without a graph[\s\S]*use_reentrant=False"):
            call()
    with pytest.warns(UserWarning, match="use_reentrant"):  # torch warns by default
        torch.utils.checkpoint.checkpoint(deep, x)


# --- determinism_check ------------------------------------------------------------------------------------------------


def runs_differ(first: Callable, again: Callable) -> Callable:
    """`first` in the first call, `again` in later calls."""
    runs = itertools.count()

    def fn(x: Tensor) -> Tensor:
        return (again if next(runs) else first)(x)

    return fn


DIFFERENT = {
    "shape": lambda x: x[:1].sin().exp().sin(),
    "dtype": lambda x: x.float().sin().exp().sin(),
    "number": lambda x: x.sin().exp(),
}


def gradient(module: Any, fn: Callable, **options: Any) -> Tensor:
    x = rand(2)
    out = module.checkpoint(fn, x, use_reentrant=False, **options)
    return torch.autograd.grad(out.sum(), x)[0]


@both
@pytest.mark.parametrize("again", DIFFERENT)
def test_determinism_check(module: Any, again: str) -> None:
    def fn() -> Callable:
        return runs_differ(lambda x: x.sin().exp().sin(), DIFFERENT[again])

    for options in ({}, {"determinism_check": "default"}):
        with pytest.raises(CheckpointError):
            gradient(module, fn(), **options)
    if again == "number":  # there is no other value to use instead
        with pytest.raises(CheckpointError):
            gradient(module, fn(), determinism_check="none")
    else:
        assert gradient(module, fn(), determinism_check="none").shape == (2,)


@both
def test_determinism_check_must_be_a_known_value(module: Any) -> None:
    for context in (contextlib.nullcontext(), torch.no_grad()):
        with context, pytest.raises(ValueError, match=r"determinism_check.*default.*none.*but|one of.*got|got"):
            gradient(module, deep, determinism_check="strict")


def test_determinism_check_of_values() -> None:
    def fn() -> Callable:
        return runs_differ(deep, lambda x: deep(x + 1))

    with pytest.raises(RecomputeMismatchError, match="checksum"):
        gradient(remat.compat, fn(), determinism_check="values")
    for module in (torch.utils.checkpoint, remat.compat):
        for options in ({}, {"determinism_check": "none"}):
            gradient(module, fn(), **options)
    gradient(remat.compat, fn(), determinism_check="metadata")


def test_the_operation_of_a_saved_tensor_is_compared() -> None:
    """torch compares only shape, dtype and device, and its result is the derivative of neither function."""
    first, again = lambda x: x.tanh().sin(), lambda x: x.exp().sin()
    wrong = gradient(torch.utils.checkpoint, runs_differ(first, again))
    assert not any(torch.equal(wrong, gradient(remat.compat, fn)) for fn in (first, again))
    with pytest.raises(RecomputeMismatchError, match=r"TanhBackward0[\s\S]*ExpBackward0"):
        gradient(remat.compat, runs_differ(first, again))
    gradient(remat.compat, runs_differ(first, again), determinism_check="none")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `debug=True` torch leaves its logger in a state in which pytest would fail to format its records."""
    monkeypatch.setattr(logging.getLogger("LoggingTensor"), "propagate", True)


# --- debug ------------------------------------------------------------------------------------------------------------


def fails_with(module: Any, **options: Any) -> str:
    """The text of the error of a region whose recompute differs from its first run."""
    with pytest.raises(CheckpointError) as raised:
        gradient(module, runs_differ(lambda x: x.sin().exp().sin(), lambda x: x[:1].sin().exp().sin()), **options)
    return str(raised.value)


def is_detailed(text: str) -> bool:
    """Whether it lists operations of both runs."""
    return "slice" in text and "test_compat_checkpoint.py" in text and "sin" in text


@both
def test_debug(module: Any) -> None:
    assert is_detailed(fails_with(module, debug=True))
    assert not is_detailed(fails_with(module, debug=False))
    assert_same(gradient(module, deep, debug=True), gradient(module, deep))


@both
@pytest.mark.parametrize("setters", [torch.utils.checkpoint, remat.compat], ids=["torch", "remat"])
def test_set_checkpoint_debug_enabled(module: Any, setters: Any) -> None:
    with setters.set_checkpoint_debug_enabled(True):
        assert is_detailed(fails_with(module))
        assert is_detailed(fails_with(module, debug=False))
        with setters.set_checkpoint_debug_enabled(None):
            assert not is_detailed(fails_with(module))
            assert is_detailed(fails_with(module, debug=True))
    with setters.set_checkpoint_debug_enabled(False):
        assert not is_detailed(fails_with(module, debug=True))
    assert not is_detailed(fails_with(module))


@pytest.mark.parametrize("setters", [torch.utils.checkpoint, remat.compat], ids=["torch", "remat"])
def test_switches_reach_every_region(setters: Any) -> None:
    """torch's switches act on calls of its function; `tests/front/test_override.py` covers every kind of region."""
    f = remat.remat(runs_differ(lambda x: x.sin().exp().sin(), lambda x: x[:1].sin().exp().sin()))
    with setters.set_checkpoint_debug_enabled(True):
        out = f(rand(3)).sum()
    with pytest.raises(CheckpointError) as raised:
        out.backward()
    assert is_detailed(str(raised.value))
    f = remat.remat(ends_late)
    with setters.set_checkpoint_early_stop(False):
        out = f(rand(3))
    assert (ends_of_backward(out), ends_of_backward(f(rand(3)))) == (1, 0)


def test_debug_names_the_line() -> None:
    def again(x: Tensor) -> Tensor:
        return x.sin().cos()  # this one

    with pytest.raises(RecomputeMismatchError) as raised:
        gradient(remat.compat, runs_differ(deep, again), debug=True)
    assert raised.value.logs is not None
    for entries, ops in zip(raised.value.logs, (["sin", "exp", "sin", "cos"], ["sin", "cos"])):
        assert [entry.split(".")[1] for entry in entries] == ops
    lines, start = inspect.getsourcelines(again)
    number = next(start + i for i, line in enumerate(lines) if "this one" in line)
    assert f"test_compat_checkpoint.py:{number} (again)" in str(raised.value)


def test_debug_compares_operations_that_save_nothing() -> None:
    """torch's `debug` only adds detail to an error, and raises none itself."""

    def fn() -> Callable:
        return runs_differ(deep, lambda x: (x.detach() * 2, deep(x))[1])

    for options in ({"module": torch.utils.checkpoint, "debug": True}, {"module": remat.compat}):
        gradient(fn=fn(), **options)
    with pytest.raises(RecomputeMismatchError, match=r"aten\.mul"):
        gradient(remat.compat, fn(), debug=True)


def test_debug_with_contexts() -> None:
    def contexts() -> tuple:
        return contextlib.nullcontext(), contextlib.nullcontext()

    assert is_detailed(fails_with(remat.compat, debug=True, context_fn=contexts))
    with pytest.raises(ValueError, match="debug"):
        gradient(torch.utils.checkpoint, deep, debug=True, context_fn=contexts)


# --- early_stop -------------------------------------------------------------------------------------------------------


def ends_late(x: Tensor) -> Tensor:
    """Two operations follow its last saved tensor."""
    return x.sin().exp().sin().cumsum(0).neg()


def ends_of_backward(out: Tensor) -> int:
    """How often the backward recomputes the last operations; the derivative runs `cumsum` once itself."""
    counts = count_ops(out.sum().backward)
    return counts["aten.cumsum"] - 1


@both
@pytest.mark.parametrize("setters", [torch.utils.checkpoint, remat.compat], ids=["torch", "remat"])
def test_early_stop(module: Any, setters: Any) -> None:
    def run(**options: Any) -> Tensor:
        return module.checkpoint(ends_late, rand(3), use_reentrant=False, **options)

    assert ends_of_backward(run()) == ends_of_backward(run(early_stop=True)) == 0
    assert ends_of_backward(run(early_stop=False)) == 1
    with setters.set_checkpoint_early_stop(False):
        never, never_either = run(), run(early_stop=True)
        early = run(early_stop=False)
        with setters.set_checkpoint_early_stop(True):
            early = run(early_stop=False)
    with setters.set_checkpoint_early_stop(True):  # the setting of the forward counts
        assert ends_of_backward(never) == ends_of_backward(never_either) == 1
    with setters.set_checkpoint_early_stop(False):
        assert ends_of_backward(early) == 0
    assert ends_of_backward(run()) == 0


@both
def test_early_stop_changes_no_result(module: Any) -> None:
    for early_stop in (True, False):
        assert_same(gradient(module, ends_late, early_stop=early_stop), gradient(module, lambda x: ends_late(x)))
    (expected,) = values_and_grads(ends_late, x := rand(3))[1]
    (found,) = values_and_grads(lambda x: module.checkpoint(ends_late, x, use_reentrant=False), x)[1]
    assert_same(found, expected)


# --- preserve_rng_state -----------------------------------------------------------------------------------------------


def drops(x: Tensor) -> Tensor:
    return F.dropout(x.sin(), 0.5).exp() - 1


def dropped(module: Any, draw: Callable[[], Any] = lambda: None, **options: Any) -> tuple:
    """The mask, that of the derivative, and whether the backward leaves the generator's state unchanged."""
    torch.manual_seed(0)
    x = torch.ones(64, requires_grad=True)
    out = module.checkpoint(drops, x, use_reentrant=False, **options)
    draw()
    state = torch.get_rng_state()
    (grad,) = torch.autograd.grad(out.sum(), x)
    return out.ne(0), grad.ne(0), state.equal(torch.get_rng_state())


@both
def test_preserve_rng_state(module: Any) -> None:
    for options in ({}, {"preserve_rng_state": True}):
        mask, of_gradient, unmoved = dropped(module, lambda: torch.rand(3), **options)
        assert 10 < mask.sum() < 54
        assert torch.equal(mask, of_gradient)
        assert unmoved
    mask, of_gradient, unmoved = dropped(module, lambda: torch.rand(3), preserve_rng_state=False)
    assert not torch.equal(mask, of_gradient)
    assert not unmoved


@pytest.mark.parametrize("draw", [random.random, np.random.random], ids=["Python", "NumPy"])
def test_other_generators(draw: Callable[[], float]) -> None:
    """Python's and NumPy's numbers are the same in all runs, and the state is unchanged; torch draws others."""

    def states() -> Any:
        return random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2]

    def differentiate(module: Any) -> tuple[bool, bool]:
        x = torch.ones(1, dtype=torch.float64, requires_grad=True)
        out = module.checkpoint(lambda x: (x.exp() * draw()).log(), x, use_reentrant=False)
        before = states()
        (grad,) = torch.autograd.grad(out, x)
        return bool((grad - 1).abs() < 1e-12), states() == before

    assert differentiate(remat.compat) == (True, True)
    assert differentiate(torch.utils.checkpoint) == (False, False)


def test_a_generator_that_is_passed() -> None:
    def mask(x: Tensor, generator: torch.Generator) -> Tensor:
        return torch.rand(x.shape, generator=generator).gt(0.5) * x.sin().exp()

    def fits(module: Any) -> bool:
        x = torch.ones(64, requires_grad=True)
        out = module.checkpoint(mask, x, torch.Generator().manual_seed(0), use_reentrant=False)
        (grad,) = torch.autograd.grad(out.sum(), x)
        return torch.equal(out.ne(0), grad.ne(0))

    assert fits(remat.compat)
    assert not fits(torch.utils.checkpoint)


@both
def test_default_device_type_has_no_effect(module: Any) -> None:
    """For torch it selects whose generators to restore; here the generators of all tensors' devices are restored."""
    before = module.DefaultDeviceType.get_device_type()
    module.DefaultDeviceType.set_device_type("cpu")
    try:
        mask, of_gradient, unmoved = dropped(module, lambda: torch.rand(3))
        assert torch.equal(mask, of_gradient)
        assert unmoved
    finally:
        module.DefaultDeviceType.set_device_type(before)


# --- where torch is wrong, or raises ----------------------------------------------------------------------------------


def test_statistics_change_once() -> None:
    def statistics(call: Callable) -> Tensor:
        norm = made(lambda: nn.BatchNorm1d(3))
        x = rand(4, 3)
        call(lambda x: norm(x.sin()).exp(), x).sum().backward()
        return torch.stack([norm.running_mean, norm.running_var, norm.num_batches_tracked.expand(3)])

    once = statistics(lambda fn, x: fn(x))
    assert_same(statistics(checkpoint), once)
    twice = statistics(functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False))
    assert not torch.equal(twice, once)


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(y := x.exp())
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (first,), (second,) = ctx.saved_tensors, ctx.saved_tensors
        return grad * (first + second) / 2


def test_a_backward_that_needs_only_inputs_recomputes_nothing() -> None:
    for module, runs in ((torch.utils.checkpoint, 2), (remat.compat, 1)):
        fn = Runs(lambda x: x.sin())
        gradient(module, fn)
        assert fn.count == runs


def test_saved_tensors_can_be_read_twice() -> None:
    def fn(x: Tensor) -> Tensor:
        return ReadsTwice.apply(x.sin())

    x = rand(3)
    assert_same(values_and_grads(lambda x: checkpoint(fn, x), x), values_and_grads(fn, x))
    with pytest.raises(CheckpointError, match="already unpacked once"):
        gradient(torch.utils.checkpoint, fn)


def test_user_code_that_catches_everything() -> None:
    """torch ends the recompute with an exception; `fn` catches it, and the recompute continues."""

    def fn(x: Tensor) -> Tensor:
        try:
            h = x.sin().exp()
            return h.sin()
        except Exception:
            return x.cos().exp().cos().exp()

    x = rand(3)
    assert_same(values_and_grads(lambda x: checkpoint(fn, x), x), values_and_grads(fn, x))
    with pytest.raises(AssertionError):
        gradient(torch.utils.checkpoint, fn)


def test_variables_of_closures_are_as_in_the_first_run() -> None:
    scale = 2.0

    def fn(x: Tensor) -> Tensor:
        return (x * scale).sin().exp()

    x = rand(3)
    expected = values_and_grads(fn, x)
    outs = {module: module.checkpoint(fn, x, use_reentrant=False) for module in (torch.utils.checkpoint, remat.compat)}
    scale = 3.0
    grads = {module: torch.autograd.grad(out.sin().sum(), x)[0] for module, out in outs.items()}
    assert_same(grads[remat.compat], expected[1][0])
    assert not torch.equal(grads[torch.utils.checkpoint], expected[1][0])


def test_under_torch_func() -> None:
    x = rand(3, grad=False)
    expected = torch.func.grad(lambda x: deep(x).sum())(x)
    options: dict[str, Any]
    for options in (
        {},
        {"early_stop": False},
        {"determinism_check": "none"},
        {"preserve_rng_state": False},
        {"policy": ["aten.sin"]},
        {"debug": True},
    ):
        assert_same(torch.func.grad(lambda x: checkpoint(deep, x, **options).sum())(x), expected)
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda x: torch.utils.checkpoint.checkpoint(deep, x, use_reentrant=False).sum())(x)


TRANSFORMS: dict[str, Callable[[Callable], Callable[[Tensor], Any]]] = {
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum()),
    "vjp": lambda f: lambda x: torch.func.vjp(f, x)[1](x),
    "jacrev": torch.func.jacrev,
    "hessian": lambda f: torch.func.hessian(lambda x: f(x).sum()),
    "vmap": torch.func.vmap,
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x.cos(),)),
    "jacfwd": torch.func.jacfwd,
    "linearize": lambda f: lambda x: torch.func.linearize(f, x)[1](x.cos()),
}


@both
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_each_transform(module: Any, transform: str) -> None:
    make, x = TRANSFORMS[transform], rand(3, grad=False)
    call = make(lambda x: module.checkpoint(deep, x, use_reentrant=False))
    if is_torch(module) and torch.__version__ < "2.12":
        with pytest.raises(RuntimeError, match=r"_NoopSaveInputs|saved tensor hooks|jvp"):
            call(x)
    elif is_torch(module) and transform in ("grad", "vjp", "jacrev", "hessian"):
        with pytest.raises(RuntimeError, match="saved tensor hooks"):
            call(x)
    else:
        assert_same(call(x), make(deep)(x))


@both
def test_a_backward_through_vmap(module: Any) -> None:
    if is_torch(module) and torch.__version__ < "2.12":
        pytest.skip("this version of torch can't do the forward either")
    out = torch.func.vmap(lambda x: module.checkpoint(deep, x, use_reentrant=False))(x := rand(3)).sum()
    if is_torch(module):
        with pytest.raises(RuntimeError, match="vmap"):
            out.backward()
    else:
        assert_same(torch.autograd.grad(out, x), torch.autograd.grad(deep(x).sum(), x))


@both
def test_functional_call(module: Any) -> None:
    """In the recompute the module has its own parameters again: torch's gradients are for those."""

    class Outer(nn.Module):
        def __init__(self, call: Callable) -> None:
            super().__init__()
            self.layer, self.call = made(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))), call

        def forward(self, x: Tensor) -> Tensor:
            return self.call(self.layer, x)

    def gradients(call: Callable) -> tuple:
        outer, x = Outer(call), rand(2, 3)
        params = {name: (2 * p.detach()).requires_grad_() for name, p in outer.named_parameters()}
        out = torch.func.functional_call(outer, params, (x,)).sin().sum()
        return torch.autograd.grad(out, (x, *params.values()))

    found = gradients(lambda layer, x: module.checkpoint(layer, x, use_reentrant=False))
    expected = gradients(lambda layer, x: layer(x))
    assert all(map(torch.equal, found, expected)) is not is_torch(module)


@both
def test_captured_tensors_changed_in_place(module: Any) -> None:
    w, x = rand(3, grad=False), rand(3)
    fn = lambda x: (x * w).sin().exp()
    (expected,) = torch.autograd.grad(fn(x).sum(), x)
    out = module.checkpoint(fn, x, use_reentrant=False).sum()
    w.mul_(2)
    if is_torch(module):
        assert not torch.equal(torch.autograd.grad(out, x)[0], expected)
    else:
        with pytest.raises(MutationError, match="'w' was changed in place"):
            torch.autograd.grad(out, x)


SETTINGS: dict[str, tuple[Callable, Callable, tuple]] = {  # get as a number, set, values to set and reset
    "default dtype": (lambda: torch.empty(0).itemsize, torch.set_default_dtype, (torch.float64, torch.float32)),
    "attention kernels": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, (False, True)),
    "deterministic algorithms": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, (2, 0)),
    "precision of products": (
        lambda: len(torch.get_float32_matmul_precision()), torch.set_float32_matmul_precision, ("high", "highest")
    ),
}  # fmt: skip


@both
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_have_changed(module: Any, name: str) -> None:
    """Results depend on these settings on some devices."""
    get, put, (now, before) = SETTINGS[name]
    x, fn = rand(3), lambda x: (x * (1 + get())).sin().exp()
    (expected,) = torch.autograd.grad(fn(x).sum(), x)
    out = module.checkpoint(fn, x, use_reentrant=False).sum()
    put(now)
    try:
        (found,) = torch.autograd.grad(out, x)
    finally:
        put(before)
    assert torch.equal(found, expected) is not is_torch(module)


@both
@pytest.mark.parametrize("kind", ["tensor", "parameter", "all", "any"])
def test_hooks_of_the_function(module: Any, kind: str) -> None:
    register_multi = torch.autograd.graph.register_multi_grad_hook

    def runs(call: Callable) -> int:
        count, w, x = [], rand(3, seed=1), rand(3)

        def fn(x: Tensor) -> Tensor:
            if kind == "tensor":
                x.register_hook(count.append)
            elif kind == "parameter":
                w.register_post_accumulate_grad_hook(count.append)
            else:
                register_multi((x, w), count.append, mode=kind)  # type: ignore[call-overload]
            return (x.sin() * w).sin()

        call(fn, x.clone()).sum().backward()
        return len(count)

    found = runs(functools.partial(module.checkpoint, use_reentrant=False))
    assert (found, runs(lambda fn, x: fn(x))) == (2 if is_torch(module) else 1, 1)


# --- policy -----------------------------------------------------------------------------------------------------------


def test_policy() -> None:
    x, w = rand(4, 4), rand(4, 4, seed=1)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w).sin() @ w).sin()

    for policy, products, kept in ((None, 2, 1), (policies.save_matmuls, 0, 3), (["aten.mm"], 0, 3)):
        call = functools.partial(checkpoint, fn, policy=policy)
        assert held_bytes(call, x, w) == kept * x.nbytes
        assert count_ops(call(x, w).sum().backward)["aten.mm"] == 4 + products
        assert_same(values_and_grads(call, x, w), values_and_grads(fn, x, w))
    with pytest.raises(PolicyError, match="A policy is"):
        checkpoint(fn, x, w, policy="dots")


# --- checkpoint_sequential --------------------------------------------------------------------------------------------


def row(length: int) -> list[Runs]:
    """Functions that each save their own result."""
    return [Runs(functools.partial(lambda x, w: (x * w).exp(), w=rand(3, seed=i))) for i in range(length)]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8])
def test_checkpoint_sequential_has_the_same_segments_as_torchs(length: int) -> None:
    for segments in range(1, length + 1):
        found = []
        for module in (torch.utils.checkpoint, remat.compat):
            functions, x = row(length), rand(3)
            inputs = [x, *(fn.fn.keywords["w"] for fn in functions)]
            graded = values_and_grads(
                lambda x: module.checkpoint_sequential(functions, segments, x, use_reentrant=False), x, inputs=inputs
            )
            found.append((graded, [fn.count for fn in functions]))
        assert_same(found[1], found[0])


def layers() -> nn.Sequential:
    """Layers with random numbers, and with statistics in the first of two segments."""
    return made(
        lambda: nn.Sequential(
            nn.Linear(3, 3),
            nn.BatchNorm1d(3),
            nn.Dropout(0.5),
            nn.Tanh(),
            nn.Linear(3, 3),
            nn.Sigmoid(),
            nn.Linear(3, 2),
        )
    )


@both
@pytest.mark.parametrize("kind", [nn.Sequential, nn.ModuleList, list, tuple])
def test_checkpoint_sequential_of_modules(module: Any, kind: Callable) -> None:
    if is_torch(module) and kind is not nn.Sequential:
        functions: Any = list(layers())
    else:
        functions = layers() if kind is nn.Sequential else kind(layers())
    plain, x = layers(), rand(4, 3)

    def graded(call: Callable, own: Any) -> Any:
        torch.manual_seed(0)
        return values_and_grads(call, x, inputs=[x, *(p for layer in own for p in layer.parameters())])

    found = graded(lambda x: module.checkpoint_sequential(functions, 2, x, use_reentrant=False), functions)
    assert_same(found, graded(plain, plain))
    norm = functions[1]
    assert norm.num_batches_tracked == (2 if is_torch(module) else 1)
    assert is_torch(module) or torch.equal(norm.running_mean, plain[1].running_mean)


@both
def test_checkpoint_sequential_calls_only_the_modules_in_a_sequential(module: Any) -> None:
    """The hooks of the `Sequential` itself don't run."""
    model, calls = layers(), []
    model.register_forward_hook(lambda *args: calls.append(args))
    module.checkpoint_sequential(model, 2, rand(4, 3), use_reentrant=False)
    assert calls == []
    model(rand(4, 3))
    assert len(calls) == 1


@both
def test_checkpoint_sequential_saves_the_inputs_of_segments(module: Any) -> None:
    x = rand(64)
    held = held_bytes(lambda x: module.checkpoint_sequential([deep] * 8, 4, x, use_reentrant=False), x)
    # The inputs of three segments without the first, the result, and five tensors within the last segment.
    assert held == (3 + 1 + 5) * x.nbytes


@both
def test_checkpoint_sequential_takes_preserve_rng_state(module: Any) -> None:
    def moves(**options: Any) -> bool:
        x = torch.ones(64, requires_grad=True)
        out = module.checkpoint_sequential([drops, torch.sin], 2, x, use_reentrant=False, **options)
        torch.rand(3)
        state = torch.get_rng_state()
        out.sum().backward()
        return not torch.equal(state, torch.get_rng_state())

    assert not moves()
    assert not moves(preserve_rng_state=True)
    assert moves(preserve_rng_state=False)


@both
def test_errors_of_checkpoint_sequential(module: Any) -> None:
    x = rand(3)
    with pytest.raises(ValueError, match="early_stop"):
        module.checkpoint_sequential([deep], 1, x, use_reentrant=False, early_stop=False)
    with pytest.raises(ValueError):
        module.checkpoint_sequential([deep] * 2, 3, x, use_reentrant=False)
    with pytest.raises(ValueError):
        module.checkpoint_sequential([], 1, x, use_reentrant=False)
    with pytest.raises(TypeError):
        module.checkpoint_sequential([deep, deep], 2.0, x, use_reentrant=False)
    with pytest.raises(TypeError):
        module.checkpoint_sequential([deep, 3], 1, x, use_reentrant=False)


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("second", ["a tensor", "a list", "a dict"])
def test_checkpoint_sequential_takes_one_input(segments: int, second: str) -> None:
    x, y = rand(3), rand(3, seed=1)
    inputs: dict[str, Any] = {"a tensor": y, "a list": [y], "a dict": {"y": y}}
    with pytest.raises(
        TypeError, match=r"takes one input.*got an object of type (Tensor|list|dict) for use_reentrant.*as one tuple"
    ):
        checkpoint_sequential([deep, deep], segments, x, inputs[second])
    for use_reentrant in (None, False, 0):
        assert torch.equal(checkpoint_sequential([deep, deep], segments, x, use_reentrant), deep(deep(x)))
    add = lambda pair: pair[0] * pair[1]
    assert torch.equal(checkpoint_sequential([add, deep], segments, (x, y)), deep(x * y))
    assert torch.equal(remat.sequential([torch.mul, deep], segments)(x, y), deep(x * y))


def test_segments_must_be_a_number_of_segments() -> None:
    for segments in (0, -1, 3):
        with pytest.raises(ValueError, match="from 1 to 2"):
            checkpoint_sequential([deep, deep], segments, rand(3))
    original = functools.partial(torch.utils.checkpoint.checkpoint_sequential, use_reentrant=False)
    with pytest.raises(ZeroDivisionError):
        original([deep, deep], 0, rand(3))
    runs, x = Runs(deep), rand(3)
    original([runs, runs], -1, x).sum().backward()
    assert runs.count == 2


def test_a_module_that_occurs_twice_is_called_twice() -> None:
    """torch skips the second call."""
    act = nn.Tanh()
    model, x = nn.Sequential(nn.Linear(3, 3), act, nn.Linear(3, 3), act).double(), rand(2, 3)
    for segments in (1, 2, 4):
        assert_same(
            values_and_grads(lambda x: checkpoint_sequential(model, segments, x), x), values_and_grads(model, x)
        )
    wrong = torch.utils.checkpoint.checkpoint_sequential(model, 2, x, use_reentrant=False)
    assert not torch.equal(wrong, model(x))


def test_policy_of_checkpoint_sequential() -> None:
    x = rand(4, 4)
    functions = [lambda x: (x @ x).sin()] * 4

    def products(policy: Any) -> int:
        out = checkpoint_sequential(functions, 4, x, policy=policy)
        return count_ops(out.sum().backward)["aten.mm"] - 2 * 4

    assert products(None) == 3
    assert products(policies.save_matmuls) == 0


# --- in training ------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, call: Callable) -> None:
        super().__init__()
        self.call = call
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.GELU(), nn.Linear(8, 4)) for _ in range(3)
        )
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.call(block, x)
        return self.head(x)


def trained(call: Callable) -> list[Tensor]:
    torch.manual_seed(0)
    model = Model(call)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=step == 2):
            loss = model(torch.randn(5, 4)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@both
def test_training(module: Any) -> None:
    found = trained(functools.partial(module.checkpoint, use_reentrant=False))
    assert_same(found, trained(lambda block, x: block(x)))


@both
def test_everything_is_freed_without_garbage_collection(module: Any) -> None:
    with assert_freed_without_gc() as watch:
        x = rand(3)
        out = module.checkpoint(lambda x, scale: deep(x * scale), x, scale=rand(3, seed=1), use_reentrant=False)
        watch(x, out)
        out.sum().backward(retain_graph=True)
        del x, out


# --- torch.compile ----------------------------------------------------------------------------------------------------


def block(x: Tensor, w: Tensor) -> Tensor:
    return ((x @ w).sin() @ w).sin().exp()


def products_of_compiled(fn: Callable) -> int:
    """The products in the backward graph of one full graph, whose gradients are checked."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    graphs: list[Any] = []

    def backward(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        bw_compiler=backward,
        partition_fn=min_cut_rematerialization_partition,
    )
    torch._dynamo.reset()
    args = rand(4, 4), rand(4, 4, seed=1)
    found = values_and_grads(torch.compile(fn, backend=backend, fullgraph=True), *args)
    torch._dynamo.reset()
    assert_same(found, values_and_grads(block, *args), exact=False)
    (graph,) = graphs
    return sum(node.target is torch.ops.aten.mm.default for node in graph.nodes)


SELECTIVE = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
COMPILED: dict[str, tuple[dict, int]] = {
    "no options": ({}, 6),
    "preserve_rng_state": ({"preserve_rng_state": False}, 6),
    "determinism_check": ({"determinism_check": "none"}, 6),
    "determinism_check, values": ({"determinism_check": "values"}, 6),
    "early_stop": ({"early_stop": False}, 6),
    "debug": ({"debug": True}, 6),
    "context_fn": ({"context_fn": SELECTIVE}, 4),
    "noop_context_fn": ({"context_fn": torch.utils.checkpoint.noop_context_fn}, 6),
    "policy": ({"policy": policies.save_matmuls}, 4),
}


@both
@pytest.mark.parametrize("option", COMPILED)
def test_compile(module: Any, option: str) -> None:
    options, products = COMPILED[option]
    if is_torch(module) and option in ("debug", "determinism_check, values", "noop_context_fn", "policy"):
        pytest.skip("torch's function does not compile with it")
    call = lambda x, w: module.checkpoint(block, x, w, use_reentrant=False, **options)
    assert products_of_compiled(call) == products


def test_compile_of_the_other_forms() -> None:
    decorated = checkpoint(use_reentrant=False, policy=policies.save_matmuls)(block)
    assert products_of_compiled(decorated) == 4
    assert products_of_compiled(lambda x, w: checkpoint(lambda x, *, w: block(x, w), x, w=w)) == 6
    row = lambda x, w: checkpoint_sequential(
        [lambda x: x @ w, torch.sin, lambda x: x @ w, lambda x: x.sin().exp()], 2, x
    )
    assert products_of_compiled(row) == 5
    hidden = {"respect_saved_tensors_hooks": False}
    for wrong in ({"use_reentrant": True}, hidden, {"policy": policies.save_matmuls, "context_fn": SELECTIVE}):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="ValueError"):
            products_of_compiled(lambda x, w, wrong=wrong: checkpoint(block, x, w, **wrong))


# --- the documentation ------------------------------------------------------------------------------------------------

# The rows of the table in docs/how-to/migrating.md, each with its tests.
ROWS = {
    "`use_reentrant`": ["test_use_reentrant"],
    "no function": ["test_decorator", "test_decorator_of_a_method", "test_decorator_takes_only_options"],
    "`policy`": ["test_policy", "test_a_parameter_named_policy"],
    "`preserve_rng_state`": ["test_preserve_rng_state", "test_other_generators", "test_a_generator_that_is_passed"],
    "`DefaultDeviceType`": ["test_default_device_type_has_no_effect"],
    "`determinism_check`": [
        "test_determinism_check",
        "test_determinism_check_of_values",
        "test_the_operation_of_a_saved_tensor_is_compared",
    ],
    "`debug`": [
        "test_debug",
        "test_debug_names_the_line",
        "test_debug_compares_operations_that_save_nothing",
        "test_debug_with_contexts",
    ],
    "`early_stop`": ["test_early_stop", "test_early_stop_changes_no_result"],
    "`set_checkpoint_early_stop`, `set_checkpoint_debug_enabled`": [
        "test_early_stop",
        "test_set_checkpoint_debug_enabled",
        "test_switches_reach_every_region",
    ],
    "`respect_saved_tensors_hooks`": ["test_hooks_around_get_saved_values"],
    "`context_fn`, selective": ["test_a_list", "test_two_policies_are_an_error", "test_selective_with_other_options"],
    "selective: what is saved": ["test_what_the_backward_does_not_need_is_not_saved"],
    "selective: backward twice, double backward, `torch.func.grad`": [
        "test_backward_twice",
        "test_double_backward",
        "test_selective_under_torch_func",
    ],
    "selective: policy function": ["test_arguments_of_a_policy_function"],
    "selective: views (`aten.view`, `aten.t`)": ["test_policies_about_views"],
    "selective: tensors made of others (wrapper subclasses)": [
        "test_the_operation_is_judged",
        "test_a_predicate_is_called_once",
        "test_the_operations_inside_are_judged_too",
    ],
    "selective: `MUST_CPU_OFFLOAD`, `PREFER_CPU_OFFLOAD`": ["test_results_of_a_policy_function"],
    "selective: in-place changes in the region": ["test_changes_in_the_region"],
    "selective: `allow_cache_entry_mutation=True`": ["test_changes_after_the_region"],
    "selective: a region in a region": ["test_selective_and_nested"],
    "`context_fn`, other contexts": [
        "test_a_pair_of_contexts",
        "test_the_second_context_is_entered_for_each_run",
        "test_subclasses_of_torchs_modes_are_treated_as_any_pair",
        "test_contexts_and_a_policy",
    ],
    "contexts that suppress exceptions": ["test_a_first_context_that_swallows_exceptions"],
    "`checkpoint_sequential`: `segments` out of range": ["test_segments_must_be_a_number_of_segments"],
    "`checkpoint_sequential` with a second input": ["test_checkpoint_sequential_takes_one_input"],
    "`checkpoint_sequential`: a module that is twice in a `Sequential`": [
        "test_a_module_that_occurs_twice_is_called_twice"
    ],
    "`GraphExecGroup`": [
        "test_passes_may_have_inputs_in_common",
        "test_values_that_a_policy_saves_can_be_read_by_both",
    ],
    "errors": ["test_errors_are_subclasses_of_torchs"],
    "a backward pass that needs only the inputs": ["test_a_backward_that_needs_only_inputs_recomputes_nothing"],
    "`ctx.saved_tensors` read twice": ["test_saved_tensors_can_be_read_twice"],
    "statistics of batch norm, counters in buffers": ["test_statistics_change_once"],
    "variables of closures and globals, attributes of modules and of the object that is called, that changed since": [
        "test_variables_of_closures_are_as_in_the_first_run",
        "test_what_is_restored",
    ],
    "attributes of other objects, of classes and of imported modules, numbers in lists and dicts, that changed since": [
        "test_change_is_not_detected",
        "test_checksums_detect_the_change",
    ],
    "captured tensors changed in place before the backward pass": ["test_captured_tensors_changed_in_place"],
    "default dtype, attention kernels, deterministic algorithms, precision of products, changed since": [
        "test_settings_that_have_changed",
    ],
    "hooks that the function registers on what it is given or captures": ["test_hooks_of_the_function"],
    "`except Exception` in the function": ["test_user_code_that_catches_everything"],
    "`torch.func.functional_call`, then `backward`": ["test_functional_call"],
    "`torch.func`: `grad`, `vjp`, `jacrev`, `hessian`": ["test_under_torch_func", "test_each_transform"],
    "`torch.func`: `vmap`": ["test_each_transform", "test_a_backward_through_vmap"],
    "`torch.func`: `jvp`, `jacfwd`, `linearize`": ["test_each_transform"],
    "`torch.compile`": [
        "test_compile",
        "test_compile_of_the_other_forms",
        "test_a_compiled_region_keeps_its_own_options",
    ],
}


def test_each_row_of_the_documentation_has_its_tests() -> None:
    files = "test_compat_checkpoint.py", "test_compat_selective.py", "test_graph_exec_group.py"
    files = (*files, "test_wrapper_subclasses.py", "test_not_detected.py", "test_override.py")
    assert_rows_have_tests("Coming from torch.utils.checkpoint", ROWS, *files)
