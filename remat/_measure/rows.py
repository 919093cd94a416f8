"""The rows of a listing: saved tensors, one by one and in groups."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .units import size_text

Kind = Literal["argument", "captured", "named", "output", "constant"]


@dataclass(frozen=True)
class SavedResidual:
    """One saved tensor.

    Attributes:
        kind: ``"argument"`` or ``"captured"`` for an input; ``"named"`` by ``checkpoint_name``; ``"output"`` of an
            operation; ``"constant"`` for a tensor that no operation has made.
        op: the operation that wrote it, such as ``"aten.mm"``; None for an input or a constant.
        name: the name of an argument (``"params['w1']"``) or of a captured tensor (``"self.weight"``), or the name
            given by ``checkpoint_name``.
        file: the user's file that called the operation, or gave the name.
        line: the line in that file.
        function: the function that contains the line.
        module: the path of the module whose forward made it, such as ``"layers.0.linear1"``, or its class.
        shape: the shape of the operation's result, even if autograd saves a view of it.
        dtype: its dtype.
        device: its device.
        nbytes: the bytes of its storage.
    """

    kind: Kind
    op: str | None
    name: str | None
    file: str | None
    line: int | None
    function: str | None
    module: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int

    @property
    def is_input(self) -> bool:
        """Whether it is an argument or a captured tensor, which takes no additional memory."""
        return self.kind in ("argument", "captured")

    @property
    def source(self) -> str:
        """Its origin as text."""
        if self.is_input:
            return f"{self.kind} {self.name}"
        if self.kind == "constant":
            return "not made by an operation, such as a constant"
        what = f"named {self.name!r}" if self.kind == "named" else f"output of {self.op}"
        return f"{what} at {self._place}"

    @property
    def _place(self) -> str:
        return "an unknown line" if self.file is None else f"{self.file}:{self.line} ({self.function})"

    def __str__(self) -> str:
        return f"{tensor_text(self)} on {self.device}, {size_text(self.nbytes)}: {self.source}"


@dataclass(frozen=True)
class Group:
    """Rows that differ only by the number of a layer: their count, their total bytes, and the first one."""

    count: int
    nbytes: int
    row: SavedResidual
    source: str
    module: str | None


def grouped(rows: Iterable[SavedResidual]) -> list[Group]:
    """The groups of rows, by decreasing bytes."""
    groups: dict[tuple, list[SavedResidual]] = {}
    for row in rows:
        key = row.source, row.op, row.module, row.shape, row.dtype, row.device, row.nbytes
        groups.setdefault(tuple(any_layer(part) for part in key), []).append(row)
    found = []
    for members in groups.values():
        source, module = _common([row.source for row in members]), _common([row.module for row in members])
        found.append(Group(len(members), sum(row.nbytes for row in members), members[0], source or "", module))
    return sorted(found, key=lambda group: (-group.nbytes, group.source))


_LAYER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)|(?<=\[)\d+(?=\])")


def any_layer(text: Any) -> Any:
    """A path with a star in place of the number of a layer."""
    return _LAYER.sub("*", text) if isinstance(text, str) else text


def _common(texts: Sequence[str | None]) -> str | None:
    """The common text, with a star in place of each number of a layer that differs."""
    first = texts[0]
    if first is None or all(text == first for text in texts):
        return first
    numbers = [_LAYER.findall(text or "") for text in texts]
    same = iter([len(set(column)) == 1 for column in zip(*numbers)])
    return _LAYER.sub(lambda found: found.group() if next(same) else "*", first)


def listing(rows: Sequence[SavedResidual], inputs: bool) -> str:
    """The rows in columns, and their total."""
    shown = grouped(row for row in rows if inputs or not row.is_input)
    columns = [
        (
            tensor_text(group.row),
            str(group.row.device),
            size_text(group.row.nbytes),
            f"x{group.count}" if group.count > 1 else "",
            group.source + (f", in {group.module}" if group.module else ""),
        )
        for group in shown
    ]
    widths = [max((len(column[i]) for column in columns), default=0) for i in range(4)]
    lines = []
    for kind, device, size, count, source in columns:
        cells = [f"{kind:<{widths[0]}}", f"{device:<{widths[1]}}", f"{size:>{widths[2]}}"]
        if widths[3]:
            cells.append(f"{count:<{widths[3]}}")
        lines.append("  ".join([*cells, source]))
    own = [row for row in rows if not row.is_input]
    given = [row for row in rows if row.is_input]
    total = f"total: {_tensors(own)}"
    if given:
        total += f", plus {_tensors(given, 'input')}"
    return "\n".join([*lines, total])


def _tensors(rows: Sequence[SavedResidual], what: str = "tensor") -> str:
    return f"{size_text(sum(row.nbytes for row in rows))} in {len(rows)} {what}{'s' * (len(rows) != 1)}"


def tensor_text(row: SavedResidual | torch.Tensor) -> str:
    """Dtype and shape, as ``float32[2, 3]``."""
    return f"{str(row.dtype).removeprefix('torch.')}{list(row.shape)}"
