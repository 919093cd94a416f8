"""A policy that saves nothing causes one warning, at the line that called the region, in the first backward."""

import pickle
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import assert_same, rand
from torch import Tensor, nn
from torch.func import grad, jvp, vmap

from remat import RematWarning, checkpoint_name, disable_remat, policies, remat
from remat import sequential as in_regions
from remat.compat import checkpoint, checkpoint_sequential, checkpoint_wrapper
from remat.nn import apply

NEVER, EXP, SIN = map(policies.save_ops, ("aten.bmm", "aten.exp", "aten.sin"))
HIDDEN = policies.save_only_these_names("hidden")
UNMATCHED, UNNAMED = "matched none of the operators that were executed", "mentions the name"
backward = lambda fn, *args: lambda: fn(*args).sum().backward()
here = lambda: sys._getframe(1).f_lineno  # the line number of the caller


def said(call: Callable[[], Any], text: str = UNMATCHED) -> list[warnings.WarningMessage]:
    """The warnings of a call that are about policies."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [warning for warning in found if text in str(warning.message)]


def new() -> Callable[[Tensor], Tensor]:
    """A function with its own code, for which nothing is recorded."""
    scope: dict[str, Any] = {"name": checkpoint_name}
    exec("def new(x):\n    return name(x.sin(), 'h').exp().sin()", scope)
    return scope["new"]


def test_the_first_backward_warns_once_at_the_line_that_called_the_region() -> None:
    x, fn = rand(3), remat(new(), policy=NEVER)
    outs: list[Tensor] = []
    assert not said(lambda: outs.append(fn(x)))
    out, line = fn(x), here()
    (warning,) = said(lambda: out.sum().backward())
    assert (warning.category, warning.filename, warning.lineno) == (RematWarning, __file__, line)
    for text in ("policies.save_ops(torch.ops.aten.bmm", "aten.sin.default, aten.exp.default. ", "checkpoint_name"):
        assert text in str(warning.message)
    assert not said(backward(fn, x)) and not said(backward(remat(fn._fn, policy=NEVER), x))
    assert len(said(backward(remat(fn._fn, policy=policies.save_convolutions), x))) == 1  # another policy


def test_only_a_call_that_is_differentiated_warns() -> None:
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


def test_another_call_that_matches_before_the_first_backward_prevents_the_warning() -> None:
    fn = lambda x, product: (torch.bmm(x, x) if product else x).sin().exp()
    x, region = rand(2, 3, 3), remat(fn, policy=NEVER)
    assert not said(lambda: (region(x, False) + region(x, True)).sum().backward())
    assert not said(backward(region, x, False))
    assert len(said(backward(remat(fn, policy=NEVER), x, False))) == 1  # this call alone matches nothing


TRANSFORMS: dict[str, Callable[[Callable], Callable[[Tensor], Any]]] = {
    "grad": lambda fn: grad(lambda x: fn(x).sum()),
    "vmap(grad)": lambda fn: vmap(grad(lambda x: fn(x).sum())),
    "grad(vmap)": lambda fn: grad(lambda x: vmap(fn)(x).sum()),
    "create_graph": lambda fn: lambda x: torch.autograd.grad(fn(x.requires_grad_()).sum(), x, create_graph=True),
    "grad inside": lambda fn: remat(lambda x: grad(lambda x: fn(x).sum())(x)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_warn_once(name: str) -> None:
    x, fn = rand(3, 3, grad=False), remat(new(), policy=NEVER)
    assert not said(lambda: vmap(fn)(x))
    assert len(said(lambda: TRANSFORMS[name](fn)(x))) == 1
    assert not said(lambda: TRANSFORMS[name](fn)(x)) and not said(backward(fn, rand(3, 3)))
    assert not said(lambda: TRANSFORMS[name](remat(new(), policy=EXP))(x))


@pytest.mark.filterwarnings("error")
def test_a_warning_turned_into_an_error_leaves_all_state_as_it_was() -> None:
    x, plain = rand(3), new()
    fn = remat(plain, policy=NEVER)
    out = fn(x).sum()
    with pytest.raises(UserWarning, match=UNMATCHED):
        out.backward()
    assert_same(torch.autograd.grad(fn(x).sum(), x), torch.autograd.grad(plain(x).sum(), x))


def never(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return False


is_exp = lambda ctx, op, *args, **kwargs: op is torch.ops.aten.exp.default
ANY = policies.save_any_names_but_these()
POLICIES: list[tuple[Any, int]] = [
    (policies.save_matmuls | policies.save_attention, 1), (~policies.save_ops("aten.sin", "aten.exp"), 1),
    (never, 1), (policies.save_if(never) | policies.save_matmuls, 1), (EXP | policies.save_matmuls, 0),
    (EXP & ANY, 1),  # its result has no name
    (SIN & ANY, 0), (is_exp, 0), (~policies.save_matmuls, 0), (policies.everything_saveable, 0), ([], 0),
    (policies.save_only_these_names("h"), 0), (policies.save_any_names_but_these("h"), 0),
    (policies.save_only_these_names("h") | policies.save_matmuls, 0),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(POLICIES)), ids=lambda i: f"{i}: {POLICIES[i][0]!r}"[:60].split(" at 0x")[0])
def test_which_policies_warn(case: int) -> None:
    policy, count = POLICIES[case]
    assert len(said(backward(remat(new(), policy=policy), rand(3)))) == count


def test_a_value_that_is_not_needed_counts_as_matched_and_views_do_not_count() -> None:
    product = lambda x, w: x @ w
    assert not said(backward(remat(product, policy=policies.save_matmuls), rand(3, 3), rand(3, 3)))
    assert len(said(backward(remat(product, policy=NEVER), rand(3, 3), rand(3, 3)))) == 1
    view = remat(lambda x: x.t(), policy=NEVER)
    assert not said(backward(view, rand(3, 3))) and not said(lambda: grad(lambda x: view(x).sum())(rand(3, 3)))


def test_the_message_for_a_function_shows_how_it_is_called() -> None:
    (warning,) = said(backward(remat(new(), policy=never), rand(3)))
    assert "policies.save_if(never)" in str(warning.message)
    assert "called as (ctx, op, *args, **kwargs)" in str(warning.message) and "JAX" in str(warning.message)
    torchs, _ = torch.utils.checkpoint.create_selective_checkpoint_contexts([torch.ops.aten.bmm.default])
    (warning,) = said(backward(remat(new(), policy=torchs.policy_fn), rand(3)))
    assert "(the list that create_s" in str(warning.message) and "Save some of these operators" in str(warning.message)


@pytest.mark.parametrize("inner, count", [(NEVER, 1), (SIN, 0), (SIN & ANY, 0), (None, 0), (is_exp, 0)])
def test_a_region_in_a_region_warns_of_its_own_policy(inner: Any, count: int) -> None:
    """Of a function this isn't known, as the outer policy saves the value without asking the inner one."""
    region = remat(new(), policy=inner)
    found = said(backward(remat(lambda x: region(x).cos(), policy=EXP), rand(3)))
    assert len(found) == count and all("aten.bmm" in str(warning.message) for warning in found)


@pytest.mark.parametrize("inner, outer, count", [(EXP, None, 1), (EXP, EXP, 0), (None, None, 0)])
def test_a_policy_in_a_region_without_one_causes_one_warning(inner: Any, outer: Any, count: int) -> None:
    region = remat(new(), policy=inner)
    both = lambda: [remat(lambda x: region(x).cos(), policy=outer)(rand(3)).sum().backward() for _ in range(2)]
    assert len(said(both, "Give the policy to the outer region")) == count


def test_a_name_that_no_value_has_causes_one_warning() -> None:
    fn = lambda x: checkpoint_name(x.sin(), "hidden").exp()
    wrong = policies.save_only_these_names("hiden", "hid*")
    (warning,) = said(lambda: remat(fn, policy=wrong)(rand(3)), UNNAMED)
    message = "name 'hiden', but no value has this name. Values were named 'hidden'. Did you mean 'hidden'?"
    assert message in str(warning.message)
    assert not said(backward(remat(fn, policy=wrong), rand(3)), UNNAMED)  # nor for a new wrapper
    (warning,) = said(lambda: remat(torch.sin, policy=HIDDEN)(rand(3)), "There were no named values. Values get")


@pytest.mark.parametrize("way", range(3), ids=["a call", "grad", "a module"])
def test_the_warning_of_a_name_is_at_the_line_of_the_call(way: int) -> None:
    x, named = rand(3, grad=False), remat(new(), policy=HIDDEN)
    module, lines = apply(nn.Sequential(nn.Tanh(), nn.Tanh()), nn.Tanh, policy=HIDDEN), list[int]()
    call = (
        lambda: (named(x), lines.append(here())),
        lambda: (grad(lambda x: named(x).sum())(x), lines.append(here())),
        lambda: (module(x), lines.append(here())),
    )[way]
    (warning,) = said(call, UNNAMED)
    assert (warning.filename, warning.lineno) == (__file__, lines[0])


def model() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3)))


@pytest.mark.parametrize("policy, count", [(NEVER, 1), (policies.save_matmuls, 0), (HIDDEN, 1)])
def test_modules_that_share_a_policy_cause_one_warning(policy: Any, count: int) -> None:
    for call in (
        apply(model(), (nn.Linear, nn.Tanh), policy=policy),  # it matches in one of these types, or in none
        in_regions(model(), 2, policy=policy),
        remat(model(), policy=policy),
        checkpoint_wrapper(model(), policy=policy),
        lambda x: checkpoint(model(), x, policy=policy),
        lambda x: checkpoint_sequential(model(), 2, x, policy=policy),
        pickle.loads(pickle.dumps(apply(model(), nn.Linear, policy=policy))),
    ):
        assert len(said(backward(call, torch.ones(2, 4)), UNNAMED if policy is HIDDEN else UNMATCHED)) == count
