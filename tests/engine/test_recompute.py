"""The recompute of a region: when it runs, where it stops, what it needs around it, and what it leaves behind."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from cases import KB, N, Wrap, assert_same, assert_same_results, grad, in_threads, plain, rand, repeated
from side_by_side import Runs
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import GraphExecGroup

from benchmarks.measure import OpCounter, PeakMemory, count_ops, gc_disabled, held_bytes, peak_bytes
from remat import RecomputeMismatchError, RematError, is_recomputing, policies, remat

X, W = rand(4, 4), rand(4, 4, seed=1)
saving = partial(remat, policy=policies.save_matmuls)


def mm_chain(x: Tensor, w: Tensor) -> Tensor:
    """Three products, the last of which no backward needs."""
    return ((x @ w).tanh() @ w).tanh() @ w


def two(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Two results that have nothing in common but the inputs."""
    return (x @ w).tanh(), ((x @ w @ w).exp() @ w).exp()


def of_captured_tensors(wrap: Wrap, x: Tensor, w: Tensor) -> None:
    h = (w * 2).exp()
    grad(wrap(lambda: h * w)(), w, retain_graph=True)
    grad(wrap(lambda x: x[1:] * h[:3])(x), (x, w))


STEPS: dict[str, tuple[Callable, dict[str, int]]] = {
    "up to the last saved tensor": (lambda wrap, x, w: grad(wrap(mm_chain)(x, w), (x, w)), {"mm": 2, "tanh": 2}),
    "no early stop": (lambda wrap, x, w: grad(wrap(mm_chain, early_stop=False)(x, w), (x, w)), {"mm": 3, "tanh": 2}),
    "a deleted result": (lambda wrap, x, w: grad(wrap(two)(x, w)[0], (x, w)), {"mm": 1, "tanh": 1}),
    "a gradient that isn't asked for": (lambda wrap, x, w: grad(wrap(mm_chain)(x, w), x), {"mm": 2, "tanh": 2}),
    "a deleted result of saved products": (lambda wrap, x, w: grad(
        wrap(two, policy=policies.save_matmuls, early_stop=False)(x, w)[1], (x, w)), {"exp": 2}),
    "again in full, as Python reads a skipped value": (lambda wrap, x, w: grad(
        wrap(lambda x: ((x.sin() * 2).exp() * (x @ w).tolist()[0][0]).sin(), policy=policies.save_ops("aten.sin"))(x),
        x), {"mul": 3, "exp": 2, "mm": 1}),
    "again in full, as a skipped value is stored": (lambda wrap, x, w: (lambda kept: grad(wrap(
        lambda x: (kept.append(x * 3), (x.sin() * 2).exp())[1], policy=policies.save_ops("aten.sin"))(x), x))(deque()),
        {"mul": 3, "exp": 2}),
    "no early stop, of what is saved before it is filled": (lambda wrap, x, w: grad(
        wrap(lambda x: F.rrelu(x * 2, training=True), early_stop=False)(x), x), {"mul": 1, "rrelu_with_noise": 1}),
    "inputs": (lambda wrap, x, w: grad(wrap(lambda x: (x.view(-1) * w.view(-1))[2:])(x), (x, w)), {}),
    "captured tensors": (of_captured_tensors, {}),
    "a constant, which is copied": (lambda wrap, x, w: (lambda value: grad(
        wrap(lambda x: (x * value).view(2, 8))(x), x))(w.detach().clone()), {"clone": 1, "equal": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_only_what_the_backward_reads_is_recomputed(name: str) -> None:
    step, expected = STEPS[name]
    ours, without = count_ops(step, remat, X, W), count_ops(step, plain, X, W)
    more = {op.removeprefix("aten."): n - without[op] for op, n in ours.items() if n != without[op]}
    assert {op: n for op, n in more.items() if op not in {"detach", "empty_strided", "empty_like", "fill_"}} == expected


def handler(caught: Any, inside: list, ends: deque) -> Callable:
    """A function that catches exceptions, and continues in another way after one."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            try:
                with torch.autocast("cpu", enabled=False):
                    inside.append(1)
                    x = (x @ w).tanh().sin()
            except caught:
                x = x.cos()
            finally:
                inside.pop()
        ends.append(x)
        return x * 2

    return f


@pytest.mark.parametrize("caught", [Exception, (ValueError, RuntimeError), BaseException], ids=str)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_code_that_catches_exceptions_is_recomputed_as_it_ran(caught: Any, depth: int) -> None:
    """The stop is no `Exception`. What catches it all the same reads values that exist, and is stopped again."""
    inside, ends = list[int](), deque[Tensor]()
    fn = region = handler(caught, inside, ends)
    for _ in range(depth):
        region = remat(lambda x, w, inner=region: inner(x, w), determinism_check="none")
    assert_same(grad(region(X, W), (X, W)), grad(fn(X, W), (X, W)))
    assert inside == [] and torch.is_grad_enabled() and not is_recomputing() and len(ends) == 2


def tree(fn: Callable, depth: int, wrap: Wrap = remat) -> Callable:
    """`depth` nested regions; each calls the next one twice in a row."""
    if depth == 0:
        return fn
    inner = tree(fn, depth - 1, wrap)
    return wrap(lambda x, w: inner(inner(x, w), w))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_each_leaf_of_a_tree_of_regions_is_recomputed_once_per_level_at_most(depth: int) -> None:
    recomputes: list[bool] = []

    def leaf(x: Tensor, w: Tensor) -> Tensor:
        recomputes.append(is_recomputing())
        return (x @ w).sin()

    assert held_bytes(tree(remat(leaf), depth), X, W) == X.nbytes
    recomputes.clear()
    found = grad(tree(remat(leaf), depth)(X, W), (X, W))
    assert recomputes.count(False) == 2**depth <= recomputes.count(True) <= 2**depth * (depth + 1)
    assert_same(found, grad(tree(leaf, depth, plain)(X, W), (X, W)))


def owning(fn: Callable) -> Callable:
    """A region whose slots own their values while it runs, as in `remat.compat`."""
    region = remat(fn)
    region._options = replace(region._options, read_inside=True)
    return region


@pytest.mark.parametrize("wrap", [remat, owning])
@pytest.mark.parametrize("retain", [False, True])
def test_values_are_released_while_the_pass_goes_on(retain: bool, wrap: Wrap) -> None:
    x, alive = torch.ones(64, 64, requires_grad=True), list[int]()
    assert held_bytes(wrap(repeated(torch.sin, 10)), x) == x.nbytes
    out = wrap(repeated(torch.sin, 10))(x).sum()
    with PeakMemory() as memory:
        x.register_hook(lambda _: alive.append(memory.total))
        grad(out, x, retain_graph=retain)
    assert alive[0] <= 2 * x.nbytes + 64  # the gradient, and the last value; all ten if they lived until the end


def test_each_pass_of_a_retained_graph_recomputes_once() -> None:
    runs = Runs(mm_chain)
    out, expected = remat(runs)(X, W), grad(mm_chain(X, W), (X, W))
    for i in range(3):
        assert_same(grad(out, (X, W), retain_graph=i < 2), expected)
        assert runs.count == 2 + i
    with pytest.raises(RuntimeError, match="second time"):
        grad(out, (X, W))
    runs = Runs(two)
    out, expected = remat(runs)(X, W), two(X, W)
    assert_same([grad(each, (X, W)) for each in out], [grad(each, (X, W)) for each in expected])
    assert runs.count == 3
    x, w = rand(N, N), rand(N, N, seed=1)
    out = saving(lambda x, w, c: mm_chain(x * c, w))(x, w, torch.ones_like(x).detach())
    for retain in (True, False):  # the last pass alone releases what is saved
        assert count_ops(lambda keep=retain: grad(out, (x, w), retain_graph=keep))["aten.mm"] == 6
    assert [count_ops(lambda out=out: grad(out, (x, w)))["aten.mm"] for out in saving(two)(x, w)] == [2, 6]
    c, sparse = torch.eye(N, dtype=x.dtype).to_sparse().requires_grad_(), lambda c: mm_chain(torch.sparse.mm(c, w), x)
    assert_same(*[grad(wrap(sparse)(c), (w, c))[1].to_dense() for wrap in (saving, plain)])
    chain = saving(lambda x, w, c: repeated(lambda x: (x @ w).tanh(), 8)(x * c))
    assert peak_bytes(lambda: grad(chain(x, w, torch.ones_like(x).detach()), (x, w))) < 14 * KB  # not all products


def test_two_passes_in_a_group_can_read_what_a_policy_saves() -> None:
    """Both need the product. Other values can't be read by both."""
    runs = Runs(lambda x, w: ((h := x @ w).sin().exp(), h.cos().exp()))
    first, second = saving(runs)(X, W)
    with GraphExecGroup():
        found = grad(first, X, retain_graph=True), grad(second, X, retain_graph=True)
        assert runs.count == 2
        with pytest.raises(RematError, match="need the same value"):
            grad(first, X)
    assert_same(found, tuple(grad(out, X, retain_graph=True) for out in runs.fn(X, W)))


def test_a_batched_pass_recomputes_once() -> None:
    """It forbids random numbers, but the recompute is not a part of it."""
    runs, rows = Runs(lambda x, w: F.dropout(mm_chain(x, w), 0.5).sin()), torch.eye(16).double().view(16, 4, 4)
    batched = lambda fn: torch.autograd.grad(fn(X, W), (X, W), rows, is_grads_batched=True)
    assert_same_results(batched, remat(runs), runs.fn)
    assert runs.count == 2
    mapped = lambda fn: torch.vmap(torch.func.grad(lambda x: fn(x, W.detach()).sum()), randomness="same")(X.detach())
    assert_same_results(mapped, remat(runs), runs.fn, exact=False)


def without_graph(wrap: Wrap, x: Tensor, w: Tensor) -> Tensor:
    (g,) = torch.autograd.grad((x @ w).sin().sum(), x)
    return (g * x).exp().sin() @ w


def of_an_inner_leaf(wrap: Wrap, x: Tensor, w: Tensor) -> Tensor:
    z = x.detach().requires_grad_()
    (z @ w.detach()).sin().sum().backward()
    return (x * z.grad).sin().exp()


def of_leaves(wrap: Wrap, x: Tensor, w: Tensor) -> Tensor:
    """Gradients are accumulated once: before the backward of the region they are what they are without remat."""
    (x @ w).sin().sum().backward(retain_graph=True)
    return (x @ w).cos().exp()


def through_regions(wrap: Wrap, x: Tensor, w: Tensor) -> Tensor:
    inner = wrap(mm_chain)
    for _ in range(2):
        h = inner(x, w)
        (g,) = torch.autograd.grad(h.sum(), x, create_graph=True)
        x = x - 0.1 * g * h
    return inner(w, x)


def of_a_captured_leaf(wrap: Wrap, x: Tensor, w: Tensor) -> Tensor:
    """A recompute reads the gradient that was cleared, and accumulates no other."""

    def step(x: Tensor) -> Tensor:
        (w * w).sum().backward()  # reads an input only
        scale, w.grad = w.grad.clone(), None
        return (x @ scale @ w).sin()

    return wrap(step)(x)


def in_inner_regions(wrap: Wrap, x: Tensor, w: Tensor) -> Tensor:
    inner = wrap(lambda x: without_graph(wrap, x, w))
    return wrap(lambda x: inner(x.sin()).cos())(x.exp())


INSIDE = [in_inner_regions, without_graph, of_an_inner_leaf, of_leaves, through_regions, of_a_captured_leaf]


@pytest.mark.parametrize("wrap", [remat, owning, saving], ids=["remat", "owning", "saving"])
@pytest.mark.parametrize("around", [False, True], ids=["one region", "a region around"])
@pytest.mark.parametrize("fn", INSIDE, ids=lambda fn: fn.__name__)
def test_a_backward_pass_inside_a_region(fn: Callable, around: bool, wrap: Wrap) -> None:
    def program(wrap: Wrap) -> Any:
        x, w = rand(3, 3), rand(3, 3, seed=1)
        region = wrap(lambda x, _: fn(wrap, x, w))
        region = wrap(lambda x, _, inner=region: inner(x, w).cos()) if around else region
        out = region(x, w)
        before, w.grad = [None if t.grad is None else t.grad.clone() for t in (x, w)], torch.ones_like(w)
        return before, grad(out, (x, w), allow_unused=True), x.grad, w.grad

    assert_same(program(wrap), program(plain))


def test_a_backward_pass_inside_recomputes_no_more_than_its_part() -> None:
    """The first run is not over, so the recompute ends where that is, and is not part of the log of operations."""

    class Counted:
        by: OpCounter  # what a class has, a recompute doesn't restore

    def f(x: Tensor) -> Tensor:
        h = (x @ W).sin()
        (g,) = torch.autograd.grad((h * x.exp()).cos().sum(), x, create_graph=True)
        seen.append(Counted.by["aten.mm"])
        return g * h.tanh() @ W

    seen, log = list[int](), remat(f, debug=True)
    for x, region, products in ((X, log, 3), (X + 1, log, 3), (X + 1, owning(f), 2)):
        with OpCounter() as Counted.by:
            out = region(x)
        assert seen[-1] == products  # of the first run, of a recompute if values are missing, and of the gradient
        assert_same(grad(out, (X, W)), grad(f(x), (X, W)))
        assert held_bytes(region, x) == x.nbytes


class ReadsTwice(torch.autograd.Function):
    """Reads its saved tensors twice in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, _ = ctx.saved_tensors
        _, w = ctx.saved_tensors
        return g * w, g * x


@pytest.mark.parametrize("passes", [1, 3])
def test_a_node_that_reads_its_saved_tensors_twice(passes: int) -> None:
    runs = Runs(lambda x, w: ReadsTwice.apply(x.sin(), ReadsTwice.apply((x @ w).cos(), w.sin())).exp())
    out, expected = remat(runs)(X, W), grad(runs.fn(X, W), (X, W))
    node = out.grad_fn.next_functions[0][0]
    for i in range(passes):
        assert_same(grad(out, (X, W), retain_graph=i + 1 < passes), expected)
    assert runs.count == 1 + passes
    with pytest.raises(RuntimeError, match="after they have already been freed"):
        _ = node.saved_tensors


def test_reading_a_saved_tensor_outside_of_a_pass_keeps_nothing() -> None:
    x, w, fn = rand(N, N), rand(N, N, seed=1), lambda x, w: (x @ w).exp().sin()
    with gc_disabled(), PeakMemory() as memory:
        out = remat(fn)(x, w)
        held = memory.live
        for _ in range(2):
            value = out.grad_fn._saved_self
            assert memory.live == held + KB and torch.equal(value, (x @ w).exp())
            del value
            assert memory.live == held
    assert_same(grad(out, (x, w)), grad(fn(x, w), (x, w)))
    out = saving(fn)(x, w)
    assert out.grad_fn._saved_self is not None and count_ops(lambda: grad(out, (x, w)))["aten.mm"] == 2


class CosineForSine(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return (torch.cos if func is Tensor.sin else func)(*args, **(kwargs or {}))


def with_a_mode(x: Tensor, w: Tensor) -> Tensor:
    with CosineForSine():
        return (x.sin() @ w).exp() * torch.rand(4, dtype=x.dtype)


def under_a_transform(out: Tensor, x: Tensor) -> Tensor:
    """A transform that the region is no part of."""
    cotangent = torch.ones_like(out)
    return torch.func.grad(lambda y: (torch.autograd.grad(out, x, cotangent)[0] * y).sum())(torch.ones_like(x))


def under(context: Callable) -> Callable[[Tensor, Tensor], Tensor]:
    def backward(out: Tensor, x: Tensor) -> Tensor:
        loss = out.sum()
        with context():
            return torch.autograd.grad(loss, x)[0]

    return backward


BACKWARDS = {
    "no_grad": under(torch.no_grad),
    "inference mode": under(torch.inference_mode),
    "no torch functions": under(torch._C.DisableTorchFunction),
    "a dispatch mode": under(OpCounter),
    "a transform": under_a_transform,
}


@pytest.mark.parametrize("policy", [None, policies.save_matmuls], ids=str)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", BACKWARDS)
def test_what_is_around_a_backward_has_no_effect_on_a_recompute(name: str, nested: bool, policy: Any) -> None:
    def program(wrap: Wrap) -> Tensor:
        inner = wrap(with_a_mode)
        fn = wrap(lambda x, w: inner(x, w).sin()) if nested else inner
        found = BACKWARDS[name](fn(X, W), X)
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        return found.clone()

    assert_same_results(program, remat(policy=policy), plain)


def test_a_recompute_uses_the_derivatives_of_a_forward_under_a_dispatch_mode() -> None:
    """The derivative of `prod` uses other operations under a mode."""
    fn = lambda x: torch.autograd.grad(x.prod(0).sum(), x, create_graph=True)[0].sin()
    results = []
    for region in (remat(fn), fn):
        x = rand(3, 3)
        with OpCounter():
            out = region(x)
        results.append(grad(out, x))
    assert_same(*results)


def test_forward_and_backward_in_different_threads() -> None:
    """Each thread numbers its own nodes, so the numbers don't tell which of two threads' nodes is older."""

    def program(wrap: Wrap, forward: Callable, backward: Callable) -> Any:
        h = (X @ W).sin()
        out = forward(lambda: wrap(lambda w: (h @ w).exp() * h)(W))
        return backward(lambda: grad(out, (X, W)))

    here, there = lambda job: job(), lambda job: in_threads(job)[0]
    for threads in ((here, there), (there, here)):
        assert_same(program(remat, *threads), program(plain, here, here))


def test_a_derivative_inside_of_torchs_checkpoint_is_recomputed_in_another_thread() -> None:
    x = (X * 1).sin()
    region = remat(lambda x: torch.autograd.grad(x.square().sin().sum(), x, create_graph=True)[0])
    out = torch.utils.checkpoint.checkpoint(region, x, use_reentrant=False)
    assert_same(in_threads(lambda: grad(out, x))[0], grad(region(x), x))


@pytest.mark.parametrize("shared", [False, True], ids=["graphs of their own", "one graph"])
def test_passes_in_several_threads_at_once(shared: bool) -> None:
    expected = grad(mm_chain(X, W), (X, W))
    for _ in range(5):
        out = remat(mm_chain)(X, W)
        fresh = lambda: out if shared else remat(mm_chain)(X, W)
        job = lambda: [grad(fresh(), (X, W), retain_graph=True) for _ in range(5)]
        assert_same(in_threads(job, job, job), [[expected] * 5] * 3)


@pytest.mark.parametrize("inside", [False, True], ids=["", "a backward inside"])
def test_a_tensor_that_autograd_saves_before_it_is_filled(inside: bool) -> None:
    def fn(x: Tensor) -> Tensor:
        y = F.rrelu(x * 1.5, training=True)
        if inside:
            y = (y * torch.autograd.grad(y.sum(), x, create_graph=True)[0]).exp()
            ends.append(is_recomputing())
        return y

    def grads(wrap: Callable) -> Tensor:
        torch.manual_seed(0)
        x = rand(100).requires_grad_()
        out = wrap(fn)(x)
        junk = [torch.full((100,), 7.0, dtype=x.dtype) for _ in range(20)]
        assert ends == deque([False] * inside)  # a recompute comes no further than the first run
        return grad(out, x)[0] + 0 * len(junk)

    ends = deque[bool](maxlen=1)
    assert torch.equal(grads(plain), grads(remat))


def test_a_recompute_to_the_end_may_save_no_more_tensors() -> None:
    fn = lambda x: F.rrelu(x * 1.5, training=True).exp() if is_recomputing() else F.rrelu(x * 1.5, training=True)
    x = rand(100).requires_grad_()
    with pytest.raises(RecomputeMismatchError, match="and one more in the recompute"):
        grad(remat(fn)(x), x)


derive = partial(torch.autograd.grad, create_graph=True)
INSIDE: dict[str, tuple[Callable, bool]] = {  # of `h`, which was computed from `w`; whether the pass goes on behind it
    "the input and its own input": (lambda h, w: derive((h * w).sin().sum(), (h, w)), True),
    "only what it was computed from": (lambda h, w: derive((h * w).sin().sum(), w), True),
    "the input": (lambda h, w: derive((h * w).sin().sum(), h), False),
    "no path to the input": (lambda h, w: derive(w.sin().sum(), w), False),
    "detached": (lambda h, w: derive((h.detach() * w).sin().sum(), w), False),
}


BY: dict[str, Callable[[Callable], Callable]] = {
    "autograd": lambda loss: lambda w: torch.autograd.grad(loss(w), w),
    "grad": torch.func.grad,
    "vmap(grad)": lambda loss: lambda w: torch.func.vmap(torch.func.grad(loss))(w.detach()[None]),
    "jvp(grad)": lambda loss: lambda w: torch.func.jvp(torch.func.grad(loss), (w,), (w,)),
}


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("name", INSIDE)
def test_a_backward_pass_inside_a_region_may_not_go_on_behind_an_input(name: str, by: str) -> None:
    take, refused = INSIDE[name]

    def program(wrap: Wrap) -> Any:
        fn = wrap(lambda h, w: (h * sum(take(h, w))).sin())
        return BY[by](lambda w: fn(w.exp(), w).sum())(rand(4))

    if refused:
        with pytest.raises(RematError, match=r"goes on behind argument h, .* Compute it inside of the region"):
            program(remat)
    else:
        assert_same(program(remat), program(plain))


PASSES: dict[str, Callable] = {  # of `h`, through other graphs than those of `BY`
    "the input itself": lambda wrap, h, w: wrap(lambda h, w: h * derive([h, w.sum()], w, [w, w.sum()])[0])(h, w),
    "a region inside": lambda wrap, h, w: wrap(
        lambda h, w: wrap(lambda x, w: (x * derive((x * w).sin().sum(), w)[0]).sin())(h * 2, w)
    )(h, w),
}


@pytest.mark.parametrize("by", list(BY)[1:])
@pytest.mark.parametrize("name", PASSES)
def test_a_backward_pass_inside_a_region_is_refused_also_behind(name: str, by: str) -> None:
    with pytest.raises(RematError, match="goes on behind argument"):
        BY[by](lambda w: PASSES[name](remat, w.exp(), w).sum())(rand(4))


@pytest.mark.parametrize("by", [torch.func.grad, BY["autograd"]])
def test_a_backward_pass_inside_a_region_ends_at_the_inputs_of_its_level(by: Callable) -> None:
    fn = lambda h, w: (h * derive((h * w).sin().sum(), w)[0]).sin().sum()

    def program(wrap: Wrap) -> Any:
        loss = lambda w: sum(g.sin().sum() for g in torch.func.grad(wrap(fn), argnums=(0, 1))(w.exp(), w))
        return by(loss)(rand(4).requires_grad_(by is not torch.func.grad))

    assert_same(program(remat), program(plain))
