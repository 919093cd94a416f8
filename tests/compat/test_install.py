"""`compat.install`: regions where a program calls torch's checkpoint; and `compat.apply_activation_checkpointing`."""

import functools
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from cases import OldSquare, assert_same, rand, run_program
from comparison import checkpoints_in_graph
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import remat.nn
from benchmarks.measure import count_ops, held_bytes
from remat import PolicyError, RematWarning, compat, is_recomputing, policies

pytestmark = pytest.mark.filterwarnings("ignore:The policy .* has matched none:UserWarning")
ORIGINAL = torch.utils.checkpoint.checkpoint
W = rand(8, 8, seed=1, grad=False)
PLAIN, AGAIN = 4, 5  # the number of products in `f` and its derivative; the last one is never recomputed


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    yield
    compat.uninstall()
    assert torch.utils.checkpoint.checkpoint is ORIGINAL


@pytest.fixture
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that has imported torch's function, and has a unique name."""
    name = f"a_library_of_{id(request.node)}"  # for one name Dynamo keeps using the first module
    module: Any = types.ModuleType(name)
    exec(
        "from torch.utils.checkpoint import checkpoint as ckpt\nimport torch.utils.checkpoint\n"
        "def by_name(f, *args, **kwargs): return ckpt(f, *args, **kwargs)\n"
        "def by_attribute(f, *args, **kwargs): return torch.utils.checkpoint.checkpoint(f, *args, **kwargs)\n",
        vars(module),
    )
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, f"{name}.blocked", None)  # a module that can't be imported
    return module


def f(x: Tensor) -> Tensor:
    return (x @ W).sin().exp() @ W


def products(call: Callable, **options: Any) -> int:
    """The number of products in a forward and backward; the gradient is checked."""
    x = rand(4, 8)
    counts = count_ops(lambda: torch.autograd.grad(call(f, x, **options).sum(), x)[0])
    assert_same(torch.autograd.grad(call(f, x, **options).sum(), x), torch.autograd.grad(f(x).sum(), x))
    return counts["aten.mm"]


@pytest.mark.parametrize("how", ["by_name", "by_attribute"])
def test_calls_of_torchs_function_are_regions_until_uninstall(library: Any, how: str) -> None:
    call = getattr(library, how)
    assert compat.install(policy=policies.save_matmuls)
    for options in ({"use_reentrant": False}, {"use_reentrant": True}, {}):  # true is treated as false
        assert products(call, **options) == PLAIN
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])
    assert products(call, use_reentrant=False, context_fn=contexts) == AGAIN  # its own policy
    assert products(call, policy=["aten.sin"]) == AGAIN
    x = rand(4, 8, grad=False)
    loss = lambda x: call(f, x, use_reentrant=False).sum()
    assert_same(torch.func.grad(loss)(x), torch.func.grad(lambda x: f(x).sum())(x))
    compat.uninstall()
    assert library.ckpt is ORIGINAL
    assert products(call, use_reentrant=False) == AGAIN
    with pytest.raises(RuntimeError, match="saved tensor hooks"):  # torch's function raises under torch.func
        torch.func.grad(loss)(x)
    compat.uninstall()


def test_the_last_installation_counts_and_its_end_restores_the_one_before(library: Any) -> None:
    with compat.install(policies.save_matmuls):
        with compat.install():
            assert products(library.by_name) == AGAIN
            inner = library.ckpt
        assert library.ckpt is not inner and products(library.by_name) == PLAIN
        with pytest.raises(PolicyError, match="dots"):
            compat.install("dots")
        assert products(library.by_name) == PLAIN
    assert library.ckpt is ORIGINAL is torch.utils.checkpoint.checkpoint


def test_torchs_own_functions_call_regions() -> None:
    runs: list[bool] = []
    fn = lambda x: (runs.append(is_recomputing()), x.sin().exp())[1]
    module = nn.Tanh()
    module.forward = fn
    with compat.install():
        torch.utils.checkpoint.checkpoint_sequential([fn, fn], 2, rand(3), use_reentrant=False).sum().backward()
        torchs.checkpoint_wrapper(module)(rand(3)).sum().backward()
    assert runs == [False, False, True, False, True]


def test_a_module_that_is_imported_meanwhile_gets_torchs_function_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A partial from before is not reached."""
    module: Any = types.ModuleType("imported_meanwhile")
    monkeypatch.setitem(sys.modules, "imported_meanwhile", module)
    made_before = functools.partial(ORIGINAL, use_reentrant=False)
    with compat.install(policies.save_matmuls):
        exec("from torch.utils.checkpoint import checkpoint", vars(module))
        assert (products(module.checkpoint), products(made_before)) == (PLAIN, AGAIN)
    assert module.checkpoint is ORIGINAL


MODULE = nn.Sequential(nn.Tanh(), nn.Softplus())
MADE_BEFORE = functools.partial(torch.add, other=1.0, alpha=3)
CALLED: dict[str, Callable] = {
    "function": lambda call, x: call(f, x),
    "partial": lambda call, x: call(functools.partial(f), x),
    "partial made before": lambda call, x: call(MADE_BEFORE, x.sin()),
    "module": lambda call, x: call(MODULE, x),
    "method": lambda call, x: call(MODULE.forward, x),
    "autograd function": lambda call, x: call(OldSquare.apply, x, 3.0),
    "method of a tensor": lambda call, x: call(x.mul, x),
}
SAVED = [("function", ["aten.sin"]), ("partial", ["aten.sin"]), ("module", ["aten.tanh"])]


@pytest.mark.parametrize("called, policy", [*((name, None) for name in CALLED), *SAVED])
def test_an_installed_checkpoint_of_any_callable_compiles(library: Any, called: str, policy: Any) -> None:
    """Dynamo treats the function under the public name as torch's, and must still see the policy."""
    for call in (library.by_name, library.by_attribute)[: 2 if called == "function" else 1]:
        with compat.install(policy), warnings.catch_warnings():
            warnings.simplefilter("error", RematWarning)  # no option is set
            fn = lambda x: CALLED[called](functools.partial(call, use_reentrant=False), x)
            assert checkpoints_in_graph(fn, rand(4, 8)) == [policy is not None]


def model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Sequential(nn.Linear(8, 2))).double()


is_block = lambda module: isinstance(module, nn.Sequential) and len(module) == 3
step = lambda model: torch.autograd.grad(model(X).square().sum(), list(model.parameters()))
changed = lambda ours: [n for n, m in ours.named_modules() if type(m) is not type(model().get_submodule(n))]
X = rand(32, 8, grad=False)
NO_REENTRANT = functools.partial(torchs.checkpoint_wrapper, checkpoint_impl=torchs.CheckpointImpl.NO_REENTRANT)
WRAPPERS = torchs.checkpoint_wrapper, NO_REENTRANT, compat.checkpoint_wrapper
CHOICES: list[dict] = [
    {"check_fn": is_block},
    {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})},
    {},
    {"check_fn": lambda module: isinstance(module, nn.Linear)},
]


@pytest.mark.parametrize(
    ("choice", "options"),
    [*((each, {}) for each in CHOICES), *((CHOICES[0], {"checkpoint_wrapper_fn": wrapper}) for wrapper in WRAPPERS)],
)
def test_the_submodules_that_torchs_function_chooses_become_regions(choice: dict, options: dict) -> None:
    plain, ours, its = model(), model(), model()
    assert compat.apply_activation_checkpointing(ours, **choice, **options) is None
    torchs.apply_activation_checkpointing(its, **choice)
    chosen = [n for n, m in its.named_modules() if isinstance(m, torchs.CheckpointWrapper)]
    assert changed(ours) == [n.replace("_checkpoint_wrapped_module.", "") for n in chosen]
    assert_same(step(ours), step(plain))
    assert list(ours.state_dict()) == list(plain.state_dict())
    if choice is CHOICES[0]:
        assert held_bytes(ours, X) <= held_bytes(its, X) < held_bytes(plain, X)
        assert count_ops(step, ours)["aten.addmm"] <= count_ops(step, its)["aten.addmm"]


def test_the_submodules_take_a_policy() -> None:
    plain, ours = model(), model()
    compat.apply_activation_checkpointing(ours, check_fn=is_block, policy=policies.save_matmuls)
    assert_same(step(ours), step(plain))
    assert count_ops(step, ours)["aten.addmm"] == count_ops(step, plain)["aten.addmm"]


OTHER = functools.partial(torchs.checkpoint_wrapper, preserve_rng_state=False)
ERRORS: list[tuple[dict, type, str]] = [
    ({"check_fn": lambda module: False}, ValueError, "chooses none"),
    ({"checkpoint_wrapper_fn": OTHER}, ValueError, r"no setting preserve_rng_state.*remat\.nn\.apply"),
    ({"checkpoint_wrapper_fn": lambda m: m, "policy": policies.save_matmuls}, ValueError, "to your own function"),
    ({"policy": "dots"}, PolicyError, "dots"),
    ({"model": torch.sin}, TypeError, r"takes a torch\.nn\.Module"),
]


@pytest.mark.parametrize("options, kind, text", ERRORS)
def test_errors_of_apply_activation_checkpointing(options: dict, kind: type, text: str) -> None:
    ours = model()
    with pytest.raises(kind, match=text):
        compat.apply_activation_checkpointing(**{"model": ours, **options})
    assert changed(ours) == []


def test_no_library_is_imported_before_it_is_needed() -> None:
    names = {"transformers", "peft", "accelerate", "lightning", "diffusers", "fairscale", "timm"}
    code = "import sys, remat; remat.integrations.transformers, remat.compat.install; print(*sys.modules)"
    assert names.isdisjoint(run_program(code).split())


def test_a_library_that_is_missing_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="needs transformers: `pip install transformers`"):
        remat.integrations.transformers.enable(nn.Linear(2, 2))
