"""Cases where torch.utils.checkpoint is silently wrong, or raises, in plain autograd: correct here, or an error.

Comments that begin with "torch:" describe `torch.utils.checkpoint.checkpoint(fn, ..., use_reentrant=False)`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from remat import MutationError, remat

GENERATOR = torch.Generator()
SCALE = torch.ones(3)


def same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def both(fn: Callable, make: Callable, run: Callable) -> tuple[Any, Any]:
    """`run(f, *make())` with `f` rematerialized and with plain `f`, from the same generator states."""
    results = []
    for f in (remat(fn), fn):
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        GENERATOR.manual_seed(1)
        results.append(run(f, *make()))
    return results[0], results[1]


def values_and_gradients(f: Callable, *args: Any) -> Any:
    out = f(*args)
    inputs = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    return out.detach(), torch.autograd.grad(out.sum(), inputs)


# --- functional_call ------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()).tanh()


class CallsRemat(nn.Module):
    def __init__(self, wrap: Callable) -> None:
        super().__init__()
        self.block = Block()
        self.wrap = wrap

    def forward(self, x: Tensor) -> Tensor:
        return self.wrap(self.block)(x)


class CallsRematOnMethod(CallsRemat):
    def forward(self, x: Tensor) -> Tensor:
        return self.wrap(self.inner)(x)

    def inner(self, x: Tensor) -> Tensor:
        return self.block(x).exp()


def holds_remat(wrap: Callable) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), wrap(Block()), wrap(Block()))


@pytest.mark.parametrize("build", [holds_remat, CallsRemat, CallsRematOnMethod])
def test_functional_call(build: Callable) -> None:
    # torch: in the recompute the module has its own parameters again, and the gradients are for those.
    torch.manual_seed(0)
    ours, plain = build(remat), build(lambda module: module)
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3)
    params = {name: torch.randn_like(p) for name, p in plain.named_parameters()}
    results = []
    for model in (ours, plain):
        given = {name: p.clone().requires_grad_() for name, p in params.items()}
        out = functional_call(model, given, (x,))
        results.append((out.detach(), torch.autograd.grad(out.sum(), list(given.values()))))
        assert all(p.grad is None for p in model.parameters())
    same(*results)


def test_functional_call_twice_before_backward() -> None:
    model = holds_remat(remat)
    plain = holds_remat(lambda module: module)
    x = torch.randn(2, 3)
    sets = [{n: torch.randn_like(p) for n, p in plain.named_parameters()} for _ in range(2)]
    results = []
    for m in (model, plain):
        given = [{n: p.clone().requires_grad_() for n, p in params.items()} for params in sets]
        loss = sum(functional_call(m, params, (x,)).square().sum() for params in given)
        leaves = [p for params in given for p in params.values()]
        results.append(torch.autograd.grad(loss, leaves))
    same(*results)


# --- random generators ----------------------------------------------------------------------------


class Noisy:
    def __init__(self) -> None:
        self.generator = GENERATOR

    def __call__(self, x: Tensor) -> Tensor:
        return (x * torch.rand(x.shape, generator=self.generator)).sin()


def uses_argument(x: Tensor, generator: torch.Generator) -> Tensor:
    return (x * torch.rand(x.shape, generator=generator)).sin()


def uses_keyword(x: Tensor, options: dict) -> Tensor:
    return (x * torch.rand(x.shape, **options)).sin()


def uses_global(x: Tensor) -> Tensor:
    return (x * torch.rand(x.shape, generator=GENERATOR)).sin()


def uses_cell() -> Callable:
    generator = GENERATOR
    return lambda x: (x * torch.rand(x.shape, generator=generator)).sin()


GENERATOR_CASES = {
    "argument": (uses_argument, lambda: (leaf(3), GENERATOR)),
    "inside an argument": (uses_keyword, lambda: (leaf(3), {"generator": GENERATOR})),
    "global": (uses_global, lambda: (leaf(3),)),
    "closure variable": (uses_cell(), lambda: (leaf(3),)),
    "attribute": (Noisy(), lambda: (leaf(3),)),
}


@pytest.mark.parametrize("case", GENERATOR_CASES.values(), ids=GENERATOR_CASES)
def test_explicit_generator(case: tuple) -> None:
    # torch: the recompute draws the next numbers.
    def run(f: Callable, *args: Any) -> Any:
        out = f(*args)
        after = GENERATOR.get_state()
        grads = torch.autograd.grad(out.sum(), args[0])
        same(GENERATOR.get_state(), after)
        return out.detach(), grads, after

    same(*both(*case, run))


def python_draws(x: Tensor) -> Tensor:
    return (x * random.random() + random.gauss(0, 1)).sin()


def python_branches(x: Tensor) -> Tensor:
    return x.sin().exp() if random.random() < 0.5 else x.exp().cos()


def numpy_draws(x: Tensor) -> Tensor:
    return (x * float(np.random.rand()) + np.random.randn()).sin()


@pytest.mark.parametrize("fn", [python_draws, python_branches, numpy_draws])
def test_python_and_numpy_generators(fn: Callable) -> None:
    # torch: the recompute draws the next numbers.
    def run(f: Callable, *xs: Tensor) -> Any:
        outs = [f(x) for x in xs]
        states = random.getstate(), np.random.get_state(legacy=False)
        grads = torch.autograd.grad(sum(out.sum() for out in outs), xs)
        after = random.getstate(), np.random.get_state(legacy=False)
        assert repr(after) == repr(states)
        return [out.detach() for out in outs], grads, (random.random(), float(np.random.rand()))

    actual, expected = both(fn, lambda: [leaf(3) for _ in range(4)], run)
    same(actual[:2], expected[:2])
    assert actual[2] == expected[2]


# --- state that must change only once ----------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_statistics(momentum: float | None) -> None:
    # torch: the statistics are updated twice.
    def run(wrap: Callable) -> Any:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(3, momentum=momentum)
        f = wrap(nn.Sequential(nn.Linear(3, 3), norm, nn.Tanh()))
        for x in (torch.randn(4, 3), torch.randn(4, 3)):
            loss = f(x).square().sum()
            after_forward = [b.clone() for b in f.buffers()]
            loss.backward()
            same([*f.buffers()], after_forward)
        assert norm.num_batches_tracked == 2
        return [p.grad for p in f.parameters()], [*f.buffers()]

    same(run(remat), run(lambda f: f))


class Counts(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(()))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "add_":
            self.n.add_(1)
        else:
            self.n = self.n + 1
        return (x * self.n.clone()).sin().exp()


@pytest.mark.parametrize("how", ["add_", "assign"])
def test_buffer_counters(how: str) -> None:
    # torch: the calls are counted twice, and the gradient is for another count.
    def run(wrap: Callable) -> Any:
        module = Counts(how)
        f, x = wrap(module), torch.linspace(0, 1, 3, requires_grad=True)
        first, second = f(x), f(x)
        grads = torch.autograd.grad(first.sum(), x), torch.autograd.grad(second.sum(), x)
        assert f.n == module.n == 2
        return first.detach(), second.detach(), grads

    same(run(remat), run(lambda f: f))


# --- changes before the backward --------------------------------------------------------------------


def test_captured_tensor_changed_in_place() -> None:
    # torch: the gradient is for the new value.
    w = torch.ones(3)
    x = leaf(3)
    loss = remat(lambda x: (x * w).sin().exp().sum())(x)
    w.mul_(2)
    with pytest.raises(MutationError, match=re.escape("captured closure variable 'w' was changed")):
        loss.backward()
    assert x.grad is None


def test_argument_changed_in_place() -> None:
    # torch: the gradient is for the new value.
    x, scale = leaf(3), torch.ones(3)
    loss = remat(lambda x, scale: (x * scale).sin().exp().sum())(x, scale=scale)
    scale.mul_(2)
    with pytest.raises(MutationError, match="argument scale was changed"):
        loss.backward()


def test_parameter_changed_in_place() -> None:
    layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    loss = remat(layer)(leaf(2, 3)).exp().sum()
    with torch.no_grad():
        layer[0].weight.mul_(2)
    with pytest.raises(MutationError, match=re.escape("captured self[0].weight was changed")):
        loss.backward()


def test_global_changed_in_place() -> None:
    loss = remat(lambda x: (x * SCALE).sin().exp().sum())(leaf(3))
    SCALE.mul_(1)
    with pytest.raises(MutationError, match=re.escape("captured global 'SCALE' was changed")):
        loss.backward()


# --- control flow of the user -----------------------------------------------------------------------


@pytest.mark.parametrize("caught", [Exception, RuntimeError, (ValueError, Exception)])
def test_except_exception_around_the_body(caught: Any) -> None:
    # torch: the handler catches the exception that ends the recompute, and continues.
    handled = []

    def fn(x: Tensor) -> Tensor:
        try:
            y = x.sin().exp().cos()
        except caught:
            handled.append(True)
            y = x
        return y.sin() * x

    same(*both(fn, lambda: (leaf(3),), values_and_gradients))
    assert not handled


def test_bare_except_around_the_body() -> None:
    # It catches every exception, but the values have been recomputed by then.
    def fn(x: Tensor) -> Tensor:
        try:
            return x.sin().exp().cos()
        except:  # noqa: E722
            return x * 0

    same(*both(fn, lambda: (leaf(3),), values_and_gradients))


def test_finally_and_context_managers_run() -> None:
    ended = []

    def fn(x: Tensor) -> Tensor:
        try:
            return x.sin().exp().cos()
        finally:
            ended.append(True)

    values_and_gradients(remat(fn), leaf(3))
    assert ended == [True, True]


def test_closures_in_a_loop_keep_their_values() -> None:
    # torch: all of them see the last `w` and the last `i` in the recompute.
    def run(wrap: Callable, x: Tensor, *ws: Tensor) -> Any:
        y = x
        for i, w in enumerate(ws):
            y = wrap(lambda y: (y @ w).sin() * (i + 1))(y)
        return y.detach(), torch.autograd.grad(y.sum(), [x, *ws])

    tensors = [leaf(3, 3) for _ in range(4)]
    same(run(remat, *tensors), run(lambda f: f, *tensors))


def test_helper_closures_in_a_loop_keep_their_values() -> None:
    def run(wrap: Callable, x: Tensor, *ws: Tensor) -> Any:
        y, scale = x, 1.0
        for w in ws:

            def helper(y: Tensor) -> Tensor:
                return (y @ w).sin() * scale

            def layer(y: Tensor) -> Tensor:
                return helper(y).exp()

            y = wrap(layer)(y)
            scale += 1
        return y.detach(), torch.autograd.grad(y.sum(), [x, *ws])

    tensors = [leaf(3, 3) for _ in range(3)]
    same(run(remat, *tensors), run(lambda f: f, *tensors))


# --- errors where an answer exists ------------------------------------------------------------------


def smooth(x: Tensor) -> Tensor:
    return x.sin().exp().cos()


def test_vmap_then_backward() -> None:
    # torch: raises.
    def run(f: Callable, x: Tensor, w: Tensor) -> Any:
        return values_and_gradients(torch.vmap(f, in_dims=(0, None)), x, w)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).sin().exp()

    same(*both(fn, lambda: (leaf(4, 3), leaf(3, 3)), run))


def test_vmap_then_backward_with_a_captured_parameter() -> None:
    layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))

    def run(f: Callable, x: Tensor) -> Any:
        out = torch.vmap(f)(x)
        return out.detach(), torch.autograd.grad(out.exp().sum(), [x, *layer.parameters()])

    same(*both(layer, lambda: (leaf(4, 3),), run))


def test_vmap_twice_then_double_backward() -> None:
    def run(f: Callable, x: Tensor) -> Any:
        out = torch.vmap(torch.vmap(f))(x)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return g.detach(), torch.autograd.grad(g.sin().sum(), x)

    same(*both(smooth, lambda: (leaf(2, 3, 2),), run))


def makes_a_constant(x: Tensor) -> Tensor:
    return (x * torch.linspace(0, 1, 3)).sin().exp()


def test_default_dtype_changed_before_backward() -> None:
    # torch: raises, as the saved tensors have another dtype.
    def run(f: Callable, x: Tensor) -> Any:
        out = f(x)
        torch.set_default_dtype(torch.float64)
        try:
            grads = torch.autograd.grad(out.sum(), x)
            assert torch.get_default_dtype() is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        return out.detach(), grads

    same(*both(makes_a_constant, lambda: (leaf(3),), run))


def test_default_dtype_of_the_forward_only() -> None:
    def run(f: Callable, x: Tensor) -> Any:
        torch.set_default_dtype(torch.float64)
        try:
            out = f(x)
        finally:
            torch.set_default_dtype(torch.float32)
        assert out.dtype is torch.float64
        return out.detach(), torch.autograd.grad(out.sum(), x)

    same(*both(makes_a_constant, lambda: (leaf(3),), run))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(q.sin(), k, v).tanh()


@pytest.mark.parametrize("inside", ["forward", "backward"])
@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_attention_backend_changed_before_backward(backend: SDPBackend, inside: str) -> None:
    # torch: raises, as another kernel saves other tensors.
    def run(f: Callable, *qkv: Tensor) -> Any:
        if inside == "forward":
            with sdpa_kernel(backend):
                out = f(*qkv)
            return out.detach(), torch.autograd.grad(out.sum(), qkv)
        out = f(*qkv)
        with sdpa_kernel(backend):
            return out.detach(), torch.autograd.grad(out.sum(), qkv)

    same(*both(attend, lambda: [leaf(1, 2, 4, 8) for _ in range(3)], run))


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _, y = ctx.saved_tensors
        x, _ = ctx.saved_tensors
        return grad * (y * x + y)


@pytest.mark.parametrize("early_stop", [True, False])
def test_saved_tensors_read_twice(early_stop: bool) -> None:
    # torch: raises at the second reading.
    def fn(x: Tensor) -> Tensor:
        return ReadsTwice.apply(x.sin()).cos()

    x = leaf(3)
    expected = values_and_gradients(fn, x)
    same(values_and_gradients(remat(fn, early_stop=early_stop), x), expected)


@pytest.mark.parametrize("early_stop", [True, False])
def test_saved_tensors_read_twice_in_a_retained_graph(early_stop: bool) -> None:
    def fn(x: Tensor) -> Tensor:
        return ReadsTwice.apply(ReadsTwice.apply(x.sin())).cos()

    x = leaf(3)
    (expected,) = torch.autograd.grad(fn(x).sum(), x)
    loss = remat(fn, early_stop=early_stop)(x).sum()
    for _ in range(3):
        same(torch.autograd.grad(loss, x, retain_graph=True)[0], expected)


def func_grad_inside(x: Tensor) -> Tensor:
    return torch.func.grad(lambda y: (y.sin() * x).sum())(x).exp() * x


def func_vjp_inside(x: Tensor) -> Tensor:
    out, vjp = torch.func.vjp(torch.sin, x.exp())
    return vjp(out)[0] * x


def func_jacrev_inside(x: Tensor) -> Tensor:
    return torch.func.jacrev(lambda y: (y * x).sin())(x).sum(0).exp()


def func_hessian_inside(x: Tensor) -> Tensor:
    return torch.func.hessian(lambda y: (y * x).sin().sum())(x).sum(0).exp()


def func_jvp_inside(x: Tensor) -> Tensor:
    return torch.func.jvp(torch.sin, (x.exp(),), (x,))[1].sin()


@pytest.mark.parametrize(
    "fn",
    [func_grad_inside, func_vjp_inside, func_jacrev_inside, func_hessian_inside, func_jvp_inside],
)
def test_torch_func_inside_a_region(fn: Callable) -> None:
    # torch: raises, "don't yet support saved tensor hooks".
    f, x = remat(fn), leaf(3)
    expected = values_and_gradients(fn, x)
    for _ in range(2):  # the first call records it, the second one uses the record
        same(values_and_gradients(f, x), expected)


def test_torch_func_inside_a_region_that_draws_and_counts() -> None:
    def run(wrap: Callable) -> Any:
        torch.manual_seed(3)
        n = torch.zeros(())

        def fn(x: Tensor) -> Tensor:
            n.add_(1)
            y = x * torch.rand(3) * n
            return torch.func.grad(lambda z: z.sin().sum())(y).exp()

        f, x = wrap(fn), torch.linspace(0, 1, 3, requires_grad=True)
        results = [values_and_gradients(f, x) for _ in range(2)]
        return results, n, torch.rand(3)

    same(run(remat), run(lambda f: f))


def torch_autograd_inside(x: Tensor) -> Tensor:
    with torch.enable_grad():
        y = x.sin()
        (g,) = torch.autograd.grad(y.exp().sum(), y, create_graph=True)
    return (g * x).cos()


def test_torch_autograd_inside_a_region() -> None:
    same(*both(torch_autograd_inside, lambda: (leaf(3),), values_and_gradients))


def test_retain_graph() -> None:
    # torch: a policy raises at the second backward.
    x = leaf(3)
    (expected,) = torch.autograd.grad(smooth(x).sum(), x)
    out = remat(smooth)(x)
    for _ in range(3):
        same(torch.autograd.grad(out.sum(), x, retain_graph=True)[0], expected)
    same(torch.autograd.grad(out.sum(), x)[0], expected)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.sum(), x)


@pytest.mark.parametrize("order", [2, 3])
def test_double_backward(order: int) -> None:
    # torch: a policy raises.
    def run(f: Callable, x: Tensor) -> Any:
        grads, out = [], f(x)
        for _ in range(order):
            (out,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
            grads.append(out.detach())
        return grads

    same(*both(lambda x: smooth(x) * x, lambda: (leaf(3),), run))


def test_double_backward_with_generators_and_parameters() -> None:
    layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Dropout(0.5), nn.Linear(3, 3))

    def run(f: Callable, x: Tensor) -> Any:
        out = f(x).exp()
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), [x, layer[0].weight, layer[3].weight])

    same(*both(layer, lambda: (leaf(2, 3),), run))
