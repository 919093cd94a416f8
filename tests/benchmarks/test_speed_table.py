"""The two sides of each row of the speed benchmark run the same operations, so that their times are comparable."""

from __future__ import annotations

import pytest
import torch
from cases import run_program

from benchmarks.layers import arguments, layers, marked_products, marked_tanhs, named_layers
from benchmarks.measure import count_ops, held_bytes
from benchmarks.speed import CASES, Case, table
from benchmarks.wrappers import Fn, torch_remat_checkpoint
from remat import remat
from remat.policies import save_matmuls, save_only_these_names

SAME = [case for case in CASES if case.numerator.factor == case.denominator.factor]
WITH_PACKAGES = [case for case in CASES if case.package is not None]


@pytest.mark.parametrize("case", SAME, ids=lambda case: case.name)
def test_both_sides_have_the_same_gradients(case: Case) -> None:
    need(case)
    gradients = [leaves(side.programs[0]()()) for side in (case.numerator, case.denominator)]
    assert len(gradients[0]) == len(gradients[1]) > 0
    assert all(map(torch.equal, *gradients))


def need(case: Case) -> None:
    if case.package is not None:
        pytest.importorskip(case.package)


def leaves(result) -> list[torch.Tensor]:
    """The gradients in the result of any transform."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [leaf for each in (result.values() if isinstance(result, dict) else result) for leaf in leaves(each)]


@pytest.mark.parametrize(
    "case, products", list(zip(WITH_PACKAGES, [2 * 10 + 2 * 10, 10 + 2 * 10])), ids=lambda each: str(each)[:9]
)
def test_both_sides_run_the_same_operations(case: Case, products: int) -> None:
    """Each layer's product and `tanh`, recomputed unless it is saved, and two products for the gradients."""
    need(case)
    for side in (case.numerator, case.denominator):
        step = side.programs[0]()
        step()
        ops = count_ops(step)
        assert (ops["aten.mm"], ops["aten.tanh"], ops["aten.tanh_backward"]) == (products, 2 * 10, 10)


@pytest.mark.parametrize("saved", ["nothing", "products", "tanhs"])
def test_both_sides_save_the_same_bytes(saved: str) -> None:
    pytest.importorskip("torch_remat")
    depth, activation = 10, 8 * 8 * 4
    ours, theirs = {
        "nothing": lambda: (remat(layers), layers),
        "products": lambda: (remat(layers, policy=save_matmuls), marked_products(depth)),
        "tanhs": lambda: (remat(named_layers, policy=save_only_these_names("layer*")), marked_tanhs(depth)),
    }[saved]()
    tensors = [t.requires_grad_() for t in arguments(8, depth)]

    def held(fn: Fn) -> int:
        fn(*tensors)
        return held_bytes(fn, *tensors)

    expected = {"nothing": 1, "products": 1 + depth, "tanhs": depth}[saved] * activation
    assert held(ours) == held(torch_remat_checkpoint(theirs)) == expected


def test_the_table_has_every_row() -> None:
    measurements = [case.measure(seconds=0) for case in CASES[:2]]
    assert all(m.rounds == 3 and m.ratio > 0 for m in measurements)
    text = table(measurements)
    assert all(m.name in text for m in measurements)


def test_freed_memory_is_kept() -> None:
    """The C library returns no pages to the system, so a repeated program has no page faults."""
    program = """
import resource
import torch
from benchmarks.speed import keep_freed_memory
if keep_freed_memory():
    for _ in range(3):
        torch.ones(10 << 20).sum()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(10 << 20).sum()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    printed = run_program(program)
    if not printed:
        pytest.skip("another C library than glibc")
    assert int(printed) < 100  # otherwise 10240 in each of ten iterations
