"""Each operator that torch tests, in a region, on torch's own samples: every derivative is that of plain torch."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from cases import tensor_leaves
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.utils import _pytree as pytree

import remat

pytest.importorskip("expecttest")  # torch's samples import it
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

PART = 25
EXCEPT = {
    "linalg.eig": "its gradient exists only for some functions of the result, which torch checks in some transforms",
    "bfloat16": "its sums are rounded in another order, and so for the next four", "half": "", "float": "",
    "cfloat": "", "chalf": "",
}  # fmt: skip
Fn = Callable[..., Tensor]


@functools.cache
def operators() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if op.supports_autograd and torch.float64 in op.dtypes and op.name not in EXCEPT]


def real(tree: Any) -> list[Tensor]:
    found = [t for t in tensor_leaves(tree) if t.layout is torch.strided and (t.is_floating_point() or t.is_complex())]
    return [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in found]


def program(op: Any) -> tuple[Fn, list[Tensor]]:
    """A function around an operator's first sample: of a factor, and of the tensors that can be differentiated."""
    sample = next(iter(op.sample_inputs("cpu", torch.float64, requires_grad=True)))
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    where = [i for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.requires_grad and t.layout is torch.strided]

    def fn(factor: Tensor, *tensors: Tensor) -> list[Tensor]:
        given = dict(zip(where, (t * factor for t in tensors)))
        value, args, kwargs = pytree.tree_unflatten([given.get(i, leaf) for i, leaf in enumerate(leaves)], spec)
        return [t * factor for t in real(op(value, *args, **kwargs))]

    return fn, [torch.ones((), dtype=torch.float64), *(leaves[i].detach() for i in where)] if where else []


def loss(fn: Callable) -> Fn:
    return lambda *args: sum((t.sin() + 0.3 * t).sum() for t in fn(*args))


def gradients(fn: Callable, args: Sequence[Tensor]) -> Any:
    return grad(loss(fn), tuple(range(len(args))))(*args)


def mapped(way: Callable) -> Callable:
    def run(fn: Callable, args: Sequence[Tensor]) -> Any:
        return vmap(lambda *args: way(fn, args), randomness="different")(*[torch.stack([t, t * 1.01]) for t in args])

    return run


def by_autograd(fn: Callable, args: Sequence[Tensor], create_graph: bool = False) -> Any:
    leaves = [t.clone().requires_grad_() for t in args]
    found = torch.autograd.grad(loss(fn)(*leaves), leaves, allow_unused=True, create_graph=create_graph)
    again = sum(t.square().sum() for t in real(found))
    return found, torch.autograd.grad(again, leaves, allow_unused=True) if create_graph else ()


WAYS: dict[str, Callable[[Callable, Sequence[Tensor]], Any]] = {
    "autograd": by_autograd,
    "autograd, twice": functools.partial(by_autograd, create_graph=True),
    "jvp": lambda fn, args: jvp(fn, tuple(args), tuple(t.cos() for t in args)),
    "jvp(grad)": lambda fn, args: jvp(lambda *a: gradients(fn, a), tuple(args), tuple(t.cos() for t in args)),
    "vmap(grad)": mapped(gradients),
    "vmap(grad(grad))": mapped(lambda fn, xs: gradients(lambda *a: [t.square() for t in real(gradients(fn, a))], xs)),
}


def compared(op: Any) -> Iterator[str]:
    """The ways in which torch can differentiate an operator; fails where a region's derivative is another one."""
    fn, args = program(op)
    for way, run in WAYS.items() if args else ():
        try:
            torch.manual_seed(0)
            expected = real(run(fn, args))
        except Exception:  # torch can't
            continue
        for policy in (None, remat.policies.everything_saveable):
            torch.manual_seed(0)
            found = real(run(remat.remat(fn, policy=policy), args))
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8, equal_nan=True, msg=f"{op.name}, {way}")
        yield way


@pytest.mark.sampled(6)
@pytest.mark.parametrize("start", range(0, 550, PART))
def test_operators(start: int) -> None:
    part = operators()[start : start + PART]
    assert part or start > 500
    assert sum(len(list(compared(op))) for op in part) >= 3 * len(part)
