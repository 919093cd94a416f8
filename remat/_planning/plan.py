"""A plan: which modules of a model are regions, and what each saves. It can be printed, drawn, saved and applied."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from torch import nn

from .._core.amounts import aligned, count_text, flops_text, number_text, size_text
from .._measure.costs import plot_peaks
from .._measure.origins import grouped
from .._modules.eligible import check_module
from .._modules.region_class import change_back, change_in_place
from .._policy.policy import UNITS, Budget, Chosen
from .._region.options import Options
from .._selective.search import best_of
from ..errors import RematError, shown

_FORMAT = 4


@dataclass(frozen=True)
class RegionPlan:
    """What one region of a plan does.

    Attributes:
        name: the path of its module in the model.
        kind: the name of the module's class.
        children: the range of the modules of a ``Sequential`` that it is around; None if it is around its call.
        has_regions: whether regions of the plan are inside of it. Then it saves only its inputs.
        nbytes: the bytes that it saves, without its inputs and results.
        cost, flops: the cost and the floating-point operations of its own recompute.
        operators: the names of its operations, in their order; empty if it saves only its inputs whatever they are.
        steps: the numbers of the operations whose results it saves.
    """

    name: str
    kind: str
    children: tuple[int, int] | None
    has_regions: bool
    nbytes: int
    cost: float
    flops: int
    operators: tuple[str, ...] = field(repr=False)
    steps: tuple[int, ...]


def _work(flops: int) -> str:
    return flops_text(flops) if flops else "0 FLOP"


def _names(names: Sequence[str]) -> str:
    """The names of equal modules as one text, such as ``blocks.0-2.mlp``."""
    return ".".join(_ranges(list(dict.fromkeys(parts))) for parts in zip(*(name.split(".") for name in names)))


def _ranges(parts: Sequence[str]) -> str:
    """The numbers of layers, or a part of a name that all have."""
    if len(parts) == 1:
        return parts[0]
    runs = list[list[int]]()
    for number in sorted(map(int, parts)):
        if not runs or number > runs[-1][1] + 1:
            runs.append([number, number])
        runs[-1][1] = number
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)


def parameters_of(named: Mapping[str, nn.Module]) -> int:
    """The bytes of the parameters of these modules."""
    parameters = {p for module in named.values() for p in module.parameters(recurse=False)}
    return sum(p.numel() * p.element_size() for p in parameters)


def no_regions(passed_over: Mapping[str, str]) -> list[str]:
    """One line for each reason why modules can't be regions."""
    lines = []
    for reason in dict.fromkeys(passed_over.values()):
        names = [name for name, other in passed_over.items() if other == reason]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(f"not a region: {names[0]}{more}: {reason}")
    return lines


def options_of(regions: Sequence[RegionPlan], cost: Any) -> dict[str, Options]:
    """Return the options of the modules that are regions, or some of whose modules are, by name."""
    found: dict[str, Options] = {}
    for region in regions:
        segments = [each.children for each in regions if each.name == region.name and each.children]
        chosen = Chosen(region.operators, frozenset(region.steps))
        policy = Budget(region.nbytes, cost, chosen) if region.operators else None
        found[region.name] = Options(policy=policy, name=region.name, segments=tuple(segments))
    return found


@dataclass(frozen=True, repr=False)
class Plan:
    """What :func:`remat.nn.budget` has chosen for a model. Printed it is a table.

    Attributes:
        amount: the budget in bytes.
        peak: the measured peak of a step with this plan, in bytes of the allocator.
        without: the peak of a step without rematerialization, as predicted; as measured, if there are no regions.
        flops: the floating-point operations that are recomputed in a step.
        total: the cost of the recompute, in the units of ``cost``.
        bound: the least cost of a plan whose predicted peak is within the amount.
        regions: the modules that are regions.
        curve: all plans that the search has found, as predicted peaks and recomputed FLOPs.
        passed_over: modules that can't be regions, each with the reason.
        cost: what the cost of a recompute was computed by.
        parameters: the bytes of the model's parameters.
    """

    amount: int
    peak: int
    without: int
    flops: int
    total: float
    bound: float
    regions: tuple[RegionPlan, ...]
    curve: tuple[tuple[int, int], ...] = field(repr=False)
    passed_over: Mapping[str, str] = field(repr=False)
    cost: Any = "roofline"
    parameters: int = field(default=0, repr=False)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = []
        groups = grouped(self.regions, attrgetter("name", "kind", "children", "has_regions", "nbytes", "flops"))
        for _, same in sorted(groups, key=lambda group: self.regions.index(group[1][0])):
            first, name = same[0], _names([region.name for region in same])
            saves = "regions inside" if first.has_regions else size_text(first.nbytes)
            if first.nbytes:
                saves += f", {count_text(len(first.steps), 'operation')}"
            count = f"x{len(same)}" if len(same) > 1 else ""
            if first.children:
                name += f"[{first.children[0]}:{first.children[1]}]"
            rows.append((name, first.kind, count, saves, _work(first.flops)))
        lines = (
            aligned([("region", "class", "", "saves", "recomputes"), *rows], "<<><")
            if rows
            else ["no regions are needed"]
        )
        lines += no_regions(self.passed_over)
        above = round(100 * (self.total / self.bound - 1)) if self.bound else 0
        least = f", {above}% more than the best plan by prediction, which did not fit" if above > 0 else ""
        about = "about " if self.regions else ""  # as predicted
        peak = (
            f"peak {size_text(self.peak)} of {size_text(self.amount)}; {about}{size_text(self.without)} without remat"
        )
        work = f"{_work(self.flops)} recomputed"
        if self.regions and self.cost != "flops":
            unit = f"{UNITS[self.cost][1:]} by {self.cost}" if self.cost in UNITS else " by the cost function"
            work += f", {number_text(self.total)}{unit}"
        return "\n".join([*lines, f"{peak}; {work}{least}"])

    def __repr__(self) -> str:
        return str(self)

    def plot(self, axes: Any = None, report: Any = None) -> Any:
        """Draw the peak against the recomputed FLOPs: all plans, this one, and the model without regions.

        Args:
            axes: matplotlib ``Axes`` to draw on, by default new ones.
            report: a :class:`remat.Report` of the model, whose policies are drawn too.

        Returns the ``Axes``. Raises ``ImportError`` if matplotlib is not installed.
        """
        points = [("without remat", 0, self.without), ("this plan", self.flops, self.peak)]
        points += [(row.label, row.recomputed_flops, row.peak_bytes) for row in (report.policies if report else ())]
        return plot_peaks(axes, points, [(flops, peak) for peak, flops in best_of(self.curve)])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, as JSON, for :func:`remat.nn.load`.

        Raises:
            TypeError: its cost is a function, which JSON can't have.
        """
        if callable(self.cost):
            raise TypeError("A plan can't be saved if its cost is a function: use 'roofline', 'flops' or 'time'.")
        with open(path, "w") as file:
            json.dump({**asdict(self), "format": _FORMAT}, file)

    def apply(self, named: Mapping[str, nn.Module], same_size: bool = False) -> None:
        """Make the regions of the plan, in place. All others that were made in place are undone.

        Raises:
            RematError: the model has no such module, or it has another class, or with ``same_size`` the parameters of
                the model have more or fewer bytes. Nothing is changed then.
            TypeError: a module can't be a region.
        """
        for region in self.regions:
            module = named.get(region.name)
            if module is None:
                raise RematError(f"The plan is for another model: this one has no module {region.name!r}.")
            if type(module).__name__ != region.kind:
                raise RematError(
                    f"The plan is for another model: the module {region.name!r} is a {type(module).__name__} here, "
                    f"and a {region.kind} in the plan."
                )
            check_module(module, region.name)
        if same_size and parameters_of(named) != self.parameters:
            raise RematError(
                f"The plan is for another model: its parameters have {self.parameters:,} bytes, those of this one "
                f"{parameters_of(named):,}."
            )
        for module in named.values():
            change_back(module)
        for name, options in options_of(self.regions, self.cost).items():
            change_in_place(named[name], options)


class BlockChoice(NamedTuple):
    """What one block saves and recomputes: its name, saved bytes, cost, recomputed FLOPs, and saved operations."""

    name: str
    nbytes: int
    cost: float
    flops: int
    operators: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class BlockBudget(Plan):
    """What :func:`remat.nn.budget` has chosen for blocks: a plan in which each of them is a region."""

    @property
    def least(self) -> int:
        """The peak of a step if the blocks save nothing, as predicted."""
        return self.curve[0][0]

    @property
    def blocks(self) -> tuple[BlockChoice, ...]:
        """What each block saves."""
        saved = [tuple(region.operators[i] for i in region.steps) for region in self.regions]
        return tuple(BlockChoice(r.name, r.nbytes, r.cost, r.flops, each) for r, each in zip(self.regions, saved))

    def __str__(self) -> str:
        rows = [(b.name, size_text(b.nbytes), _work(b.flops), f"{len(b.operators)}") for b in self.blocks]
        head = ("block", "saves", "recomputes", "operations saved")
        peak = (
            f"peak {size_text(self.peak)} of {size_text(self.amount)}; about {size_text(self.without)} without remat, "
            f"about {size_text(self.least)} if nothing is saved"
        )
        return "\n".join([*aligned([head, *rows], "<"), peak])


def loaded(path: str | os.PathLike[str]) -> Plan:
    """Read a plan from a file that ``Plan.save`` has written."""
    try:
        with open(path) as file:
            found = json.load(file)
    except ValueError:  # it is no JSON, or no text
        found = None
    if not isinstance(found, dict) or found.pop("format", None) != _FORMAT:
        raise RematError(f"{shown(path)} is no plan that this version of remat can read.")
    regions = [
        RegionPlan(
            operators=tuple(region.pop("operators")),
            steps=tuple(region.pop("steps")),
            children=tuple(region.pop("children") or ()) or None,
            **region,
        )
        for region in found.pop("regions")
    ]
    curve = tuple((peak, flops) for peak, flops in found.pop("curve"))
    return Plan(regions=tuple(regions), curve=curve, **found)
