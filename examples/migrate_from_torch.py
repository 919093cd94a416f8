"""Run a training loop that was written for `torch.utils.checkpoint` with nothing changed but the import.

The loop is `loop_for_torch.py`. It is run as it is, and with `torch.utils.checkpoint` replaced by `remat.compat` in its
import. The losses of all steps and the trained parameters must be the same, to the last bit. A table shows memory and
time of a training step, from runs in turn.

    python examples/migrate_from_torch.py            # about 15 seconds on two cores
    python examples/migrate_from_torch.py --quick    # a few seconds
"""

import argparse
import difflib
import statistics
import sys
import timeit
import types
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import peak_bytes

LOOP = Path(__file__).with_name("loop_for_torch.py")
TORCH, REMAT = "from torch.utils.checkpoint import", "from remat.compat import"


def load(name: str, source: str) -> Any:
    """A module with this source."""
    module = types.ModuleType(name)
    sys.modules[name] = module  # its classes are looked up there
    exec(compile(source, str(LOOP), "exec"), module.__dict__)
    return module


def main() -> int:
    """Print the change, the losses and the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few steps")
    steps, repeats = (20, 3) if parser.parse_args().quick else (100, 15)
    written = LOOP.read_text(encoding="utf-8")
    assert written.count(TORCH) == 1, "the loop has one import of torch.utils.checkpoint"
    changed = written.replace(TORCH, REMAT)
    print("".join(difflib.unified_diff(written.splitlines(True), changed.splitlines(True), "before", "after", n=0)))

    loops = {"torch.utils.checkpoint": load("before", written), "remat.compat": load("after", changed)}
    runs = {name: loop.train(steps) for name, loop in loops.items()}
    (losses, model), (losses_after, model_after) = runs.values()
    same = losses == losses_after and all(map(torch.equal, model.parameters(), model_after.parameters()))
    for name, (losses, _) in runs.items():
        print(f"{name:30s} loss of {steps} steps: {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"losses and parameters are {'the same' if same else 'NOT the same'}\n")

    print(f"{'one step, with the optimizer':30s} {'peak, MiB':>10s} {'time, ms':>10s}")
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(repeats):
        for name, loop in loops.items():
            times[name].append(timeit.timeit(lambda loop=loop: loop.train(1), number=1))
    for name, loop in loops.items():
        peak = peak_bytes(lambda loop=loop: loop.train(1)) / 2**20
        print(f"{name:30s} {peak:10.1f} {statistics.median(times[name]) * 1e3:10.1f}")
    return 0 if same and losses[-1] < losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
