"""The origin of a program's memory: the operation that made a storage, its line and its module."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn

from .._core.facts import facts_of
from .._core.lines import Line, user_line
from .._core.parts import parts
from .._core.private import module_calls
from .._core.state import state
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
