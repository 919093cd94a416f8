"""`remat.compat.checkpoint` and `checkpoint_sequential` compared with torch's: each option, in equal calls of both."""

import contextlib
import functools
import inspect
import itertools
import logging
import pickle
import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from cases import assert_same, default_dtype, rand, seed_all, setting
from cases import module as made
from comparison import OTHER, SAME, TORCH, Fails, Outcome, checkpoints_in_graph, libraries
from side_by_side import Runs, both, is_torch, values_and_grads
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

import remat.compat
from benchmarks.measure import count_ops, held_bytes
from remat import MutationError, PolicyError, RecomputeMismatchError, policies
from remat.compat import checkpoint, checkpoint_sequential

compared, row = TORCH.compared, TORCH.row


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo that torch, with `debug=True`, leaves its logger in a state in which pytest can't format its records."""
    monkeypatch.setattr(logging.getLogger("LoggingTensor"), "propagate", True)


def deep(x: Tensor) -> Tensor:
    """Saves four tensors; the last one is the result of the third operation."""
    return x.sin().exp().sin().cos()


def gradient(module: Any, fn: Callable, **options: Any) -> Tensor:
    x = rand(2, 2)
    return torch.autograd.grad(module.checkpoint(fn, x, use_reentrant=False, **options).sum(), x)[0]


@row("errors")
def test_every_public_name_exists_and_what_runs_no_region_is_torchs() -> None:
    names = set(torch.utils.checkpoint.__all__) - {"CheckpointFunction"}
    others = {name for name in names if getattr(remat.compat, name) is not getattr(torch.utils.checkpoint, name)}
    assert names <= set(remat.compat.__all__) and others == {"checkpoint", "checkpoint_sequential"}
    for name in ("checkpoint", "checkpoint_sequential"):
        modules = remat.compat, torch.utils.checkpoint
        ours, theirs = (dict(inspect.signature(getattr(module, name)).parameters) for module in modules)
        assert [*ours][: len(theirs)] == [*theirs] or [key for key in ours if key in theirs] == [*theirs]
        changed = {key for key in theirs if ours[key].default != theirs[key].default}
        assert changed - {"function"} == {"use_reentrant"}  # without a function newer versions return a decorator too
        assert all(ours[key].kind == theirs[key].kind for key in theirs)
        new = {"policy", "preserve_rng_state", "respect_saved_tensors_hooks"}  # newer versions have the others
        assert "policy" in set(ours) - set(theirs) <= new
    assert all(issubclass(error, CheckpointError) for error in (RecomputeMismatchError, MutationError, PolicyError))


@both
@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_without_grad_it_is_a_plain_call_that_enters_no_context(module: Any, off: Callable) -> None:
    entered: list[str] = []
    context = contextlib.ExitStack()
    context.callback(entered.append, "entered")
    with off():
        out = module.checkpoint(deep, rand(3), use_reentrant=False, context_fn=lambda: (context, context))
    assert not out.requires_grad and entered == []


@checkpoint(use_reentrant=False, policy=policies.save_matmuls)
def decorated(x: Tensor, policy: float = 1.0, debug: bool = False) -> Tensor:
    """Its keyword arguments have the names of options."""
    return (x @ x).sin().exp() * policy * (2 if debug else 1)


@row("no function")
def test_without_a_function_it_is_a_decorator() -> None:
    x = rand(3, 3)
    found = values_and_grads(lambda x: decorated(x, policy=3.0, debug=True), x)
    assert_same(found, values_and_grads(lambda x: (x @ x).sin().exp() * 3.0 * 2, x))
    assert (decorated.__name__, decorated.__doc__) == ("decorated", "Its keyword arguments have the names of options.")
    assert list(inspect.signature(decorated).parameters) == ["x", "policy", "debug"]
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    runs = Runs(deep)
    checkpoint()(runs)(x).sum().backward()
    assert runs.count == 2
    with pytest.raises(ValueError, match="no option scale"):
        checkpoint(use_reentrant=False, scale=2.0)


@row("`policy`")
def test_a_function_may_have_a_parameter_named_policy() -> None:
    fn, x = lambda x, policy: (x * policy).sin().exp(), rand(3)
    calls = [
        lambda x: checkpoint(fn, x, 2.0),
        lambda x: checkpoint(functools.partial(fn, policy=2.0), x),
        lambda x: checkpoint(use_reentrant=False)(fn)(x, policy=2.0),
    ]
    for call in calls:
        assert_same(values_and_grads(call, x), values_and_grads(lambda x: fn(x, 2.0), x))
    with pytest.raises(PolicyError):
        checkpoint(fn, x, policy=2.0)


@row("`autograd.functional`, vectorized forward mode")
def test_vectorized_forward_mode_is_an_error() -> None:
    jacobian = functools.partial(torch.autograd.functional.jacobian, vectorize=True, strategy="forward-mode")
    with pytest.raises(RuntimeError, match="Batching rule not implemented for aten::_unpack_dual"):
        jacobian(lambda x: checkpoint(torch.sin, x), rand(3))


@pytest.mark.filterwarnings("error")
@row("`use_reentrant`")
def test_there_is_no_reentrant_variant_and_no_warning() -> None:
    x = rand(3)
    for options in ({}, {"use_reentrant": None}, {"use_reentrant": False}):
        assert_same(values_and_grads(lambda x: checkpoint(deep, x, **options), x), values_and_grads(deep, x))
        assert_same(checkpoint_sequential([deep, deep], 2, x, **options), deep(deep(x)))
    true = {"use_reentrant": True}
    calls = [lambda: checkpoint(deep, x, **true), lambda: checkpoint(**true)(deep)(x)]
    for call in (*calls, lambda: checkpoint_sequential([deep], 1, x, True)):
        with pytest.raises(ValueError, match=r"without a graph[\s\S]*use_reentrant=False"):
            call()
    with pytest.warns(UserWarning, match="use_reentrant"):  # torch warns by default
        torch.utils.checkpoint.checkpoint(deep, x)


def runs_differ(first: Callable, again: Callable) -> Callable:
    """`first` in the first call, `again` in later calls."""
    runs = itertools.count()
    return lambda x: (again if next(runs) else first)(x)


# What the recompute does instead of `deep`, and which values of `determinism_check` notice it: torch's, and remat's.
DIFFERENCES: dict[str, tuple[Callable, set, set]] = {
    "shape": (lambda x: deep(x[:1]), {"default"}, {"default", "metadata", "values"}),
    "dtype": (lambda x: deep(x.float()), {"default"}, {"default", "metadata", "values"}),
    "number": (lambda x: x.sin().exp(), {"default", "none"}, {"default", "metadata", "values", "none"}),
    "strides": (lambda x: x.sin().t().contiguous().t().exp().sin().cos(), set(), {"default", "metadata", "values"}),
    "operation": (lambda x: x.sin().tanh().sin().cos(), set(), {"default", "metadata", "values"}),
    "values": (lambda x: deep(x + 1), set(), {"values"}),
    "nothing": (deep, set(), set()),
}


@both
@pytest.mark.parametrize("difference", DIFFERENCES)
@row("`determinism_check`")
def test_what_a_determinism_check_notices(module: Any, difference: str) -> None:
    again, theirs, ours = DIFFERENCES[difference]
    for check in ("default", "none") if is_torch(module) else ("default", "metadata", "values", "none"):
        noticed = check in (theirs if is_torch(module) else ours)
        with pytest.raises(CheckpointError) if noticed else contextlib.nullcontext():
            gradient(module, runs_differ(deep, again), determinism_check=check)


@both
@pytest.mark.parametrize("grad", [True, False])
def test_wrong_arguments_are_errors(module: Any, grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        with pytest.raises(ValueError, match=r"determinism_check[\s\S]*(metadata|default)[\s\S]*got"):
            module.checkpoint(deep, rand(3), use_reentrant=False, determinism_check="strict")
        for function in (3, None):
            with pytest.raises(TypeError, match=None if is_torch(module) else "a function and its arguments, got"):
                module.checkpoint(function, rand(3), use_reentrant=False)


def detail(module: Any, setting: Any = None, **options: Any) -> bool:
    """Whether the error of a region whose recompute differs lists the operations of both runs."""
    with pytest.raises(CheckpointError) as raised, setting or contextlib.nullcontext():
        gradient(module, runs_differ(deep, DIFFERENCES["shape"][0]), **options)
    return "slice" in str(raised.value) and "test_compat_checkpoint.py" in str(raised.value)


@both
@row("`debug`", "`set_checkpoint_early_stop`, `set_checkpoint_debug_enabled`")
def test_debug_and_its_switch(module: Any) -> None:
    switch = torch.utils.checkpoint.set_checkpoint_debug_enabled
    assert [detail(module), detail(module, debug=True), detail(module, debug=False)] == [False, True, False]
    assert detail(module, switch(True), debug=False) and not detail(module, switch(False), debug=True)
    with switch(True):
        assert not detail(module, switch(None)) and detail(module, switch(None), debug=True)
    assert not detail(module)


def ends_of_backward(out: Tensor) -> int:
    """How often the backward recomputes the last operations; the derivative runs `cumsum` once itself."""
    return count_ops(out.sum().backward)["aten.cumsum"] - 1


@both
@row("`early_stop`", "`set_checkpoint_early_stop`, `set_checkpoint_debug_enabled`")
def test_early_stop_and_its_switch(module: Any) -> None:
    ends_late = lambda x: x.sin().exp().sin().cumsum(0).neg()  # two operations follow its last saved tensor
    run = lambda **options: module.checkpoint(ends_late, rand(3), use_reentrant=False, **options)
    switch = torch.utils.checkpoint.set_checkpoint_early_stop
    assert ends_of_backward(run()) == ends_of_backward(run(early_stop=True)) == 0
    assert ends_of_backward(run(early_stop=False)) == 1
    with switch(False):
        never = run(early_stop=True)
        with switch(True):
            early = run(early_stop=False)
        assert ends_of_backward(early) == 0
    assert (ends_of_backward(never), ends_of_backward(run())) == (1, 0)  # the setting of the forward counts


def drops(x: Tensor) -> Tensor:
    return F.dropout(x.sin(), 0.5).exp() - 1


def dropped(call: Callable) -> Any:
    """The result, its gradient, and the states of all generators after more numbers were drawn and a backward ran."""
    seed_all()
    x = torch.ones(64, requires_grad=True)
    out = call(x)
    torch.rand(3), random.random(), np.random.random()
    grad = torch.autograd.grad(out.sum(), x)
    return out.detach(), grad, torch.get_rng_state(), random.getstate(), np.random.random()


@compared("`DefaultDeviceType`", theirs=Fails(AttributeError, "no such device"))
def test_the_default_device_type_has_no_influence(call: Callable) -> Any:
    default = remat.compat.DefaultDeviceType
    with setting(default.set_device_type, "no such device", default.get_device_type()):
        return dropped(lambda x: call(drops, x))


@compared("numbers that the function counts up in objects, closures, globals, lists and dicts", theirs=OTHER)
def test_numbers_count_first_runs(call: Callable) -> Any:
    """More kinds of counters are in `tests/captured/test_python_state.py`."""
    variable, held, others = 0, SimpleNamespace(calls=0, dict={"calls": 0}), Counter[str]()

    def fn(x: Tensor) -> Tensor:
        nonlocal variable
        variable += 1
        held.calls += 1
        held.dict["calls"] += 1
        others["calls"] += 1
        return x.sin().exp()

    return values_and_grads(lambda x: call(fn, x), rand(3)), held.calls, held.dict, others, variable


@row("a backward pass that needs only the inputs")
def test_a_backward_that_needs_only_inputs_recomputes_nothing() -> None:
    for module, runs in ((torch.utils.checkpoint, 2), (remat.compat, 1)):
        fn = Runs(torch.sin)
        gradient(module, fn)
        assert fn.count == runs


SINCE = "that changed since"


def scaled_by(holder: Any, call: Callable) -> Any:
    x = rand(3)
    out = call(lambda x: (x * holder.k).sin().exp(), x).sum()
    holder.k = 3.0
    return torch.autograd.grad(out, x)


@compared(f"variables of closures and globals, attributes of objects, {SINCE}", theirs=OTHER)
def test_variables_are_as_in_the_first_run(call: Callable) -> Any:
    x, scale = rand(3), 2.0
    out = call(lambda x: (x * scale).sin().exp(), x).sum()
    scale = 3.0
    return torch.autograd.grad(out, x), scaled_by(SimpleNamespace(k=2.0), call)


CAPTURED = "captured tensors changed in place before the backward pass"


@compared(CAPTURED, theirs=OTHER, ours=Fails(MutationError, "'w' was changed in place"))
def test_captured_tensors_that_were_changed_in_place_are_an_error(call: Callable) -> Any:
    w, x = rand(3, grad=False), rand(3)
    out = call(lambda x: (x * w.sin()).sin().exp(), x).sum()
    w.mul_(2)
    return torch.autograd.grad(out, x)


@compared(
    "default dtype, attention kernels, cuDNN, oneDNN, deterministic algorithms, precision of products, changed since",
    theirs=OTHER,
)
def test_settings_are_as_in_the_first_run(call: Callable) -> Any:
    """The others are in `tests/ambient`."""
    x = rand(3)
    out = call(lambda x: (x * torch.empty(0).itemsize).sin().exp(), x).sum()
    with default_dtype(torch.float64):
        return torch.autograd.grad(out, x)


@compared("hooks that the function registers on what it is given or captures", theirs=OTHER)
def test_hooks_that_the_function_registers_run_once(call: Callable) -> int:
    """Other kinds of hooks are in `tests/region/test_saved_tensor_hooks.py`."""
    seen: list[Tensor] = []
    call(lambda x: (x.register_hook(seen.append), x.sin().sin())[1], rand(3).clone()).sum().backward()
    return len(seen)


FAILS = Fails(RuntimeError)
drawn = lambda fn, *args, **options: lambda call: dropped(lambda x: call(fn, x, *args, **options))
mapped = lambda call: torch.vmap(lambda x: call(deep, x))
noisy = lambda x, generator: (x * torch.rand(64, generator=generator)).sin().exp()
RANDOM, BATCHED = "`preserve_rng_state`", "`torch.func`: `vmap`"
CLASSES = f"attributes of classes and of imported modules {SINCE}"
# Programs of one line with the rows that they are about, torch's outcome and remat's.
PROGRAMS: list[tuple[str, Outcome, Outcome, Callable[[Callable], Any]]] = [
    (RANDOM, SAME, SAME, drawn(drops)),
    (RANDOM, OTHER, OTHER, drawn(drops, preserve_rng_state=False)),
    (RANDOM, OTHER, SAME, drawn(lambda x: (x * random.random()).sin().exp())),
    (RANDOM, OTHER, SAME, drawn(lambda x: (x * np.random.random()).sin().exp())),
    (RANDOM, OTHER, SAME, lambda call: drawn(noisy, torch.Generator().manual_seed(1))(call)),
    (BATCHED, FAILS if torch.__version__ < "2.12" else SAME, SAME, lambda call: mapped(call)(rand(3, grad=False))),
    (CLASSES, OTHER, OTHER, lambda call: scaled_by(type("Settings", (), {"k": 2.0}), call)),
    (BATCHED, FAILS, SAME, lambda call: torch.autograd.grad(mapped(call)(x := rand(3)).sum(), x)),
]
row(*(name for name, *_ in PROGRAMS))


@libraries
@pytest.mark.parametrize("name, theirs, ours, program", PROGRAMS)
def test_short_programs(library: str, name: str, theirs: Outcome, ours: Outcome, program: Callable) -> None:
    TORCH.check(library, program, theirs, ours)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8])
def test_segments_of_checkpoint_sequential_are_torchs(length: int) -> None:
    def graded(module: Any, segments: int) -> Any:
        weights = [rand(3, seed=i) for i in range(length)]
        functions = [Runs(functools.partial(lambda w, x: (x * w).exp(), w)) for w in weights]
        call = functools.partial(module.checkpoint_sequential, functions, segments, use_reentrant=False)
        x = rand(3)
        return values_and_grads(lambda x: call(input=x), x, inputs=[x, *weights]), [fn.count for fn in functions]

    for segments in range(1, length + 1):
        assert_same(graded(remat.compat, segments), graded(torch.utils.checkpoint, segments))


def layers() -> nn.Sequential:
    """Layers with random numbers, and with statistics in the first of two segments."""
    parts = lambda: [nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Tanh(), nn.Linear(3, 3), nn.Sigmoid()]
    return made(lambda: nn.Sequential(*parts(), nn.Linear(3, 2)))


@both
def test_checkpoint_sequential_of_a_module(module: Any) -> None:
    """The hooks of a `Sequential` itself don't run, and torch updates statistics twice."""
    plain, functions, x = layers(), layers(), rand(4, 3)
    functions.register_forward_hook(pytest.fail)

    def graded(call: Callable, own: nn.Module) -> Any:
        torch.manual_seed(0)
        return values_and_grads(call, x, inputs=[x, *own.parameters()])

    found = graded(lambda x: module.checkpoint_sequential(functions, 2, x, use_reentrant=False), functions)
    assert_same(found, graded(plain, plain))
    assert functions[1].num_batches_tracked == (2 if is_torch(module) else 1)
    assert is_torch(module) or torch.equal(functions[1].running_mean, plain[1].running_mean)


# Arguments, options, the kind of torch's and of remat's error, and the text of remat's.
ERRORS: list[tuple[tuple, dict, Any, type, str]] = [
    (([deep], 1), {"early_stop": False}, ValueError, ValueError, "no option early_stop"),
    (([deep] * 2, 3), {}, ValueError, ValueError, "from 1 to 2"),
    (([deep] * 2, 0), {}, ZeroDivisionError, ValueError, "from 1 to 2"),
    (([deep] * 2, -1), {}, None, ValueError, "from 1 to 2"),
]


@pytest.mark.parametrize("args, options, theirs, ours, text", ERRORS)
@row("`checkpoint_sequential`: `segments` out of range")
def test_errors_of_checkpoint_sequential(args: tuple, options: dict, theirs: Any, ours: type, text: str) -> None:
    with pytest.raises(ours, match=text):
        checkpoint_sequential(*args, rand(3), **options)
    with pytest.raises(theirs) if theirs else contextlib.nullcontext():
        torch.utils.checkpoint.checkpoint_sequential(*args, rand(3), use_reentrant=False, **options)


@row("`checkpoint_sequential` with a second input")
@pytest.mark.parametrize("segments", [1, 2])
def test_checkpoint_sequential_takes_one_input(segments: int) -> None:
    x, y = rand(3), rand(3, seed=1)
    for second in (y, [y], {"y": y}):
        with pytest.raises(TypeError, match=r"one input.*type (Tensor|list|dict) for use_reentrant.*as one tuple"):
            checkpoint_sequential([deep, deep], segments, x, second)
    for use_reentrant in (None, False, 0):
        assert torch.equal(checkpoint_sequential([deep, deep], segments, x, use_reentrant), deep(deep(x)))
    assert torch.equal(checkpoint_sequential([lambda pair: pair[0] * pair[1], deep], segments, (x, y)), deep(x * y))
    assert torch.equal(remat.sequential([torch.mul, deep], segments)(x, y), deep(x * y))


@row("`checkpoint_sequential`: a module that is twice in a `Sequential`")
def test_a_module_that_occurs_twice_is_called_twice() -> None:
    act, x = nn.Tanh(), rand(2, 3)
    model = made(lambda: nn.Sequential(nn.Linear(3, 3), act, nn.Linear(3, 3), act))
    for segments in (1, 2, 4):
        assert torch.equal(checkpoint_sequential(model, segments, x), model(x))
    assert not torch.equal(torch.utils.checkpoint.checkpoint_sequential(model, 2, x, use_reentrant=False), model(x))


def test_checkpoint_sequential_saves_the_inputs_of_segments_and_what_a_policy_says() -> None:
    # The inputs of three segments without the first, the result, and five tensors within the last segment.
    assert held_bytes(lambda x: checkpoint_sequential([deep] * 8, 4, x), rand(64)) == (3 + 1 + 5) * rand(64).nbytes

    def products(policy: Any) -> int:
        out = checkpoint_sequential([lambda x: (x @ x).sin()] * 4, 4, rand(4, 4), policy=policy)
        return count_ops(out.sum().backward)["aten.mm"] - 2 * 4

    assert (products(None), products(policies.save_matmuls)) == (3, 0)


SELECTIVE = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
SAVED = {"policy": policies.save_matmuls}
W = rand(4, 4), rand(4, 4, seed=1)
block = lambda x, w: ((x @ w).sin() @ w).sin().exp()
COMPILED: list[tuple[dict, bool, bool]] = [  # whether the operator is selective, and torch's function compiles
    ({"preserve_rng_state": False, "determinism_check": "none", "early_stop": False}, False, True),
    ({"context_fn": SELECTIVE}, True, True),
    ({"debug": True, "determinism_check": "values"}, False, False),
    ({"context_fn": torch.utils.checkpoint.noop_context_fn}, False, False),
    (SAVED, True, False),
]


@pytest.mark.parametrize("options, selective, theirs", COMPILED)
@row("`torch.compile`")
def test_options_in_compiled_code(options: dict, selective: bool, theirs: bool) -> None:
    for module in (remat.compat, torch.utils.checkpoint)[: 1 + theirs]:
        call = functools.partial(module.checkpoint, block, use_reentrant=False, **options)
        assert checkpoints_in_graph(lambda x, w, call=call: call(x, w), *W) == [selective]


# Rows that tests/core/test_passes.py and tests/selective/test_wrapper_subclasses.py are about,
row("`GraphExecGroup`", "selective: tensors made of others (wrapper subclasses)")
# rows that tests/engine/test_recompute.py is about,
row("`ctx.saved_tensors` read twice", "`except Exception` in the function")
# and rows that test_comparison_table.py is about.
row("`torch.func`: `grad`, `vjp`, `jacrev`, `hessian`", "`torch.func`: `jvp`, `jacfwd`, `linearize`")
row("`torch.func.functional_call`, then `backward`", "statistics of batch norm, counters in buffers")


def test_each_row_of_the_documentation_has_its_tests() -> None:
    TORCH.assert_rows_are_tested(__name__, "test_compat_selective")
