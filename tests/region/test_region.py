"""One call of a rematerialized function: its results, the state that it leaves, abandoned first runs, plain calls."""

import logging
import random
import re
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as fwAD
from cases import Wrap, assert_same, assert_same_results, in_threads, plain, rand, total
from side_by_side import Runs
from surroundings import assert_as_before, surroundings
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

from benchmarks.measure import PeakMemory, count_ops, gc_disabled, held_bytes
from remat import MutationError, RecomputeMismatchError, disable_remat, is_recomputing, policies, remat, saved_residuals
from remat.compat import checkpoint
from remat.errors import RematError
from remat.nn import apply

STRUCTURE = "The region returned a different structure in the recompute: output was "
SAME = " A region's function must return the same structure in each run: look for a branch on Python state that changed"
RESULTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Any], str]] = {
    "a list": (lambda y: y, lambda y: [y, y], f"{STRUCTURE}a single value and is now a list of 2.{SAME}"),
    "a dtype": (
        lambda y: {"logits": [y, y * 2]}, lambda y: {"logits": [y, y.bfloat16()]},
        "output['logits'][1] was float64[3] in the region's forward and bfloat16[3] in the recompute. A region's",
    ),
    "a shape": (
        lambda y: [y, torch.ones(())], lambda y: [y, torch.ones(2)],
        "output[1] was float32[] in the region's forward and float32[2] in the recompute",
    ),
    "a number": (
        lambda y: [y, y * 2], lambda y: [y, 3.0],
        "output[1] was a new tensor in the region's forward and not a tensor in the recompute. A region's function",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_that_differs_is_named(name: str) -> None:
    """In plain autograd only the structure is compared: other results are seen by what autograd saves."""
    first, again, message = RESULTS[name]
    fn = lambda x: (again if is_recomputing() else first)(x.expand(3).sin().exp())
    region = remat(fn, early_stop=False)
    second = lambda region: torch.func.vmap(torch.func.grad(torch.func.grad(lambda x: total(region(x)))))
    transforms: list[Callable] = [second(region)]
    if name != "a number":  # which has no derivative
        second(remat(fn, determinism_check="none"))(rand(3))
    if message.startswith(STRUCTURE):
        transforms.append(lambda x: total(region(x)).backward())
        total(remat(fn, early_stop=False, determinism_check="none")(rand(3))).backward()
    for transform in transforms:
        with pytest.raises(RecomputeMismatchError) as raised:
            transform(rand(3))
        assert str(raised.value).startswith(message)
        assert str(raised.value).partition("\nThe region is ")[2].startswith(f"<lambda> called at {__file__}:")


@pytest.mark.parametrize("debug", [False, True])
def test_an_error_in_nested_regions_names_the_inner_one_once(debug: bool) -> None:
    inner = remat(lambda h: h.add_(1).sin(), debug=debug)
    with pytest.raises(MutationError) as raised:
        remat(lambda x: inner(x * 1).exp().sin(), debug=debug)(rand(3))
    assert (raised.traceback[-1].path.name == "guards.py") is debug  # else without frames of the package
    _, *regions = str(raised.value).split("\nThe region is ")
    assert regions == [f"{raised.value.region}."]


def test_a_result_that_is_no_tensor_is_not_kept_for_the_backward() -> None:
    returned: list[weakref.ref] = []

    def fn(x: Tensor) -> Tensor:
        y, other = remat(lambda x: (x.sin().exp(), nn.Identity()))(x)
        returned.append(weakref.ref(other))
        return y

    out, pull = torch.func.vjp(fn, rand(3, grad=False))
    assert returned[0]() is None
    assert_same(pull(out), torch.func.vjp(lambda x: x.sin().exp(), rand(3, grad=False))[1](out))


MODULE = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.BatchNorm1d(3, affine=False))


class Fails:
    """A function that fails once: in its first run if `at` is 0, in a recompute if `at` is 1."""

    def __init__(self, error: type[BaseException], at: int) -> None:
        self.error, self.at, self.failed = error, at, deque[bool]()  # which isn't restored
        self.module, self.w = MODULE, torch.ones(3)

    def __call__(self, x: Tensor) -> Tensor:
        y = nn.functional.dropout(self.module[0](x * self.w).sin(), 0.5) * random.random() * float(np.random.rand())
        if is_recomputing() != self.at or self.failed or self.error is MutationError:
            return y.exp().cos()
        self.failed.append(True)
        if self.error is RecomputeMismatchError:
            return y.double().exp().cos()
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            raise self.error


# Each calls a function, and returns what then differentiates it.


def by_autograd(f: Callable, x: Tensor) -> Callable:
    loss = f(x.requires_grad_()).sum()
    return lambda: torch.autograd.grad(loss, x, retain_graph=True)


def with_hooks_around(f: Callable, x: Tensor) -> Callable:
    with save_on_cpu():
        return by_autograd(f, x)


def nested(f: Callable, x: Tensor) -> Callable:
    return by_autograd(remat(lambda x: f(x.sin()).sin()), x)


def under_settings(f: Callable, x: Tensor) -> Callable:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("cpu"):
        differentiate = by_autograd(f, x)

    def backward() -> Any:
        with torch.device("cpu"), torch.no_grad(), disable_saved_tensors_hooks("by the user"):
            return differentiate()

    return backward


def vjp(f: Callable, x: Tensor) -> Callable:
    out, pull = torch.func.vjp(f, x)
    return lambda: pull(torch.ones_like(out))


def per_sample(f: Callable, x: Tensor) -> Callable:
    grad = torch.func.grad(lambda row: f(row).sum())
    return lambda: torch.vmap(grad, randomness="different")(x)


WAYS = [by_autograd, with_hooks_around, nested, under_settings, vjp, per_sample]
FAILURES = [
    *((error, at) for error in (KeyError, KeyboardInterrupt, StopIteration) for at in (0, 1)),
    *((MutationError, 1), (RecomputeMismatchError, 1)),
]


@pytest.mark.parametrize("thread", [False, True], ids=["here", "in another thread"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("error, at", FAILURES)
def test_an_error_leaves_all_state_as_it_was_and_the_region_can_run_again(error, at, way: Callable, thread: bool):
    f, x = Fails(error, at), torch.randn(2, 3)
    at_once = at == 0 or way is per_sample
    run = (lambda: way(remat(f), x)()) if at_once else way(remat(f), x)
    if error is MutationError:
        if at_once:
            return  # nothing can change between the runs
        f.w.add_(1)

    def fail() -> None:
        before = surroundings(MODULE)
        with pytest.raises(error) as raised:
            run()
        notes = getattr(raised.value, "__notes__", [])
        assert len(notes) == len({*notes}) and bool(notes) >= (at == 1 and error in (KeyError, StopIteration))
        assert_as_before(before, MODULE, drawn=at_once)  # what a first run drew stays drawn, as without remat

    here = surroundings(MODULE)
    in_threads(fail) if thread else fail()
    assert bool(f.failed) == (error is not MutationError)
    assert_as_before(here, MODULE, drawn=at_once)
    if way is by_autograd and at and error is not MutationError:
        assert all(t.isfinite().all() for t in run())
    assert_same_results(lambda fn: way(fn, x.clone())(), remat(f), f)


def a_level(x: Tensor) -> Tensor:
    with fwAD.dual_level():
        p = fwAD.make_dual(x * 1, x.cos())
        return fwAD.unpack_dual(torch.autograd.grad(p.sin().sum(), p, create_graph=True)[0]).tangent * 1


def raises_again(x: Tensor) -> Tensor:
    try:
        return torch.func.grad(lambda y: (y.sin() * x).sum())(x)
    except RuntimeError as error:
        raise RuntimeError(f"in a layer: {error}") from None


TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "grad": lambda x: torch.func.grad(lambda y: (y.sin() * x).sum())(x).exp() * x,
    "grad of a detached value": lambda x: torch.func.grad(lambda y: (y.sin() * x).sum())(x.detach()).exp(),
    "vjp": lambda x: torch.func.vjp(torch.sin, x.exp())[1](x)[0] * x,
    "hessian": lambda x: torch.func.hessian(lambda y: (y * x).sin().sum())(x).sum(0).exp(),
    "jvp": lambda x: torch.func.jvp(torch.sin, (x.exp(),), (x,))[1].sin(),
    "a level": a_level,
    "an error that is raised again": raises_again,
}


@pytest.mark.parametrize("policy", [None, policies.save_ops("aten.sin")], ids=str)
@pytest.mark.parametrize("transform, outer", [*product(TRANSFORMS, [False]), *product([*TRANSFORMS][:4], [True])])
@pytest.mark.filterwarnings("ignore:The policy", "ignore:debug=True compares")
def test_a_region_that_calls_a_transform_starts_again_as_if_it_had_not_run(transform: str, outer: bool, policy: Any):
    """These refuse saved-tensor hooks, so the first attempt is abandoned: it drew, counted and stored."""

    def run(wrap: Wrap) -> Any:
        n, x, c, g = torch.zeros(()), rand(3), rand(3, grad=False), torch.Generator().manual_seed(1)
        counts = [torch.zeros(()), torch.zeros(())]  # arguments, which an outer region captures
        earlier = (x * c).sum()  # its graph needs `c` as it is
        norm = nn.BatchNorm1d(3, affine=False).double()

        def fn(x: Tensor, count: Tensor) -> Tensor:
            n.add_(1)
            norm.steps = getattr(norm, "steps", 0) + 1
            y = norm(x.expand(2, 3) * torch.rand(2, 3))[0] + c * torch.rand(3, generator=g)
            y = y + x * torch.rand(3) * n.clone() * count.add_(1).clone() * random.random()
            return TRANSFORMS[transform](y) * norm.steps

        region = wrap(fn)
        around = lambda x, i, inner=region: inner(x.sin(), counts[i]).sin()
        region = region if not outer else around if wrap is plain else remat(around, debug=True)
        # The second call uses what the first one recorded.
        outs = [region(x, i if outer else count) for i, count in enumerate(counts)]
        after = [t.clone() for t in (n, *counts, *norm.buffers())], norm.steps, torch.rand(3), random.random()
        grads = [torch.autograd.grad(out.sum(), x) for out in (*outs, earlier)]
        return outs, after, grads, n, counts, torch.rand(3, generator=g), [*norm.buffers()], norm.steps

    assert_same_results(run, remat(policy=policy), plain, exact=False)


@pytest.mark.filterwarnings("ignore:The policy", "ignore:A region with a policy is inside")
def test_a_region_that_starts_again_repeats_no_verdicts_of_the_abandoned_run() -> None:
    asked = deque[bool]()  # which isn't restored
    first, second = map(remat(policy=lambda *_, **__: bool(asked.append(is_recomputing()))), (torch.sin, torch.exp))
    region = remat(lambda x: second(torch.func.grad(lambda x: first(x).sum())(first(x))))
    torch.func.grad(lambda x: region(x).sum())(rand(3, grad=False))
    assert len(asked) > 3 and not any(asked)


def test_an_outer_region_forgets_an_inner_recompute_that_starts_again() -> None:
    """It compares a step of a norm, which the recompute of the outer region skips."""
    norm = lambda x: nn.functional.rms_norm(x, (4,))
    inner = remat(norm, policy=policies.everything_saveable)
    middle = remat(lambda x: inner(x).sin(), determinism_check="values")
    outer, x = remat(lambda x: middle(x) * C, policy=policies.save_ops("aten.mul")), rand(4)
    grads = [torch.func.grad(lambda x: total(f(x)))(x) for f in (outer, lambda x: norm(x).sin() * C)]
    assert_same(*(torch.autograd.grad(total(g), x) for g in grads), exact=False)


def test_a_recompute_waits_for_another_until_that_runs_a_backward_pass() -> None:
    """The backward pass may need the thread that waits, as for the nodes of another device."""
    waits, ended, in_time = threading.Event(), threading.Event(), []

    def slow(x: Tensor) -> Tensor:
        if is_recomputing():
            in_time.append(waits.set() or not ended.wait(0.1))
            y = x.detach().requires_grad_()
            y.register_hook(lambda g: in_time.append(ended.wait(10)))
            y.sum().backward()  # saves nothing
        return x.sin().exp()

    def other() -> None:
        waits.wait(10)
        by_autograd(remat(lambda x: x.sin().exp()), rand(3))()
        ended.set()

    thread, pull = threading.Thread(target=other), by_autograd(remat(slow), rand(3))
    thread.start()
    pull()
    thread.join()
    assert in_time == [True, True]


class Stores(nn.Module):
    """As feature extractors do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.list = nn.Linear(32, 32), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.layer(x).tanh()
        self.list[:] = [self.seen.exp().mean()]
        self.unused = self.seen.sin().exp()  # its history must not lead to the one of the step before
        return self.seen.sin()


def test_stored_activations_have_their_derivatives_and_do_not_accumulate() -> None:
    def step(region: Callable) -> Any:
        total = sum(region(x).sum() + module.seen.mean() + module.list[0] for _ in range(2))
        return torch.autograd.grad(total, [x, *module.parameters()])

    module, x, live = Stores(), rand(64, 32, dtype=torch.float32), []
    region, expected = remat(module), step(module)
    with gc_disabled(), PeakMemory() as memory:
        for _ in range(6):
            assert_same(step(region), expected)
            live.append(memory.live)
    assert live[-1] == live[2]


def test_expanded_weights_are_refused() -> None:
    """They are a module's own way of computing per-sample gradients."""
    with pytest.raises(RuntimeError, match="Expanded Weights") as raised:
        call_for_per_sample_grads(nn.Sequential(remat(nn.Linear(4, 4))))(torch.ones(2, 4)).sum().backward()
    assert "`vmap(grad(loss))`" in raised.value.__notes__[0]


def test_a_hook_on_what_requires_grad_in_the_recompute_only_is_refused() -> None:
    """Plain autograd follows `scale`, and no transform does, so that it requires no grad at their levels."""

    def program(wrap: Wrap) -> Tensor:
        def scaled(x: Tensor, scale: Tensor) -> Tensor:
            if scale.requires_grad:
                scale.register_hook(lambda g: 1.5 * g)
            return x * scale

        region, w, v = wrap(scaled), rand(3), rand(3, seed=1, grad=False)

        def loss(x: Tensor) -> Tensor:
            scale = w * 1
            return torch.func.grad(lambda x: region(x, scale).sin().sum())(x)

        return torch.autograd.grad(torch.func.vjp(loss, v)[1](v)[0].sum(), w)[0]

    program(plain)
    with pytest.raises(RematError, match="registers a hook in its recompute"):
        program(remat)


def test_an_inner_region_saves_nothing_that_the_outer_one_has_made() -> None:
    def outer(x: Tensor) -> Tensor:
        module.constant = x.detach().exp()
        out = inner(x.sin())
        del module.constant
        return out

    module, x = nn.Module(), rand(64, 64)
    inner = remat(lambda y: (y * module.constant).sin().exp())
    assert held_bytes(remat(outer), x) == x.nbytes
    weight, long = nn.Parameter(torch.ones(64)), torch.ones(2**18 + 1)
    region = remat(lambda x: (x * weight * long[0]).exp())
    assert count_ops(by_autograd(region, x))["aten.clone"] == 0  # nor copies parameters, nor long vectors
    assert held_bytes(remat(lambda x: (x[:, :4] * C).sum()), x) == 8  # the copy of a constant ends with the first run
    assert "weight" in str([row.source for row in saved_residuals(region, x, inputs=True)])  # it is listed all the same
    module.mask = nn.Buffer(rand(64, 64, grad=False))
    assert count_ops(remat(lambda x: (x * module.mask).exp()), x)["aten.equal"] == 0  # nor compares large buffers


def test_a_region_keeps_no_casts() -> None:
    layer, x = MODULE[0], torch.ones(2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        casts = [f(x).grad_fn.next_functions[0][0] for f in (layer, layer, remat(layer), layer, layer)]
    assert casts[0] is casts[1] is not casts[2] is not casts[3] is casts[4]


def test_under_disable_remat_regions_are_plain_calls() -> None:
    runs, x = Runs(lambda x: x.sin().exp().cos()), rand(3)
    region, expected = remat(runs), torch.func.grad(lambda x: runs.fn(x).sum())(x)
    with disable_remat():
        with disable_remat():
            pass
        assert_same(by_autograd(region, x)(), (expected,))
        assert_same(torch.vmap(torch.func.grad(region))(x), expected)
    assert_same(by_autograd(disable_remat()(region), x)(), (expected,))
    assert runs.count == 3
    loss = region(x).sum()
    with pytest.raises(KeyError), disable_remat():  # regions that ran before are recomputed
        loss.backward()
        raise KeyError
    by_autograd(remat(lambda x: disable_remat()(region)(x) * region(x)), x)()
    assert runs.count == 3 + 2 + 5


def generator(x: Tensor) -> Iterator[Tensor]:
    yield x.sin()


async def coroutine(x: Tensor) -> Tensor:
    return x.sin()


async def async_generator(x: Tensor) -> AsyncIterator[Tensor]:
    yield x.sin()


class Generating(nn.Module):
    def forward(self, x: Tensor) -> Iterator[Tensor]:
        yield x.sin()


CALLED = type("Called", (), {"__call__": generator})
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: remat(partial(generator)), "partial is a generator function. Apply remat to a function"),
    (lambda: remat(Generating()), "Generating is a generator function. Apply remat to a function that it calls."),
    (lambda: remat(CALLED()), "Called is a generator function. Apply remat to a function that it calls."),
    (lambda: remat(coroutine), "coroutine is an async function. Apply remat to a function that it calls."),
    (lambda: remat(async_generator), "async_generator is an async generator function"),
    (lambda: checkpoint(generator, rand(3), use_reentrant=False), "generator is a generator function"),
    (lambda: apply(nn.Sequential(Generating()), Generating), "Generating is a generator function"),
    (lambda: remat(lambda x: generator(x))(rand(3)), "<lambda> returned a generator, whose body would run outside"),
    (lambda: torch.func.vjp(remat(lambda x: generator(x)), rand(3, grad=False)), "returned a generator"),
    (lambda: remat(generator), "remat takes functions that have computed their result when they return, but g"),
    (lambda: torch.vmap(remat(lambda x, kept: (kept.append(x), x)[1]))(rand(3, grad=False), []), "changes a list, a"),
    (lambda: torch.func.jvp(remat(lambda x: x.t_().sin()), (W.detach(),), (W.detach(),)), "changes the shape or st"),
]


@pytest.mark.parametrize("call, message", REFUSED, ids=[message for _, message in REFUSED])
def test_functions_that_a_region_can_not_run_are_refused(call: Callable, message: str) -> None:
    error = MutationError if message.startswith("changes") else TypeError
    with pytest.raises(error, match=re.escape(message)) as raised:
        call()
    assert len(str(raised.value).partition("\nThe region is")[0]) < 350


W, C = rand(4, 4), rand(4, grad=False)


@pytest.mark.parametrize(
    "differentiate", [lambda f, x: f(x).sum().backward(), lambda f, x: torch.vmap(torch.func.grad(f))(x.detach())]
)
def test_each_region_says_once_what_it_saves(differentiate: Callable, caplog: pytest.LogCaptureFixture) -> None:
    inner = remat(lambda y: y.sin() * C)  # the outer region packs what it captures
    region = remat(lambda x: inner(torch.tanh(x @ W)).exp().sum(), policy=[torch.ops.aten.mm])
    differentiate(region, rand(2, 4))
    assert not caplog.records and "policy=policies.save_ops(torch.ops.aten.mm)" in repr(region)
    with caplog.at_level(logging.DEBUG, "remat"):
        differentiate(region, rand(2, 4))
        remat(lambda: torch.ones(2))()
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 3 and all(record.name == "remat" for record in caplog.records)
    assert "argument y float64[" in texts[0] and "values, 0 B: none" in texts[0]
    assert "<lambda> called at" in texts[1] and "argument x float64[" in texts[1] and "aten.mm.default at" in texts[1]
    assert "captured global 'W' float64[4, 4]" in texts[1] and texts[2].endswith("0 B: none; and values, 0 B: none")


@pytest.mark.parametrize("is_leaf", [False, True])
def test_a_region_in_torchs_checkpoint_in_a_region_that_differentiates(is_leaf: bool) -> None:
    x, w = rand(4, 4), rand(4, 4, seed=1)
    captured = w if is_leaf else w * 2  # the recompute of the outer region makes another kind of tensor of it

    def step(x: Tensor, wrap: Wrap) -> Tensor:
        inner = wrap(lambda z: (x @ z).sin() @ (captured if is_leaf else captured.detach()).cos())
        h = torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)
        return h - 0.1 * torch.func.grad(lambda h: h.sin().square().sum())(h)

    found = remat(step)(x, remat(policy=policies.save_matmuls))
    assert_same(*(torch.autograd.grad(total(out), x, create_graph=True) for out in (found, step(x, plain))))
