"""Computations of libraries that take second derivatives or per-sample gradients, for `benchmarks.libraries`.

Each is a small real use with a tiny model. It runs with the plain model, with `torch.utils.checkpoint` around each of
the model's blocks, and with regions in the same places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import remat.nn
from benchmarks.measure import peak_bytes
from benchmarks.report import KIB, verdict

__all__ = ["USES", "Peaks", "Use", "peaks", "peaks_table", "with_checkpoints", "with_regions"]

WIDTH, ROWS = 16, 256


@dataclass(frozen=True)
class Use:
    """A computation of a library with a model whose layers include `Block`s.

    Attributes:
        name: the library, and what it computes.
        package: what is imported.
        make: makes the model.
        run: computes with the model, and returns tensors.
        exact: whether the results with regions are equal bit for bit; otherwise sums have another order.
    """

    name: str
    package: str
    make: Callable[[], Any]
    run: Callable[[Any], Any]
    exact: bool = True


class Block(nn.Module):
    """A residual block, with torch's checkpoint if `checkpoints` is set."""

    checkpoints = False

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Tensor:
        result: Tensor = torch_checkpoint(self.body, x, use_reentrant=False) if self.checkpoints else self.body(x)
        return result

    def body(self, x: Any) -> Tensor:
        result: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return result


def with_regions(model: Any, policy: Any = None) -> Any:
    return remat.nn.apply(model, Block, policy=policy)


def with_checkpoints(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, Block):
            module.checkpoints = True
    return model


def net(block: type[Block] = Block) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(4)), nn.Linear(WIDTH, 2))


def inputs(rows: int, columns: int = WIDTH) -> Tensor:
    return torch.linspace(-1, 1, rows * columns).mul(7).sin().reshape(rows, columns)


DATA, LABELS = inputs(ROWS), torch.arange(ROWS) * 7 % 2


def loss_of(predictions: Tensor, labels: Tensor = LABELS) -> Tensor:
    return nn.functional.cross_entropy(predictions, labels)


def vector(parameters: Sequence[Tensor]) -> list[Tensor]:
    """A vector with the shapes of the parameters."""
    return [torch.linspace(-1, 1, p.numel()).reshape(p.shape) for p in parameters]


def hessian_product(
    loss: Callable[[dict[str, Tensor]], Tensor], model: Any, along: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """The Hessian of a loss of the parameters, times a vector."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    tangents = dict(zip(parameters, along or vector(list(parameters.values())), strict=True))
    result: dict[str, Tensor] = jvp(grad(loss), (parameters,), (tangents,))[1]
    return list(result.values())


def gradients(model: Any) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


# --- curvlinops ---------------------------------------------------------------------------------------------------


def curvature(operator: str, model: Any, **options: Any) -> Any:
    """A matrix of curvature, or the Jacobian, times a vector."""
    import curvlinops

    parameters, loss = list(model.parameters()), [] if "Jacobian" in operator else [nn.CrossEntropyLoss()]
    matrix = getattr(curvlinops, f"{operator}LinearOperator")(
        model, *loss, parameters, [(DATA, LABELS)], check_deterministic=False, **options
    )
    return matrix @ (inputs(ROWS, 2).flatten() if operator.startswith("Transposed") else vector(parameters))


# --- laplace-torch ------------------------------------------------------------------------------------------------


def posterior(structure: str, backend: str, model: Any) -> Any:
    """The marginal likelihood of a Laplace approximation, and its predictions."""
    import laplace

    approximation = laplace.Laplace(
        model, "classification", subset_of_weights="all", hessian_structure=structure,
        backend=getattr(laplace.curvature, backend),
    )  # fmt: skip
    data = torch.utils.data.TensorDataset(DATA, LABELS)
    approximation.fit(torch.utils.data.DataLoader(data, batch_size=ROWS // 2))
    return approximation.log_marginal_likelihood().detach(), approximation(DATA[:32], link_approx="probit").detach()


# --- torchdiffeq --------------------------------------------------------------------------------------------------


class Field(nn.Module):
    """The right side of a differential equation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.linear = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, time: Tensor, x: Tensor) -> Tensor:
        return self.linear(self.block(x + time)) / 4


def end(field: Callable[[Tensor, Tensor], Tensor], method: str) -> Tensor:
    from torchdiffeq import odeint

    result: Tensor = odeint(field, DATA[:128], torch.linspace(0, 1, 5), method=method)[-1]
    return result


def flow(method: str, model: Any) -> Any:
    """The solution, and its gradients through the solver."""
    model.zero_grad()
    x = end(model, method)
    x.square().mean().backward()
    return x.detach(), gradients(model)


def hessian_of_flow(model: Any) -> list[Tensor]:
    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return end(lambda time, x: functional_call(model, parameters, (time, x)), "rk4").square().mean()

    return hessian_product(loss, model)


# --- gpytorch -----------------------------------------------------------------------------------------------------


def deep_kernel() -> Any:
    """A Gaussian process with a kernel of the features of a network, and its marginal likelihood."""
    import gpytorch

    class Process(gpytorch.models.ExactGP):
        def __init__(self) -> None:
            x = DATA[:64]
            super().__init__(x, x.sum(-1).sin(), gpytorch.likelihoods.GaussianLikelihood())
            self.features, self.mean = net(), gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Tensor) -> Any:
            features = self.features(x)
            return gpytorch.distributions.MultivariateNormal(self.mean(features), self.kernel(features))

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            process = Process()
            self.likelihood = gpytorch.mlls.ExactMarginalLogLikelihood(process.likelihood, process)

        def forward(self) -> Tensor:
            process = self.likelihood.model
            loss: Tensor = -self.likelihood(process(*process.train_inputs), process.train_targets)
            return loss

    return Loss()


def marginal_likelihood(model: Any) -> Any:
    model.train().zero_grad()
    loss = model()
    loss.backward()
    return loss.detach(), gradients(model)


def acquisition(model: Any) -> Any:
    """The gradient of an upper confidence bound with respect to candidates, as in Bayesian optimization."""
    model.train().eval().zero_grad()  # `train` clears what it remembers of its data
    candidates = (DATA[:64] / 2).requires_grad_()
    prediction = model.likelihood.model(candidates)
    return torch.autograd.grad((prediction.mean + prediction.variance.sqrt()).sum(), candidates)


def hessian_of_likelihood(model: Any) -> list[Tensor]:
    model.train()
    return hessian_product(lambda parameters: functional_call(model, parameters, ()), model)


# --- e3nn ---------------------------------------------------------------------------------------------------------

ATOMS = inputs(12, 3) * 2


def potential() -> Any:
    """An equivariant network that computes the energy of some atoms."""
    from e3nn import o3
    from e3nn.nn import FullyConnectedNet

    irreps, harmonics = o3.Irreps("8x0e + 4x1o"), o3.Irreps("1x0e + 1x1o")

    class Convolution(Block):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.linear = o3.Linear(irreps, irreps)
            self.product = o3.FullyConnectedTensorProduct(irreps, harmonics, irreps, shared_weights=False)
            self.radial = FullyConnectedNet([4, 16, self.product.weight_numel], nn.functional.silu)

        def body(self, x: Any) -> Tensor:
            features, positions = x
            i, j = (1 - torch.eye(len(positions))).nonzero().T
            edges = positions[j] - positions[i]
            lengths = edges.norm(dim=-1, keepdim=True)
            weights = self.radial((-(lengths - torch.linspace(0.5, 2, 4)).square()).exp())
            angles = o3.spherical_harmonics(harmonics, edges, normalize=True, normalization="component")
            messages = self.product(features[j], angles, weights)
            result: Tensor = features + self.linear(torch.zeros_like(features).index_add(0, i, messages)) / 4
            return result

    class Potential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding = nn.Parameter(torch.randn(irreps.dim))
            self.convolutions = nn.ModuleList(Convolution() for _ in range(3))
            self.head = o3.Linear(irreps, "1x0e")

        def forward(self, positions: Tensor) -> Tensor:
            features = self.embedding.expand(len(positions), -1)
            for convolution in self.convolutions:
                features = convolution((features, positions))
            energy: Tensor = self.head(features).square().sum()
            return energy

    return Potential()


def energy_and_forces(model: Any) -> Any:
    positions = ATOMS.clone().requires_grad_()
    energy = model(positions)
    return energy.detach(), -torch.autograd.grad(energy, positions)[0]


def training_on_forces(create_graph: bool, model: Any) -> Any:
    """The gradients of a loss of the forces; these are a gradient by `create_graph`, or by `torch.func.grad`."""
    model.zero_grad()
    if create_graph:
        positions = ATOMS.clone().requires_grad_()
        forces = -torch.autograd.grad(model(positions), positions, create_graph=True)[0]
    else:
        forces = -grad(model)(ATOMS)
    (forces - ATOMS.sin()).square().mean().backward()
    return forces.detach(), gradients(model)


# --- opacus and BackPACK ------------------------------------------------------------------------------------------


def samples(ghost: bool, model: Any) -> list[Tensor]:
    """Per-sample gradients of four sequences, or their norms."""
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping

    private = (GradSampleModuleFastGradientClipping if ghost else GradSampleModule)(model)
    loss_of(private(DATA.reshape(4, -1, WIDTH)).mean(1), LABELS[:4]).backward()
    found = [p._norm_sample if ghost else p.grad_sample for p in model.parameters()]
    private.del_grad_sample()
    private.to_standard_module().zero_grad()
    return found


class Composed(Block):
    """Backpack keeps the input and output of each layer, but not those of the functions between them."""

    def body(self, x: Any) -> Tensor:
        result: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))).sin().tanh().exp())
        return result


def first_order(extension: str, model: Any) -> list[Tensor]:
    """What an extension of BackPACK computes for each parameter."""
    import backpack

    model, loss = backpack.extend(model), backpack.extend(nn.CrossEntropyLoss())
    extensions = getattr(backpack.extensions, extension)()
    with backpack.backpack(extensions):
        loss(model(DATA), LABELS).backward()
    model.zero_grad()
    return [p.__dict__.pop(extensions.savefield, None) for p in model.parameters()]


# --- pytorch_optimizer --------------------------------------------------------------------------------------------


def steps(optimizer: str, model: Any, **options: Any) -> list[Tensor]:
    """The parameters after two steps. With `create_graph`, the optimizer itself estimates the Hessian's diagonal."""
    import pytorch_optimizer

    create_graph = options.pop("create_graph", False)
    opt = getattr(pytorch_optimizer, optimizer)(model.parameters(), lr=0.01, **options)

    def backward() -> Tensor:
        opt.zero_grad()
        loss = loss_of(model(DATA))
        loss.backward(create_graph=create_graph)
        return loss

    for _ in range(2):
        backward()
        opt.step(backward if optimizer == "SAM" else None)
    opt.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def steps_with_hessian(optimizer: str, model: Any) -> list[Tensor]:
    """The parameters after two steps. The estimate of the Hessian's diagonal is a product by `torch.func`."""
    import pytorch_optimizer

    opt = getattr(pytorch_optimizer, optimizer)(model.parameters(), lr=0.01)
    for _ in range(2):
        opt.zero_grad()
        loss_of(model(DATA)).backward()
        signs = [torch.randint_like(p, 2) * 2 - 1 for p in model.parameters()]
        products = hessian_product(lambda p: loss_of(functional_call(model, p, (DATA,))), model, signs)
        opt.step(hessian=[sign * product for sign, product in zip(signs, products, strict=True)])
    opt.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


# --- the table ----------------------------------------------------------------------------------------------------


def curvature_of(operator: str, **options: Any) -> Use:
    return Use(f"curvlinops {operator}", "curvlinops", net, partial(curvature, operator, **options))


def steps_of(optimizer: str, **options: Any) -> Use:
    name = f"pytorch_optimizer {optimizer}" + ", `create_graph`" * ("create_graph" in options)
    return Use(name, "pytorch_optimizer", net, partial(steps, optimizer, **options))


USES: list[Use] = [
    *map(curvature_of, ("Hessian", "GGN", "EF", "Jacobian", "TransposedJacobian")),
    *(curvature_of(operator, fisher_type="empirical") for operator in ("KFAC", "EKFAC")),
    Use("laplace-torch, Kronecker GGN", "laplace", net, partial(posterior, "kron", "CurvlinopsGGN")),
    Use("laplace-torch, diagonal EF", "laplace", net, partial(posterior, "diag", "CurvlinopsEF")),
    Use("torchdiffeq rk4", "torchdiffeq", Field, partial(flow, "rk4")),
    Use("torchdiffeq dopri5", "torchdiffeq", Field, partial(flow, "dopri5")),
    Use("torchdiffeq rk4, Hessian product", "torchdiffeq", Field, hessian_of_flow),
    Use("gpytorch marginal likelihood", "gpytorch", deep_kernel, marginal_likelihood),
    Use("gpytorch gradient of a prediction", "gpytorch", deep_kernel, acquisition),
    Use("gpytorch Hessian product", "gpytorch", deep_kernel, hessian_of_likelihood),
    Use("e3nn energy and forces", "e3nn", potential, energy_and_forces),
    Use("e3nn training on forces", "e3nn", potential, partial(training_on_forces, False), exact=False),
    Use("e3nn training on forces, `create_graph`", "e3nn", potential, partial(training_on_forces, True)),
    Use("opacus hooks", "opacus", net, partial(samples, False)),
    Use("opacus ghost clipping", "opacus", net, partial(samples, True)),
    Use("BackPACK BatchL2Grad", "backpack", partial(net, Composed), partial(first_order, "BatchL2Grad")),
    steps_of("SAM", base_optimizer=torch.optim.SGD),
    steps_of("Shampoo"),
    *(Use(f"pytorch_optimizer {name}", "pytorch_optimizer", net, partial(steps_with_hessian, name))
      for name in ("SophiaH", "AdaHessian")),
    *(steps_of(name, create_graph=True) for name in ("SophiaH", "AdaHessian")),
]  # fmt: skip


@dataclass(frozen=True)
class Peaks:
    """A row: the peak without checkpointing, with torch's checkpoint, or why there is none, and with remat."""

    name: str
    plain: int
    own: int | str
    ours: int

    @property
    def passed(self) -> bool:
        # A region has copies of small captured tensors in its first call, and an operator's hooks are new in each.
        return self.ours < self.plain and (isinstance(self.own, str) or self.ours < 1.1 * self.own)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


def seeded(use: Use, model: Any) -> Any:
    """The results, with the same random numbers in each call."""
    torch.manual_seed(1)
    return use.run(model)


def peaks(use: Use) -> Peaks:
    """Measure a row."""
    plain, ours = use.make(), with_regions(use.make())
    expected = seeded(use, plain)
    seeded(use, ours)
    return Peaks(use.name, peak_bytes(seeded, use, plain), own_peak(use, expected), peak_bytes(seeded, use, ours))


def own_peak(use: Use, expected: Any) -> int | str:
    """The peak with torch's checkpoint, or what it does instead: "raises" or "wrong"."""
    model = with_checkpoints(use.make())
    try:
        found = seeded(use, model)
    except (RuntimeError, AttributeError):
        return "raises"
    same = len(leaves(found)) == len(leaves(expected)) and all(map(torch.allclose, leaves(found), leaves(expected)))
    return peak_bytes(seeded, use, model) if same else "wrong"


def leaves(results: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(results) if isinstance(leaf, Tensor)]


def peaks_table(rows: Sequence[Peaks]) -> str:
    """A table in Markdown."""
    lines = ["| peak, KiB | plain | torch's checkpoint | remat |", "|---|---|---|---|"]
    for row in rows:
        each = [f"{peak / KIB:,.1f}" if isinstance(peak, int) else peak for peak in (row.plain, row.own, row.ours)]
        lines.append(f"| {row.name} | {' | '.join(each)} |")
    return "\n".join([*lines, "", *(f"{row.name}: {verdict(row)}" for row in rows)])
