"""Modules and tensors that change in a region or after it, in ways that are hard to see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import assert_same, rand
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

import remat.nn
from benchmarks.measure import PeakMemory, count_ops, gc_disabled
from remat import MutationError, policies
from remat import remat as rematerialized
from remat.compat import checkpoint, checkpoint_sequential

Wrap = Callable[[Any], Any]
WAYS: dict[str, Wrap] = {
    "no policy": rematerialized,
    "a policy": rematerialized(policy=policies.save_matmuls),
    "nested": lambda fn: rematerialized(rematerialized(fn)),
    "nested, with a policy": lambda fn: rematerialized(rematerialized(fn, policy=policies.save_matmuls)),
    "drop-in": lambda fn: lambda *args: checkpoint(fn, *args),
}
numbers = partial(rand, dtype=torch.float32)
every_way = pytest.mark.parametrize("wrap", WAYS.values(), ids=WAYS)


def same_as_plain(run: Callable[[Wrap], Any], wrap: Wrap) -> None:
    """`run` creates everything that it uses, and returns results."""
    results = []
    for each in (wrap, lambda fn: fn):
        torch.manual_seed(0)
        results.append((run(each), torch.rand(1)))
    assert_same(*results)


# --- statistics that change without a trace ---------------------------------------------------------------------------


def trained_then_used(x: Tensor, norm: nn.BatchNorm1d) -> Tensor:
    norm.train()
    y = norm(x)
    norm.eval()
    return norm(y.sin())


def updated_then_used(x: Tensor, norm: nn.BatchNorm1d) -> Tensor:
    norm.train()
    norm(x.detach())
    norm.eval()
    return norm(x).sin()


def read_after_an_update(x: Tensor, norm: nn.BatchNorm1d) -> Tensor:
    mean, var = norm.running_mean, norm.running_var
    F.batch_norm(x.detach(), mean, var, None, None, True, 0.5)
    return (x * mean + var * x.sin()).exp()


def through_data(x: Tensor, norm: nn.BatchNorm1d) -> Tensor:
    norm.running_mean.data.add_(1)
    return (x * norm.running_mean).exp() * norm.running_mean


@every_way
@pytest.mark.parametrize("fn", [trained_then_used, updated_then_used, read_after_an_update, through_data])
def test_statistics_that_are_read_after_their_update(fn: Callable, wrap: Wrap) -> None:
    def run(wrap: Wrap) -> tuple:
        norm, x = nn.BatchNorm1d(4), numbers(6, 4)
        out = wrap(lambda x: fn(x, norm))(x)
        return out, torch.autograd.grad(out.square().sum(), x)[0], norm.running_mean, norm.running_var

    same_as_plain(run, wrap)


@every_way
def test_statistics_that_are_passed(wrap: Wrap) -> None:
    def fn(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        F.batch_norm(x.detach(), mean, var, None, None, True, 0.5)
        return (x * mean).sin() + var

    def run(wrap: Wrap) -> tuple:
        x, mean, var = numbers(6, 4), torch.zeros(4), torch.ones(4)
        out = wrap(fn)(x, mean, var)
        return torch.autograd.grad(out.sum(), x)[0], mean, var

    same_as_plain(run, wrap)


# --- named members of modules ----------------------------------------------------------------------------------------


class MakesALayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer: nn.Linear | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.layer is None:
            self.layer = nn.Linear(4, 4)
        return F.dropout(self.layer(x)).tanh()


class MakesABuffer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.rand(4))
        return F.dropout(x * self.scale).sin()


class FillsABuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = torch.rand(4)
        return F.dropout(x * self.scale).sin()


class MakesEntries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.weights = nn.ModuleDict(), nn.ParameterDict()

    def forward(self, x: Tensor) -> Tensor:
        if "a" not in self.layers:
            self.layers["a"], self.weights["a"] = nn.Linear(4, 4), nn.Parameter(torch.rand(4))
        return F.dropout(self.layers["a"](x) * self.weights["a"]).sin()


@every_way
@pytest.mark.parametrize("cls", [MakesALayer, MakesABuffer, FillsABuffer, MakesEntries])
def test_members_made_in_the_first_call(cls: type[nn.Module], wrap: Wrap) -> None:
    def run(wrap: Wrap) -> tuple:
        module, x = cls(), numbers(3, 4)
        out = wrap(module)(x)
        held = [*module.parameters(), *module.buffers()]
        out.square().sum().backward()
        assert all(a is b for a, b in zip(held, [*module.parameters(), *module.buffers()], strict=True))
        return out, x.grad, [p.grad for p in module.parameters()], list(module.state_dict())

    same_as_plain(run, wrap)


@every_way
def test_layers_that_are_removed_or_added_between_forward_and_backward(wrap: Wrap) -> None:
    def run(wrap: Wrap) -> tuple:
        layers = [nn.Linear(4, 4) for _ in range(4)]
        model, x = nn.Sequential(*layers), numbers(3, 4)
        out = wrap(model)(x)
        del model[1]
        model.append(nn.Tanh())
        out.square().sum().backward()
        assert [type(layer) for layer in model] == [nn.Linear] * 3 + [nn.Tanh] and list(model._modules) == list("0123")
        return x.grad, [p.grad for layer in layers for p in layer.parameters()]

    same_as_plain(run, wrap)


@every_way
@pytest.mark.parametrize("frozen", [True, False])
def test_parameters_that_are_frozen_or_unfrozen_between_forward_and_backward(frozen: bool, wrap: Wrap) -> None:
    def run(wrap: Wrap) -> tuple:
        layer, x = nn.Linear(4, 4).requires_grad_(not frozen), numbers(3, 4)
        out = wrap(lambda x: (layer(x) * layer.bias).sin())(x)
        layer.requires_grad_(frozen)
        return torch.autograd.grad(out.sum(), x)

    same_as_plain(run, wrap)


# --- activations that modules store -----------------------------------------------------------------------------------


class Stores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.seen: Any = None
        self.list: list[Any] = []
        self.dict: dict[str, Any] = {}


class InAnAttribute(Stores):
    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).tanh()
        self.seen = h.square().mean()
        return h.sin()


class InAContainer(Stores):
    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).tanh()
        self.dict["seen"], self.list[:] = h.square().mean(), [h.exp().mean()]
        return h.sin()


@pytest.mark.parametrize("policy", [None, policies.save_matmuls], ids=["none", "matmuls"])
@pytest.mark.parametrize("cls", [InAnAttribute, InAContainer])
def test_stored_activations_do_not_accumulate(cls: type[Stores], policy: Any) -> None:
    module = cls()
    region = rematerialized(module, policy=policy)
    live = []
    with gc_disabled(), PeakMemory() as memory:
        for _ in range(12):
            region(torch.ones(64, 32)).sum().backward()
            module.zero_grad()
            live.append(memory.live)
    assert live[-1] == live[4] and live[-1] <= 8 * 64 * 32 * 4


class KeepsItsLast(nn.Module):
    """Stores its result, as feature extractors do. Nothing reads it."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.sin()
        return self.last


@every_way
@pytest.mark.parametrize(
    ("when", "transform"), [("inside", "none"), ("before", "none"), ("before", "grad"), ("before", "vmap")]
)
def test_activations_that_are_stored_under_vmap(when: str, transform: str, wrap: Wrap) -> None:
    """After `vmap` nothing can read them, and a later region must not either."""

    def run(wrap: Wrap) -> list[Tensor]:
        keeps, linear, x = KeepsItsLast(), nn.Linear(4, 4), numbers(3, 4)
        if when == "inside":
            region = wrap(lambda a: linear(vmap(keeps)(torch.stack([a, a.cos()])).sum(0)))
        else:
            vmap(keeps)(numbers(7, 3, 4))
            region = wrap(lambda a: linear(a) * len(vars(keeps)))

        def derivatives() -> list[Tensor]:
            if transform == "grad":
                return [grad(lambda a: region(a).sum())(x.detach())]
            if transform == "vmap":
                return list(torch.autograd.grad(vmap(region)(torch.stack([x, x.exp()])).sum(), (x, linear.weight)))
            return list(torch.autograd.grad(region(x).sum(), (x, linear.weight)))

        return [each for _ in range(3) for each in derivatives()]

    same_as_plain(run, wrap)


@every_way
def test_stored_activations_have_their_derivatives(wrap: Wrap) -> None:
    def run(wrap: Wrap) -> tuple:
        module, x = InAnAttribute(), numbers(3, 32)
        region, total = wrap(module), 0
        for _ in range(3):
            total = total + region(x).sum() + module.seen
        return torch.autograd.grad(total, [x, *module.parameters()])

    same_as_plain(run, wrap)


# --- inference tensors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("captured", [True, False])
def test_inference_tensors_that_change(captured: bool) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    with torch.inference_mode():
        cache = torch.randn(3, 4)

    def fn(x: Tensor, *given: Tensor) -> Tensor:
        return (layer(x) + (given[0] if given else cache)).sin()

    args = (x,) if captured else (x, cache)
    assert_same(torch.autograd.grad(rematerialized(fn)(*args).sum(), x), torch.autograd.grad(fn(*args).sum(), x))
    out = rematerialized(fn)(*args)
    with torch.inference_mode():
        cache.mul_(5)
    with pytest.raises(MutationError, match="changed in place"):
        out.sum().backward()


# --- wrappers that are created in each call ---------------------------------------------------------------------------


def wrapped(module: Any) -> Callable:
    def custom_forward(*inputs: Any) -> Any:
        return module(*inputs)

    return custom_forward


def calls_of(kind: str, module: Any, x: Tensor) -> Tensor:
    if kind == "sequential":
        return checkpoint_sequential([module, nn.Identity()], 2, x)
    return checkpoint(wrapped(module) if kind == "closure" else (lambda x: module(x)), x)


@pytest.mark.parametrize("kind", ["closure", "lambda", "sequential"])
def test_what_is_recorded_for_one_wrapped_module_does_not_affect_another(kind: str) -> None:
    modules = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)]
    x = torch.randn(4, 8, requires_grad=True)

    def step() -> None:
        h = x
        for module in modules:
            h = calls_of(kind, module, h)
        h.sum().backward()

    step()
    before = count_ops(step)
    calls_of(kind, lambda x: torch.func.grad(lambda y: (y**3).sum())(x), x).sum().backward()
    assert count_ops(step) == before


# --- torch.func and batched backward passes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cls, dims", [(nn.LSTM, (0, 0, None)), (nn.LSTM, (None, None, 0)), (nn.GRU, (0, 0, None))], ids=str
)
def test_recurrent_layers_in_per_sample_and_ensemble_gradients(cls: Any, dims: tuple) -> None:
    torch.manual_seed(0)
    models = [cls(4, 4) for _ in range(2)]
    params, buffers = stack_module_state(models)
    if dims[0] is None:
        params = {name: p[0] for name, p in params.items()}
    x = torch.randn(2, 3, 4)

    def gradients(model: nn.Module) -> Any:
        loss = lambda params, buffers, x: functional_call(model, (params, buffers), (x,))[0].sum()
        return vmap(grad(loss), dims)(params, buffers, x)

    actual = gradients(remat.nn.apply(cls(4, 4), cls))
    torch.testing.assert_close(actual, gradients(cls(4, 4)))


@every_way
def test_batched_backward_passes_of_random_regions(wrap: Wrap) -> None:
    def run(wrap: Wrap) -> Any:
        model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Tanh()), numbers(4)
        out = wrap(model)(x)
        (rows,) = torch.autograd.grad(out, x, torch.eye(4), is_grads_batched=True)
        return out, rows

    same_as_plain(run, wrap)


# --- FSDP -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    if not torch.distributed.is_available():
        pytest.skip("torch was built without it")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)).tanh()


class Model(nn.Module):
    def __init__(self, call: Callable) -> None:
        super().__init__()
        self.blocks, self.call = nn.ModuleList(Block() for _ in range(3)), call

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("call", [checkpoint, lambda block, x: rematerialized(lambda x: block(x).sin())(x)])
def test_regions_around_the_calls_of_sharded_blocks(call: Callable) -> None:
    """The hooks of FSDP, which swap the parameters, run inside the region, as with torch's checkpoint."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    plain = (lambda block, x: block(x)) if call is checkpoint else (lambda block, x: block(x).sin())
    trained = []
    for each in (call, plain):
        torch.manual_seed(0)
        model = Model(each)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for i in range(3):
            model(torch.ones(2, 8) * i).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append([p.full_tensor().detach() for p in model.parameters()])
    assert_same(*trained)


class Counting(nn.Module):
    """Its derivative reads a counter that each call changes; it also updates statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(x).sin() * self.calls.clone()


@every_way
@pytest.mark.parametrize("calls", [1, 3])
def test_buffers_that_change_before_a_backward_inside(calls: int, wrap: Wrap) -> None:
    """That backward recomputes the region in the middle of its first run, from the earlier buffers."""

    def run(wrap: Wrap) -> Any:
        layer, x = Counting(), numbers(3, 4)

        def f(x: Tensor) -> Tensor:
            y = x.detach().requires_grad_()
            (inside,) = torch.autograd.grad(layer(y).exp().sum(), y, create_graph=True)
            return layer(x) * inside.sin()

        f = wrap(f)
        found = []
        for _ in range(calls):
            out = f(x)
            found.append((out, torch.autograd.grad(out.exp().sum(), [x, *layer.parameters()])))
        return found, list(layer.buffers())

    same_as_plain(run, wrap)


@every_way
@pytest.mark.parametrize("policy", [None, policies.save_ops("aten.sin")])
def test_a_buffer_that_two_regions_change(policy: Any, wrap: Wrap) -> None:
    """One of them captures it without reading it, and one write doesn't change its value."""

    def run(wrap: Wrap) -> Any:
        layer, x = Counting(), numbers(3, 4)
        layer.register_buffer("mean", torch.zeros(4))

        def counted(x: Tensor) -> Tensor:
            layer.mean.mul_(0.9)
            return layer(x) + layer.mean.clone()

        inner = wrap(lambda x, first: x.sin() if first else counted(x).sin())

        def f(x: Tensor) -> Tensor:
            y = x.detach().requires_grad_()
            first = inner(y, True)
            (before,) = torch.autograd.grad(first.exp().sum(), y, create_graph=True)
            inside = y * inner(y, False)
            (inside,) = torch.autograd.grad((inside * before).sum(), y, create_graph=True)
            return counted(x) * inside.sin() + inner(x, False)

        f = rematerialized(f, policy=policy) if wrap is not plainly else f
        found = []
        for _ in range(3):
            out = f(x)
            found.append((out, torch.autograd.grad(out.exp().sum(), [x, *layer.parameters()])))
        return found, list(layer.buffers())

    def plainly(fn: Any) -> Any:
        return fn

    assert_same(run(wrap), run(plainly))
