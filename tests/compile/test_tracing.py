"""Tracers inline regions: `make_fx`, `functionalize`, `torch.jit.trace` and `torch.export`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import plain
from compiled_programs import PROGRAMS, W, block, given
from torch import Tensor, nn
from torch.func import functionalize, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from remat import policies, remat

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

programs = pytest.mark.parametrize("make", [make for make, _ in PROGRAMS.values()], ids=PROGRAMS)
close = torch.testing.assert_close


def arguments(rows: int = 2) -> tuple[Tensor, Tensor]:
    return given(rows).detach(), W.clone()


def of_func(f: Callable) -> Callable:
    return grad(lambda x, w: f(x, w).sum(), argnums=(0, 1))


def per_sample(f: Callable) -> Callable:
    return vmap(grad(lambda x, w: f(x[None], w).sum(), argnums=(0, 1)), (0, None))


def of_autograd(f: Callable) -> Callable:
    def call(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        leaf = w.detach().requires_grad_()
        return torch.autograd.grad(f(x, leaf).sum(), leaf)

    return call


@pytest.mark.parametrize("mode", ["real", "symbolic"])
@pytest.mark.parametrize("take", [plain, of_func, per_sample, of_autograd])
@programs
def test_make_fx(make: Callable, take: Callable, mode: str) -> None:
    traced, unchanged = (make_fx(take(make(wrap)), tracing_mode=mode)(*arguments()) for wrap in (remat, plain))
    assert traced.code == unchanged.code  # so it recomputes nothing, and saves as much
    others = arguments(5 if mode == "symbolic" and take is not per_sample else 2)
    close(traced(*others), take(make(plain))(*others))


@pytest.mark.parametrize("remove", ["mutations", "mutations_and_views"])
@programs
def test_functionalize(make: Callable, remove: str) -> None:
    for take in (plain, of_func):
        close(functionalize(take(make(remat)), remove=remove)(*arguments()), take(make(plain))(*arguments()))


# A module, the shape of its arguments, and their number.
SCRIPTABLE: dict[str, tuple[Callable, tuple, int]] = {
    "statistics": (lambda: nn.BatchNorm1d(3), (4, 3), 1),
    "attention": (lambda: nn.MultiheadAttention(4, 2), (3, 2, 4), 3),
    "encoder": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), (3, 2, 4), 1),
}


@pytest.mark.parametrize("name", SCRIPTABLE)
@pytest.mark.parametrize("policy", [None, policies.save_matmuls], ids=str)
@pytest.mark.parametrize("around", [plain, remat], ids=["one", "nested"])
def test_jit_trace(name: str, policy: Any, around: Callable) -> None:
    """The trace (torch traces twice and compares) and the state after it are those of the plain function."""
    make, shape, count = SCRIPTABLE[name]
    ours, unchanged = make(), make()
    ours.load_state_dict(unchanged.state_dict())
    args, others = ([torch.randn(shape) for _ in range(count)] for _ in range(2))
    traced, expected = torch.jit.trace(around(remat(ours, policy=policy)), args), torch.jit.trace(unchanged, args)
    for a, b in zip(ours.buffers(), unchanged.buffers(), strict=True):
        assert torch.equal(a, b)
    kinds, of_plain = ([node.kind() for node in t.inlined_graph.nodes()] for t in (traced, expected))
    assert [k for k in kinds if k.startswith("aten")] == [k for k in of_plain if k.startswith("aten")]
    close(traced(*others), expected(*others))
    result = ours(*others)
    (result[0] if count > 1 else result).sum().backward()  # the regions still work
    assert all(p.grad is not None for p in ours.parameters())


class Model(nn.Module):
    def __init__(self, wrap: Callable) -> None:
        super().__init__()
        self.block = wrap(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 6)))
        self.head = wrap(block)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x), W)


# Dynamo of older versions fails at an attribute whose object has a `__get__`.
@pytest.mark.parametrize("strict", [False, True] if torch.__version__ >= (2, 13) else [False])
def test_an_exported_program_contains_no_regions(strict: bool) -> None:
    ours, unchanged = Model(remat), Model(plain)
    unchanged.load_state_dict(ours.state_dict())
    rows = {0: torch.export.Dim("rows", min=2)}
    program = torch.export.export(ours, arguments()[:1], strict=strict, dynamic_shapes=(rows,))
    for given_to in (program, program.run_decompositions()):
        x = torch.randn(5, 6)
        close(given_to.module()(x), unchanged(x))
    assert set(program.state_dict) == set(unchanged.state_dict())
    kinds = {str(n.target) for n in program.graph.nodes if n.op == "call_function"}
    assert kinds and all(kind.startswith("aten.") for kind in kinds), kinds
