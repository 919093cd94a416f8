"""One run of a function that lists the tensors it saves for its backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from operator import attrgetter

import torch
from torch.autograd.graph import saved_tensors_hooks

from .._core import trees
from .._core.state import alias
from .._core.tensors import holder, parts
from .._region.hooks import hooks_allowed
from .origins import Kind, Origins, SavedResidual
from .program import Program


class _Saved:
    """What autograd's graph holds in place of a saved tensor: while it lives, the tensor is saved."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = alias(tensor)


class Listing:
    """A run under saved-tensor hooks, or without them for a function that refuses to run under hooks."""

    takes_all = True  # regions pass everything that they save to these hooks

    def __init__(self, fn: Callable, args: tuple, kwargs: dict) -> None:
        self.program = Program(fn, args, kwargs)
        self.saved: list[weakref.ref[_Saved]] = []

    def run(self, under_hooks: bool) -> list[SavedResidual]:
        """Run the function, and list the tensors that its graph keeps alive."""
        captured, cut = self.program.cut()
        operands = self.program.operands()
        with self.program.preserved(), cut, hooks_allowed():
            origins = Origins(self.program.modules)
            hooks = saved_tensors_hooks(self.pack, attrgetter("tensor")) if under_hooks else nullcontext()
            with torch.enable_grad(), hooks, origins:
                leaves = trees.flatten(self.program.call(self.program.fn, operands))[0]
                followed = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
                graph = list(map(torch.autograd.graph.get_gradient_edge, followed))  # the result need not stay alive
                del leaves, followed
            if under_hooks:
                found = [part for ref in self.saved if (saved := ref()) is not None for part in parts(saved.tensor)]
            else:
                found = [t for t in (*operands, *(t for _, t in captured)) if t.requires_grad]
            named: list[tuple[Kind, str, torch.Tensor]]
            named = [("argument", name, tensor) for name, tensor in zip(self.program.names, operands)]
            named += [("captured", name, tensor) for name, tensor in captured]
            known = {id(holder(p)): _unmade(kind, name, p) for kind, name, t in reversed(named) for p in parts(t)}
            found = list({id(holder(tensor)): tensor for tensor in reversed(found)}.values())[::-1]
            rows = [known.get(id(holder(t))) or origins.row(holder(t)) or _unmade("constant", None, t) for t in found]
            if not under_hooks:
                rows += origins.alive()
            del graph
        return rows

    def pack(self, tensor: torch.Tensor) -> _Saved:
        """The pack hook."""
        saved = _Saved(tensor)
        self.saved.append(weakref.ref(saved))
        return saved


def _unmade(kind: Kind, name: str | None, tensor: torch.Tensor) -> SavedResidual:
    """The row of a tensor that no operation has made."""
    memory, nowhere = holder(tensor), (None, None, None, None)
    if tensor.layout is torch.strided or tensor.is_nested:
        nbytes = memory.nbytes() if isinstance(memory, torch.UntypedStorage) else memory.nbytes
    else:
        entries = tensor.detach().to_sparse()
        nbytes = entries._indices().nbytes + entries._values().nbytes
    return SavedResidual(kind, None, name, *nowhere, tuple(tensor.shape), tensor.dtype, tensor.device, nbytes)
