"""Known behaviour of torch's checkpoint, fairscale and JAX that the other files here don't test."""

from __future__ import annotations

import functools
import traceback
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.utils._pytree as torch_pytree
from cases import assert_same, rand
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vmap
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from benchmarks.measure import OpCounter, PeakMemory, count_ops, gc_disabled, held_bytes
from remat import checkpoint_name, compat, policies, remat, saved_residuals

pytestmark = pytest.mark.filterwarnings("ignore:The policy .* has matched none:UserWarning")

POLICIES = [None, policies.save_ops("aten.sin", "aten.mm"), policies.everything_saveable]
EARLY = [True, False]

with_policies = pytest.mark.parametrize("policy", POLICIES, ids=str)


def region(fn: Callable, **options: Any) -> Callable:
    """A region whose records are new in each call, as torch's function has none."""
    return lambda *args, **kwargs: compat.checkpoint(functools.partial(fn, **kwargs), *args, **options)


def counted(fn: Callable) -> tuple[Callable, list[int]]:
    """The function, and the number of its calls."""
    calls: list[int] = [0]

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        calls[0] += 1
        return fn(*args)

    return call, calls


# --- torch: regions within derivatives within regions -----------------------------------------------------------------


def derivative(fn: Callable) -> Callable:
    """The derivative by autograd, which can be differentiated again."""

    def call(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return torch.autograd.grad(fn(x).sum(), x, create_graph=True)[0]

    return call


def chain(x: Tensor) -> Tensor:
    return x.sin().exp().sin()


def backward_inside(x: Tensor) -> Tensor:
    """Backward passes whose results aren't used."""
    for _ in range(2):
        torch.autograd.grad(chain(x).sum(), x)
    return x.sin()


def second(x: Tensor) -> Tensor:
    return x.cos().sin().exp()


d = derivative
NESTED: dict[str, Callable[[Callable, Callable], Callable]] = {
    "c": lambda c, f: c(f),
    "c c": lambda c, f: c(c(f)),
    "d c": lambda c, f: d(c(f)),
    "d c c": lambda c, f: d(c(c(f))),
    "d c d": lambda c, f: d(c(d(f))),
    "c d d c": lambda c, f: c(d(d(c(f)))),
    "d c d c": lambda c, f: d(c(d(c(f)))),
    "d c d d c": lambda c, f: d(c(d(d(c(f))))),
    "d c d c d c": lambda c, f: d(c(d(c(d(c(f)))))),
    "d d c(c c)": lambda c, f: d(d(c(lambda x: c(second)(c(f)(x))))),
    "d c(d c cos)": lambda c, f: d(c(lambda x: d(c(f))(x.cos()).cos())),
    "d c d c(c c)": lambda c, f: d(c(d(c(lambda x: c(second)(c(f)(x)))))),
}


def nodes(tensor: Tensor) -> Iterator[Any]:
    seen, found = set(), [tensor.grad_fn]
    while found:
        node = found.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found.extend(next_node for next_node, _ in node.next_functions)
            yield node


class Mark:
    """Lives as long as the node that it is attached to."""


@pytest.mark.parametrize("early_stop", EARLY)
@pytest.mark.parametrize("fn", [chain, backward_inside])
@pytest.mark.parametrize("nested", NESTED)
@pytest.mark.parametrize("policy", POLICIES[:2], ids=str)
def test_nested_derivatives(policy: Any, nested: str, fn: Callable, early_stop: bool) -> None:
    """They are correct to the third order, and their graphs are freed without the garbage collector."""
    build, x = NESTED[nested], rand(3)
    wrapped = build(lambda f: remat(f, policy=policy, early_stop=early_stop), fn)
    assert_same(wrapped(x).detach(), build(lambda f: f, fn)(x).detach(), exact=False)
    with gc_disabled():
        out = wrapped(x)
        marks = []
        for node in nodes(out):
            node.metadata["mark"] = mark = Mark()
            marks.append(weakref.ref(mark))
        assert marks
        del out, node, mark
        assert [mark() for mark in marks if mark() is not None] == []


def unused_before(x: Tensor) -> Tensor:
    torch.autograd.grad(x.sin().exp().sum(), x)
    return x.sin().cos().exp()


def used(x: Tensor) -> Tensor:
    return torch.autograd.grad(x.sin().exp().sum(), x)[0] * x.sin().cos()


@pytest.mark.parametrize("fn", [unused_before, used])
@pytest.mark.parametrize("inner", POLICIES, ids=str)
def test_a_backward_in_an_inner_region(inner: Any, fn: Callable) -> None:
    """It recomputes that region in its own first run, whose operations are not part of the outer region."""

    def of(outer: Callable, inner: Callable) -> Callable:
        return derivative(outer(lambda x: derivative(inner(fn))(x.cos())))

    x = rand(3)
    region = of(lambda f: remat(f, policy=POLICIES[1]), lambda f: remat(f, policy=inner))
    assert_same(region(x), of(lambda f: f, lambda f: f)(x), exact=False)


# --- torch: hooks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("early_stop", EARLY)
@with_policies
def test_a_hook_on_a_node_of_the_forward(policy: Any, early_stop: bool) -> None:
    """The hook is called once: the recompute has its own nodes."""
    calls: list[Any] = []
    x = rand(3)
    out = remat(lambda x: x.sin().cos().sin(), policy=policy, early_stop=early_stop)(x)
    out.grad_fn.next_functions[0][0].register_hook(lambda *_: calls.append(1))
    out.sum().backward()
    assert len(calls) == 1


@with_policies
def test_a_hook_on_a_tensor_used_inside_and_outside(policy: Any) -> None:
    w, x = rand(3, 3), rand(3, 3, seed=1)
    calls: list[Tensor] = []
    w.register_hook(calls.append)
    remat(lambda x: (w * x).sin(), policy=policy)(w * x).sum().backward()
    plain = w.detach().requires_grad_()
    (plain * (plain * x.detach())).sin().sum().backward()
    assert len(calls) == 1
    assert_same(calls[0], plain.grad)


@pytest.mark.parametrize("early_stop", EARLY)
@with_policies
def test_a_backward_in_a_hook(policy: Any, early_stop: bool) -> None:
    """A backward of another part of the same region, while the backward of the whole runs."""

    def step(wrap: Callable) -> Tensor:
        a = rand(3)
        x, out = wrap(lambda a: (a.sin().cos(), a.sin().cos().sin()))(a)
        out.grad_fn.register_hook(lambda *_: x.backward(torch.ones_like(x), retain_graph=True))
        out.sum().backward(retain_graph=True)
        return a.grad

    assert_same(step(lambda f: remat(f, policy=policy, early_stop=early_stop)), step(lambda f: f))


# --- torch: what is saved ---------------------------------------------------------------------------------------------


def test_reading_a_saved_tensor_of_a_node() -> None:
    """Outside of a backward each read recomputes, and saves nothing. After the backward it raises."""
    fn, calls = counted(lambda a: (a * a * a, a.exp())[1])
    a = rand(5)
    out = remat(fn)(a)
    for looks in (1, 2):
        assert_same(out.grad_fn._saved_result.detach(), a.detach().exp())
        assert calls == [1 + looks]
    out.sum().backward()
    assert calls == [4]
    with pytest.raises(RuntimeError, match="already been freed"):
        _ = out.grad_fn._saved_result
    assert calls == [4]


def test_a_saved_input_is_the_same_object() -> None:
    found: list[Tensor] = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            ctx.save_for_backward(y)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            found.extend(ctx.saved_tensors)
            return grad, None

    x, y = rand(3), rand(3, grad=False)
    for policy in POLICIES:
        remat(Keeps.apply, policy=policy)(x, y).sum().backward()
    assert len(found) == len(POLICIES) and all(each is y for each in found)


@pytest.mark.parametrize("retain", [False, True])
def test_values_are_freed_one_by_one(retain: bool) -> None:
    """As the backward runs through a region, values that have been read are freed, also if the graph is retained."""

    def live(fn: Callable, memory: PeakMemory) -> list[int]:
        found: list[int] = []

        def steps(x: Tensor) -> Tensor:
            for _ in range(4):
                x = x.square()
                x.register_hook(lambda _: found.append(memory.live))
            return x.sum()

        fn(steps)(x).backward(retain_graph=retain)
        return found

    x = rand(1000)
    x.grad = torch.zeros_like(x)
    found = {}
    with gc_disabled():
        for name, wrap in {"plain": lambda f: f, "torch": region_of_torch, "remat": remat}.items():
            with PeakMemory() as memory:
                found[name] = live(wrap, memory)
    ours, its = found["remat"], found["torch"]
    assert len(ours) == 4 and ours[0] == its[0] < ours[3]  # the first hook runs before the recompute
    assert ours[1] > ours[2] > ours[3]
    # A node of a retained graph may read its value again, so the value is released when another node reads its own.
    assert all(a <= b + retain * x.nbytes for a, b in zip(ours, its, strict=True))


def region_of_torch(fn: Callable) -> Callable:
    return lambda *args: torch_checkpoint(fn, *args, use_reentrant=False)


def test_saved_values_are_freed_with_the_graph() -> None:
    """Also if no backward runs."""
    x, w = rand(4, 4), rand(4, 4, seed=1)
    f = remat(lambda x: (x @ w).sin().exp(), policy=policies.save_matmuls)
    f(x)
    with gc_disabled(), PeakMemory() as memory:
        out = f(x)
        assert memory.live == 2 * out.nbytes
        del out
        assert memory.live == 0


# --- torch: selective -------------------------------------------------------------------------------------------------


def test_a_saved_view_of_integers() -> None:
    indices, x = torch.tensor([1, 2, 3]), rand(3)
    f = remat(lambda i, x: (i.view(-1), x.sin().cos()), policy=["aten.view"])
    out = f(indices, x)
    assert out[0].data_ptr() == indices.data_ptr() and not out[0].requires_grad
    assert_same(torch.autograd.grad(out[1].sum(), x)[0], torch.autograd.grad(x.sin().cos().sum(), x)[0])


def test_an_operator_with_two_results() -> None:
    def fn(x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x)
        return (variance * mean).sin()

    x = rand(5)
    f = remat(fn, policy=policies.save_ops("aten.var_mean"))
    ops = count_ops(lambda: torch.autograd.grad(f(x), x))
    assert ops["aten.var_mean"] == 1
    assert_same(torch.autograd.grad(f(x), x), torch.autograd.grad(fn(x), x))


runs: list[int] = []


@torch.library.custom_op("remat_peers::sin_and_number", mutates_args=())
def sin_and_number(x: Tensor) -> tuple[Tensor, int]:
    runs.append(1)
    return x.sin(), 2


sin_and_number.register_autograd(
    lambda ctx, grad, _: grad * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@pytest.mark.parametrize("policy", [None, policies.save_ops(sin_and_number)], ids=str)
def test_an_operator_with_a_number_among_its_results(policy: Any) -> None:
    def fn(x: Tensor) -> Tensor:
        y, number = sin_and_number(x)
        return (y * number * x.sin().exp()).sin()

    x = rand(5)
    expected = torch.autograd.grad(fn(x).sum(), x)
    runs.clear()
    assert_same(torch.autograd.grad(remat(fn, policy=policy)(x).sum(), x), expected)
    assert len(runs) == (2 if policy is None else 1)


class Sized(torch.Tensor):
    """A wrapper with its own dispatch of sizes."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device,
            requires_grad=inner.requires_grad, dispatch_sizes_strides_policy="sizes",
        )  # fmt: skip
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = torch.utils._pytree.tree_map_only(cls, lambda x: x.inner, args)
        found = func(*inner, **(kwargs or {}))
        return torch.utils._pytree.tree_map_only(Tensor, cls, found)


def asks_for_sizes(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return op is torch.ops.aten.sym_size.default


@pytest.mark.parametrize("policy", [*POLICIES, policies.save_if(asks_for_sizes), ["aten.view"]],
                         ids=str)  # fmt: skip
def test_a_subclass_with_its_own_sizes(policy: Any) -> None:
    def fn(x: Tensor) -> Tensor:
        y = (x * x.sum()).view(-1).view(4, 3)
        assert y.grad_fn is None or tuple(y.grad_fn._saved_self_sym_sizes) == (12,)
        return y.exp()

    x, plain = Sized(rand(4, 3, grad=False)).requires_grad_(), rand(4, 3)
    found = torch.autograd.grad(remat(fn, policy=policy)(x).sum(), x)[0]
    assert_same(found.inner, torch.autograd.grad(fn(plain).sum(), plain)[0])


# --- torch: calls -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requires_grad", [True, False])
def test_many_calls_of_one_module(requires_grad: bool) -> None:
    """The results are joined, so that one backward recomputes all calls."""
    module = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 6)).double()

    def gradients(call: Callable) -> Any:
        data = [rand(1, 6, seed=i, grad=requires_grad) for i in range(200)]
        torch.stack([call(each) for each in data]).mean().backward()
        found = [[p.grad for p in module.parameters()], [each.grad for each in data]]
        module.zero_grad()
        return found

    assert_same(gradients(lambda data: compat.checkpoint(module, data, use_reentrant=False)), gradients(module))


def test_a_result_without_a_history_is_added_to_in_place() -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return self.linear(x)

    module = Detached()
    for policy in POLICIES:
        a = torch.ones(2, 2, requires_grad=True)
        out = remat(module, policy=policy)(a)
        assert not out.requires_grad
        out += a
        out.sum().backward()
        assert_same(a.grad, torch.ones(2, 2))
    assert module.linear.weight.grad is None


@with_policies
def test_backward_of_each_result(policy: Any) -> None:
    """Results that were scaled in place, values that aren't tensors, and an input that is returned."""

    def fn(a: Tensor, b: Tensor, scale: int, c: Tensor) -> tuple:
        x, y = a + b * c, a * b + c
        x *= scale
        y *= scale
        return scale, x, None, True, y, "bar", a

    def step(fn: Callable) -> Any:
        a, b, c = rand(4), rand(4, seed=1), rand(4, seed=2, grad=False)
        out = fn(a, b, 3, c)
        assert out[0] == 3 and out[2:4] == (None, True) and out[5] == "bar" and out[6] is a
        for i in (1, 4, 6):
            out[i].sum().backward(retain_graph=True)
        return out[1].detach(), out[4].detach(), a.grad, b.grad

    assert_same(step(remat(fn, policy=policy)), step(fn))


@dataclass
class Batch:
    """As `torch.export` asks for: registered as a dataclass."""

    ids: Tensor | None = None
    embeds: Tensor | None = None
    mask: Tensor | None = None
    name: str = "batch"


@dataclass
class ModelOutput(OrderedDict):
    """As Hugging Face's: a dict of what isn't None, registered with torch's pytree."""

    last_hidden_state: Tensor | None = None
    hidden_states: tuple | None = None
    attentions: tuple | None = None

    def __post_init__(self) -> None:
        self.update({key: value for key, value in vars(self).items() if value is not None})


torch_pytree.register_dataclass(Batch, field_names=["ids", "embeds", "mask"], drop_field_names=["name"])
torch_pytree.register_pytree_node(
    ModelOutput,
    lambda out: (list(out.values()), list(out)),
    lambda values, keys: ModelOutput(**dict(zip(keys, values))),
    flatten_with_keys_fn=lambda out: ([(torch_pytree.MappingKey(key), out[key]) for key in out], list(out)),
    serialized_type_name="tests.test_cases_of_peers.ModelOutput",
)


class Layer(nn.Module):
    """Takes and returns structures."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3).double()
        self.scale = scale

    def forward(self, batch: Batch, past: ModelOutput | None = None) -> tuple[Batch, ModelOutput]:
        found = batch.embeds if batch.embeds is not None else batch.ids * self.scale
        hidden = self.linear(found.sin() if batch.name == "first" else found).tanh()
        hidden = hidden if batch.mask is None else hidden * batch.mask
        seen = (*past.hidden_states, found) if past is not None else (found,)
        return Batch(embeds=hidden, mask=batch.mask), ModelOutput(hidden.exp(), hidden_states=seen)


HIGHER: dict[str, Callable] = {  # derivatives of a function of one tensor
    "grad": lambda fn, x: grad(fn)(x),
    "jvp": lambda fn, x: jvp(fn, (x,), (x.cos(),)),
    "hessian": lambda fn, x: hessian(fn)(x),
    "vmap": lambda fn, x: vmap(grad(fn))(torch.stack([x, x.sin()])),
}


def in_layers(layers: list[Callable], x: Tensor, kind: str) -> Tensor:
    batch, past = Batch(**{kind: x}, mask=x.detach() > 0.3, name="first"), None
    for layer in layers:
        batch, past = layer(batch, past)
        assert type(batch) is Batch and type(past) is ModelOutput
    assert batch.ids is None and batch.name == "batch" and list(past) == ["last_hidden_state", "hidden_states"]
    assert past["hidden_states"] is past.hidden_states and past.attentions is None
    return batch.embeds.sum() + (past["last_hidden_state"] * past.hidden_states[1]).sum()


def layers(wrap: Callable) -> list[Callable]:
    torch.manual_seed(0)
    return [wrap(Layer(scale)) for scale in (0.5, 2.0, 3.0)]


@pytest.mark.parametrize("kind", ["ids", "embeds"])
@with_policies
def test_dataclasses_that_are_registered_with_torch(policy: Any, kind: str) -> None:
    """Arguments and results of blocks, as in libraries of models."""

    def gradients(wrap: Callable) -> tuple:
        blocks, x = layers(lambda layer: layer), rand(2, 3)
        loss = in_layers([wrap(block) for block in blocks], x, kind)
        parameters = [p for block in blocks for p in block.parameters()]
        return loss.detach(), torch.autograd.grad(loss, [x, *parameters])

    expected = gradients(lambda layer: layer)
    assert_same(gradients(region_of_torch), expected)
    for wrap in (
        lambda layer: region(layer, use_reentrant=False),
        lambda layer: compat.checkpoint_wrapper(layer),
        lambda layer: remat(layer, policy=policy),
        lambda layer: remat(layer, policy=policy, early_stop=False, determinism_check="values", debug=True),
    ):
        assert_same(gradients(wrap), expected)


@pytest.mark.parametrize("kind", ["ids", "embeds"])
@pytest.mark.parametrize("derivative", HIGHER)
@with_policies
def test_higher_derivatives_through_registered_dataclasses(policy: Any, derivative: str, kind: str) -> None:
    def of(wrap: Callable) -> Any:
        blocks = layers(wrap)
        return HIGHER[derivative](lambda x: in_layers(blocks, x, kind), rand(2, 3, grad=False))

    assert_same(of(lambda layer: remat(layer, policy=policy)), of(lambda layer: layer), exact=False)


@pytest.mark.parametrize("early_stop", EARLY)
def test_more_tensors_in_the_recompute(early_stop: bool) -> None:
    """With early stop the recompute doesn't reach operations after the last tensor that is needed."""
    longer = [False, True]

    def fn(x: Tensor) -> Tensor:
        y = x.sin().exp()
        return y.sin() if longer.pop(0) else y

    x = rand(3)
    out = remat(fn, early_stop=early_stop)(x).sum()
    if early_stop:
        assert_same(torch.autograd.grad(out, x)[0], x.detach().sin().exp() * x.detach().cos())
    else:
        with pytest.raises(RuntimeError, match="one more in the recompute"):
            out.backward()


def test_data_parallel() -> None:
    """On the CPU `DataParallel` only calls its module."""
    linear, x = nn.Linear(2, 2, bias=False), torch.ones(2, 2, requires_grad=True)
    found = torch.autograd.grad(compat.checkpoint(nn.DataParallel(linear), x, use_reentrant=False).sum(), x)
    assert_same(found, torch.autograd.grad(linear(x).sum(), x))


# --- fairscale --------------------------------------------------------------------------------------------------------


def test_each_region_is_recomputed_just_before_its_backward() -> None:
    """Regions are not recomputed all at once."""
    log: list[str] = []

    class Logged(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, name: str, x: Tensor) -> Tensor:
            ctx.name = name
            log.append(f"{name} forward")
            out = x.exp()
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            (out,) = ctx.saved_tensors
            log.append(f"{ctx.name} backward")
            return None, grad * out

    a, b = rand(1), rand(1, seed=1)
    x = remat(functools.partial(Logged.apply, "a"))(a)
    y = remat(functools.partial(Logged.apply, "b"))(b)
    torch.cat((x, y)).sum().backward()
    assert log[:2] == ["a forward", "b forward"]
    assert log[2:] == ["b forward", "b backward", "a forward", "a backward"]


@pytest.mark.parametrize("kind", ["float32", "data in half", "half"])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm2d])
def test_norms_in_half_precision(norm: Any, kind: str) -> None:
    """With steps of an optimizer; parameters and buffers are compared."""

    def trained(wrap: Callable) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(3, 2), norm(2))
        if kind == "half":
            model.half()
        elif kind == "data in half":
            for p in model.parameters():
                p.data = p.data.half()
            for module in model:
                for name, buffer in list(module.named_buffers()):
                    setattr(module, name, buffer.half())
        model = wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.rand(2, 2, 3, 3, generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            optimizer.zero_grad()
            model(x.to(next(model.parameters()).dtype).requires_grad_()).sin().sum().backward()
            optimizer.step()
        return dict(model.state_dict())

    assert_same(trained(compat.checkpoint_wrapper), trained(lambda model: model))


# --- JAX --------------------------------------------------------------------------------------------------------------


def in_halves(fns: list[Callable], wrap: Callable) -> Callable:
    """Nested regions, as in treeverse."""
    if len(fns) <= 2:
        return lambda x: functools.reduce(lambda x, f: f(x), fns, x)
    middle = len(fns) // 2
    first, rest = wrap(in_halves(fns[:middle], wrap)), in_halves(fns[middle:], wrap)
    return lambda x: rest(first(x))


@pytest.mark.parametrize("length", [4, 8, 16])
def test_regions_in_halves(length: int) -> None:
    """The counts are at most those of torch's checkpoint; JAX's are 2, 8 and 24, with another early stop."""

    def of(wrap: Callable) -> tuple[Tensor, int]:
        x, f = rand(3), in_halves([torch.sin] * length, wrap)
        with OpCounter() as ops:
            (found,) = torch.autograd.grad(f(x).sum(), x)
        return found, ops["aten.sin"] - length

    expected, none = of(lambda f: f)
    found, again = of(remat)
    its, its_again = of(region_of_torch)
    assert none == 0 and 0 < again <= its_again
    assert again <= {4: 2, 8: 8, 16: 24}[length]
    assert_same((found, its), (expected, expected))
    x = rand(3, grad=False)
    assert_same(grad(lambda x: in_halves([torch.sin] * length, remat)(x).sum())(x), expected)


def test_linearize_and_both_jacobians() -> None:
    f, x, v = lambda x: x.sin().sin(), rand(3, grad=False), rand(3, seed=1, grad=False)
    for policy in POLICIES:
        g = remat(f, policy=policy)
        assert_same(linearize(g, x)[1](v), jvp(f, (x,), (v,))[1])
        assert_same(linearize(g, x)[0], f(x))
        assert_same((jacfwd(g)(x), jacrev(g)(x)), (jacfwd(f)(x), jacrev(f)(x)))


@with_policies
def test_vmap_of_other_dimensions_and_of_constants(policy: Any) -> None:
    x = rand(3, 5, grad=False)
    f = remat(lambda x: x.sin().sin() + torch.arange(float(x.numel()), dtype=x.dtype), policy=policy)
    assert_same(vmap(f, 1, 0)(x), torch.stack([f(each) for each in x.T]))
    assert_same(vmap(f, 0, 1)(x), torch.stack([f(each) for each in x], 1))


def test_a_region_without_arguments() -> None:
    """It returns a captured tensor, which was computed outside."""
    x = rand(3)
    for policy in POLICIES:
        y = 2 * x
        out = remat(lambda: y, policy=policy)()
        assert_same(torch.autograd.grad(out.sum(), x)[0], torch.full((3,), 2.0, dtype=x.dtype))
        inner = lambda x: remat(lambda: 2 * x, policy=policy)().sum()
        assert_same(grad(inner)(x.detach()), torch.full((3,), 2.0, dtype=x.dtype))


def test_a_loop_whose_state_depends_only_on_a_captured_number() -> None:
    """The first state doesn't require grad, and one result is a constant."""
    start = rand(5, 3, grad=False)

    def of(scale: Tensor, wrap: Callable) -> Tensor:
        def move(r: Tensor) -> tuple[Tensor, Tensor]:
            return r + 0.001 * (scale * r), torch.zeros(1)

        r = start
        for _ in range(3):
            r, _ = wrap(move)(r)
        return r[0, 0]

    scale = torch.tensor(5.0, dtype=start.dtype)
    expected = grad(lambda s: of(s, lambda f: f))(scale)
    for policy in POLICIES:
        wrap = functools.partial(remat, policy=policy)
        assert_same(grad(lambda s: of(s, wrap))(scale), expected)
        leaf = scale.clone().requires_grad_()
        assert_same(torch.autograd.grad(of(leaf, wrap), leaf)[0], expected)


class Twice(torch.autograd.Function):
    """A Function with a rule for each transform; one of the rules returns a constant."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return ctx.saved_tensors[0].cos() * g * torch.ones(3, dtype=g.dtype)

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        return ctx.saved_tensors[0].cos() * t * torch.ones(3, dtype=t.dtype)


@with_policies
def test_custom_rules_of_a_function(policy: Any) -> None:
    def fn(x: Tensor) -> Tensor:
        for _ in range(2):
            x = Twice.apply((x @ x) * 0.5)
        return x.sum()

    x, f = rand(3, 3), remat(fn, policy=policy)
    assert gradgradcheck(f, (x,))
    assert_same(grad(f)(x.detach()), grad(fn)(x.detach()))
    assert_same(jvp(f, (x.detach(),), (x.detach(),)), jvp(fn, (x.detach(),), (x.detach(),)))
    flat = lambda f: lambda x: f(x.reshape(3, 3))
    assert_same(hessian(flat(f))(x.detach().flatten()), hessian(flat(fn))(x.detach().flatten()), exact=False)


@with_policies
def test_a_derivative_of_a_function_that_drops_a_result(policy: Any) -> None:
    f = lambda x: grad(lambda x: (x * x, x)[0])(x)
    x = torch.tensor(3.0)
    assert_same(grad(remat(f, policy=policy))(x), torch.tensor(2.0))
    constant = lambda x: torch.tensor(3.0) * x  # whose derivative needs no input
    assert_same(grad(remat(constant, policy=policy))(x), torch.tensor(3.0))


def test_constants_are_not_residuals() -> None:
    """They are recomputed."""
    x = rand(100, 100)
    cases: dict[str, tuple[Callable, int]] = {
        "diagonal": (lambda x: torch.einsum("ii->i", x), 0),
        "zeros": (lambda x: torch.zeros_like(x) * x, 1),  # the region needs its input to make them
        "zeros and a sine": (lambda x: torch.zeros_like(x) * x.sin(), 1),
        "a large constant": (lambda x: x.sum() * torch.ones(100, 100, dtype=x.dtype).sin().sum(), 1),
    }
    for name, (fn, inputs) in cases.items():
        f = remat(fn)
        found = saved_residuals(f, x, inputs=True)
        assert len(found) == inputs and all(each.source.startswith("argument") for each in found), name
        assert held_bytes(f, x) == f(x).untyped_storage().nbytes() * (name != "diagonal"), name
        assert_same(torch.autograd.grad(f(x).sum(), x), torch.autograd.grad(fn(x).sum(), x))


def named_factors(x: Tensor) -> Tensor:
    factor = lambda: torch.full((50,), 2.0, dtype=x.dtype).sin()
    y, z, w = (checkpoint_name(factor(), name) for name in "yzw")
    return x * y * z * w * factor()


@pytest.mark.parametrize(("policy", "kept"), [
    *((policies.save_only_these_names(*names), len(names)) for names in ("yzw", "zw", "w")),
    *((policies.save_any_names_but_these(*names), 3 - len(names)) for names in ("zw", "w", "")),
    (policies.save_any_names_but_these("y", "z", "w"), 0),
], ids=str)  # fmt: skip
def test_allowed_and_denied_names(policy: Any, kept: int) -> None:
    x = rand(50)
    f = remat(named_factors, policy=policy)
    assert sum(each.source.startswith("named") for each in saved_residuals(f, x)) == kept
    assert held_bytes(f, x) == (kept + 1) * x.nbytes
    assert_same(torch.autograd.grad(f(x).sum(), x), torch.autograd.grad(named_factors(x).sum(), x))
    ops = count_ops(lambda: torch.autograd.grad(f(x).sum(), x))
    assert ops["aten.sin"] == 4 + 4 - kept


def test_a_named_value_that_is_read_twice_is_saved_once() -> None:
    def fn(x: Tensor) -> Tensor:
        y = checkpoint_name(torch.ones(50, dtype=x.dtype).sin(), "y")
        return x * y * y

    x = rand(50)
    f = remat(fn, policy=policies.save_only_these_names("y"))
    assert held_bytes(f, x) == 2 * x.nbytes
    assert_same(torch.autograd.grad(f(x).sum(), x), torch.autograd.grad(fn(x).sum(), x))


@with_policies
def test_gradients_that_depend_on_the_precision_of_a_saved_tensor(policy: Any) -> None:
    """A saved bfloat16 value stays in bfloat16: result and gradient are the same product."""

    class Cast(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.float()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return ctx.saved_tensors[0].float()

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x @ x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    x = ((1 + torch.finfo(torch.bfloat16).eps) * torch.eye(2)).bfloat16().requires_grad_()
    y = remat(lambda x: Cast.apply(Square.apply(x)), policy=policy)(x)
    (found,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert_same(found.float(), y.detach())


@with_policies
def test_an_error_of_the_function_shows_its_line(policy: Any) -> None:
    def fn(x: Tensor) -> Tensor:
        return x if x.sum() > 0 else x.sin()

    with pytest.raises(RuntimeError) as caught:
        vmap(remat(fn, policy=policy))(rand(3, 2, grad=False))
    assert "x.sum() > 0" in "".join(traceback.format_tb(caught.tb))


class SinOfNamedCos(torch.autograd.Function):
    """Names a value that it saves for its backward."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), checkpoint_name(x.cos(), "cos")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> Tensor:
        x, cos = ctx.saved_tensors
        return g * (x.cos() if torch.is_grad_enabled() else cos)


@pytest.mark.parametrize(("names", "recomputed"), [(("cos",), 0), ((), 1)])
def test_a_name_in_the_forward_of_a_function(names: tuple, recomputed: int) -> None:
    policy = policies.save_only_these_names(*names) if names else None
    f, x = remat(lambda x: SinOfNamedCos.apply(x * 2)[0].exp(), policy=policy), rand(3)
    plain = lambda x: (x * 2).sin().exp()
    out = f(x)
    with OpCounter() as ops:
        (found,) = torch.autograd.grad(out.sum(), x)
    assert ops["aten.cos"] == recomputed
    assert_same(found, torch.autograd.grad(plain(x).sum(), x)[0], exact=False)
    (first,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(plain(x).sum(), x, create_graph=True)
    second = [torch.autograd.grad(each.sum(), x)[0] for each in (first, expected)]
    assert_same(*second, exact=False)
    assert_same(grad(lambda x: f(x).sum())(x.detach()), expected.detach(), exact=False)


def test_a_value_that_is_saved_and_returned_exists_once() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = checkpoint_name(x.sin(), "y")
        return y, y * y

    x = rand(64, 64)
    region = remat(f, policy=policies.save_only_these_names("y"))
    assert held_bytes(region, x) <= held_bytes(f, x) == 2 * x.nbytes
    assert count_ops(torch.autograd.grad, [t.sum() for t in region(x)], x)["aten.sin"] == 0
    assert_same(torch.autograd.grad([t.sum() for t in region(x)], x), torch.autograd.grad([t.sum() for t in f(x)], x))


# --- torch: functions of all kinds in compiled code -------------------------------------------------------------------


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0].cos()


def scaled(x: Tensor, by: float = 2.0) -> Tensor:
    return (x.sin() * by).exp()


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return scaled(x)


MADE_BEFORE = functools.partial(scaled, by=3.0)
MODULE = Scaled()
CALLED: dict[str, Callable] = {
    "function": lambda call, x: call(scaled, x),
    "keyword": lambda call, x: call(scaled, x, by=3.0),
    "partial": lambda call, x: call(functools.partial(scaled), x),
    "partial with an argument": lambda call, x: call(functools.partial(scaled, by=3.0), x),
    "partial made before": lambda call, x: call(MADE_BEFORE, x),
    "partial of a module's call": lambda call, x: call(functools.partial(MODULE.__call__), x),
    "module": lambda call, x: call(MODULE, x),
    "method": lambda call, x: call(MODULE.forward, x),
    "autograd function": lambda call, x: call(Sine.apply, x),
    "builtin": lambda call, x: call(torch.sin, x),
    "method of a tensor": lambda call, x: call(x.mul, x),
}


@pytest.mark.parametrize("called", CALLED.values(), ids=CALLED)
@pytest.mark.parametrize("policy", [None, policies.save_ops("aten.sin")], ids=str)
def test_an_installed_checkpoint_in_compiled_code(called: Callable, policy: Any) -> None:
    library = torch.utils.checkpoint
    x = rand(3)
    expected = torch.autograd.grad(called(lambda f, *args, **kwargs: f(*args, **kwargs), x).sum(), x)[0]
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    with compat.install(policy):
        f = lambda x: called(functools.partial(library.checkpoint, use_reentrant=False), x)
        found = torch.autograd.grad(torch.compile(f, backend=counter, fullgraph=True)(x).sum(), x)[0]
    assert_same(found, expected, exact=False)
    assert counter.frame_count == 1
    nodes = [str(node.target) for node in counter.graphs[0].graph.nodes]
    assert sum("tag_activation_checkpoint" in name for name in nodes) == 1
