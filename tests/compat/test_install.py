"""`compat.install`: regions where a program calls torch's checkpoint; and `compat.apply_activation_checkpointing`."""

from __future__ import annotations

import functools
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from cases import assert_same, rand
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import remat.nn
from benchmarks.measure import count_ops, held_bytes
from remat import PolicyError, RematWarning, compat, is_recomputing, policies

ORIGINAL = torch.utils.checkpoint.checkpoint
W = rand(8, 8, seed=1, grad=False)


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    yield
    compat.uninstall()
    assert torch.utils.checkpoint.checkpoint is ORIGINAL


@pytest.fixture
def library(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A module that has imported torch's function, and has a unique name."""
    name = f"a_library_of_{id(request.node)}"  # for one name Dynamo keeps using the first module
    module: Any = types.ModuleType(name)
    exec(
        "from torch.utils.checkpoint import checkpoint as ckpt\nimport torch.utils.checkpoint\n"
        "def by_name(f, *args, **kwargs): return ckpt(f, *args, **kwargs)\n"
        "def by_attribute(f, *args, **kwargs): return torch.utils.checkpoint.checkpoint(f, *args, **kwargs)\n",
        vars(module),
    )
    sys.modules[name] = module
    yield module
    del sys.modules[name]


def f(x: Tensor) -> Tensor:
    return (x @ W).sin().exp() @ W


def products(call: Callable, **options: Any) -> int:
    """The number of products in a forward and backward; the gradient is checked."""
    x = rand(4, 8)
    counts = count_ops(lambda: torch.autograd.grad(call(f, x, **options).sum(), x)[0])
    assert_same(torch.autograd.grad(call(f, x, **options).sum(), x), torch.autograd.grad(f(x).sum(), x))
    return counts["aten.mm"]


PLAIN, AGAIN = 4, 5  # the last product is never recomputed


@pytest.mark.parametrize("how", ["by_name", "by_attribute"])
def test_policy_and_uninstall(library: Any, how: str) -> None:
    call = getattr(library, how)
    assert compat.install(policy=policies.save_matmuls)
    assert products(call, use_reentrant=False) == PLAIN
    assert products(call, use_reentrant=True) == PLAIN  # treated as false
    assert products(call) == PLAIN
    with pytest.raises(ValueError, match="use_reentrant=True"):
        compat.checkpoint(f, rand(4, 8), use_reentrant=True)
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])
    assert products(call, use_reentrant=False, context_fn=contexts) == AGAIN  # its own policy
    compat.uninstall()
    assert library.ckpt is ORIGINAL
    assert products(call, use_reentrant=False) == AGAIN
    compat.uninstall()


def test_a_feature_that_only_regions_have(library: Any) -> None:
    """Torch's function raises under torch.func."""
    x = rand(4, 8, grad=False)
    loss = lambda x: library.by_name(f, x, use_reentrant=False).sum()
    with compat.install():
        assert_same(torch.func.grad(loss)(x), torch.func.grad(lambda x: f(x).sum())(x))
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(loss)(x)


def test_nested_installations(library: Any) -> None:
    with compat.install(policies.save_matmuls):
        with compat.install():
            assert products(library.by_name) == AGAIN
            inner = library.ckpt
        assert library.ckpt is not inner and products(library.by_name) == PLAIN
        with pytest.raises(PolicyError, match="dots"):
            compat.install("dots")
        assert products(library.by_name) == PLAIN
    assert library.ckpt is ORIGINAL is torch.utils.checkpoint.checkpoint
    first = compat.install(policies.save_matmuls)
    compat.install()
    with first:  # ended in another order
        pass
    assert products(library.by_name) == AGAIN


@pytest.mark.parametrize(
    "end", [lambda regions: regions.__exit__(None, None, None), lambda regions: compat.uninstall()]
)
def test_an_installation_that_is_entered_again(library: Any, end: Callable) -> None:
    """It is active again, and ends also after an exception."""
    regions = compat.install(policies.save_matmuls)
    for _ in range(2):
        end(regions)
        assert products(library.by_name, use_reentrant=False) == AGAIN
        with pytest.raises(KeyError), regions:
            assert products(library.by_name) == PLAIN
            raise KeyError
        assert library.ckpt is ORIGINAL


def test_sequential_and_wrappers_of_torch() -> None:
    runs: list[bool] = []

    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            runs.append(is_recomputing())
            return f(x)

    with compat.install():
        torch.utils.checkpoint.checkpoint_sequential(
            nn.Sequential(Block(), Block()), 2, rand(4, 8), use_reentrant=False
        ).sum().backward()
        assert runs == [False, False, True]
        runs.clear()
        torchs.checkpoint_wrapper(Block())(rand(4, 8)).sum().backward()
        assert runs == [False, True]


def test_a_module_that_is_imported_meanwhile() -> None:
    """It gets torch's function back, as all other modules do."""
    module: Any = types.ModuleType("imported_meanwhile")
    sys.modules["imported_meanwhile"] = module
    try:
        with compat.install(policies.save_matmuls):
            exec("from torch.utils.checkpoint import checkpoint", vars(module))
            assert products(module.checkpoint) == PLAIN
        assert module.checkpoint is ORIGINAL
    finally:
        del sys.modules["imported_meanwhile"]


def test_every_second_product_as_in_torchtitan() -> None:
    """A policy that counts, in torch's module wrapper: it saves as much as there, and no more."""

    def contexts() -> Any:
        count = {"first": 0, "again": 0}

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            run = "again" if ctx.is_recompute else "first"
            count[run] += op is torch.ops.aten.mm.default
            keep = op is torch.ops.aten.mm.default and count[run] % 2
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(4):
                x = (x @ W).sin()
            return x

    def figures() -> tuple[int, int]:
        module, x = torchs.checkpoint_wrapper(Block(), context_fn=contexts, preserve_rng_state=False), rand(4, 8)
        assert_same(torch.autograd.grad(module(x).sum(), x), torch.autograd.grad(Block()(x).sum(), x))
        counts = count_ops(lambda: torch.autograd.grad(module(x).sum(), x))
        return counts["aten.mm"], held_bytes(module, x)

    its_products, its_bytes = figures()
    with compat.install():
        products, held = figures()
    assert products == its_products == 4 + 2 + 4
    assert held <= its_bytes


def test_partials_from_before_are_not_reached() -> None:
    made_before = functools.partial(ORIGINAL, use_reentrant=False)
    with compat.install(policies.save_matmuls):
        assert products(made_before) == AGAIN


@pytest.mark.parametrize("installed", [False, True])
def test_compile(library: Any, installed: bool) -> None:
    """Dynamo treats the function under the public name as torch's, and must still see the policy."""
    torch._dynamo.reset()
    counts: list[int] = []

    def backward(graph: Any, _: Any) -> Any:
        counts.append(sum(node.target is torch.ops.aten.mm.default for node in graph.graph.nodes))
        return graph

    backend = aot_autograd(fw_compiler=lambda graph, _: graph, bw_compiler=backward)

    def step(call: Callable) -> Any:
        x = rand(4, 8)
        compiled = torch.compile(lambda x: call(f, x, use_reentrant=False).cos(), backend=backend, fullgraph=True)
        torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x), torch.autograd.grad(f(x).cos().sum(), x))

    if installed:
        compat.install(policies.save_matmuls)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RematWarning)  # no option is set
        step(library.by_name)
        step(library.by_attribute)
    step(functools.partial(compat.checkpoint, policy=policies.save_matmuls))
    if installed:
        compat.uninstall()
        torch._dynamo.reset()
        step(library.by_attribute)
        assert counts == [2, 2, 2, 4]
    else:
        assert counts == [4, 4, 2]


# --- apply_activation_checkpointing -----------------------------------------------------------------------------------


def model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Sequential(nn.Linear(8, 2))).double()


def is_block(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and len(module) == 3


def step(model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(model(X).square().sum(), list(model.parameters())))


X = rand(32, 8, grad=False)
WRAPPERS: dict[str, dict[str, Any]] = {
    "default": {},
    "torch's": {"checkpoint_wrapper_fn": torchs.checkpoint_wrapper},
    "partial": {
        "checkpoint_wrapper_fn": functools.partial(
            torchs.checkpoint_wrapper, checkpoint_impl=torchs.CheckpointImpl.NO_REENTRANT
        )
    },
    "own": {"checkpoint_wrapper_fn": compat.checkpoint_wrapper},
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_apply(kind: str) -> None:
    plain, ours, its = model(), model(), model()
    assert compat.apply_activation_checkpointing(ours, **WRAPPERS[kind], check_fn=is_block) is None
    torchs.apply_activation_checkpointing(its, check_fn=is_block)
    assert_same(step(ours), step(plain))
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert [n for n, m in ours.named_modules() if type(m) is not type(plain.get_submodule(n))] == ["0", "1", "2"]
    assert held_bytes(ours, X) <= held_bytes(its, X) < held_bytes(plain, X)
    assert count_ops(step, ours)["aten.addmm"] <= count_ops(step, its)["aten.addmm"]


def test_apply_with_a_policy() -> None:
    plain, ours = model(), model()
    compat.apply_activation_checkpointing(ours, check_fn=is_block, policy=policies.save_matmuls)
    assert_same(step(ours), step(plain))
    assert count_ops(step, ours)["aten.addmm"] == count_ops(step, plain)["aten.addmm"]


@pytest.mark.parametrize("choice", [{"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})},
                                    {"check_fn": lambda module: isinstance(module, nn.Linear)}])  # fmt: skip
def test_what_is_chosen(choice: dict) -> None:
    ours, its = model(), model()
    compat.apply_activation_checkpointing(ours, **choice)
    torchs.apply_activation_checkpointing(its, **choice)
    chosen = [n.replace("_checkpoint_wrapped_module.", "") for n, m in its.named_modules()
              if isinstance(m, torchs.CheckpointWrapper)]  # fmt: skip
    assert [n for n, m in ours.named_modules() if type(m) is not type(model().get_submodule(n))] == chosen
    assert_same(step(ours), step(model()))


def test_errors_of_apply() -> None:
    ours = model()
    other = functools.partial(torchs.checkpoint_wrapper, preserve_rng_state=False)
    wrong: list[tuple[dict, type, str]] = [
        ({"check_fn": lambda module: False}, ValueError, "chooses none"),
        ({"checkpoint_wrapper_fn": other}, ValueError, "no setting preserve_rng_state"),
        ({"checkpoint_wrapper_fn": lambda m: m, "policy": policies.save_matmuls}, ValueError, "to your own function"),
        ({"policy": "dots"}, PolicyError, "dots"),
    ]
    for options, kind, text in wrong:
        with pytest.raises(kind, match=text):
            compat.apply_activation_checkpointing(ours, **options)
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module"):
        compat.apply_activation_checkpointing(torch.sin)  # type: ignore[arg-type]
    assert [type(m) for m in ours.modules()] == [type(m) for m in model().modules()]
    remat.nn.undo(ours)


# --- imports of libraries ---------------------------------------------------------------------------------------------

LIBRARIES = "transformers", "peft", "accelerate", "lightning", "diffusers", "fairscale", "timm"


def test_no_library_is_imported_before_it_is_needed() -> None:
    code = """
import sys, remat
remat.integrations.transformers, remat.compat.install
print(*(name for name in sys.argv[1:] if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code, *LIBRARIES], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="needs transformers: `pip install transformers`"):
        remat.integrations.transformers.enable(nn.Linear(2, 2))
