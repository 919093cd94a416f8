"""`remat.compat.checkpoint_wrapper` compared with fairscale's: each row of the table in the documentation."""

import copy
import inspect
import pickle
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import assert_same, rand
from cases import module as made
from comparison import FAIRSCALE, OTHER, SAME, Fails, Outcome, libraries
from host_copies import Copies
from modules.blocks import Block
from random_programs.toolbox import Apply
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs
from torch.utils.checkpoint import checkpoint

import remat.compat
from benchmarks.measure import assert_freed_without_gc, count_ops, held_bytes, leaked_bytes
from remat import MutationError, PolicyError, checkpoint_name, policies
from remat.compat import checkpoint_wrapper

compared, row = FAIRSCALE.compared, FAIRSCALE.row
pytestmark = [
    pytest.mark.usefixtures("collector_off"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:None of the inputs have requires_grad"),
]


LIBRARY = "fairscale.nn.checkpoint.checkpoint_activations"


@pytest.fixture(params=["fairscale", "remat"])
def lib(request: pytest.FixtureRequest) -> Any:
    """The original, or the drop-in."""
    return pytest.importorskip(LIBRARY) if request.param == "fairscale" else remat.compat


is_original = lambda lib: lib is not remat.compat
norms = lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.BatchNorm1d(4), nn.Tanh())
X = rand(5, 4)
H = rand(5, 4, seed=1, grad=False)  # without a gradient


def step(module: nn.Module, **kwargs: Any) -> list[Tensor | None]:
    """The gradients of the input and all parameters by `.backward()`, the only way that fairscale supports."""
    X.grad = None
    module.zero_grad()
    module(*(() if kwargs else (X,)), **kwargs).square().sum().backward()
    return [X.grad, *(p.grad for p in module.parameters())]


@row("`checkpoint_wrapper(module)`", "`enable_checkpointing()`, `enable_recomputing()`", "`patch_batchnorm(module)`")
def test_the_public_names_exist_and_the_others_are_not_needed() -> None:
    library = pytest.importorskip(LIBRARY)
    for name in ("checkpoint_wrapper", "is_checkpointing", "is_recomputing", "disable_checkpointing"):
        assert callable(getattr(remat.compat, name)) and callable(getattr(library, name))
    for name in ("enable_checkpointing", "enable_recomputing", "patch_batchnorm"):
        assert hasattr(library, name) and not hasattr(remat.compat, name)
    theirs, ours = (inspect.signature(lib.checkpoint_wrapper).parameters.values() for lib in (library, remat.compat))
    assert [*map(str, theirs)] == ["module: torch.nn.modules.module.Module", "offload_to_cpu: bool = False"]
    assert [(p.name, p.default) for p in ours][1:-1] == [("offload_to_cpu", False), ("policy", None)]
    with pytest.raises(TypeError, match=r"takes the module, offload_to_cpu and policy, not checkpoint_impl\."):
        remat.compat.checkpoint_wrapper(nn.Linear(2, 2), checkpoint_impl=1)  # of torch's function of this name


FIRST, AGAIN, NEITHER = (True, False), (False, True), (False, False)
RUNS: list[tuple[bool, bool]] = []  # in no attribute, as a recompute would restore it


def flagged(lib: Any, fn: Callable = torch.tanh) -> nn.Module:
    """A module that records the flags that it reads in its runs."""
    flags = lambda: (lib.is_checkpointing(), lib.is_recomputing())
    return Apply(lambda x: (RUNS.append(flags()), fn(x).exp().sin())[1])


@row("`is_checkpointing()`, `is_recomputing()`", "wrapped twice", "to undo it")
def test_is_checkpointing_and_is_recomputing(lib: Any) -> None:
    wrap = lib.checkpoint_wrapper
    inner, outer = lambda: flagged(lib), lambda module: flagged(lib, module)

    def runs(module: nn.Module) -> list:
        RUNS.clear()
        step(module)
        return list(RUNS)

    assert runs(inner()) == [NEITHER]
    assert runs(wrap(inner())) == runs(wrap(wrap(inner()))) == [FIRST, AGAIN]
    assert runs(wrap(outer(inner()))) == [FIRST, FIRST, AGAIN, AGAIN]
    assert runs(outer(wrap(inner()))) == [NEITHER, FIRST, AGAIN]
    assert runs(wrap(outer(wrap(inner())))) == [FIRST, FIRST, AGAIN, (True, True), AGAIN]
    with pytest.raises(ZeroDivisionError):
        wrap(Apply(lambda x: 1 // 0))(X)
    assert (lib.is_checkpointing(), lib.is_recomputing()) == NEITHER
    if not is_original(lib):
        assert runs(remat.nn.undo(wrap(inner()))) == [NEITHER]


@row("`disable_checkpointing()`", "calls without grad")
def test_plain_calls_while_checkpointing_is_disabled_and_without_grad(lib: Any) -> None:
    module = lib.checkpoint_wrapper(flagged(lib))
    RUNS.clear()
    with lib.disable_checkpointing():
        assert lib.thread_local.is_checkpointing_disabled if is_original(lib) else remat.is_disabled()
        actual = step(module)
        with lib.disable_checkpointing():
            module(X)
        module(X)
    assert RUNS == [NEITHER] * 3
    assert_same(actual, step(flagged(lib)))
    RUNS.clear()
    out = module(X).sum()
    with lib.disable_checkpointing():
        out.backward()
    assert RUNS == [FIRST, AGAIN]
    RUNS.clear()
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            assert_same(module(X), flagged(lib)(X))
    assert RUNS == [NEITHER] * 4


@row("`checkpoint_wrapper(module)`", "reference cycle", "the recompute")
def test_the_module_itself_changes_and_saves_its_inputs(lib: Any) -> None:
    module, plain, x = made(Block), made(Block), rand(64, 4)
    assert lib.checkpoint_wrapper(module) is module
    result, inside = x.nbytes, 5 * x.nbytes
    assert held_bytes(plain, x) >= result + inside
    assert held_bytes(module, x) < result + 5200  # fairscale and remat save the state of the generator
    row = lib.checkpoint_wrapper(made(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))))
    assert count_ops(row(X).sum().backward)["aten.addmm"] == (2 if is_original(lib) else 1)
    step(module)
    assert leaked_bytes(step, module) == sum(p.nbytes for p in module.parameters()) + X.nbytes  # new gradients
    with assert_freed_without_gc() as watch:
        watch(module, *module.parameters())
        del module


@compared("keyword arguments")
def test_keyword_arguments(wrap: Callable) -> Any:
    shift = rand(4, seed=3)
    return step(wrap(made(Block)), x=X, scale=2.0, shift=shift), shift.grad


@compared("tensors in containers among the arguments", theirs=Fails(RuntimeError, "does not require grad"))
def test_tensors_in_containers_get_gradients(wrap: Callable) -> Any:
    w, x = rand(4, seed=2), rand(5, 4)
    module = wrap(Apply(lambda tree: (tree["x"] * tree["more"][0]).sin().exp()))
    module({"x": x * 2, "more": [w, None]}).sum().backward()
    return x.grad, w.grad


@compared("batch norm", theirs=OTHER)
@pytest.mark.parametrize("way", ["twice", "inside", "without grad"])
def test_batch_norm_is_updated_once(wrap: Callable, way: str) -> Any:
    norm = made(norms)
    module = wrap(wrap(norm)) if way == "twice" else wrap(nn.Sequential(wrap(norm)))
    with torch.set_grad_enabled(way != "without grad"):
        module(X)
    return dict(norm.named_buffers())


@compared("autocast", theirs=OTHER)
def test_autocast_is_that_of_the_first_run(wrap: Callable) -> Any:
    module = wrap(made(lambda: nn.Linear(4, 4)).float())
    with torch.autocast("cpu", torch.bfloat16):
        out = module(X.float())
    out.float().square().sum().backward()
    return module.weight.grad


@compared("`retain_graph=True`, and backward again")
def test_repeated_backward(wrap: Callable) -> Any:
    module = wrap(made(Block))
    loss = module(X).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return [p.grad for p in module.parameters()]


@compared("inputs changed in place after the call", theirs=Fails(RuntimeError, "inplace"), ours=Fails(MutationError))
def test_inputs_that_were_changed_in_place_are_an_error(wrap: Callable) -> Any:
    x = rand(5, 4)
    h = x * 1
    out = wrap(Apply(lambda h: (h + 0).sin().exp()))(h).sum()
    h.add_(1)
    out.backward()
    return x.grad


@compared("`state_dict`, names, `isinstance`, `repr`")
def test_names_and_state_are_unchanged(wrap: Callable) -> Any:
    module = wrap(made(Block))
    module.load_state_dict({k: v + 1 for k, v in made(Block).state_dict().items()})
    names = [[n for n, _ in getattr(module, f"named_{kind}")()] for kind in ("modules", "parameters")]
    return names, dict(module.state_dict()), isinstance(module, Block), repr(module), step(module)


@compared("`copy.deepcopy`", theirs=OTHER)
def test_a_deep_copy_has_its_own_weights(wrap: Callable) -> Any:
    module = wrap(made(Block))
    again = copy.deepcopy(module)
    with torch.no_grad():
        for p in again.parameters():
            p.mul_(2)
    return again(X), module(X)


@compared("hooks of the module")
def test_hooks_run_outside_of_the_region(wrap: Callable) -> Any:
    module, log = wrap(made(Block)), []
    module.register_forward_pre_hook(lambda m, args: log.append("before"))
    module.register_forward_hook(lambda m, args, out: (log.append("after"), out * 2)[1])
    module.register_full_backward_hook(lambda m, to_in, to_out: log.append("backward"))
    return step(module), log


@pytest.mark.filterwarnings("ignore")
@row("containers (`ModuleList`), lazy modules", "TorchScript modules")
def test_what_fairscale_does_with_modules_that_cannot_be_regions() -> None:
    """The errors of the drop-in are in `tests/modules/test_nn.py`."""
    wrap = pytest.importorskip(LIBRARY).checkpoint_wrapper
    for module in (nn.LazyLinear(3), nn.ModuleList()):
        assert wrap(module) is module
    with pytest.raises(AttributeError):
        wrap(torch.jit.trace(nn.Linear(4, 4), X.float()))


two = lambda x: (x.sin(), x.detach().sin())
noise = lambda generator: lambda x: x.sin() * torch.rand(x.shape, generator=generator, dtype=x.dtype)
summed = lambda module: lambda x: module(x).sum()
pickled = lambda module: pickle.loads(pickle.dumps(module))


def patched() -> nn.Module:
    module = made(lambda: nn.Linear(4, 4))
    module.forward = lambda x: (x * 3).sin().exp()
    return module


# Programs of one line with their rows and what fairscale does with them.
PROGRAMS: list[tuple[str, Outcome, Callable[[Callable], Any]]] = [
    ("results that aren't tensors", SAME, lambda wrap: wrap(Apply(lambda x: (x.sin(), None, 3, "text")))(X)),
    ("results that aren't tensors", OTHER, lambda wrap: wrap(Apply(lambda x: [x.sin().exp(), None]))(X)),
    ("results that aren't tensors", OTHER, lambda wrap: wrap(Apply(lambda x: {"y": x.sin().exp(), "flag": True}))(X)),
    ("which results require grad", OTHER, lambda wrap: [t.requires_grad for t in wrap(Apply(two))(X)]),
    ("hooks that it adds", OTHER, lambda wrap: [len(m._forward_hooks) for m in wrap(made(norms)).modules()]),
    ("random numbers", OTHER, lambda wrap: step(wrap(Apply(noise(torch.Generator().manual_seed(0)))))),
    ("`torch.func`", Fails(RuntimeError, "functorch"), lambda wrap: torch.vmap(wrap(made(Block)))(H)),
    ("pickle, `torch.save` of the module", Fails(TypeError, "weakref"), lambda wrap: pickled(wrap(nn.Tanh()))(X)),
    ("a `forward` that was set on the module", OTHER, lambda wrap: wrap(patched())(X)),
]
row(*(name for name, _, _ in PROGRAMS))


@libraries
@pytest.mark.parametrize("name, theirs, program", PROGRAMS)
def test_short_programs(library: str, name: str, theirs: Outcome, program: Callable) -> None:
    FAIRSCALE.check(library, program, theirs)


@row("`policy`", "wrapped twice")
def test_a_policy_decides_what_is_saved_and_a_second_wrap_replaces_it() -> None:
    module, x = made(Block), rand(64, 4)

    def kept(policy: Any) -> int:
        assert_same(step(checkpoint_wrapper(module, policy=policy)), step(made(Block)))
        return held_bytes(module, x)

    assert kept(policies.save_only_these_names("hidden")) == kept(["aten.tanh"]) == kept(None) + 2 * x.nbytes
    assert kept(policies.everything_saveable) == held_bytes(made(Block), x)
    with pytest.raises(PolicyError, match="dots"):
        checkpoint_wrapper(made(Block), policy="dots")
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, got builtin_function_or_method"):
        checkpoint_wrapper(torch.sin)  # type: ignore[type-var]


def product(tree: dict) -> Tensor:
    hidden = checkpoint_name(tree["x"].sin(), "hidden")
    return (hidden * tree["more"][0] * tree["leaf"] * tree["constant"]).sin().exp()


@pytest.mark.parametrize("make_copy", [lambda m: m, pickled, copy.copy, copy.deepcopy])
@row("`offload_to_cpu`", "pickle, `torch.save` of the module")
def test_computed_and_constant_inputs_are_offloaded_and_leaves_stay(far: Copies, make_copy: Callable) -> None:
    x, leaf, results = rand(5, 4), rand(5, 4, seed=1), []
    policy = policies.save_only_these_names("hidden")
    for offload in (True, False):
        module = make_copy(checkpoint_wrapper(Apply(product), offload_to_cpu=offload, policy=policy))
        h, y, z = x * 2, leaf * 3, rand(5, 4, seed=2, grad=False)
        out = module({"x": h, "more": [y], "constant": z, "leaf": leaf}).sum()
        storages = [weakref.ref(t.untyped_storage()) for t in (h, y, z)]
        del h, y, z
        assert [ref() is None for ref in storages] == [offload] * 3
        assert (far.on_host(), far.on_device()) == (3 * offload, 0)
        results.append(torch.autograd.grad(out, [x, leaf]))
        assert sorted(far.taken()) == ([0, 1, 2] if offload else [])
        del out
        assert far.on_host() == far.on_device() == 0
    assert_same(*results)


def saved_on_cpu(module: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return module(x * 2)


# Where others decide how the inputs are saved.
INSIDE: dict[str, Callable[[nn.Module], Any]] = {
    "region": lambda m: torch.autograd.grad(remat.remat(lambda x: m(x * 2))(X).sum(), X),
    "torch's": lambda m: torch.autograd.grad(checkpoint(lambda x: m(x * 2), X, use_reentrant=False).sum(), X),
    "hooks": lambda m: torch.autograd.grad(saved_on_cpu(m, X).sum(), X),
    "torch.func": lambda m: torch.func.grad(summed(m))(H),
}


@pytest.mark.parametrize("inside", INSIDE)
@row("`offload_to_cpu`")
def test_where_others_decide_how_inputs_are_saved_nothing_is_offloaded(far: Copies, inside: str) -> None:
    assert_same(*(INSIDE[inside](m) for m in (checkpoint_wrapper(made(Block), offload_to_cpu=True), made(Block))))
    assert not far.out


@pytest.mark.parametrize("recompute", [False, True])
def test_the_wrapper_replaces_torchs_offload_wrapper(far: Copies, recompute: bool) -> None:
    """Around a module, or around a module in torch's wrapper for checkpoints."""
    policy = None if recompute else policies.offload(policies.everything_saveable)
    ours = checkpoint_wrapper(made(Block), offload_to_cpu=True, policy=policy)
    its = torchs.offload_wrapper(torchs.checkpoint_wrapper(made(Block)) if recompute else made(Block))
    counts = [count_ops(lambda: module(X * 2).sum().backward()) for module in (ours, its)]
    assert [count["aten.addmm"] for count in counts] == ([4, 4] if recompute else [2, 2])
    # The input, and the results of `tanh`, `mul` and `exp`. torch's copies two of them twice, and two parameters.
    assert counts[1]["aten.copy_"] >= len(far.out) == (1 if recompute else 4)
    assert_same(step(ours), step(made(Block)))
    assert_same(step(its), step(made(Block)), exact=False)  # torch's copies of transposed parameters have other strides


@row("numbers that the module counts up")
def test_numbers_count_first_runs(lib: Any) -> None:
    class Counts(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            others["calls"] += 1
            return x.sin().exp()

    module, others = Counts(), Counter[str]()
    step(lib.checkpoint_wrapper(module))
    assert module.calls == others["calls"] == (2 if is_original(lib) else 1)


# Rows that test_comparison_table.py is about.
row("`torch.autograd.grad`", "`backward(create_graph=True)`", "`torch.func.functional_call`")


def test_each_row_of_the_documentation_has_its_tests() -> None:
    FAIRSCALE.assert_rows_are_tested(__name__)
