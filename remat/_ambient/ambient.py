"""Ambient state: random generators, settings and cached weights, restored for a recompute and put back afterwards.

The generators are those of every device in use, those that the caller names, and Python's and NumPy's global ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cache, partial
from typing import Any

import torch
from torch.backends import cuda as sdpa

from .._core import private
from .._core.devices import accelerator, current_device, is_capturing, set_current_device
from .._core.tensors import bytes_of
from ..errors import RematError
from .generators import global_generators, with_state

_CPU = torch.device("cpu")
_PRECISIONS = {"none": "highest", "ieee": "highest", "tf32": "high", "bf16": "medium"}


def _set_float32_precision(value: str) -> None:
    """Restore the precision. Settings of single backends are left alone: inherited ones can't be restored."""
    with suppress(RuntimeError):  # of the getter, where single backends have their own
        torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(_PRECISIONS[value])


def _autocast_depth() -> int:
    """How many autocast contexts are open: the end of the outermost one drops the cached casts."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _set_autocast_depth(depth: int) -> None:
    for _ in range(depth - _autocast_depth()):
        torch.autocast_increment_nesting()
    for _ in range(_autocast_depth() - depth):
        torch.autocast_decrement_nesting()


def default_device() -> torch.device:
    """The default device of this thread."""
    for i in reversed(range(private.function_modes())):
        if isinstance(mode := private.function_mode_at(i), private.DeviceMode):
            return mode.device
    return _CPU


@cache
def settings() -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """The functions that read and set each setting."""
    kernels = sdpa.enable_flash_sdp, sdpa.enable_mem_efficient_sdp, sdpa.enable_math_sdp, sdpa.enable_cudnn_sdp
    found: list[tuple[Any, Any]] = [
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        (_autocast_depth, _set_autocast_depth),
        (private.sdpa_priority, private.set_sdpa_priority),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        (private.float32_precision, _set_float32_precision),
        *zip(private.sdpa_enabled, (*kernels, sdpa.allow_fp16_bf16_reduction_math_sdp), strict=True),
        *private.kernel_libraries,
        (current_device, set_current_device),
    ]
    for kind in ("cpu", *(device.type for device in accelerator())):
        if torch.amp.is_autocast_available(kind):
            found += [
                (partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)),
                (partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)),
            ]
    return found


def read_settings() -> list[Any]:
    """Return the values of all settings, in a fixed order."""
    return [get() for get, _ in settings()]


class Ambient:
    """The ambient state at one moment. Generators are read and set without the dispatcher, its levels and modes."""

    def __init__(self, devices: Iterable[torch.device], generators: Iterable[Any], preserve_rng_state: bool) -> None:
        """Record the current state. Of `devices` only generators of initialized backends are included."""
        self._settings, self._default_device = read_settings(), default_device()
        self._weights = private.cached_weights()  # of ``torch.nn.utils.parametrize.cached()``
        if preserve_rng_state and is_capturing():  # then a generator's state can't be set
            raise RematError(
                "A region is called while a CUDA graph is captured, where its recompute could not restore the random "
                "generators. Pass `preserve_rng_state=False` to it if it draws no random numbers; otherwise call it "
                "outside of the graph."
            )
        self._devices = (*devices, *current_device())  # another device may be current in the backward
        self._generators = tuple(map(with_state, generators))
        # All generators whose states are recorded.
        self._every = global_generators(self._devices) + self._generators if preserve_rng_state else ()
        self._states = [each.get_state() for each in self._every]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Within, the captured state is set; afterwards that of before. It can be used repeatedly, in any thread."""
        # Not only the captured generators are read: a backend or NumPy may have been initialized since.
        before = Ambient(self._devices, self._generators, preserve_rng_state=bool(self._every))
        try:
            self._set(before._settings, before._states)
            with nullcontext() if before._default_device == self._default_device else self._default_device:
                yield
        finally:
            before._set(read_settings())

    def moved(self) -> bool:
        """Whether a torch generator has drawn numbers since."""
        states = [(each, state) for each, state in zip(self._every, self._states) if isinstance(state, torch.Tensor)]
        return any(bytes_of(each.get_state()) != bytes_of(state) for each, state in states)

    def rewind(self) -> None:
        """Restore what a run changes: the generators and the cached weights."""
        self._set(self._settings)

    def _set(self, now: list[Any], states: Iterable[Any] = ()) -> None:
        """Set the captured state; ``now`` are the current settings, ``states`` those known of generators."""
        known = set(map(id, states))
        calls = [(each.set_state, state) for each, state in zip(self._every, self._states) if id(state) not in known]
        if now != self._settings:
            changes = zip(settings(), now, self._settings, strict=True)
            calls += [(put, new) for (_, put), old, new in changes if old != new]
        private.set_cached_weights(*self._weights)
        if calls:
            with ExitStack() as stack:  # makes all calls, even if one fails
                for put, value in calls:
                    stack.callback(put, value)
