"""Policies on wrapper tensors, whose operations run others on the inner tensors: as in torch's selective checkpoint."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from cases import assert_same, rand
from side_by_side import both, is_torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import remat
import remat.compat
from benchmarks.measure import OpCounter, held_bytes
from remat import checkpoint_name, policies

aten = torch.ops.aten


class Opaque(Tensor):
    """A wrapper of one tensor, without torch's protocol. ``INSIDE`` maps an operation to that on the inner tensor."""

    inner: Tensor
    INSIDE: ClassVar[dict[Any, Callable]] = {}

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inside = cls.INSIDE.get(func, func)
        inner = tree_map_only(Opaque, lambda x: x.inner, (args, kwargs or {}))
        return tree_map_only(Tensor, cls, inside(*inner[0], **inner[1]))


def batched_product(a: Tensor, b: Tensor) -> Tensor:
    return aten.bmm.default(a[None], b[None])[0]


class OpaqueBatched(Opaque):
    INSIDE: ClassVar[dict[Any, Callable]] = {aten.mm.default: batched_product}


class Made(Opaque):
    """A wrapper that implements torch's protocol."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict, meta: None, size: Any, stride: Any) -> Tensor:
        return Made(parts["inner"])


class Batched(Made):
    """Its products run batched products inside."""

    INSIDE: ClassVar[dict[Any, Callable]] = {aten.mm.default: batched_product}


class Split(Made):
    """Its products run the sum of two products of halves inside."""

    INSIDE: ClassVar[dict[Any, Callable]] = {
        aten.mm.default: lambda a, b: aten.add.Tensor(
            aten.mm.default(a[:, :2], b[:2]), aten.mm.default(a[:, 2:], b[2:])
        )
    }


def chain(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(4):
        x = checkpoint_name(x @ w, "h").sin()
    return x


def leaves(cls: type) -> list[Tensor]:
    return [cls(rand(4, 4, seed=seed, grad=False)).requires_grad_() for seed in (0, 1)]


def products(fn: Callable, cls: type) -> tuple[list[Tensor], int]:
    """The gradients, and the number of products that their computation runs."""
    args = leaves(cls)
    out = fn(*args).sum()
    with OpCounter() as counter:
        grads = torch.autograd.grad(out, args)
    return [g.inner for g in grads], counter["aten.mm"] + counter["aten.bmm"]


def selective(module: Any, policy: Any) -> Callable:
    """`chain` in a region of torch or of the drop-in, with torch's contexts."""
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return functools.partial(module.checkpoint, chain, use_reentrant=False, context_fn=contexts)


def every_second(asked: list) -> Callable:
    """Saves every second product, and records its calls."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is not aten.mm.default:
            return CheckpointPolicy.PREFER_RECOMPUTE
        asked.append((type(args[0]), type(getattr(ctx, "op_output", args[0]))))  # torch 2.11 doesn't have it
        return CheckpointPolicy.MUST_SAVE if len(asked) % 2 else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


WRAPPERS = pytest.mark.parametrize(("cls", "each"), [(Made, 1), (Batched, 1), (Split, 2)])


@both
@pytest.mark.parametrize(("cls", "each"), [(Made, 1), (Batched, 1), (Split, 2), (Opaque, 1), (OpaqueBatched, 1)])
def test_the_operation_is_judged(module: Any, cls: type, each: int) -> None:
    expected, count = products(chain, cls)
    again = {}
    for ops in ([], [aten.mm.default]):
        grads, now = products(selective(module, ops), cls)
        assert_same(grads, expected)
        again[len(ops)] = now - count
    assert again == {0: 4 * each, 1: 0}


@both
@WRAPPERS
def test_a_predicate_is_called_once(module: Any, cls: type, each: int) -> None:
    asked: list = []
    expected, count = products(chain, cls)
    grads, now = products(selective(module, every_second(asked)), cls)
    assert_same(grads, expected)
    again = is_torch(module) and torch.__version__ < "2.12"  # torch 2.11 calls it in the recompute too
    assert asked == [(cls, cls)] * (8 if again else 4)
    assert now - count == 2 * each


POLICIES: dict[str, Any] = {
    "list": [aten.mm.default],
    "save_ops": policies.save_ops("aten.mm"),
    "or": policies.save_ops("aten.mm") | policies.save_only_these_names("h"),
    "and": policies.save_matmuls & policies.save_ops("aten.mm"),
    "not": ~policies.save_ops("aten.sin"),
    "predicate": lambda ctx, op, *args, **kwargs: op is aten.mm.default,
    "predicate or name": policies.save_if(lambda ctx, op, *args, **kwargs: op is aten.mm.default)
    | policies.save_only_these_names("h"),
    "offload": policies.offload(policies.save_ops("aten.mm")),
}


@pytest.mark.parametrize("policy", POLICIES)
@WRAPPERS
@pytest.mark.filterwarnings("error")
def test_every_kind_of_policy(policy: str, cls: type, each: int) -> None:
    f = remat.remat(chain, policy=POLICIES[policy])
    expected, count = products(chain, cls)
    for _ in range(3):  # from the second call on with the records of the first
        grads, now = products(f, cls)
        assert_same(grads, expected)
        assert now == count


@pytest.mark.parametrize("policy", [[aten.bmm.default], policies.save_ops("aten.bmm"), policies.save_matmuls])
def test_the_operations_inside_are_judged_too(policy: Any) -> None:
    expected, count = products(chain, Batched)
    grads, now = products(remat.remat(chain, policy=policy), Batched)
    assert_same(grads, expected)
    assert now == count


@pytest.mark.parametrize("policy", [None, "mm", "name", "mm and name"])
@pytest.mark.parametrize("cls", [Made, Batched, Split])
def test_saved_bytes(cls: type, policy: str | None) -> None:
    """Only the results of the operation are saved, not the intermediates inside it."""
    given = {
        None: None,
        "mm": policies.save_ops("aten.mm"),
        "name": policies.save_only_these_names("h"),
        "mm and name": policies.save_ops("aten.mm") | policies.save_only_these_names("h"),
    }

    def held(fn: Callable) -> int:
        args = leaves(cls)
        return held_bytes(fn, *args)

    of_each = 4 * 4 * 8
    kept = held(remat.remat(chain, policy=given[policy])) - held(remat.remat(chain))
    assert kept == (0 if policy is None else 4 * of_each)


def test_mixed_with_plain_tensors() -> None:
    """With plain parameters a later call can follow the record of the last one."""
    b = rand(4, 4, seed=2)

    def mixed(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = (b @ b).sin()
        for _ in range(3):
            x = (x @ w).sin()
            y = (y @ b).sin()
        return x.sum(), y

    def run(fn: Callable) -> tuple:
        args = leaves(Batched)
        x, y = fn(*args)
        with OpCounter() as counter:
            grads = torch.autograd.grad(x, args), torch.autograd.grad(y.sum(), b)
        return tree_map(lambda t: t.inner if isinstance(t, Opaque) else t, grads), counter["aten.mm"] + counter[
            "aten.bmm"
        ]

    expected, count = run(mixed)
    f = remat.remat(mixed, policy=policies.save_ops("aten.mm"))
    for _ in range(4):
        found, now = run(f)
        assert_same(found, expected)
        assert now == count


def test_in_place() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        y.mul_(2)
        y = y.sin()
        y.add_(1)
        return (y @ w).cos()

    for cls, each in ((Made, 1), (Batched, 1), (Split, 2)):
        expected, _ = products(fn, cls)
        for ops in (["aten.mm"], ["aten.mul_"], ["aten.mm", "aten.add_"], ["aten.sin"]):
            f = remat.remat(fn, policy=policies.save_ops(*ops))
            grads, now = products(f, cls)
            assert_same(grads, expected)
            with OpCounter() as counter:
                f(rand(4, 4), rand(4, 4, seed=1)).sum().backward()
            assert now == each * (counter["aten.mm"] - 2), ops  # as for plain tensors, without the two of the forward


def test_wrappers_of_wrappers() -> None:
    class Outer(Made):
        INSIDE: ClassVar[dict[Any, Callable]] = {aten.mm.default: batched_product}

    class Inner(Made):
        INSIDE: ClassVar[dict[Any, Callable]] = {
            aten.bmm.default: lambda a, b: aten.baddbmm.default(torch.zeros_like(a), a, b)
        }

    def run(fn: Callable) -> tuple[list[Tensor], int]:
        args = [Outer(Inner(rand(4, 4, seed=seed, grad=False))).requires_grad_() for seed in (0, 1)]
        out = fn(*args).sum()
        with OpCounter() as counter:
            grads = torch.autograd.grad(out, args)
        return [g.inner.inner for g in grads], counter["aten.baddbmm"]

    expected, count = run(chain)
    for op in ("mm", "bmm", "baddbmm"):
        grads, now = run(remat.remat(chain, policy=policies.save_ops(f"aten.{op}")))
        assert_same(grads, expected)
        assert now == count, op
    assert run(remat.remat(chain))[1] == count + 4


def test_a_policy_that_matches_nothing_still_causes_a_warning() -> None:
    for op, warns in (("aten.mm", False), ("aten.bmm", False), ("aten.convolution", True)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            products(remat.remat(lambda x, w: chain(x, w), policy=policies.save_ops(op)), Batched)
        assert bool(caught) is warns, op


def test_an_error_inside_leaves_no_mode_behind() -> None:
    class Fails(Made):
        INSIDE: ClassVar[dict[Any, Callable]] = {aten.mm.default: lambda a, b: [][0]}

    def fn(x: Tensor, w: Tensor) -> Tensor:
        try:
            return (x @ w).sin()
        except IndexError:
            return (x * w).sin()

    before = torch._C._len_torch_dispatch_stack()
    f = remat.remat(fn, policy=policies.save_ops("aten.mm", "aten.mul"))
    args = leaves(Fails)
    out = f(*args).sum()
    assert torch._C._len_torch_dispatch_stack() == before
    with OpCounter() as counter:
        found = torch.autograd.grad(out, args)
    assert counter["aten.mul"] == 3  # in the derivative: for two factors, and for the sine
    assert_same([g.inner for g in found], [g.inner for g in torch.autograd.grad(fn(*args).sum(), args)])
