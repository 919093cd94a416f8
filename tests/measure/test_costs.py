"""`remat.report`: what a program saves and recomputes under each policy, as numbers, text and a plot."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerator import DEVICE
from cases import rand
from measured import Block, blocks, layer, loss, per_sample, readme
from torch import nn
from torch.func import functional_call, grad

import remat
from benchmarks.measure import PeakMemory, count_flops, gc_disabled, held_bytes, peak_bytes
from remat import policies
from remat._measure.costs import Costs, distinct

MATMULS = policies.save_matmuls
BOTH = [None, MATMULS]


def one_layer(**options: Any) -> remat.Report:
    (weights, *_), x = readme()
    return remat.report(layer, weights, x, **options)


@pytest.fixture(scope="module")
def report() -> remat.Report:
    model, x = blocks()
    return remat.report(model, x, where=Block, policies=BOTH)


def test_the_model_of_the_readme() -> None:
    report, again = (remat.report(loss, *readme(), policies=BOTH) for _ in range(2))
    product = 2 * 16 * 8 * 32  # FLOPs
    # Each of four layers saves a hidden value and its input. The input of the first layer is an argument.
    hidden, width, scalar = 16 * 32 * 8, 16 * 8 * 8, 8
    assert {row.label: (row.saved_bytes, row.recomputed_flops) for row in report.rows} == {
        "without remat": (4 * hidden + 4 * width + scalar, 0),
        "as written": (4 * width + scalar, 4 * product),
        "policy=None": (4 * width + scalar, 4 * product),  # of its own regions
        "save_matmuls": (4 * hidden + 4 * width + scalar, 0),
    }
    assert report.plain.flops == 12 * product * 2
    assert str(report) == (
        f"loss: torch {torch.__version__}, CPU\n"
        "                saved    peak  FLOPs recomputed\n"
        "without remat  20 KiB  30 KiB                 0\n"
        "as written      4 KiB  27 KiB        32.8 kFLOP  +17 %  *\n"
        "policy=None     4 KiB  27 KiB        32.8 kFLOP  +17 %  *\n"
        "save_matmuls   20 KiB  34 KiB                 0\n"
        "* no other row has a lower peak without recomputing more\n"
        "Each policy is that of the program's own regions."
    )
    assert report == again  # the figures are the same in each run


@pytest.mark.parametrize("transform", [grad, per_sample])
def test_peaks_and_flops_under_a_transform_are_those_of_a_direct_call(transform: Callable) -> None:
    report = remat.report(loss, *readme(), transform=transform, policies=BOTH)
    for row, fn in zip(report.rows, (remat.disable_remat()(loss), loss)):
        with gc_disabled():
            assert row.peak_bytes == peak_bytes(transform(fn), *readme())
        assert row.flops == count_flops(transform(fn), *readme())
    nothing, matmuls = report.policies
    assert 0 < report.as_written.saved_bytes < report.plain.saved_bytes / 4
    assert matmuls.recomputed_flops < nothing.recomputed_flops
    assert report.name == ("grad(loss)" if transform is grad else "per_sample(loss)")
    assert remat.report(loss, *readme(), transform=lambda fn: grad(fn), policies=[]).name == "loss"


def test_a_model_with_regions_in_it(report: remat.Report) -> None:
    plain, nothing, matmuls = report.rows
    assert nothing.saved_bytes < matmuls.saved_bytes < plain.saved_bytes and nothing.peak_bytes < plain.peak_bytes
    assert nothing.recomputed_flops > 0 == matmuls.recomputed_flops
    shares = {(share.module, share.op): share for share in report.residuals["policy=None"]}
    assert (shares["*", "aten.add"].count, shares["*", "aten.add"].nbytes) == (3, 3 * 128 * 64 * 4)
    assert sum(share.nbytes for share in shares.values()) == nothing.saved_bytes
    assert [share.module for share in matmuls.shares] == ["*.up", "*", None]
    for row in report.rows:
        assert max(row.timeline) == row.peak_bytes and report.timeline[row.label] is row.timeline
        assert row.timeline[row.forward_operations - 1] >= row.saved_bytes
        assert len(row.timeline) > row.forward_operations > 0
    # A training step saves the same bytes.
    model, x = blocks()
    remat.nn.apply(model, Block)
    held = held_bytes(lambda: torch.autograd.graph.get_gradient_edge(model(x).sum()))
    assert abs(held - nothing.saved_bytes) <= 4
    as_written = remat.report(model, x, policies=[]).as_written
    assert (as_written.label, as_written.saved_bytes) == ("as written", nothing.saved_bytes)


@pytest.mark.cuda
def test_on_a_device_the_report_has_the_peak_of_its_allocator() -> None:
    w, x = (rand(64, 64, seed=seed, grad=False).float().to(DEVICE) for seed in range(2))
    fn = lambda w, x: torch.tanh(torch.tanh(torch.tanh(x @ w) @ w) @ w)
    on_cpu, report = remat.report(fn, w.cpu(), x.cpu(), policies=[None]), remat.report(fn, w, x, policies=[None])
    figures = lambda report: [(row.saved_bytes, row.recomputed_flops) for row in report.rows]
    assert figures(report) == figures(on_cpu)
    assert all(row.device_peak_bytes is None for row in on_cpu.rows)
    assert all(row.device_peak_bytes >= row.peak_bytes for row in report.rows)
    assert "peak of the allocator" in str(report) and report.environment["device"] != "CPU"
    assert remat.check(fn, w, x).ok


def costs(peak: int, flops: int) -> Costs:
    return Costs("", None, 0, peak, 0, flops, (), 0, ())


def test_the_best_are_those_that_no_other_beats() -> None:
    rows = [costs(5, 0), costs(3, 2), costs(4, 2), costs(3, 3), costs(1, 9), costs(5, 0)]
    assert remat.Report("", {}, (costs(9, 0), *rows)).pareto == [rows[4], rows[1], rows[0], rows[5]]
    assert distinct([rows[0], rows[5]]) == [rows[0]]


def test_a_policy_that_is_not_better_than_the_plain_program_is_not_among_the_best() -> None:
    """In one region alone, the recompute has all residuals at once."""
    report = one_layer(policies=[None, policies.everything_saveable])
    nothing, everything = report.policies
    assert nothing.saved_bytes < everything.saved_bytes and nothing.peak_bytes == everything.peak_bytes
    assert report.pareto == [] and "*" not in str(report)
    empty = one_layer(policies=[])
    assert empty.as_written is empty.plain and not empty.policies and "No policy" not in str(empty)


def test_usual_policies_with_the_same_figures_are_one_row() -> None:
    assert [row.label for row in one_layer().policies] == ["policy=None", "save_matmuls"]
    assert [row.label for row in one_layer(policies=[None, None]).policies] == ["policy=None (1)", "policy=None (2)"]


def test_usual_policies_that_match_nothing_do_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    for net in (torch.sin, nn.Tanh()):
        recwarn.clear()
        remat.report(net, rand(3))
        assert not recwarn.list
        with pytest.warns(remat.RematWarning, match="has matched none of the operators"):
            remat.report(net, rand(3), policies=[policies.save_attention])


def test_policies_are_a_list() -> None:
    with pytest.raises(remat.PolicyError):
        remat.report(torch.sin, torch.ones(3), policies=["no such policy"])
    for wrong, text in ((MATMULS, r"policies\.save_matmuls"), ("dots", "'dots'")):
        with pytest.raises(TypeError, match=rf"must be a list such as `\[None, .*\]`, got {text}\."):
            remat.report(torch.sin, torch.ones(3), policies=wrong)


def test_notes() -> None:
    whole = str(remat.report(*blocks(), policies=[None])).splitlines()
    assert whole[-1].startswith("Under each policy the model is one region. With `where=Block` modules")
    for net, options in ((nn.Tanh(), {}), (blocks()[0], {"policies": []})):
        assert "one region" not in str(remat.report(net, torch.ones(2, 64), **options))
    for given, said in (([None], True), ([], False)):
        assert ("No other row is better" in str(remat.report(torch.sin, rand(3), policies=given))) is said
    assert remat.report(torch.neg, torch.arange(3), policies=[]).plain.forward_operations  # which save nothing
    last = str(remat.report(torch.sin, rand(3))).splitlines()[-1]
    assert last == "FLOPs are those of matrix products, convolutions and attention; this program has none."


def test_values_for_json(report: remat.Report) -> None:
    values = json.loads(json.dumps(report.to_dict()))
    assert values["name"] == "Sequential" and values["environment"]["device"] == "CPU"
    assert [row["label"] for row in values["rows"]] == [row.label for row in report.rows]
    assert [row["policy"] for row in values["rows"]] == [None, None, "policies.save_matmuls"]
    assert [row["pareto"] for row in values["rows"]] == [False, True, True]
    share = {"module": "*", "op": "aten.add", "name": None, "count": 3, "nbytes": 3 * 128 * 64 * 4}
    assert values["rows"][1]["residuals"][0] == share


def test_a_plot_has_each_row(report: remat.Report) -> None:
    make = pytest.importorskip("matplotlib.figure").Figure
    axes = make().subplots()
    assert report.plot(axes) is axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("FLOPs recomputed", "peak memory")
    *points, front = axes.lines
    expected = {row.label: ([row.recomputed_flops], [row.peak_bytes]) for row in report.rows}
    assert {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in points} == expected
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(expected)
    best = [(row.recomputed_flops, row.peak_bytes) for row in reversed(report.pareto)]
    assert len(best) == 2 and [*zip(*front.get_data())] == best
    axes.figure.canvas.draw()
    assert "8 MFLOP" in {text.get_text() for text in axes.get_xticklabels()}
    assert {"0 B", "256 KiB", "1 MiB"} <= {text.get_text() for text in axes.get_yticklabels()}
    axes = remat.report(torch.sin, rand(3)).plot(make().subplots())  # without FLOPs
    assert len(axes.lines) == 2 and axes.get_xlim() == (0, 1)
    curve = remat.pareto(torch.sin, rand(3)).plot(make().subplots())
    assert curve.get_xlabel().startswith("memory saved for the backward") and "cost" in curve.get_ylabel()


def test_a_plot_makes_a_figure_and_needs_matplotlib(report: remat.Report, monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    first, second = report.plot(), report.plot()
    assert first.figure is not second.figure
    pyplot.close(first.figure), pyplot.close(second.figure)
    curve = remat.pareto(torch.sin, rand(3))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for plot in (report.plot, curve.plot):
        with pytest.raises(ImportError, match=r"^A plot needs matplotlib: pip install remat\[plot\]$"):
            plot()


def test_modules_of_functional_code_are_regions() -> None:
    model, x = blocks()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    program = lambda p, x: functional_call(model, p, (x,)).square().mean()
    report = remat.report(program, parameters, x, transform=grad, where=Block, policies=BOTH)
    remat.nn.apply(model, Block)
    own = remat.report(program, parameters, x, transform=grad, policies=BOTH)
    figures = lambda of: [(row.saved_bytes, row.peak_bytes, row.recomputed_flops) for row in (of.plain, *of.policies)]
    assert figures(report) == figures(own) and own.as_written.peak_bytes == own.policies[0].peak_bytes
    saved = [row.saved_bytes for row in report.policies]
    assert saved[0] < saved[1] < report.plain.saved_bytes and report.policies[0].recomputed_flops > 0
    assert own.pareto[0] is own.as_written and str(own).count("  *\n") == 3
    assert remat.check(program, parameters, x, transform=grad, where=Block).ok
    holder = {"a": SimpleNamespace(model=remat.nn.undo(model))}
    for called, *args in ((lambda x: program(parameters, x), x), (lambda h, x: h["a"].model(x), holder, x)):
        assert remat.report(called, *args, where=Block, policies=[None]).policies[0].recomputed_flops > 0


def test_what_a_budget_minimizes_has_a_column() -> None:
    model, x = blocks()
    report = remat.report(model, x, where=Block, policies=[None, policies.budget(0.5)])
    assert report.objective == report.to_dict()["objective"] == "roofline" and "recompute, us" in str(report)
    nothing, half = (row.cost - report.plain.cost for row in report.policies)
    assert 0 < half < nothing and report.policies[1].saved_bytes > report.policies[0].saved_bytes
    assert remat.report(model, x, where=Block, policies=[policies.budget(0.5, cost="flops")]).objective is None


def test_a_row_that_saves_more_than_the_plain_program_says_so() -> None:
    """A policy saves the products and the input of each region; autograd saves the results of `tanh`."""
    region = remat.remat(lambda w, x: torch.tanh(torch.tanh(x @ w) @ w))
    loss = lambda w, x: region(w, region(w, region(w, x))).sum()
    report = remat.report(loss, rand(8, 8), rand(64, 8), policies=BOTH)
    assert report.policies[1].saved_bytes > report.plain.saved_bytes and report.policies[1] not in report.pareto
    lines = [line for line in str(report).splitlines() if line.endswith("saves more than without remat")]
    assert len(lines) == 1 and lines[0].startswith("save_matmuls")
    for more, is_best in ((0, True), (1, False)):  # though its peak is lower
        row = replace(report.policies[0], saved_bytes=report.plain.saved_bytes + more)
        assert (replace(report, rows=(report.plain, row)).pareto == [row]) is is_best


def test_the_time_of_a_step_is_its_ratio_to_the_plain_one() -> None:
    model, x = blocks()
    report = remat.report(model, x, where=Block, policies=BOTH, time=True)
    assert report.plain.time == 1.0 and all(row.time > 0.2 for row in report.policies)
    assert " x 1.00" in str(report) and report.to_dict()["rows"][0]["time"] == 1.0
    # Stars are for peak and time then, whatever the FLOPs are.
    plain, nothing, matmuls = report.rows
    assert nothing.peak_bytes < matmuls.peak_bytes < plain.peak_bytes
    slow = replace(report, rows=(plain, replace(nothing, time=1.2), replace(matmuls, time=1.3)))
    fast = replace(report, rows=(plain, replace(nothing, time=1.3), replace(matmuls, time=1.2)))
    assert [row.label for row in slow.pareto] == ["policy=None"] and "without taking longer" in str(slow)
    assert [row.label for row in fast.pareto] == ["policy=None", "save_matmuls"]
    linear = remat.nn.apply(model, nn.Linear)  # in regions that cost nothing but time
    rows = [remat.report(linear, x, policies=[], time=time).rows for time in (True, False)]
    assert list(map(len, rows)) == [2, 1]
    sleeps = lambda w, x: sleep(0 if remat.is_disabled() else 0.02) or torch.mv(w, x)
    args = torch.ones(600, 600), torch.ones(600, requires_grad=True)
    with PeakMemory() as memory:
        assert remat.report(sleeps, *args, policies=[None], time=True).policies[0].time > 2
    assert memory.peak < args[0].nbytes  # which is large, so that no run has a copy of it
    with pytest.raises(TypeError, match=r"time must be True or False.*in a lambda"):
        remat.report(model, x, time=torch.ones(3))


def test_usual_policies_that_save_nothing_more_are_left_out() -> None:
    """Under vmap a policy without matches recomputes less than none."""
    model, x = blocks()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    program = lambda p, x: functional_call(model, p, (x[None],)).square().mean()
    report = remat.report(program, parameters, x, transform=lambda f: torch.vmap(grad(f), (None, 0)), where=Block)
    assert [row.label for row in report.policies] == ["policy=None", "save_matmuls"]
