"""What a transformer block keeps and runs again under each policy, against torch's selective checkpoint.

    python -m benchmarks.policies [--json] [--output FILE]

A row shows the bytes that are alive when the forward has ended, inputs and weights not counted, and the floating-point
operations that the program runs beyond those of the block without rematerialization. The 256 KiB of the block's output
are among the bytes: the loss on top is a mean of squares, which keeps it. Gradients are by the weights and the input.

torch's selective checkpoint saves the same operations: a list of them for a group, and for names the ones that made the
named values. Its figures are those of plain autograd, the only place where it works, also in the rows of
`torch.func.grad`; there is none to compare with per-sample gradients by `vmap(grad)`. The last column of each figure is
what the block keeps without rematerialization, and one run of it, or nothing where everything is kept. The exit status
is 1 if a figure is more than one of those beside it.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

from benchmarks.measure import PeakMemory, count_flops, gc_disabled
from benchmarks.report import KIB, parse, report, verdict
from benchmarks.wrappers import (
    ATTENTION,
    LINEAR,
    MATMULS,
    MM,
    Wrapper,
    plain,
    save_everything,
    torch_checkpoint,
    torch_selective,
    torch_selective_by_count,
)
from remat import checkpoint_name, policies, remat

__all__ = ["CASES", "TRANSFORMS", "Case", "Figures", "Row", "Sizes", "main", "program", "table"]

GELU, NORM = torch.ops.aten.gelu.default, torch.ops.aten.native_layer_norm.default
HEADS = 4
MFLOP = 10**6

Weights: TypeAlias = dict[str, Tensor]
Loss: TypeAlias = Callable[[Weights, Tensor], Tensor]
Program: TypeAlias = Callable[[Weights, Tensor], Any]


def block(weights: Weights, x: Tensor) -> Tensor:
    """A transformer block, `(batch, time, width)` to the same: attention, then an MLP, each after a norm."""
    normal = F.layer_norm(x, x.shape[-1:], weights["norm1"])
    q, k, v = (checkpoint_name(F.linear(normal, weights[name]), name) for name in "qkv")
    heads = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (q, k, v))
    mixed = checkpoint_name(F.scaled_dot_product_attention(*heads, is_causal=True), "attention")
    x = x + F.linear(mixed.transpose(1, 2).flatten(2), weights["project"])
    normal = F.layer_norm(x, x.shape[-1:], weights["norm2"])
    hidden = checkpoint_name(F.linear(normal, weights["up"], weights["up_bias"]), "hidden")
    return x + F.linear(F.gelu(hidden), weights["down"], weights["down_bias"])


@dataclass(frozen=True)
class Sizes:
    """Sizes of the block's input."""

    batch: int = 2
    time: int = 128
    width: int = 256

    def arguments(self) -> tuple[Weights, Tensor]:
        """Weights and an input of these sizes."""
        width, generator = self.width, torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator) / width**0.5

        weights = {name: normal(width, width) for name in ("q", "k", "v", "project")}
        weights |= {"up": normal(4 * width, width), "up_bias": normal(4 * width)}
        weights |= {"down": normal(width, 4 * width), "down_bias": normal(width)}
        weights |= {"norm1": 1 + normal(width), "norm2": 1 + normal(width)}
        return weights, normal(self.batch, self.time, width)


# --- the programs -------------------------------------------------------------------------------------------------


def autograd_grad(loss: Loss) -> Program:
    """The gradient by plain autograd."""

    def program(weights: Weights, x: Tensor) -> Any:
        leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        x = x.detach().requires_grad_()
        return torch.autograd.grad(loss(leaves, x), [*leaves.values(), x])

    return program


def func_grad(loss: Loss) -> Program:
    """The gradient by `torch.func.grad`."""
    return grad(loss, argnums=(0, 1))


def per_sample_grad(loss: Loss) -> Program:
    """The gradient of each sample."""
    return vmap(grad(lambda weights, sample: loss(weights, sample[None]), argnums=(0, 1)), in_dims=(None, 0))


TRANSFORMS: dict[str, Callable[[Loss], Program]] = {
    "autograd.grad": autograd_grad,
    "func.grad": func_grad,
    "vmap(func.grad)": per_sample_grad,
}


def program(transform: str, wrap: Wrapper, at_end_of_forward: Callable[[], Any] = lambda: None) -> Program:
    """The gradient of the block, wrapped, with a loss on top that isn't linear."""
    wrapped = wrap(block)

    def loss(weights: Weights, x: Tensor) -> Tensor:
        value = wrapped(weights, x).square().mean()
        at_end_of_forward()
        return value

    return TRANSFORMS[transform](loss)


# --- the rows -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """What a program keeps between its forward and its backward, and what it runs again."""

    kept_bytes: int
    recomputed_flops: int

    def within(self, other: Figures) -> bool:
        """Whether neither figure is more than the other one's."""
        return self.kept_bytes <= other.kept_bytes and self.recomputed_flops <= other.recomputed_flops


@dataclass(frozen=True)
class Row:
    """A policy under a transform: the figures of remat, those of torch if it can, and what they are in any case within.

    The last are what the plain block keeps, and one run of the block.
    """

    transform: str
    policy: str
    remat: Figures
    torch: Figures | None
    bound: Figures

    @property
    def passed(self) -> bool:
        """Whether remat keeps and runs again no more than all the others."""
        return self.remat.within(self.bound) and (self.torch is None or self.remat.within(self.torch))

    def as_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {**asdict(self), "passed": self.passed}


def measure(transform: str, wrap: Wrapper, weights: Weights, x: Tensor) -> Figures:
    """Runs the block, wrapped, in the program for its bytes, and once more, beside the plain block, for its operations.

    The garbage collector is off, so that what only a reference cycle keeps alive counts.
    """
    kept: list[int] = []
    with gc_disabled(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop because we have not yet implemented")
        with PeakMemory() as memory:
            program(transform, wrap, lambda: kept.append(memory.live))(weights, x)
        flops = [count_flops(program(transform, each), weights, x) for each in (wrap, plain)]
    return Figures(kept_bytes=kept[0], recomputed_flops=flops[0] - flops[1])


@dataclass(frozen=True)
class Case:
    """A policy and its counterpart in torch; `again` tells whether anything has to run again."""

    name: str
    policy: Any
    torch: Wrapper
    again: bool = True

    def measure(self, transform: str, sizes: Sizes) -> Row:
        """Runs the block under the policy, and what it is compared with."""
        weights, x = sizes.arguments()
        return Row(
            transform=transform,
            policy=self.name,
            remat=measure(transform, partial(remat, policy=self.policy), weights, x),
            torch=None if transform == "vmap(func.grad)" else measure("autograd.grad", self.torch, weights, x),
            bound=Figures(
                kept_bytes=measure(transform, plain, weights, x).kept_bytes,
                recomputed_flops=count_flops(block, weights, x) if self.again else 0,
            ),
        )


QKV = [(MM, i) for i in range(3)]
MIXED = [(op, 0) for op in ATTENTION]
HIDDEN = [(torch.ops.aten.addmm.default, 0)]

CASES: tuple[Case, ...] = (
    Case("none", None, torch_checkpoint),
    Case("save_matmuls", policies.save_matmuls, torch_selective(MATMULS)),
    Case("save_matmuls_without_batch_dims", policies.save_matmuls_without_batch_dims, torch_selective(LINEAR)),
    Case("save_attention", policies.save_attention, torch_selective(ATTENTION)),
    Case(
        "save_matmuls | save_attention",
        policies.save_matmuls | policies.save_attention,
        torch_selective(MATMULS + ATTENTION),
    ),
    Case("mm, gelu, native_layer_norm", policies.save_ops(MM, GELU, NORM), torch_selective([MM, GELU, NORM])),
    Case("names q, k, v", policies.save_only_these_names("q", "k", "v"), torch_selective_by_count(*QKV)),
    Case("name attention", policies.save_only_these_names("attention"), torch_selective_by_count(*MIXED)),
    Case("name hidden", policies.save_only_these_names("hidden"), torch_selective_by_count(*HIDDEN)),
    Case(
        "names but hidden",
        policies.save_any_names_but_these("hidden"),
        torch_selective_by_count(*QKV, *MIXED),
    ),
    # On the CPU the host's memory is the device's. torch's selective checkpoint offloads in compiled code only.
    Case(
        "name hidden, offload q, k, v",
        policies.save_and_offload_only_these_names(
            names_which_can_be_saved=["hidden"], names_which_can_be_offloaded=["q", "k", "v"]
        ),
        torch_selective_by_count(*HIDDEN, *QKV),
    ),
    Case("everything_saveable", policies.everything_saveable, torch_selective(save_everything), again=False),
)


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text, a part for each transform."""
    width = max(len(row.policy) for row in rows)
    columns = "".join(f"{name:>10}" for name in ("remat", "torch", "plain", "remat", "torch", "block"))
    lines: list[str] = []
    for transform in dict.fromkeys(row.transform for row in rows):
        lines += ["", f"{transform:<{width}}{'kept, KiB':>30}{'recomputed, MFLOP':>30}", f"{'':<{width}}{columns}"]
        lines += [
            f"{row.policy:<{width}}"
            f"{_cells(row, 'kept_bytes', KIB)}{_cells(row, 'recomputed_flops', MFLOP)}  {verdict(row)}"
            for row in rows
            if row.transform == transform
        ]
    return "\n".join(lines[1:])


def _cells(row: Row, figure: str, unit: int) -> str:
    """One figure of all that are compared."""
    numbers = ("-" if f is None else f"{getattr(f, figure) / unit:.2f}" for f in (row.remat, row.torch, row.bound))
    return "".join(f"{number:>10}" for number in numbers)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures every case under every transform and prints the tables; returns the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.policies", description="What policies keep and run again.")
    options = parse(parser, argv)
    with gc_disabled():
        rows = [case.measure(transform, Sizes()) for transform in TRANSFORMS for case in CASES]
    return report(options, rows, table)


if __name__ == "__main__":
    sys.exit(main())
