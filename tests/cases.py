"""A table of functions that tests differentiate by all transforms, and helpers that compare two runs of them.

A case's flags say what plain torch can do with its function; a test selects by them: `cases(func=True, vmap=True)`.
"""

import random
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.measure import FlopCount
from remat._core import trees
from remat._measure.allocated import Allocated

ROOT = Path(__file__).resolve().parents[1]  # the project's folder
Wrap = Callable[..., Callable]  # `remat`, `remat` with options, or `plain`
N, KB = 32, 32 * 32 * 8  # a large matrix, and its bytes


@dataclass(frozen=True)
class Case:
    """A function and its arguments."""

    name: str
    fn: Callable[..., Any]
    make_args: Callable[[], tuple]  # new ones with the same values in each call; the differentiable ones require grad
    captured: tuple[Tensor, ...] = ()  # tensors that `fn` captures; parameters among them require grad
    func: bool = True  # `torch.func.grad`, `vjp` and `jacrev` work
    jvp: bool = True  # forward mode works, with `torch.func.jvp` and with `torch.autograd.forward_ad`
    vmap: bool = True  # `vmap` over the differentiable arguments works, with `randomness="different"`
    double: bool = True  # the gradient can be differentiated again
    jacobian: bool = True  # `torch.func.jacrev` and `jacfwd` work, where `func` and `jvp` do
    random: bool = False  # the result depends on a random generator
    stateful: bool = False  # captured tensors or arguments change

    def inputs(self, args: tuple) -> list[Tensor]:
        """The differentiable arguments and captured parameters, each once."""
        return list({id(t): t for t in (*tensor_leaves(args), *self.captured) if t.requires_grad}.values())

    @contextmanager
    def state(self) -> Iterator[None]:
        """Seed the generator on entry; restore it and the values of captured tensors on exit."""
        before = [t.detach().clone() for t in self.captured]
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(self.captured, before):
                    if not torch.equal(tensor, value):
                        tensor.copy_(value)


def flat(case: Case, fn: Callable[..., Any] | None = None) -> tuple[Callable[..., tuple], tuple[Tensor, ...]]:
    """A case for `torch.func`: a function of the differentiable arguments only, and these arguments.

    It returns the differentiable results, a tuple of tensors. Other arguments are copied at each call.
    """
    fn = case.fn if fn is None else fn
    leaves, spec = trees.flatten(case.make_args())
    unique: dict[int, Tensor] = {id(t): t for t in leaves if isinstance(t, Tensor) and t.requires_grad}
    position = {key: i for i, key in enumerate(unique)}

    def call(*primals: Tensor) -> tuple[Tensor, ...]:
        full = [primals[position[id(t)]] if id(t) in position else copied(t) for t in leaves]
        result = fn(*spec.unflatten(full))
        return tuple(t for t in tensor_leaves(result) if t.is_floating_point() or t.is_complex())

    return call, tuple(t.detach() for t in unique.values())


def scalar(case: Case, fn: Callable[..., Any] | None = None) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """The same as `flat`, with the results reduced to a real number."""
    call, primals = flat(case, fn)
    return (lambda *args: total(call(*args))), primals


def total(tree: Any) -> Tensor:
    """Reduce the differentiable tensors in a tree to a real number, each with another weight."""
    found = [t for t in tensor_leaves(tree) if t.is_floating_point() or t.is_complex()]
    parts = [(torch.view_as_real(t) if t.is_complex() else t).sin().sum() * (i + 1) for i, t in enumerate(found)]
    return sum(parts, torch.zeros((), dtype=torch.float64))


def copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def tensor_leaves(tree: Any) -> list[Tensor]:
    return [leaf for leaf in trees.flatten(tree)[0] if isinstance(leaf, Tensor)]


def assert_same(actual: Any, expected: Any, exact: bool = True) -> None:
    """Assert that two trees have the same structure and equal leaves; with `exact`, tensors are equal bit for bit."""
    found, spec = trees.flatten(actual)
    wanted, wanted_spec = trees.flatten(expected)
    assert spec == wanted_spec, trees.describe_difference(wanted_spec, spec, "it")
    for path, a, b in zip(trees.paths(spec, "it"), found, wanted):
        if not isinstance(b, Tensor):
            assert type(a) is type(b) and a == b, f"{path}: {a!r} instead of {b!r}"
            continue
        assert isinstance(a, Tensor), f"{path}: {a!r} is not a tensor"
        assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device), path
        if exact:
            assert same_bits(a, b), f"{path}: {a} instead of {b}"
        else:
            torch.testing.assert_close(a, b, msg=lambda text, path=path: f"{path}: {text}")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal; a NaN equals a NaN."""
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def seed_all(number: int = 0) -> None:
    """Seed the generators of torch, Python and NumPy."""
    torch.manual_seed(number), random.seed(number), numpy.random.seed(number)


def assert_same_results(run: Callable[[Any], Any], *given: Any, exact: bool = True) -> None:
    """Assert that a function has the same results for all arguments, and leaves the generator in the same state."""
    results = []
    for each in given:
        seed_all()
        results.append((run(each), torch.get_rng_state()))
    assert_same(*results, exact=exact)


def plain(fn: Callable, **options: Any) -> Callable:
    """A function without a region: what a program gets in place of `remat` in the run to compare with."""
    return fn


def grad(out: Any, inputs: Any, **options: Any) -> tuple[Tensor, ...]:
    """The gradients of the sum of a result, or of several."""
    out = sum(t.sum() for t in out) if isinstance(out, (tuple, list)) else out.sum()
    return torch.autograd.grad(out, inputs, **options)


def gradient(fn: Callable, x: Tensor, *args: Any) -> Tensor:
    """The gradient of the sum of a function's result with respect to its first argument."""
    return torch.autograd.grad(fn(x, *args).sum(), x)[0]


def in_threads(*jobs: Callable[[], Any]) -> list[Any]:
    """The results of calls that run at once, each in a thread of its own."""
    with ThreadPoolExecutor(len(jobs)) as threads:
        return [job.result(60) for job in [threads.submit(job) for job in jobs]]


def repeated(fn: Callable[[Tensor], Tensor], count: int) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        for _ in range(count):
            x = fn(x)
        return x

    return call


def plain_scan(step: Callable, carry: Any, xs: Any = None, length: int | None = None, reverse: bool = False) -> tuple:
    """The loop that ``remat.scan`` replaces."""
    count = len(tree_leaves(xs)[0]) if length is None else length
    order = slice(None, None, -1 if reverse else 1)
    ys = []
    for i in range(count)[order]:
        carry, y = step(carry, None if xs is None else tree_map(lambda t, i=i: t[i], xs))
        ys.append(y)
    return carry, None if ys[0] is None else tree_map(lambda *each: torch.stack(each), *ys[order])


@contextmanager
def setting(put: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    """Put a value, and in the end the one from before."""
    put(value)
    try:
        yield
    finally:
        put(before)


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    return setting(torch.set_default_dtype, dtype, torch.get_default_dtype())


def rand(*shape: int, seed: int = 0, grad: bool = True, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normally distributed numbers that depend only on the shape and the seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_(grad)


def tensors(*shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
    """Make one differentiable tensor of each shape."""
    return lambda: tuple(rand(*shape, seed=i) for i, shape in enumerate(shapes))


def weight(*shape: int, seed: int = 10) -> nn.Parameter:
    return nn.Parameter(rand(*shape, seed=seed, grad=False) / 2)


def module(make: Callable[[], nn.Module]) -> nn.Module:
    """A module in float64, whose parameters don't depend on earlier random numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().double()


def elementwise(x: Tensor) -> Tensor:
    return (x.sin().exp() * x.cos()).tanh()


def matmuls(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    h = F.linear(torch.addmm(b, x, w).sin(), w, b).tanh()
    return torch.bmm(h.expand(2, -1, -1), w.expand(2, -1, -1)).cos() + torch.einsum("ij,kj->ik", h, w)


def dropout(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout(F.dropout((x @ w).tanh(), 0.5) @ w, 0.2).sin()


def indexing(x: Tensor, w: Tensor) -> Tensor:
    rows = x.sin()[[0, 2, 2]]
    columns = rows[:, 1:3].exp() * rows[..., None, 0]
    return torch.where(columns > 1, columns.sin(), w[0, 1] * columns) + x[0, 0]


def in_place(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    h.tanh_()
    h = h.clone()
    h[0] = h[1] * 2
    h.add_(x).mul_(2.0)
    y = torch.zeros_like(h)
    y.copy_(h.sin())
    return F.relu_(y.mul_(w)).clone().exp_()


class OldSquare(torch.autograd.Function):
    """The signature `forward(ctx, ...)`, which torch.func refuses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return scale * x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        (x,) = ctx.saved_tensors
        return 2 * ctx.scale * x * grad, None


class SineAndCosine(torch.autograd.Function):
    """Saves an output, and has a rule for each transform."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.cos()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(*output)
        ctx.save_for_forward(*output)

    @staticmethod
    def backward(ctx: Any, to_sine: Tensor, to_cosine: Tensor) -> Tensor:
        sine, cosine = ctx.saved_tensors
        return to_sine * cosine - to_cosine * sine

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> tuple[Tensor, Tensor]:
        sine, cosine = ctx.saved_tensors
        return tangent * cosine, -tangent * sine


def new_function(x: Tensor) -> Tensor:
    sine, cosine = SineAndCosine.apply(x.exp())
    return (sine * cosine).tanh()


def branch_on_value(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    while h.abs().max() > 0.1:
        h = (h / 2).sin() if h.sum() > 0 else (h / 3).tanh() * w[0]
    return h.exp()


Point = namedtuple("Point", "x y")


@dataclass
class Batch:
    """A dataclass that no pytree registry knows."""

    x: Tensor
    name: str
    scale: float | None = None


def pytrees(batch: Batch, weights: dict[str, Any], mode: str, nothing: None) -> dict[str, Any]:
    h = batch.x @ weights["w"]
    for b in weights["more"]:
        h = h.tanh() * b
    point = Point(h.sin(), h.cos() if mode == "cos" else None)
    return {"point": point, "batch": Batch(h.exp(), batch.name), "mode": mode, "none": nothing, "n": 3, "l": [h, (h,)]}


def pytrees_args() -> tuple:
    weights = {"w": rand(3, 3, seed=1), "more": [rand(3, seed=2), rand(1, seed=3)], "unused": rand(2, seed=4)}
    return Batch(rand(2, 3), "first", 2.0), weights, "cos", None


W1, W2 = weight(4, 4), weight(4, 4, seed=11)
INDEX = torch.tensor([[0, 2], [1, 1], [3, 0]])
NORM = module(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2)))
MODULE = module(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.LayerNorm(4)))
TRANSFORMER = module(lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True))
LSTM = module(lambda: nn.LSTM(3, 4, batch_first=True))


def returns_views(x: Tensor) -> dict[str, Tensor]:
    h = x.sin()
    return {"view": x.view(-1), "slice": x[0], "transposed": h.t(), "h": [h, h, h.cos(), h], "same": h.view_as(h)}


def integers(x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    h = x.sin()
    values, places = h.topk(2, dim=1)
    return values.exp(), places, h.argmax(1) + index.sum(), index, h > 0


def detached_part(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        scale = (x @ w).exp().amax()
    return ((x @ w) / scale).tanh() * x.exp().detach()


def of_complex(x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.fft.fft(x.sin()) * z.exp()
    return h.abs(), h * z


FIRST_ORDER: dict[str, Any] = {"jvp": False, "double": False}
NO_FUNC: dict[str, Any] = {"func": False, "jvp": False, "vmap": False}
CASES = (
    Case("elementwise", elementwise, tensors((2, 3))),
    Case("scalar", elementwise, tensors(())),
    Case("empty", elementwise, tensors((0, 3)), jacobian=False),
    Case("nothing_to_save", lambda x, y: x + y, tensors((3,), (3,))),
    Case("mlp", lambda x, w1, w2: torch.tanh(x @ w1) @ w2, tensors((3, 4), (4, 5), (5, 2))),
    Case("same_argument_twice", lambda x, w: torch.tanh(x @ w) @ w, lambda: (rand(3, 3),) * 2),
    Case("matmuls", matmuls, tensors((3, 3), (3, 3), (3,))),
    Case(
        "convolution",
        lambda x, w, b: F.avg_pool2d(F.conv2d(x, w, b, padding=1).tanh(), 2).sigmoid(),
        tensors((2, 2, 4, 4), (3, 2, 3, 3), (3,)),
    ),
    Case(
        "attention",
        lambda q, k, v: (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v.tanh(),
        tensors((2, 3, 4), (2, 3, 4), (2, 3, 4)),
    ),
    Case("dropout", dropout, tensors((3, 4), (4, 4)), random=True),
    Case(
        "batch_norm",
        lambda x, w, b, mean, var: F.batch_norm(x.sin(), mean, var, w, b, training=True).tanh(),
        lambda: (rand(6, 3), *(rand(3, seed=i, grad=i < 3) for i in (1, 2, 3)), rand(3, seed=4, grad=False).exp()),
        stateful=True,
        vmap=False,
    ),
    Case("batch_norm_module", NORM, tensors((6, 4)), (*NORM.parameters(), *NORM.buffers()), stateful=True, **NO_FUNC),
    Case("layer_norm", lambda x, w, b: F.layer_norm(x.sin(), (4,), w, b).tanh(), tensors((2, 4), (4,), (4,))),
    Case("indexing", indexing, tensors((3, 4), (2, 2))),
    Case("embedding", lambda table, i: F.embedding(i, table.sin(), 0).tanh().sum(-2), lambda: (rand(5, 3), INDEX)),
    Case("in_place", in_place, tensors((4, 4), (4, 4))),
    Case("old_function", lambda x: OldSquare.apply(x.sin(), 3.0).exp(), tensors((3,)), **NO_FUNC),
    Case("new_function", new_function, tensors((3,))),
    Case("branch_on_value", branch_on_value, tensors((3, 3), (3, 3)), vmap=False),
    Case("pytrees", pytrees, pytrees_args),
    Case("captured_module", lambda x: MODULE(x.sin()) * 2, tensors((3, 4)), tuple(MODULE.parameters())),
    Case("module", MODULE, tensors((3, 4)), tuple(MODULE.parameters())),
    Case("transformer", TRANSFORMER, tensors((2, 3, 4)), tuple(TRANSFORMER.parameters()), **FIRST_ORDER),
    Case("lstm", LSTM, tensors((2, 3, 3)), tuple(LSTM.parameters()), vmap=False),
    Case("returns_input", lambda x, y: (x, x.sin() * y, y), tensors((3,), (3,))),
    Case("returns_views", returns_views, tensors((2, 3))),
    Case("integers", integers, lambda: (rand(3, 4), INDEX)),
    Case("integers_only", lambda index: index * 2 + index.sum(), lambda: (INDEX,), double=False, **NO_FUNC),
    Case("no_tensor_arguments", lambda: torch.tanh(W1 @ W2).sin(), tuple, (W1, W2), **NO_FUNC),
    Case("no_tensors_out", lambda x: (x.shape[0], None, "text", ()), tensors((3,)), double=False, **NO_FUNC),
    Case("detached_part", detached_part, tensors((3, 3), (3, 3))),
    Case(
        "reductions",
        lambda x: (x.sin().logsumexp(1), x.cumsum(0).var(0), x.exp().prod(1), x.sort(1).values.mean(), x.norm()),
        tensors((3, 4)),
    ),
    Case("complex_numbers", of_complex, lambda: (rand(4), rand(4, seed=1, dtype=torch.complex128)), jacobian=False),
    Case(
        "loss",
        lambda x, w, target: F.cross_entropy((x.tanh() @ w).sin() @ w.T, target),
        lambda: (rand(3, 4), rand(4, 4, seed=1), torch.tensor([0, 3, 1])),
    ),
)


def cases(**flags: bool) -> pytest.MarkDecorator:
    """Parametrize a test by `case`, with the cases that have these flags."""
    chosen = [case for case in CASES if all(getattr(case, flag) == value for flag, value in flags.items())]
    assert chosen
    return pytest.mark.parametrize("case", chosen, ids=[case.name for case in chosen])


def run_program(program: str) -> str:
    """Run a program in its own process, in the project's folder, and return what it prints."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def orders_of(derive: Callable[[int], Any]) -> int:
    """Three, or two if torch has no third derivative, as for batch norm from torch 2.15 on."""
    try:
        derive(3)
    except RuntimeError as error:
        if "does not support 3rd+ order derivatives" not in str(error):
            raise
        return 2
    return 3


def training_step(model: nn.Module, loss: Callable[[], Tensor]) -> tuple[list[Any], int, int]:
    """The gradients of a step, its peak, and its FLOPs."""
    for count in (Allocated(()), FlopCount()):
        model.zero_grad()
        torch.manual_seed(1)
        with count:
            loss().backward()
        if isinstance(count, Allocated):
            peak = count.peak
    return [p.grad for p in model.parameters()], peak, count.flops
