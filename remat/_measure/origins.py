"""The origin of a program's memory: the operation that made a storage, its line and module; and lists of tensors."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from traceback import walk_stack
from typing import Any, Literal

import torch
from torch import nn

from .._core.amounts import aligned, count_text, size_text
from .._core.facts import facts_of
from .._core.lines import Line, user_line
from .._core.private import module_calls
from .._core.state import state, within
from .._core.tensors import parts, type_text
from .observer import PeakMemory, strided


def _class(module: nn.Module) -> str:
    return type(module).__qualname__.rpartition(".")[2]  # a region's class has the name of the module's own


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
        return f"{what} at {'an unknown line' if self.file is None else f'{self.file}:{self.line} ({self.function})'}"

    def __str__(self) -> str:
        return f"{tensor_text(self)} on {self.device}, {size_text(self.nbytes)}: {self.source}"


class Origins(PeakMemory):
    """Records for each storage the operation that wrote it last, and the names given by ``checkpoint_name``."""

    def __init__(self, named: Mapping[str, nn.Module]) -> None:
        super().__init__()
        # The paths of modules by the id of their state, which a region of the module shares; the first path of each.
        self._names = {id(m.__dict__): name or _class(m) for name, m in reversed([*named.items()])}
        self._rows: dict[int, SavedResidual] = {}  # by the ids of storages

    def records_names(self) -> within:
        """Within, ``checkpoint_name`` calls ``name``."""
        return within(recordings=(*state.recordings, self))

    def after(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        super().after(func, args, kwargs, result)
        for storage, _ in strided(facts_of(func).written(args, kwargs)):
            if (before := self.row(storage)) is not None:
                self._write(storage, func, before.shape, before.dtype)

    def made(self, storage: torch.UntypedStorage, tensor: torch.Tensor, func: Any) -> None:
        self._write(storage, func, tuple(tensor.shape), tensor.dtype)

    def _write(self, storage: torch.UntypedStorage, func: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        op, module = str(getattr(func, "overloadpacket", func)), self._module()
        made = *_place(user_line()), module, shape, dtype, storage.device, storage.nbytes()
        self._rows[id(storage)] = SavedResidual("output", op, None, *made)

    def _module(self) -> str | None:
        """The path or the class of the innermost module that is being called."""
        for frame, _ in walk_stack(sys._getframe(1)):
            if frame.f_code in module_calls and isinstance(module := frame.f_locals.get("self"), nn.Module):
                return self._names.get(id(module.__dict__), _class(module))
        return None

    def name(self, tensor: torch.Tensor, name: str, line: Line) -> None:
        """Record a name that the user has given to a tensor."""
        for storage, _ in strided(parts(tensor)):
            if (row := self.row(storage)) is None:
                continue
            if row.name is None:
                file, number, function = _place(line)
                row = replace(row, kind="named", name=name, file=file, line=number, function=function)
            elif name not in row.name.split(", "):
                row = replace(row, name=f"{row.name}, {name}")
            self._rows[id(storage)] = row

    def row(self, storage: Any) -> SavedResidual | None:
        """The row of a storage, if an operation made it while the mode was active."""
        known = id(storage) in self._refs
        return replace(self._rows[id(storage)], nbytes=storage.nbytes()) if known else None

    def alive(self) -> list[SavedResidual]:
        """The rows of the live storages."""
        return [row for storage in self.storages() if (row := self.row(storage)) is not None]


def _place(line: Line) -> tuple[str | None, int | None, str | None]:
    return (None, None, None) if line.code is None else (line.code.co_filename, line.number, line.code.co_name)


_LAYER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)|(?<=\[)\d+(?=\])")  # the number of a layer in a path


def grouped(rows: Iterable[Any], key: Callable[[Any], tuple]) -> list[tuple[tuple, list[Any]]]:
    """The rows by their key, with a star in place of numbers of layers: the most bytes first."""
    groups: dict[tuple, list[Any]] = {}
    for row in rows:
        same = tuple(_LAYER.sub("*", part) if isinstance(part, str) else part for part in key(row))
        groups.setdefault(same, []).append(row)
    return sorted(groups.items(), key=lambda group: -sum(row.nbytes for row in group[1]))


def listing(rows: Sequence[SavedResidual], inputs: bool) -> str:
    """The rows in columns, and their total. Layers of the same kind share one row."""
    given, own = ([row for row in rows if row.is_input is is_input] for is_input in (True, False))
    table = []
    key = attrgetter("source", "module", "op", "shape", "dtype", "device", "nbytes")
    for (source, module, *_), group in grouped(rows if inputs else own, key):
        row, count = group[0], f"x{len(group)}" if len(group) > 1 else ""
        if not count:
            source, module = row.source, row.module
        where = f", in {module}" if module else ""
        table.append((tensor_text(row), str(row.device), size_text(row.nbytes), count, source + where))
    total = f"total: {_tensors(own)}" + (f", plus {_tensors(given, 'input')}" if given else "")
    return "\n".join([*aligned(table, "<<><<"), total])


def _tensors(rows: Sequence[SavedResidual], what: str = "tensor") -> str:
    return f"{size_text(sum(row.nbytes for row in rows))} in {count_text(len(rows), what)}"


def tensor_text(row: SavedResidual | torch.Tensor) -> str:
    """Dtype and shape, as ``float32[2, 3]``."""
    return type_text(row.dtype, row.shape)
