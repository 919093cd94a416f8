"""Tracers inline or trace regions: make_fx, functionalize, torch.export and torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from remat import checkpoint_name, disable_remat, policies, remat
from remat.nn import apply


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected)


def block(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).sin().exp() @ w


def in_dict(x: Tensor, w: Tensor) -> Tensor:
    return (x * w["scale"]).sin() @ w["w"][0]


def two_regions(wrap: Callable) -> Callable:
    f = wrap(block)
    return lambda x, w: f(f(x, w).tanh(), w)


def nested(wrap: Callable) -> Callable:
    inner = wrap(block)
    return wrap(lambda x, w: inner(x.cos(), w).tanh())


def with_structure(wrap: Callable) -> Callable:
    f = wrap(lambda tree, flag: {"y": (tree["x"] @ tree["w"]).sin().exp() * 2, "flag": flag})

    def fn(x: Tensor, w: Tensor) -> Tensor:
        out = f({"x": x, "w": w}, flag=True)
        return out["y"] if out["flag"] else x

    return fn


def with_keywords(wrap: Callable) -> Callable:
    f = wrap(lambda x, w=None, *, scale=1.0: (x @ w).sin().exp() * scale)
    return lambda x, w: f(x, w=w, scale=2.0)


def with_capture(wrap: Callable) -> Callable:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = w.sin()
        return wrap(lambda x: (x @ y).exp().sin() @ w)(x)

    return fn


def with_branch(wrap: Callable) -> Callable:
    f = wrap(lambda x, w: block(x, w) if x.shape[0] > 1 else x)
    return lambda x, w: f(x, w)


CASES = [
    lambda wrap: wrap(block), two_regions, nested, with_structure, with_keywords, with_capture,
    with_branch,
]  # fmt: skip
IDS = ["one region", *(case.__name__ for case in CASES[1:])]


@pytest.fixture(params=CASES, ids=IDS)
def pair(request: pytest.FixtureRequest) -> tuple[Callable, Callable]:
    """A function with regions, and without."""
    return request.param(remat), request.param(lambda f: f)


@pytest.fixture
def args() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3), torch.randn(3, 3, requires_grad=True)


def grads(f: Callable, *args: Any) -> Any:
    x, w = args
    x = x.detach().requires_grad_()
    w = w.detach().requires_grad_()
    out = f(x, w)
    return out.detach(), torch.autograd.grad(out.sum(), (x, w))


def func_grads(f: Callable) -> Callable:
    return torch.func.grad(lambda x, w: f(x, w).sum(), argnums=(0, 1))


def per_sample(f: Callable) -> Callable:
    return torch.vmap(torch.func.grad(lambda w, x: f(x[None], w).sum()), (None, 0))


# --- tracers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(pair: tuple, args: tuple, mode: str) -> None:
    f, plain = pair
    traced = make_fx(f, tracing_mode=mode)(*args)
    close(traced(*args), plain(*args))
    x = torch.randn(2, 3)
    close(traced(x, args[1]), plain(x, args[1]))


@pytest.mark.parametrize("take", [func_grads, per_sample])
def test_make_fx_of_torch_func(pair: tuple, args: tuple, take: Callable) -> None:
    f, plain = pair
    x, w = args[0], args[1].detach()
    inputs = (w, x) if take is per_sample else (x, w)
    traced = make_fx(take(f))(*inputs)
    close(traced(*inputs), take(plain)(*inputs))
    others = tuple(torch.randn_like(t) for t in inputs)
    if take is not per_sample:
        close(traced(*others), take(plain)(*others))


def test_make_fx_of_autograd(pair: tuple, args: tuple) -> None:
    f, plain = pair

    def step(f: Callable) -> Callable:
        return lambda x, w: torch.autograd.grad(f(x, w).sum(), w)[0]

    traced = make_fx(step(f))(*args)
    others = torch.randn(2, 3), torch.randn(3, 3, requires_grad=True)
    close(traced(*others), step(plain)(*others))


@pytest.mark.parametrize("remove", ["mutations", "mutations_and_views"])
def test_functionalize(pair: tuple, args: tuple, remove: str) -> None:
    f, plain = pair
    x, w = args[0], args[1].detach()
    close(torch.func.functionalize(f, remove=remove)(x, w), plain(x, w))
    close(torch.func.functionalize(func_grads(f), remove=remove)(x, w), func_grads(plain)(x, w))


def test_functionalize_of_a_region_with_inplace_ops(args: tuple) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        y.add_(1).sin_()
        return y.exp()

    x, w = args[0], args[1].detach()
    functional = torch.func.functionalize(remat(fn))
    close(functional(x, w), fn(x, w))
    traced = make_fx(functional)(x, w)
    close(traced(x, w), fn(x, w))
    assert not any(str(node.target).split(".")[1].endswith("_") for node in traced.graph.nodes
                   if node.op == "call_function")  # fmt: skip


# A module, the shape of its arguments, and their number.
SCRIPTABLE = {
    "statistics": (lambda: nn.BatchNorm1d(3), (4, 3), 1),
    "attention": (lambda: nn.MultiheadAttention(4, 2), (3, 2, 4), 3),
    "convolution": (lambda: nn.Sequential(nn.Conv1d(2, 2, 3), nn.BatchNorm1d(2), nn.ReLU()), (2, 2, 7), 1),
    "encoder": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), (3, 2, 4), 1),
}


@pytest.mark.parametrize("name", SCRIPTABLE)
@pytest.mark.parametrize("policy", [None, policies.save_matmuls, policies.save_only_these_names("h")], ids=str)
@pytest.mark.parametrize("around", [lambda module: module, remat], ids=["one", "nested"])
def test_jit_trace(name: str, policy: Any, around: Callable) -> None:
    """The trace (torch traces twice and compares) and the state after it are those of the plain function."""
    make, shape, count = SCRIPTABLE[name]
    ours, plain = make(), make()
    ours.load_state_dict(plain.state_dict())
    args, others = ([torch.randn(shape) for _ in range(count)] for _ in range(2))
    traced, expected = torch.jit.trace(around(remat(ours, policy=policy)), args), torch.jit.trace(plain, args)
    for a, b in zip(ours.buffers(), plain.buffers(), strict=True):
        assert torch.equal(a, b)
    kinds, of_plain = ([node.kind() for node in t.inlined_graph.nodes()] for t in (traced, expected))
    assert [k for k in kinds if k.startswith("aten")] == [k for k in of_plain if k.startswith("aten")]
    close(traced(*others), expected(*others))
    result = ours(*others)
    close(result, plain(*others))
    (result[0] if count > 1 else result).sum().backward()  # the regions still work
    assert all(p.grad is not None for p in ours.parameters())


class Model(nn.Module):
    def __init__(self, wrap: Callable) -> None:
        super().__init__()
        self.block = wrap(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))
        self.w = nn.Parameter(torch.randn(3, 3))
        self.head = wrap(block)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x), self.w)


def models(kind: type[Model] = Model) -> tuple[Model, Model]:
    ours, plain = kind(remat), kind(lambda f: f)
    plain.load_state_dict(ours.state_dict())
    return ours, plain


class Held(Model):
    """The region is in a list: Dynamo of torch 2.11 fails at an attribute whose object has a `__get__`."""

    def __init__(self, wrap: Callable) -> None:
        super().__init__(wrap)
        self.heads = [self.__dict__.pop("head")]

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[0](self.block(x), self.w)


EXPORTS = [(Model, False), (Held, False), (Held, True)]
if torch.__version__ >= (2, 13):
    EXPORTS.append((Model, True))


@pytest.mark.parametrize(("kind", "strict"), EXPORTS)
def test_export(kind: type[Model], strict: bool) -> None:
    x = torch.randn(2, 3)
    ours, plain = models(kind)
    program = torch.export.export(ours, (x,), strict=strict)
    exported = program.module()
    for other in (x, torch.randn(2, 3)):
        close(exported(other), plain(other))
    assert set(program.state_dict) == set(plain.state_dict())
    kinds = {str(n.target) for n in program.graph.nodes if n.op == "call_function"}
    assert all(kind.startswith("aten.") for kind in kinds), kinds


@pytest.mark.parametrize("make", [remat, lambda module: apply(module, nn.Linear)])
def test_export_of_a_module_that_is_a_region(make: Callable) -> None:
    module, x = nn.Linear(3, 2), torch.randn(4, 3)
    expected = module(x)
    program = torch.export.export(make(module), (x,), strict=False)
    assert torch.equal(program.module()(x), expected)


def test_export_with_a_dynamic_batch() -> None:
    ours, plain = models()
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(ours, (torch.randn(4, 3),), dynamic_shapes=({0: batch},))
    x = torch.randn(7, 3)
    close(program.module()(x), plain(x))


def test_export_of_decompositions() -> None:
    ours, plain = models()
    x = torch.randn(2, 3)
    program = torch.export.export(ours, (x,)).run_decompositions()
    close(program.module()(x), plain(x))


# --- torch.compile ----------------------------------------------------------------------------------

BACKENDS = ["eager", "aot_eager"]


def compiled(f: Callable, backend: str, fullgraph: bool = False) -> Callable:
    return torch.compile(f, backend=backend, fullgraph=fullgraph)


@pytest.mark.parametrize("backend, fullgraph", [("eager", False), ("aot_eager", False), ("aot_eager", True)])
def test_compile(pair: tuple, args: tuple, backend: str, fullgraph: bool) -> None:
    f, plain = pair
    c = compiled(f, backend, fullgraph)
    for _ in range(2):
        close(grads(c, *args), grads(plain, *args))
    others = torch.randn(2, 3), torch.randn(3, 3)
    close(grads(c, *others), grads(plain, *others))


@pytest.mark.parametrize("backend, fullgraph", [("eager", False), ("aot_eager", True)])
@pytest.mark.parametrize("take", [func_grads, per_sample])
def test_compile_of_torch_func(pair: tuple, args: tuple, take: Callable, backend: str, fullgraph: bool) -> None:
    f, plain = pair
    x, w = args[0], args[1].detach()
    inputs = (w, x) if take is per_sample else (x, w)
    close(compiled(take(f), backend, fullgraph)(*inputs), take(plain)(*inputs))


@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.jacfwd])
def test_compile_of_jacobians(transform: Callable) -> None:
    x = torch.randn(3)

    def fn(x: Tensor) -> Tensor:
        return x.sin().exp() * x

    close(compiled(transform(remat(fn)), "aot_eager")(x), transform(fn)(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile_of_a_model(backend: str) -> None:
    ours, plain = models()
    c = compiled(ours, backend)
    for _ in range(2):
        x = torch.randn(2, 3)
        for module, f in ((ours, c), (plain, plain)):
            module.zero_grad()
            f(x).square().sum().backward()
        close([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])


def test_compile_of_a_module_in_one_graph() -> None:
    ours, plain = models(Held)
    x = torch.randn(2, 3)
    close(compiled(ours, "aot_eager", fullgraph=True)(x), plain(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_region_around_a_compiled_function(args: tuple, backend: str) -> None:
    f = remat(compiled(block, backend))
    for _ in range(2):
        close(grads(f, *args), grads(block, *args))


def test_region_around_a_compiled_module() -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    x = torch.randn(2, 3)
    expected = torch.autograd.grad(layer(x).exp().sum(), list(layer.parameters()))
    f = remat(torch.compile(layer, backend="aot_eager"))
    close(torch.autograd.grad(f(x).exp().sum(), list(layer.parameters())), expected)


def test_dropout_in_a_compiled_region(backend: str = "aot_eager") -> None:
    """The backward has the mask of the forward (torch's own checkpoint operator has another mask in ``"eager"``)."""

    def fn(x: Tensor) -> Tensor:
        return nn.functional.dropout(x.sin(), 0.5) * x

    c = compiled(remat(fn), backend)
    x = torch.linspace(1, 2, 64, requires_grad=True)
    out = c(x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    mask = out.ne(0)
    assert 10 < mask.sum() < 54
    expected = torch.where(mask, 2 * (x.cos() * x + x.sin()), torch.zeros(()))
    close(grad, expected.detach())


@pytest.mark.parametrize("backend", BACKENDS)
def test_graph_break_in_a_region(args: tuple, backend: str) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = (x @ w).sin()
        torch._dynamo.graph_break()
        return y.exp() @ w

    c = compiled(remat(fn), backend)
    close(grads(c, *args), grads(fn, *args))


def test_compile_under_no_grad_and_with_dynamic_shapes(pair: tuple) -> None:
    f, plain = pair
    c = torch.compile(f, backend="aot_eager", dynamic=True)
    w = torch.randn(3, 3)
    for n in (2, 5):
        x = torch.randn(n, 3)
        with torch.no_grad():
            close(c(x, w), plain(x, w))
        close(grads(c, x, w), grads(plain, x, w))


def test_disable_remat_around_a_compiled_function(args: tuple) -> None:
    c = compiled(remat(block), "aot_eager")
    with disable_remat():
        close(grads(c, *args), grads(block, *args))
    close(grads(c, *args), grads(block, *args))


def recomputed(f: Callable, args: tuple) -> int:
    """The number of sines in the backward graph of `f`; each one is recomputed."""
    counts = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        sines = [n for n in graph.graph.nodes if n.target is torch.ops.aten.sin.default]
        counts.append(len(sines))
        return graph.forward

    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: graph.forward,
        bw_compiler=count,
        partition_fn=min_cut_rematerialization_partition,
    )
    grads(torch.compile(f, backend=backend, fullgraph=True), *args)
    return counts[-1]


def test_the_compiled_backward_recomputes_the_region(args: tuple) -> None:
    def deep(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            x = (x @ w).sin().exp()
        return x

    assert recomputed(remat(deep), args) == 3


@pytest.mark.parametrize(
    ("policy", "sines"),
    [
        (None, 3),
        (policies.save_ops("aten.sin"), 0),
        (policies.save_matmuls, 3),
        (~policies.save_matmuls, 0),
        (lambda ctx, op, *args, **kwargs: op is torch.ops.aten.sin.default, 0),
        (policies.everything_saveable, 0),
        (policies.offload(policies.save_ops("aten.sin")), 0),
        (policies.save_only_these_names("h"), 0),
        (policies.save_ops("aten.sin") | policies.save_only_these_names("h"), 0),
    ],
)
def test_compiled_policies(policy: Any, sines: int, args: tuple) -> None:
    def deep(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            x = checkpoint_name((x @ w).sin(), "h").exp()
        return x

    fn = remat(deep, policy=policy)
    assert recomputed(fn, args) == sines
    torch._dynamo.reset()
    close(grads(torch.compile(fn, backend="aot_eager", fullgraph=True), *args), grads(deep, *args))
