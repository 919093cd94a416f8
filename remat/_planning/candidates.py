"""Which calls of modules can be regions of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from .._modules.eligible import check_module
from ..errors import RematError
from .trace import Call, Trace

_LEAST_PART = 0.002  # of what the model saves, that a call saves if a region of it is worth while


class Candidates:
    """Which calls can be regions, and why others can't."""

    def __init__(self, trace: Trace, named: Mapping[str, nn.Module], only: Sequence[nn.Module] | None) -> None:
        self._only = None if only is None else {id(module.__dict__) for module in only}
        self.names = {id(module.__dict__): name for name, module in reversed(list(named.items()))}
        scripts = {name for name, module in named.items() if isinstance(module, torch.jit.ScriptModule)}
        outermost = (name for name in scripts if name.rpartition(".")[0] not in scripts)
        self.passed_over = dict.fromkeys(outermost, "it is TorchScript")
        self._trace = trace
        self._whole = self._bytes_saved(trace.root)

    def _bytes_saved(self, call: Call) -> int:
        return sum(memory.nbytes for memory in {memory for _, memory in self._trace.saved_in(call)})

    def is_shared(self, call: Call) -> bool:
        """Whether the module of a call is called more than once, so that all its calls do the same.

        Calls without gradients are plain ones, whatever the module's other calls are.
        """
        return bool(call.module is not None and self._trace.differentiated[id(call.module.__dict__)] > 1)

    def is_whole(self, call: Call) -> bool:
        """Whether no regions are inside of this call."""
        return self._only is not None or self.is_shared(call)

    def is_in_row(self, call: Call, outer: Call) -> bool:
        """Whether a region may be around this call and others that the same ``Sequential``, called in ``outer``, makes.

        Only in a large one: predictions for single layers are coarser than those for a whole block.
        """
        in_row = self._only is None and call.container is not None and call.is_differentiated
        return in_row and 2 * self._bytes_saved(outer) > self._whole

    def __call__(self, call: Call) -> bool:
        module = call.module
        if module is None or not call.is_differentiated:
            return False
        if self._only is not None:
            return id(module.__dict__) in self._only
        if not (name := self.names.get(id(module.__dict__))):
            return False  # the whole model has the name "", and needs as much as a region
        saved, given = self._bytes_saved(call), sum(memory.nbytes for memory in call.given)
        if saved <= 1.1 * given or saved <= _LEAST_PART * self._whole:
            return False
        try:
            check_module(module, name)
        except (RematError, TypeError) as error:
            self.passed_over[name] = str(error)
            return False
        return True
