"""Policies on wrapper tensors, whose operations run others on the inner tensors: as in torch's selective checkpoint."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from cases import assert_same, rand
from side_by_side import both, is_torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from benchmarks.measure import OpCounter, count_ops, held_bytes
from remat import checkpoint_name, policies, remat

aten = torch.ops.aten
MM = aten.mm.default
PRODUCTS = "aten.mm", "aten.bmm", "aten.baddbmm"


class Opaque(Tensor):
    """A wrapper of one tensor, without torch's protocol. ``INSIDE`` maps an operation to that on the inner tensor."""

    inner: Tensor
    nothing = None  # like the mesh of DTensor
    INSIDE: ClassVar[dict[Any, Callable]] = {}

    @staticmethod
    def __new__(cls, x: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(cls, x.shape, strides=x.stride(), dtype=x.dtype, device=x.device)
        made.inner = x
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = tree_map_only(Opaque, lambda x: x.inner, (args, kwargs or {}))
        return tree_map_only(Tensor, cls, cls.INSIDE.get(func, func)(*inner[0], **inner[1]))


class Made(Opaque):
    """A wrapper that implements torch's protocol."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner", "nothing"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict, meta: None, size: Any, stride: Any) -> Tensor:
        return Made(parts["inner"])


class Batched(Made):
    INSIDE: ClassVar[dict[Any, Callable]] = {MM: lambda a, b: aten.bmm.default(a[None], b[None])[0]}


class Split(Made):
    INSIDE: ClassVar[dict[Any, Callable]] = {MM: lambda a, b: MM(a[:, :2], b[:2]) + MM(a[:, 2:], b[2:])}


class Few(Made):
    INSIDE: ClassVar[dict[Any, Callable]] = {aten.equal.default: None}  # type: ignore[dict-item]  # isn't implemented


def chain(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(4):
        x = checkpoint_name(x @ w, "h").sin()
    return x


leaves = lambda cls: [cls(rand(4, 4, seed=seed, grad=False)).requires_grad_() for seed in (0, 1)]


def products(fn: Callable, cls: type) -> tuple[list[Tensor], int]:
    """The gradients, and the number of products that their computation runs."""
    args = leaves(cls)
    out = fn(*args).sum()
    with OpCounter() as counter:
        grads = torch.autograd.grad(out, args)
    return [g.inner for g in grads], sum(counter[name] for name in PRODUCTS)


def recomputed(fn: Callable, cls: type) -> int:
    """The number of products of `chain` that a region recomputes; its gradients are checked."""
    expected, count = products(chain, cls)
    grads, now = products(fn, cls)
    assert_same(grads, expected)
    return now - count


def selective(module: Any, policy: Any) -> Callable:
    """`chain` in a region of torch or of the drop-in, with torch's contexts."""
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return functools.partial(module.checkpoint, chain, use_reentrant=False, context_fn=contexts)


WRAPPERS = [(Made, 1), (Batched, 1), (Split, 2)]  # with the number of products inside of each product


@both
@pytest.mark.parametrize(("cls", "each"), [*WRAPPERS, (Opaque, 1)])
@pytest.mark.filterwarnings("ignore:The policy")
def test_the_operation_is_judged(module: Any, cls: type, each: int) -> None:
    assert [recomputed(selective(module, ops), cls) for ops in ([], [MM])] == [4 * each, 0]


@both
@pytest.mark.parametrize(("cls", "each"), WRAPPERS)
def test_a_predicate_is_called_once(module: Any, cls: type, each: int) -> None:
    asked: list = []

    def every_second(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is not MM:
            return CheckpointPolicy.PREFER_RECOMPUTE
        asked.append((type(args[0]), type(getattr(ctx, "op_output", args[0]))))  # torch 2.11 doesn't have it
        return CheckpointPolicy.MUST_SAVE if len(asked) % 2 else CheckpointPolicy.PREFER_RECOMPUTE

    assert recomputed(selective(module, every_second), cls) == 2 * each
    again = is_torch(module) and torch.__version__ < "2.12"  # torch 2.11 calls it in the recompute too
    assert asked == [(cls, cls)] * (8 if again else 4)


is_mm = lambda ctx, op, *args, **kwargs: op is MM
NAMED, OPS = policies.save_only_these_names("h"), policies.save_ops("aten.mm")
NOT_SINES, IF_MM = ~policies.save_ops("aten.sin"), policies.save_if(is_mm)


@pytest.mark.parametrize("policy", [OPS | NAMED, NOT_SINES, NAMED, is_mm, IF_MM | NAMED, policies.offload(OPS)])
@pytest.mark.parametrize("cls", [cls for cls, _ in WRAPPERS])
@pytest.mark.filterwarnings("error")
def test_every_kind_of_policy_saves_the_results_of_the_operation(policy: Any, cls: type) -> None:
    region = remat(chain, policy=policy)
    assert [recomputed(region, cls) for _ in range(3)] == [0, 0, 0]  # at last with the records of the first call
    kept, least = (held_bytes(remat(chain, policy=given), *leaves(cls)) for given in (policy, None))
    assert kept - least == 4 * 4 * 4 * 8  # of the results of the operation, and not of the values inside it


def test_a_budget_is_for_the_values_inside() -> None:
    region = remat(chain, policy=policies.budget(2 * 4 * 4 * 8, cost="flops"))
    assert [recomputed(region, Made) for _ in range(2)] == [4, 2]


@pytest.mark.parametrize(("op", "warns"), [("aten.mm", False), ("aten.bmm", False), ("aten.convolution", True)])
def test_a_policy_that_matches_nothing_causes_a_warning(op: str, warns: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        products(remat(lambda x, w: chain(x, w), policy=policies.save_ops(op)), Batched)
    assert bool(caught) is warns


def test_an_error_inside_leaves_no_mode_behind() -> None:
    class Fails(Made):
        INSIDE: ClassVar[dict[Any, Callable]] = {MM: lambda a, b: [][0]}

    def fn(x: Tensor, w: Tensor) -> Tensor:
        try:
            return (x @ w).sin()
        except IndexError:
            return (x * w).sin()

    before, args = torch._C._len_torch_dispatch_stack(), leaves(Fails)
    region = remat(fn, policy=policies.save_ops("aten.mm", "aten.mul"))
    out = region(*args).sum()
    assert torch._C._len_torch_dispatch_stack() == before
    assert count_ops(torch.autograd.grad, out, args)["aten.mul"] == 3  # in the derivative: two factors, and the sine
    assert_same(products(region, Fails), products(fn, Fails))


def test_captured_wrappers_are_compared_by_the_tensors_inside() -> None:
    constant = Few(rand(4, 4, grad=False))
    fn: Callable = lambda x, w: chain(x, w * constant)
    assert_same(products(remat(fn), Few)[0], products(fn, Few)[0])
