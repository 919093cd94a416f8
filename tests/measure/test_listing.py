"""`saved_residuals` lists exactly the saved tensors, each with its source, its module and its bytes."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CASES, Case, cases, rand
from torch import Tensor, nn
from torch.func import grad, jvp, vmap
from torch.testing._internal.two_tensor import TwoTensor

from benchmarks.measure import held_bytes
from remat import RematError, SavedResidual, checkpoint_name, policies, print_saved_residuals, remat, saved_residuals
from remat.nn import apply as nn_apply

CPU = torch.device("cpu")
EVERYTHING = policies.everything_saveable


def block(params: dict[str, Tensor], x: Tensor) -> Tensor:
    q = checkpoint_name(x @ params["wq"], "q")
    return torch.tanh(torch.sin(q) @ params["up"]) @ params["down"]


def block_args(grad: bool = True) -> tuple[dict[str, Tensor], Tensor]:
    params = {"wq": rand(3, 5, grad=grad), "up": rand(5, 7, grad=grad), "down": rand(7, 3, grad=grad)}
    return params, rand(2, 3, seed=1, grad=grad)


def sources(fn: Callable, *args: Any) -> list[str]:
    """The sources of the saved tensors, without files and lines."""
    return sorted(row.source.partition(" at ")[0] for row in saved_residuals(fn, *args, inputs=True))


ARGUMENTS = ["argument params['down']", "argument params['up']", "argument params['wq']", "argument x"]
OWN: list[tuple[Any, list[str]]] = [
    (None, []),
    (policies.save_matmuls, ["named 'q'", "output of aten.mm"]),
    (policies.save_only_these_names("q"), ["named 'q'"]),
    (EVERYTHING, ["named 'q'", "output of aten.sin", "output of aten.tanh"]),
]


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize(("policy", "own"), OWN)
def test_a_region_saves_its_inputs_and_what_its_policy_says(policy: Any, own: list, requires_grad: bool) -> None:
    assert sources(remat(block, policy=policy), *block_args(requires_grad)) == ARGUMENTS + own


class Hidden:
    w = rand(3, grad=False)  # no search leads to the attribute of a class
    norm = nn.LayerNorm(64)


PLAIN: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "an operation in place": (lambda x: x.exp().mul_(2).neg_().sin(), ["output of aten.neg_"]),
    "two names": (lambda x: checkpoint_name(checkpoint_name(x.exp(), "q"), "r"), ["named 'q, r'"]),
    "a constant": (lambda x: x * torch.tensor(2).double(), ["output of aten._to_copy"]),
    "data that no operation has made": (lambda x: x * Hidden.w, ["not made by an operation, such as a constant"]),
    "forward mode inside": (lambda x: jvp(remat(torch.sin), (x,), (x,))[1], ["argument x"]),
    "no result that requires grad": (lambda x: (x > 0, x.sin().detach()), []),
}


@pytest.mark.parametrize("what", PLAIN)
def test_a_source_is_the_last_operation_that_wrote_a_tensor_or_its_name(what: str) -> None:
    fn, expected = PLAIN[what]
    assert sources(fn, rand(3)) == expected


def test_the_fields_of_rows() -> None:
    rows = saved_residuals(block, *block_args(), inputs=True)
    assert rows == saved_residuals(remat(block, policy=EVERYTHING), *block_args(), inputs=True)
    assert len(rows) == len(saved_residuals(lambda *a: iter([block(*a)]), *block_args(), inputs=True))  # an object
    assert [row.nbytes for row in rows] == sorted((row.nbytes for row in rows), reverse=True)
    found, first = {row.name or row.op: row for row in rows}, block.__code__.co_firstlineno
    nowhere, dtype = (None, None, None, None), torch.float64
    expected = [
        SavedResidual("named", "aten.mm", "q", __file__, first + 1, "block", None, (2, 5), dtype, CPU, 80),
        SavedResidual("output", "aten.tanh", None, __file__, first + 2, "block", None, (2, 7), dtype, CPU, 112),
        SavedResidual("argument", None, "params['up']", *nowhere, (5, 7), dtype, CPU, 280),
    ]
    assert [found["q"], found["aten.tanh"], found["params['up']"]] == expected
    assert str(found["q"]) == f"float64[2, 5] on cpu, 80 B: named 'q' at {__file__}:{first + 1} (block)"


@pytest.mark.parametrize(("name", "policy"), [("mlp", 1), ("attention", 3), ("convolution", 1), ("layer_norm", 3)])
def test_bytes_are_those_that_are_alive(name: str, policy: int) -> None:
    case = next(case for case in CASES if case.name == name)
    args, fn = case.make_args(), remat(case.fn, policy=OWN[policy][0])
    own = sum(row.nbytes for row in saved_residuals(fn, *args))
    held = held_bytes(lambda: torch.autograd.graph.get_gradient_edge(fn(*args).sum()))
    assert 0 < own <= held <= own + 64  # the sum may save a few bytes itself


@cases(stateful=False, random=False)
@pytest.mark.sampled(3)
def test_a_region_that_saves_everything_saves_no_more_than_the_plain_function(case: Case) -> None:
    plain, region = (saved_residuals(fn, *case.make_args()) for fn in (case.fn, remat(case.fn, policy=EVERYTHING)))
    assert sum(row.nbytes for row in region) <= sum(row.nbytes for row in plain)


def test_the_inner_tensors_of_a_subclass_are_listed() -> None:
    x = TwoTensor(rand(3, grad=False), rand(3, grad=False)).requires_grad_()
    rows = saved_residuals(lambda x: x.sin().exp(), x, inputs=True)
    assert [(row.kind, row.nbytes) for row in rows] == [("argument", 24)] * 2 + [("output", 24)] * 2


def test_batches_of_vmap_are_listed_whole() -> None:
    fn = vmap(remat(block, policy=policies.save_matmuls), in_dims=(None, 0))
    rows = saved_residuals(fn, block_args()[0], rand(6, 3, seed=2))
    assert {row.shape for row in rows if row.kind == "named"} == {(6, 5)}


def test_a_gradient_inside_lists_what_lives_and_all_inputs() -> None:
    loss = lambda fn: grad(lambda params, x: fn(params, x).square().sum())
    region, plain = (saved_residuals(loss(fn), *block_args(), inputs=True) for fn in (remat(block), block))
    assert {"argument params['wq']", "argument x"} <= {row.source for row in region}
    assert sum(row.nbytes for row in region) < sum(row.nbytes for row in plain)


def test_saved_tensor_hooks_must_be_allowed() -> None:
    with torch.autograd.graph.disable_saved_tensors_hooks("mine"), pytest.raises(RematError, match="mine"):
        saved_residuals(torch.sin, rand(3))


def encoder() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), rand(2, 16, 64, grad=False).float()


@pytest.mark.parametrize("wrap", [lambda fn: fn, remat(policy=EVERYTHING)], ids=["plain", "remat"])
def test_modules_have_the_names_that_the_function_uses(wrap: Callable) -> None:
    model, x = encoder()

    class Trainer:
        def __init__(self) -> None:
            self.models = [model]

        def loss(self, x: Tensor) -> Tensor:
            return self.models[0](x).sin()

    modules = lambda fn, *args: {row.module for row in saved_residuals(wrap(fn), *args)}
    assert {"model.layers.2.norm1", None} <= modules(lambda x: model(x).sin().sin(), x)
    assert {"layers.2.norm1", "layers.0.norm2"} <= modules(model, x) & modules(model.forward, x)
    assert "models[0].layers.1.norm2" in modules(Trainer().loss, x)
    helper = lambda x: model(x)
    assert "model.layers.1.norm2" in modules(lambda x: helper(x), x)
    assert "argument 1.layers.1.norm2" in modules(lambda x, model: model(x), x, model)
    assert modules(model.layers[0].norm1, x) == {"LayerNorm"}
    assert "LayerNorm" in modules(lambda x: Hidden.norm(x), x)


def printed(capsys: pytest.CaptureFixture, fn: Callable, *args: Any, **kwargs: Any) -> list[str]:
    print_saved_residuals(fn, *args, **kwargs)
    return [line.partition(f" at {__file__}")[0] for line in capsys.readouterr().out.splitlines()]


def test_a_list_is_printed_with_its_total(capsys: pytest.CaptureFixture) -> None:
    fn = remat(block, policy=policies.save_only_these_names("q"))
    total = "total: 80 B in 1 tensor, plus 616 B in 4 inputs"
    assert printed(capsys, fn, *block_args()) == ["float64[2, 5]  cpu  80 B  named 'q'", total]
    first, *others, last = printed(capsys, fn, *block_args(), inputs=True)
    assert (first, len(others), last) == ("float64[5, 7]  cpu  280 B  argument params['up']", 4, total)
    assert printed(capsys, torch.add, rand(3), rand(3)) == ["total: 0 B in 0 tensors"]


def test_layers_of_a_model_are_printed_in_groups(capsys: pytest.CaptureFixture) -> None:
    model, x = encoder()
    nn_apply(model, nn.TransformerEncoderLayer)
    assert printed(capsys, model, x) == [
        "float32[2, 16, 64]  cpu  8 KiB  x3  output of aten.native_layer_norm",
        "total: 24 KiB in 3 tensors, plus 531 KiB in 49 inputs",
    ]
    assert [row.module for row in saved_residuals(model, x)] == [f"layers.{i}.norm2" for i in range(3)]
    assert len(printed(capsys, model, x, inputs=True)) == 15
    nn_apply(model, nn.TransformerEncoderLayer, policy=policies.save_matmuls)
    print_saved_residuals(model, x)
    row, other, *_ = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"float32\[32, 192\] +cpu  24 KiB  x4  output of aten.mm at .*, in layers\.\*\.self_attn", row)
    assert other.startswith("float32[32, 128]    cpu  16 KiB  x4  output of aten.addmm")


@pytest.mark.filterwarnings("error")
def test_a_captured_tensor_with_a_history_is_listed_without_a_warning() -> None:
    h = torch.ones(3, requires_grad=True) * 2
    assert [row.op for row in saved_residuals(lambda x: (x * h).sin(), torch.ones(3))] == ["aten.mul"]
