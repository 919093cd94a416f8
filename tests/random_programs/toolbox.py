"""What random programs import: transforms, modules, and `remat`, which makes regions in one of the two runs only."""
# ruff: noqa: F401 (programs import all names)

import copy
import functools
import operator
import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from cases import OldSquare, SineAndCosine, plain_scan, rand, total
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from torch.utils.hooks import RemovableHandle

import remat as package
from remat import checkpoint_name, compat, policies
from remat._core import private

Fn = Callable[..., Any]
GENERATOR = torch.Generator()
FIRED: list[float] = []  # the factors of the hooks on gradients that have run
REGIONS = [True]  # whether `remat` makes regions


@contextmanager
def without_regions() -> Iterator[None]:
    REGIONS[0] = False
    try:
        yield
    finally:
        REGIONS[0] = True


def remat(fn: Any = None, **options: Any) -> Any:
    """`remat.remat`, or the function itself in the plain run. It is a global, so that no closure contains it."""
    if REGIONS[0]:
        return package.remat(fn, **options)
    return (lambda fn: fn) if fn is None else fn


def apply(module: nn.Module, *numbers: int, **options: Any) -> None:
    """Make some of the modules in a module regions."""
    names = [
        name
        for name, each in module.named_modules()
        if "parametrizations" not in name and not isinstance(each, nn.ModuleList)  # which aren't called
    ]
    chosen = {names[n % len(names)] for n in numbers if names}
    if REGIONS[0] and chosen:
        package.nn.apply(module, lambda name, _: name in chosen, **options)


def torch_checkpoint(fn: Fn, *args: Any, **options: Any) -> Any:
    """torch's checkpoint, in both runs. It can't recompute in `vmap`, what draws from own generators, nor hooks."""
    if torch._C._functorch.maybe_current_level() is not None:
        raise NotImplementedError
    before, first_hook = GENERATOR.get_state(), RemovableHandle.next_id
    result = checkpoint(fn, *args, **options)
    if not torch.equal(before, GENERATOR.get_state()) or not (REGIONS[0] or RemovableHandle.next_id == first_hook):
        raise NotImplementedError
    return result


def compat_checkpoint(fn: Fn, *args: Any) -> Any:
    return compat.checkpoint(fn, *args, use_reentrant=False) if REGIONS[0] else fn(*args)


def loop(step: Fn, carry: Tensor) -> Tensor:
    """The last carry of a `scan`, plus the mean of what its steps return."""
    carry, ys = (package.scan if REGIONS[0] else plain_scan)(step, carry, torch.linspace(0, 1, 4))
    return carry + ys.mean()


def chosen(seed: int, answers: int = 2) -> Fn:
    """A deterministic policy function that decides by the operator and the shapes of its tensors.

    It saves one in `answers` kinds of operations. Five answers are members of torch's `CheckpointPolicy`.
    """
    five = [CheckpointPolicy[f"{a}_{b}"] for a in ("MUST", "PREFER") for b in ("RECOMPUTE", "SAVE")]
    five.append(CheckpointPolicy.MUST_CPU_OFFLOAD)

    def predicate(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        shapes = [tuple(a.shape) for a in args if isinstance(a, Tensor)]
        number = zlib.crc32(f"{op}{shapes}{seed}".encode()) % answers
        return five[number] if answers == 5 else number == 0

    predicate.__qualname__ = f"chosen({seed}, {answers})"
    return predicate


def tensor(seed: int, requires_grad: bool = True) -> Tensor:
    return (rand(4, 4, seed=seed, grad=False) * 0.7).requires_grad_(requires_grad)


def pair(t: Tensor, dim: int = 0) -> Tensor:
    return torch.stack([t, t.cos()], dim)


def added(tensors: Iterable[Tensor]) -> Tensor:
    """The sum, without the 0 of `sum`: under a mode, torch can't add 0 to its zero tensors without memory."""
    return functools.reduce(operator.add, tensors)


def build(*steps: Fn) -> Fn:
    """A function whose code is that of all others that are made here."""
    return lambda p, q: functools.reduce(lambda p, step: step(p, q), steps, p)


def hook(t: Tensor, factor: float) -> None:
    def scaled(g: Tensor | None) -> Tensor | None:
        if g is not None and not package.is_recomputing():  # a recompute repeats backward passes inside the region
            FIRED.append(factor)
        return None if g is None else g * factor

    if t.requires_grad:
        t.register_hook(scaled)


def changed(module: nn.Module) -> dict[str, Tensor]:
    """Other parameters for a module."""
    return {name: p.detach() * 1.1 for name, p in module.named_parameters()}


@contextmanager
def packing() -> Iterator[None]:
    """Saved-tensor hooks that pack a tensor as itself, and unpack a copy of it."""
    # The pack hook makes no copy, as rrelu saves its noise tensor before the noise is drawn.
    hooks = (lambda tensor: tensor, torch.clone) if REGIONS[0] else (lambda t: (t, t._version), unchanged)
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        yield


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


class Scaled(torch.autograd.Function):
    """A square with a weight, with a rule for each transform."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x * x * w

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return 2 * g * x * w, (g * x * x).sum(0)

    @staticmethod
    def jvp(ctx: Any, tx: Tensor | None, tw: Tensor | None) -> Tensor:
        x, w = ctx.saved_tensors
        parts = [] if tx is None else [2 * x * tx * w]
        return sum(parts if tw is None else [*parts, x * x * tw])


class Apply(nn.Module):
    """A module that calls a function with its argument, which may be a tree, and some modules."""

    def __init__(self, fn: Fn, *kids: nn.Module) -> None:
        super().__init__()
        self.fn, self.kids = fn, nn.ModuleList(kids)

    def forward(self, x: Any) -> Any:
        return self.fn(x, *self.kids)


class Stateful(nn.Module):
    """A module with a buffer."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(shape))
        self.calls = 0


class Counter(Stateful):
    """Counts its calls, in a buffer and in an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        self.state += 1
        self.calls += 1
        return x * (1 + 0.1 * self.state)


class Average(Stateful):
    """Updates a moving average in place."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.state.lerp_(x.detach().mean(0), 0.3)
        return x - self.state


class Rebinding(Stateful):
    """Replaces its buffer."""

    def forward(self, x: Tensor) -> Tensor:
        old, self.state = self.state, self.state * 0.5 + 1
        return x * old.cos()


class Stash(nn.Module):
    """Keeps its last activation, as feature extractors do."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.sin()
        return self.last * 0.9


class Noise(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator(torch.get_default_device()).manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn(4, 4, generator=self.generator, dtype=x.dtype)


HOOKS: list[Callable[[Any], Any]] = [
    lambda m: m.register_forward_hook(lambda m, args, out: out * 0.9),
    lambda m: m.register_forward_pre_hook(lambda m, args: (args[0].sin(),)),
    lambda m: m.register_full_backward_hook(lambda m, gi, go: tuple(None if g is None else g * 1.1 for g in gi)),
    lambda m: m.weight.register_hook(lambda g: None if g is None else g * 0.5),
]


def hooked(module: nn.Module, n: int) -> nn.Module:
    HOOKS[n % len(HOOKS)](module)
    return module
