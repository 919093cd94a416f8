"""Records copies to host memory and back, on a CPU."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from remat._core import host_memory
from remat._core.host_memory import Offloaded


class Copies:
    """The copies: the host tensors in order, and the numbers of those that were copied back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out: list[weakref.ref] = []
        self.back: list[int] = []
        self.arrived: list[weakref.ref] = []
        to_host, to_device = host_memory._to_host, Offloaded._to_device

        def recorded_to_host(memory: Tensor) -> tuple:
            # On a device, the copy is a plain copy of bytes.
            assert memory.is_contiguous() and not memory.is_conj() and not memory.is_neg()
            host, copied = to_host(memory)
            assert not torch._C._functorch.is_functorch_wrapped_tensor(host)
            self.out.append(weakref.ref(host))
            return host, copied

        def recorded_to_device(offloaded: Offloaded) -> Any:
            self.back.append(next(i for i, ref in enumerate(self.out) if ref() is offloaded._host))
            arrival = to_device(offloaded)
            self.arrived.append(weakref.ref(arrival[0]))
            return arrival

        monkeypatch.setattr(host_memory, "_to_host", recorded_to_host)
        monkeypatch.setattr(Offloaded, "_to_device", recorded_to_device)

    def taken(self) -> list[int]:
        """The numbers of the tensors that were copied back since the last call of this method."""
        back, self.back = self.back, []
        return back

    def on_device(self) -> int:
        return sum(ref() is not None for ref in self.arrived)

    def on_host(self) -> int:
        return sum(ref() is not None for ref in self.out)
