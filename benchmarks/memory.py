"""Peak memory of rematerialized programs, against plain torch and torch's own checkpoint.

    python -m benchmarks.memory [--json] [--output FILE]

The network is 16 regions of 4 x (matmul, tanh), 64 wide. Its loss is the sum of its outputs, which
saves nothing. Gradients are with respect to the weights unless the row says otherwise. Each row is
the ratio of two peaks of live tensor bytes, without inputs and weights. The exit status is 1 if a
ratio is above its limit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from benchmarks.measure import peak_bytes
from benchmarks.report import MIB, parse, report, verdict
from benchmarks.wrappers import Wrapper, plain, torch_checkpoint
from remat import remat

__all__ = ["CASES", "Case", "Measurement", "main"]

REGIONS, DEPTH, WIDTH = 16, 4, 64

Weights: TypeAlias = list[list[Tensor]]
Program: TypeAlias = Callable[[Weights, Tensor], Any]


def region(x: Tensor, weights: list[Tensor]) -> Tensor:
    """Layers of a matrix product and a `tanh` each."""
    for weight in weights:
        x = torch.tanh(x @ weight)
    return x


def network(wrap: Wrapper) -> Callable[[Weights, Tensor], Tensor]:
    """The wrapped regions, one after the other."""
    wrapped = wrap(region)

    def net(weights: Weights, x: Tensor) -> Tensor:
        for layer in weights:
            x = wrapped(x, layer)
        return x

    return net


def loss(wrap: Wrapper) -> Callable[[Weights, Tensor], Tensor]:
    """The sum of the network's outputs."""
    net = network(wrap)
    return lambda weights, x: net(weights, x).sum()


def autograd_grad(wrap: Wrapper) -> Program:
    """The gradient by plain autograd."""
    fn = loss(wrap)

    def program(weights: Weights, x: Tensor) -> Any:
        leaves = [[weight.detach().requires_grad_() for weight in layer] for layer in weights]
        return torch.autograd.grad(fn(leaves, x), [w for layer in leaves for w in layer])

    return program


def func_grad(wrap: Wrapper) -> Program:
    """The gradient by `torch.func.grad`."""
    return grad(loss(wrap))


def vmap_of_grad(wrap: Wrapper) -> Program:
    """Each sample's gradient with respect to itself."""
    return vmap(grad(loss(wrap), argnums=1), in_dims=(None, 0))


def grad_of_vmap(wrap: Wrapper) -> Program:
    """The gradient through the network mapped over samples."""
    net = vmap(network(wrap), in_dims=(None, 0))
    return grad(lambda weights, x: net(weights, x).sum())


def hessian_vector_product(wrap: Wrapper) -> Program:
    """Forward over reverse, in the direction of the weights themselves."""
    gradient = grad(loss(wrap))
    return lambda weights, x: jvp(lambda w: gradient(w, x), (weights,), (weights,))


def grad_of_grad(wrap: Wrapper) -> Program:
    """Reverse over reverse: the gradient of the sum of squared gradients."""
    gradient = grad(loss(wrap))

    def squared_norm(weights: Weights, x: Tensor) -> Tensor:
        squares = [g.square().sum() for g in optree.tree_leaves(gradient(weights, x))]
        return torch.stack(squares).sum()

    return grad(squared_norm)


@dataclass(frozen=True)
class Measurement:
    """The peaks of a case's two programs, in bytes, and the limit on their ratio."""

    name: str
    numerator: int
    denominator: int
    limit: float

    @property
    def ratio(self) -> float:
        """The numerator's peak divided by the denominator's."""
        return self.numerator / self.denominator

    @property
    def passed(self) -> bool:
        """Whether the ratio is within the limit."""
        return self.ratio <= self.limit

    def as_json(self) -> dict[str, Any]:
        """The row as plain values."""
        return {
            "name": self.name,
            "numerator_bytes": self.numerator,
            "denominator_bytes": self.denominator,
            "ratio": self.ratio,
            "limit": self.limit,
            "passed": self.passed,
        }


@dataclass(frozen=True)
class Case:
    """One row: the peak of `numerator` is at most `limit` times the peak of `denominator`."""

    name: str
    numerator: Program
    denominator: Program
    limit: float
    batch: int = 2048

    def measure(self) -> Measurement:
        """Run both programs on the same weights and input."""
        generator = torch.Generator().manual_seed(0)
        weights = [
            [torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5 for _ in range(DEPTH)] for _ in range(REGIONS)
        ]
        x = torch.randn(self.batch, WIDTH, generator=generator)
        return Measurement(
            name=self.name,
            numerator=peak_bytes(self.numerator, weights, x),
            denominator=peak_bytes(self.denominator, weights, x),
            limit=self.limit,
        )


def against_plain(name: str, program: Callable[[Wrapper], Program], limit: float, *, batch: int = 2048) -> Case:
    """The row of a program with remat, divided by the same program without."""
    return Case(f"{name}: remat / plain", program(remat), program(plain), limit, batch)


CASES: tuple[Case, ...] = (
    Case(
        "autograd.grad: remat / torch checkpoint",
        autograd_grad(remat),
        autograd_grad(torch_checkpoint),
        limit=1.02,
    ),
    against_plain("func.grad", func_grad, limit=0.12),
    Case(
        "func.grad with remat / autograd.grad with torch checkpoint",
        func_grad(remat),
        autograd_grad(torch_checkpoint),
        limit=1.10,
    ),
    against_plain("vmap(grad) by the batched input", vmap_of_grad, limit=0.20),
    against_plain("grad of vmap", grad_of_vmap, limit=0.13),
    against_plain("jvp(grad), batch 512", hessian_vector_product, limit=0.16, batch=512),
    against_plain("grad of grad, batch 512", grad_of_grad, limit=0.15, batch=512),
)


def table(measurements: Sequence[Measurement]) -> str:
    """The measurements as aligned text."""
    width = max(len(m.name) for m in measurements)
    head = f"{'peak live bytes':<{width}}  {'MiB':>8} / {'MiB':<8}  {'ratio':>6}  {'limit':>6}"
    rows = [
        f"{m.name:<{width}}  {m.numerator / MIB:>8.2f} / {m.denominator / MIB:<8.2f}"
        f"  {m.ratio:>6.3f}  {m.limit:>6.2f}  {verdict(m)}"
        for m in measurements
    ]
    return "\n".join([head, *rows])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all cases and print the table; return the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.memory", description="Peak memory of rematerialized programs.")
    return report(parse(parser, argv), [case.measure() for case in CASES], table)


if __name__ == "__main__":
    sys.exit(main())
