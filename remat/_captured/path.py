"""The Python expressions by which errors name captured tensors."""

from __future__ import annotations

from typing import Any


class Path:
    """The Python expression for a value. ``owned``: it belongs to the state of a module or of the callable object."""

    __slots__ = ("owned", "step", "up")

    def __init__(self, step: str, up: Path | None = None, owned: bool = False) -> None:
        self.step, self.up = step, up
        self.owned: bool = owned or (up is not None and up.owned)

    def __str__(self) -> str:
        return self.step if self.up is None else f"{self.up}{self.step}"

    def attribute(self, name: Any) -> Path:
        if type(name) is str and (name.isidentifier() or name.isdigit()):
            return Path(f"[{name}]" if name.isdigit() else f".{name}", self)
        return self.item(name)

    def item(self, key: Any) -> Path:
        # The ``__repr__`` of a user's class may be slow, or raise.
        return Path(f"[{key!r}]" if type(key) in _SHOWN else f"[a {type(key).__name__}]", self)


class Root(Path):
    """Where a search starts."""

    __slots__ = ()


_SHOWN = {type(None), bool, int, float, str, bytes}
