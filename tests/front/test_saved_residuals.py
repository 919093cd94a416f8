"""`saved_residuals` lists exactly the saved tensors and their sources, and changes no state."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from careless import Careless, state_of
from cases import CASES, Case, cases, rand
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

from benchmarks.measure import gc_disabled, held_bytes
from remat import SavedResidual, checkpoint_name, policies, print_saved_residuals, remat, saved_residuals
from remat._core.amounts import size_text
from remat.nn import apply as nn_apply

POLICIES = {
    "none": None,
    "matmuls": policies.save_matmuls,
    "names": policies.save_only_these_names("q"),
    "everything": policies.everything_saveable,
}


def block(params: dict[str, Tensor], x: Tensor) -> Tensor:
    q = checkpoint_name(x @ params["wq"], "q")
    return torch.tanh(torch.sin(q) @ params["up"]) @ params["down"]


def block_args(grad: bool = True) -> tuple[dict[str, Tensor], Tensor]:
    params = {"wq": rand(3, 5, grad=grad), "up": rand(5, 7, grad=grad), "down": rand(7, 3, grad=grad)}
    return params, rand(2, 3, seed=1, grad=grad)


def sources(fn: Callable, *args: Any, **kwargs: Any) -> list[str]:
    """The sources of the saved tensors, without files and lines."""
    return sorted(row.source.partition(" at ")[0] for row in saved_residuals(fn, *args, inputs=True, **kwargs))


ARGUMENTS = ["argument params['down']", "argument params['up']", "argument params['wq']", "argument x"]
OWN = {
    "none": [],
    "matmuls": ["named 'q'", "output of aten.mm"],
    "names": ["named 'q'"],
    "everything": ["named 'q'", "output of aten.sin", "output of aten.tanh"],
}


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_rematerialized(policy: str, requires_grad: bool) -> None:
    assert sources(remat(block, policy=POLICIES[policy]), *block_args(requires_grad)) == ARGUMENTS + OWN[policy]


def test_a_plain_function_has_the_residuals_of_everything_saveable() -> None:
    args = block_args()
    assert saved_residuals(block, *args) == saved_residuals(remat(block, policy=policies.everything_saveable), *args)


def test_rows() -> None:
    row = next(r for r in saved_residuals(block, *block_args()) if "aten.tanh" in r.source)
    assert (row.shape, row.dtype, row.device, row.nbytes) == ((2, 7), torch.float64, torch.device("cpu"), 2 * 7 * 8)
    line = block.__code__.co_firstlineno + 2
    assert row.source == f"output of aten.tanh at {__file__}:{line} (block)"
    named = next(r for r in saved_residuals(block, *block_args()) if "named" in r.source)
    assert named.source == f"named 'q' at {__file__}:{line - 1} (block)"
    sizes = [r.nbytes for r in saved_residuals(block, *block_args())]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("policy", [policy for policy in POLICIES.values() if policy is not None])
@pytest.mark.parametrize("case", [c for c in CASES if c.name in {"mlp", "attention", "convolution", "layer_norm"}])
def test_bytes_are_those_that_are_alive(case: Case, policy: Any) -> None:
    args = case.make_args()
    rows = saved_residuals(remat(case.fn, policy=policy), *args)
    own = sum(row.nbytes for row in rows if not row.source.startswith(("argument", "captured")))

    def forward() -> Any:
        return torch.autograd.graph.get_gradient_edge(remat(case.fn, policy=policy)(*args).sum())

    held = held_bytes(forward)
    assert own <= held <= own + 64  # the sum may save a few bytes itself


@cases(stateful=False, random=False)
def test_every_case(case: Case) -> None:
    """It works for all cases. With `everything_saveable` a region saves no more than without remat."""
    plain = saved_residuals(case.fn, *case.make_args())
    everything = saved_residuals(remat(case.fn, policy=policies.everything_saveable), *case.make_args())
    given = ("argument", "captured")
    own = [[r for r in rows if not r.source.startswith(given)] for rows in (plain, everything)]
    assert sum(r.nbytes for r in own[1]) <= sum(r.nbytes for r in own[0])


# --- transforms -------------------------------------------------------------------------------------------------------


def test_vmap_shows_batches() -> None:
    params, _ = block_args()
    fn = vmap(remat(block, policy=policies.save_matmuls), in_dims=(None, 0))
    rows = saved_residuals(fn, params, rand(6, 3, seed=2))
    assert {row.shape for row in rows if "named" in row.source} == {(6, 5)}


def test_grad_inside() -> None:
    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return remat(block)(p, x).square().sum()

    with_remat, plain = (
        saved_residuals(grad(loss), *block_args(), inputs=True),
        saved_residuals(grad(lambda p, x: block(p, x).square().sum()), *block_args(), inputs=True),
    )
    assert {"argument p['wq']", "argument x"} <= {row.source for row in with_remat}
    assert sum(row.nbytes for row in with_remat) < sum(row.nbytes for row in plain)


def test_jvp_inside() -> None:
    assert "argument x" in sources(lambda x: jvp(remat(torch.sin), (x,), (x,))[1], rand(3))


def test_functional_call() -> None:
    net = nn.Linear(3, 3).double()
    params = {"weight": rand(3, 3), "bias": rand(3)}
    assert "argument p['weight']" in sources(lambda p, x: functional_call(net, p, (x,)), params, rand(2, 3))


def test_under_a_transform_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="Pass it the transformed function"):
        vmap(lambda x: saved_residuals(torch.sin, x) and x)(torch.ones(3))


# --- modules and captured tensors -------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.5))
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("big", torch.zeros(300, 100))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.big.add_(1)
        return self.layers(x) * self.scale + random.random()


@pytest.mark.parametrize("wrap", [lambda f: f, remat, lambda f: remat(f, policy=policies.save_matmuls)])
@pytest.mark.parametrize("bound", [False, True])
def test_nothing_is_changed(wrap: Callable, bound: bool) -> None:
    net = Net()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    generators = torch.get_rng_state(), random.getstate()
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    rows = saved_residuals(wrap(net.forward if bound else net), x, inputs=True)
    assert any(row.source == "captured self.scale" for row in rows)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert net.calls == 0
    assert all(p.grad is None for p in net.parameters())


def test_captured_of_a_plain_function() -> None:
    w = rand(3, 3)
    assert sources(lambda x: torch.sin(x @ w), rand(2, 3)) == [
        "argument x",
        "captured closure variable 'w'",
        "output of aten.mm",
    ]


def test_arguments_are_not_changed() -> None:
    x, y = rand(3), rand(3, seed=1, grad=False)

    def fn(x: Tensor, y: Tensor, *rest: Tensor, scale: Tensor) -> Tensor:
        y.add_(1)
        return x * y * scale * rest[1]

    before = y.clone()
    found = sources(fn, x, y, x, rand(3, seed=2), scale=rand(3, seed=3))
    assert {"argument y", "argument scale", "argument args[3]"} == {name for name in found if "argument" in name}
    assert torch.equal(y, before) and x.grad is None and x.requires_grad


def test_state_is_restored_after_an_error() -> None:
    counter = torch.zeros(3)

    def fails(x: Tensor) -> Tensor:
        counter.add_(1)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        saved_residuals(fails, rand(3))
    assert counter.sum() == 0
    y = rand(3).sin()  # no hook is left
    assert y.grad_fn._saved_self is not None


def test_nothing_stays_alive() -> None:
    fn = remat(block, policy=policies.save_matmuls)
    args = block_args()
    with gc_disabled():
        assert held_bytes(lambda: saved_residuals(fn, *args)) == 0
        assert held_bytes(lambda: saved_residuals(block, *args)) == 0


def test_print(capsys: pytest.CaptureFixture) -> None:
    fn = remat(block, policy=policies.save_only_these_names("q"))
    print_saved_residuals(fn, *block_args())
    row, total = capsys.readouterr().out.splitlines()
    line = block.__code__.co_firstlineno + 1
    assert row == f"float64[2, 5]  cpu  80 B  named 'q' at {__file__}:{line} (block)"
    assert total == "total: 80 B in 1 tensor, plus 616 B in 4 inputs"
    print_saved_residuals(fn, *block_args(), inputs=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "float64[5, 7]  cpu  280 B  argument params['up']"
    assert len(lines) == 6 and lines[-1] == total


# --- fields and groups ------------------------------------------------------------------------------------------------


def test_fields() -> None:
    rows = {row.name or row.op: row for row in saved_residuals(block, *block_args(), inputs=True)}
    first, cpu = block.__code__.co_firstlineno, torch.device("cpu")
    assert rows["q"] == SavedResidual(
        kind="named", op="aten.mm", name="q", file=__file__, line=first + 1, function="block", module=None,
        shape=(2, 5), dtype=torch.float64, device=cpu, nbytes=80,
    )  # fmt: skip
    assert rows["aten.tanh"] == SavedResidual(
        kind="output", op="aten.tanh", name=None, file=__file__, line=first + 2, function="block", module=None,
        shape=(2, 7), dtype=torch.float64, device=cpu, nbytes=112,
    )  # fmt: skip
    assert rows["params['up']"] == SavedResidual(
        kind="argument", op=None, name="params['up']", file=None, line=None, function=None, module=None,
        shape=(5, 7), dtype=torch.float64, device=cpu, nbytes=280,
    )  # fmt: skip
    assert str(rows["q"]) == f"float64[2, 5] on cpu, 80 B: named 'q' at {__file__}:{first + 1} (block)"


def encoder() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), rand(2, 16, 64, grad=False).float()


def printed(capsys: pytest.CaptureFixture, fn: Callable, *args: Any, **kwargs: Any) -> list[str]:
    print_saved_residuals(fn, *args, **kwargs)
    return [line.partition(f" at {__file__}")[0] for line in capsys.readouterr().out.splitlines()]


def test_layers_of_a_model_are_printed_in_groups(capsys: pytest.CaptureFixture) -> None:
    model, x = encoder()
    nn_apply(model, nn.TransformerEncoderLayer)
    assert printed(capsys, model, x) == [
        "float32[2, 16, 64]  cpu  8 KiB  x3  output of aten.native_layer_norm",
        "total: 24 KiB in 3 tensors, plus 531 KiB in 49 inputs",
    ]
    rows = saved_residuals(model, x)
    assert [row.module for row in rows] == ["layers.0.norm2", "layers.1.norm2", "layers.2.norm2"]
    assert len(printed(capsys, model, x, inputs=True)) == 15
    nn_apply(model, nn.TransformerEncoderLayer, policy=policies.save_matmuls)
    assert printed(capsys, model, x)[:2] == [
        "float32[32, 192]    cpu  24 KiB  x4  output of aten.mm",
        "float32[32, 128]    cpu  16 KiB  x4  output of aten.addmm",
    ]
    modules = {row.module for row in saved_residuals(model, x)}
    assert {"layers.3.self_attn", "layers.0.linear1"} <= modules


@pytest.mark.parametrize("wrap", [lambda f: f, remat], ids=["plain", "remat"])
def test_modules_have_the_names_that_the_function_uses(wrap: Callable) -> None:
    model, x = encoder()
    everything = {"policy": policies.everything_saveable} if wrap is remat else {}
    named = {row.module for row in saved_residuals(wrap(lambda x: model(x).sin().sin(), **everything), x)}
    assert {"model.layers.2.norm1", None} <= named
    assert {row.module for row in saved_residuals(wrap(model.layers[0].norm1, **everything), x)} == {"LayerNorm"}

    class Trainer:
        def __init__(self) -> None:
            self.model = model

        def loss(self, x: Tensor) -> Tensor:
            return self.model(x).sin()

    modules = {row.module for row in saved_residuals(wrap(Trainer().loss, **everything), x)}
    assert "model.layers.1.norm2" in modules

    class Hidden:
        made = model.layers[0].norm1

    rows = saved_residuals(lambda x: Hidden.made(x), x)
    assert {(row.kind, row.module) for row in rows} == {("output", "LayerNorm"), ("constant", None)}


def test_only_numbered_layers_are_in_a_group(capsys: pytest.CaptureFixture) -> None:
    x = rand(2, 4).float()
    assert printed(capsys, nn.Sequential(nn.Tanh(), nn.Linear(4, 4), nn.Tanh()), x) == [
        "float32[2, 4]  cpu  32 B  x2  output of aten.tanh",
        "total: 64 B in 2 tensors, plus 64 B in 1 input",
    ]

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tanh1, self.tanh2 = nn.Tanh(), nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.tanh2(self.tanh1(x))

    print_saved_residuals(Two(), x)
    modules = [line.rpartition(", in ")[2] for line in capsys.readouterr().out.splitlines()]
    assert modules[:2] == ["tanh1", "tanh2"]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (2**20 - 1, "1 MiB"), (3 * 2**30, "3 GiB")],
)
def test_sizes_are_easy_to_read(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text


# --- nothing is changed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_changes_of_a_program_are_undone(fails: bool) -> None:
    net = Careless()
    before, weight = state_of(net), net.weight
    with pytest.raises(ValueError, match="mine") if fails else nullcontext():
        assert saved_residuals(net, torch.ones(2, 3), fails)
    assert state_of(net) == before
    assert net.weight is weight
    net.weight.grad = given = torch.ones(3)
    with suppress(ValueError):
        saved_residuals(net, torch.ones(2, 3), fails)
    assert net.weight.grad is given and given.tolist() == [1, 1, 1]


def test_an_earlier_graph_is_not_freed() -> None:
    w = rand(3)
    h = w.exp()
    assert saved_residuals(lambda x: (x * h).sin(), rand(3))
    torch.autograd.grad(h.sum(), w)
