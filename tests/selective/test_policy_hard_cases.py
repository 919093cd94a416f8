"""Programs that are easy to get wrong with a policy: each compared with the function without remat."""

from __future__ import annotations

import collections
import functools
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from cases import rand, total
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, jvp
from torch.nn import functional as F
from torch.profiler import record_function
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from benchmarks.measure import OpCounter, count_ops, gc_disabled, held_bytes, leaked_bytes, peak_bytes
from remat import MutationError, RecomputeMismatchError, checkpoint_name, is_recomputing, policies, remat

aten = torch.ops.aten
COMPLEX, MATRIX = rand(4, 4, dtype=torch.complex128, grad=False), rand(4, 4, seed=5, grad=False)


def some(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    """About half of the operations, the same ones in each run."""
    shapes = [tuple(t.shape) for t in args if isinstance(t, Tensor) and not t.is_nested]
    return zlib.crc32(f"{op}{shapes}3".encode()) % 2 == 0


POLICIES = {
    "everything": policies.everything_saveable,
    "matmuls": policies.save_matmuls,
    "names": policies.save_only_these_names("h"),
    "all but sines": ~policies.save_ops("aten.sin"),
    "in place": policies.save_ops("aten.mul_", "aten.bitwise_and_", "aten.relu_", "aten.rrelu_with_noise"),
    "products": policies.save_ops("aten.mul", "aten.mm"),
    "odd": ["aten.empty_like", "aten.lift_fresh", "aten.bernoulli_", "aten.native_dropout"],
    "some": some,
    "offloaded": policies.offload(policies.save_matmuls),
}


@torch.library.custom_op("remat_tests::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    """Draws random numbers, but has no tag that says so."""
    return x + torch.randn_like(x)


noise.register_autograd(lambda ctx, g: g)


def conjugate_named(z: Tensor) -> Tensor:
    h = z.exp()
    checkpoint_name(h.conj(), "h")
    return (h * 2).sin().abs()


def imaginary_part_named(z: Tensor) -> Tensor:
    h = z.exp()
    checkpoint_name(h.conj().imag, "h")
    return (h * 2).sin().abs()


def in_place_through_a_conjugate(z: Tensor) -> Tensor:
    h = z @ COMPLEX
    g = h * 1
    h.conj().mul_(2 + 1j)
    return (g.sin() * h.sin()).abs()


def in_place_through_the_real_part(z: Tensor) -> Tensor:
    h = z @ COMPLEX
    g = h * 1
    h.real.mul_(2.5)
    return (g.sin() * h.sin()).abs()


def in_place_through_another_dtype(x: Tensor) -> Tensor:
    h = x @ MATRIX
    h.detach().view(torch.int64).bitwise_and_(-2)
    return (checkpoint_name(h, "h") * 1).sin()


def in_place_chain(x: Tensor) -> Tensor:
    h = x @ MATRIX
    h += x
    h = checkpoint_name(F.relu_(h), "h").clone()
    h[0] = h[1] * 2
    return h.sin() @ MATRIX


def residual_stream_in_place(x: Tensor) -> Tensor:
    h = x * 1
    for _ in range(3):
        h += checkpoint_name((h * 2) @ MATRIX, "h")
    return h.sin()


def through_numpy(read: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    h = checkpoint_name(x.sin(), "h")
    return ((h * 2).exp() * read((x * 3).abs())).sin()


def constants(x: Tensor) -> Tensor:
    a, b = torch.tensor([2.0, 3, 4, 5]).double(), torch.tensor([5.0, 7, 1, 1]).double()
    return ((x * a).sin() * checkpoint_name(b * 1, "h")).exp() * torch.arange(4.0).double()


def random_numbers(x: Tensor) -> Tensor:
    h = checkpoint_name(noise(x * 2).exp(), "h")
    mask = torch.bernoulli(torch.full((4, 4), 0.5, dtype=x.dtype))
    return (F.dropout(x * 3, 0.5) * h * mask + torch.rand(4, 4, dtype=x.dtype)).sin()


def noise_that_is_saved_early(x: Tensor) -> Tensor:
    return F.rrelu(x * 2, 0.1, 0.3, training=True).sin()


def several_results(x: Tensor) -> Tensor:
    values, places = checkpoint_name(x.sin().max(0), "h")
    ordered, index = (x * 2).sort(1)
    first, *_ = torch.split(ordered.exp(), 2)
    return (values.sin() * first).sum() + (x[:, places] * index).cos().sum()


def partly_without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = (x @ MATRIX).abs().amax()
        rows = [int(i) for i in (x @ MATRIX).argmax(1)]
    return (checkpoint_name(x @ MATRIX, "h") / scale)[rows].tanh().exp()


def differentiated_inside(x: Tensor) -> Tensor:
    h = checkpoint_name(x * 1, "h")
    (g,) = torch.autograd.grad((h.sin() * h).sum(), h, create_graph=True)
    return (g * 0.5).sin() @ MATRIX


def checkpointed_inside(x: Tensor) -> Tensor:
    return checkpoint(lambda t: (t.sin() @ MATRIX).exp(), x.cos(), use_reentrant=False).sin()


def sparse(x: Tensor) -> Tensor:
    return (x * 1).to_sparse().to_dense().mul(2).sin() @ MATRIX


def nested_tensor(x: Tensor) -> Tensor:
    s = torch.nested.nested_tensor([x[0].detach(), x[1, :2].detach()]).to_padded_tensor(0.0).sum()
    return (checkpoint_name(x.sin(), "h") * s).exp()


def left_behind(log: collections.deque[Tensor], x: Tensor) -> Tensor:
    a = (x.sin() * 3).exp()
    log.append(a.detach())
    return (checkpoint_name(x.exp(), "h") * 2).sin()


READERS: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda s: torch.from_numpy(s.detach().numpy().copy()),
    "tolist": lambda s: torch.tensor(s.tolist(), dtype=s.dtype),
    "list of items": lambda s: torch.tensor([v.item() for v in s[0]], dtype=s.dtype),
    "dlpack": lambda s: torch.from_dlpack(s.detach()).clone(),
    "text": lambda s: len(repr(s.detach())),
    "detached first": lambda s: torch.from_numpy((s.detach() * 2).numpy().copy()),
}
OF_COMPLEX = (
    conjugate_named,
    imaginary_part_named,
    in_place_through_a_conjugate,
    in_place_through_the_real_part,
)
OF_REAL = (
    in_place_through_another_dtype,
    in_place_chain,
    residual_stream_in_place,
    constants,
    random_numbers,
    noise_that_is_saved_early,
    several_results,
    partly_without_grad,
    differentiated_inside,
    checkpointed_inside,
    sparse,
    nested_tensor,
)
PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    **{fn.__name__: fn for fn in (*OF_COMPLEX, *OF_REAL)},
    **{name: functools.partial(through_numpy, read) for name, read in READERS.items()},
}
every_program = pytest.mark.parametrize("program", PROGRAMS)
every_policy = pytest.mark.parametrize("policy", POLICIES)
quiet = pytest.mark.filterwarnings("ignore:The policy of a rematerialized function mentions", "ignore:.*nested tensors")


def argument(program: str) -> Tensor:
    return rand(4, 4, dtype=torch.complex128 if PROGRAMS[program] in OF_COMPLEX else torch.float64)


def gradient(fn: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    out = total(fn(x))
    return out.detach(), torch.autograd.grad(out, x)[0]


def assert_equal(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@quiet
@every_program
@every_policy
def test_gradients(policy: str, program: str) -> None:
    fn, x = PROGRAMS[program], argument(program)
    assert_equal(gradient(remat(fn, policy=POLICIES[policy]), x), gradient(fn, x))


@quiet
@every_program
@pytest.mark.parametrize("outer", [None, policies.save_ops("aten.sin"), policies.everything_saveable], ids=repr)
@every_policy
def test_gradients_in_a_region(policy: str, outer: Any, program: str) -> None:
    fn, x = PROGRAMS[program], argument(program)
    inner = remat(fn, policy=POLICIES[policy])
    assert_equal(gradient(remat(lambda x: inner(x).sin(), policy=outer), x), gradient(lambda x: fn(x).sin(), x))
    assert_equal(gradient(remat(lambda x: inner(x), policy=outer), x), gradient(fn, x))


def overwritten_after_it_was_saved(x: Tensor) -> Tensor:
    s = x.sin()
    t = s.index_select(1, torch.tensor([0, 2]))
    s.sigmoid_()  # saves its result, but no gradient flows through it
    s.scatter_(0, torch.tensor([[0, 1, 2, 3], [1, 0, 2, 2], [2, 2, 1, 0], [3, 0, 0, 1]]), x)
    return t.sin()


def overwritten_again_and_again(x: Tensor) -> Tensor:
    s = x.sin()
    t = s * 3
    s.exp_()
    with torch.no_grad():
        u = s.cos()
    s.mul_(2).tanh_().add_(x)
    return t.sin() * u + s.detach()


OVERWRITTEN: list[Any] = [
    policies.save_ops(*(f"aten.{name}" for name in names.split()))
    for names in ("sin index_select sigmoid_", "sin cos sigmoid_ exp_", "sigmoid_ scatter_ tanh_", "sin mul exp_ mul_")
]


@pytest.mark.parametrize("inner", [None, policies.save_ops("aten.sin"), policies.everything_saveable], ids=repr)
@pytest.mark.parametrize("outer", OVERWRITTEN, ids=repr)
@pytest.mark.parametrize("fn", [overwritten_after_it_was_saved, overwritten_again_and_again])
def test_a_saved_value_that_is_overwritten_in_an_inner_region(fn: Callable, outer: Any, inner: Any) -> None:
    region, x = remat(fn, policy=inner), rand(4, 4)
    for wrap in (lambda f: lambda x: f(x), lambda f: lambda x: f(x.cos()).sin()):
        expected = gradient(wrap(fn), x)
        around = remat(wrap(region), policy=outer)
        assert_equal(gradient(around, x), expected)
        assert_equal(grad(lambda x: total(around(x)))(x.detach()), grad(lambda x: total(wrap(fn)(x)))(x.detach()))
        assert leaked_bytes(gradient, around, x) == 0


@quiet
@every_policy
@pytest.mark.parametrize("program", ["residual_stream_in_place", "constants", "checkpointed_inside"])
@pytest.mark.parametrize("outer", [None, policies.save_ops("aten.sin")], ids=repr)
def test_nested_regions_are_freed(outer: Any, program: str, policy: str) -> None:
    """Also where the recompute of the outer region ends while the inner one decides what to save."""

    fn, x = PROGRAMS[program], argument(program)
    inner = remat(fn, policy=POLICIES[policy])
    for around in (lambda x: inner(x), lambda x: inner(x).sin()):
        fn = remat(around, policy=outer)
        gradient(fn, x)  # its records may stay
        assert leaked_bytes(gradient, fn, x) == 0


@quiet
@every_policy
@pytest.mark.parametrize("program", ["in_place_chain", "constants", "several_results", "residual_stream_in_place"])
def test_gradients_under_func(program: str, policy: str) -> None:
    fn, x = PROGRAMS[program], argument(program).detach()

    def run(fn: Callable[[Tensor], Tensor]) -> Tensor:
        torch.manual_seed(0)
        return grad(lambda x: total(fn(x)))(x)

    assert_equal(run(remat(fn, policy=POLICIES[policy])), run(fn))


@quiet
@pytest.mark.parametrize("policy", [*POLICIES, "zeros"])
def test_forward_over_reverse_with_zero_tangents(policy: str) -> None:
    chosen = policies.save_ops("aten._efficientzerotensor") if policy == "zeros" else POLICIES[policy]

    def fn(x: Tensor) -> Tensor:
        values, index = x.sort(1)
        return values + index * 0.1

    def run(fn: Callable[[Tensor], Tensor]) -> Any:
        return jvp(grad(lambda x: total(fn(x))), (rand(4, 4, grad=False),), (MATRIX,))

    inner = remat(fn, policy=chosen)
    assert_equal(run(remat(lambda x: inner(x), policy=chosen)), run(fn))


def test_a_skipped_value_that_user_code_stores_is_computed() -> None:
    log: collections.deque[Tensor] = collections.deque()  # the tensors of a recompute would be removed from a list
    fn = remat(functools.partial(left_behind, log), policy=POLICIES["names"])
    for _ in range(2):
        fn(rand(4, 4)).sum().backward()
    assert len(log) == 4
    assert all(torch.equal(log[0], tensor) for tensor in log)


# --- differences between the runs -------------------------------------------------------------------------------------


def another_order(x: Tensor) -> Tensor:
    steps = [lambda x: x @ MATRIX, lambda x: x @ MATRIX.T]
    a, b = (step(x) for step in (reversed(steps) if is_recomputing() else steps))
    a, b = (b, a) if is_recomputing() else (a, b)
    return a.sin() * b.cos()


def test_a_value_is_never_restored_for_another_operation() -> None:
    x = rand(4, 4)
    assert_equal(gradient(remat(another_order, policy=policies.save_matmuls), x), gradient(another_order, x))


def test_a_write_that_the_first_run_did_not_make() -> None:
    def fn(x: Tensor) -> Tensor:
        a, b = x.detach() * 2, x.detach() * 3
        a, b = (b, a) if is_recomputing() else (a, b)
        a.add_(1)
        return (x * a).sin() * (x * b).exp().clamp(max=9)

    out = remat(fn, policy=lambda ctx, op, *args, **kwargs: op is aten.mul.Tensor)(rand(4, 4)).sum()
    with pytest.raises(RecomputeMismatchError, match="changed a tensor in place in the recompute"):
        out.backward()


@pytest.mark.parametrize("policy", [policies.everything_saveable, policies.save_ops("aten.clone")], ids=str)
def test_a_write_to_one_of_two_equal_values(policy: Any) -> None:
    """A recompute can mistake one for the other: both have the same values until one is changed."""

    def fn(x: Tensor) -> Tensor:
        h, made = x.sin(), {}
        for name in ("changed", "same") if is_recomputing() else ("same", "changed"):
            made[name] = h.clone()
            if name == "changed":
                made[name].mul_(2)
        return made["changed"].sin() * made["same"].exp().sin() * made["same"]

    x = rand(4, 4)
    assert_equal(gradient(remat(fn, policy=policy), x), gradient(fn, x))


def test_an_error_for_a_saved_value_that_is_changed_later_names_the_operation() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        h = x @ MATRIX
        return h, h.sin()

    h, out = remat(fn, policy=policies.save_matmuls)(rand(4, 4))
    with torch.no_grad():
        h.zero_()
    line = fn.__code__.co_firstlineno + 1
    with pytest.raises(MutationError, match=rf"output of aten\.mm\.default at .*:{line} \(fn\)"):
        out.sum().backward()


def test_a_predicate_sees_the_arguments_again_for_a_name() -> None:
    seen = policies.save_only_these_names("h") & policies.save_if(lambda ctx, op, *args, **kw: args[0].shape[0] > 1)
    x = rand(4, 4)

    def fn(x: Tensor) -> Tensor:
        return (checkpoint_name(x.sin() * 2, "h") + 1).sin()

    assert_equal(gradient(remat(fn, policy=seen), x), gradient(fn, x))


def test_predicates_with_invalid_results() -> None:
    with pytest.raises(ValueError, match="yes"):
        remat(torch.sin, policy=lambda ctx, op, *args, **kwargs: "yes")(rand(3))


# --- combinations -----------------------------------------------------------------------------------------------------


def test_inside_torch_checkpoint() -> None:
    x = rand(4, 4)
    fn = remat(lambda x: (x @ MATRIX).sin().exp() * x, policy=policies.save_matmuls)
    run = functools.partial(checkpoint, fn, use_reentrant=False)
    assert_equal(gradient(run, x), gradient(lambda x: (x @ MATRIX).sin().exp() * x, x))


def test_debug_and_values() -> None:
    x = rand(1, 2, 4, 4)

    def fn(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x.sin(), x, x).tanh()

    for options in ({"debug": True}, {"determinism_check": "values"}, {"determinism_check": "none"}):
        for policy in (policies.save_attention, policies.everything_saveable):
            assert_equal(gradient(remat(fn, policy=policy, **options), x), gradient(fn, x))


def test_fake_tensors() -> None:
    with FakeTensorMode():
        x = torch.ones(3, 3, requires_grad=True)
        remat(lambda x: F.dropout((x @ x).exp() * x, 0.5).sin(), policy=[aten.exp])(x).sum().backward()
        assert x.grad is not None and x.grad.shape == (3, 3)


class Wrapped(Tensor):
    """A wrapper of one other tensor."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        kind = {"dtype": inner.dtype, "device": inner.device, "requires_grad": inner.requires_grad}
        return Tensor._make_wrapper_subclass(cls, inner.shape, **kind)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner", "nothing"], None

    nothing = None  # like the mesh of DTensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrapped(t: Any) -> Any:
            return t.inner if isinstance(t, Wrapped) else t

        out = func(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs or {}))
        return tree_map(lambda t: Wrapped(t) if isinstance(t, Tensor) else t, out)


@every_policy
def test_wrapper_tensors(policy: str) -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(checkpoint_name(torch.tanh(x @ w), "h") @ w).sin()

    def run(fn: Callable) -> tuple[list[Tensor], int]:
        args = [Wrapped(rand(4, 4, seed=seed).detach()).requires_grad_() for seed in (0, 1)]
        out = fn(*args).sum()
        with OpCounter() as counter:
            grads = torch.autograd.grad(out, args)
        return [g.inner for g in grads], counter["aten.mm"]

    expected, products = run(fn)
    grads, again = run(remat(fn, policy=POLICIES[policy]))
    assert_equal(grads, expected)
    if policy in ("matmuls", "everything", "offloaded"):
        assert again == products


# --- memory -----------------------------------------------------------------------------------------------------------


@every_policy
def test_an_error_in_the_forward_leaves_nothing_alive(policy: str) -> None:
    def fn(x: Tensor) -> Tensor:
        checkpoint_name((x @ MATRIX).exp() * 2, "h").sin()
        raise ValueError

    def swallow() -> None:
        with pytest.raises(ValueError):
            remat(fn, policy=POLICIES[policy])(x)

    x = rand(4, 4)
    swallow()
    with gc_disabled():
        assert leaked_bytes(swallow) == 0
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_values_that_autograd_does_not_see_are_not_saved() -> None:
    def fn(x: Tensor) -> Tensor:
        with torch.no_grad():
            h = x
            for _ in range(20):
                h = (h @ MATRIX).relu()
        return x * h

    x = rand(4, 4)
    assert held_bytes(remat(fn, policy=policies.save_matmuls), x) <= held_bytes(fn, x)


@pytest.mark.parametrize("policy", [policies.save_ops("aten.add"), ~policies.save_ops("aten.mul")], ids=repr)
def test_the_forward_releases_values_that_will_not_be_needed(policy: Any) -> None:
    def fn(x: Tensor) -> Tensor:
        for _ in range(100):
            x = (x + 1) * 2
        return x

    x = rand(16, 16)
    assert peak_bytes(remat(fn, policy=policy), x) < 20 * x.nbytes


def named_sine(x: Tensor) -> Tensor:
    return checkpoint_name(x * 2, "h").sin()


@pytest.mark.parametrize("check", ["metadata", "values", "none"])
@pytest.mark.parametrize("outer", [None, "everything", "all but sines"])
@pytest.mark.parametrize("inner", ["everything", "all but sines", "products", "names"])
def test_a_region_with_a_policy_before_a_gradient_that_is_computed_inside(inner: str, outer: str, check: str) -> None:
    """For this gradient the outer region is recomputed in its first run; the inner one passes values on then too."""

    def program(wrap: Callable, around: Callable) -> Callable:
        first = wrap(named_sine)

        def fn(x: Tensor) -> Tensor:
            h = first(x)
            (g,) = torch.autograd.grad((h.sin() * h).sum(), h, create_graph=True)
            return g * h

        return around(fn)

    def results(fn: Callable) -> tuple[Tensor, Tensor]:
        x = rand(5)
        y = fn(x)
        return y, *torch.autograd.grad(y.sum(), x)

    expected = results(program(lambda fn: fn, lambda fn: fn))
    policy = POLICIES[outer] if outer else None
    fn = program(remat(policy=POLICIES[inner]), remat(policy=policy, determinism_check=check))
    for _ in range(3):  # from the second call on with the records of the first
        assert all(map(torch.equal, results(fn), expected))


# --- operations on objects that aren't tensors ----------------------------------------------------------------------


def ranges(x: Tensor) -> Tensor:
    with record_function("a"):
        y = (x @ MATRIX).sin()
        with record_function("a"):
            z = (y @ MATRIX).sin()
    return (z @ MATRIX).sin()


def optimized(x: Tensor) -> Tensor:
    y = (x @ MATRIX).sin()
    guess = torch.nn.Parameter(x.detach().clone())
    optimizer = torch.optim.Adam([guess])  # opens profiler ranges in its steps
    guess.grad = y.detach()
    optimizer.step()
    return (y @ MATRIX).sin() @ guess.detach()


def started_outside() -> Callable[[Tensor], Tensor]:
    outside = record_function("outside")
    outside.__enter__()

    def f(x: Tensor) -> Tensor:
        y = (x @ MATRIX).sin()
        if not is_recomputing():
            outside.__exit__(None, None, None)
            record_function("never ended").__enter__()
        return (y @ MATRIX).sin()

    return f


def reduced(x: Tensor) -> Tensor:
    y = x @ MATRIX
    everywhere = y.detach().clone()
    torch.distributed.all_reduce(everywhere)
    return ((x.sin() @ MATRIX).sin() * everywhere).sin()


def gathered(x: Tensor) -> Tensor:
    y = (x @ MATRIX).sin()
    whole = torch.empty(4, 4, dtype=x.dtype)
    work = torch.distributed.all_gather_into_tensor(whole, y.detach(), async_op=True)
    work.wait()
    torch.distributed.barrier()
    return (y @ MATRIX).sin() * whole


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    if not torch.distributed.is_available():
        pytest.skip("torch was built without it")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    "make", [lambda: ranges, lambda: optimized, started_outside, lambda: reduced, lambda: gathered]
)
def test_objects_that_are_not_tensors(make: Callable, name: str, debug: bool) -> None:
    """Profiler ranges, process groups, pending work: they can't be compared, and are new in each run."""
    x = rand(4, 4)

    def derivative(f: Callable) -> tuple[Tensor, int]:
        loss = total(f(x))
        with OpCounter() as ops:
            (found,) = torch.autograd.grad(loss, x)
        return found, ops["aten.mm"]

    expected, products = derivative(make())
    for _ in range(3):
        found, again = derivative(remat(make(), policy=POLICIES[name], debug=debug))
        assert torch.equal(found, expected)
        assert again == products or name not in ("matmuls", "everything", "offloaded", "products")


def test_ranges_do_not_change_what_is_saved() -> None:
    def plain(x: Tensor) -> Tensor:
        return (((x @ MATRIX).sin() @ MATRIX).sin() @ MATRIX).sin()

    x = rand(4, 4)
    with gc_disabled():
        for policy in POLICIES.values():
            bytes_held = [held_bytes(lambda f=f, p=policy: remat(f, policy=p)(x)) for f in (plain, ranges)]
            assert bytes_held[0] == bytes_held[1]


def derivative_at(f: Callable, x: Tensor) -> Tensor:
    """A derivative inside a region: by a backward pass of its own, itself differentiable."""
    out = total(f(x))
    if not (x.requires_grad and out.requires_grad):
        return out * x
    (found,) = torch.autograd.grad(out, x, create_graph=True, allow_unused=True)
    return torch.zeros_like(x) if found is None else found


def derived_in_a_region_inside(region: Callable, outer: Callable) -> Callable:
    @outer
    def f(x: Tensor) -> Tensor:
        @region
        def inner(y: Tensor) -> Tensor:
            return y * derivative_at(lambda z: (z @ MATRIX).sin() + z * 0.5, y.detach().requires_grad_())

        return inner(x) * derivative_at(inner, x.detach().requires_grad_())

    return f


def derived_twice_in_a_region_inside(region: Callable, outer: Callable) -> Callable:
    @outer
    def f(x: Tensor) -> Tensor:
        @region
        def inner(y: Tensor) -> Tensor:
            return derivative_at(lambda z: z * derivative_at(lambda t: (t @ MATRIX).sin() * t, z * 1), y * 1)

        return x * derivative_at(inner, x.detach().requires_grad_())

    return f


@pytest.mark.parametrize("hooks", [False, True], ids=["", "hooks around"])
@pytest.mark.parametrize("name", [*POLICIES, "none"])
@pytest.mark.parametrize("make", [derived_in_a_region_inside, derived_twice_in_a_region_inside])
def test_nested_regions_and_backward_passes_inside(make: Callable, name: str, hooks: bool) -> None:
    """The inner regions pass equal tensors to the outer one in each run, also in a recompute within its first run."""
    x, policy = rand(4, 4), POLICIES.get(name)

    def gradient(f: Callable) -> tuple[Tensor, Tensor]:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone) if hooks else nullcontext():
            out = f(x)
            return out, torch.autograd.grad(total(out), x)[0]

    expected = gradient(make(lambda f: f, lambda f: f))
    for inner in (None, policies.save_ops("aten.mm", "aten.sin")):
        region, outer = functools.partial(remat, policy=inner), functools.partial(remat, policy=policy)
        for regions in ((region, outer), (region, lambda f, outer=outer: remat(outer(f)))):
            for found, wanted in zip(gradient(make(*regions)), expected):
                assert torch.equal(found, wanted)


# --- operations that a recompute skips --------------------------------------------------------------------------------


def statistics(x: Tensor, layer: torch.nn.Module) -> Tensor:
    return layer(x.sin()).relu()


def statistics_that_are_read(x: Tensor, layer: torch.nn.Module) -> Tensor:
    return layer(x.sin()).relu() * layer.running_mean.sum() + layer(x.cos()).exp()


@pytest.mark.parametrize("momentum", [0.1, 0.0])
@pytest.mark.parametrize("fn", [statistics, statistics_that_are_read])
def test_a_saved_batch_norm_is_skipped_despite_its_statistics(fn: Callable, momentum: float) -> None:
    """It writes running statistics, which nothing else in the region reads."""

    def run(wrap: Callable) -> tuple:
        layer = torch.nn.BatchNorm1d(4, momentum=momentum, dtype=torch.float64)
        x = MATRIX.clone().requires_grad_()
        region = wrap(lambda x: fn(x, layer))
        for _ in range(2):
            gradients = torch.autograd.grad(region(x).sum(), [x, *layer.parameters()])
        y = region(x).sum()
        counts = count_ops(lambda: torch.autograd.grad(y, x))
        return [*gradients, *(b.clone() for b in layer.buffers())], counts["aten.native_batch_norm"]

    expected, _ = run(lambda fn: fn)
    for policy in (policies.save_ops("aten.native_batch_norm"), policies.everything_saveable, None):
        found, count = run(lambda fn: remat(fn, policy=policy))
        assert all(map(torch.equal, found, expected))
        if policy is not None and fn is statistics:
            assert count == 0


def test_operands_of_operations_that_read_no_data_are_skipped() -> None:
    """`empty_like` and similar operations read only shape, dtype and device."""
    x = MATRIX.clone().requires_grad_()
    for like in (torch.zeros_like, torch.ones_like, lambda t: torch.empty_like(t).fill_(2.0), lambda t: t.new_ones(4)):
        fn = lambda x: ((like(x @ MATRIX) + x.cos()) * x).sin()
        region = remat(fn, policy=policies.save_ops("aten.exp", "aten.sin"))
        y = region(x).sum()
        assert count_ops(lambda: torch.autograd.grad(y, x, retain_graph=True))["aten.mm"] == 0
        assert torch.equal(torch.autograd.grad(y, x)[0], torch.autograd.grad(fn(x).sum(), x)[0])
