"""Functions that random programs call, and the comparison of a program with and without regions.

Programs compute with matrices in float64. In `compare(make, run)`, `make()` makes a function, for which
`remat` makes regions in one run and returns its argument in the other.
"""

from __future__ import annotations

import functools
import operator
import random
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from cases import SineAndCosine, assert_same, rand, tensor_leaves, total
from torch import Tensor, nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import CheckpointPolicy

import remat as package
from benchmarks.measure import OpCounter, held_bytes
from remat import CaptureError, MutationError, checkpoint_name, policies
from remat._core import private, trees

__all__ = [
    "GENERATOR", "F", "Layer", "SimpleNamespace", "SineAndCosine", "added", "checkpoint_name", "chosen", "compare",
    "differentiated", "differentiated_again", "dual", "functional_call", "grad", "hook", "jacfwd", "jacrev", "jvp",
    "keeps_no_more", "np", "packing", "pair", "policies", "random", "recomputes_no_more", "remat", "tensor",
    "torch", "vjp", "vmap",
]  # fmt: skip

Fn = Callable[..., Any]
GENERATOR = torch.Generator()
FIRED: list[float] = []  # the factors of the hooks on gradients that have run
PRODUCTS = ("aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm", "aten.convolution")


REGIONS = [True]  # whether `remat` makes regions


class Unrunnable(Exception):
    """The program doesn't run without regions."""


class Refused(Exception):
    """A region raised an error because its results could be wrong."""


# --- what programs call -----------------------------------------------------------------------------------------------


def remat(fn: Any = None, **options: Any) -> Any:
    """`remat.remat`, or the function itself in the plain run. It is a global, so that no closure contains it."""
    if REGIONS[0]:
        return package.remat(fn, **options)
    return (lambda fn: fn) if fn is None else fn


@contextmanager
def without_regions() -> Iterator[None]:
    REGIONS[0] = False
    try:
        yield
    finally:
        REGIONS[0] = True


def tensor(seed: int, grad: bool = True) -> Tensor:
    return (rand(3, 3, seed=seed, grad=False) * 0.7).requires_grad_(grad)


def pair(t: Tensor, dim: int = 0) -> Tensor:
    return torch.stack([t, t.cos()], dim)


def added(tensors: Iterable[Tensor]) -> Tensor:
    """The sum, without the 0 of `sum`: under a mode, torch can't add 0 to its zero tensors without memory."""
    return functools.reduce(operator.add, tensors)


def hook(t: Tensor, factor: float) -> None:
    def scaled(g: Tensor | None) -> Tensor | None:
        if g is not None and not package.is_recomputing():  # a recompute repeats backward passes inside the region
            FIRED.append(factor)
        return None if g is None else g * factor

    if t.requires_grad:
        t.register_hook(scaled)


@contextmanager
def packing() -> Iterator[None]:
    """Saved-tensor hooks that pack a tensor as itself, and unpack a copy of it."""
    # The pack hook makes no copy, as rrelu saves its noise tensor before the noise is drawn.
    hooks = (lambda tensor: tensor, torch.clone) if REGIONS[0] else (with_version, unchanged)
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        yield


def with_version(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor, tensor._version


def unchanged(packed: tuple[Tensor, int]) -> Tensor:
    """A copy of the saved tensor.

    Raises:
        RuntimeError: the tensor was changed in place since. torch raises this too, but not if hooks pack the tensor
            itself: then its gradients are wrong. torch's own forward derivative of softmax is an example.
    """
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError("a saved tensor was changed in place, so the gradient would be wrong")
    return tensor.clone()


def chosen(seed: int, answers: int = 2) -> Fn:
    """A deterministic policy function that decides by the operator and the shapes of its tensors."""
    five = [CheckpointPolicy[f"{a}_{b}"] for a in ("MUST", "PREFER") for b in ("RECOMPUTE", "SAVE")]
    five.append(CheckpointPolicy.MUST_CPU_OFFLOAD)

    def predicate(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        shapes = [tuple(a.shape) for a in args if isinstance(a, Tensor)]
        number = zlib.crc32(f"{op}{shapes}{seed}".encode()) % answers
        return five[number] if answers == 5 else number == 0

    predicate.__qualname__ = f"chosen({seed}, {answers})"
    return predicate


def differentiated(f: Fn, a: Tensor, b: Tensor) -> Tensor:
    """The gradient with respect to a leaf made from `a`; it can be differentiated again with respect to `b`."""
    with torch.enable_grad():
        p = a.detach().requires_grad_()
        out = total(f(p, b))
        g = torch.autograd.grad(out, p, create_graph=True, allow_unused=True)[0] if out.requires_grad else None
    return torch.zeros_like(a) if g is None else g


def differentiated_again(f: Fn, a: Tensor, b: Tensor) -> Tensor:
    """The gradient with respect to a tensor that isn't a leaf; it can be differentiated again.

    Below a level, a result that doesn't depend on `p` may require grad, and so may `p` if it is such a result. The
    return value doesn't depend on that.
    """
    p = a * 1
    if private.transforms_active() and not p.requires_grad:
        raise RuntimeError("nothing to differentiate at")
    out = total(f(p, b))
    g = None
    if p.requires_grad and out.requires_grad:
        (g,) = torch.autograd.grad(out, p, create_graph=True, allow_unused=True)
    return torch.zeros_like(p) if g is None else g * 0.5


def dual(f: Fn, a: Tensor, b: Tensor) -> Tensor:
    """The derivative in a direction, by `torch.autograd.forward_ad`."""
    with fwAD.dual_level():
        out, tangent = fwAD.unpack_dual(f(fwAD.make_dual(a * 1, b.cos()), b))
        return out + 0 if tangent is None else tangent + 0


class Layer(nn.Module):
    """A module with weights, a count of its calls, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(tensor(10, grad=False))
        self.norm = nn.BatchNorm1d(3).double()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))

    def forward(self, t: Tensor) -> Tensor:
        self.calls += 1
        with torch.no_grad():
            self.mean.mul_(0.9).add_(t.mean(0) * 0.1)
        h = self.norm((t @ self.weight).tanh())
        return h * self.calls.clone() + self.mean


# --- how programs are run ---------------------------------------------------------------------------------------------


def gradients(out: Tensor, leaves: Sequence[Tensor], **options: Any) -> list[Tensor]:
    """Gradients, with zeros instead of None: torch returns either if `out` doesn't depend on a leaf."""
    if not out.requires_grad:
        return list(map(torch.zeros_like, leaves))
    grads = torch.autograd.grad(out, leaves, allow_unused=True, **options)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, grads)]


def in_parts(fn: Fn, x: Tensor, y: Tensor, leaves: list[Tensor]) -> list:
    out = fn(x, y)
    return [out, *(gradients(row, leaves, retain_graph=True) for row in out.sum(1))]


def accumulated(fn: Fn, x: Tensor, y: Tensor, leaves: list[Tensor]) -> list:
    out = fn(x, y)
    if out.requires_grad:
        total(out).backward()
    return [out, *(torch.zeros_like(t) if t.grad is None else t.grad for t in leaves)]


def twice(fn: Fn, x: Tensor, y: Tensor, leaves: list[Tensor]) -> list:
    out = fn(x, y)
    return [out, gradients(out.sin().sum(), leaves, retain_graph=True), gradients(total(out), leaves)]


def two_calls(fn: Fn, x: Tensor, y: Tensor, leaves: list[Tensor]) -> list:
    first, second = fn(x, y), fn(y, x)
    return [first, second, gradients(total(first), leaves), gradients(total(second), leaves)]


def three_calls(fn: Fn, x: Tensor, y: Tensor, leaves: list[Tensor]) -> list:
    outs = [fn(x, y)]
    found = [gradients(total(outs[0]), leaves)]
    for a, b in ((y, x), (x, x)):
        outs.append(fn(a, b))
        found.append(gradients(total(outs[-1]), leaves))
    return [outs, found]


def without_grad(fn: Fn, x: Tensor, y: Tensor, leaves: list[Tensor]) -> list:
    with torch.no_grad():
        return [fn(x, y)]


def higher(orders: int, fn: Fn, x: Tensor, y: Tensor, leaves: list[Tensor]) -> list:
    out = fn(x, y)
    found = [out]
    for order in range(orders):
        found.append(gradients(total(found[-1]), leaves, create_graph=order + 1 < orders))
    return found


def batched(fn: Fn, x: Tensor, y: Tensor, leaves: list[Tensor]) -> list:
    out = fn(x, y)
    if not out.requires_grad:
        return [out, [torch.zeros(9, 3, 3).double() for _ in leaves]]
    heads = torch.eye(9, dtype=out.dtype).view(9, 3, 3)
    grads = torch.autograd.grad(out, leaves, heads, allow_unused=True, is_grads_batched=True)
    return [out, [torch.zeros(9, 3, 3).double() if g is None else g for g in grads]]


def hooks_around(fn: Fn, x: Tensor, y: Tensor, leaves: list[Tensor]) -> list:
    with packing():
        return higher(1, fn, x, y, leaves)


RUNS: dict[str, Fn] = {
    "no_grad": without_grad,
    "backward": accumulated,
    "grad": lambda *a: higher(1, *a),
    "twice": twice,
    "in parts": in_parts,
    "two calls": two_calls,
    "three calls": three_calls,
    "double": lambda *a: higher(2, *a),
    "triple": lambda *a: higher(3, *a),
    "batched": batched,
    "hooks around": hooks_around,
}


def arguments() -> tuple[Tensor, Tensor]:
    return tensor(0), tensor(1)


def observe(make: Fn, run: str, exact: bool) -> Any:
    """All results of a run: values, gradients, buffers, hooks that ran, and the next numbers of the generators."""
    torch.manual_seed(1)
    GENERATOR.manual_seed(2)
    random.seed(3)
    np.random.seed(4)
    FIRED.clear()
    fn, captured, *buffers = make()
    x, y = arguments()
    found = RUNS[run](fn, x, y, [x, y, *captured])
    generators = torch.rand(2), torch.rand(2, generator=GENERATOR), random.random(), float(np.random.rand())
    return {
        "result": torch.utils._pytree.tree_map(lambda t: t.detach().clone(), found),
        "buffers": [t.clone() for t in buffers[0]] if buffers else [],
        "hooks that ran": sorted(FIRED) if exact else [],
        "generators": generators,
    }


def surroundings() -> tuple:
    modes = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return modes, hooks, torch.is_grad_enabled(), torch._C._functorch.maybe_get_level(torch.zeros(()))


def compare(make: Fn, run: str, exact: bool) -> None:
    """Assert that a program has the same results with and without regions.

    Raises:
        Unrunnable: the program raises an error without regions.
        Refused: a region raised an error because its results could be wrong.
    """
    before = surroundings()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with without_regions():
                expected = observe(make, run, exact)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            raise Unrunnable from error
        with refusals():
            found = observe(make, run, exact)
    assert surroundings() == before
    if exact:
        assert_same(found, expected)
        return
    tensors = [t for t in tensor_leaves(expected["result"]) if t.is_floating_point()]
    largest = max(float(t.abs().max()) for t in tensors)
    if not largest < 1e6:  # derivatives of high order, too large for a comparison
        raise Unrunnable from OverflowError(f"results up to {largest:.0e}")
    compare_closely(found, expected, 1e-6 * (1 + largest))


@contextmanager
def refusals() -> Iterator[None]:
    try:
        yield
    except (MutationError, CaptureError) as error:
        raise Refused from error


def compare_closely(found: Any, expected: Any, atol: float) -> None:
    """Compare results whose sums may have another order."""
    assert trees.flatten(found)[1] == trees.flatten(expected)[1]
    for a, b in zip(trees.flatten(found)[0], trees.flatten(expected)[0]):
        if isinstance(b, Tensor):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=atol)
        else:
            assert a == b


def keeps_no_more(make: Fn) -> None:
    """Assert that the program as one region without a policy saves no more than without, except for old buffers."""
    with without_regions():
        fn, _, *buffers = make()
    copies = sum(buffer.nbytes for each in buffers for buffer in each)
    with refusals():
        ours, plain = held_bytes(remat(fn), *arguments()), held_bytes(fn, *arguments())
    assert ours <= plain + copies, f"a region saves {ours} bytes, the plain function {plain}"


def recomputes_no_more(make: Fn, policy: Any, other: Any) -> None:
    """Assert that the program as one region recomputes no more products if its policy saves more."""

    def products(policy: Any) -> int:
        with without_regions():
            fn = make()[0]
        out = remat(fn, policy=policy)(*arguments())
        if not out.requires_grad:
            return 0
        with OpCounter() as counter:
            out.sum().backward()
        return sum(counter[name] for name in PRODUCTS)

    with refusals():
        few, more = products(policy | other), products(policy)
    assert few <= more, f"{few} products in the backward if more is saved, {more} otherwise"
