"""Tensors that a region appends to a list or dict and that the loss uses, as libraries do to collect outputs.

With the garbage collector off, nothing of a step may be alive after it, and the containers have the same contents as
without remat: a recompute finds in them what the first run found, and what it adds is dropped afterwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from operator import is_
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import assert_same
from torch import Tensor, nn

from benchmarks.measure import leaked_bytes
from remat import policies, remat

HELD = SimpleNamespace()
WRAPS: dict[str, Callable] = {
    "remat": remat,
    "a policy": remat(policy=policies.save_ops("aten.mm", "aten.sin")),
    "nested": lambda f: remat(lambda x: remat(f)(x)),
    "without early stop": remat(determinism_check="values", early_stop=False),
}
every_wrap = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
Loss = Callable[[Tensor, list, list], Any]


# A new place for collected tensors, how one is added, and the list with those of all layers.
PLACES: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], object], Callable[[Any], list]]] = {
    "list": (list, list.append, lambda outs: outs),
    "nested containers": (
        lambda: defaultdict(list, kept=[{"t": []}]),
        lambda outs, t: (outs["kept"][0]["t"].append(t), outs[f"other {len(outs)}"].append((1, t))),
        lambda outs: outs["kept"][0]["t"],
    ),
}


def total(y: Tensor, outs: list) -> Tensor:
    return y.sum() + sum(t.sum() for t in outs)


def all_of_them(y: Tensor, outs: list, weights: list) -> Any:
    return [torch.autograd.grad(loss, weights, retain_graph=i < 2) for i, loss in enumerate([total(y, outs)] * 3)]


def cleared(y: Tensor, outs: list, weights: list) -> Any:
    loss = total(y, outs)
    outs.clear()
    return torch.autograd.grad(loss, weights)


# How the loss uses the collected tensors.
LOSSES: dict[str, Loss] = {
    "all": all_of_them,
    "one": lambda y, outs, weights: torch.autograd.grad(outs[1].sum(), weights[:2]),
    "none": lambda y, outs, weights: y.detach(),
    "cleared": cleared,
}


@pytest.mark.sampled(2)
@every_wrap
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.usefixtures("collector_off")
def test_collected_tensors_have_their_derivatives_and_are_freed(place: str, loss: str, wrap: Callable) -> None:
    make, add, collected = PLACES[place]

    def program(wrap: Callable) -> Any:
        weights = [torch.linspace(-i, 1, 64).view(8, 8).requires_grad_() for i in range(3)]

        def layer(weight: Tensor) -> Callable:
            def f(x: Tensor) -> Tensor:
                h = (x @ weight).tanh()
                add(HELD.outs, (h * h).sin())
                return h.cos().sin()

            return wrap(f)

        regions, x = [layer(weight) for weight in weights], torch.ones(4, 8)

        def step() -> Any:
            HELD.outs, y = make(), x
            for region in regions:
                y = region(y)
            outs = collected(HELD.outs)
            before = list(outs)
            result = LOSSES[loss](y, outs, weights)
            assert len(outs) == (0 if loss == "cleared" else 3) and all(map(is_, outs, before))
            HELD.outs = make()
            return result, [t.detach().clone() for t in before]

        leaked_bytes(step)  # the first step may leave some
        return step(), leaked_bytes(step)

    assert_same(program(wrap), (program(lambda f: f)[0], 0))


@every_wrap
def test_a_region_reads_what_was_collected(wrap: Callable) -> None:
    """The result depends on the list: on its length, its tensors with their histories, and on what isn't a tensor."""

    def program(wrap: Callable) -> Any:
        outs: list[Any] = ["start"]
        seen: dict[Any, Any] = {}
        around: dict[str, Any] = {"outs": outs, "seen": seen}  # the same containers, and one that holds itself
        around["self"] = around

        def f(x: Tensor) -> Tensor:
            h = x.sin() * len(outs)
            for t in around["self"]["outs"][1:]:
                h = h + t.cos() * h
            outs.append(h.exp())
            seen[len(outs)] = h.detach()
            return (h * sum(around["seen"].values())).tanh().sin()

        x, region = torch.linspace(-1, 1, 6).requires_grad_(), wrap(f)
        out = region(region(region(x)))
        state = list(outs), list(seen)
        gradients = torch.autograd.grad(out.sum() + outs[-1].sum(), x, retain_graph=True)
        outs, replaced = [], outs
        again = torch.autograd.grad(out.sum(), x)
        assert outs == [] and around["outs"] is replaced and around["self"] is around
        assert len(replaced) == 4 and all(map(is_, replaced, state[0])) and list(seen) == state[1]
        return out.detach(), gradients, again, list(seen.values())

    assert_same(program(wrap), program(lambda f: f))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("make", [list, dict])
def test_a_recompute_sees_no_entries_that_were_added_since(make: type, inside: bool) -> None:
    for before in (make(), make([(0, 2.0)]) if make is dict else [2.0]):
        entries, x = before, torch.linspace(-1, 1, 3).requires_grad_()

        def f(x: Tensor, entries: Any = entries) -> Tensor:
            values = list(entries.values()) if isinstance(entries, dict) else [*entries]
            if inside and not values:
                entries.update({0: 1.0}) if isinstance(entries, dict) else entries.append(1.0)
            return (x * (values[-1] if values else 5.0)).sin().exp() if len(values) < 2 else x.cos().exp()

        factor = 2.0 if before else 5.0
        out = remat(lambda x: f(x, entries))(x)
        if not inside:
            entries.update({9: 3.0}) if isinstance(entries, dict) else entries.append(3.0)
        assert_same(torch.autograd.grad(out.sum(), x), torch.autograd.grad((x * factor).sin().exp().sum(), x))


def test_a_log_of_the_runs_is_not_reset() -> None:
    """What a recompute adds stays in a list, unless it is a tensor, or the list belongs to a module or an object."""
    log, notes, counts, module = ["before"], [torch.ones(3)], dict[str, Any](), nn.Module()
    module.log, module.seen = [1], {"a": 1}

    def f(x: Tensor) -> Tensor:
        log.append("a run")
        notes.append("a run")
        counts[f"run {len(counts)}"] = True
        module.log.append(len(module.log))
        module.seen["b"] = module.seen.pop("a", 0) + 1
        return (x * module.seen["b"] * len(module.log) * notes[0]).sin().exp()

    x = torch.linspace(-1, 1, 3).requires_grad_()
    out, seen = remat(f)(x), module.seen
    module.seen = {}
    assert_same(torch.autograd.grad(out.sum(), x), torch.autograd.grad((x * 2 * 2).sin().exp().sum(), x))
    assert len(log) == len(notes) == 3 and counts == {"run 0": True}
    assert module.log == [1, 1] and seen == {"b": 2} and module.seen == {}
