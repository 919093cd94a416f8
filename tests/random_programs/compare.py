"""Compares a program with and without regions: results, gradients, state, random generators, what is kept."""

import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.autograd.forward_ad as fwAD
from cases import default_dtype, same_bits, tensor_leaves, total
from surroundings import assert_as_before, surroundings
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.utils._pytree import tree_map

from benchmarks.measure import OpCounter, held_bytes
from remat import RematError

from . import toolbox
from .toolbox import FIRED, Apply, Counter, Noise, packing, pair, remat, tensor, without_regions

Fn = Callable[..., Any]
PRODUCTS = ("aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm", "aten.convolution")
# Errors on purpose: what a region can't do, and says so.
MEANT = re.compile(
    r"requires grad and was changed in place by the region"  # an in-place module that is itself a region
    r"|A region under torch\.func stored a tensor"  # in an attribute, say
    r"|A region under torch\.func (uses `detach_`|registers a hook|calls )"  # which act on one of several transforms
    r"|A region that uses torch\.func calls torch\.autograd\.grad"  # with hooks on its inputs
    r"|A region with a policy traces a function|as torch\.func\.linearize does"
)


class Unrunnable(Exception):
    """The program raises an error without regions, or a result is large or not finite."""


class Refused(Exception):
    """A region raised an error that is documented."""


def gradients(out: Tensor, leaves: Sequence[Tensor], **options: Any) -> list[Tensor]:
    """Gradients, with zeros instead of None: torch returns either if `out` doesn't depend on a leaf."""
    if not out.requires_grad:
        return list(map(torch.zeros_like, leaves))
    grads = torch.autograd.grad(out, leaves, allow_unused=True, **options)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, grads)]


def constant(fn: Fn, x: Tensor, y: Tensor, leaves: list[Tensor]) -> tuple:
    """Nothing requires grad."""
    for leaf in leaves:
        leaf.requires_grad_(False)
    return [fn(x, y)], []


def backward(fn: Fn, x: Tensor, y: Tensor, leaves: list[Tensor]) -> tuple:
    out = fn(x, y)
    if out.requires_grad:
        total(out).backward()
    return [out], [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]


def repeated(losses: Fn, fn: Fn, x: Tensor, y: Tensor, leaves: list[Tensor]) -> tuple:
    """Several backward passes of one graph, each for some leaves."""
    out = fn(x, y)
    return [out], [gradients(loss, some, retain_graph=True) for loss, some in losses(out, leaves)]


def several_calls(fn: Fn, x: Tensor, y: Tensor, leaves: list[Tensor]) -> tuple:
    """The second call and the third one run between the backward passes of the first two."""
    outs = [fn(x, y)]
    found = [gradients(total(outs[0]), leaves)]
    outs += [fn(y, x), fn(x, x)]
    return outs, found + [gradients(total(out), leaves) for out in outs[1:]]


def higher(orders: int, fn: Fn, x: Tensor, y: Tensor, leaves: list[Tensor]) -> tuple:
    out = fn(x, y)
    found = [out]
    for order in range(orders):
        found.append(gradients(total(found[-1]), leaves, create_graph=order + 1 < orders))
    return [out], found[1:]


def batched(fn: Fn, x: Tensor, y: Tensor, leaves: list[Tensor]) -> tuple:
    out = fn(x, y)
    heads = torch.eye(16)[:5].view(5, 4, 4)
    found = gradients(out, leaves, grad_outputs=heads, is_grads_batched=True) if out.requires_grad else []
    return [out], [g.expand(5, *t.shape) for g, t in zip(found, leaves)]


def in_a_direction(fn: Fn, x: Tensor, y: Tensor, leaves: list[Tensor]) -> tuple:
    with fwAD.dual_level():
        out, tangent = fwAD.unpack_dual(fn(fwAD.make_dual(x, y.detach().cos()), y))
        tangent = torch.zeros_like(out) if tangent is None else tangent
        return [out], [tangent, gradients(total(tangent), leaves)]


def trained(every: int, thread: bool, fn: Fn, x: Tensor, y: Tensor, leaves: list[Tensor]) -> tuple:
    optimizer = torch.optim.SGD(leaves[2:], lr=0.05, momentum=0.9)
    losses = []
    for i in range(3):
        losses.append(total(fn(x + i, y)))
        if losses[-1].requires_grad:
            with ThreadPoolExecutor(1) if thread else nullcontext() as pool:
                pool.submit(losses[-1].backward).result() if thread else losses[-1].backward()
        if (i + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses, [leaf.detach() for leaf in leaves]


RUNS: dict[str, Fn] = {
    "no_grad": lambda fn, x, y, leaves: ([torch.no_grad()(fn)(x, y)], []),
    "constant": constant,
    "backward": backward,
    "twice": lambda *a: repeated(lambda out, leaves: ((out.sin().sum(), leaves), (total(out), leaves)), *a),
    "in parts": lambda *a: repeated(lambda out, leaves: ((part, leaves) for part in out.sum(1)), *a),
    "some leaves": lambda *a: repeated(lambda out, leaves: ((out[0].sum(), leaves[-1:]), (total(out), leaves[:1])), *a),
    "several calls": several_calls,
    "trained": lambda *a: trained(1, False, *a),
    "accumulated": lambda *a: trained(3, False, *a),
    "in a thread": lambda *a: trained(1, True, *a),
    "hooks around": lambda *a: packing()(higher)(1, *a),
    "double": lambda *a: higher(2, *a),
    "triple": lambda *a: higher(3, *a),
    "batched": batched,
    "in a direction": in_a_direction,
}
EXACT = [*RUNS][: [*RUNS].index("double")]  # sums have the same order as without regions

# Runs that differentiate a loss of the modules' parameters, a function of them and the two matrices.
OF_PARAMETERS: dict[str, Fn] = {
    "grad": lambda call, loss, p, x, y: grad(loss)(p, x, y),
    "vmap grad": lambda call, loss, p, x, y: vmap(grad(loss), (None, 0, None), randomness="same")(p, pair(x), y),
    "hvp": lambda call, loss, p, x, y: jvp(lambda p: grad(loss)(p, x, y), (p,), (tree_map(torch.cos, p),))[1],
    "grad grad": lambda call, loss, p, x, y: grad(lambda p: total(grad(loss)(p, x, y)))(p),
    "vjp vmap": lambda call, loss, p, x, y: (lambda out, pull: (out, pull(out.cos())))(
        *vjp(lambda p: vmap(lambda z: call(p, z, y), randomness="different")(pair(x)), p)
    ),
    "models": lambda call, loss, p, x, y: vmap(grad(loss), (0, None, None), randomness="different")(
        tree_map(pair, p), x, y
    ),
}


def of_parameters(run: str, around: dict | None, fn: Fn, x: Tensor, y: Tensor, modules: list[nn.Module]) -> tuple:
    whole = Apply(lambda pair, *kids: fn(*pair), *modules)
    params = {name: p.detach() for name, p in whole.named_parameters() if p.requires_grad}
    rest = {name: p for name, p in (*whole.named_parameters(), *whole.named_buffers()) if name not in params}

    def call(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional_call(whole, {**rest, **p}, ((x, y),))

    region = call if around is None else remat(call, **around)
    found = OF_PARAMETERS[run](region, lambda p, x, y: total(region(p, x, y)), params, x.detach(), y.detach())
    return [], [found]


@contextmanager
def surrounded() -> Iterator[None]:
    """Programs compute in float64. Memory that they don't initialize is filled with NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with default_dtype(torch.float64), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def observe(make: Fn, run: str, around: dict | None) -> dict[str, Any]:
    """All that can be seen of a run."""
    torch.manual_seed(1)
    toolbox.GENERATOR.manual_seed(2)
    random.seed(3)
    np.random.seed(4)
    FIRED.clear()
    fn, captured, *modules = make()
    x, y, modules = tensor(0), tensor(1), modules[0] if modules else []
    parameters = {id(p): p for m in modules for p in m.parameters() if p.requires_grad}
    if run in OF_PARAMETERS:
        outs, found = of_parameters(run, around, fn, x, y, modules)
    else:
        outs, found = RUNS[run](fn, x, y, [x, y, *captured, *parameters.values()])
    all_modules = [each for m in modules for each in m.modules()]
    return {
        "results": [t.detach().clone() for t in outs],
        "gradients": [t.detach().clone() for t in tensor_leaves(found)],
        # Where plain autograd follows some operand, any result of a derivative may be followed, needlessly.
        "requires_grad of results": [t.requires_grad for t in outs] if run in ("no_grad", "constant") else [],
        "buffers": [t.clone() for m in modules for t in m.buffers()],
        "counts": [m.calls for m in all_modules if isinstance(m, Counter)],
        "hooks that ran": sorted(FIRED),
        "generators": [
            *(torch.rand(2), torch.rand(2, generator=toolbox.GENERATOR), random.random(), float(np.random.rand())),
            *(torch.rand(2, generator=m.generator) for m in all_modules if isinstance(m, Noise)),
        ],
    }


def compare(make: Fn, run: str, exact: bool = False, around: dict | None = None) -> None:
    """Assert that a program has the same results with and without regions.

    Args:
        make: makes a function of two matrices, a list of tensors that it captures, and a list of its modules.
        run: one of the runs above.
        exact: results are equal bit for bit.
        around: the options of a region around the whole function of the parameters.
    """
    before = surroundings()
    with surrounded():
        try:
            with without_regions():
                expected = observe(make, run, around)
            numbers = [t for t in tensor_leaves(expected) if t.is_floating_point() and t.numel()]
            largest = max(float(t.abs().max()) for t in numbers)
            if not all(float(t.abs().max()) <= 1e6 for t in numbers):  # NaN is not
                raise OverflowError
        except Exception as error:
            raise Unrunnable from error
        with refusals():
            found = observe(make, run, around)
    assert_as_before(before, drawn=True)
    for what, values in expected.items():
        if what != "hooks that ran" or exact:
            assert len(found[what]) == len(values), f"{len(found[what])} {what} instead of {len(values)}"
            for i, (a, b) in enumerate(zip(found[what], values)):
                assert same(a, b, exact, largest), f"{what}: at {i} {a} instead of {b}"


def only_plain(make: Fn, run: str, around: dict | None = None, **options: Any) -> None:
    """Run a program without regions, in the place of `compare`: it may crash in torch itself."""
    with surrounded(), without_regions():
        observe(make, run, around)


def same(a: Any, b: Any, exact: bool, largest: float) -> bool:
    if not isinstance(b, Tensor):
        return a == b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    # Sums may have another order; some derivatives are differences of large numbers.
    return same_bits(a, b) if exact else torch.allclose(a, b, rtol=1e-6, atol=1e-9 * (1 + largest))


@contextmanager
def refusals() -> Iterator[None]:
    try:
        yield
    except RematError as error:
        if not MEANT.search(str(error)):
            raise
        raise Refused from error


def keeps_no_more(make: Fn) -> None:
    """Assert that the program as one region without a policy saves no more than without."""
    with surrounded(), refusals():
        with without_regions():
            fn = make()[0]
        ours, plain = held_bytes(remat(fn), tensor(0), tensor(1)), held_bytes(fn, tensor(0), tensor(1))
    assert ours <= plain, f"a region saves {ours} bytes, the plain function {plain}"


def recomputes_no_more(make: Fn, policy: Any, other: Any) -> None:
    """Assert that the program as one region recomputes no more products if its policy saves more."""

    def products(policy: Any) -> int:
        with without_regions():
            fn = make()[0]
        out = remat(fn, policy=policy)(tensor(0), tensor(1))
        if not out.requires_grad:
            return 0
        with OpCounter() as counter:
            out.sum().backward()
        return sum(counter[name] for name in PRODUCTS)

    with surrounded(), refusals():
        few, more = products(policy | other), products(policy)
    assert few <= more, f"{few} products in the backward if more is saved, {more} otherwise"
