"""Meta-learning (MAML) on sine waves: memory against the number of inner steps.

MAML learns initial parameters from which a few steps of gradient descent fit a new task, and differentiates through
these steps. Without remat, the values of each inner step's forward and backward pass are saved. With `remat` on the
inner step, only its parameters are, and the outer backward pass recomputes the step. A table shows the peak memory of a
meta-gradient for several numbers of inner steps; then the model is trained with ten.

    python examples/maml.py    # about 15 seconds
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vmap

import remat

WIDTH, POINTS, TASKS, RATE, META_STEPS = 32, 64, 8, 0.02, 60
Params = list[Tensor]


def predict(params: Params, x: Tensor) -> Tensor:
    """An MLP with three hidden layers."""
    *hidden, (w, b) = zip(params[::2], params[1::2])
    for v, c in hidden:
        x = torch.tanh(x @ v + c)
    return x @ w + b


def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
    return (predict(params, x) - y).square().mean()


@remat.remat  # the one added line
def inner_step(params: Params, x: Tensor, y: Tensor) -> Params:
    """One step of gradient descent on one task."""
    return [p - RATE * g for p, g in zip(params, grad(loss)(params, x, y))]


def make_meta_loss(inner_steps: int) -> Callable[[Params, Tensor, Tensor], Tensor]:
    """Return the mean loss over all tasks, each after its inner steps, on points that these steps have not seen."""

    def one_task(params: Params, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(inner_steps):
            params = inner_step(params, x[: POINTS // 2], y[: POINTS // 2])
        return loss(params, x[POINTS // 2 :], y[POINTS // 2 :])

    def meta_loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
        return vmap(one_task, in_dims=(None, 0, 0))(params, x, y).mean()

    return meta_loss


def make_tasks() -> tuple[Tensor, Tensor]:
    """Points of sine waves of random amplitude and phase."""
    amplitude, phase = torch.rand(TASKS, 1, 1) * 2 + 0.5, torch.rand(TASKS, 1, 1) * 3
    x = torch.rand(TASKS, POINTS, 1) * 10 - 5
    return x, amplitude * torch.sin(x + phase)


def main() -> None:
    torch.manual_seed(0)
    sizes = [1, WIDTH, WIDTH, WIDTH, 1]
    params: Params = []
    for before, after in pairwise(sizes):
        params += [torch.randn(before, after) / before**0.5, torch.zeros(after)]
    x, y = make_tasks()

    print(f"{'inner steps':>11} {'plain, MiB':>12} {'remat, MiB':>12} {'difference':>12}")
    for inner_steps in (1, 2, 4, 8, 16):
        meta_loss = make_meta_loss(inner_steps)
        report = remat.report(meta_loss, params, x, y, transform=grad, policies=[])
        plain, with_remat = report.plain.peak_bytes / 2**20, report.as_written.peak_bytes / 2**20
        grads = grad(meta_loss)(params, x, y)
        with remat.disable_remat():
            expected = grad(meta_loss)(params, x, y)
        difference = max((a - b).abs().max().item() for a, b in zip(expected, grads))
        print(f"{inner_steps:11} {plain:12.2f} {with_remat:12.2f} {difference:12.1e}")

    optimizer = torch.optim.Adam(params, lr=3e-3)
    losses = []
    for _ in range(META_STEPS):
        grads, value = grad_and_value(make_meta_loss(10))(params, *make_tasks())
        for p, g in zip(params, grads):
            p.grad = g
        optimizer.step()
        losses.append(value.item())
    first, last = (sum(part) / 10 for part in (losses[:10], losses[-10:]))
    print(f"\nloss after 10 inner steps, mean of the first and of the last 10 meta-steps: {first:.3f} -> {last:.3f}")


if __name__ == "__main__":
    main()
