"""What a program costs under each policy: saved bytes, peak bytes, recomputed FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from .._core.devices import wait_for_backward_threads
from .._core.flops import flops
from ..errors import MutationError
from .listing import of_storage
from .observer import gc_disabled
from .origins import Origins
from .program import Program
from .rows import SavedResidual, any_layer
from .subject import Subject


@dataclass(frozen=True)
class Share:
    """The saved bytes of one operation in one module, together with the same module in other layers."""

    module: str | None
    op: str
    name: str | None
    count: int
    nbytes: int


@dataclass(frozen=True)
class Costs:
    """The costs of one run of a program.

    Attributes:
        label: the policy as text.
        policy: the policy; None for no policy and for runs that were not made for a policy.
        saved_bytes: bytes alive at the end of the forward, which are saved for the backward. Arguments and captured
            tensors are not counted, here and below.
        peak_bytes: the most bytes alive at any time.
        flops: floating-point operations of matrix products, convolutions and attention.
        recomputed_flops: the number of these beyond a run without rematerialization.
        timeline: the bytes alive after each operation.
        forward_operations: how many of the operations belong to the forward.
        residuals: the saved tensors, the largest first.
        device_peak_bytes: the peak of the device's allocator, beyond what was allocated before. None on a CPU.
        under_policy: whether this run was made for one of the report's policies.
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
        """The saved bytes by module and operation."""
        groups: dict[tuple, list[SavedResidual]] = {}
        for row in self.residuals:
            groups.setdefault((any_layer(row.module), row.op or row.source, row.name), []).append(row)
        shares = [
            Share(module, op, name, len(rows), sum(row.nbytes for row in rows))
            for (module, op, name), rows in groups.items()
        ]
        return sorted(shares, key=lambda share: (-share.nbytes, share.module or "", share.op))

    def beats(self, other: Costs) -> bool:
        """Whether it has a lower peak or fewer recomputed FLOPs than another one, and is not worse in either."""
        mine, theirs = (self.peak_bytes, self.recomputed_flops), (other.peak_bytes, other.recomputed_flops)
        return mine != theirs and all(a <= b for a, b in zip(mine, theirs))


class _Meter(Origins):
    """Counts bytes, FLOPs and residuals in one run."""

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
        """Record the memory alive now. A transform may call the function more than once: the largest forward counts."""
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
    """Run the program in a way (a context manager that yields its function); ``plain`` are its costs without remat."""
    try:
        meter, device_peak = _metered(program, way)
    except MutationError:  # a region copies an input that it changes only after it has seen the change once
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
    """Yield a function that returns the peak of the device's allocator, or None if there is none."""
    found = {t.device.type for t in subject.inputs()} - {"cpu", "meta"}
    modules = [torch.get_device_module(kind) for kind in sorted(found)]
    modules = [module for module in modules if hasattr(module, "reset_peak_memory_stats")]
    if not modules:
        yield lambda: None
        return
    wait_for_backward_threads(subject.inputs())  # they may still hold what an earlier pass has used
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
    """The rows that no other row beats, by increasing peak."""
    rows = list(rows)
    best = [row for row in rows if not any(other.beats(row) for other in rows)]
    return sorted(best, key=lambda row: (row.peak_bytes, row.recomputed_flops))


def distinct(rows: Sequence[Costs]) -> list[Costs]:
    """The rows without repeated costs."""
    seen: dict[tuple, Costs] = {}
    for row in rows:
        seen.setdefault((row.saved_bytes, row.peak_bytes, row.flops), row)
    return list(seen.values())
