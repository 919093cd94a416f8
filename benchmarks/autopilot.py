"""`remat.nn.budget` without `where`, against what can be chosen by hand: recomputed FLOPs at the same peak.

    python -m benchmarks.autopilot [--quick] [--compile] [MODEL ...]

Each choice by hand is measured in a real step: (b) `nn.budget(where=C)` for each class C of the model, with parts of
plain's peak and with the least that works; (c) every k-th block, and blocks under presets; (d) the library's own
checkpointing. For each choice that no other one beats, `nn.budget` plans for exactly its peak, and a step with the plan
is measured. A row has both peaks in parts of plain's, the recomputed MFLOP by hand and of the plan, their ratio, and
the time of planning in plain steps; its first column has the amounts at which its choice is the best one by hand. Peaks
are those of the allocator; that of planning is one of live tensors. Times are the processor's, for one thread.

The exit status is 1 if in any row the plan recomputes more FLOPs than the choice by hand, needs more than the amount,
has other FLOPs than it promises or other gradients than the plain model, or if there is no plan; if no plan reaches the
least peak by hand; or if planning takes more than 15 plain steps, 25 if the model's blocks differ, as the median of its
rows. `--compile` shows torch's `activation_memory_budget` beside. `benchmarks/models.py` has the models.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

import remat
from benchmarks.measure import FlopCount, PeakMemory, gc_disabled
from benchmarks.models import CASES, Case
from benchmarks.report import MIB, installed
from remat import policies
from remat._measure.allocated import Allocated

__all__ = ["Step", "compare", "main", "step"]

PARTS = (0.8, 0.6, 0.4, 0.25)
STEPS, STEPS_OF_MIXED = 15, 25  # the most plain steps that planning may take, for equal blocks and for others
MATMULS = policies.save_matmuls
PRESETS = [
    MATMULS,
    policies.save_matmuls_without_batch_dims,
    policies.save_attention,
    MATMULS | policies.save_attention,
]
EXPECTED = remat.RematError, TypeError, ValueError  # of a class that can't be regions, or an amount that is too little


class Step(NamedTuple):
    """What was measured of a step."""

    peak: int
    flops: int
    gradients: list[Tensor | None]


def run(case: Case) -> None:
    """Run a step, with the same random numbers in each call."""
    case.model.zero_grad()
    torch.manual_seed(1)
    case.loss(case.model(**case.batch)).backward()


def seconds(fn: Callable[..., Any], *args: Any) -> float:
    """The processor's time of a call."""
    start = time.process_time()
    fn(*args)
    return time.process_time() - start


def step(case: Case) -> Step:
    """Measure a step."""
    with FlopCount() as count:
        run(case)
    gradients = [p.grad for p in case.model.parameters()]
    case.model.zero_grad()
    with gc_disabled(), Allocated(()) as memory:
        run(case)
    return Step(memory.peak, count.flops, gradients)


def same(these: Sequence[Tensor | None], those: Sequence[Tensor | None]) -> bool:
    """Whether gradients are equal, but for the order of additions."""
    least = 1e-4 * max(float(t.norm()) for t in those if t is not None)  # a gradient below is zero but for rounding
    return all(
        a is b if a is None or b is None else float((a - b).norm()) <= 1e-5 * max(least, float(b.norm()))
        for a, b in zip(these, those)
    )


def by_hand(case: Case, plain: Step, parts: Sequence[float]) -> dict[str, Step]:
    """Measure the choices by hand."""
    model, found = case.model, dict[str, Step]()
    options: dict[str, Any] = {**case.batch, "loss": case.loss, "cost": "flops"}

    def measure(label: str, change: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
        """Make a choice, measure a step, and undo the choice. Return the step's peak."""
        try:
            change(*args, **kwargs)
            found[label] = step(case)
        except EXPECTED:
            return plain.peak
        finally:
            undo(model)
        return found[label].peak

    kinds = {type(module).__name__: type(module) for module in model.modules()}
    blocks = tuple(kinds[name] for name in case.blocks)
    for name, where in [*sorted(kinds.items()), *([("blocks", blocks)] if len(blocks) > 1 else [])]:
        least = measure(f"(b) {name}, nothing saved", remat.nn.apply, model, where)
        for amount in [least, *(int(part * plain.peak) for part in parts)]:
            if least <= amount < plain.peak:
                measure(f"(b) {name} {amount / plain.peak:.3f}", remat.nn.budget, model, amount, where=where, **options)
    for k in (1, 2, 3, 4):
        measure(f"(c) every({k}, block)", remat.nn.apply, model, remat.nn.every(k, blocks))
    for policy in PRESETS:
        measure(f"(c) {policy!r}".replace("policies.", ""), remat.nn.apply, model, blocks, policy=policy)
    for name in ("gradient_checkpointing_enable", "enable_gradient_checkpointing"):
        if hasattr(model, name):
            measure("(d) the library's own", getattr(model, name))
    return found


def undo(model: Any) -> None:
    """Make all calls plain again."""
    remat.nn.undo(model)
    for name in ("gradient_checkpointing_disable", "disable_gradient_checkpointing"):
        if hasattr(model, name):
            getattr(model, name)()


def compiled(case: Case, plain: Step, part: float) -> str:
    """Torch's own budget for a compiled model, as text."""
    flops = [0]

    def counting(graph: Any, _: Any) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            with FlopCount() as count:
                result = graph.forward(*args)
            flops[0] += count.flops
            return result

        return called

    partition = min_cut_rematerialization_partition
    counted = aot_autograd(fw_compiler=counting, bw_compiler=counting, partition_fn=partition)
    found = Allocated(())
    try:
        with torch._functorch.config.patch(activation_memory_budget=part):
            # A mode around compiled code, as to count, would have it run as it is without.
            for backend, measured in ((counted, nullcontext()), ("aot_eager_decomp_partition", found)):
                torch._dynamo.reset()
                again = case._replace(model=torch.compile(case.model, backend=backend))
                run(again)
                case.model.zero_grad()
                with measured:
                    run(again)
    except Exception as error:
        return f"(e) does not compile: {type(error).__name__}: {str(error)[:80]!r}"
    recomputed = flops[0] / 2 - plain.flops
    return f"(e) activation_memory_budget {part}: {found.peak / plain.peak:.3f}, {recomputed / 1e6:,.1f} MFLOP"


def planning_peak(plan_for: Callable[[int], Any], amount: int) -> int:
    """The peak of live tensors while `nn.budget` plans."""
    with PeakMemory() as memory, suppress(remat.RematError):
        plan_for(amount)
    return memory.peak


def least_plan(plan_for: Callable[[int], Any], amount: int) -> int:
    """The least measured peak of a plan that `nn.budget` finds. For this amount there must be one."""
    plan = plan_for(amount)
    least = plan.peak
    for aim in (plan.curve[0][0], int(1.01 * plan.curve[0][0])):
        try:
            return min(least, plan_for(aim).peak)
        except remat.RematError as error:
            least = min(least, int(re.findall(r"budget of (\d+) bytes", str(error))[0]))
    return least


def compare(name: str, case: Case, parts: Sequence[float], with_compile: bool) -> list[str]:
    """Print the rows of a model; return what falls short."""
    case.model.train()
    run(case)
    plain, stepped, times, short = step(case), [seconds(run, case) for _ in "123"], list[float](), list[str]()

    def plan_for(amount: int) -> Any:
        undo(case.model)
        return remat.nn.budget(case.model, amount, loss=case.loss, cost="flops", **case.batch)

    def report(label: str, what: str) -> None:
        short.append(f"{name}: {label}: {what}")
        print(f"  {label}: {what}", flush=True)

    about = f"plain {plain.peak / MIB:.1f} MiB, {plain.flops / 1e6:,.0f} MFLOP, {median(stepped):.2f} s"
    print(
        f"\n{name}: {about}\n{'best at':>15}  {'by hand':<40}   peak   plan   MFLOP    plan  ratio  steps", flush=True
    )
    best: list[tuple[int, int, str]] = []
    for label, found in sorted(by_hand(case, plain, parts).items(), key=lambda each: each[1][:2]):
        if not same(found.gradients, plain.gradients):
            report(label, "other gradients")
        if found.peak < plain.peak and all(found.flops - plain.flops < flops for _, flops, _ in best):
            best.append((found.peak, found.flops - plain.flops, label))
    ends = [*(peak for peak, _, _ in best[1:]), plain.peak]
    for (amount, flops, label), end in zip(best, ends):
        at = " ".join(
            ["least"] * (amount == best[0][0]) + [f"{p:.0%}" for p in parts if amount <= p * plain.peak < end]
        )
        stepped.append(seconds(run, case))
        start = time.process_time()
        try:
            plan = plan_for(amount)
        except Exception as error:
            report(label, f"no plan: {type(error).__name__}: {error}")
            continue
        times.append(time.process_time() - start)
        found, steps = step(case), times[-1] / median(stepped)
        mine = found.flops - plain.flops
        ratio = mine / flops if flops else 1.0 + bool(mine)
        peaks, costs = f"{amount / plain.peak:7.3f}{found.peak / plain.peak:7.3f}", (flops / 1e6, mine / 1e6, ratio)
        print(f"{at:>15}  {label:<40}{peaks}{costs[0]:8,.1f}{costs[1]:8,.1f}{ratio:7.3f}{steps:7.1f}", flush=True)
        wrong = {
            f"{ratio:.3f} of the FLOPs": mine > flops,
            f"{found.peak - amount} bytes above the amount": found.peak > amount,
            f"{plan.flops:,} FLOPs promised, {mine:,} measured": plan.flops != mine,
            "other gradients": not same(found.gradients, plain.gradients),
        }
        for what in (what for what, is_wrong in wrong.items() if is_wrong):
            report(label, what)
        undo(case.model)
    if times:
        steps = median(times) / median(stepped)
        if steps > (STEPS if has_equal_blocks(case) else STEPS_OF_MIXED):
            report("planning", f"{steps:.1f} steps")
        needs = [planning_peak(plan_for, amount) / amount for amount in (best[0][0], best[-1][0])]
        least = least_plan(plan_for, 2 * plain.peak)
        print(f"  least peak: {best[0][0] / plain.peak:.3f} by hand, {least / plain.peak:.3f} with a plan")
        parts_needed = f"{needs[0]:.2f} of the least amount, {needs[1]:.2f} of the largest"
        print(f"  planning: {steps:.1f} steps; its own peak is {parts_needed}", flush=True)
        if least > best[0][0]:
            report("least peak", f"{least / best[0][0]:.3f} of that by hand")
        undo(case.model)
    for part in parts if with_compile else ():
        print(f"  {compiled(case, plain, part)}", flush=True)
    return short


def has_equal_blocks(case: Case) -> bool:
    """Whether its blocks have one class and one size."""
    blocks = (module for module in case.model.modules() if type(module).__name__ in case.blocks)
    return len({(type(block), sum(p.numel() for p in block.parameters())) for block in blocks}) == 1


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the models; return the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.autopilot", description="Plans, compared with choices by hand.")
    parser.add_argument("names", nargs="*", metavar="MODEL", help=", ".join(make.__name__ for make in CASES))
    parser.add_argument("--quick", action="store_true", help="two models and two amounts")
    parser.add_argument("--compile", action="store_true", help="show torch's activation_memory_budget beside")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    chosen = options.names or (["gpt2", "mixed"] if options.quick else [make.__name__ for make in CASES])
    if unknown := set(chosen) - {make.__name__ for make in CASES}:
        parser.error(f"no such models: {', '.join(sorted(unknown))}")
    short: list[str] = []
    for make, package in CASES.items():
        if make.__name__ in chosen and installed(package, make.__name__):
            torch.manual_seed(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                short += compare(make.__name__, make(), PARTS[1:3] if options.quick else PARTS, options.compile)
    print("\n" + "\n".join(short or ["no row falls short"]))
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
