"""Find out what is under the ground: train through 1,000 steps of the wave equation in the memory of a dozen.

A wave starts at a point and spreads over a grid of cells, through material in which it travels faster or slower. Along
one side its height is recorded at every step. From these recordings alone the speed in all cells is to be found: a
guess of the speeds is simulated, and the gradient of the difference between its recordings and the given ones goes back
through all steps, as it does in seismic imaging.

`remat.scan` keeps four of the states between forward and backward, and computes the others again. Printed are the
loss of each iteration, and the peak of memory and the time of one, with the plain loop and with `remat.scan`. The exit
status is 1 if the loss did not fall, the gradients differ, or the peak is more than a fiftieth.

    python examples/wave_equation.py            # about a minute on one core
    python examples/wave_equation.py --quick    # a few seconds
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import peak_bytes
from remat import scan

Loop = Callable[..., tuple[Any, Tensor]]
few_states: Loop = partial(scan, checkpoints=4)
LAPLACE = torch.tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]])[None, None]
FALL = 0.5  # the last loss must be below this share of the first one
EDGE = 8  # cells at the border in which waves die down


def plain_loop(step: Callable, carry: Any, xs: Tensor) -> tuple[Any, Tensor]:
    """What `scan` stands for."""
    ys = []
    for x in xs.unbind():
        carry, y = step(carry, x)
        ys.append(y)
    return carry, torch.stack(ys)


def recordings(loop: Loop, speed: Tensor, signal: Tensor) -> Tensor:
    """The heights at some places along one side, at all steps: shape [steps, places]."""
    size = len(speed)
    squared = (0.5 * speed) ** 2  # in cells per step
    distance = torch.arange(size).float()
    inside = torch.minimum(distance, distance.flip(0)).clamp(max=EDGE) / EDGE
    damping = 1 - 0.1 * (1 - torch.outer(inside, inside))
    source = torch.zeros(size, size)
    source[size // 2, EDGE] = 1

    def step(state: tuple[Tensor, Tensor], push: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        height, before = state
        bend = F.conv2d(height[None, None], LAPLACE, padding=1)[0, 0]
        after = (2 * height - before * damping + squared * bend) * damping + push * source
        return (after, height), after[::8, -EDGE]

    rest = torch.zeros(size, size)
    return loop(step, (rest, rest), signal)[1]


def main() -> int:
    parser = argparse.ArgumentParser(description="Train through 1,000 steps of the wave equation.")
    parser.add_argument("--quick", action="store_true", help="fewer cells, steps and iterations")
    quick = parser.parse_args().quick
    size, steps, iterations = (24, 120, 3) if quick else (80, 1000, 8)
    torch.manual_seed(0)

    truth = torch.ones(size, size)
    truth[size // 3 : size // 2, size // 2 : -size // 4] = 0.7  # slow material
    times = torch.linspace(0, steps / 40, steps)
    signal = torch.exp(-((times - 1) ** 2) * 4) * torch.sin(4 * times)
    with torch.no_grad():
        recorded = recordings(plain_loop, truth, signal)

    speed = torch.ones(size, size, requires_grad=True)

    def loss(loop: Loop) -> Tensor:
        return (recordings(loop, speed, signal) - recorded).square().sum()

    def gradient(loop: Loop) -> Tensor:
        return torch.autograd.grad(loss(loop), speed)[0]

    gradients, peaks = {}, {}
    for name, loop in (("plain loop", plain_loop), ("remat.scan", few_states)):
        start = time.perf_counter()
        gradients[name] = gradient(loop)
        taken = time.perf_counter() - start
        peaks[name] = peak_bytes(gradient, loop)
        states = peaks[name] / (2 * 4 * size * size)
        print(f"{name}: {taken:6.2f} s, peak {peaks[name] / 2**20:7.2f} MiB, {states:.0f} states of {steps}")

    optimizer = torch.optim.Adam([speed], lr=0.02)
    losses = []
    for i in range(iterations):
        optimizer.zero_grad()
        value = loss(few_states)
        value.backward()
        optimizer.step()
        losses.append(value.item())
        print(f"iteration {i}: loss {losses[-1]:.4f}")

    same = torch.equal(*gradients.values())
    small = peaks["remat.scan"] < peaks["plain loop"] / (5 if quick else 50)
    print(f"gradients {'equal' if same else 'DIFFER'}; loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    return 0 if same and small and losses[-1] < FALL ** (0.1 if quick else 1) * losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
