"""Runs each distinct call of a module alone, as a region: what it saves and needs for each of its choices."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from .._core import trees
from .._core.known import known_of
from .._core.tensors import is_differentiable
from .._measure.allocated import Allocated
from .._measure.program import default_loss
from .._modules.region_class import regions
from .._policy.policy import Budget, Chosen
from .._region.arguments import Arguments, take_apart
from .._region.options import Options
from .._selective.choices import Tradeoff
from .._selective.search import Choice
from .items import NO_WORK, Item, Option, Work
from .trace import Call

_MOST_CHOICES = 24  # of one call


class Needs(NamedTuple):
    """The most bytes that the forward and the backward of a call need."""

    forward: int
    backward: int


class Measured(NamedTuple):
    """What one call can save as a region: its choices, by increasing bytes, and what those at the ends need."""

    tradeoff: Tradeoff
    choices: Sequence[Choice]  # some of the tradeoff's
    least: Needs
    most: Needs

    def options(self, item: Item, only_least: bool = False) -> list[Option]:
        """Return the options of an item that does what this call does, or only to save nothing."""
        # The call alone has made its arguments. In the model those before it may keep them.
        others = max(0, item.call.nbytes - item.given)
        # Results that nothing after it keeps.
        results = sum(memory.nbytes for memory in item.call.results if memory.kept < item.call.end)
        (tradeoff, choices, least, most), found = self, []
        nothing = [tradeoff.nothing] if results and not tradeoff.results.isdisjoint(choices[0].steps) else []
        for choice in [tradeoff.nothing] if only_least else [*nothing, *choices]:
            more = choice.nbytes - choices[0].nbytes
            kept = 0 if tradeoff.results.isdisjoint(choice.steps) else results
            # A choice between the two that were run needs no more than either of them allows.
            forward = min(least.forward + more, max(least.forward, most.forward))
            backward = max(least.backward, most.backward) if more else least.backward
            found.append(
                Option(
                    keep=item.given + more + kept,
                    forward=forward - others + item.held,
                    backward=backward - others + item.beside + kept,
                    recompute=Work(choice.cost, choice.flops),
                    ends=item.work if choice.steps else NO_WORK,
                    nbytes=choice.nbytes,
                    steps=choice.steps,
                )
            )
        return found


def _copied(leaves: Sequence[Any]) -> list[Any]:
    """Copy the objects in arguments that a call may change, such as a cache of keys and values."""
    memo: dict[int, Any] = {}  # an object that is there twice has one copy
    return [leaf if callable(leaf) else copy.deepcopy(leaf, memo) for leaf in leaves]


def _alone(call: Call, policy: Budget, args: tuple, kwargs: dict) -> Needs:
    """Run a call alone as a region, forward and backward, and measure the phases.

    As in the model, only the call owns its arguments, and only the engine owns the gradients of its results.
    """
    module: Any = call.module
    found, tensors = take_apart(args, kwargs)
    arguments = Arguments(found.spec, _copied(found.leaves), found.uses)
    parameters = [p for p in module.parameters() if p.requires_grad]
    seed = torch.zeros((), requires_grad=True)
    torch.clear_autocast_cache()  # it may have copies of weights that the call would make itself in a step
    with Allocated([*tensors, *parameters]) as memory, torch.enable_grad():
        owned = [
            t + seed if needed else t.clone() if is_differentiable(t) else t
            for t, needed in zip(tensors, call.differentiable)
        ]
        positional, keywords = arguments.filled(owned)
        del owned, args, kwargs
        with regions({module: Options(policy=policy)}):
            result = module.forward(*positional, **keywords)
        del positional, keywords
        memory.next_phase()
        results = [t for t in trees.flatten(result)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
        end = default_loss([t * 1 for t in results])
        del result, results
        memory.next_phase()
        torch.autograd.grad(end, [seed, *parameters], allow_unused=True)
    forward, _, backward = memory.peaks
    return Needs(forward, backward)


def _measured(call: Call, cost: Any, args: tuple, kwargs: dict) -> Measured | None:
    """Run a call with the least and with the most saved. None if it has nothing to choose from."""
    nothing = Budget(0, cost)
    least = _alone(call, nothing, args, kwargs)
    found = known_of(call.module).choices.pop(nothing, None)
    if not found:
        return None
    tradeoff: Tradeoff = found[-1][0]
    options = tradeoff.options
    count = min(len(options), _MOST_CHOICES)
    choices = [options[round(i * (len(options) - 1) / max(1, count - 1))] for i in range(count)]
    policy = Budget(choices[-1].nbytes, cost, Chosen(tradeoff.operators, choices[-1].steps))
    most = least if len(choices) == 1 else _alone(call, policy, args, kwargs)
    known_of(call.module).choices.pop(policy, None)
    return Measured(tradeoff, choices, least, most)


class Measuring:
    """Measures the first call of each key in a forward without gradients."""

    def __init__(self, items: Iterable[Item], cost: Any, on_measured: Callable[[], Any]) -> None:
        self._cost, self._on_measured = cost, on_measured
        self._items = {(id(item.call.module.__dict__), item.call.number): item for item in items}
        self._counts = Counter[int]()
        self._is_busy = False
        self.found: dict[tuple, Measured | None] = {}
        self.failures: dict[tuple, str] = {}

    def starts(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Measure a call that starts."""
        if self._is_busy:
            return
        key = id(module.__dict__)
        item = self._items.get((key, self._counts[key]))
        self._counts[key] += 1
        if item is None or item.key in self.found:
            return
        self._is_busy, self.found[item.key] = True, None  # calls in a measured call have their turn later
        try:
            self.found[item.key] = _measured(item.call, self._cost, args, kwargs)
        except Exception as error:
            self.failures[item.key] = str(error).partition("\n")[0]
        finally:
            torch.clear_autocast_cache()
            self._is_busy = False
            self._on_measured()
