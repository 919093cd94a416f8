"""The table "Comparison" of the README: each cell is what a run of the library shows."""

import importlib.metadata
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import ROOT, assert_same, gradient, rand
from cases import module as made
from comparison import FAIRSCALE
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import CheckpointPolicy

import remat
from benchmarks.measure import count_ops
from benchmarks.wrappers import MM, Wrapper, plain, torch_checkpoint, torch_remat_checkpoint, torch_selective
from remat import policies

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:None of the inputs have requires_grad")
TEXT = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Comparison\n")[1].split("\n## ")[0]
JAX = json.loads((Path(__file__).parent / "jax_0_10_2.json").read_text(encoding="utf-8"))  # jax_comparison.py wrote it
VERSIONS = dict(re.findall(r"(torch|torch_remat|fairscale|JAX) ([\d.]*\d)", TEXT))
WRAPPERS: dict[str, Wrapper] = {
    "remat": remat.remat,
    "torch checkpoint": torch_checkpoint,
    "torch_remat": torch_remat_checkpoint,
    "fairscale": lambda module: FAIRSCALE.original()(module),
}


class Block(nn.Module):
    def __init__(self, *first: nn.Module) -> None:
        super().__init__()
        self.first = nn.Sequential(*first)
        self.up, self.down = nn.Parameter(rand(4, 8)), nn.Parameter(rand(8, 4))
        self.mm: Callable[..., Tensor] = torch.mm

    def forward(self, x: Tensor) -> Tensor:
        return self.mm(self.mm(self.first(x), self.up).tanh(), self.down).sin().exp()


class Model(nn.Module):
    """A model with one block, whose calls are checkpointed."""

    def __init__(self, wrap: Wrapper, *first: nn.Module) -> None:
        super().__init__()
        self.block = Block(*first)
        self.call = [wrap(self.block)]  # in a list, as fairscale's is the block itself, which would be there twice

    def forward(self, x: Tensor) -> Tensor:
        return self.call[0](x.reshape(-1, 4)).square().sum()


def loss(wrap: Wrapper, *first: nn.Module) -> Model:
    return made(lambda: Model(wrap, *first))  # type: ignore[return-value]


def marked(block: Block) -> Any:
    """The block in a checkpoint of `torch_remat`, its products in regions."""
    import torch_remat

    def product(a: Tensor, b: Tensor) -> Tensor:
        out: Tensor = torch_remat.region(torch.mm, f"product{a.shape[1]}", recompute=False)(a, b)
        torch_remat.recompute_needs_tensor(out)
        return out

    block.mm = product
    return torch_remat_checkpoint(block)


def predicate(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op == MM else CheckpointPolicy.PREFER_RECOMPUTE


POLICIES = policies.save_matmuls, policies.save_if(predicate)
# What each library calls it, and wrappers that save the products.
CHOICES: dict[str, tuple[str, list[Wrapper]]] = {
    "remat": ("policies", [partial(remat.remat, policy=policy) for policy in POLICIES]),
    "torch checkpoint": ("operators, predicate", [torch_selective([MM]), torch_selective(predicate)]),
    "torch_remat": ("marked calls", [marked]),
    "fairscale": ("none", []),
}

H = rand(3, 4, grad=False)
Program = Callable[[Wrapper], Any]


def outcome(program: Program, wrap: Wrapper) -> str:
    """What a program does with a wrapper."""
    try:
        found = program(wrap)
    except RuntimeError:
        return "raises"
    try:
        assert_same(found, program(plain), exact=False)
    except AssertionError:
        return "silently wrong"
    return "yes"


def second_derivative(wrap: Wrapper) -> Any:
    x = rand(3, 4)
    loss(wrap)(x).backward(create_graph=True)
    assert x.grad is not None
    return torch.autograd.grad(x.grad.square().sum(), x)


def of_given_parameters(wrap: Wrapper) -> Any:
    model = loss(wrap)
    parameters = {name: nn.Parameter(p.detach() * 2) for name, p in model.named_parameters()}
    functional_call(model, parameters, (rand(3, 4),)).backward()
    return [p.grad for p in parameters.values()]


def of_dropout(wrap: Wrapper) -> Any:
    model, x = loss(wrap, nn.Dropout(0.5)), rand(3, 4)
    torch.manual_seed(0)
    model(x).backward()
    return x.grad


def random_numbers(column: str) -> str:
    found = outcome(of_dropout, WRAPPERS[column])
    if column != "torch_remat":
        return found
    import torch_remat

    hook = SimpleNamespace(snapshot=torch.get_rng_state, restore=torch.set_rng_state)
    with_hook = outcome(of_dropout, torch_remat.checkpoint(recompute_state_hooks=(hook,)))
    return "only with your own hook" if (found, with_hook) == ("silently wrong", "yes") else found


def updates(column: str) -> str:
    norm = nn.BatchNorm1d(4)
    loss(WRAPPERS[column], norm)(rand(3, 4)).backward()
    assert norm.num_batches_tracked is not None
    return ["never", "once", "twice"][int(norm.num_batches_tracked)]


def works(*programs: Program) -> Callable[[str], str]:
    """The cell of a row with several programs, which all have the same outcome, also with a choice of what is saved."""

    def cell(column: str) -> str:
        wrappers = [WRAPPERS[column], *CHOICES[column][1]]
        (found,) = {outcome(program, wrap) for program in programs for wrap in wrappers}
        return found

    return cell


def by_autograd(column: str) -> str:
    """Both derivatives have the same outcome, except the second one with a choice."""
    cell, twice = works(lambda wrap: gradient(loss(wrap), rand(3, 4)))(column), partial(outcome, second_derivative)
    assert twice(WRAPPERS[column]) == cell
    return cell if {*map(twice, CHOICES[column][1])} <= {cell} else f"{cell}; selective: no double backward"


def choice(column: str) -> str:
    """Two products run in the forward and four in the backward. What isn't saved is recomputed."""
    products = lambda wrap: count_ops(of_dropout, wrap)["aten.mm"]
    text, wrappers = CHOICES[column]
    assert products(plain) == 6 and products(WRAPPERS[column]) == 8
    assert [products(wrap) for wrap in wrappers] == [6] * len(wrappers)
    return text


TIMES = (
    "[time](docs/internals/performance.md) of a transformer block, relative to torch's checkpoint",
    "the same with a policy, relative to torch's selective checkpoint",
)
ROWS: dict[str, Callable[[str], str]] = {
    "`torch.autograd.grad`, double backward": by_autograd,
    "`grad`, `vjp`, `jacrev`, `hessian`, `vmap(grad)`, `jvp(grad)`": works(
        lambda wrap: grad(loss(wrap))(H),
        lambda wrap: vjp(loss(wrap), H)[1](torch.ones((), dtype=H.dtype)),
        lambda wrap: jacrev(loss(wrap))(H),
        lambda wrap: hessian(loss(wrap))(H),
        lambda wrap: vmap(grad(loss(wrap)))(H),
        lambda wrap: jvp(grad(loss(wrap)), (H,), (H,)),
    ),
    "`jvp`, `jacfwd`": works(lambda wrap: jvp(loss(wrap), (H,), (H,)), lambda wrap: jacfwd(loss(wrap))(H)),
    "choice of what is saved": choice,
    "same random numbers in the recompute": random_numbers,
    "batch norm statistics change": updates,
    "`functional_call`, then `.backward()`": works(of_given_parameters),
}
(HEADER, _, *LINES) = ([cell.strip() for cell in line.split("|")[1:-1]] for line in re.findall(r"^\|.*", TEXT, re.M))
TABLE = {row: dict(zip(HEADER[1:], cells)) for row, *cells in LINES}


def test_the_table_has_these_rows_and_columns() -> None:
    assert {row for row in TABLE if row not in TIMES} == set(ROWS)
    assert HEADER[0] == "" and HEADER[1:] == [*WRAPPERS, "jax.checkpoint"]
    assert set(VERSIONS) == {"torch", "torch_remat", "fairscale", "JAX"}


@pytest.mark.parametrize("column", WRAPPERS)
@pytest.mark.parametrize("row", ROWS)
def test_a_cell(row: str, column: str) -> None:
    if column in ("torch_remat", "fairscale"):
        pytest.importorskip(column)
        assert importlib.metadata.version(column) == VERSIONS[column]
    if column != "remat" and not torch.__version__.startswith(VERSIONS["torch"]):
        pytest.skip("the table is about another version of torch")
    assert ROWS[row](column) == TABLE[row][column]


def test_the_column_of_jax_is_what_a_run_of_it_wrote() -> None:
    assert JAX["version"] == VERSIONS["JAX"]
    assert {row: TABLE[row]["jax.checkpoint"] for row in ROWS} == {row: JAX["cells"].get(row, "n/a") for row in ROWS}


def test_the_times_are_those_of_the_page_about_performance() -> None:
    page = (ROOT / "docs/internals/performance.md").read_text(encoding="utf-8")
    block, selective = re.findall(r"^\| t.* block.* / torch.* \| ([\d.]+) \| .*$", page, re.M)[:2]
    small, under_policy = re.findall(r"^\| 4 MLPs.* / torch.* checkpoint \| ([\d.]+) \| .*$", page, re.M)
    gpu = (ROOT / "docs/internals/memory_against_time.md").read_text(encoding="utf-8")
    remats, torchs = map(float, re.findall(r"^\| (?:remat|torch): `save_matmuls` \| \d+ \| ([\d.]+) \|", gpu, re.M)[:2])
    ours = (
        f"{block}; small MLPs {small}",
        f"{selective}; small MLPs {under_policy}; 2048 wide on a GPU {remats / torchs:.2f}",
    )
    assert [[*TABLE[row].values()] for row in TIMES] == [[each, "1", "", "", ""] for each in ours]
