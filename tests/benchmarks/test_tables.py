"""The rows of each benchmark: figures against counts by hand, fair comparisons, verdicts, tables and files."""

import argparse
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import ROOT, run_program

from benchmarks import compiled, gpu, memory, policies, speed, transforms
from benchmarks.layers import arguments, layers, marked_products, marked_tanhs, named_layers
from benchmarks.measure import count_ops, held_bytes, peak_bytes
from benchmarks.policies import Figures, Sizes
from benchmarks.report import installed, parse, report
from benchmarks.wrappers import plain, torch_checkpoint, torch_remat_checkpoint
from remat import remat
from remat.policies import save_matmuls, save_only_these_names

by_name = partial(pytest.mark.parametrize, "case", ids=lambda case: getattr(case, "name", ""))


SIZES = Sizes(batch=2, time=16, width=32)
OUTPUT = 2 * 16 * 32 * 4  # bytes of the block's output, which the loss saves
LINEAR = 2 * 2 * 16 * 32 * 32  # floating-point operations of a linear layer with equal widths
SCORES = 2 * 2 * 16 * 16 * 32  # floating-point operations of one of attention's two products


@by_name(memory.CASES)
def test_the_peak_is_within_its_limit(case: memory.Case) -> None:
    measurement = case.measure()
    assert measurement.numerator > 0 and measurement.ratio <= case.limit, memory.table([measurement])


@by_name(policies.CASES)
@pytest.mark.usefixtures("collector_off")
def test_a_block_saves_and_recomputes_no_more_than_its_bounds(case: policies.Case) -> None:
    for transform in policies.TRANSFORMS:
        row = case.measure(transform, SIZES)
        assert row.passed, policies.table([row])
        if (case.name, transform) == ("none", "autograd.grad"):
            # All layers are recomputed but the last; up is four times as wide as q, k, v and the projection.
            assert row.remat == row.torch == Figures(OUTPUT + 4, (4 + 4) * LINEAR + 2 * SCORES)
            assert row.bound.recomputed_flops == (4 + 4 + 4) * LINEAR + 2 * SCORES
        elif (case.name, transform) == ("names q, k, v", "autograd.grad"):
            assert row.remat == Figures(4 * OUTPUT + 4, (1 + 4) * LINEAR + 2 * SCORES)
    step = partial(policies.program, "autograd.grad")
    for wrap in (partial(remat, policy=case.policy), case.torch):
        torch.testing.assert_close(step(wrap)(*SIZES.arguments()), step(plain)(*SIZES.arguments()))


def leaves(result: Any) -> list[torch.Tensor]:
    """The gradients in the result of any transform, in the order of the arguments."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [leaf for each in (result.values() if isinstance(result, dict) else result) for leaf in leaves(each)]


@by_name([case for case in speed.CASES if case.numerator.factor == case.denominator.factor])
def test_both_sides_of_a_time_run_the_same_program(case: speed.Case) -> None:
    if case.package is not None:
        pytest.importorskip(case.package)
    programs = [side.programs[0]() for side in (case.numerator, case.denominator)]
    ours, theirs = (leaves(program()) for program in programs)
    assert len(ours) == len(theirs) > 0 and all(map(torch.equal, ours, theirs))
    if case.package is not None:  # each layer's product is recomputed unless it is saved
        again = 0 if "saved matmuls" in case.name else 10
        for ops in map(count_ops, programs):
            assert (ops["aten.mm"], ops["aten.tanh"], ops["aten.tanh_backward"]) == (10 + again + 2 * 10, 2 * 10, 10)


@pytest.mark.parametrize("saved", ["nothing", "products", "tanhs"])
def test_both_sides_save_the_same_bytes(saved: str) -> None:
    pytest.importorskip("torch_remat")
    depth, activation = 10, 8 * 8 * 4
    ours, theirs, count = {
        "nothing": lambda: (remat(layers), layers, 1),
        "products": lambda: (remat(layers, policy=save_matmuls), marked_products(depth), 1 + depth),
        "tanhs": lambda: (remat(named_layers, policy=save_only_these_names("layer*")), marked_tanhs(depth), depth),
    }[saved]()
    tensors = [t.requires_grad_() for t in arguments(8, depth)]
    for fn in (ours, torch_remat_checkpoint(theirs)):
        fn(*tensors)
        assert held_bytes(fn, *tensors) == count * activation


def test_times_are_measured_in_rounds_and_without_page_faults() -> None:
    measurements = [case.measure(seconds=0) for case in speed.CASES[:2]]
    assert all(m.rounds == 3 and m.ratio > 0 and m.name in speed.table(measurements) for m in measurements)
    printed = run_program("""
import resource, torch
from benchmarks.speed import keep_freed_memory
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
if keep_freed_memory():
    for _ in range(3):
        torch.ones(10 << 20).sum()
    before = faults()
    for _ in range(10):
        torch.ones(10 << 20).sum()
    print(faults() - before)
""")
    if not printed:
        pytest.skip("another C library than glibc")
    assert int(printed) < 100  # otherwise 10240 in each of ten iterations


@pytest.mark.parametrize("transform", ["autograd", "func.grad"])
def test_compiled_steps_with_regions_have_the_lowest_peak(transform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"DEPTH": 3, "ROWS": 32, "WIDTH": 16, "STEPS": 1}.items():
        monkeypatch.setattr(compiled, name, value)
    torch._dynamo.reset()
    wrappers = {"plain": plain, "remat": remat, "torch's checkpoint": torch_checkpoint}
    cases = [compiled.Case(transform, name, wrap, True) for name, wrap in wrappers.items()]
    rows = {row.name: row for row in compiled.rows_of(cases[: 3 if transform == "autograd" else 2], "aot_eager")}
    ours, without = rows["remat"], rows["plain"]
    assert ours.peak_bytes < without.peak_bytes < without.limit_bytes
    assert ours.limit_bytes == min(row.peak_bytes for row in rows.values() if row is not ours)
    lines = compiled.table(list(rows.values())).splitlines()
    assert lines[0].split()[0] == transform and all(line.split()[-1] == "pass" for line in lines[1:])


def test_steps_of_a_transformer_have_the_same_results_and_more_memory_if_more_is_saved() -> None:
    sizes = {"layers": 4, "width": 32, "heads": 2, "batch": 4, "time": 64}
    settings = {"device": "cpu", "dtype": "float32", "rounds": 1, "backend": "aot_eager"}
    rows = {(row.family, row.policy): row for row in gpu.measure(argparse.Namespace(**sizes, **settings))}
    unchanged = rows["plain", "none"]
    assert len(rows) == len(gpu.CANDIDATES)
    for row in rows.values():
        assert row.passed and row.ms > 0 and row.gradient_error < 1e-5, gpu.table([row])
        if "compile" not in row.family:
            assert (row.loss_error, row.gradient_error) == (unchanged.loss_error, unchanged.gradient_error)
    levels = ("full", "names", "save_matmuls")
    for family in ("remat", "torch"):
        full, names, matmuls = (rows[family, policy].peak_bytes for policy in levels)
        assert 0 < full < names < matmuls < unchanged.peak_bytes
    for ours, torchs in ((rows["remat", policy], rows["torch", policy]) for policy in levels):
        assert ours.recomputed_flops == torchs.recomputed_flops and ours.peak_bytes <= 1.01 * torchs.peak_bytes
    assert unchanged.recomputed_flops == 0 < rows["remat", "full"].recomputed_flops
    for family, policy in (("of remat", "full"), ("of remat", "save_matmuls"), ("", "budget 0.5"), ("", "budget 0.2")):
        row = rows[f"torch.compile {family}".strip(), policy]
        assert row.recomputed_flops is None and row.peak_bytes < rows["torch.compile", "none"].peak_bytes


@dataclass
class Row:
    passed: bool

    def as_json(self) -> dict[str, Any]:
        return {"passed": self.passed}


def test_a_run_prints_a_table_or_json_and_fails_with_a_row(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def run(argv: list[str], *passed: bool) -> int:
        parser = argparse.ArgumentParser()
        parser.add_argument("--size", type=int, default=3)
        return report(parse(parser, argv), [Row(each) for each in passed], lambda rows: f"{len(rows)} rows")

    path = tmp_path / "new" / "rows.json"
    assert run(["--output", str(path)], True, True) == 0
    assert capsys.readouterr().out.endswith("2 rows\n")
    written = json.loads(path.read_text())
    assert written["rows"] == [{"passed": True}] * 2 and written["options"] == {"size": 3}
    assert written["torch"] == torch.__version__
    assert run(["--json"], True, False) == 1
    assert json.loads(capsys.readouterr().out)["rows"] == [{"passed": True}, {"passed": False}]
    assert installed(None, "a row") and installed("torch", "a row") and not installed("no_such_package", "a row")
    assert capsys.readouterr().err.startswith("a row: skipped, because no_such_package is not installed")


@pytest.mark.parametrize("case", transforms.CASES, ids=lambda case: case.name)
def test_a_transform_recomputes_no_more_forwards_than_its_limit(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transforms, "LAYERS", 3)
    monkeypatch.setattr(transforms, "ROWS", 64)
    row = transforms.measure(case, 8, 0.0)
    assert row.passed and row.forwards >= case.limit - 0.3 and row.time > 0, transforms.table([row])
    assert row.peak < row.plain_peak or case.limit == 0.0


README = {
    "`.backward()`": ".backward()",
    "`grad`": "grad",
    "per-sample gradients of the input, `vmap(grad)`": "per-sample gradients of the input",
    "Hessian-vector product, `jvp(grad)`": "Hessian-vector product",
    "gradient of the gradient's norm, `grad(grad)`": "grad of grad",
}


@pytest.mark.parametrize("label", README)
def test_the_peaks_in_the_readme_are_in_the_proportion_that_smaller_layers_have(label: str) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    cells = next(line for line in text.splitlines() if line.startswith(f"| {label} |")).split("|")
    plain_peak, peak = map(float, cells[2].split("->"))
    case = next(case for case in transforms.CASES if case.name == README[label])
    found = [peak_bytes(case.step(64, "cpu", wrap)) for wrap in (plain, case.wrap)]
    assert peak / plain_peak == pytest.approx(found[1] / found[0], abs=0.04)
