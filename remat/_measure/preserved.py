"""Runs a user's program and restores what it changes: values, gradients, modules, generators, settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .._ambient.ambient import Ambient
from .._captured.captured import Captured
from .._captured.variables import bound
from .._core import private
from .._core.facts import facts_of
from .._core.layout import is_dense
from .._core.parts import is_plain
from .._region.hooks import drop_gradient_hooks
from .observer import PeakMemory, strided

_HOOKS = [name for name, value in vars(nn.Module()).items() if isinstance(value, dict) and "hooks" in name]


class Overwritten(PeakMemory):
    """Copies existing storages just before the program overwrites them. Nothing else takes memory."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}

    def before(self, func: Any, args: tuple, kwargs: dict) -> None:
        for storage, tensor in strided(facts_of(func).written(args, kwargs)):
            key = id(storage)
            if key not in self._copies and key not in self._refs and not tensor.is_meta:
                self._copies[key] = storage, _as_bytes(storage).clone()

    def wrote(self, tensor: torch.Tensor) -> bool:
        """Whether the program has overwritten an existing tensor."""
        return any(id(storage) in self._copies for storage, _ in strided(tensor))

    def restore(self) -> None:
        """Restore the old values."""
        with torch.no_grad(), private.without_levels():
            for storage, copy in self._copies.values():
                if storage.nbytes() != copy.nbytes:
                    storage.resize_(copy.nbytes)
                _as_bytes(storage).copy_(copy)


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@contextmanager
def preserved(found: Captured, arguments: Sequence[torch.Tensor]) -> Iterator[Overwritten]:
    """A context for a program that reads what was ``found`` and gets these arguments. All are restored afterwards."""
    values = [value for _, value in found.tensors]
    tensors = list({id(t): t for t in [*arguments, *values] if isinstance(t, torch.Tensor)}.values())
    generators = [value for value in values if not isinstance(value, torch.Tensor)]
    ambient = Ambient.capture({t.device for t in tensors}, generators, True)
    by_id = {id(tensor): tensor for tensor in tensors}
    with ExitStack() as stack:  # if one can't be restored, the others still are
        stack.enter_context(ambient.restored())
        stack.callback(drop_gradient_hooks, tensors, RemovableHandle.next_id)
        for tensor in tensors:
            stack.callback(_restore, tensor, tensor.detach(), tensor.requires_grad, tensor.is_leaf and tensor.grad)
        stack.callback(bound(found.variables, by_id).put)
        for hooks in _module_hooks(found):
            stack.callback(_refill, hooks, dict(hooks))
        overwritten = Overwritten()
        stack.callback(overwritten.restore)
        with overwritten:
            yield overwritten


def _restore(tensor: torch.Tensor, alias: torch.Tensor, requires_grad: bool, grad: Any) -> None:
    is_elsewhere = is_plain(tensor) and is_dense(tensor) and tensor.data_ptr() != alias.data_ptr()
    if tensor.shape != alias.shape or is_elsewhere:
        tensor.data = alias
    if not tensor.is_leaf:
        return
    if tensor.requires_grad != requires_grad:
        tensor.requires_grad_(requires_grad)
    if grad is not False and tensor.grad is not grad:
        tensor.grad = grad


def _module_hooks(found: Captured) -> Iterator[dict]:
    """The hook dicts of all modules that were found."""
    for variables in found.variables:
        for name in _HOOKS:
            if variables.whole and isinstance(hooks := variables.then.get(name), dict):
                yield hooks


def _refill(held: dict, items: dict) -> None:
    if held != items:
        held.clear()
        held.update(items)
