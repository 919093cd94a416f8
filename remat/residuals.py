"""The list of what a function keeps between its forward and its backward, each tensor with where it is from."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from operator import attrgetter
from typing import Any, TextIO

import torch

from ._core import private, trees
from ._core.known import known_of
from ._core.layout import holder
from ._core.parts import is_differentiable, parts
from ._core.state import alias
from ._region.arguments import take_apart
from ._region.guards import Guards
from ._region.hooks import check_hooks_are_allowed, is_hooks_refusal
from ._region.options import Options
from ._region.region import Region
from ._selective.recorder import Recorder
from ._selective.recording import Recording
from ._selective.values import layouts
from .policies import nothing_saveable

__all__ = ["SavedResidual", "print_saved_residuals", "saved_residuals"]


@dataclass(frozen=True)
class SavedResidual:
    """One tensor that is kept: ``nbytes`` is what its storage takes, ``source`` says where it is from."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    source: str

    def __str__(self) -> str:
        return f"{_dtype(self)}{list(self.shape)} on {self.device}, {self.nbytes} bytes: {self.source}"


def saved_residuals(fn: Callable, /, *args: Any, **kwargs: Any) -> list[SavedResidual]:
    """The tensors that ``fn(*args, **kwargs)`` keeps from its forward for its backward.

    It runs ``fn`` once, and no backward; buffers, generators and the state of modules are put back. ``fn`` may be any
    function or module, with rematerialized functions and ``torch.func`` transforms in it, or rematerialized itself. It
    is differentiated by what requires grad; if nothing does, by all floating-point arguments.

    Args:
        fn: the function.
        *args: its arguments, any pytrees.
        **kwargs: its keyword arguments.

    Returns:
        One entry for each storage that is kept, the largest first. ``source`` is one of ``argument params['w1']``,
        ``captured self.weight``, ``named 'q' at file:line (function)``, ``output of aten.mm at file:line (function)``.
        Arguments and captured tensors are listed if they are kept too, although they take no memory of their own. Of a
        function that calls ``torch.func.grad`` or ``vjp`` itself, all those that are differentiated are listed.

    Raises:
        RuntimeError: it is called under a ``torch.func`` transform. Give it the transformed function instead.
        RematError: it is called where saved-tensor hooks are disabled.

    Example:
        >>> import torch
        >>> from remat import remat, saved_residuals
        >>> def f(x, w):
        ...     return torch.tanh(x @ w).sin()
        >>> x, w = torch.ones(4, 2), torch.ones(2, 3)
        >>> [residual.source.partition(" at ")[0] for residual in saved_residuals(f, x, w)]
        ['output of aten.tanh', 'argument x', 'argument w']
        >>> [residual.source for residual in saved_residuals(remat(f), x, w)]
        ['argument x', 'argument w']

    After ``jax.ad_checkpoint.saved_residuals``.
    """
    if private.transforms_active():
        raise RuntimeError(
            "saved_residuals can't be called under a torch.func transform. Give it the transformed function: "
            "`saved_residuals(torch.func.vmap(fn), x)`."
        )
    check_hooks_are_allowed()
    try:
        rows = _Listing(fn, args, kwargs).run(under_hooks=True)
    except RuntimeError as error:
        if not is_hooks_refusal(error):
            raise
        rows = _Listing(fn, args, kwargs).run(under_hooks=False)
    return sorted(rows, key=lambda row: (-row.nbytes, row.source))


def print_saved_residuals(fn: Callable, /, *args: Any, file: TextIO | None = None, **kwargs: Any) -> None:
    """Print what :func:`saved_residuals` returns, and the total.

    Args:
        fn: the function.
        *args: its arguments.
        file: where to print, standard output if it is None.
        **kwargs: its keyword arguments.

    Example:
        >>> import torch
        >>> from remat import print_saved_residuals
        >>> print_saved_residuals(torch.mul, torch.ones(4, 2), torch.ones(2))
        float32[4, 2]  cpu  32 bytes  argument args[0]
        float32[2]     cpu   8 bytes  argument args[1]
        total: 40 bytes in 2 tensors, 0 bytes beyond arguments and captured tensors
    """
    rows = saved_residuals(fn, *args, **kwargs)
    columns = [(f"{_dtype(r)}{list(r.shape)}", str(r.device), f"{r.nbytes:,} bytes", r.source) for r in rows]
    first, second, third = (max((len(column[i]) for column in columns), default=0) for i in range(3))
    lines = [
        f"{kind:<{first}}  {device:<{second}}  {size:>{third}}  {source}" for kind, device, size, source in columns
    ]
    total = sum(row.nbytes for row in rows)
    own = sum(row.nbytes for row in rows if not row.source.startswith(("argument ", "captured ")))
    lines.append(
        f"total: {total:,} bytes in {len(rows)} tensor{'s' * (len(rows) != 1)}, {own:,} bytes beyond arguments and "
        f"captured tensors"
    )
    print("\n".join(lines), file=file)


class _Saved:
    """What stands in the graph for a tensor that was saved: as long as it lives, the tensor is kept."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = alias(tensor)


class _Listing:
    """One run of the function, watched."""

    takes_all = True  # regions hand over all that they keep to these hooks

    def __init__(self, fn: Callable, args: tuple, kwargs: dict) -> None:
        self.region = region = Region(fn, *take_apart(args, kwargs), Options(), known_of(fn), None)
        self.recording = Recording(nothing_saveable, region.known, nothing_saveable, region.options.told, lines=True)
        self.names = _argument_names(fn, trees.paths(region.arguments.spec, ""))
        self.saved: list[weakref.ref[_Saved]] = []
        self.known: dict[int, tuple] = {}  # storages of arguments and captured tensors
        # All buffers are copied first, and are put back.
        captured = [(f"captured {path}", value) for path, value in region.search().tensors]
        arguments = [(region.name(i), tensor) for i, tensor in enumerate(region.tensors)]
        region.known.changing.update(name for name, tensor in captured + arguments if not _requires_grad(tensor))

    def run(self, under_hooks: bool) -> list[SavedResidual]:
        """Run the function, and look what is there after it as long as its graph is."""
        region = self.region
        region.open()
        captured = [tensor for tensor in region.consts.tensors if tensor is not None]
        guard = Guards(region.tensors, region.name, region.known.changing)
        operands = _differentiable(region.tensors, captured)
        self._know(operands, captured)
        if under_hooks:
            private.push_hooks(self.pack, attrgetter("tensor"))
        try:
            with torch.enable_grad():
                graph = _edges(region.call(operands, Recorder(self.recording)))
        finally:
            if under_hooks:
                private.pop_hooks()
            guard.roll_back()
            region.restart()
        if under_hooks:
            kept = [part for ref in self.saved if (saved := ref()) is not None for part in parts(saved.tensor)]
        else:
            kept = [t for t in (*operands, *captured) if t.requires_grad] + self._alive()
        del graph
        rows: dict[int, SavedResidual] = {}
        for tensor in kept:
            if id(holder(tensor)) not in rows:
                rows[id(holder(tensor))] = self._row(tensor)
        return list(rows.values())

    def pack(self, tensor: torch.Tensor) -> _Saved:
        """The hook."""
        saved = _Saved(tensor)
        self.saved.append(weakref.ref(saved))
        return saved

    def _know(self, operands: list[torch.Tensor], captured: list[torch.Tensor]) -> None:
        named = [(tensor, f"captured {_readable(place)}") for tensor, place in zip(captured, self.region.paths)]
        named += [(t, f"argument {self.names[i]}") for t, i in zip(operands, self.region.arguments.positions)]
        self.known = {
            id(holder(part)): (name, part.shape, part.dtype)
            for tensor, name in reversed(named)
            for part in parts(tensor)
        }

    def _alive(self) -> list[torch.Tensor]:
        """What operations made and something holds."""
        found = []
        for entry in self.recording.log.entries:
            for layout in layouts(entry.result):
                storage = self.recording.storages.where(entry.outs[layout.i])
                if storage is not None:
                    found.append(layout.on(storage))
        return found

    def _row(self, tensor: torch.Tensor) -> SavedResidual:
        value = self.recording.storages.find(tensor)
        made = None if value is None else self.recording.log.made.get(value)
        nbytes = tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else tensor.nbytes
        shape, dtype = tensor.shape, tensor.dtype
        source = "made out of sight, such as a constant"
        if made is not None and value is not None:
            entry = self.recording.log.entries[made]
            func = getattr(entry.key[0], "overloadpacket", entry.key[0])
            source = f"output of {func} at {self.recording.log.lines[made]}"
            if names := self.recording.names.get(value):
                source = " and ".join(f"named {name!r} at {line}" for name, line in names.items())
            # Of a view, that of which it is one.
            whole = ((x.size, x.dtype) for x in layouts(entry.result) if entry.outs[x.i] == value)
            shape, dtype = next(whole, (shape, dtype))
        source, shape, dtype = self.known.get(id(holder(tensor)), (source, shape, dtype))
        return SavedResidual(tuple(shape), dtype, tensor.device, nbytes, source)


def _readable(place: Any) -> str:
    """Its path, without what the wrapper of a rematerialized function adds."""
    return str(place).replace("self.__wrapped__.__self__", "self").replace("self.__wrapped__", "self")


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _differentiable(arguments: list[torch.Tensor], captured: list[torch.Tensor]) -> list[torch.Tensor]:
    """The arguments, cut from their history: what requires grad does, or if nothing does whatever can."""
    all_of_them = not any(tensor.requires_grad for tensor in (*arguments, *captured))
    return [t.detach().requires_grad_(is_differentiable(t) if all_of_them else t.requires_grad) for t in arguments]


def _edges(result: Any) -> list[Any]:
    """What holds the graph of a result, but not the result."""
    leaves = trees.flatten(result)[0]
    return [torch.autograd.graph.get_gradient_edge(leaf) for leaf in leaves if _requires_grad(leaf)]


def _argument_names(fn: Callable, paths: list[str]) -> list[str]:
    """For each leaf of ``(args, kwargs)`` what the function calls it, as ``params['w1']``."""
    try:
        parameters = list(inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn).parameters.values())
    except (TypeError, ValueError):  # a built-in function
        parameters = []
    positional = [each.name for each in takewhile(lambda each: each.kind is not each.VAR_POSITIONAL, parameters)]
    names = []
    for path in paths:
        first, _, rest = path[len("[0][") :].partition("]")
        if path.startswith("[1]"):
            names.append(first.strip("'") + rest)
        else:
            names.append((positional[int(first)] if int(first) < len(positional) else f"args[{first}]") + rest)
    return names


def _dtype(row: SavedResidual) -> str:
    return str(row.dtype).removeprefix("torch.")
