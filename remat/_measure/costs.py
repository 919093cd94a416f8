"""What a program costs under each policy: bytes that are saved, the peak, FLOPs that are recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import MutationError
from .listing import of_storage
from .observer import flops, gc_disabled
from .origins import Origins
from .program import Program
from .rows import SavedResidual, any_layer
from .subject import Subject


@dataclass(frozen=True)
class Share:
    """What an operation of a module, and of its like in other layers, has made of the bytes that are saved."""

    module: str | None
    op: str
    name: str | None
    count: int
    nbytes: int


@dataclass(frozen=True)
class Costs:
    """What one run of a program costs.

    Attributes:
        label: the policy in words.
        policy: the policy; None too where nothing may be kept, and for a run without it.
        saved_bytes: alive when the forward has ended: what is kept for the backward. Arguments and captured tensors are
            not counted, here and below.
        peak_bytes: the most bytes that were alive at once.
        flops: floating-point operations of matrix products, convolutions and attention.
        recomputed_flops: how many of these a run without rematerialization doesn't have.
        timeline: the bytes that were alive after each operation.
        forward_operations: how many of the operations belong to the forward.
        residuals: what is saved, the largest first.
        device_peak_bytes: what the device's allocator had given out at most, beyond what it had before. None on a CPU.
        under_policy: whether the report was asked for this policy.
    """

    label: str
    policy: Any
    saved_bytes: int
    peak_bytes: int
    flops: int
    recomputed_flops: int
    timeline: tuple[int, ...] = field(repr=False)
    forward_operations: int
    residuals: tuple[SavedResidual, ...] = field(repr=False)
    device_peak_bytes: int | None = None
    under_policy: bool = False

    @property
    def shares(self) -> list[Share]:
        """What is saved, by module and operation."""
        groups: dict[tuple, list[SavedResidual]] = {}
        for row in self.residuals:
            groups.setdefault((any_layer(row.module), row.op or row.source, row.name), []).append(row)
        shares = [
            Share(module, op, name, len(rows), sum(row.nbytes for row in rows))
            for (module, op, name), rows in groups.items()
        ]
        return sorted(shares, key=lambda share: (-share.nbytes, share.module or "", share.op))

    def beats(self, other: Costs) -> bool:
        """Whether it saves less and recomputes no more than another one, or the other way round."""
        mine, theirs = (self.saved_bytes, self.recomputed_flops), (other.saved_bytes, other.recomputed_flops)
        return mine != theirs and all(a <= b for a, b in zip(mine, theirs))


class _Meter(Origins):
    """Counts all of it in one run."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject.modules)
        self.flops = 0
        self.timeline: list[int] = []
        self.saved, self.forward = -1, 0
        self.residuals: list[SavedResidual] = []

    def after(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        super().after(func, args, kwargs, result)
        self.flops += flops(func, args, kwargs, result)
        self.timeline.append(self.total)

    def at_end_of_forward(self) -> None:
        """What is alive now is kept for the backward. A transform may call the function more than once."""
        if (saved := self.live) > self.saved:
            self.saved, self.forward = saved, len(self.timeline)
            self.residuals = [of_storage(storage, origin) for storage, origin in self.alive()]


def measured(
    program: Program,
    label: str,
    way: Callable[[], AbstractContextManager],
    plain: Costs | None = None,
    policy: Any = None,
    under_policy: bool = False,
) -> Costs:
    """Run the program in a way, which is a context manager that yields its function; ``plain`` is it without remat."""
    try:
        meter, device_peak = _metered(program, way)
    except MutationError:  # what a region changes itself is copied once that was seen
        meter, device_peak = _metered(program, way)
    rows = sorted(meter.residuals, key=lambda row: (-row.nbytes, row.source))
    return Costs(
        label=label,
        policy=policy,
        saved_bytes=max(meter.saved, 0),
        peak_bytes=meter.peak,
        flops=meter.flops,
        recomputed_flops=0 if plain is None else meter.flops - plain.flops,
        timeline=tuple(meter.timeline),
        forward_operations=meter.forward,
        residuals=tuple(rows),
        device_peak_bytes=device_peak,
        under_policy=under_policy,
    )


def _metered(program: Program, way: Callable[[], AbstractContextManager]) -> tuple[_Meter, int | None]:
    subject = program.subject
    meter = _Meter(subject)
    with subject.preserved(), way() as fn, gc_disabled(), _device_peak(subject) as device_peak:
        with meter:
            program.run(fn, meter.at_end_of_forward)
    return meter, device_peak()


@contextmanager
def _device_peak(subject: Subject) -> Iterator[Callable[[], int | None]]:
    """Yields what tells the peak of the device's allocator, if the program is on a device that has one."""
    found = {t.device.type for t in subject.inputs()} - {"cpu", "meta"}
    modules = [torch.get_device_module(kind) for kind in sorted(found)]
    modules = [module for module in modules if hasattr(module, "reset_peak_memory_stats")]
    if not modules:
        yield lambda: None
        return
    before = []
    for module in modules:
        module.synchronize()
        module.reset_peak_memory_stats()
        before.append(module.memory_allocated())
    peaks: list[int] = []
    yield lambda: sum(peaks)
    for module, start in zip(modules, before):
        module.synchronize()
        peaks.append(module.max_memory_allocated() - start)


def pareto(rows: Iterable[Costs]) -> list[Costs]:
    """Those that none beats in both bytes and FLOPs, the one that saves the least first."""
    rows = list(rows)
    best = [row for row in rows if not any(other.beats(row) for other in rows)]
    return sorted(best, key=lambda row: (row.saved_bytes, row.recomputed_flops))


def distinct(rows: Sequence[Costs]) -> list[Costs]:
    """The rows without those that cost the same as one before."""
    seen: dict[tuple, Costs] = {}
    for row in rows:
        seen.setdefault((row.saved_bytes, row.peak_bytes, row.flops), row)
    return list(seen.values())
