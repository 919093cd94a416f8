"""Places besides its arguments from which a function can read a tensor, and how each gets another tensor."""

import contextvars
import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

G: Any = None
TABLE: dict[str, Any] = {}
IMPORTED = types.ModuleType("imported")
CONTEXT: contextvars.ContextVar = contextvars.ContextVar("w")


class Place(NamedTuple):
    """A function that reads a tensor from a place, and a function that puts another tensor there."""

    fn: Callable[[Tensor], Tensor]
    rebind: Callable[[Tensor], Any]


Build = Callable[[Tensor], Place]


def work(x: Tensor, w: Tensor) -> Tensor:
    return ((x * w).sin() * w).exp()


class Pair(NamedTuple):
    w: Tensor
    name: str


class Holder:
    def __init__(self, w: Tensor) -> None:
        self.w = w

    def __call__(self, x: Tensor) -> Tensor:
        return self.helper(x)

    def helper(self, x: Tensor) -> Tensor:
        return work(x, self.prop)

    @property
    def prop(self) -> Tensor:
        return self.w


Slots = type("Slots", (Holder,), {"__slots__": ("w",)})
OnClass = type("OnClass", (Holder,), {"__init__": lambda self: None})


class Module(nn.Module):
    def __init__(self, w: Tensor, is_buffer: bool = True) -> None:
        super().__init__()
        self.register_buffer("w", w) if is_buffer else setattr(self, "w", w)

    def forward(self, x: Tensor) -> Tensor:
        return work(x, self.w)


def reads_global(x: Tensor) -> Tensor:
    return work(x, G)


def set_global(w: Tensor) -> None:
    global G
    G = w


def with_attribute(w: Tensor, wrap: Callable = lambda fn: fn) -> Callable:
    fn: Any = wrap(lambda x: work(x, fn.w))
    fn.w = w
    return fn


set_w: Callable = lambda held, w: setattr(held, "w", w)
set_args: Callable = lambda partial, w: partial.__setstate__((partial.func, (w,), partial.keywords, {}))


def held(make: Callable[[Tensor], Any], read: Callable[[Any], Tensor], put: Callable | None = None) -> Build:
    """The variable `held` of a closure leads to the tensor. Without `put` it is bound to another value."""

    def build(w: Tensor) -> Place:
        held = make(w)

        def rebind(other: Tensor) -> None:
            nonlocal held
            if put is None:
                held = make(other)
            else:
                put(held, other)

        return Place(lambda x: work(x, read(held)), rebind)

    return build


def root(make: Callable[[Tensor], Any], put: Callable = set_w) -> Build:
    """The function itself, or the object that is called, leads to the tensor."""

    def build(w: Tensor) -> Place:
        fn = make(w)
        return Place(fn, lambda other: put(fn, other))

    return build


def outside(fn: Callable, put: Callable[[Tensor], Any]) -> Build:
    """Something that the function finds by a name leads to the tensor."""

    def build(w: Tensor) -> Place:
        put(w)
        return Place(fn, put)

    return build


def unusable(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(type(self).__name__)


NAMES = (
    "__len__ __iter__ __eq__ __ne__ __hash__ __bool__ __getattr__ __getitem__ __contains__ __reversed__ __repr__ "
    "__str__ __add__ __lt__ keys values items get copy pop index count"
)


def odd(base: type, **names: Any) -> Any:
    """A subclass that has the contents of its base, and no usable method of its own."""
    overridden = {**dict.fromkeys(NAMES.split(), unusable), "__class_getitem__": None, "__module__": __name__}
    return type(f"Odd{base.__name__.title()}", (base,), {**overridden, **names})


List, Dict, Named, Object, KEYS = *map(odd, (list, dict, Pair, Holder)), [odd(object, __hash__=lambda self: 7)()]

# How an error names the place, and its function.
PLACES: dict[str, tuple[str, Build]] = {
    "closure variable": ("closure variable 'held'", held(lambda w: w, lambda h: h)),
    "variable of a helper": ("closure variable 'w' of held", held(
        lambda w: lambda: w, lambda h: h(), lambda h, w: setattr(h.__closure__[0], "cell_contents", w))),
    "global": ("global 'G'", outside(reads_global, set_global)),
    "global of a helper": ("global 'G'", outside(lambda x: sum(reads_global(x) for _ in range(1)), set_global)),
    "global dict": ("TABLE['w'][0]", outside(lambda x: work(x, TABLE["w"][0]), lambda w: TABLE.update(w=[w]))),
    "default": ("<lambda>.__defaults__[0]", root(
        lambda w: lambda x, w=w: work(x, w), lambda fn, w: setattr(fn, "__defaults__", (w,)))),
    "keyword default": ("<lambda>.__kwdefaults__['w']", root(
        lambda w: lambda x, *, w=w: work(x, w), lambda fn, w: fn.__kwdefaults__.update(w=w))),
    "function attribute": ("<lambda>.w", root(with_attribute)),
    "attribute of a library's wrapper": ("<lambda>.w", root(lambda w: with_attribute(w, torch.enable_grad()))),
    "partial": ("self.args[0]", root(lambda w: functools.partial(lambda w, x: work(x, w), w), set_args)),
    "keyword of a partial": ("self.keywords['w']", root(
        lambda w: functools.partial(work, w=w), lambda fn, w: fn.keywords.update(w=w))),
    "object": ("self.w", root(Holder)),
    "method": ("self.w", root(lambda w: Holder(w).helper, lambda fn, w: set_w(fn.__self__, w))),
    "buffer": ("self.w", root(Module)),
    "attribute of a module": ("self.w", root(lambda w: Module(w, is_buffer=False))),
    "module in a module": ("self[1].w", root(
        lambda w: nn.Sequential(nn.Identity(), Module(w)), lambda fn, w: set_w(fn[1], w))),
    "list": ("held[1]", held(lambda w: [None, w], lambda h: h[1], lambda h, w: h.__setitem__(1, w))),
    "dicts": ("held['a']['b c']", held(
        lambda w: {"a": {"b c": w}}, lambda h: h["a"]["b c"], lambda h, w: h.update(a={"b c": w}))),
    "tuples": ("held[1][0]", held(lambda w: (None, (w, 1)), lambda h: h[1][0])),
    "named tuple": ("held[0]", held(lambda w: Pair(w, "w"), lambda h: h.w)),
    "result of max": ("held[0]", held(lambda w: torch.return_types.max((w, 1)), lambda h: h.values)),
    "namespace": ("held.w", held(lambda w: types.SimpleNamespace(w=w), lambda h: h.w, set_w)),
    "slot": ("held.w", held(Slots, lambda h: h.prop, set_w)),
    "method in a closure": ("held.__self__.w", held(
        lambda w: Holder(w).helper, lambda h: h.__self__.w, lambda h, w: set_w(h.__self__, w))),
    "module in a closure": ("held.w", held(Module, lambda h: h.w, set_w)),
    # Classes whose special methods can't be used.
    "odd named tuple": ("held[0]", held(lambda w: Named(w, 2), lambda h: tuple.__getitem__(h, 0))),
    "odd list": ("held[0]", held(lambda w: List([w, 2]), lambda h: list.__getitem__(h, 0))),
    "odd dict": ("held['w']", held(lambda w: Dict(w=w, n=2), lambda h: dict.__getitem__(h, "w"))),
    "odd object": ("held.w", held(Object, lambda h: h.w)),
    "odd key": ("held[a OddObject]", held(lambda w: {KEYS[0]: w}, lambda h: h[KEYS[0]])),
}  # fmt: skip
# The search doesn't find these: only reading them shows that they hold a tensor.
HIDDEN: dict[str, Build] = {
    "class": outside(OnClass(), lambda w: setattr(OnClass, "w", w)),
    "imported module": outside(lambda x: work(x, IMPORTED.w), lambda w: setattr(IMPORTED, "w", w)),
    "context variable": outside(lambda x: work(x, CONTEXT.get()), CONTEXT.set),
    "set": held(lambda w: {w}, lambda h: next(iter(h))),
}
