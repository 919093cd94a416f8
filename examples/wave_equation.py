"""Seismic imaging: differentiate through 600 steps of the wave equation in the memory of a few.

A wave starts at a point and spreads over a grid of cells, through material in which it travels faster or slower. Along
one side its height is recorded at every step. The example finds the speed in all cells from these recordings alone: it
simulates a guess of the speeds, and improves the guess by the gradient of the difference between the simulated and the
given recordings.

`remat.scan` saves a few of the states between the forward and the backward pass, and recomputes the others: by default
in blocks of steps, so that each is recomputed about once; with `checkpoints=4` it saves four states, and recomputes
each step several times. A table shows the peak and the time: steps as small as these take most of their time in Python,
and more so in regions. Then come the losses.

    python examples/wave_equation.py            # about 15 seconds
    python examples/wave_equation.py --quick    # a few seconds
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import remat

Loop = Callable[..., tuple[Any, Tensor]]
few_states: Loop = partial(remat.scan, checkpoints=4)
LAPLACE = torch.tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]])[None, None]
EDGE = 8  # width of the border, in cells, in which waves are damped


def plain_loop(step: Callable, carry: Any, xs: Tensor) -> tuple[Any, Tensor]:
    """The loop that `scan` replaces."""
    ys = []
    for x in xs.unbind():
        carry, y = step(carry, x)
        ys.append(y)
    return carry, torch.stack(ys)


def recordings(loop: Loop, speed: Tensor, signal: Tensor) -> Tensor:
    """Return the heights at some places along one side, at all steps: shape [steps, places]."""
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


def main() -> None:
    quick = "--quick" in sys.argv[1:]  # fewer cells, steps and iterations
    size, steps, iterations = (24, 120, 3) if quick else (80, 600, 5)
    truth = torch.ones(size, size)
    truth[size // 3 : size // 2, size // 2 : -size // 4] = 0.7  # slow material
    times = torch.linspace(0, steps / 40, steps)
    signal = torch.exp(-((times - 1) ** 2) * 4) * torch.sin(4 * times)
    with torch.no_grad():
        recorded = recordings(plain_loop, truth, signal)
    speed = torch.ones(size, size, requires_grad=True)

    def loss(loop: Loop) -> Tensor:
        return (recordings(loop, speed, signal) - recorded).square().sum()

    gradients = []
    print(f"one gradient, {steps:4} steps {'peak, MiB':>10} {'in states':>10} {'time, s':>8}")
    for name, loop in (("plain loop", plain_loop), ("scan", remat.scan), ("scan, 4 states", few_states)):
        peak = remat.report(loss, loop, policies=[]).as_written.peak_bytes
        start = time.perf_counter()
        gradients.append(torch.autograd.grad(loss(loop), speed)[0])
        taken, states = time.perf_counter() - start, peak / (2 * 4 * size * size)
        print(f"{name:24} {peak / 2**20:10.2f} {states:10.0f} {taken:8.2f}")
    same = all(torch.equal(gradients[0], gradient) for gradient in gradients)
    print(f"gradients: {'the same to the last bit' if same else 'DIFFERENT'}\n")

    optimizer = torch.optim.Adam([speed], lr=0.02)
    for i in range(iterations):
        optimizer.zero_grad()
        value = loss(remat.scan)
        value.backward()
        optimizer.step()
        print(f"iteration {i}: loss {value.item():.4f}")


if __name__ == "__main__":
    main()
