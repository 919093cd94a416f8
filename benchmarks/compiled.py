"""Peak memory and time of a step, eager and compiled, with and without regions.

    python -m benchmarks.compiled [--backend NAME] [--json] [--output FILE]

The program computes the gradient of eight blocks (a layer norm and an MLP) with respect to their weights: by plain
autograd, by `torch.func.grad`, and for each sample by `vmap(grad)`. remat is compared with torch's checkpoint, and with
`activation_memory_budget`, the part of its usual residuals that torch's compiler may save; neither works under
`torch.func`. A peak is that of the CPU's allocator, with the results and without the inputs. The gradients must equal
those of the plain eager program. The exit status is 1 if a row with regions needs more memory than the plain row, or,
under plain autograd and without a policy, more than torch's checkpoint.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

from benchmarks.measure import allocated_bytes
from benchmarks.report import KIB, parse, report, verdict
from benchmarks.wrappers import Wrapper, plain, torch_checkpoint
from remat import checkpoint_name, policies, remat

__all__ = ["CASES", "Case", "Row", "main", "table"]

DEPTH, ROWS, WIDTH, STEPS = 8, 256, 128, 5


def block(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """A layer norm and an MLP: `(rows, width)` to the same shape."""
    hidden = checkpoint_name(F.layer_norm(x, x.shape[-1:]) @ up, "hidden")
    return x + F.gelu(hidden) @ down


def loss_of(wrap: Wrapper) -> Callable[..., Tensor]:
    """Return the loss of all blocks, as a function of the weights and the input."""
    wrapped = wrap(block)

    def loss(up: Tensor, down: Tensor, x: Tensor) -> Tensor:
        for _ in range(DEPTH):
            x = wrapped(x, up, down)
        return x.square().mean()

    return loss


def by_autograd(wrap: Wrapper, compiler: Callable) -> Callable:
    """The loss is compiled, and with it its backward pass."""
    loss = compiler(loss_of(wrap))

    def step(up: Tensor, down: Tensor, x: Tensor) -> Any:
        leaves = up.detach().requires_grad_(), down.detach().requires_grad_()
        return torch.autograd.grad(loss(*leaves, x), leaves)

    return step


def by_func(wrap: Wrapper, compiler: Callable) -> Callable:
    """The gradient is compiled as a whole."""
    return compiler(grad(loss_of(wrap), argnums=(0, 1)))


def by_sample(wrap: Wrapper, compiler: Callable) -> Callable:
    """The gradients of two samples only, since those of more samples would take most of the memory."""
    gradient = vmap(grad(loss_of(wrap), argnums=(0, 1)), in_dims=(None, None, 0))
    return compiler(lambda up, down, x: gradient(up, down, x.view(2, -1, x.shape[-1])))


TRANSFORMS = {"autograd": by_autograd, "func.grad": by_func, "vmap(func.grad)": by_sample}
REGIONS: dict[str, Wrapper] = {
    "plain": plain,
    "remat": remat,
    "remat, save_matmuls": partial(remat, policy=policies.save_matmuls),
    "remat, name hidden": partial(remat, policy=policies.save_only_these_names("hidden")),
}


@dataclass(frozen=True)
class Case:
    """A row to measure."""

    transform: str
    name: str
    wrap: Wrapper
    compiles: bool
    budget: float = 1.0


CASES: list[Case] = []
for _transform in TRANSFORMS:
    for _compiles in (False, True):
        CASES += [Case(_transform, name, wrap, _compiles) for name, wrap in REGIONS.items()]
        if _transform == "autograd":
            CASES.append(Case(_transform, "torch's checkpoint", torch_checkpoint, _compiles))
            CASES += [Case(_transform, f"budget {part}", plain, True, part) for part in (0.5, 0.1) if _compiles]


@dataclass(frozen=True)
class Row:
    """A measured row, and the limit on its peak."""

    transform: str
    name: str
    compiled: bool
    peak_bytes: int
    step_ms: float
    limit_bytes: int

    @property
    def passed(self) -> bool:
        """Whether the peak is within the limit."""
        return self.peak_bytes <= self.limit_bytes

    def as_json(self) -> dict[str, Any]:
        """The row as plain values."""
        return {**asdict(self), "passed": self.passed}


def arguments() -> list[Tensor]:
    """The two weights and an input."""
    generator = torch.Generator().manual_seed(0)
    shapes = (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH), (ROWS, WIDTH)
    return [torch.randn(shape, generator=generator) * 0.05 for shape in shapes]


def measure(case: Case, backend: str, expected: Any) -> tuple[int, float]:
    """The peak of one step, and the median time of several steps."""
    torch.compiler.reset()
    compiler = partial(torch.compile, backend=backend, fullgraph=True) if case.compiles else lambda f: f
    args = arguments()
    with torch._functorch.config.patch(activation_memory_budget=case.budget), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = TRANSFORMS[case.transform](case.wrap, compiler)
        torch.testing.assert_close(step(*args), expected, rtol=1e-3, atol=1e-4)
        peak = allocated_bytes(step, *args)
        times = []
        for _ in range(STEPS):
            start = time.perf_counter()
            step(*args)
            times.append(time.perf_counter() - start)
    return peak, statistics.median(times) * 1000


def rows_of(cases: Sequence[Case], backend: str) -> list[Row]:
    """Measure the cases, and set the limits of those with regions."""
    rows: list[Row] = []
    for transform in dict.fromkeys(case.transform for case in cases):
        expected = TRANSFORMS[transform](plain, lambda f: f)(*arguments())
        for compiles in (False, True):
            group = [case for case in cases if (case.transform, case.compiles) == (transform, compiles)]
            figures = {case.name: measure(case, backend, expected) for case in group}
            for case in group:
                rivals = ["plain", *["torch's checkpoint"][: case.name == "remat"]]
                limits = [figures[name][0] for name in rivals if name in figures and case.name.startswith("remat")]
                peak, step = figures[case.name]
                rows.append(Row(transform, case.name, compiles, peak, step, min([*limits, sys.maxsize])))
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text, grouped by transform."""
    width = max(len(row.name) for row in rows)
    lines: list[str] = []
    for transform in dict.fromkeys(row.transform for row in rows):
        lines += ["", f"{transform:<{width + 10}}{'peak, KiB':>12}{'step, ms':>12}"]
        for row in rows:
            if row.transform == transform:
                how = "compiled" if row.compiled else "eager"
                figures = f"{row.peak_bytes / KIB:12,.0f}{row.step_ms:12.2f}"
                lines.append(f"{row.name:<{width}}{how:>10}{figures}  {verdict(row)}")
    return "\n".join(lines[1:])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all cases and print the table; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled", description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="inductor", help="backend of torch.compile (default: inductor)")
    options = parse(parser, argv)
    return report(options, rows_of(CASES, options.backend), table)


if __name__ == "__main__":
    sys.exit(main())
