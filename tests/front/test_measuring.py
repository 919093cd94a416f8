"""`remat.report`: what a program saves and recomputes under each policy, as numbers, text and a plot."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerator import DEVICE
from careless import Careless, state_of
from cases import rand
from torch import Tensor, nn
from torch.func import grad, vmap

import remat
from benchmarks.measure import count_flops, gc_disabled, held_bytes, peak_bytes
from benchmarks.policies import Sizes, block, func_grad, measure, plain, program
from remat import policies
from remat._core.amounts import flops_text
from remat._measure.costs import Costs, distinct, pareto


def layer(w: dict[str, Tensor], x: Tensor) -> Tensor:
    return x + torch.tanh(x @ w["up"]) @ w["down"]


def loss(params: list[dict[str, Tensor]], x: Tensor) -> Tensor:
    for w in params:
        x = remat.remat(layer)(w, x)
    return x.square().mean()


def readme() -> tuple[list[dict[str, Tensor]], Tensor]:
    params = [{"up": rand(8, 32, grad=False), "down": rand(32, 8, seed=1, grad=False)} for _ in range(4)]
    return params, rand(16, 8, seed=2, grad=False)


def per_sample(fn: Callable) -> Callable:
    return vmap(grad(lambda params, sample: fn(params, sample[None])), in_dims=(None, 0))


def figures(report: remat.Report) -> dict[str, tuple[int, int]]:
    return {row.label: (row.saved_bytes, row.recomputed_flops) for row in report.rows}


# --- the programs of users --------------------------------------------------------------------------------------------


def test_the_model_of_the_readme() -> None:
    report = remat.report(loss, *readme(), policies=[None, policies.save_matmuls])
    product = 2 * 16 * 8 * 32  # FLOPs
    # Each of four layers saves a hidden value and its input. The input of the first layer is an argument.
    hidden, width, scalar = 16 * 32 * 8, 16 * 8 * 8, 8
    assert figures(report) == {
        "without remat": (4 * hidden + 4 * width + scalar, 0),
        "as written": (4 * width + scalar, 4 * product),
        "policy=None": (scalar, 12 * product),
        "save_matmuls": (4 * hidden + 4 * width + scalar, 0),
    }
    assert report.pareto == []  # the program as written beats one region around all of it
    assert report.plain.flops == 12 * product * 2


def test_gradients_by_torch_func() -> None:
    report = remat.report(loss, *readme(), transform=grad, policies=[None])
    assert report.name == "grad(loss)"
    rows = figures(report)
    assert rows["as written"][0] < rows["without remat"][0] / 4
    for row, fn in zip(report.rows, (lambda *args: layers(layer, *args), loss)):
        assert row.peak_bytes == peak_bytes(grad(fn), *readme())
        assert row.flops == count_flops(grad(fn), *readme())


def layers(layer: Callable, params: list[dict[str, Tensor]], x: Tensor) -> Tensor:
    for w in params:
        x = layer(w, x)
    return x.square().mean()


def test_gradients_of_samples() -> None:
    report = remat.report(loss, *readme(), transform=per_sample, policies=[None, policies.save_matmuls])
    rows = {row.label: row for row in report.rows}
    assert rows["as written"].saved_bytes < rows["without remat"].saved_bytes / 4
    assert rows["save_matmuls"].recomputed_flops < rows["policy=None"].recomputed_flops
    assert rows["as written"].peak_bytes == peak_bytes(per_sample(loss), *readme())


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=64, n_positions=16, use_cache=False)
    ids = torch.randint(64, (2, 16))
    return transformers.GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids}


def test_a_model_of_transformers() -> None:
    model, inputs = gpt2()
    block = type(model.transformer.h[0])
    candidates = [None, policies.save_matmuls]
    report = remat.report(model, **inputs, where=block, policies=candidates)
    rows = {row.label: row for row in report.rows}
    assert list(rows) == ["without remat", "policy=None", "save_matmuls"]
    assert rows["policy=None"].saved_bytes < rows["save_matmuls"].saved_bytes < rows["without remat"].saved_bytes
    assert rows["policy=None"].peak_bytes < rows["without remat"].peak_bytes
    assert rows["policy=None"].recomputed_flops > 0 == rows["save_matmuls"].recomputed_flops
    shares = {(share.module, share.op): share for share in report.residuals["policy=None"]}
    width = 2 * 16 * 32 * 4
    assert shares["transformer.h.*", "aten.add"].count == 3
    assert shares["transformer.h.*", "aten.add"].nbytes == 3 * width
    assert shares["GPT2LMHeadModel", "aten._log_softmax"].count == 1
    assert sum(share.nbytes for share in report.residuals["policy=None"]) == rows["policy=None"].saved_bytes
    assert {"transformer.h.*.mlp.c_fc", "transformer.h.*.attn"} <= {s.module for s in report.residuals["save_matmuls"]}
    # A training step saves the same bytes.
    remat.nn.apply(model, block)
    with gc_disabled():
        held = held_bytes(lambda: torch.autograd.graph.get_gradient_edge(model(**inputs).loss))
    assert abs(held - rows["policy=None"].saved_bytes) <= 4
    as_written = remat.report(model, **inputs, policies=[]).as_written
    assert (as_written.label, as_written.saved_bytes) == ("as written", rows["policy=None"].saved_bytes)


@pytest.mark.parametrize("policy", [None, policies.save_matmuls, policies.save_only_these_names("q", "k", "v")])
def test_the_figures_are_those_of_the_benchmarks(policy: Any) -> None:
    weights, x = Sizes(2, 16, 32).arguments()
    wrap = lambda fn: remat.remat(fn, policy=policy)
    expected = measure("func.grad", wrap, weights, x)  # the bytes contain the loss, which is computed outside
    report = remat.report(block, weights, x, policies=[policy], transform=mean_of_squares)
    row = report.policies[0]
    assert (row.saved_bytes, row.recomputed_flops) == (expected.kept_bytes - 4, expected.recomputed_flops)
    assert report.plain.flops == count_flops(program("func.grad", plain), weights, x)
    by_autograd = measure("autograd.grad", wrap, weights, x)
    row = remat.report(block, weights, x, policies=[policy], loss=lambda y: y.square().mean()).policies[0]
    assert (row.saved_bytes, row.recomputed_flops) == (by_autograd.kept_bytes, by_autograd.recomputed_flops)


def mean_of_squares(fn: Callable) -> Callable:
    return func_grad(lambda weights, x: fn(weights, x).square().mean())


# --- the figures ------------------------------------------------------------------------------------------------------


def test_figures_are_the_same_in_each_run() -> None:
    model, inputs = gpt2()
    reports = [remat.report(model, **inputs, where=type(model.transformer.h[0])) for _ in range(2)]
    assert reports[0] == reports[1]


def test_the_timeline_is_that_of_live_bytes() -> None:
    report = remat.report(loss, *readme())
    for row in report.rows:
        assert max(row.timeline) == row.peak_bytes
        assert report.timeline[row.label] is row.timeline
        assert row.timeline[row.forward_operations - 1] >= row.saved_bytes
        assert len(row.timeline) > row.forward_operations > 0


def test_usual_policies_with_the_same_figures_are_one_row() -> None:
    report = remat.report(layer, *(readme()[0][0], readme()[1]))
    assert [row.label for row in report.policies] == ["policy=None", "save_matmuls"]
    twice = remat.report(layer, *(readme()[0][0], readme()[1]), policies=[None, None])
    assert [row.label for row in twice.policies] == ["policy=None (1)", "policy=None (2)"]


def test_usual_policies_that_match_nothing_do_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    remat.report(torch.sin, rand(3))
    assert not recwarn.list
    for net in (torch.sin, nn.Tanh()):
        remat.report(net, rand(3))
        with pytest.warns(remat.RematWarning, match="has matched none of the operators"):
            remat.report(net, rand(3), policies=[policies.save_attention])


def costs(peak: int, flops: int) -> Costs:
    return Costs("", None, 0, peak, 0, flops, (), 0, ())


def test_a_program_without_regions_is_as_plain_as_it_is_written() -> None:
    report = remat.report(layer, *(readme()[0][0], readme()[1]), policies=[])
    assert report.as_written is report.plain
    assert "*" not in str(report)


def test_a_policy_that_recomputes_for_nothing_is_not_among_the_best() -> None:
    """In one region alone, the recompute has all residuals at once."""
    report = remat.report(layer, *(readme()[0][0], readme()[1]), policies=[None, policies.everything_saveable])
    assert report.policies[0].saved_bytes < report.policies[1].saved_bytes
    assert report.policies[0].peak_bytes == report.policies[1].peak_bytes
    assert report.pareto == [] and "*" not in str(report)


def test_pareto() -> None:
    rows = [costs(5, 0), costs(3, 2), costs(4, 2), costs(3, 3), costs(1, 9), costs(5, 0)]
    assert pareto(rows) == [rows[4], rows[1], rows[0], rows[5]]
    assert distinct([rows[0], rows[5]]) == [rows[0]]


@pytest.mark.cuda
def test_on_a_device_the_report_has_the_peak_of_its_allocator() -> None:
    w, x = (rand(64, 64, seed=seed, grad=False).float().to(DEVICE) for seed in range(2))
    fn = lambda w, x: torch.tanh(torch.tanh(torch.tanh(x @ w) @ w) @ w)
    on_cpu = remat.report(fn, w.cpu(), x.cpu(), policies=[None])
    report = remat.report(fn, w, x, policies=[None])
    assert [(r.saved_bytes, r.recomputed_flops) for r in report.rows] == [
        (r.saved_bytes, r.recomputed_flops) for r in on_cpu.rows
    ]
    assert all(row.device_peak_bytes is None for row in on_cpu.rows)
    assert all(row.device_peak_bytes >= row.peak_bytes for row in report.rows)
    assert "peak of the allocator" in str(report)
    assert report.environment["device"] != "CPU"
    assert remat.check(fn, w, x).ok


# --- text and values --------------------------------------------------------------------------------------------------


def test_text() -> None:
    report = remat.report(loss, *readme(), policies=[None, policies.save_matmuls])
    assert str(report) == (
        f"loss: torch {torch.__version__}, CPU\n"
        "                saved    peak  FLOPs recomputed\n"
        "without remat  20 KiB  30 KiB                 0\n"
        "as written      4 KiB  27 KiB        32.8 kFLOP  +17 %\n"
        "policy=None       8 B  27 KiB        98.3 kFLOP  +50 %\n"
        "save_matmuls   20 KiB  44 KiB                 0\n"
        "No policy is better than the other rows."
    )
    lines = str(remat.report(torch.sin, rand(3))).splitlines()
    assert lines[-1] == "FLOPs are those of matrix products, convolutions and attention; this program has none."


def test_text_of_a_model() -> None:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))
    x = torch.randn(128, 64)
    whole = str(remat.report(net, x, policies=[None])).splitlines()
    assert whole[-2] == "No policy is better than the other rows."
    assert whole[-1].startswith("Under each policy the model is one region. With `where=Block` the modules")
    lines = str(remat.report(net, x, where=lambda name, module: name.isdigit(), policies=[None])).splitlines()
    assert lines[3].startswith("policy=None") and lines[3].endswith("*")
    assert lines[-1] == "* no other row has a lower peak without recomputing more"


def test_values() -> None:
    report = remat.report(loss, *readme(), policies=[None])
    values = json.loads(json.dumps(report.to_dict()))
    assert values["name"] == "loss" and values["environment"]["device"] == "CPU"
    assert [row["label"] for row in values["rows"]] == ["without remat", "as written", "policy=None"]
    assert [row["pareto"] for row in values["rows"]] == [False, False, False]
    assert values["rows"][1]["residuals"][0] == {
        "module": None, "op": "aten.add", "name": None, "count": 4, "nbytes": 4096,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (12, "12 FLOP"), (999_960, "1 MFLOP"), (12_345_678, "12.3 MFLOP")]
)
def test_flops_are_easy_to_read(count: int, text: str) -> None:
    assert flops_text(count) == text


# --- the plot ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report() -> remat.Report:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))
    return remat.report(net, torch.randn(128, 64), where=lambda name, module: name.isdigit())


def test_a_plot_has_each_row(report: remat.Report) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.subplots()
    assert report.plot(axes) is axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("FLOPs recomputed", "peak memory")
    *points, front = axes.lines
    expected = {row.label: ([row.recomputed_flops], [row.peak_bytes]) for row in report.rows}
    assert {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in points} == expected
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(expected)
    best = [(row.recomputed_flops, row.peak_bytes) for row in reversed(report.pareto)]
    assert len(best) == 2 and [*zip(*front.get_data())] == best
    figure.canvas.draw()
    assert {"0 B", "256 KiB", "1 MiB"} <= {text.get_text() for text in axes.get_yticklabels()}


def test_a_plot_of_a_program_without_products() -> None:
    axes = pytest.importorskip("matplotlib.figure").Figure().subplots()
    report = remat.report(torch.sin, rand(3))
    report.plot(axes)
    assert len(axes.lines) == len(report.rows) and axes.get_xlim() == (0, 1)


def test_a_plot_makes_a_figure(report: remat.Report) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    first, second = report.plot(), report.plot()
    assert first.figure is not second.figure
    pyplot.close(first.figure)
    pyplot.close(second.figure)


def test_a_plot_needs_matplotlib(report: remat.Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    curve = remat.pareto(torch.sin, rand(3))
    for plot in (report.plot, curve.plot):
        with pytest.raises(ImportError, match=r"^A plot needs matplotlib: pip install remat\[plot\]$"):
            plot()


# --- nothing is changed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("where", [None, nn.BatchNorm1d])
def test_nothing_is_changed(fails: bool, where: Any) -> None:
    net = Careless()
    net.weight.grad = given = torch.ones(3)
    before = state_of(net)
    try:
        remat.report(net, torch.ones(2, 3), fails, where=where)
        assert not fails
    except ValueError as error:
        assert fails and str(error) == "mine"
    assert state_of(net) == before and net.weight.grad is given


def test_a_transform_that_trains_leaves_the_model_as_it_was() -> None:
    net, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout()), torch.randn(4, 3)
    before = state_of(net)

    def train(net: nn.Module) -> Callable:
        def step(x: Tensor) -> None:
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            net(x).square().sum().backward()
            optimizer.step()

        return step

    report = remat.report(net, x, transform=train)
    assert state_of(net) == before
    assert report.plain.saved_bytes > report.policies[0].saved_bytes > 0


def test_under_a_transform_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"Pass it the transform instead: `remat.report\(fn, x, transform="):
        vmap(lambda x: remat.report(torch.sin, x) and x)(torch.ones(3))
    with pytest.raises(remat.PolicyError):
        remat.report(torch.sin, torch.ones(3), policies=["no such policy"])
    with pytest.raises(TypeError, match=r"policies must be a list of policies: `policies=\[policies.save_matmuls\]`\."):
        remat.report(torch.sin, torch.ones(3), policies=policies.save_matmuls)


@pytest.mark.parametrize("measure", [remat.report, remat.check])
def test_what_a_transform_changes_is_restored(measure: Any) -> None:
    """Also if it does so when it is applied, before the function runs."""
    model, x = nn.Linear(4, 4), torch.ones(2, 4)

    def changes(fn: Any) -> Any:
        fn.register_forward_hook(lambda *args: None)
        torch.rand(1)
        return fn

    before = torch.get_rng_state()
    measure(model, x, transform=changes)
    assert not model._forward_hooks and torch.equal(torch.get_rng_state(), before)
