"""Two simulated accelerators, so that the tests of devices run where there is none: `pytest -m cuda --simulate cuda`.

| file | what it has |
|---|---|
| `memory.h` | storages counted in bytes, pinned memory, and the race detector |
| `runtime.h` | the current device, streams, events, generators that count as CUDA's do |
| `device.cpp` | operators: the CPU's kernels, on the device's memory |
| `build.py`, `module.py` | compiling it, once; what `torch.cuda` gets, or `torch.sim` |
| `plugin.py` | what each test runs under: a race is a failure |
| `test_*.py` | what only such a device can tell |

``install("sim")`` goes by torch's way for backends out of its tree. ``install("cuda")`` does the same under CUDA's
name, in a build of torch without CUDA, so that tests and code that say "cuda" run as they are.

Every operator runs at once. But each access to memory of a device, or to pinned memory, is held against the accesses
before it and what its stream has waited for, and so is each release of memory. What a device would be free to do in
another order is a *race*, and `races` lists them. Reads of pinned memory by operators of the CPU are not seen.

It proves bookkeeping and order. What it doesn't have: kernels with numerics of their own, fused attention, cuDNN,
graphs, memory that runs out, processes, `torch.compile`, time.
"""

from .build import build, why_not
from .module import install, races

__all__ = ["build", "install", "races", "why_not"]
