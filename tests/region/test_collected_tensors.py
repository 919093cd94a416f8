"""Tensors that a region appends to a list or dict and that the loss uses, as libraries do to collect outputs.

With the garbage collector off, nothing of a step may be alive after it, and the containers have the same contents as
without remat: a recompute finds in them what the first run found, and what it adds is dropped afterwards.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.measure import leaked_bytes
from remat import policies, remat

Wrap = Callable[[Callable], Callable]
COLLECTED: Any = None


class Holder:
    """An object that a global refers to."""

    outs: Any = None


HOLDER = Holder()
CURRENT: Any = None


def plain(fn: Callable) -> Callable:
    return fn


def growth(step: Callable[[], Any]) -> int:
    """The bytes that a step leaves behind, not counting those of the first step."""
    leaked_bytes(step)
    return leaked_bytes(step)


def layer(collect: Callable[[Tensor], object]) -> Callable:
    weight = torch.randn(8, 8).div_(3).requires_grad_()

    def f(x: Tensor) -> Tensor:
        h = (x @ weight).tanh()
        collect((h * h).sin())
        return h.cos().sin()

    f.weight = weight
    return f


# Each returns a function that makes a layer, and one that sets and returns an empty list in the layer's place.


def of_global() -> Any:
    def fresh() -> Any:
        global COLLECTED
        COLLECTED = []
        return COLLECTED

    return lambda: layer(lambda t: COLLECTED.append(t)), fresh


def of_attribute() -> Any:
    def fresh() -> Any:
        HOLDER.outs = []
        return HOLDER.outs

    return lambda: layer(lambda t: HOLDER.outs.append(t)), fresh


def of_closure() -> Any:
    outs: Any = None

    def fresh() -> Any:
        nonlocal outs
        outs = []
        return outs

    return lambda: layer(lambda t: outs.append(t)), fresh


def of_nested_containers() -> Any:
    outs: Any = None

    def fresh() -> Any:
        nonlocal outs
        outs = collections.defaultdict(list, kept=[{"t": []}])
        return outs["kept"][0]["t"]

    def collect(t: Tensor) -> None:
        outs["kept"][0]["t"].append(t)
        outs[f"other {len(outs)}"].append((1, t))

    return lambda: layer(collect), fresh


def of_module() -> Any:
    module = nn.Module()

    def fresh() -> Any:
        module.outs = []
        return module.outs

    return lambda: layer(lambda t: module.outs.append(t)), fresh


PLACES = [
    of_global, of_attribute, of_closure, of_nested_containers, of_module,
]  # fmt: skip


# How the loss uses the collected tensors.


def all_of_it(y: Tensor, outs: list, weights: list) -> Any:
    return torch.autograd.grad(y.sum() + sum(t.sum() for t in outs), weights)


def one_of_them(y: Tensor, outs: list, weights: list) -> Any:
    return torch.autograd.grad(y.sum() + outs[0].sum(), weights)


def none_but_one(y: Tensor, outs: list, weights: list) -> Any:
    return torch.autograd.grad(outs[1].sum(), weights[:2])


def no_backward(y: Tensor, outs: list, weights: list) -> Any:
    return y.detach()


def kept_graph(y: Tensor, outs: list, weights: list) -> Any:
    return torch.autograd.grad(y.sum() + sum(t.sum() for t in outs), weights, retain_graph=True)


def two_passes(y: Tensor, outs: list, weights: list) -> Any:
    loss = y.sum() + sum(t.sum() for t in outs)
    return torch.autograd.grad(loss, weights, retain_graph=True), torch.autograd.grad(loss, weights)


def second_order(y: Tensor, outs: list, weights: list) -> Any:
    loss = y.sum() + sum(t.sum() for t in outs)
    first = torch.autograd.grad(loss, weights, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), weights)


def cleared(y: Tensor, outs: list, weights: list) -> Any:
    loss = y.sum() + sum(t.sum() for t in outs)
    outs.clear()
    return torch.autograd.grad(loss, weights)


LOSSES = [all_of_it, one_of_them, none_but_one, no_backward, kept_graph, two_passes, second_order, cleared]
WRAPS: dict[str, Wrap] = {
    "remat": remat,
    "matmuls": remat(policy=policies.save_matmuls),
    "nested": lambda f: remat(lambda x: remat(f)(x)),
    "values": remat(determinism_check="values", early_stop=False),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.usefixtures("collector_off")
def test_collected(place: Callable, loss: Callable, wrap: Wrap) -> None:
    def program(wrap: Wrap) -> Any:
        torch.manual_seed(2)
        make, fresh = place()
        fs = [make() for _ in range(3)]
        weights, regions, x = [f.weight for f in fs], [wrap(f) for f in fs], torch.randn(4, 8)

        def step() -> Any:
            outs = fresh()
            y = x
            for region in regions:
                y = region(y)
            before = list(outs)
            result = loss(y, outs, weights)
            assert len(outs) == (0 if loss is cleared else 3)
            assert all(a is b for a, b in zip(outs, before))
            values = [t.detach().clone() for t in before]
            fresh()
            return result, values

        return step(), growth(step)

    torch.testing.assert_close(program(wrap), (program(plain)[0], 0), rtol=0, atol=0)


@pytest.mark.usefixtures("collector_off")
def test_an_object_made_for_each_step() -> None:
    def step() -> None:
        global CURRENT
        CURRENT = Holder()
        CURRENT.outs = []
        y = x
        for f in fs:
            y = remat(f)(y)
        torch.autograd.grad(y.sum() + sum(t.sum() for t in CURRENT.outs), [f.weight for f in fs])
        assert len(CURRENT.outs) == 3
        CURRENT = None

    fs, x = [layer(lambda t: CURRENT.outs.append(t)) for _ in range(3)], torch.randn(4, 8)
    assert growth(step) == 0


def test_a_region_reads_what_was_collected() -> None:
    """The result depends on the list: on its length, its tensors with their histories, and on what isn't a tensor."""

    def program(wrap: Wrap) -> Any:
        outs: list[Any] = ["start"]
        seen: dict[Any, Tensor] = {}

        def f(x: Tensor) -> Tensor:
            h = x.sin() * len(outs)
            for t in outs[1:]:
                h = h + t.cos() * h
            outs.append(h.exp())
            seen[len(outs)] = h.detach()
            return (h * sum(seen.values())).tanh().sin()

        region = wrap(f)
        x = torch.linspace(-1, 1, 6).requires_grad_()
        out = region(region(region(x)))
        lengths = len(outs), list(seen)
        gradients = torch.autograd.grad(out.sum() + outs[-1].sum(), x, retain_graph=True)
        again = torch.autograd.grad(out.sum(), x)
        assert (len(outs), list(seen)) == lengths
        return out.detach(), gradients, again, list(seen.values())

    for wrap in WRAPS.values():
        torch.testing.assert_close(program(wrap), program(plain), rtol=0, atol=0)


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_another_container_for_each_call(wrap: Wrap) -> None:
    """Several forwards before the first backward: a new container may lie where a freed one was."""

    def program(wrap: Wrap) -> Any:
        def f(x: Tensor) -> Tensor:
            return (x * HOLDER.outs[0] * COLLECTED["by"]).sin().exp()

        global COLLECTED
        region, x, results = wrap(f), torch.linspace(-1, 1, 6).requires_grad_(), []
        for i in range(6):
            HOLDER.outs = None
            HOLDER.outs, COLLECTED = [float(i)], {"by": i + 0.5}
            results.append(region(x))
        last = HOLDER.outs, COLLECTED
        gradients = [torch.autograd.grad(result.sum(), x) for result in results]
        assert HOLDER.outs is last[0] and COLLECTED is last[1] and last == ([5.0], {"by": 5.5})
        return gradients

    torch.testing.assert_close(program(wrap), program(plain), rtol=0, atol=0)


def test_one_list_in_two_places() -> None:
    def program(wrap: Wrap) -> Any:
        outs: list[Tensor] = []
        also = {"outs": outs}

        def f(x: Tensor) -> Tensor:
            h = x.sin()
            outs.append(h.cos())
            return (also["outs"][-1] * h * len(also["outs"])).exp()

        x = torch.linspace(-1, 1, 6).requires_grad_()
        out = wrap(f)(wrap(f)(x))
        outs, replaced = [], outs
        gradients = torch.autograd.grad(out.sum(), x)
        assert outs == [] and also["outs"] is replaced and len(replaced) == 2
        return gradients

    torch.testing.assert_close(program(remat), program(plain), rtol=0, atol=0)


def test_a_log_of_the_runs_is_not_reset() -> None:
    """Values that aren't tensors are left in a list or dict, as it may be a log of the runs."""
    log: list[Any] = ["before"]
    counts: dict[str, Any] = {}

    def f(x: Tensor) -> Tensor:
        log.append(len(log))
        counts[f"run {len(counts)}"] = True
        return x.sin().exp()

    x = torch.ones(3, requires_grad=True)
    remat(f)(x).sum().backward()
    assert log == ["before", 1, 2] and len(counts) == 2


def test_a_container_that_holds_itself() -> None:
    around: dict[str, Any] = {"log": [], "outs": []}
    around["log"].append(around)
    around["self"] = around

    def f(x: Tensor) -> Tensor:
        h = x.sin()
        around["self"]["log"].append(1)
        around["self"]["outs"].append([{"h": h}])
        return (h * len(around["self"]["outs"])).exp()

    x = torch.linspace(-1, 1, 6).requires_grad_()
    expected = torch.autograd.grad((x.sin() * 1).exp().sum(), x)
    (gradient,) = torch.autograd.grad(remat(f)(x).sum(), x)
    assert torch.equal(gradient, expected[0])
    assert around["self"] is around and around["log"][0] is around and len(around["outs"]) == 1


def test_state_of_a_module_is_still_restored() -> None:
    module = nn.Module()
    module.seen, module.log = collections.OrderedDict(a=1), [1]

    def f(x: Tensor) -> Tensor:
        module.log.append(len(module.log))
        module.seen["b"] = module.seen.pop("a", 0) + 1
        return (x * module.seen["b"] * len(module.log)).sin().exp()

    x = torch.linspace(-1, 1, 6).requires_grad_()
    expected = torch.autograd.grad((x * 2 * 2).sin().exp().sum(), x)
    out, seen, log = remat(f)(x), module.seen, module.log
    module.seen = collections.OrderedDict()
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected[0])
    assert module.seen == {} and seen == {"b": 2} and module.log is log and log == [1, 1]
