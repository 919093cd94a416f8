"""`checkpoint_name`: the identity, recognized by policies under any alias, in every transform."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import assert_same, rand
from torch import Tensor
from torch._dynamo.testing import EagerAndRecordGraphs
from torch.func import functionalize, grad, jvp, vmap

from benchmarks.measure import count_ops
from remat import checkpoint_name, policies, remat


def test_it_returns_its_argument() -> None:
    x = rand(3).sin()
    tree, node = {"a": x, "b": [x.cos(), 3, None], "c": "text"}, x.grad_fn
    assert checkpoint_name(x, "x") is x and checkpoint_name(tree, "tree") is tree and checkpoint_name(5, "five") == 5
    assert x.grad_fn is node
    assert torch.equal(functionalize(lambda x: checkpoint_name(x.sin(), "h"))(x.detach()), x.sin())


@pytest.mark.parametrize("args", [(torch.ones(1), None), (torch.ones(1), ["q"]), ("q", torch.ones(1))], ids=str)
def test_a_name_is_a_string(args: tuple) -> None:
    swapped = r"\. The arguments are swapped" if args[0] == "q" else ""
    with pytest.raises(TypeError, match=rf"checkpoint_name\(x, name\): the name must be a string; got .*{swapped}"):
        checkpoint_name(*args)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = checkpoint_name(torch.exp(x), "h")
        ctx.save_for_backward(y)
        return y * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g * ctx.saved_tensors[0]


aliased = lambda name: lambda x: name(torch.exp(x.sin())).sin().sin()
PROGRAMS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "itself": (aliased(lambda h: checkpoint_name(h, "h")), "exp"),
    "read before it was named": (aliased(lambda h: (h.cos(), checkpoint_name(h, "h"))[1]), "exp"),
    "named as a view": (aliased(lambda h: (checkpoint_name(h.view(-1), "h"), h)[1]), "exp"),
    "read as a view": (aliased(lambda h: checkpoint_name(h, "h").view(-1).view(3, 3).t().t()), "exp"),
    "in a tree": (aliased(lambda h: checkpoint_name({"x": [h, 1]}, "h")["x"][0]), "exp"),
    "two names": (aliased(lambda h: checkpoint_name(checkpoint_name(h, "other"), "h")), "exp"),
    "detached": (aliased(lambda h: (checkpoint_name(h.detach(), "h"), h)[1]), "exp"),
    "a part": (aliased(lambda h: (checkpoint_name(h[0], "h"), h)[1]), "exp"),
    "every result of the operation": (lambda x: checkpoint_name(x.sin().max(0).values, "h").sin().exp(), "max"),
    "in a custom function": (lambda x: Twice.apply(x.sin()).sin(), "exp"),
}


def recomputed(fn: Callable, policy: Any, x: Tensor) -> Any:
    """The ops of the backward of a region, whose gradients are checked."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = remat(fn, policy=policy)(x)
    found: list[Any] = []
    counts = count_ops(lambda: found.extend(torch.autograd.grad(out.sum(), x)))
    assert_same(found, [*torch.autograd.grad(fn(x).sum(), x)])
    return counts


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_operation_that_made_a_named_value_is_not_recomputed(program: str) -> None:
    fn, op = PROGRAMS[program]
    for policy, count in ((policies.save_only_these_names("h"), 0), (None, 1)):
        assert recomputed(fn, policy, rand(3, 3))[f"aten.{op}"] == count


named = lambda x, w: torch.sin(checkpoint_name(torch.exp(x @ w), "h")).sum()
TRANSFORMS: dict[str, Callable[[Callable], Callable[[Tensor, Tensor], Any]]] = {
    "vmap(grad) of both": lambda f: lambda x, w: vmap(grad(f, argnums=(0, 1)))(x, w.expand(len(x), *w.shape)),
    "grad(vmap)": lambda f: grad(lambda x, w: vmap(f, in_dims=(0, None))(x, w).sum(), argnums=(0, 1)),
    "jvp": lambda f: lambda x, w: jvp(f, (x, w), (x, w)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_names_keep_their_meaning_under_transforms(transform: str) -> None:
    """`selective/test_policy_rules.py` has more of them."""
    args, run = (rand(3, 4, grad=False), rand(4, 4, seed=1, grad=False)), TRANSFORMS[transform]
    region = run(remat(named, policy=policies.save_only_these_names("h")))
    assert_same(region(*args), run(named)(*args))
    assert count_ops(region, *args)["aten.exp"] == count_ops(run(named), *args)["aten.exp"]


first = lambda x: checkpoint_name(x.sin(), "h").sin().sin()
ANY, EVERYTHING = policies.save_any_names_but_these(), ~policies.save_only_these_names()


@pytest.mark.parametrize(
    "policy, sines",
    [
        (ANY, 1), (policies.save_any_names_but_these("h"), 2), (policies.save_any_names_but_these("*"), 2),
        (policies.offload(ANY), 1), (ANY & policies.save_ops("aten.sin"), 1), (ANY & ~policies.save_ops("aten.sin"), 2),
        (ANY | policies.save_ops("aten.exp"), 1),
        (~ANY, 1),  # everything except named values
        (EVERYTHING, 0), (policies.save_only_these_names(), 2), (~policies.save_anything_except_these_names(), 2),
    ],
    ids=repr,
)  # fmt: skip
def test_policies_that_judge_names_and_mention_none(policy: Any, sines: int) -> None:
    x = rand(3)
    for _ in range(2):  # the second time with what the first call has recorded
        assert recomputed(first, policy, x)["aten.sin"] == sines
    transformed = grad(lambda x: remat(first, policy=policy)(x).sum())
    # Under torch.func, the recompute of a region without a record runs to its end.
    assert count_ops(transformed, x)["aten.sin"] == 3 + (3 if policy.saves_nothing else sines)


@pytest.mark.parametrize("policy, named", [(policies.save_only_these_names("h"), True), (policies.save_matmuls, False)])
def test_a_compiled_graph_has_an_alias_for_a_name_that_its_policy_judges(policy: Any, named: bool) -> None:
    fn, backend, x = lambda x: checkpoint_name(x.sin(), "h").exp(), EagerAndRecordGraphs(), rand(3)
    assert_same(torch.compile(remat(fn, policy=policy), backend=backend)(x), fn(x))
    modules = [m for m in backend.graphs[0].modules() if isinstance(m, torch.fx.GraphModule)]
    assert (torch.ops.aten.alias.default in {node.target for m in modules for node in m.graph.nodes}) == named
    assert_same(torch.compile(fn, backend=backend, fullgraph=True)(x), fn(x))  # without a region
