"""Find the largest eigenvalue of a loss's Hessian, its sharpness, by Hessian-vector products.

Each product is `jvp(grad(loss))`, the derivative of the gradient in one direction. Its memory grows with the depth of
the network; with `remat` on each layer it stays small. `torch.utils.checkpoint` raises an error under
`torch.func.grad`.

    python examples/hessian_vector_products.py    # a few seconds
"""

import optree
import torch
from torch import Tensor
from torch.func import grad, jvp
from torch.nn import functional as F

import remat

WIDTH, DEPTH, BATCH, ITERATIONS = 64, 16, 256, 30
Params = dict[str, list[Tensor] | Tensor]


@remat.remat  # the one added line
def layer(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """A residual layer around an MLP."""
    return x + torch.tanh(F.gelu(F.layer_norm(x, (WIDTH,)) @ w["up"]) @ w["down"])


def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
    """The mean squared error of a deep network."""
    for w in params["layers"]:
        x = layer(w, x)
    return (x @ params["head"] - y).square().mean()


def hessian_vector_product(loss):
    """Return a function that multiplies the loss's Hessian (with respect to the parameters) by a vector."""

    def product(params: Params, vector: Params, x: Tensor, y: Tensor) -> Params:
        return jvp(lambda p: grad(loss)(p, x, y), (params,), (vector,))[1]

    return product


def dot(a: Params, b: Params) -> Tensor:
    return torch.stack([(x * y).sum() for x, y in zip(optree.tree_leaves(a), optree.tree_leaves(b))]).sum()


def top_eigenvalue(params: Params, start: Params, x: Tensor, y: Tensor) -> list[float]:
    """Power iteration; returns the estimate after each product."""
    estimates, vector = [], start
    for _ in range(ITERATIONS):
        length = dot(vector, vector).sqrt()
        vector = optree.tree_map(lambda v, length=length: v / length, vector)
        product = hessian_vector_product(loss)(params, vector, x, y)
        estimates.append(dot(vector, product).item())
        vector = product
    return estimates


def main() -> None:
    torch.manual_seed(0)

    def layer_params() -> dict[str, Tensor]:
        return {name: torch.randn(WIDTH, WIDTH) / WIDTH**0.5 / DEPTH**0.5 for name in ("up", "down")}

    params = {"layers": [layer_params() for _ in range(DEPTH)], "head": torch.randn(WIDTH, 1) / WIDTH**0.5}
    x = torch.randn(BATCH, WIDTH)
    y = torch.sin(x[:, :1])
    start = optree.tree_map(torch.randn_like, params)

    # `remat.report` transforms the loss by `product`, and runs it as written and with all regions disabled.
    def product(loss):
        return lambda params, x, y: hessian_vector_product(loss)(params, start, x, y)

    report = remat.report(loss, params, x, y, transform=product, policies=[])
    estimates = top_eigenvalue(params, start, x, y)
    with remat.disable_remat():
        expected = top_eigenvalue(params, start, x, y)

    print(f"{'Hessian-vector product':24} {'peak, MiB':>10} {'top eigenvalue':>16}")
    results = {"plain": (report.plain, expected), "remat on each layer": (report.as_written, estimates)}
    for label, (costs, values) in results.items():
        print(f"{label:24} {costs.peak_bytes / 2**20:10.2f} {values[-1]:16.6f}")
    print(f"\nestimates after 1, 10, 20 and {ITERATIONS} products: ", end="")
    print(", ".join(f"{estimates[i - 1]:.4f}" for i in (1, 10, 20, ITERATIONS)))
    difference = max(abs(a - b) for a, b in zip(expected, estimates))
    print(f"largest difference of an estimate: {difference:.1e}")


if __name__ == "__main__":
    main()
