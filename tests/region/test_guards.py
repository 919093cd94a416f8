"""Inputs and captured tensors that change: a recompute gets them as they were before the region, or it is an error.

As they were: with their values, their layout and type, and their place in the graph.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from accelerator import each_device
from cases import Wrap, assert_same, assert_same_results, gradient, plain, rand
from host_copies import Copies
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from remat import MutationError, policies, remat
from remat.compat import checkpoint_wrapper

SAVES = policies.save_ops("aten.sin", "aten.add_", "aten.native_batch_norm")
WAYS: dict[str, Wrap] = {
    "no policy": remat,
    "a policy": remat(policy=SAVES),
    "nested": lambda fn: remat(remat(fn)),
    "nested, with a policy": lambda fn: remat(remat(fn, policy=SAVES)),
}
every_way = pytest.mark.parametrize("wrap", WAYS.values(), ids=WAYS)
pytestmark = pytest.mark.filterwarnings("ignore:The policy")


def arange(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def on(device: str, tensor: Tensor) -> Tensor:
    """Copy a tensor to a device, with the same layout."""
    whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    return whole.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


changed = torch.no_grad()(lambda s: s.add_(1))
through_data = lambda s: s.data.add_(1)  # without a trace in the version counter
own_elements = lambda x, s: (x[:2] * s.as_strided((2,), (s.stride(0),))).sin()
LAYOUTS: dict[str, tuple[Callable[[], Tensor], Callable]] = {
    "gaps": (lambda: arange(4, 6)[:, :3], own_elements),
    "values in gaps": (
        lambda: arange(4, 6)[:, :3],
        lambda x, s: (x * (s.as_strided((2, 3), (6, 1)) + s.as_strided((3,), (1,), 3))).sin(),
    ),
    "transposed, gaps": (lambda: arange(6, 4).t()[:, ::2], own_elements),
    "offset": (lambda: arange(5, 3)[2:4], own_elements),
    "expanded": (lambda: arange(1).expand(2), lambda x, s: (x[:2] * s).sin()),
}


@every_way
@each_device
@pytest.mark.parametrize("change", [None, changed, through_data])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_recompute_gets_a_small_argument_as_it_was(device: str, layout: str, change: Any, wrap: Wrap) -> None:
    make, read = LAYOUTS[layout]

    def fn(x: Tensor, s: Tensor) -> Tensor:
        if change and s.stride() != (0,):  # torch doesn't change an expanded tensor
            change(s)
        return read(x, s) if s.stride() == make().stride() else x.cos()

    x = torch.arange(1.0, 4, device=device, requires_grad=True)
    assert_same(gradient(wrap(fn), x, on(device, make())), gradient(fn, x, on(device, make())))


def test_a_recompute_gets_a_small_argument_that_was_changed_after_it_was_saved() -> None:
    """Autograd alone refuses the change."""
    x, s = rand(3), rand(3, seed=1, grad=False)
    assert_same(gradient(remat(lambda x, s: (x * s, changed(s))[0]), x, s.clone()), s)


DTYPES = torch.bool, torch.uint8, torch.int64, torch.half, torch.float8_e4m3fn, torch.cdouble
VALUES = [*(torch.ones(3, dtype=dtype) for dtype in DTYPES), torch.ones(1).expand(50_000, 1), torch.tensor([-0.0])]


@each_device
@pytest.mark.parametrize("value", [*VALUES, torch.tensor([float("inf")])], ids=str)
def test_what_has_not_changed_is_the_same_object_in_a_recompute(device: str, value: Tensor) -> None:
    seen = []

    def fn(x: Tensor, *given: Tensor) -> Tensor:
        seen.append((*map(id, given), id(captured)))
        return (x * given[0].to(torch.cfloat).real).sin() * captured * given[1].scale

    given, captured = (on(device, value), nn.Parameter(arange(1).to(device), requires_grad=False)), arange(1).to(device)
    given[1].scale = 2.0
    gradient(remat(fn), torch.ones(1, device=device, requires_grad=True), *given)
    assert seen == [(*map(id, given), id(captured))] * 2


LARGE = (
    r"(argument s|captured .*state) was changed in place by the region itself, .* those of up to 16 KiB, "
    r"and vectors and buffers of up to 1 MiB, are copied .* Give the region a copy"
)
SIZES: dict[str, tuple[Callable[[], Any], str]] = {
    "a matrix of 16 KiB": (lambda: torch.ones(64, 64), ""),
    "a larger matrix": (lambda: torch.ones(65, 64), LARGE),
    "a small part of a large matrix": (lambda: torch.ones(65, 65)[:, :1], LARGE),
    "a vector of 1 MiB": (lambda: torch.ones(2**18), ""),
    "a larger vector": (lambda: torch.ones(2**18 + 1), LARGE),
    "a buffer of 1 MiB": (lambda: nn.Buffer(torch.ones(512, 512)), ""),
    "a larger buffer": (lambda: nn.Buffer(torch.ones(513, 512)), LARGE),
    "a sparse matrix": (lambda: torch.eye(3).to_sparse(), LARGE),
    "a parameter": (lambda: nn.Parameter(torch.ones(3)), LARGE),
    "an activation": (
        lambda: torch.ones(3, requires_grad=True) * 1,
        r"argument s requires grad and was changed in place by the region.*or change a copy: `\.clone\(\)`",
    ),
}


@pytest.mark.parametrize("starts_again", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_tensors_up_to_a_size_are_copied_before_the_region_changes_them(size: str, starts_again: bool) -> None:
    """A region that calls torch.func starts again, and can't if it has changed a tensor that was not copied."""
    make, error = SIZES[size]
    error = LARGE if error and starts_again else error

    def run(wrap: Wrap) -> tuple:
        module, x, given = nn.Module(), torch.ones(1, requires_grad=True), make()
        module.state = given

        def fn(x: Tensor, s: Tensor | None) -> Tensor:
            s = module.state if s is None else s
            torch.no_grad()(s.mul_)(2)
            x = x * s.sum().detach()
            return torch.func.grad(lambda x: x.sin().sum())(x) if starts_again else x.sin()

        out = wrap(fn)(x, None if isinstance(given, nn.Buffer) else given)
        return out, given, None if starts_again and error else torch.autograd.grad(out, x)

    with pytest.raises(MutationError, match=error) if error else nullcontext():
        assert_same(run(remat), run(plain))


def test_a_region_may_change_large_tensors_that_share_memory_if_no_backward_follows() -> None:
    fn, x = lambda x, a, b: a.mul_(2).sum() * b.mul_(3).sum() * x, rand(3)
    assert_same(*(f(x, *torch.ones(200, 99).split(100)) for f in (remat(fn), fn)))


@pytest.mark.parametrize("mode", [FakeTensorMode(), torch.device("meta")], ids=["fake", "meta"])
def test_whether_a_tensor_without_data_has_changed_is_not_asked(mode: Any) -> None:
    with mode:
        x, s = torch.ones(3, requires_grad=True), torch.ones(3)
        assert gradient(remat(lambda x, s: (x * s).sin() * s), x, s).shape == (3,)


def test_activations_alone_are_offloaded(far: Copies) -> None:
    class Product(nn.Module):
        def forward(self, h: Tensor, p: Tensor, c: Tensor) -> Tensor:
            return ((h @ p).sin() * c).exp()

    h, p, c = rand(3, 3) * 2, rand(3, 3, seed=1), rand(3, grad=False)
    out = checkpoint_wrapper(Product(), offload_to_cpu=True)(h, p, c)
    assert len(far.out) == 2  # `h` and `c`
    assert_same(torch.autograd.grad(out.sum(), (h, p)), torch.autograd.grad(Product()(h, p, c).sum(), (h, p)))


def test_what_is_in_host_memory_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, x = Copies(monkeypatch), rand(3)
    out = checkpoint_wrapper(nn.Tanh(), offload_to_cpu=True)(x * 2)
    assert not copies.out
    assert_same(torch.autograd.grad(out.sum(), x), torch.autograd.grad((x * 2).tanh().sum(), x))


def statistics(fn: Callable[[Tensor, nn.BatchNorm1d], Tensor]) -> Callable[[Wrap], Any]:
    def run(wrap: Wrap) -> tuple:
        norm, x = nn.BatchNorm1d(4, momentum=0.5), rand(6, 4, dtype=torch.float32)
        region = wrap(lambda x: fn(x, norm))
        outs = [region(x), region(x)]
        after = [b.clone() for b in norm.buffers()]
        found = [torch.autograd.grad(out.square().sum(), [x, *norm.parameters()], allow_unused=True) for out in outs]
        return outs, found, after, [*norm.buffers()]

    return run


def counted(x: Tensor, norm: nn.BatchNorm1d) -> Tensor:
    norm.num_batches_tracked += 1
    return (norm(x) * norm.num_batches_tracked.clone()).sin()


def initialized(x: Tensor, norm: nn.BatchNorm1d) -> Tensor:
    if not norm.num_batches_tracked:  # as a flag
        norm.running_mean.data.add_(x.detach().mean(0))
        norm.num_batches_tracked.data.add_(1)
    return (x - norm.running_mean).exp()


def a_count_that_autograd_saves(wrap: Wrap) -> Any:
    """It saves a view of what the region has changed."""
    count, x = torch.zeros(1, dtype=torch.float64), rand(3)

    def f(x: Tensor) -> Tensor:
        count.add_(1)
        return (x.sin() * count[0]).exp() * count[0]

    inner = wrap(f)
    return torch.autograd.grad(wrap(lambda x: inner(x).cos())(x).sum(), x), count


def a_count_of_regions_inside(wrap: Wrap) -> Any:
    count, x = torch.ones(3, dtype=torch.float64), rand(3)
    inner = wrap(lambda x, n: (x.sin() * (count.add_(n) if n else count).clone()).exp())
    out = wrap(lambda x: inner(inner(inner(x, 1), 0), 2))(x)  # the second one only reads it
    return torch.autograd.grad(out.sum(), x), count


def accumulates(loss: Callable, result: Callable, used: Callable = lambda w: w) -> Callable[[Wrap], Any]:
    """A backward pass inside adds to the gradient of a captured parameter once: a recompute gets another parameter."""

    def run(wrap: Wrap) -> Any:
        x, w = rand(3, 3), rand(3, 3, seed=1)
        h = used(w)

        def f(x: Tensor) -> Tensor:
            loss(x.detach(), w).sum().backward()
            return result(x, h)

        out = wrap(f)(x)
        return w.grad.clone(), torch.autograd.grad(out.sum(), (x, w)), w.grad

    return run


def buffers_that_a_later_layer_changes(wrap: Wrap) -> Any:
    """Regions in a region capture them with the module, but don't read them."""
    norm, x = nn.BatchNorm1d(4).double(), rand(6, 4)
    norm.register_buffer("steps", torch.zeros(1))
    inner = wrap(lambda x: (x * norm.weight).sin())
    out = norm(wrap(lambda x: inner(inner(x)).exp())(x))
    norm.steps += 1
    return torch.autograd.grad(out.square().sum(), (x, *norm.parameters())), [*norm.buffers()]


def a_parameter_that_is_frozen_and_changed(wrap: Wrap) -> Any:
    """Regions in a region capture it with the module, but don't read it."""
    layer, x = nn.Linear(3, 3).double(), rand(3, 3)
    inner = wrap(lambda x: (x * layer.bias).sin())
    out = wrap(lambda x: inner(inner(x).exp()).exp())(x)
    layer.weight.requires_grad_(False).add_(1)
    return torch.autograd.grad(out.sum(), (x, layer.bias))


def switched_off_and_on(wrap: Wrap) -> Any:
    """A recompute may stop before the second switch."""
    layer, x = nn.Linear(3, 3).double(), rand(3, 3)

    def fn(x: Tensor) -> Tensor:
        layer.weight.requires_grad_(False)
        y = layer(x).tanh()
        layer.weight.requires_grad_(True)
        return y

    return torch.autograd.grad(wrap(fn)(x).sum(), x), layer.weight.requires_grad


def hooks_of_inputs(wrap: Wrap) -> Any:
    """A gradient inside of the region calls them."""
    x, w, scale = rand(3), rand(3, seed=1), rand(3, seed=2, grad=False)
    computed = x * 2
    for tensor in (x, w, computed):
        tensor.register_hook(lambda g: g * 0.5)

    def fn(x: Tensor) -> Tensor:
        first, second = torch.autograd.grad((x * w * scale).sin().sum(), (x, w), create_graph=True)
        return (first * second * scale).sin()

    return [torch.autograd.grad(wrap(fn)(t).sum(), (x, w), retain_graph=True) for t in (x, computed)]


def attributes_of_parameters(wrap: Wrap) -> Any:
    w, v, x = nn.Parameter(rand(3).detach()), rand(3), rand(3, seed=1)
    w.scale, key = 3.0, id(v)  # the captured parameter itself is used
    out = wrap(lambda x, w: (x * w * w.scale if isinstance(w, nn.Parameter) and id(v) == key else x).sin().exp())(x, w)
    return torch.autograd.grad(out.sum(), (x, w))


def statistics_of_equal_batches(wrap: Wrap) -> Any:
    """The cumulative average stays the same in the first call of a later step, but not in its recompute."""
    norm, x = nn.BatchNorm1d(4, momentum=None).double(), rand(6, 4)
    inner = wrap(norm)
    f = wrap(lambda x: inner(x).sin())
    norm(x)
    f(f(x)).sum().backward()
    return x.grad, [*norm.buffers()]


def statistics_that_a_call_outside_saves(wrap: Wrap) -> Any:
    """The region's first run starts again when it calls `torch.func.grad`."""
    norm, x = nn.BatchNorm1d(4).double(), rand(6, 4)
    out = wrap(lambda x: torch.func.grad(lambda x: x.sin().sum())(norm(x)))(norm(x))
    return torch.autograd.grad(out.sum(), x), [*norm.buffers()]


def then(change: Callable[[nn.Linear, Tensor], Any]) -> Callable[[Wrap], Any]:
    """Change captured tensors between forward and backward."""

    def run(wrap: Wrap) -> tuple:
        layer, x = nn.Linear(4, 4).double(), rand(3, 4)
        h = x * 2
        out = wrap(lambda x: (layer(x) * layer.bias + h).sin())(x)
        change(layer, h)
        return torch.autograd.grad(out.sum(), x)

    return run


PROGRAMS: dict[str, Callable[[Wrap], Any]] = {
    "trained, then used": statistics(lambda x, norm: (lambda y: norm.eval()(y.sin()))(norm.train()(x))),
    "updated, then used": statistics(lambda x, norm: (lambda _: norm.eval()(x).sin())(norm.train()(x.detach()))),
    "changed through data": statistics(lambda x, n: (through_data(n.running_mean), (x * n.running_mean).exp())[1]),
    "initialized through data": statistics(initialized),
    "counted": statistics(counted),
    "a count that autograd saves": a_count_that_autograd_saves,
    "a count of regions inside": a_count_of_regions_inside,
    "gradients of captured parameters": accumulates(lambda x, w: (x @ w).sin(), lambda x, w: (x @ w).cos().exp() @ w),
    "gradients of a loss that saves no tensor": accumulates(lambda x, w: w, lambda x, w: (x * w).sin()),
    "gradients beside an activation, whose own would warn": accumulates(
        lambda x, w: (x * w).sin(), lambda x, h: (x * h).sin(), lambda w: w * 2
    ),
    "changed by a later layer": buffers_that_a_later_layer_changes,
    "the same statistics in the first run": statistics_of_equal_batches,
    "statistics that a call outside saves": statistics_that_a_call_outside_saves,
    "frozen later": then(lambda layer, h: layer.requires_grad_(False)),
    "frozen, and changed, but not read": a_parameter_that_is_frozen_and_changed,
    "switched off and on": switched_off_and_on,
    "hooks of inputs": hooks_of_inputs,
    "attributes of parameters": attributes_of_parameters,
    "detached later": then(lambda layer, h: h.detach_()),
}


@pytest.mark.filterwarnings("error", "ignore:The policy", "ignore:A region with a policy is inside")
@every_way
@pytest.mark.parametrize("name", PROGRAMS)
def test_state_that_changes_is_as_it_was_in_a_recompute_and_changes_once(name: str, wrap: Wrap) -> None:
    assert_same_results(PROGRAMS[name], wrap, plain)


@pytest.mark.filterwarnings("ignore:A region with a policy is inside")
@every_way
def test_a_captured_dual_tensor_is_as_it_was_after_its_level(wrap: Wrap) -> None:
    def program(wrap: Wrap) -> Any:
        x = rand(3)
        with fwAD.dual_level():
            dual = fwAD.make_dual(x.detach(), x.detach().cos())
            tangent = fwAD.unpack_dual(wrap(lambda x: (x.sin() * dual).exp())(x))[1]
        return torch.autograd.grad(tangent.sum(), x)

    assert_same(program(wrap), program(plain))


inferred = torch.inference_mode()(lambda: torch.ones(3))  # it has no version counter, but a checksum

# Each calls a region, and returns the result and a tensor that then changes. More places are in `tests/captured`.
OTHERS = r"Change it after the backward, use the out-of-place operation, or give the region a copy: `\.clone\(\)`"
AFTER: dict[str, tuple[Callable[[Tensor, Tensor], tuple], str]] = {
    "argument": (
        lambda x, s: (remat(lambda x, scale: (x * scale).sin().exp())(x, scale=s), s),
        f"argument scale was changed in place between .* {OTHERS}",
    ),
    "read as numbers": (lambda x, s: (remat(lambda x: (x * s.tolist()[0]).sin().exp())(x), s), "variable 's' was"),
    "read as a condition": (lambda x, s: (remat(lambda x: x.exp() if torch.equal(s, s) else x)(x), s), "'s' was"),
    "written into another tensor": (
        lambda x, s: (remat(lambda x: (lambda y: (y.__setitem__(0, s), y.exp()))(torch.stack([x, x]))[1])(x), s),
        "variable 's' was",
    ),
    "captured by a region in a region": (
        lambda x, s: (remat(lambda x: remat(lambda x: (x * s.tolist()[0]).sin())(x).exp())(x), s), "variable 's' was"
    ),
    "inference": (lambda x, s: (remat(lambda x, *c: (x.sin() + c[0]).sin())(x, c := inferred()), c), r"args\[1\] was"),
    "a captured inference tensor": (
        lambda x, s: (lambda c: (remat(lambda x: (x.sin() + c).sin())(x), c))(inferred()), "variable 'c' was"
    ),
    "with a history": (lambda x, s: (lambda h: (remat(lambda h: h.sin().exp())(h), h))(x * 1), "argument h was"),
    "a view that autograd saves": (lambda x, s: (remat(lambda x, s: x * s[:])(x, s), s), "argument s was"),
    "of a built-in function": (lambda x, s: (remat(torch.mul)(x, s), s), r"argument args\[1\] was"),
    "older, and not found": (
        lambda x, s: (lambda h: (remat(lambda x, fn=(h.mul,): fn[0](x))(x), h))((x * s).exp()),
        r"A captured tensor, float64\[3\], was changed in place after the region's forward and before its backward",
    ),
    "detached in place": (
        lambda x, s: (lambda h: (remat(lambda x: (x + h).sin().exp())(x), h.detach_()))(x * 2), "variable 'h' was"
    ),
    "frozen": (
        lambda x, s: (lambda w: (remat(lambda x: (x + w).sin().exp())(x), w.requires_grad_(False)))(rand(3)),
        "variable 'w' was changed in place between .* `optimizer.step",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AFTER)
def test_a_change_between_forward_and_backward_is_an_error(name: str) -> None:
    call, message = AFTER[name]
    for after in (False, True):
        out, tensor = call(rand(3), torch.ones(3).double())
        if after:  # the backward
            out.sum().backward()
        with torch.inference_mode():
            tensor.mul_(2)
        if not after:
            with pytest.raises(MutationError, match=message):
                out.sum().backward()


# --- views made under no_grad of a tensor that requires grad ----------------------------------------------------------
# They report `requires_grad`, but get no gradient. Operations save fewer tensors for them.

row = torch.no_grad()(lambda x: x[0])
BODIES: dict[str, Callable[[Wrap], Callable]] = {
    "product": lambda wrap: lambda v, w: (v * w).sin(),
    "a region inside": lambda wrap: lambda v, w: wrap(lambda a: (a * w).tanh())(v).sin(),
    "a gradient inside": lambda wrap: lambda v, w: torch.autograd.grad((v * w).sin().sum(), w, create_graph=True)[0],
    "asks": lambda wrap: lambda v, w: (v * w).sin() if v.requires_grad and v.is_leaf else (v + w).cos(),
    "returned": lambda wrap: lambda v, w: row((v * w)[None]),
    "made inside": lambda wrap: lambda v, w: (v * w).sin() * row((w * 2)[None]),
}


def twice(f: Callable, x: Tensor, w: Tensor) -> Any:
    out = f(row(x), w)
    return out, [torch.autograd.grad(out.sum(), [x, w], allow_unused=True, retain_graph=True) for _ in range(2)]


def under_grad(f: Callable, x: Tensor, w: Tensor) -> Any:
    out = torch.func.grad(lambda v: f(v, w).sum())(row(x))
    return out, torch.autograd.grad(out.sum(), [x, w], allow_unused=True)


@pytest.mark.parametrize("run", [twice, under_grad], ids=lambda run: run.__name__)
@pytest.mark.parametrize("body", BODIES)
def test_views_made_under_no_grad(body: str, run: Callable) -> None:
    def outcome(wrap: Wrap) -> Any:
        try:
            return run(wrap(BODIES[body](wrap)), rand(3, 3, seed=0), rand(3, seed=1))
        except RuntimeError as error:
            return str(error).splitlines()[0]  # plain autograd raises it too, where nothing is differentiable

    expected = outcome(plain)
    for policy in (None, policies.save_ops("aten.mul")):
        assert_same(outcome(lambda fn: remat(fn, policy=policy)), expected, exact=False)


@pytest.mark.parametrize("transform", [torch.func.grad, lambda f: f], ids=["grad", "a region that calls torch.func"])
def test_a_derivative_by_a_view_made_under_no_grad_is_refused_with_torch_func(transform: Callable) -> None:
    by_both = lambda v, w: torch.autograd.grad((v * w).sin().sum(), [v, w], create_graph=True, allow_unused=True)
    fn = remat(lambda v, w: by_both(v, w)[1] * torch.func.grad(lambda a: a.sin().sum())(w))
    with pytest.raises(RuntimeError, match="does not require grad"):  # plain torch has a derivative, None for the view
        transform(lambda w: fn(row(w), w[0]).sum())(rand(3, 3))
