"""Functions that differentiate, in regions and around them: by `torch.func`, and by `torch.autograd.grad`."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from both import ALL, RECOMPUTE, Fn, V, W, Wrap, both, by_dual, f, forces, rows, squares, through_autograd, vmap
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jvp, linearize, vjp

from remat import CaptureError, RematError, policies, remat


class Sine(torch.autograd.Function):
    """Its derivative is one of torch.func, as that of a fixed point may be."""

    generate_vmap_rule = True
    forward = staticmethod(lambda x: x.sin())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    backward = staticmethod(lambda ctx, g: vjp(torch.sin, *ctx.saved_tensors)[1](g)[0])
    jvp = staticmethod(lambda ctx, t: t * ctx.saved_tensors[0].cos())


EVERYTHING = policies.everything_saveable
FORCES: dict[str, Callable[[Wrap], Fn]] = {
    "around a region": lambda wrap: forces(wrap(f)),
    "around and inside": lambda wrap: wrap(forces(wrap(f))),
    "of an intermediate": lambda wrap: wrap(lambda x: forces(f)(x * 2) * x),
    "between regions": lambda wrap: lambda x: wrap(f)(forces(wrap(f))(wrap(torch.sin)(x))),
}
INSIDE: dict[str, Callable[[Wrap], Fn]] = {
    "grad": lambda wrap: wrap(lambda x: grad(squares(f))(x) * x),
    "grad, and the argument": lambda wrap: wrap(lambda x: grad(torch.sum)(x) + x),
    "grad of a region": lambda wrap: wrap(lambda x: grad(squares(wrap(f)))(x) * x),
    "vmap": lambda wrap: wrap(lambda x: vmap(f)(rows(x)).sin().sum(0)),
    "jvp": lambda wrap: wrap(lambda x: jvp(f, (x,), (x.cos(),))[1].sin()),
    "vjp": lambda wrap: wrap(lambda x: vjp(f, x)[1](x.cos())[0].sin()),
    "vjp in the backward": lambda wrap: wrap(lambda x: Sine.apply(f(x)).exp()),
    "jacfwd": lambda wrap: wrap(lambda x: jacfwd(f)(x).sin().sum(0)),
    "hessian": lambda wrap: wrap(lambda x: hessian(squares(f))(x).sin().sum(0)),
    "vmap(grad)": lambda wrap: wrap(lambda x: vmap(grad(squares(f)))(rows(x)).sum(0)),
    "grad(vmap)": lambda wrap: wrap(grad(lambda x: vmap(torch.sin)(x.reshape(2, 2)).exp().sum())),
    "grad(grad)": lambda wrap: wrap(grad(lambda x: grad(squares(f))(x).sin().sum())),
    "dual": lambda wrap: wrap(lambda x: by_dual(f, x * 1)[1].sin()),
    "dual, after grad": lambda wrap: wrap(lambda x: by_dual(f, grad(squares(f))(x))[1]),
    "dual, captured": lambda wrap: lambda x: by_dual(lambda d: wrap(lambda x: grad(squares(f))(x) * d)(x), V)[1],
    "dual of forces": lambda wrap: wrap(lambda x: by_dual(forces(f), x * 1)[1] * x),
}


# Directly under `vmap` or `jvp` an input doesn't require grad, and dual numbers don't nest.
@pytest.mark.parametrize("outside", sorted(RECOMPUTE.keys() - {"grad(jvp)", "grad(vmap)", "autograd(vmap)"}))
@pytest.mark.parametrize("force", FORCES)
def test_autograd_inside(force: str, outside: str) -> None:
    both(lambda wrap: RECOMPUTE[outside](FORCES[force](wrap), V))


# What each of three nested regions saves.
NESTED = {
    "the outermost": (EVERYTHING, None, None),
    "the innermost": (None, None, policies.save_matmuls),
    "the inner two": (None, policies.save_ops("aten.mul"), EVERYTHING),
    "all": (policies.save_ops("aten.tanh", "aten.mul"), policies.save_ops("aten.tanh"), EVERYTHING),
}


@pytest.mark.parametrize("outside", ["hessian", "jvp(grad)", "grad(grad)", "vmap(grad)", "autograd(grad)"])
@pytest.mark.parametrize("weight", [V.clone().requires_grad_(), W], ids=["a parameter", "a constant"])
@pytest.mark.parametrize("saved", NESTED)
def test_autograd_inside_of_nested_regions_with_policies(saved: str, weight: Tensor, outside: str) -> None:
    """The backward inside recomputes the regions around it, whose first run goes on, or has started again."""

    def program(wrap: Wrap) -> Any:
        outer, middle, inner = (functools.partial(wrap, policy=policy) for policy in NESTED[saved])
        potential = inner(lambda x: (x @ W).tanh() ** 2 * weight if weight.dim() == 1 else f(x))
        force = middle(lambda x: x + 0.1 * forces(potential)(x.sin()))
        found = RECOMPUTE[outside](outer(lambda x: force(x * 1).tanh()), V)
        total = sum(t.sum() for t in (found if isinstance(found, tuple) else ()) if isinstance(t, Tensor))
        return found, weight.requires_grad and outside == "jvp(grad)" and torch.autograd.grad(total, weight)

    both(program)


def runs_in_torch(inside: str, outside: str) -> bool:
    if inside.startswith("dual"):
        return outside in ("autograd", "autograd, twice")
    if inside == "vjp in the backward":
        return outside != "jvp(grad)"  # nor does a pullback of it that `jvp` differentiates run
    return not (inside in ("jvp", "jacfwd", "hessian") and outside.startswith("dual"))


@pytest.mark.parametrize("policy", [None, EVERYTHING], ids=["no policy", "everything"])
@pytest.mark.parametrize(("inside", "outside"), [(i, o) for i in INSIDE for o in ALL if runs_in_torch(i, o)])
def test_transforms_inside(inside: str, outside: str, policy: Any) -> None:
    def program(wrap: Wrap) -> Any:
        region = INSIDE[inside](wrap)
        return [ALL[outside](region, V) for _ in range(2)]  # the second time, with what the first one has recorded

    both(program, policy=policy)


# A tensor that is stored under `jvp` is refused.
@pytest.mark.parametrize("outside", [name for name in ALL if not ("jvp" in name or name in ("jacfwd", "hessian"))])
@pytest.mark.parametrize("follows", [True, False])
def test_state_that_a_level_inside_has_left(follows: bool, outside: str) -> None:
    """A tensor that is made at two levels is a wrapper of a wrapper when these have ended."""

    def program(wrap: Wrap) -> Any:
        state = torch.zeros(4, dtype=V.dtype)

        def steps(x: Tensor) -> Tensor:
            nonlocal state
            old, state = state, state * 0.5 + 1
            return x * old.cos()

        region = wrap(grad(squares(steps)))
        return ALL[outside](lambda x: region(region(x if follows else V).tanh()) * x, V)

    both(program)


@pytest.mark.parametrize("policy", [None, policies.save_ops("aten.cos"), EVERYTHING], ids=str)
def test_a_stored_tensor_of_a_level_that_has_ended(policy: Any) -> None:
    """As a module stores its last activation. Inner regions hand it to the outer one in each of its runs."""

    def program(wrap: Wrap) -> Any:
        last: Any = None

        def stores(x: Tensor) -> Tensor:
            nonlocal last
            last = x.sin()
            return last * 0.9

        step = wrap(lambda x: jvp(stores, (x,), (x.cos(),))[1].tanh())
        return through_autograd(lambda x: wrap(lambda x: step(step(x)).tanh(), policy=policy)(step(x)), V)

    both(program)


def test_a_tensor_that_an_ended_level_has_left_is_an_input_of_all_runs_alike() -> None:
    left: list[Tensor] = []
    jvp(lambda x: (left.append(torch.ones(4) * 0.5), x)[1], (V,), (V,))
    jvp(grad(lambda x: (left.append(x), x.sum())[1]), (V,), (V,))  # which no transform can read

    def program(wrap: Wrap) -> Any:
        step = wrap(lambda x: jvp(wrap(lambda x: x * left[0].cos()), (x,), (x.cos(),))[1] + x)
        return through_autograd(wrap(lambda x: step(x.sin())), V)

    both(program)


@pytest.mark.parametrize("outside", ALL)
def test_a_table_that_a_region_caches_is_read_outside_of_it(outside: str) -> None:
    """As rotary or ALiBi tables are, which modules make in their first call."""

    def program(wrap: Wrap) -> Any:
        cache: dict[str, Tensor] = {}
        block = lambda x: (x * cache.setdefault("table", torch.arange(4) * 0.1).to(x.dtype).cos()).tanh()
        return ALL[outside](lambda x: block(wrap(block)(x) * x), V)

    both(program)


@pytest.mark.parametrize("inside", INSIDE)
def test_no_gradient_of_what_a_region_does_not_use(inside: str) -> None:
    """As without remat, hooks on it are not called, and nothing is accumulated."""
    gradients: list[Any] = []
    x, unused = V.clone().requires_grad_(), torch.ones(3, requires_grad=True)
    unused.register_hook(gradients.append)
    region = INSIDE[inside](lambda fn: fn)
    remat(lambda x, unused: region(x) + unused.detach().sum())(x, unused).sum().backward()
    assert x.grad is not None and gradients == []


def test_a_recompute_can_differentiate_with_respect_to_what_no_result_depends_on() -> None:
    w = V.clone().requires_grad_()
    fn = lambda x: grad(squares(torch.sin))(x) * torch.autograd.grad((p := w * 1).square().sum(), p)[0].detach()
    both(lambda wrap: through_autograd(wrap(fn), V))


@pytest.mark.parametrize("policy", [EVERYTHING, policies.save_matmuls, policies.save_ops("aten.mul")], ids=str)
def test_linearize_inside_a_region_is_refused_with_a_policy_or_under_grad(policy: Any) -> None:
    both(lambda wrap: wrap(lambda x: linearize(torch.sin, x)[1](x))(V))
    both(lambda wrap: through_autograd(wrap(lambda x: linearize(torch.tanh, x)[1](x)), V), determinism_check="values")
    with pytest.raises(CaptureError, match=r"makes this tensor, as torch\.func\.linearize does"):
        grad(squares(remat(lambda x: linearize(torch.sin, x)[1](x))))(V)
    region = remat(lambda x: linearize(f, x)[1](x).sin(), policy=policy)
    with pytest.raises(RematError, match=r"Use torch\.func\.jvp"):
        region(V.clone().requires_grad_())
    with pytest.raises(RematError, match="traces a function"):
        grad(squares(region))(V)
    # The functional spelling works, as does the policy of a region inside of the traced function.
    both(lambda wrap: grad(squares(wrap(lambda x: jvp(f, (x,), (x,))[1].sin())))(V), policy=policy)
    both(lambda wrap: linearize(wrap(f), V)[1](V), policy=policy)


def test_an_argument_that_a_region_changes_may_change_again() -> None:
    def program(wrap: Wrap) -> Any:
        count, step = torch.zeros(4), wrap(lambda x, count: grad(squares(f))(x) + 0 * count.add_(1).sum())
        return through_autograd(lambda x: step(step(x, count), count), V), count

    both(program)


def test_what_only_a_hook_reads_loses_its_derivative_with_an_error() -> None:
    x, scale = V.clone().requires_grad_(), V.clone().requires_grad_()

    def step(x: Tensor) -> Tensor:
        h = grad(squares(f))(x)
        h.register_hook(lambda g: g * scale)
        return h.sin()

    torch.autograd.grad(remat(step)(x).sum(), x)
    with pytest.raises(RematError, match=r"reads captured.*scale.* in a hook.*has it as an input"):
        torch.autograd.grad(remat(step)(x).sum(), x, create_graph=True)


def test_the_derivative_for_a_result_does_not_contain_what_other_results_of_the_region_are_computed_from_it() -> None:
    h, s = remat(lambda x: (lambda h: (h, h.sin()))(grad(squares(f))(x)))(V.clone().requires_grad_())
    assert torch.equal(torch.autograd.grad((h + s).sum(), h)[0], torch.ones_like(h))
