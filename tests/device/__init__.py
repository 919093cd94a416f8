"""Two simulated accelerators, so that the tests of devices run without a device: `pytest -m cuda --simulate cuda`.

| file | contents |
|---|---|
| `memory.h` | memory of the devices with a count of its bytes, pinned memory, and the race detector |
| `runtime.h` | the current device, streams, events, generators that count as CUDA's do |
| `device.cpp` | operators: the CPU's kernels, on the device's memory |
| `build.py`, `module.py` | the build, and the functions of the module `torch.cuda` or `torch.sim` |
| `plugin.py` | the setup of the tests, under which a race is a failure |
| `test_*.py` | tests that need such a device |

``install("sim")`` uses torch's interface for out-of-tree backends. ``install("cuda")`` does the same under CUDA's name,
in a build of torch without CUDA, so that tests and code with the name "cuda" run unchanged.

Operators run synchronously. But each access to device or pinned memory, and each release of memory, is compared with
the earlier accesses and with what its stream has waited for. If a real device could execute the two in another order,
that is a *race*. `races` returns all races. Reads of pinned memory by operators of the CPU are not tracked.

The simulation checks bookkeeping and order. It has no kernels with their own numerics, fused attention, cuDNN, graphs,
out-of-memory errors, processes, `torch.compile` or timing.
"""

from .build import build, why_not
from .module import install, races

__all__ = ["build", "install", "races", "why_not"]
