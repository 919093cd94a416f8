"""What a transformer block saves and recomputes under each policy, against torch's selective checkpoint.

    python -m benchmarks.policies [--json] [--output FILE]

A row shows the bytes that are alive at the end of the forward pass, without inputs and weights, and the floating-point
operations beyond those of the block without rematerialization. The bytes contain the 256 KiB of the block's output,
which the loss, a mean of squares, saves. Gradients are with respect to the weights and the input.

torch's selective checkpoint saves the results of the same operations: for names, of those that made the named values.
It works under plain autograd only, so the rows of `torch.func.grad` show its figures for plain autograd, and those of
per-sample gradients by `vmap(grad)` show none. The last column of each figure is an upper bound: the bytes that the
block saves without rematerialization, and the FLOPs of one run of it, or 0 where everything is saved. The exit status
is 1 if a figure of remat is more than torch's or the bound.
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
from remat import checkpoint_name, checkpoint_policies, policies, remat

__all__ = ["CASES", "TRANSFORMS", "Case", "Figures", "Row", "Sizes", "main", "program", "table"]

GELU, NORM = torch.ops.aten.gelu.default, torch.ops.aten.native_layer_norm.default
HEADS = 4
MFLOP = 10**6

Weights: TypeAlias = dict[str, Tensor]
Loss: TypeAlias = Callable[[Weights, Tensor], Tensor]
Program: TypeAlias = Callable[[Weights, Tensor], Any]


def block(weights: Weights, x: Tensor) -> Tensor:
    """A transformer block, `(batch, time, width)` to the same shape: attention, then an MLP, each after a norm."""
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
    """The gradient of the wrapped block, with a loss that isn't linear."""
    wrapped = wrap(block)

    def loss(weights: Weights, x: Tensor) -> Tensor:
        value = wrapped(weights, x).square().mean()
        at_end_of_forward()
        return value

    return TRANSFORMS[transform](loss)


# --- the rows -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """The bytes that a program saves between forward and backward, and the FLOPs that it recomputes."""

    kept_bytes: int
    recomputed_flops: int

    def within(self, other: Figures) -> bool:
        """Whether neither figure is more than that of `other`."""
        return self.kept_bytes <= other.kept_bytes and self.recomputed_flops <= other.recomputed_flops


@dataclass(frozen=True)
class Row:
    """A policy under a transform: the figures of remat, those of torch if it works there, and an upper bound.

    The bound is the bytes that the plain block saves, and the FLOPs of one run of the block.
    """

    transform: str
    policy: str
    remat: Figures
    torch: Figures | None
    bound: Figures

    @property
    def passed(self) -> bool:
        """Whether remat's figures are at most the bound's and torch's."""
        return self.remat.within(self.bound) and (self.torch is None or self.remat.within(self.torch))

    def as_json(self) -> dict[str, Any]:
        """The row as plain values."""
        return {**asdict(self), "passed": self.passed}


def measure(transform: str, wrap: Wrapper, weights: Weights, x: Tensor) -> Figures:
    """Run the program once for its bytes, and once more, and with the plain block, for its FLOPs.

    The garbage collector is off, so tensors that only a reference cycle keeps alive are counted.
    """
    live: list[int] = []
    with gc_disabled(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop because we have not yet implemented")
        with PeakMemory() as memory:
            program(transform, wrap, lambda: live.append(memory.live))(weights, x)
        flops = [count_flops(program(transform, each), weights, x) for each in (wrap, plain)]
    return Figures(kept_bytes=live[0], recomputed_flops=flops[0] - flops[1])


@dataclass(frozen=True)
class Case:
    """A policy and its counterpart in torch; `recomputes` is whether anything must be recomputed."""

    name: str
    policy: Any
    torch: Wrapper
    recomputes: bool = True

    def measure(self, transform: str, sizes: Sizes) -> Row:
        """Measure the block under the policy, and the programs that it is compared with."""
        weights, x = sizes.arguments()
        return Row(
            transform=transform,
            policy=self.name,
            remat=measure(transform, partial(remat, policy=self.policy), weights, x),
            torch=None if transform == "vmap(func.grad)" else measure("autograd.grad", self.torch, weights, x),
            bound=Figures(
                kept_bytes=measure(transform, plain, weights, x).kept_bytes,
                recomputed_flops=count_flops(block, weights, x) if self.recomputes else 0,
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
    # On the CPU offloading spares no memory. torch's selective checkpoint offloads in compiled code only.
    Case(
        "name hidden, offload q, k, v",
        checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=["hidden"], names_which_can_be_offloaded=["q", "k", "v"]
        ),
        torch_selective_by_count(*HIDDEN, *QKV),
    ),
    Case("everything_saveable", policies.everything_saveable, torch_selective(save_everything), recomputes=False),
)


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text, grouped by transform."""
    width = max(len(row.policy) for row in rows)
    columns = "".join(f"{name:>10}" for name in ("remat", "torch", "plain", "remat", "torch", "block"))
    lines: list[str] = []
    for transform in dict.fromkeys(row.transform for row in rows):
        lines += ["", f"{transform:<{width}}{'saved, KiB':>30}{'recomputed, MFLOP':>30}", f"{'':<{width}}{columns}"]
        lines += [
            f"{row.policy:<{width}}"
            f"{_cells(row, 'kept_bytes', KIB)}{_cells(row, 'recomputed_flops', MFLOP)}  {verdict(row)}"
            for row in rows
            if row.transform == transform
        ]
    return "\n".join(lines[1:])


def _cells(row: Row, figure: str, unit: int) -> str:
    """One figure of remat, torch and the bound."""
    numbers = ("-" if f is None else f"{getattr(f, figure) / unit:.2f}" for f in (row.remat, row.torch, row.bound))
    return "".join(f"{number:>10}" for number in numbers)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all cases under all transforms and print the tables; return the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.policies", description="What policies save and recompute.")
    options = parse(parser, argv)
    with gc_disabled():
        rows = [case.measure(transform, Sizes()) for transform in TRANSFORMS for case in CASES]
    return report(options, rows, table)


if __name__ == "__main__":
    sys.exit(main())
