"""What `check`, `report` and `saved_residuals` find in a user's program, and that they restore all that it changes."""

import functools
import re
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from cases import rand
from measured import Careless, state_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, jvp, vmap

import remat
from benchmarks.measure import leaked_bytes
from remat import check, policies, report, saved_residuals
from remat._measure.program import default_loss

MEASURES: dict[str, Callable[..., Any]] = {
    "check": check,
    "check, where": partial(check, where=nn.BatchNorm1d),
    "report": report,
    "report, where": partial(report, where=nn.BatchNorm1d, time=True),
    "saved_residuals": saved_residuals,
    "saved_residuals of a region": lambda net, *args: saved_residuals(remat.remat(net), *args),
    "saved_residuals of a method": lambda net, *args: remat.override(policy=None)(saved_residuals)(net.forward, *args),
}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
def test_everything_that_a_program_changes_is_restored(measure: Callable, fails: bool) -> None:
    net, x = Careless(), torch.ones(2, 3)
    before = state_of(net)
    try:
        text = str(measure(net, x, fails))
    except ValueError as error:
        text = f"{type(error).__name__}: {error}"
    assert ("ValueError: mine" in text) == fails
    assert state_of(net) == before and torch.equal(x, torch.ones(2, 3))
    assert rand(3).sin().grad_fn._saved_self is not None  # no saved-tensor hook is left


class Keeps(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x).tanh()
        return self.last.sum()


@pytest.mark.parametrize("transform", [grad, vmap, lambda f: vmap(grad(f))])
def test_a_tensor_of_an_ended_transform_in_an_attribute(transform: Callable) -> None:
    net, x = Keeps(3, 3), torch.ones(2, 3)
    transform(net)(x)
    last = net.last
    assert check(net, x) and report(net, x).policies and saved_residuals(net, x)
    assert net.last is last


def trains(net: nn.Module) -> Callable:
    net.register_forward_hook(lambda *args: None)  # also when the transform is applied
    torch.rand(1)

    def step(x: Tensor) -> None:
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        net(x).square().sum().backward()
        optimizer.step()

    return step


@pytest.mark.parametrize("measure", [check, report])
def test_what_a_transform_changes_is_restored(measure: Callable) -> None:
    net, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout()), torch.randn(4, 3)
    before = state_of(net)
    result = measure(net, x, transform=trains)
    assert state_of(net) == before
    assert result if measure is check else result.plain.saved_bytes > result.policies[0].saved_bytes > 0


def test_existing_regions_of_a_model_stay() -> None:
    net = remat.nn.apply(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear)
    cls = type(net[0])
    for where in (nn.Tanh, nn.Linear):
        assert check(net, torch.ones(2, 3), where=where, policy=remat.policies.save_matmuls).ok
        assert type(net[0]) is cls and type(net[1]) is nn.Tanh and net[0].__dict__["_remat"].policy is None


def test_an_earlier_graph_is_not_freed() -> None:
    w = rand(3)
    h = w.exp()
    fn = lambda x: (x * h).sin()
    assert saved_residuals(fn, rand(3))
    differences = check(lambda x: fn(x) if remat.is_disabled() else fn(x).detach(), rand(3)).differences
    assert "gradient of closure variable 'h' of fn" in [each.what for each in differences]
    torch.autograd.grad(h.sum(), w)


def test_a_model_that_captures_a_tensor_with_a_history_has_the_regions_that_are_asked_for() -> None:
    net = nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Tanh())
    net[0].scale = rand(3).exp()
    plain, region = remat.report(net, rand(3), where=nn.Tanh, policies=[None]).rows
    assert region.saved_bytes < plain.saved_bytes


def test_nothing_stays_alive() -> None:
    fn, w, x = remat.remat(lambda w, x: torch.tanh(torch.tanh(x @ w) @ w)), rand(4, 4), rand(3, 4)
    for measure in (saved_residuals, check, report):
        measure(fn, w, x)  # fills caches
        assert leaked_bytes(measure, fn, w, x) == 0
    assert report(lambda x: x.sin() + x.detach().exp().neg_(), x).plain.saved_bytes == 8  # the sum of the results


def sources(fn: Callable, *args: Any, **kwargs: Any) -> set[str]:
    """The names of the inputs that are saved."""
    return {row.source for row in saved_residuals(fn, *args, inputs=True, **kwargs) if row.is_input}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Hidden:
    w = rand(3)  # no search leads to the attribute of a class


def test_inputs_have_the_names_that_the_function_uses() -> None:
    x, y, z, net = rand(3), rand(3, seed=1), rand(3, seed=2), Net()

    def several(x: Tensor, y: dict[str, Any], *rest: Tensor, scale: Tensor) -> Tensor:
        return x * y["a"][0] * rest[1] * scale

    given = sources(several, x, {"a": [y]}, x, z, scale=rand(3, seed=3))
    assert given == {"argument x", "argument y['a'][0]", "argument args[3]", "argument scale"}
    later = lambda x: x * x if x.ndim else unbound
    assert sources(later, x) == {"argument x"}
    unbound = x
    assert sources(torch.mul, x, y) == {"argument args[0]", "argument args[1]"}
    assert sources(lambda x: x * y, x) == {"argument x", "captured closure variable 'y'"}
    assert sources(lambda x: x * x.detach(), x) == {"argument x"}
    for fn in (net, net.forward, remat.remat(net), remat.remat(net.forward)):
        assert sources(fn, x) == {"argument x", "captured self.scale"}
    assert sources(lambda p, x: functional_call(net, p, (x,)), {"scale": y}, x) == {"argument p['scale']", "argument x"}


def names(fn: Callable, *args: Any) -> set[str]:
    """By what the function is differentiated: no result depends on it with regions."""
    differs = functools.wraps(fn)(lambda *args: fn(*args) if remat.is_disabled() else fn(*args).detach())
    return {each.what.removeprefix("gradient of ") for each in check(differs, *args).differences}


def test_it_is_differentiated_by_tensors_that_require_grad_or_else_by_all_that_can() -> None:
    x, w, n = rand(3), rand(3, grad=False), torch.arange(3)
    fn = lambda x, w, n: x * w * n
    assert names(fn, x, w, n) == {"argument x"}
    assert names(fn, x.detach(), w, n) == {"argument x", "argument w"}
    net = Net()
    assert names(lambda x: net(x), w) == {"net.scale"}
    assert remat.pareto(lambda n: net(n).sin().sin(), n).points
    assert names(lambda x: x * Hidden.w, x) == {"argument x", "a tensor of shape [3]"}


def test_the_default_loss_is_the_sum_of_what_can_be_differentiated() -> None:
    x = torch.ones(2)
    assert default_loss({"a": x, "b": [torch.ones(2, dtype=torch.int), None, x * 1j]}).item() == 4
    assert default_loss([torch.ones(2, dtype=torch.int)]) is None


def test_tensors_without_data_can_be_measured() -> None:
    for without in (FakeTensorMode().from_tensor, lambda tensor: tensor.to("meta")):
        x, n = without(torch.ones(3)), without(torch.arange(3))
        assert [row.op for row in saved_residuals(lambda x, n: (x * n.add_(1)).sin(), x, n)] == ["aten.mul"]


def raises(fn: Callable) -> Callable:
    raise KeyError


@pytest.mark.parametrize("measure", [check, report, saved_residuals])
def test_wrong_calls_have_errors_with_a_remedy(measure: Callable) -> None:
    name, x = measure.__name__, torch.ones(3)
    how = "the transform instead" if measure in (check, report) else "the transformed function"
    with pytest.raises(RuntimeError, match=f"{name} can't be called under a torch.func transform. Pass it {how}: `"):
        vmap(lambda x: measure(torch.sin, x) and x)(x)
    if measure is not check:
        with pytest.raises(TypeError, match=r"Give the function .* first .*, as in `\(fn, x\)` .*; got Tensor\.$"):
            measure(x.sin())
        with pytest.raises(TypeError, match="not the class Linear: make an instance of it"):
            measure(torch.nn.Linear, x)
    for transform in (grad(torch.sum), raises, lambda fn: None) if measure is not saved_residuals else ():
        with pytest.raises(TypeError, match=r"such as `torch.func.grad` \(not `torch.func.grad\(fn\)`\)"):
            measure(torch.sum, x, transform=transform)
    for option in ("loss", "transform") if measure is not saved_residuals else ():
        with pytest.raises(TypeError) as raised:
            measure(torch.sin, x, **{option: 3})
        assert str(raised.value) == (
            f"The option {option} must be a function, got 3. If {option} is an argument of fn, wrap fn in a lambda."
        )


LAYER, META = nn.Linear(3, 3), (nn.Linear(3, 3, device="meta"), torch.ones(3, device="meta"))
X, SAVE = torch.ones(3), policies.save_matmuls
SHARDED = type("Sharded", (nn.Tanh,), {"__module__": "torch.distributed.fsdp"})  # as FSDP's own classes
TYPE_ERRORS: list[tuple[Callable[[], Any], str]] = [
    (lambda: report(torch.sin, X, policy=SAVE), "takes a list of policies: `policies=[...]`"),
    (lambda: check(torch.sin, X, policies=[SAVE]), "takes one policy: `policy=...`"),
    (lambda: report(nn.GELU(), X, polices=[]), "'polices' is neither an option nor an argument of GELU"),
    (lambda: check(LAYER, X, transform=grad, loss=torch.sum), "A transform takes no loss"),
]
RUNTIME_ERRORS: list[tuple[Callable[[], Any], str]] = [
    (lambda: check(*META), "A check compares values, and a tensor here has no data"),
    (lambda: report(*META, time=True), "time=True measures steps, and a tensor here has no data"),
    (lambda: check(SHARDED(), X), "check can't see the parameters that FSDP manages. Call it before FSDP"),
    (lambda: torch.inference_mode()(remat.pareto)(LAYER, X), "pareto differentiates, which torch.inference_mode"),
    (lambda: remat.override(policy=None)(report)(LAYER, X), "or `remat.disable_remat` replaces here"),
]


@pytest.mark.parametrize("case, error", [*product(TYPE_ERRORS, [TypeError]), *product(RUNTIME_ERRORS, [RuntimeError])])
def test_what_can_not_be_measured_is_refused(case: tuple[Callable, str], error: type[Exception]) -> None:
    with pytest.raises(error, match=re.escape(case[1])) as raised:
        case[0]()
    assert len(str(raised.value)) < 350


def test_tensors_without_memory_of_their_own_are_measured_too() -> None:
    fn = lambda s, x: torch.sparse.mm(s, x.sin()).exp()
    args = torch.eye(3, dtype=torch.float64).to_sparse().requires_grad_(), rand(3, 3)
    assert check(fn, *args) and report(fn, *args).plain.saved_bytes
    assert 2 * 3 * 8 + 3 * 8 in [row.nbytes for row in saved_residuals(fn, *args, inputs=True)]  # indices and values


def test_a_report_of_reverse_over_forward_mode() -> None:
    """Its backward pass gets zeros without memory, at which torch crashes if a mode sees an operation on them."""
    w, x, y = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4, 4)
    layer = remat.remat(lambda x: (x @ w).sin().exp())
    loss = lambda x, y: torch.nn.functional.mse_loss(layer(x), y)
    product = lambda loss: lambda x, y: grad(lambda x: jvp(lambda x: loss(x, y), (x,), (y,))[1])(x)
    plain, written = remat.report(loss, x, y, transform=product, policies=[]).rows
    assert written.saved_bytes < plain.saved_bytes
