"""`remat.compat.checkpoint_wrapper` compared with fairscale's: each row of the table in the documentation.

What fairscale's documentation promises is the reference. Where fairscale itself fails, the test shows how.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerator import DEVICE, backend
from cases import assert_same, rand
from host_copies import Copies
from side_by_side import assert_rows_have_tests
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import remat.compat
from benchmarks.measure import assert_freed_without_gc, count_ops, held_bytes, leaked_bytes
from remat import MutationError, PolicyError, checkpoint_name, policies
from remat.compat import checkpoint_wrapper

FAIRSCALE = "fairscale.nn.checkpoint.checkpoint_activations"
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:None of the inputs have requires_grad")


@pytest.fixture(params=["fairscale", "remat"])
def lib(request: pytest.FixtureRequest) -> Any:
    """The original, or the drop-in."""
    return pytest.importorskip(FAIRSCALE) if request.param == "fairscale" else remat.compat


@pytest.fixture
def fairscale() -> Any:
    return pytest.importorskip(FAIRSCALE)


pytestmark = pytest.mark.usefixtures("collector_off")


def is_original(lib: Any) -> bool:
    return lib is not remat.compat


RUNS: list[tuple[bool, bool]] = []
FIRST, AGAIN, NEITHER = (True, False), (False, True), (False, False)


class Block(nn.Module):
    """Records the flags that it reads in its runs."""

    def __init__(self, lib: Any = remat.compat) -> None:
        super().__init__()
        self.lib = lib.__name__  # its name, as an imported module can't be pickled
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, scale: float = 1.0, *, shift: Tensor | None = None) -> Tensor:
        lib = importlib.import_module(self.lib)
        RUNS.append((lib.is_checkpointing(), lib.is_recomputing()))
        y = self.down(checkpoint_name(self.up(x).tanh(), "hidden").sin() * scale)
        return (y if shift is None else y + shift).exp().sin()


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.BatchNorm1d(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).sin()

    def updates(self) -> list[int]:
        return [int(self.layers[i].num_batches_tracked) for i in (1, 3)]


def made(make: Callable[..., Any] = Block, *args: Any) -> Any:
    """The same module in each call."""
    torch.manual_seed(0)
    return make(*args).double()


def step(module: nn.Module, *args: Any, **kwargs: Any) -> list[Tensor | None]:
    """The gradients of all parameters by `.backward()`, the only way that fairscale supports."""
    for p in module.parameters():
        p.grad = None
    RUNS.clear()
    module(*(args or (X,)), **kwargs).square().sum().backward()
    return [p.grad for p in module.parameters()]


X = rand(5, 4)
H = rand(5, 4, seed=1, grad=False)  # without a gradient


# --- the names --------------------------------------------------------------------------------------------------------


def test_every_public_name_exists(fairscale: Any) -> None:
    public = importlib.import_module("fairscale.nn.checkpoint")
    names = {name for name, value in vars(public).items() if inspect.isfunction(value)}
    assert names == {"checkpoint_wrapper", "is_checkpointing", "is_recomputing"}
    for name in {*names, "disable_checkpointing"}:  # this one is imported from a file inside the package
        assert callable(getattr(remat.compat, name)) and callable(getattr(fairscale, name))
    theirs = list(inspect.signature(fairscale.checkpoint_wrapper).parameters.values())
    ours = list(inspect.signature(checkpoint_wrapper).parameters.values())
    assert [(p.name, p.default, p.kind) for p in ours[:2]] == [(p.name, p.default, p.kind) for p in theirs]
    assert [p.name for p in ours[2:]] == ["policy"]


def test_names_that_are_not_needed(fairscale: Any) -> None:
    """A region does by itself what they are for."""
    for name in ("enable_checkpointing", "enable_recomputing", "patch_batchnorm"):
        assert hasattr(fairscale, name) and not hasattr(remat.compat, name), name
    with fairscale.enable_recomputing(), fairscale.enable_checkpointing():
        assert fairscale.is_recomputing() and fairscale.is_checkpointing()  # they have no other effect
    module = checkpoint_wrapper(made(Norm))
    step(module)
    assert module.updates() == [1, 1]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


# --- calls ------------------------------------------------------------------------------------------------------------


def test_wraps_in_place(lib: Any) -> None:
    module, plain = made(Block, lib), made(Block, lib)
    assert lib.checkpoint_wrapper(module) is module
    for _ in range(2):
        assert_same(step(module), step(plain))
        assert step(module) and RUNS == [FIRST, AGAIN]
    x = rand(64, 4)
    result, inside = 64 * 4 * 8, 64 * (8 + 8 + 4) * 8
    assert held_bytes(plain, x) >= result + inside
    assert held_bytes(module, x) < result + 5200  # fairscale and remat save the state of the generator


def test_where_the_recompute_ends(lib: Any) -> None:
    """fairscale recomputes everything; the last operation isn't needed."""
    module = lib.checkpoint_wrapper(made(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))))
    out = module(X).sum()
    products = count_ops(out.backward)
    assert products["aten.addmm"] == (2 if is_original(lib) else 1)


def test_keyword_arguments(lib: Any) -> None:
    shift = rand(4, seed=3)
    calls = [((X,), {"scale": 2.0, "shift": shift}), ((X, 3), {}), ((), {"scale": 2, "x": X}), ((X,), {"shift": None})]
    for args, kwargs in calls:
        results = []
        for wrap in (lib.checkpoint_wrapper, lambda m: m):
            shift.grad = X.grad = None
            module = wrap(made(Block, lib))
            module(*args, **kwargs).square().sum().backward()
            results.append([t.grad for t in (X, shift, *module.parameters())])
        assert_same(*results)


class Results(nn.Module):
    def __init__(self, kind: Callable) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return self.kind(x)


def test_results_that_are_not_tensors(lib: Any) -> None:
    """fairscale flattens tuples; its result for a list is a tuple, and for a dict the tuple of its keys."""
    kinds: dict[str, Callable] = {
        "tuple": lambda x: (x.sin().exp(), None, 3, "text"),
        "list": lambda x: [x.sin().exp(), None],
        "dict": lambda x: {"y": x.sin().exp(), "flag": True},
        "nested": lambda x: ((x.sin().exp(), {"flag": x > 0}),),
    }
    for name, kind in kinds.items():
        out, expected = lib.checkpoint_wrapper(Results(kind))(X), kind(X)
        if is_original(lib) and name != "tuple":
            assert isinstance(out, tuple)
            continue
        assert_same(out, expected)
        tensors = [next(t for t in remat._core.trees.flatten(o)[0] if isinstance(t, Tensor)) for o in (out, expected)]
        grads = []
        for tensor in tensors:
            X.grad = None
            tensor.sum().backward()
            grads.append(X.grad)
        assert_same(*grads)


def test_arguments_in_containers(lib: Any) -> None:
    """fairscale looks for tensors only among the arguments: results computed from others have no gradient."""
    module = lib.checkpoint_wrapper(Results(lambda tree: (tree["x"] * tree["more"][0]).sin().exp()))
    w, h = rand(4, seed=2), X * 2
    out = module({"x": h, "more": [w, None]})
    if is_original(lib):
        assert not out.requires_grad
        return
    assert_same(torch.autograd.grad(out.sum(), [X, w]), torch.autograd.grad((X * 2 * w).sin().exp().sum(), [X, w]))


def test_is_checkpointing_and_is_recomputing(lib: Any) -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            RUNS.append((lib.is_checkpointing(), lib.is_recomputing()))
            return self.inner(x).exp().sin()

    assert (lib.is_checkpointing(), lib.is_recomputing()) == NEITHER
    step(lib.checkpoint_wrapper(made(Block, lib)))
    assert RUNS == [FIRST, AGAIN]
    step(lib.checkpoint_wrapper(Outer(made(Block, lib))))
    assert RUNS == [FIRST, FIRST, AGAIN, AGAIN]
    step(Outer(lib.checkpoint_wrapper(made(Block, lib))))
    assert RUNS == [NEITHER, FIRST, AGAIN]
    step(lib.checkpoint_wrapper(Outer(lib.checkpoint_wrapper(made(Block, lib)))))
    assert RUNS == [FIRST, FIRST, AGAIN, (True, True), AGAIN]
    with pytest.raises(ZeroDivisionError):
        lib.checkpoint_wrapper(Results(lambda x: 1 // 0))(X)
    assert (lib.is_checkpointing(), lib.is_recomputing()) == NEITHER


def test_disable_checkpointing(lib: Any) -> None:
    module, plain = lib.checkpoint_wrapper(made(Block, lib)), made(Block, lib)
    with lib.disable_checkpointing():
        assert lib.thread_local.is_checkpointing_disabled if is_original(lib) else remat.is_disabled()
        actual = step(module)
        assert RUNS == [NEITHER]
        with lib.disable_checkpointing():
            module(X)
        module(X)
        assert RUNS == [NEITHER] * 3
    assert_same(actual, step(plain))
    step(module)
    assert RUNS == [FIRST, AGAIN]
    out = module(X).sum()
    with lib.disable_checkpointing():
        out.backward()
    assert RUNS == [FIRST, AGAIN, FIRST, AGAIN]


def test_without_grad_it_is_a_plain_call(lib: Any) -> None:
    module = lib.checkpoint_wrapper(made(Block, lib))
    for off in (torch.no_grad, torch.inference_mode):
        RUNS.clear()
        with off():
            assert_same(module(X), made(Block, lib)(X))
        assert RUNS == [NEITHER] * 2


def test_which_results_require_grad(lib: Any) -> None:
    """In fairscale, every result whose dtype allows it, if any input or parameter requires grad."""
    frozen = lib.checkpoint_wrapper(made(Block, lib)).requires_grad_(False)
    assert not frozen(H).requires_grad and frozen(X).requires_grad
    assert lib.checkpoint_wrapper(made(Block, lib))(H).requires_grad
    out = lib.checkpoint_wrapper(Results(lambda x: (x.sin(), x.detach().sin(), x > 0)))(X)
    assert [t.requires_grad for t in out] == [True, is_original(lib), False]


# --- batch norm -------------------------------------------------------------------------------------------------------


def test_batch_norm_is_updated_once(lib: Any) -> None:
    module, plain = lib.checkpoint_wrapper(made(Norm)), made(Norm)
    for count in (1, 2, 3):
        assert_same(step(module), step(plain))
        assert module.updates() == [count] * 2
        assert_same(list(module.buffers()), list(plain.buffers()))
    module.eval(), plain.eval()
    assert_same(step(module), step(plain))
    assert module.updates() == [3, 3]
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())
    assert hooks == (4 if is_original(lib) else 0)


def test_batch_norm_in_other_ways(lib: Any) -> None:
    """fairscale doesn't update statistics if a module is wrapped twice, or is in a wrapped one, or without grad."""
    wrap = lib.checkpoint_wrapper
    updated = 0 if is_original(lib) else 1
    twice, inside = wrap(wrap(made(Norm))), wrap(made(Norm))
    for module in (twice, wrap(nn.Sequential(inside))):
        assert_same(step(module), step(made(Norm)))
    assert twice.updates() == inside.updates() == [updated] * 2
    without = wrap(made(Norm))
    with torch.no_grad():
        without(X)
    assert without.updates() == [updated] * 2


# --- random numbers and autocast --------------------------------------------------------------------------------------


def test_random_numbers_are_those_of_the_first_run(lib: Any) -> None:
    results = []
    for wrap in (lib.checkpoint_wrapper, lambda m: m):
        module = wrap(made(lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.2))))
        torch.manual_seed(7)
        results.append((step(module), torch.get_rng_state()))
    assert_same(*results)


def test_other_generators(lib: Any) -> None:
    """fairscale restores the default generators of the CPU and of the current CUDA device."""
    generator = torch.Generator()

    def noise(x: Tensor) -> Tensor:
        return x.sin() * torch.rand(x.shape, generator=generator, dtype=x.dtype)

    grads = []
    for wrap in (lib.checkpoint_wrapper, lambda m: m):
        generator.manual_seed(0)
        X.grad = None
        wrap(Results(noise))(X).sum().backward()
        grads.append(X.grad)
    assert torch.equal(*grads) != is_original(lib)


def test_autocast(lib: Any) -> None:
    """fairscale restores only autocast of CUDA: on the CPU its recompute has another precision."""
    grads = []
    for wrap in (lib.checkpoint_wrapper, lambda m: m):
        module = wrap(made(nn.Linear, 4, 4).float())
        with torch.autocast("cpu", torch.bfloat16):
            out = module(X.float())
        out.float().square().sum().backward()
        grads.append(module.weight.grad)
    assert torch.equal(*grads) != is_original(lib)


# --- derivatives ------------------------------------------------------------------------------------------------------


def test_autograd_grad(lib: Any) -> None:
    """fairscale raises: its backward calls `backward` in a backward."""
    module = lib.checkpoint_wrapper(made(Block, lib))
    if is_original(lib):
        with pytest.raises(RuntimeError, match=r"not compatible with \.grad"):
            torch.autograd.grad(module(X).sum(), X)
        return
    plain = made(Block, lib)
    assert_same(*(torch.autograd.grad(m(X).sum(), [X, *m.parameters()]) for m in (module, plain)))


def test_repeated_backward(lib: Any) -> None:
    module, plain = lib.checkpoint_wrapper(made(Block, lib)), made(Block, lib)
    for m in (module, plain):
        loss = m(X).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same([p.grad for p in module.parameters()], [p.grad for p in plain.parameters()])


def test_double_backward(lib: Any) -> None:
    """The gradients of fairscale's backward have no graph."""
    seconds = []
    for wrap in (lib.checkpoint_wrapper, lambda m: m):
        module = wrap(made(Block, lib))
        x = rand(5, 4)
        module(x).sum().backward(create_graph=True)
        assert x.grad is not None
        seconds.append(torch.autograd.grad(x.grad.square().sum(), x)[0] if x.grad.requires_grad else None)
    assert seconds[1] is not None
    if is_original(lib):
        assert seconds[0] is None
    else:
        assert_same(*seconds)


def test_under_torch_func(lib: Any) -> None:
    """fairscale's autograd Function has no `setup_context`."""
    module, plain = lib.checkpoint_wrapper(made(Block, lib)), made(Block, lib)
    x = X.detach()

    def grads(module: nn.Module) -> Tensor:
        return torch.func.grad(lambda x: module(x).sum())(x)

    if is_original(lib):
        with pytest.raises(RuntimeError, match="functorch"):
            grads(module)
        for transform in (torch.func.vmap(module), lambda x: torch.func.jvp(module, (x,), (x,))):
            with pytest.raises(RuntimeError, match="functorch"):
                transform(x)
        return
    assert_same(grads(module), grads(plain))
    assert_same(torch.vmap(torch.func.grad(lambda x: module(x).sum()))(x), grads(plain), exact=False)


def test_functional_call(lib: Any) -> None:
    """fairscale silently returns the gradients at the module's own parameters."""
    results = []
    for wrap in (lib.checkpoint_wrapper, lambda m: m):
        module = wrap(made(Block, lib))
        params = {n: nn.Parameter(p.detach() * 2) for n, p in module.named_parameters()}
        functional_call(module, params, (X,)).sum().backward()
        results.append([p.grad for p in params.values()])
    same = all(a is not None and torch.equal(a, b) for a, b in zip(*results))
    assert same != is_original(lib)


def test_inputs_changed_after_the_call(lib: Any) -> None:
    h = X * 1
    out = lib.checkpoint_wrapper(made(Block, lib))(h).sum()
    h.add_(1)
    with pytest.raises(RuntimeError if is_original(lib) else MutationError, match=r"in.?place"):
        out.backward()


# --- the module -------------------------------------------------------------------------------------------------------


def test_names_and_state_are_unchanged(lib: Any) -> None:
    for make in (Block, Norm):
        args = (lib,) if make is Block else ()
        module, plain = lib.checkpoint_wrapper(made(make, *args)), made(make, *args)
        assert list(module.state_dict()) == list(plain.state_dict()) and isinstance(module, make)
        assert [n for n, _ in module.named_modules()] == [n for n, _ in plain.named_modules()]
        assert [n for n, _ in module.named_parameters()] == [n for n, _ in plain.named_parameters()]
        assert repr(module) == repr(plain)
        module.load_state_dict({k: v + 1 for k, v in plain.state_dict().items()})
        plain.load_state_dict(module.state_dict())
        assert_same(step(module), step(plain))


def test_deepcopy(lib: Any) -> None:
    """A copy of a module in fairscale's wrapper runs with the weights of the original."""
    module = lib.checkpoint_wrapper(made(Block, lib))
    again = copy.deepcopy(module)
    with torch.no_grad():
        for p in again.parameters():
            p.zero_()
    assert torch.equal(again(X), made(Block, lib)(X)) == is_original(lib)
    if not is_original(lib):
        assert step(again) and RUNS == [FIRST, AGAIN]
        assert_same(step(module), step(made(Block, lib)))


@pytest.mark.parametrize("make_copy", [lambda m: pickle.loads(pickle.dumps(m)), copy.copy, copy.deepcopy])
def test_other_copies(make_copy: Callable) -> None:
    module = checkpoint_wrapper(made(), offload_to_cpu=True, policy=policies.save_only_these_names("hidden"))
    again = make_copy(module)
    assert vars(again)["_remat"] == vars(module)["_remat"] and vars(again)["_remat"].offload_inputs
    assert_same(step(again), step(made()))
    assert RUNS == [NEITHER] or held_bytes(again, X) == held_bytes(module, X)


def test_pickle_of_fairscale(fairscale: Any) -> None:
    with pytest.raises(TypeError, match="weakref"):
        pickle.dumps(fairscale.checkpoint_wrapper(made(nn.Linear, 2, 2)))


def test_hooks_run_outside_of_the_region(lib: Any) -> None:
    logs, results = [], []
    for wrap in (lib.checkpoint_wrapper, lambda m: m):
        module, log = wrap(made(Block, lib)), []
        module.register_forward_pre_hook(lambda m, args, log=log: log.append(("before", lib.is_recomputing())))
        module.register_forward_hook(
            lambda m, args, out, log=log: (log.append(("after", lib.is_recomputing())), out * 2)[1]
        )
        module.register_full_backward_hook(lambda m, to_in, to_out, log=log: log.append("backward"))
        results.append(step(module))
        logs.append(log)
    assert logs[0] == logs[1] == [("before", False), ("after", False), "backward"]
    assert_same(*results)


def test_forward_set_on_the_instance(lib: Any) -> None:
    """fairscale calls the `forward` of the class."""
    module = made(nn.Linear, 4, 4)
    module.forward = lambda x: (x * 3).sin().exp()
    assert torch.equal(lib.checkpoint_wrapper(module)(X), (X * 3).sin().exp()) != is_original(lib)


def test_wrapped_twice(lib: Any) -> None:
    module = lib.checkpoint_wrapper(lib.checkpoint_wrapper(made(Block, lib)))
    assert_same(step(module), step(made(Block, lib)))
    assert step(module) and RUNS == [FIRST, AGAIN]


def test_a_second_wrap_replaces_the_options() -> None:
    module = checkpoint_wrapper(made(), offload_to_cpu=True, policy=policies.everything_saveable)
    step(module)
    assert RUNS == [FIRST]
    step(checkpoint_wrapper(module))
    assert RUNS == [FIRST, AGAIN] and not vars(module)["_remat"].offload_inputs


def test_undo() -> None:
    module = remat.nn.undo(checkpoint_wrapper(made()))
    assert step(module) and RUNS == [NEITHER] and type(module) is Block


@pytest.mark.filterwarnings("ignore")
def test_modules_that_are_rejected(lib: Any) -> None:
    """fairscale wraps a container, without effect, and a lazy module; for TorchScript it fails to set the forward."""
    lazy, container, script = nn.LazyLinear(3), nn.ModuleList([nn.Tanh()]), torch.jit.trace(nn.Linear(4, 4), X.float())
    for module, text in ((lazy, "is lazy"), (container, "has no forward"), (script, "is TorchScript")):
        if not is_original(lib):
            with pytest.raises(TypeError, match=text):
                lib.checkpoint_wrapper(module)
        elif module is not script:
            assert lib.checkpoint_wrapper(module) is module
    with pytest.raises((TypeError, AttributeError)):
        lib.checkpoint_wrapper(torch.sin)


def test_everything_is_freed_without_cycles(lib: Any) -> None:
    module = lib.checkpoint_wrapper(made(Block, lib))
    step(module)
    assert leaked_bytes(step, module) == sum(p.nbytes for p in module.parameters())  # new gradients
    with assert_freed_without_gc() as watch:
        watch(module, *module.parameters())
        del module


def test_the_module_can_be_deleted_before_the_backward(lib: Any) -> None:
    module = lib.checkpoint_wrapper(made(Block, lib))
    weight, out = module.up.weight, module(X).square().sum()
    del module
    out.backward()
    assert_same(weight.grad, step(made(Block, lib))[0])


# --- policy -----------------------------------------------------------------------------------------------------------


def test_policy() -> None:
    def kept(policy: Any) -> int:
        module = checkpoint_wrapper(made(), policy=policy)
        assert_same(step(module), step(made()))
        return held_bytes(module, rand(64, 4))

    hidden = kept(policies.save_only_these_names("hidden")) - kept(None)
    assert hidden == 64 * 8 * 8
    assert kept([torch.ops.aten.tanh]) == kept(None) + hidden
    assert kept(policies.everything_saveable) == held_bytes(made(), rand(64, 4))
    with pytest.raises(PolicyError, match="dots"):
        checkpoint_wrapper(made(), policy="dots")
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, got builtin_function_or_method"):
        checkpoint_wrapper(torch.sin)  # type: ignore[type-var]


# --- offload_to_cpu ---------------------------------------------------------------------------------------------------


def test_offload_to_cpu(lib: Any) -> None:
    """On the CPU there is nothing to offload."""
    shift = rand(4, seed=3)
    for args in ((True,), (False,)):
        module, plain = lib.checkpoint_wrapper(made(Block, lib), *args), made(Block, lib)
        assert_same(step(module, X * 2, shift=shift), step(plain, X * 2, shift=shift))
        h = X * 2
        assert held_bytes(module, h) <= h.nbytes + 5200
    assert lib.checkpoint_wrapper(module, offload_to_cpu=True) is module


def is_alive(refs: list[weakref.ref]) -> list[bool]:
    return [ref() is not None for ref in refs]


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, more: dict, *, leaf: Tensor) -> Tensor:
        hidden = checkpoint_name(self.linear(x).sin(), "hidden")
        return (hidden * more["y"][0] * leaf * more["z"]).sin().exp()


@pytest.mark.parametrize("policy", [None, policies.save_only_these_names("hidden")])
def test_which_inputs_are_offloaded(far: Copies, policy: Any) -> None:
    """Computed tensors, also in containers, and constants; neither parameters nor other leaves that get gradients."""
    x, leaf, results = rand(5, 4), rand(5, 4, seed=1), []
    for offload in (True, False):
        module = checkpoint_wrapper(made(Tree), offload_to_cpu=offload, policy=policy)
        h, y, z = x * 2, leaf * 3, rand(5, 4, seed=2, grad=False)
        out = module(h, {"y": [y], "z": z}, leaf=leaf).sum()
        storages = [weakref.ref(t.untyped_storage()) for t in (h, y, z)]
        del h, y, z
        assert is_alive(storages) == [not offload] * 3
        assert (far.on_host(), far.on_device()) == (3 * offload, 0)
        results.append(torch.autograd.grad(out, [x, leaf, *module.parameters()]))
        assert sorted(far.taken()) == ([0, 1, 2] if offload else [])
        del out
        assert far.on_host() == far.on_device() == 0
    assert_same(*results)


def rows(count: int, offload: bool) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid()) for _ in range(count)]
    return nn.Sequential(*(checkpoint_wrapper(part.double(), offload_to_cpu=offload) for part in parts))


def test_modules_in_a_sequence(far: Copies) -> None:
    """Each input is copied out once and back once, the last one first; that of the region before a little earlier."""
    model, plain = rows(4, True), remat.nn.undo(rows(4, False))
    out = model(H).square().sum()
    assert far.on_host() == 4
    out.backward()
    assert_same([p.grad for p in model.parameters()], step(plain, H))
    assert sorted(far.taken()) == [0, 1, 2, 3] and len(far.out) == 4
    del out
    assert far.on_host() == far.on_device() == 0


def test_offloaded_inputs_may_be_changed(far: Copies) -> None:
    """They were copied when the region was called."""
    module, h = checkpoint_wrapper(made(), offload_to_cpu=True), X * 2
    out = module(h).square().sum()
    h.detach().zero_()
    out.backward()
    assert_same([p.grad for p in module.parameters()], step(made(), X * 2))


def test_offloaded_inputs_in_other_backwards(far: Copies) -> None:
    """A repeated backward, a double backward, and torch.autograd.grad."""
    results = []
    for module in (checkpoint_wrapper(made(), offload_to_cpu=True), made()):
        out = module(X * 2).square().sum()
        first = torch.autograd.grad(out, X, create_graph=True)[0]
        results.append((torch.autograd.grad(first.square().sum(), X, retain_graph=True), torch.autograd.grad(out, X)))
    assert_same(*results)
    del out, first
    assert far.on_host() == far.on_device() == 0


def test_surrounding_regions_and_hooks_save_the_inputs(far: Copies) -> None:
    """An outer region, torch's checkpoint and saved-tensor hooks handle the inputs in their own way."""
    module, plain = checkpoint_wrapper(made(), offload_to_cpu=True), made()

    def saved_on_cpu(module: nn.Module) -> Callable:
        def call(x: Tensor) -> Tensor:
            with torch.autograd.graph.save_on_cpu():
                return module(x * 2)

        return call

    contexts: list[Callable] = [
        lambda m: remat.remat(lambda x: m(x * 2)),
        lambda m: lambda x: checkpoint(lambda x: m(x * 2), x, use_reentrant=False),
        saved_on_cpu,
    ]
    for around in contexts:
        assert_same(*(torch.autograd.grad(around(m)(X).sum(), [X, *m.parameters()]) for m in (module, plain)))
    assert not far.out


def test_under_torch_func_nothing_is_offloaded(far: Copies) -> None:
    module, plain = checkpoint_wrapper(made(), offload_to_cpu=True), made()
    assert_same(*(torch.func.grad(lambda x, m=m: m(x).sum())(X.detach()) for m in (module, plain)))
    assert not far.out


def test_batch_norm_with_offloading(far: Copies) -> None:
    module, plain = checkpoint_wrapper(made(Norm), offload_to_cpu=True), made(Norm)
    for _ in range(3):
        assert_same(step(module, H * 2), step(plain, H * 2))
    assert_same(list(module.buffers()), list(plain.buffers()))
    assert len(far.out) == 3  # only the inputs


# --- on a device ------------------------------------------------------------------------------------------------------

MIB = 2**20


def on_device(offload: bool, count: int = 4) -> tuple[nn.Sequential, Tensor]:
    model = rows(count, offload).float().to(DEVICE)
    return model, rand(MIB // 16, 4, grad=False, dtype=torch.float32).to(DEVICE)


@pytest.mark.cuda
def test_offload_on_a_device() -> None:
    results = []
    for offload in (True, False):
        model, x = on_device(offload)
        for _ in range(2):
            results.append(step(model, x * 2))
    for other in results[1:]:
        assert_same(other, results[0])


@pytest.mark.cuda
def test_memory_of_a_device() -> None:
    kept = {}
    for offload in (True, False):
        model, x = on_device(offload, 8)
        step(model, x * 2)
        backend.synchronize()
        before = backend.memory_allocated()
        out = model(x * 2).sum()
        backend.synchronize()
        kept[offload] = backend.memory_allocated() - before
        out.backward()
        del out  # else the next `before` counts it
    assert kept[False] >= 8 * MIB > 2 * MIB >= kept[True]


@pytest.mark.cuda
def test_host_memory_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies(monkeypatch)
    model, x = on_device(True)
    out = model(x * 2).sum()
    hosts = [ref() for ref in copies.out]
    assert len(hosts) == 4 and all(host is not None and host.is_pinned() for host in hosts)
    out.backward()


# --- the documentation ------------------------------------------------------------------------------------------------

# The rows of the table in docs/how-to/migrating.md, each with its tests.
ROWS = {
    "`checkpoint_wrapper(module)`": ["test_wraps_in_place", "test_every_public_name_exists"],
    "`offload_to_cpu`": [
        "test_offload_to_cpu",
        "test_which_inputs_are_offloaded",
        "test_surrounding_regions_and_hooks_save_the_inputs",
        "test_under_torch_func_nothing_is_offloaded",
        "test_host_memory_is_pinned",
    ],
    "`policy`": ["test_policy"],
    "`is_checkpointing()`, `is_recomputing()`": ["test_is_checkpointing_and_is_recomputing"],
    "`disable_checkpointing()`": ["test_disable_checkpointing"],
    "`enable_checkpointing()`, `enable_recomputing()`": [
        "test_names_that_are_not_needed",
        "test_is_checkpointing_and_is_recomputing",
    ],
    "`patch_batchnorm(module)`": ["test_names_that_are_not_needed", "test_batch_norm_is_updated_once"],
    "keyword arguments": ["test_keyword_arguments"],
    "tensors in containers among the arguments": ["test_arguments_in_containers"],
    "results that aren't tensors": ["test_results_that_are_not_tensors"],
    "which results require grad": ["test_which_results_require_grad"],
    "batch norm": ["test_batch_norm_is_updated_once", "test_batch_norm_in_other_ways"],
    "hooks that it adds": ["test_batch_norm_is_updated_once"],
    "random numbers": ["test_random_numbers_are_those_of_the_first_run", "test_other_generators"],
    "autocast": ["test_autocast"],
    "`torch.autograd.grad`": ["test_autograd_grad"],
    "`backward(create_graph=True)`": ["test_double_backward"],
    "`retain_graph=True`, and backward again": ["test_repeated_backward"],
    "`torch.func`": ["test_under_torch_func"],
    "`torch.func.functional_call`": ["test_functional_call"],
    "inputs changed in place after the call": [
        "test_inputs_changed_after_the_call",
        "test_offloaded_inputs_may_be_changed",
    ],
    "calls without grad": ["test_without_grad_it_is_a_plain_call"],
    "`state_dict`, names, `isinstance`, `repr`": ["test_names_and_state_are_unchanged"],
    "`copy.deepcopy`": ["test_deepcopy"],
    "pickle, `torch.save` of the module": ["test_other_copies", "test_pickle_of_fairscale"],
    "hooks of the module": ["test_hooks_run_outside_of_the_region"],
    "a `forward` that was set on the module": ["test_forward_set_on_the_instance"],
    "wrapped twice": ["test_wrapped_twice", "test_a_second_wrap_replaces_the_options"],
    "reference cycle": ["test_everything_is_freed_without_cycles"],
    "the recompute": ["test_where_the_recompute_ends"],
    "containers (`ModuleList`), lazy modules": ["test_modules_that_are_rejected"],
    "TorchScript modules": ["test_modules_that_are_rejected"],
    "to undo it": ["test_undo"],
}


def test_each_row_of_the_documentation_has_its_tests() -> None:
    assert_rows_have_tests("Coming from fairscale", ROWS, "test_compat_wrapper.py")
