"""A policy that saves nothing causes one warning, where the user calls the region, in the first backward."""

from __future__ import annotations

import inspect
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import rand
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

from remat import RematWarning, checkpoint_name, disable_remat, policies, remat
from remat import sequential as in_regions
from remat.compat import checkpoint, checkpoint_sequential, checkpoint_wrapper
from remat.nn import apply

NEVER = policies.save_ops("aten.bmm")
UNMATCHED = "matched none of the operators that were executed"


def said(call: Callable[[], Any], text: str = UNMATCHED) -> list[warnings.WarningMessage]:
    """The warnings of a call that are about policies."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [warning for warning in found if text in str(warning.message)]


def new(name: str = "new") -> Callable[[Tensor], Tensor]:
    """A function with its own code, for which nothing is recorded."""
    scope: dict[str, Any] = {}
    exec(f"def {name}(x):\n    return x.sin().exp().sin()", scope)
    return scope[name]


def backward(fn: Callable, *args: Any) -> Callable[[], None]:
    return lambda: fn(*args).sum().backward()


def here() -> int:
    """The line number of the caller."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


# --- when -------------------------------------------------------------------------------------------------------------


def test_one_warning_in_the_first_backward() -> None:
    x, fn = rand(3), remat(new(), policy=NEVER)
    out: list[Tensor] = []
    assert not said(lambda: out.append(fn(x)))
    (warning,) = said(lambda: out[0].sum().backward())
    assert warning.category is RematWarning
    for text in ("policies.save_ops(torch.ops.aten.bmm", "aten.sin.default, aten.exp.default", "checkpoint_name"):
        assert text in str(warning.message)
    assert not said(backward(fn, x)) and not said(backward(remat(fn._fn, policy=NEVER), x))
    assert len(said(backward(remat(fn._fn, policy=policies.save_convolutions), x))) == 1  # another policy


def test_no_warning_where_the_policy_matched_a_value_that_was_not_needed() -> None:
    product = lambda x, w: x @ w
    assert not said(backward(remat(product, policy=policies.save_matmuls), rand(3, 3), rand(3, 3)))
    assert len(said(backward(remat(product, policy=NEVER), rand(3, 3), rand(3, 3)))) == 1  # nothing to recompute


def test_no_warning_before_a_call_that_is_differentiated() -> None:
    x, fn = rand(3), remat(new(), policy=NEVER)

    def without() -> None:
        with torch.no_grad():
            fn(x)
        with torch.inference_mode():
            fn(x)
        with disable_remat():
            fn(x).sum().backward()
        fn(x.detach())
        jvp(fn, (x.detach(),), (x.detach(),))

    assert not said(without)
    assert len(said(backward(fn, x))) == 1


def test_no_warning_if_another_call_matched_before_the_first_backward() -> None:
    def fn(x: Tensor, product: bool) -> Tensor:
        return (torch.bmm(x, x) if product else x).sin().exp()

    x, region = rand(2, 3, 3), remat(fn, policy=NEVER)

    def two_calls() -> None:
        (region(x, False) + region(x, True)).sum().backward()

    assert not said(two_calls) and not said(backward(region, x, False))
    assert len(said(backward(remat(fn, policy=NEVER), x, False))) == 1  # this call alone matches nothing


TRANSFORMS: dict[str, Callable[[Callable], Callable[[Tensor], Any]]] = {
    "grad": lambda fn: grad(lambda x: fn(x).sum()),
    "vjp": lambda fn: lambda x: vjp(fn, x)[1](x),
    "vmap(grad)": lambda fn: vmap(grad(lambda x: fn(x).sum())),
    "grad(vmap)": lambda fn: grad(lambda x: vmap(fn)(x).sum()),
    "jacrev": lambda fn: jacrev(fn),
    "grad(grad)": lambda fn: grad(lambda x: grad(lambda x: fn(x).sum())(x).sum()),
    "jvp(grad)": lambda fn: lambda x: jvp(grad(lambda x: fn(x).sum()), (x,), (x,)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_under_transforms(name: str) -> None:
    x = rand(3, 3, grad=False)
    fn = remat(new(), policy=NEVER)
    assert not said(lambda: vmap(fn)(x))
    assert len(said(lambda: TRANSFORMS[name](fn)(x))) == 1
    assert not said(lambda: TRANSFORMS[name](fn)(x))
    assert not said(lambda: TRANSFORMS[name](remat(new(), policy=policies.save_ops("aten.exp")))(x))


def test_the_first_call_is_plain_and_the_first_backward_is_in_a_transform() -> None:
    x, fn = rand(3), remat(new(), policy=NEVER)
    with torch.no_grad():
        assert not said(lambda: fn(x))
    assert not said(lambda: fn(x))
    assert len(said(lambda: grad(lambda x: fn(x).sum())(x))) == 1
    assert not said(backward(fn, x))


def test_a_function_that_differentiates_inside() -> None:
    inner = new()
    fn = remat(lambda x: grad(lambda y: inner(y).sum())(x) * 2, policy=NEVER)
    assert len(said(backward(fn, rand(3)))) == 1


def test_forward_over_plain_autograd_and_double_backward() -> None:
    x, fn = rand(3), remat(new(), policy=NEVER)
    out = fn(x).sum()
    graph: list[Tensor] = []
    assert len(said(lambda: graph.extend(torch.autograd.grad(out, x, create_graph=True)))) == 1
    assert not said(lambda: graph[0].sum().backward())


def test_a_backward_in_another_thread() -> None:
    out = remat(new(), policy=NEVER)(rand(3)).sum()

    def run() -> None:
        thread = threading.Thread(target=out.backward)
        thread.start()
        thread.join()

    assert len(said(run)) == 1


def test_a_warning_turned_into_an_error_leaves_all_state_as_it_was() -> None:
    x, plain = rand(3), new()
    fn = remat(plain, policy=NEVER)
    out = fn(x).sum()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=UNMATCHED):
            out.backward()
        (gradient,) = torch.autograd.grad(fn(x).sum(), x)
    assert torch.equal(gradient, torch.autograd.grad(plain(x).sum(), x)[0])
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


# --- for which policies -----------------------------------------------------------------------------------------------

POLICIES: list[tuple[Any, int]] = [
    (policies.save_matmuls, 1),
    (policies.save_collectives, 1),
    (policies.save_matmuls | policies.save_attention, 1),
    (policies.offload(policies.save_matmuls), 1),
    (policies.save_matmuls & policies.save_any_names_but_these(), 1),
    (~policies.save_ops("aten.sin", "aten.exp"), 1),
    (["aten.mm"], 1),
    (lambda ctx, op, *args, **kwargs: False, 1),
    (policies.save_if(lambda ctx, op, *args, **kwargs: op is torch.ops.aten.mm.default) | policies.save_matmuls, 1),
    (policies.save_ops("aten.exp"), 0),
    (policies.save_ops("aten.exp") | policies.save_matmuls, 0),
    (policies.save_ops("aten.exp") & policies.save_any_names_but_these(), 1),
    (policies.save_ops("aten.sin") & policies.save_any_names_but_these(), 0),
    (lambda ctx, op, *args, **kwargs: op is torch.ops.aten.exp.default, 0),
    (~policies.save_matmuls, 0),
    (policies.everything_saveable, 0),
    (policies.nothing_saveable, 0),
    (None, 0),
    ([], 0),
    (policies.save_only_these_names("h"), 0),
    (policies.save_any_names_but_these("h"), 0),
    (policies.save_only_these_names("h") | policies.save_matmuls, 0),
]


@pytest.mark.parametrize("case", range(len(POLICIES)), ids=lambda i: f"{i}: {POLICIES[i][0]!r}"[:60].split(" at 0x")[0])
def test_which_policies(case: int) -> None:
    policy, count = POLICIES[case]
    scope: dict[str, Any] = {"name": checkpoint_name}
    exec("def fn(x):\n    return name(x.sin(), 'h').exp().sin()", scope)
    assert len(said(backward(remat(scope["fn"], policy=policy), rand(3)))) == count


def of_jax(prim: Any, *avals: Any, **params: Any) -> bool:
    return prim is torch.ops.aten.mm.default


def products(x: Tensor) -> Tensor:
    return ((x @ x).sin() @ x).exp()


def test_a_policy_function_as_jax_calls_it() -> None:
    (warning,) = said(backward(remat(products, policy=of_jax), rand(3, 3)))
    assert "policies.save_if(of_jax)" in str(warning.message)
    assert "called as (ctx, op, *args, **kwargs)" in str(warning.message) and "JAX" in str(warning.message)


def test_a_region_in_a_region() -> None:
    inner = remat(new("inner"), policy=NEVER)
    outer = remat(lambda x: inner(x).cos(), policy=policies.save_ops("aten.exp"))
    (warning,) = said(backward(outer, rand(3)))
    assert "aten.bmm" in str(warning.message)  # the inner policy; the outer one sees inner operations
    without = remat(new("without"))
    outer = remat(lambda x: without(x).cos(), policy=policies.save_ops("aten.exp"))
    assert not said(backward(outer, rand(3)))
    asked = remat(new("asked"), policy=lambda ctx, op, *args, **kwargs: op is torch.ops.aten.exp.default)
    outer = remat(lambda x: asked(x).cos(), policy=policies.save_ops("aten.exp"))
    assert not said(backward(outer, rand(3)))  # the inner policy wasn't called, as the outer one saves the value


def test_nothing_ran() -> None:
    assert not said(backward(remat(lambda x: x.t(), policy=NEVER), rand(3, 3)))


# --- where ------------------------------------------------------------------------------------------------------------


def test_the_line_that_called_the_region() -> None:
    fn, x = remat(new(), policy=NEVER), rand(3)
    out, line = fn(x), here()
    (warning,) = said(lambda: out.sum().backward())
    assert (warning.filename, warning.lineno) == (__file__, line)


@pytest.mark.parametrize("under", ["a call", "grad", "vmap(grad)", "a module"])
def test_the_line_of_names(under: str) -> None:
    fn, x = new(), rand(3, 3)
    named = remat(fn, policy=policies.save_only_these_names("hidden"))
    module = nn.Sequential(nn.Tanh(), nn.Tanh())
    lines: list[int] = []

    def call() -> None:
        if under == "a call":
            lines[:] = [named(x), here()][1:]
        elif under == "grad":
            lines[:] = [grad(lambda x: named(x).sum())(x), here()][1:]
        elif under == "vmap(grad)":
            lines[:] = [vmap(grad(lambda x: named(x).sum()))(x), here()][1:]
        else:
            apply(module, nn.Tanh, policy=policies.save_only_these_names("hidden"))
            lines[:] = [module(x), here()][1:]

    (warning,) = said(call, "mentions the name 'hidden'")
    assert (warning.filename, warning.lineno) == (__file__, lines[0])


def test_by_default_it_is_shown_once_per_line() -> None:
    x = rand(3)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for i in range(3):
            checkpoint(new(f"fn{i}"), x, policy=NEVER).sum().backward()
    assert len([warning for warning in found if UNMATCHED in str(warning.message)]) == 1


# --- one policy for several functions ---------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.act(self.first(x)))


def model() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(3)))


@pytest.mark.parametrize("policy, count", [(NEVER, 1), (policies.save_matmuls, 0), (policies.save_attention, 1)])
def test_modules_that_share_a_policy(policy: Any, count: int) -> None:
    x = torch.ones(2, 4)
    whole = apply(model(), (nn.Linear, nn.Tanh), policy=policy)  # it matches in one of these types, or in none
    assert len(said(backward(whole, x))) == count
    assert len(said(backward(in_regions(model(), 2, policy=policy), x))) == count
    assert len(said(backward(remat(model(), policy=policy), x))) == count
    assert len(said(backward(checkpoint_wrapper(model(), policy=policy), x))) == count
    assert len(said(lambda: checkpoint(model(), x, policy=policy).sum().backward())) == count
    assert len(said(lambda: checkpoint_sequential(model(), 2, x, policy=policy).sum().backward())) == count


def test_names_in_modules_that_share_a_policy() -> None:
    whole = apply(model(), Block, policy=policies.save_only_these_names("hidden"))
    assert len(said(lambda: whole(torch.ones(2, 4)), "mentions the name 'hidden'")) == 1


def test_a_training_step_warns_once() -> None:
    layers = [Block() for _ in range(2)]

    def step() -> None:
        x = torch.ones(2, 4)
        for layer in layers:
            x = checkpoint(layer, x, policy=NEVER)
        x.sum().backward()

    assert len(said(step)) == 2  # a policy for each call
    assert not said(step)


def test_torchs_policy_function() -> None:
    def never(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        return False

    context_fn = lambda: torch.utils.checkpoint.create_selective_checkpoint_contexts(never)
    fn, x = new(), rand(3)
    (warning,) = said(lambda: checkpoint(fn, x, context_fn=context_fn).sum().backward())
    assert "never)" in str(warning.message)
    assert not said(lambda: checkpoint(fn, x, context_fn=context_fn).sum().backward())


def test_copies_and_pickles() -> None:
    whole = apply(model(), Block, policy=NEVER)
    again = pickle.loads(pickle.dumps(whole))
    assert len(said(backward(again, torch.ones(2, 4)))) == 1
    fn = pickle.loads(pickle.dumps(remat(F.gelu, policy=policies.save_only_these_names("h"))))
    assert torch.equal(fn(torch.ones(3)), F.gelu(torch.ones(3)))


def test_a_functional_call() -> None:
    block = remat(Block(), policy=NEVER)
    parameters = {name: p.detach() for name, p in block.named_parameters()}
    loss = lambda p: functional_call(block, p, (torch.ones(2, 4),)).sum()
    assert len(said(lambda: grad(loss)(parameters))) == 1
