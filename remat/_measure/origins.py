"""The origin of a program's memory: the operation that made a storage, its line and module; and lists of tensors."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Literal

import torch
from torch import nn

from .._core.amounts import size_text
from .._core.facts import facts_of
from .._core.lines import Line, user_line
from .._core.private import module_calls
from .._core.state import state
from .._core.tensors import parts
from .observer import PeakMemory, strided


class ModuleNames:
    """Names of the modules of a program: the path below a root module, or the class."""

    def __init__(self, roots: Sequence[tuple[str, nn.Module]]) -> None:
        self._names: dict[int, str] = {}  # by the id of a module's state, which a region of the module shares
        self._roots = [root for _, root in roots]  # alive, so that ids stay valid
        for prefix, root in roots:
            for name, module in root.named_modules():
                path = ".".join(filter(None, (prefix, name))) or _class(module)
                self._names.setdefault(id(module.__dict__), path)

    def now(self) -> str | None:
        """The innermost module that is being called."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code in module_calls and isinstance(module := frame.f_locals.get("self"), nn.Module):
                return self._names.get(id(module.__dict__), _class(module))
            frame = frame.f_back
        return None


def _class(module: nn.Module) -> str:
    return type(module).__qualname__.rpartition(".")[2]  # a region's class has the name of the module's own


@dataclass
class Origin:
    """The operation that wrote the contents of a storage."""

    op: str
    line: Line
    module: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    names: dict[str, Line] = field(default_factory=dict)


class Origins(PeakMemory):
    """Records for each storage the operation that wrote it last, and the names given by ``checkpoint_name``."""

    def __init__(self, names: ModuleNames) -> None:
        super().__init__()
        self._names = names
        self._origins: dict[int, Origin] = {}

    def __enter__(self) -> Any:
        state.recordings = *state.recordings, self  # `checkpoint_name` then calls `name`
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        state.recordings = tuple(each for each in state.recordings if each is not self)

    def after(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        super().after(func, args, kwargs, result)
        for storage, _ in strided(facts_of(func).written(args, kwargs)):
            if (before := self.origin(storage)) is not None:
                self._origins[id(storage)] = self._origin(func, before.shape, before.dtype)

    def made(self, storage: torch.UntypedStorage, tensor: torch.Tensor, func: Any) -> None:
        self._origins[id(storage)] = self._origin(func, tuple(tensor.shape), tensor.dtype)

    def _origin(self, func: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Origin:
        return Origin(str(getattr(func, "overloadpacket", func)), user_line(), self._names.now(), shape, dtype)

    def name(self, tensor: torch.Tensor, name: str, line: Line) -> None:
        """Record a name that the user has given to a tensor."""
        for storage, _ in strided(parts(tensor)):
            if (origin := self.origin(storage)) is not None:
                origin.names.setdefault(name, line)

    def origin(self, storage: Any) -> Origin | None:
        """The origin of a storage, if an operation made it while the mode was active."""
        ref = self._refs.get(id(storage))
        return self._origins[id(storage)] if ref is not None and ref() is storage else None

    def alive(self) -> list[tuple[torch.UntypedStorage, Origin]]:
        """The live storages with their origins."""
        return [(storage, self._origins[id(storage)]) for storage in self.storages()]


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
