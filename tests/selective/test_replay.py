"""What a recompute under a policy restores, skips, runs or refuses, what it leaves behind, and its memory."""

import functools
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Wrap, assert_same, assert_same_results, plain, rand, total
from host_copies import Copies
from random_programs.toolbox import chosen
from surroundings import assert_as_before, surroundings
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import grad, jvp, vjp, vmap

from benchmarks.measure import count_ops, gc_disabled, leaked_bytes, peak_bytes
from remat import checkpoint_name, disable_remat, is_recomputing, policies, remat, saved_residuals
from remat._core.known import known_of
from remat._selective.saved import numbers
from remat._selective.values import form_of
from remat.errors import MutationError, RecomputeMismatchError

Fn = Callable[..., Any]
aten = torch.ops.aten
W = rand(4, 4, seed=77, grad=False) / 2
MATMULS, EVERYTHING = policies.save_matmuls, policies.everything_saveable
SINE, COMPLEX = policies.save_ops("aten.sin"), policies.save_ops("aten.complex")
POLICIES: dict[str, Any] = {
    "everything": EVERYTHING,
    "matmuls": MATMULS,
    "not sines": ~policies.save_ops("aten.sin", "aten.mul"),
    "copies": ["aten.clone", "aten.mul", "aten.cos", "aten.exp", "aten.lift_fresh", "aten.detach"],
    "names": policies.save_only_these_names("h"),
    "answers": policies.save_if(chosen(4, 5)),
    "offloaded": policies.offload(MATMULS | SINE),
}
named = functools.partial(checkpoint_name, name="h")
EVERY_POLICY = pytest.mark.parametrize("policy", POLICIES)
pytestmark = pytest.mark.filterwarnings("ignore:The policy")


def gradients(fn: Fn, x: Tensor | None = None) -> tuple:
    """The result and the gradient, with equal random numbers."""
    torch.manual_seed(1)
    leaf = rand(4, 4) if x is None else x.detach().clone().requires_grad_()
    out = total(fn(leaf))
    return out.detach(), *torch.autograd.grad(out, leaf)


def recomputed(region: Fn, *args: Any) -> Counter[str]:
    """The operations of the backward pass, by default of a matrix."""
    x = args[0] if args else rand(4, 4)
    return count_ops(torch.autograd.grad, region(x, *args[1:]).sum(), x)


def block(x: Tensor) -> Tensor:
    h = named((x @ W).exp().clamp(max=5))
    return (h * 2).sin() @ x * h


def other_order(x: Tensor) -> Tensor:
    made = {w is W: x @ w for w in ([W.T, W] if is_recomputing() else [W, W.T])}
    return (made[True].sin() * made[False].exp()).cos() * made[True]


def operand_of_a_late_one_cleared(x: Tensor) -> Tensor:
    a = x.detach() * 2
    late = a.sin()
    if is_recomputing():
        a.zero_()
    return (named((x * 3).exp().clamp(max=9)) * 2).sin() * late * late


def read_by_python(x: Tensor) -> Tensor:
    product = x @ W
    return (named(product + 1) * product.t().tolist()[0][0]).sin()


def test_a_restored_operation_draws_again_if_a_later_one_draws() -> None:
    """It runs at once. To find out later that the generator has not advanced would take a second attempt."""
    fn = lambda x: F.dropout((x * named(torch.randn(4, 4))).exp(), 0.5).sin() * x
    region = remat(fn, policy=POLICIES["names"])
    assert_same(gradients(region), gradients(fn))
    assert recomputed(region)["aten.exp"] == 1


def test_a_value_that_gets_its_name_after_it_was_read_is_not_saved() -> None:
    def fn(x: Tensor, name: str) -> Tensor:
        h = (x @ W).exp()
        y = h.sin() + x.tanh()
        return checkpoint_name(h, name).cos() * y

    region, x = remat(fn, policy=policies.save_anything_except_these_names("excluded")), rand(4, 4)
    saved = {name: {each.op for each in saved_residuals(region, x, name)} for name in ("kept", "excluded")}
    assert saved["kept"] - saved["excluded"] == {"aten.exp"}
    ops = recomputed(region, x, "excluded")
    assert (ops["aten.exp"], ops["aten.tanh"]) == (1, 0)  # and what was saved before stays saved


def test_a_backward_inside_reads_what_is_saved_though_another_value_is_not_saved_any_more() -> None:
    def fn(x: Tensor, name: str) -> Tensor:
        h = (x @ W).exp()
        y = x.tanh() * h.sin()
        h = checkpoint_name(h, name)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (g * h).sum()

    region = remat(fn, policy=policies.save_anything_except_these_names("excluded"))
    kept, excluded = (count_ops(region, rand(4, 4), name)["aten.sin"] for name in ("kept", "excluded"))
    assert excluded == kept


def test_a_result_that_has_another_name_is_not_saved_with_its_sibling() -> None:
    def fn(x: Tensor, name: str) -> Tensor:
        least, most = torch.aminmax(x.sin(), dim=0)
        least, most = checkpoint_name(least, name), checkpoint_name(most, "h")
        return (least.exp() * most.exp()).sum()

    region = remat(fn, policy=POLICIES["names"])
    assert [len(saved_residuals(region, rand(4, 4), name)) for name in ("h", "other")] == [2, 1]


def test_a_constant_that_is_made_anew_is_the_same_value() -> None:
    constant = lambda x: torch.tensor([2.0, 3, 4, 5], dtype=x.dtype)
    region = remat(lambda x: named((x * constant(x)).exp()).sin() * x, policy=POLICIES["names"])
    assert recomputed(region)["aten.exp"] == 0


def test_other_constants_are_other_values() -> None:
    def fn(x: Tensor) -> Tensor:
        order = [3.0, 2.0] if is_recomputing() else [2.0, 3.0]
        made = {number: named((x.detach() * torch.tensor([number] * 4, dtype=x.dtype)).sin()) for number in order}
        return (x * made[2.0]).sin() * (x * made[3.0]).cos()

    assert_same(gradients(remat(fn, policy=POLICIES["names"])), gradients(fn))


CACHE: dict[str, Any] = {}


def cached_constant(x: Tensor) -> Tensor:
    if "a" not in CACHE:
        CACHE["a"] = torch.tensor([2.0, 3, 4, 5], dtype=x.dtype)
    b = torch.tensor([5.0, 7, 1, 1], dtype=x.dtype)
    return ((x * CACHE["a"]).sin() * b).exp()


@EVERY_POLICY
@pytest.mark.parametrize("fn", [other_order, operand_of_a_late_one_cleared, cached_constant, read_by_python])
def test_the_gradient_is_right_or_an_error(fn: Fn, policy: str) -> None:
    def run(fn: Fn) -> tuple:
        CACHE.clear()
        return gradients(lambda x: fn(x).sum() + fn(x[:3]).sum()), fn(rand(4, 4))

    try:
        found = run(remat(fn, policy=POLICIES[policy]))
    except (RecomputeMismatchError, MutationError):
        assert fn is operand_of_a_late_one_cleared
    else:
        assert_same(found, run(fn))


def test_a_write_that_the_first_run_did_not_make_is_an_error() -> None:
    def fn(x: Tensor) -> Tensor:
        a, b = x.detach() * 2, x.detach() * 3
        a, b = (b, a) if is_recomputing() else (a, b)
        a.add_(1)
        return (x * a).sin() * (x * b).exp().clamp(max=9)

    out = remat(fn, policy=lambda ctx, op, *args, **kwargs: op is aten.mul.Tensor)(rand(4, 4)).sum()
    with pytest.raises(RecomputeMismatchError, match="changed a tensor in place in the recompute, but not in its fir"):
        out.backward()


def gradients_under(pack: Fn, unpack: Fn, f: Fn, x: Tensor) -> tuple:
    with saved_tensors_hooks(pack, unpack):
        return gradients(f, x)


WAYS: dict[str, Callable[[Fn, Tensor], Any]] = {
    "autograd": gradients,
    "hooks": functools.partial(gradients_under, lambda t: (t,), lambda packed: packed[0]),
    "hooks that copy": functools.partial(gradients_under, torch.clone, lambda t: t),
    "grad": lambda f, x: grad(f)(x),
    "grad of grad": lambda f, x: grad(lambda x: grad(f)(x).sin().sum())(x),
    "jvp of grad": lambda f, x: jvp(grad(f), (x,), (x.cos(),)),
    "vmap of jvp of grad": lambda f, x: vmap(lambda x: jvp(grad(f), (x,), (x.cos(),)))(x),
}


@EVERY_POLICY
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(4, 4), (2, 4, 4)])  # a product of three dimensions has its own version counter
def test_a_saved_value_that_is_changed_later_is_recomputed(shape: tuple, way: str, policy: str) -> None:
    def run(wrap: Fn) -> Any:
        region = wrap(lambda x: (y := x.sin() @ W, y.relu() * 2 + y))

        def f(x: Tensor) -> Tensor:
            y, z = region(x)
            return (y.neg_() * z * z).sum()

        return WAYS[way](f, rand(*shape, grad=False))

    assert_same(run(functools.partial(remat, policy=POLICIES[policy])), run(lambda fn: fn), exact=False)


@pytest.mark.parametrize(
    ("fn", "policy"),
    [
        (lambda x: x.exp().neg_().sum(), EVERYTHING),
        (lambda x: (torch.complex(x, x).conj() @ torch.complex(W, W)).sin().abs(), COMPLEX),
        (lambda x: torch.view_as_real(torch.complex(x, x)).sum(-1).sin(), COMPLEX),
    ],
)
def test_hooks_that_copy_have_the_value_before_the_region_changes_it_and_not_a_view(fn: Fn, policy: Any) -> None:
    run = functools.partial(WAYS["hooks that copy"], x=rand(4, 4, grad=False))
    assert_same(run(remat(fn, policy=policy)), run(fn))


def product_and_sine(x: Tensor) -> tuple[Tensor, Tensor]:
    h = x @ W
    return h, h.sin()


def test_an_error_for_a_saved_value_that_is_changed_later_names_the_operation() -> None:
    h, out = remat(product_and_sine, policy=MATMULS)(rand(4, 4))
    with torch.no_grad():
        h.zero_()
    line = product_and_sine.__code__.co_firstlineno + 1
    with pytest.raises(MutationError, match=rf"output of aten\.mm\.default at .*:{line} \(product_and_sine\)"):
        out.sum().backward()


def test_an_offloaded_value_is_copied_back_only_after_the_forward(far: Copies) -> None:
    fn = lambda x: (h := x.tanh()) * torch.autograd.grad(h.sum(), x, create_graph=True)[0]
    out = remat(fn, policy=policies.offload(policies.save_ops("aten.tanh")))(x := rand(3))
    assert len(far.out) == 1 and not far.back
    assert_same(torch.autograd.grad(out.sum(), x), torch.autograd.grad(fn(x).sum(), x))
    assert far.back == [0]


def test_an_offloaded_value_may_be_changed_later(far: Copies) -> None:
    x = rand(4, 4)
    h, out = remat(product_and_sine, policy=policies.offload(MATMULS))(x)
    with torch.no_grad():
        h.zero_()
    assert_same(torch.autograd.grad(out.sum(), x), torch.autograd.grad(product_and_sine(x)[1].sum(), x))
    assert len(far.out) == 1 and far.taken() == [0]


def test_a_library_that_chooses_functions_by_the_class_of_a_tensor_gets_what_a_recompute_skips() -> None:
    contract = pytest.importorskip("opt_einsum").contract
    region = remat(lambda x: contract("ij,jk->ik", contract("ij,jk->ik", x, W), W).sin().exp(), policy=MATMULS)
    assert_same_results(gradients, region, region.__wrapped__)
    assert recomputed(region)["aten.mm"] == recomputed(region.__wrapped__)["aten.mm"]


@pytest.mark.parametrize("read", [False, True])
def test_a_saved_batch_norm_is_skipped_despite_its_statistics(read: bool) -> None:
    """It writes running statistics, which nothing else in the region reads."""

    def fn(x: Tensor, layer: nn.Module) -> Tensor:
        out = layer(x.sin()).relu()
        return out * layer.running_mean.sum() + layer(x.cos()).exp() if read else out

    def run(wrap: Fn) -> tuple:
        layer, x = nn.BatchNorm1d(4, dtype=torch.float64), rand(4, 4)
        region = wrap(lambda x: fn(x, layer))
        for _ in range(2):
            found = torch.autograd.grad(region(x).sum(), [x, *layer.parameters()])
        count = recomputed(region, x)["aten.native_batch_norm"]
        return [*found, *(b.clone() for b in layer.buffers())], count

    for policy in (policies.save_ops("aten.native_batch_norm"), EVERYTHING, None):
        found, count = run(functools.partial(remat, policy=policy))
        assert_same(found, run(lambda fn: fn)[0])
        assert count == 0 or policy is None or read


def test_statistics_that_only_a_recompute_reads_are_not_skipped() -> None:
    layer, x, seen = nn.BatchNorm1d(4, dtype=torch.float64), rand(4, 4), list[Any]()
    fn = lambda x: (layer(x.sin()) * 2, is_recomputing() and seen.append((layer.running_mean * 1).tolist()))[0]
    policy = policies.save_ops("aten.native_batch_norm")
    torch.autograd.grad(remat(fn, policy=policy, early_stop=False)(x).sum(), x)
    assert seen == [layer.running_mean.tolist()]


def test_a_predicate_is_called_once() -> None:
    asked: list[str] = []

    def products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        asked.append(f"{op} {tuple(args[0].shape)}")
        return args[0].shape[0] > 1

    fn = lambda x: (named(torch.empty(4, 4, dtype=x.dtype).copy_(x).t() * 2) + 1).sin().clone()
    seen = policies.save_only_these_names("h") & policies.save_if(products)
    assert_same(gradients(remat(fn, policy=seen)), gradients(fn))
    assert asked == ["aten.mul.Tensor (4, 4)"]
    calls = ["aten.copy_.default", "aten.mul.Tensor", "aten.add.Tensor", "aten.sin.default", "aten.clone.default"]
    for policy in (products, policies.save_only_these_names("i") | policies.save_if(products)):
        asked.clear()
        gradients(remat(fn, policy=policy))
        assert asked == [f"{call} (4, 4)" for call in calls]  # not for views, nor for memory without values


def test_names_beside_a_predicate_keep_no_values_alive() -> None:
    fn, none = lambda x: x.sin().cos().exp().sin().cos().sum(), policies.save_if(lambda ctx, op, *args, **kwargs: False)
    alone, beside = (remat(fn, policy=policy) for policy in (none, none | policies.save_only_these_names("i")))
    assert peak_bytes(lambda: beside(rand(64, 64))) == peak_bytes(lambda: alone(rand(64, 64)))


def test_a_predicate_that_looks_at_the_stack_is_right_about_a_value_with_a_name() -> None:
    policy = policies.save_matmuls_without_batch_dims | policies.save_only_these_names("other")
    fn = lambda x, w: named(torch.einsum("bth,hf->btf", x, w)).sin()
    out = remat(fn, policy=policy)(rand(2, 3, 4), rand(4, 5)).sum()
    assert count_ops(out.backward)["aten.bmm"] == 2  # those of the derivative


@pytest.mark.parametrize("end", [torch.exp, lambda x: grad(lambda y: (x * y).cos().sum())(x)], ids=["exp", "grad"])
@pytest.mark.parametrize("outer, inner", [(True, False), (False, True), (True, True)])
def test_a_predicate_of_nested_regions_may_count(outer: bool, inner: bool, end: Fn) -> None:
    x, asked = rand(4, 4), list[Any]()
    policy = lambda ctx, op, *args, **kwargs: bool(asked.append(op) or len(asked) % 3)
    inside = remat(lambda x: end(x.sin().cos().tanh()).sin(), policy=policy if inner else None)
    fn = remat(lambda x: end(inside(inside(x * 2).tanh())).sum(), policy=policy if outer else None)
    with disable_remat():
        expected = grad(fn)(x)
    out, count = fn(x), len(asked)
    assert_same((*torch.autograd.grad(out, x), grad(fn)(x)), (expected, expected))
    assert len(asked) == 2 * count  # not in recomputes


@pytest.mark.parametrize("outer", [None, policies.save_if(lambda *args, **kwargs: False)], ids=["none", "a predicate"])
def test_a_predicate_may_count_around_a_backward_inside_that_recomputes(outer: Any) -> None:
    """There the first run recomputes both regions, from a copy of the constant; the recompute only the inner one."""
    x, asked = rand(4, 4), list[Any]()
    policy = lambda ctx, op, *args, **kwargs: bool(asked.append(op) or len(asked) % 3)
    inner = lambda x, c: torch.autograd.grad((x.sin() * c).sum(), x, create_graph=True)[0].tanh().exp()
    inside = remat(inner, policy=policy)
    fn = remat(lambda x, c: inside(x.exp(), c).sin().sum(), policy=outer)
    with disable_remat():
        expected = torch.autograd.grad(fn(x, W), x)
    out, count = fn(x, W), len(asked)
    assert_same(torch.autograd.grad(out, x), expected)
    assert len(asked) == count  # not in the recompute


def test_a_region_inside_that_draws_after_restored_draws_draws_the_same_again() -> None:
    """Its second derivative recomputes it when the recompute around it, in which the generator lagged, has ended."""

    def program(wrap: Wrap) -> Tensor:
        x = rand(4)
        inner = wrap(lambda x: (x.sin() * torch.empty(4).uniform_()).sin())
        fn = wrap(grad(lambda x: (x.sin() * torch.empty(4).normal_() + inner(x)).sum()), policy=EVERYTHING)
        return torch.autograd.grad(fn(x).sum(), x)[0]

    assert_same_results(program, remat, plain, exact=False)


@EVERY_POLICY
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_an_exception_leaves_no_trace(when: str, policy: str) -> None:
    failing, before = {True}, surroundings()  # a set, as variables and lists are restored for a recompute

    def fn(x: Tensor) -> Tensor:
        h = block(x)
        if True in failing and is_recomputing() == (when == "backward"):
            raise KeyboardInterrupt  # which user code doesn't catch
        return F.dropout(h * 2, 0.3).sin() * h.exp().clamp(max=2)

    def fail(run: Callable, *args: Any) -> None:
        # Saved values may suffice for a backward.
        with pytest.raises(KeyboardInterrupt) if when == "forward" else suppress(KeyboardInterrupt):
            run(*args)

    region, x = remat(fn, policy=POLICIES[policy]), rand(4, 4)
    for run, arg in ((gradients, region), (grad(lambda x: region(x).sum()), x.detach())):
        fail(run, arg)
        assert_as_before(before, drawn=True)
        with gc_disabled():
            assert leaked_bytes(fail, run, arg) == 0
    if when == "forward":
        failing.clear()
    torch.manual_seed(1)
    value = total(region(x))
    with suppress(KeyboardInterrupt):
        torch.autograd.grad(value, x, retain_graph=True)
    failing.clear()
    assert_same(torch.autograd.grad(value, x)[0], gradients(fn)[1])


@EVERY_POLICY
def test_everything_is_freed_and_the_peak_is_no_higher(policy: str) -> None:
    x = torch.ones(64, 64, dtype=torch.float64) / 64

    def plain(x: Tensor, y: Tensor) -> Tensor:
        h = named((x @ y).exp())
        return (h * 2).sin() @ y * h

    def forward(fn: Fn) -> Tensor:
        y = x.clone().requires_grad_()
        return fn(fn(fn(y, y), y), y).sum()

    region = remat(plain, policy=POLICIES[policy])
    for run in (forward, lambda fn: forward(fn).backward(), lambda fn: grad(lambda y: fn(y, y).sum())(x)):
        run(region)
        assert leaked_bytes(lambda: run(region) is None) == 0
        inputs = 2 * x.nbytes if policy == "everything" else 0
        assert peak_bytes(run, region) <= peak_bytes(run, plain) + inputs + 4096


SUM: tuple[Fn, Fn] = (lambda x: x, lambda x: (x + 1) * 2)
SINES: tuple[Fn, Fn] = (lambda x: named(x.sin().exp()), lambda x: (x.sin() * 2).tanh())


@pytest.mark.parametrize(
    ("fns", "policy"),
    [(SUM, policies.save_ops("aten.add")), (SUM, ~policies.save_ops("aten.mul")), (SINES, POLICIES["names"])],
)
def test_the_forward_releases_what_will_not_be_needed_or_may_not_be_saved(fns: tuple, policy: Any) -> None:
    first, then = fns
    region = remat(lambda x: functools.reduce(lambda x, _: then(x), range(100), first(x)), policy=policy)
    x = rand(16, 16)
    assert peak_bytes(region, x) < 20 * x.nbytes


def test_values_that_only_the_recompute_reads_are_released_in_the_last_pass() -> None:
    ws = [rand(64, 64, seed=i) for i in range(8)]

    def fn(x: Tensor) -> Tensor:
        for w in ws:
            x = ((x @ w) + 1).sin()  # the sum is recomputed from the product
        return x.sum()

    x, region = rand(64, 64), remat(fn, policy=MATMULS)
    once, again = (
        peak_bytes(lambda retain=retain: torch.autograd.grad(region(x), (x, *ws), retain_graph=retain))
        for retain in (False, True)
    )
    assert again - once >= 4 * x.nbytes


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_region_that_saves_values_gets_a_sparse_matrix_that_requires_grad(layout: torch.layout) -> None:
    matrix, x = rand(30, 30, grad=False).to_sparse(layout=layout).requires_grad_(), rand(30, 30)
    fn = lambda matrix, x: ((matrix @ x).tanh() @ x).exp()
    found, expected = (
        [each.to_dense() for each in torch.autograd.grad(f(matrix, x).sum(), [matrix, x])]
        for f in (remat(fn, policy=MATMULS), fn)
    )
    assert_same(found, expected)


@pytest.mark.parametrize(
    ("fn", "operator"),
    [
        (lambda x: F.scaled_dot_product_attention(x.sin(), x.cos(), x), "_scaled_dot_product_flash_attention_for_cpu"),
        (lambda x: F.layer_norm(x.sin(), (4,)), "native_layer_norm"),
        (lambda x: torch.var_mean(x.sin(), -1)[0], "var_mean"),  # the mean isn't read
    ],
)
def test_an_operation_is_not_recomputed_for_its_other_results_if_one_has_a_name(fn: Fn, operator: str) -> None:
    for policy, count in ((None, 1), (POLICIES["names"], 0)):
        region = remat(lambda x: named(fn(x)).sin(), policy=policy)
        assert recomputed(region, rand(2, 2, 4, 4))[f"aten.{operator}"] == count


WHOLE: list[Fn] = [lambda x: x, lambda x: x[:, None], lambda x: x.view(2, 1, 12)]
PARTS: list[Fn] = [lambda x: x[1:], lambda x: x[:3], lambda x: x.T, lambda x: x[:, ::2], lambda x: x.view(-1)[:6]]


@pytest.mark.parametrize("make", [*WHOLE, *PARTS])
def test_hooks_get_a_value_in_its_shape_if_it_fills_its_storage(make: Fn) -> None:
    tensor = make(torch.zeros(4, 6))
    assert numbers(tensor, form_of(tensor)).shape == (tensor.shape if make in WHOLE else (24,))


def test_hooks_may_return_a_part_of_a_larger_tensor() -> None:
    """A saved value is then at an offset, and not the whole of a storage."""
    pack = lambda tensor: torch.cat([tensor.new_zeros(3), tensor.detach().flatten()])[3:].view(4, 4)

    def run(wrap: Fn) -> tuple:
        return gradients_under(pack, lambda tensor: tensor, wrap(lambda x: ((x @ W).T.sin() @ x).exp()), rand(4, 4))

    assert_same(run(remat(policy=MATMULS)), run(lambda fn: fn))


def test_a_written_tensor_may_have_less_memory_in_the_recompute() -> None:
    """The tangent has as much memory as the primal, of which hooks make a copy."""

    def run(wrap: Fn) -> tuple:
        region = wrap(lambda x: jvp(torch.sin, (x,), (W[:3],))[1].sin())
        return gradients_under(torch.clone, lambda t: t, lambda x: region(x[:3]), rand(8, 4))

    assert_same(run(remat(policy=EVERYTHING)), run(lambda fn: fn))


def test_an_inner_region_saves_a_value_that_a_restored_operation_overwrites() -> None:
    inside = remat(lambda x: (h := (x @ W).add_(x.sin()), h.sin()), policy=MATMULS)
    fn = remat(lambda x: named((pair := inside(x.cos()))[0]).cos() * pair[1], policy=POLICIES["names"], debug=True)
    twice = lambda x: grad(lambda x: fn(x).sum())(x).sin()
    with disable_remat():
        expected = gradients(fn), gradients(twice)
    assert_same((gradients(fn), gradients(twice)), expected)


def test_a_backward_inside_reads_the_statistics_that_batch_norm_has_updated() -> None:
    def fn(x: Tensor) -> Tensor:
        out = F.batch_norm(x, torch.ones(4).double(), torch.ones(4).double(), rand(4), training=True)
        return torch.autograd.grad(out.square().sum(), x, create_graph=True)[0]

    assert_same(gradients(remat(remat(fn, policy=EVERYTHING))), gradients(fn))


def test_constants_of_another_kind_are_another_operation() -> None:
    """Equal in Python, but not in torch: a recompute must not take one for the other."""

    def f(x: Tensor) -> Tensor:
        y = x.exp()
        parts = [torch.full((4, 4), value).to(x.dtype) for value in (1, True, 1.0, 0.0, -0.0)]
        return torch.stack([(y * part + 1 / (part + y)).sin() for part in parts])

    for policy in (EVERYTHING, policies.save_ops("aten.full", "aten.exp"), ~policies.save_ops("aten.exp")):
        assert_same(gradients(remat(f, policy=policy)), gradients(f))


def test_values_that_are_computed_alike_are_overwritten_together() -> None:
    """A recompute may take one for the other, and must not overwrite the saved value of either."""

    def f(x: Tensor) -> Tensor:
        a, b, other = x.sin().exp(), x.sin().exp(), x.cos().exp()
        a.mul_(2)
        return a.sin() * b.cos() * other

    remat(f, policy=EVERYTHING)(rand(3))
    (program,) = known_of(f).programs.values()
    made = [step.facts.func.__name__ for step in program.steps if not program.overwritten.isdisjoint(step.outs)]
    assert made == ["exp.default"] * 2


def test_few_plans_of_a_program_are_kept() -> None:
    f = lambda x: x.sin().exp()
    remat(f, policy=EVERYTHING)(rand(3))
    (program,) = known_of(f).programs.values()
    for number in range(200):
        program.plan([number], 2, [])
    assert 1 < len(program._plans) <= 64


def test_a_write_that_a_recompute_inside_restores_is_seen_by_the_outer_region() -> None:
    x, y, w = (rand(4, 4, seed=i) for i in range(3))
    product = remat(lambda w, b: w * b.tanh(), determinism_check="values")

    @remat
    def inner(a: Tensor, b: Tensor) -> Tensor:
        other, dropped = product(w, b), F.dropout(b, 0.4)
        dropped[0] = w[1]
        _ = (dropped @ dropped.mT) + 1  # its graph lives as long as the outer region's first run
        return dropped + other

    policy = ~policies.save_ops("aten.add", "aten.tanh")
    outer = remat(lambda x, y: torch.add(*vjp(inner, x, y)[1](x.cos())).sin().sum(), policy=policy)

    def run() -> tuple:
        torch.manual_seed(0)
        return torch.autograd.grad(outer(x, y), (x, y, w))

    with disable_remat():
        expected = run()
    assert_same(run(), expected)
