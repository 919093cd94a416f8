"""Places: where captured tensors are held, to be read, bound to something else for a run, and named in a message."""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import Any, ClassVar


class MISSING:
    """What stands for the value of a place that is gone or empty."""


class Place:
    """Where one value is held; `up` is the place of the object that it belongs to."""

    __slots__ = ("holder", "key", "up")
    settable: ClassVar[bool] = True  # else only to be read

    def __init__(self, holder: Any, key: Any, up: Any) -> None:
        self.holder = holder
        self.key = key
        self.up = up

    def get(self) -> Any:
        """What is there now, or `MISSING`. Each kind of place says how."""

    def set(self, value: Any) -> None:
        """Puts `value` there; `MISSING` empties the place."""

    @property
    def spot(self) -> Place:
        """The place that `set` writes to: this one, but for what is inside a tuple."""
        return self

    @property
    def path(self) -> str:
        """``self.layers[0].weight``, ``closure variable 'w'``, ``global 'W'``."""
        return _expression(self)

    def _step(self) -> str:
        return f"[{self.key!r}]"

    def __repr__(self) -> str:
        return f"<Place {self.path}>"


def _expression(place: Place) -> str:
    """The place as Python spells it."""
    steps: list[str] = []
    while not isinstance(place, NamePlace):
        steps.append(place._step())
        place = place.up
    return str(place.key) + "".join(reversed(steps))


class ItemPlace(Place):
    __slots__ = ()

    def get(self) -> Any:
        return dict.get(self.holder, self.key, MISSING)  # not what a subclass does besides

    def set(self, value: Any) -> None:
        if value is MISSING:
            self.holder.pop(self.key, None)
        else:
            self.holder[self.key] = value


class Attribute(ItemPlace):
    """An entry of the ``__dict__`` of an object or Python module, or of what `nn.Module` keeps in dicts of its own."""

    __slots__ = ()

    def _step(self) -> str:
        if self.key.isidentifier():
            return f".{self.key}"
        return f"[{self.key}]" if self.key.isdigit() else f"[{self.key!r}]"


class Element(Place):
    """An item of a list; a list that has become too short is cut at the same length again."""

    __slots__ = ()

    def get(self) -> Any:
        return self.holder[self.key] if self.key < len(self.holder) else MISSING

    def set(self, value: Any) -> None:
        if value is MISSING:
            del self.holder[self.key :]
        else:
            self.holder[self.key : self.key + 1] = [value]


class Descriptor(Place):
    """What a descriptor of the holder's class gives access to: slots, a function's defaults."""

    __slots__ = ()

    def get(self) -> Any:
        try:
            return self.key.__get__(self.holder)
        except AttributeError:
            return MISSING

    def set(self, value: Any) -> None:
        if value is not MISSING:
            self.key.__set__(self.holder, value)
        elif self.get() is not MISSING:
            self.key.__delete__(self.holder)

    def _step(self) -> str:
        return f".{self.key.__name__}"


class ClassAttribute(Place):
    """An entry of a class, which `up` is or is an instance of."""

    __slots__ = ()

    def get(self) -> Any:
        return vars(self.holder).get(self.key, MISSING)

    def set(self, value: Any) -> None:
        # Not by a metaclass, which may forbid it.
        if value is not MISSING:
            type.__setattr__(self.holder, self.key, value)
        elif self.key in vars(self.holder):
            type.__delattr__(self.holder, self.key)

    def _step(self) -> str:
        return f".{self.key}"


class ContextPlace(Place):
    """The value of a context variable; `key` keeps what it takes to leave the variable without one again."""

    __slots__ = ()
    holder: ContextVar[Any]
    key: list[Token[Any]]

    def get(self) -> Any:
        try:
            return self.holder.get()
        except LookupError:
            return MISSING

    def set(self, value: Any) -> None:
        if value is not MISSING:
            unset = self.get() is MISSING
            token = self.holder.set(value)
            if unset:
                self.key.append(token)
        elif self.key:
            self.holder.reset(self.key.pop())

    def _step(self) -> str:
        return ".get()"


class PartialArgs(Place):
    __slots__ = ()

    def get(self) -> Any:
        return self.holder.args

    def set(self, value: Any) -> None:
        # `args` is read-only, but a partial takes its whole pickled state at any time.
        func, _, keywords, attributes = self.holder.__reduce__()[2]
        self.holder.__setstate__((func, value, keywords, attributes))

    def _step(self) -> str:
        return ".args"


class Fixed(Place):
    """A step that can't be written to, such as ``method.__self__``: it only leads further."""

    __slots__ = ()
    settable = False

    def _step(self) -> str:
        return f"{self.key}"


class Members(Place):
    """All members of a set: `key`, a tuple, as long as they are the same."""

    __slots__ = ()

    @property
    def settable(self) -> bool:  # type: ignore[override]
        return isinstance(self.holder, set)

    def get(self) -> Any:
        now = tuple(self.holder)
        return self.key if {*map(id, now)} == {*map(id, self.key)} else now

    def set(self, value: Any) -> None:
        if self.settable:
            self.holder.clear()
            self.holder.update(value)

    def _step(self) -> str:
        return ""


class TupleItem(Place):
    """An item of the tuple at `up`, which is replaced as a whole; `holder` is the tuple found."""

    __slots__ = ()

    def get(self) -> Any:
        whole = self.up.get()
        return whole[self.key] if self._fits(whole) else MISSING

    def set(self, value: Any) -> None:
        if value is MISSING:
            return
        whole = self.up.get()
        items = list(whole if self._fits(whole) else self.holder)
        items[self.key] = value
        cls = type(self.holder)
        self.up.set(getattr(cls, "_make", cls)(items))

    def _fits(self, whole: Any) -> bool:
        return type(whole) is type(self.holder) and len(whole) == len(self.holder)

    @property
    def spot(self) -> Place:
        return self.up.spot

    @property
    def settable(self) -> bool:  # type: ignore[override]
        # A set keeps no order: with several members, one can't take the turn of another.
        return self.up.settable and (len(self.holder) == 1 or type(self.up) is not Members)

    def _step(self) -> str:
        return "{...}" if type(self.up) is Members else super()._step()


class NamePlace(Place):
    """Where a path begins: a variable, or what the walk started from."""

    __slots__ = ()
    settable = False


class CellPlace(NamePlace):
    __slots__ = ()
    settable = True

    def get(self) -> Any:
        try:
            return self.holder.cell_contents
        except ValueError:
            return MISSING

    def set(self, value: Any) -> None:
        if value is MISSING:
            del self.holder.cell_contents
        else:
            self.holder.cell_contents = value

    @property
    def path(self) -> str:
        # In a helper function there may be another variable of that name.
        owner = "" if type(self.up) is NamePlace else f" of {_expression(self.up)}"
        return f"closure variable {self.key!r}{owner}"


class GlobalPlace(ItemPlace, NamePlace):
    __slots__ = ()
    settable = True

    @property
    def path(self) -> str:
        return f"global {self.key!r}"
