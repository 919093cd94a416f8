"""Train a small character-level transformer with every block rematerialized.

The text is the source code of Python's own standard library, so nothing is downloaded. The model
is a function of a pytree of parameters, and all its derivatives are `torch.func` transforms:

* training with `grad_and_value`,
* the gradient norm of every sample of a batch with `vmap(grad(...))`,
* a Hessian-vector product with `jvp(grad(...))`.

All three then run without `remat`, and with it: a block saves only its inputs, or with a policy the
results of matrix products as well. A list shows what a block saves under the policy, and tables
show memory, time on one thread and how far the results differ. The exit status is 1 if the loss did
not fall or the results differ.

    python examples/char_lm.py            # half a minute
    python examples/char_lm.py --quick    # a few seconds
"""

import argparse
import os
import statistics
import sys
import time
import timeit
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor
from torch.func import grad, grad_and_value, jvp, vmap
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

import remat
from remat import checkpoint_name, policies, print_saved_residuals

VOCABULARY = 128  # ASCII
FALL = 0.7  # the final loss must be below this share of the first one
TOLERANCE = 1e-5  # of the largest gradient entry

Tree = Any  # a pytree of tensors
Loss = Callable[[Tree, Tensor], Tensor]
Wrap = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]

# The variants that are compared.
WAYS: dict[str, Wrap] = {
    "plain": lambda fn: fn,
    "remat": remat.remat,
    "remat, save_matmuls": remat.remat(policy=policies.save_matmuls),
}


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of the run."""

    layers: int = 3
    width: int = 384
    heads: int = 4
    context: int = 128
    batch: int = 4
    steps: int = 30
    learning_rate: float = 2e-3


QUICK = Config(layers=3, width=32, heads=2, context=64, batch=8, steps=40, learning_rate=1e-2)


def load_text(limit: int = 4_000_000) -> Tensor:
    """Return the standard library's top-level modules, in order of name, as ASCII codes."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    data = text[:limit].encode("ascii", errors="replace")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def sample_batch(data: Tensor, config: Config, generator: torch.Generator) -> Tensor:
    """Return `batch` random pieces of the text, `context + 1` characters each."""
    last = len(data) - config.context
    starts = torch.randint(last, (config.batch, 1), generator=generator)
    return data[starts + torch.arange(config.context + 1)]


def init_params(config: Config, generator: torch.Generator) -> Tree:
    """Return the parameters: a dict of tensors, with a list of one dict per block."""
    width = config.width

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / width**0.5

    def block_params() -> dict[str, Tensor]:
        return {
            "norm1": torch.ones(width),
            "query_key_value": normal(width, 3 * width),
            "project": normal(width, width) / config.layers,
            "norm2": torch.ones(width),
            "up": normal(width, 4 * width),
            "down": normal(4 * width, width) / config.layers,
        }

    return {
        "embedding": normal(VOCABULARY, width),
        "position": normal(config.context, width),
        "blocks": [block_params() for _ in range(config.layers)],
        "norm": torch.ones(width),
        "head": normal(width, VOCABULARY) / 4,
    }


def rms_norm(x: Tensor, scale: Tensor) -> Tensor:
    """Scale every position to mean square one, then by `scale`."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * scale


def attention(params: Tree, x: Tensor, heads: int) -> Tensor:
    """Causal self-attention, written out: `(..., time, width)` to the same shape."""
    length, width = x.shape[-2:]
    split = checkpoint_name(x @ params["query_key_value"], "query_key_value")
    split = split.unflatten(-1, (3, heads, width // heads))
    query, key, value = split.movedim(-3, 0).transpose(-2, -3).unbind(0)
    scores = query @ key.transpose(-1, -2) / (width // heads) ** 0.5
    future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return (weights @ value).transpose(-2, -3).flatten(-2) @ params["project"]


def block(params: Tree, x: Tensor, heads: int) -> Tensor:
    """One transformer block: attention, then a two-layer MLP, each added to its input."""
    x = x + attention(params, rms_norm(x, params["norm1"]), heads)
    hidden = checkpoint_name(rms_norm(x, params["norm2"]) @ params["up"], "hidden")
    return x + F.gelu(hidden) @ params["down"]


def model(params: Tree, tokens: Tensor, heads: int, wrap: Wrap) -> Tensor:
    """Return the logits of every next character, with `wrap` around every block."""
    x = F.embedding(tokens, params["embedding"]) + params["position"][: tokens.shape[-1]]
    wrapped = wrap(block)
    for layer in params["blocks"]:
        x = wrapped(layer, x, heads)
    return rms_norm(x, params["norm"]) @ params["head"]


def make_loss(heads: int, wrap: Wrap) -> Loss:
    """Return `loss(params, tokens)`: the mean cross-entropy, in nats, of every next character."""

    def loss(params: Tree, tokens: Tensor) -> Tensor:
        logits = model(params, tokens[..., :-1], heads, wrap)
        return F.cross_entropy(logits.flatten(0, -2), tokens[..., 1:].flatten())

    return loss


def adam(params: Tree, grads: Tree, moments: tuple[Tree, Tree], step: int, rate: float) -> Tree:
    """Return the next parameters and moments; `step` counts from one."""
    first = optree.tree_map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], grads)
    second = optree.tree_map(lambda v, g: 0.99 * v + 0.01 * g * g, moments[1], grads)

    def update(p: Tensor, m: Tensor, v: Tensor) -> Tensor:
        return p - rate * (m / (1 - 0.9**step)) / ((v / (1 - 0.99**step)).sqrt() + 1e-8)

    return optree.tree_map(update, params, first, second), (first, second)


def train(data: Tensor, config: Config, generator: torch.Generator) -> tuple[Tree, list[float]]:
    """Train with `remat` around every block; return the parameters and the loss of every step."""
    params = init_params(config, generator)
    moments = (optree.tree_map(torch.zeros_like, params),) * 2
    step_fn = grad_and_value(make_loss(config.heads, remat.remat))
    losses: list[float] = []
    with tqdm(range(1, config.steps + 1), desc="training", unit="step", disable=None) as progress:
        for step in progress:
            grads, value = step_fn(params, sample_batch(data, config, generator))
            rate = config.learning_rate * min(1.0, step / 10)
            params, moments = adam(params, grads, moments, step, rate)
            losses.append(value.item())
            progress.set_postfix(loss=f"{losses[-1]:.3f}")
    return params, losses


@torch.no_grad()
def write_text(params: Tree, config: Config, generator: torch.Generator, length: int) -> str:
    """Generate `length` characters, starting after a line break."""
    tokens = torch.tensor([ord("\n")])
    for _ in range(length):
        logits = model(params, tokens[-config.context :], config.heads, remat.remat)[-1]
        following = torch.multinomial((logits / 0.7).softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, following])
    text = "".join(map(chr, tokens.tolist())).strip("\n")
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def derivatives(params: Tree, tokens: Tensor, vector: Tree) -> dict[str, Callable[[Loss], Tree]]:
    """Return the three derivatives by name, as functions of the loss.

    The training step is without Adam, which is the same with and without `remat`.
    """

    def hessian_vector_product(loss: Loss) -> Tree:
        return jvp(lambda p: grad(loss)(p, tokens), (params,), (vector,))[1]

    return {
        "training step": lambda loss: grad_and_value(loss)(params, tokens)[0],
        "per-sample gradients": lambda loss: vmap(grad(loss), in_dims=(None, 0))(params, tokens),
        "Hessian-vector product": hessian_vector_product,
    }


def distance(expected: list[Tensor], got: list[Tensor]) -> tuple[float, float]:
    """Return the largest difference of two lists of tensors, and the largest entry of the first."""
    pairs = zip(expected, got, strict=True)
    difference = torch.stack([(a - b).abs().max() for a, b in pairs]).max()
    return difference.item(), torch.stack([a.abs().max() for a in expected]).max().item()


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the live tensors that were made under this mode, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._known.update(storages((args, kwargs)))  # tensors from before are not counted
        result = func(*args, **kwargs)
        for storage in storages(result):
            if storage not in self._known:
                self._known.add(storage)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes()).atexit = False
        self.peak = max(self.peak, self.live)
        return result

    def _freed(self, size: int) -> None:
        self.live -= size


def storages(tree: Any) -> list[torch.UntypedStorage]:
    """Return the storages of all tensors in `tree`."""
    return [x.untyped_storage() for x in optree.tree_leaves(tree) if isinstance(x, Tensor)]


def compare(name: str, derivative: Callable[[Loss], Tree], heads: int) -> bool:
    """Print a table with one line for each of `WAYS`; return whether their results agree.

    Time is that of the processor, the best of three runs, so that other programs matter less.
    """
    runs = [partial(derivative, make_loss(heads, wrap)) for wrap in WAYS.values()]
    expected: list[Tensor] = []
    peaks, differences, agree = [], [], True
    for run in runs:
        with LiveBytes() as memory:
            got = optree.tree_leaves(run())
        expected = expected or got
        difference, largest = distance(expected, got)
        agree &= difference <= TOLERANCE * largest
        differences.append(difference)
        peaks.append(memory.peak / 2**20)
    rounds = [[timeit.timeit(run, timer=time.process_time, number=1) for run in runs] for _ in range(3)]
    print(f"\n{name:<24} {'memory, MiB':>12} {'time, s':>9} {'difference':>12}")
    for way, peak, seconds, difference in zip(WAYS, peaks, map(min, zip(*rounds)), differences):
        print(f"  {way:<22} {peak:>12.1f} {seconds:>9.3f} {difference:>12.1e}", flush=True)
    return agree


def sample_norms(per_sample: Tree) -> Tensor:
    """Return the gradient norm of every sample, from gradients with a leading sample axis."""
    squares = [g.flatten(1).square().sum(1) for g in optree.tree_leaves(per_sample)]
    return torch.stack(squares).sum(0).sqrt()


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, a few seconds")
    parser.add_argument("--steps", type=int, help="number of training steps")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, batches and text")
    args = parser.parse_args()
    if args.steps is not None and args.steps < 1:
        parser.error("--steps must be at least 1")
    return args


def main() -> int:
    """Run the demonstration; return the exit status."""
    args = parse_args()
    torch.set_num_threads(1)  # threads that wait for each other are slow on a busy machine
    config = QUICK if args.quick else Config()
    if args.steps is not None:
        config = replace(config, steps=args.steps)
    generator = torch.Generator().manual_seed(args.seed)
    data = load_text()

    params, losses = train(data, config, generator)
    window = max(1, config.steps // 10)
    fell = statistics.mean(losses[-window:]) < FALL * losses[0]
    print(f"loss: {losses[0]:.3f} -> {statistics.mean(losses[-window:]):.3f}")
    print(f"a sample:\n{write_text(params, config, generator, length=100)}\n")

    tokens = sample_batch(data, config, generator)
    vector = optree.tree_map(lambda p: torch.randn(p.shape, generator=generator), params)
    tasks = derivatives(params, tokens, vector)
    norms = sample_norms(tasks["per-sample gradients"](make_loss(config.heads, remat.remat)))
    print(f"gradient norms of {config.batch} samples: {norms.min():.3f} to {norms.max():.3f}")
    print("\nwhat a block saves with 'remat, save_matmuls':")
    x = torch.zeros(config.batch, config.context, config.width)
    print_saved_residuals(WAYS["remat, save_matmuls"](block), params["blocks"][0], x, config.heads)
    agree = [compare(name, derivative, config.heads) for name, derivative in tasks.items()]
    if not fell:
        print("The loss did not fall.", file=sys.stderr)
    if not all(agree):
        print("The gradients with and without remat differ.", file=sys.stderr)
    return 0 if fell and all(agree) else 1


if __name__ == "__main__":
    sys.exit(main())
