"""Texts for users: errors of a recompute and of wrong calls, notes, warnings."""

import inspect
import re
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat import MutationError, PolicyError, RecomputeMismatchError, RematError, RematWarning, is_recomputing, policies


def model() -> nn.Module:
    return remat.nn.apply(nn.Sequential(nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.Tanh())), nn.Sequential)


def test_an_optimizer_step_between_forward_and_backward() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net(torch.ones(2, 4)).sum().backward()
    loss, called = net(torch.ones(2, 4)).sum(), inspect.currentframe().f_lineno
    optimizer.step()
    with pytest.raises(MutationError, match=r"^captured self\[0\]\.weight was changed in place .*`optimizer") as raised:
        loss.backward()
    region = f"Sequential '1' called at {__file__}:{called} (test_an_optimizer_step_between_forward_and_backward)"
    assert str(raised.value).endswith(f"\nThe region is {region}.") and raised.value.region == region


def test_errors_in_the_forward_name_the_region() -> None:
    with pytest.raises(MutationError, match=r"^argument h requires grad and was changed in place by") as raised:
        remat.remat(lambda h: h.mul_(2).sin())(torch.ones(3, requires_grad=True).clone())
    assert "The region is <lambda> called at" in str(raised.value)
    hooked = remat.remat(lambda x: x.register_hook(lambda g: g) and x.sin())
    with pytest.raises(RematError, match=r"(?s)registers a hook .*\nThe region is <lambda> called at"):
        torch.func.grad(hooked)(torch.ones(()))
    kept = []

    @remat.remat
    def stores(x: Tensor) -> Tensor:
        kept.append(x.sin())
        return x.cos()

    with pytest.raises(remat.CaptureError, match="stored a tensor") as raised:
        torch.func.grad(lambda x: (stores(x) + kept[0]).sum())(torch.ones(3))
    assert raised.value.region is not None and raised.value.region.startswith("stores called at ")


def branches(x: Tensor) -> Tensor:
    return x.sin().exp().sin() if is_recomputing() else x.sin().cos().exp().sin()


def fails(x: Tensor) -> Tensor:
    y = x.sin().exp()
    if is_recomputing():
        raise ValueError("mine")
    return y.cos()


def divides(x: Tensor) -> Tensor:
    return x / (1 // 0)


def raised_by(call: Callable[[Tensor], Tensor]) -> BaseException:
    with pytest.raises((ValueError, ZeroDivisionError, RecomputeMismatchError)) as raised:
        call(torch.ones(3, requires_grad=True)).sum().backward()
    return raised.value


@pytest.mark.parametrize("early_stop", [False, True])
def test_a_mismatch_names_the_region(early_stop: bool) -> None:
    error = raised_by(lambda x: remat.remat(branches, early_stop=early_stop)(x))
    called = f"{__file__}:{inspect.currentframe().f_lineno - 1} (<lambda>)"
    assert str(error).endswith(
        f"`remat(..., debug=True)` shows the first operation that differs.\nThe region is branches called at {called}."
    )


@pytest.mark.filterwarnings("error::remat.RematWarning")
def test_only_debugging_says_that_it_compares_nothing_and_where() -> None:
    torch.func.hessian(lambda x: remat.remat(layer)(x).sum())(torch.ones(2))
    calls = deque[None]()  # which isn't restored

    @remat.remat(debug=True)
    def other_each_time(x: Tensor) -> Tensor:
        calls.append(None)
        return (x.sin() if len(calls) == 1 else x.cos()).exp()

    with pytest.warns(RematWarning, match="debug=True compares no operations .* Use") as found:
        torch.func.hessian(lambda x: other_each_time(x).sum())(torch.ones(2))
    assert __file__ in {each.filename for each in found if each.category is RematWarning}
    calls.clear()
    with pytest.raises(RecomputeMismatchError), remat.override(determinism_check="values"):
        torch.func.hessian(lambda x: other_each_time(x).sum())(torch.ones(2))


NOTED: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "a recompute": (lambda x: remat.remat(fails)(x), ["fails"]),
    "a policy": (lambda x: remat.remat(fails, policy=policies.save_ops("aten.sin"))(x), ["fails"]),
    "torch.func": (torch.func.grad(lambda x: remat.remat(fails)(x).sum()), ["fails"]),
    "nested": (remat.remat(lambda x: remat.remat(fails)(x.sin()).sin()), ["<lambda>"]),
    "a forward": (lambda x: remat.remat(divides)(x), []),
}


@pytest.mark.parametrize("where", NOTED)
def test_an_error_in_a_recompute_has_a_note(where: str) -> None:
    call, names = NOTED[where]
    notes = getattr(raised_by(call), "__notes__", [])
    assert [note.partition(f" called at {__file__}:")[0] for note in notes] == [f"while recomputing {n}" for n in names]


@pytest.mark.parametrize("debug", [False, True])
def test_tracebacks_have_few_frames_of_the_package(debug: bool) -> None:
    found = []
    for fn in (divides, fails):
        for call in (remat.remat(fn, debug=debug), torch.func.grad(lambda x: remat.remat(fn, debug=debug)(x).sum())):
            frames = [frame for frame, _ in traceback.walk_tb(raised_by(call).__traceback__)]
            assert frames[-1].f_code is fn.__code__
            found.append(sum(frame.f_globals["__name__"].startswith("remat.") for frame in frames))
    assert max(found) > 6 if debug else max(found) <= 4


def layer(x: Tensor) -> Tensor:
    return x.sin()


BIG, LEAF, SAVE = torch.ones(1000, 1000), torch.ones(3, requires_grad=True), policies.save_matmuls
TYPE_ERRORS: list[tuple[Callable[[], Any], str]] = [
    (lambda: remat.remat(SAVE), "The policy is a keyword argument: `remat(fn, policy=...)`."),
    (lambda: remat.remat(3), "takes a function or another callable, got int. Pass the function, not its result"),
    (lambda: remat.remat(nn.Linear), "not the class Linear: wrap an instance, or its method"),
    (lambda: remat.remat(layer(BIG)), "Pass the function, not its result: `remat(fn)(x)`"),
    (lambda: remat.remat(layer, early_stop=BIG), "got a tensor of shape [1000, 1000]"),
    (lambda: remat.checkpoint_name("h", BIG), "got a tensor of shape [1000, 1000]. The arguments are swapped."),
    (lambda: remat.nn.apply(model(), nn.Tanh()), "got a Tanh: pass its class, `type(module)`."),
    (lambda: remat.nn.apply(model(), [nn.Linear] * 20), "..."),
    (lambda: remat.nn.load("plan.json", model()), "model comes first, then the file: `remat.nn.load(model, path)`."),
    (lambda: remat.remat(policy=None)(layer, BIG), "remat returns a function"),
    (lambda: remat.remat(layer, prevent_cse=False), "doesn't need the option prevent_cse"),
    (lambda: remat.remat(layer, polcy=None), "no option 'polcy'"),
    (lambda: remat.remat(layer, context_fn=None), "In place of context_fn give a policy. For torch's own"),
    (lambda: remat.remat("save_matmuls"), "The policy is a keyword argument"),
    (lambda: remat.compat.checkpoint(layer, BIG, context_fn=SAVE), "A policy is the option `policy=`"),
    (lambda: remat.sequential([layer], 1, policies.save_matmuls), "policy is a keyword argument"),
    (lambda: remat.sequential([layer, layer], 2, BIG), "`remat.sequential(fs, 2)(x)`"),
    (lambda: remat.nn.budget(LAYER, 9, LEAF, where=nn.Linear, more_batches=[()]), "more_batches= takes no where="),
    (lambda: remat.nn.budget(lambda x: (LAYER(x), max)[1], 99, LEAF), "the model's result: give `loss=lambda out"),
    (lambda: remat.nn.apply(LAYER, nn.Linear, SAVE), "Call it as `apply(model, where, policy=..., preserve_rng_state"),
    (lambda: remat.scan(layer, BIG, unroll=2), "(step, carry, xs, length, reverse=..., checkpoints=..., policy=..., p"),
    (lambda: remat.override(polcy=SAVE), "override() got an unexpected keyword argument 'polcy'"),
]
LAYER, META = nn.Linear(3, 3), (nn.Linear(3, 3, device="meta"), torch.ones(3, device="meta"))
steps = lambda x: LAYER(x).sin().sum().backward()
RUNTIME_ERRORS: list[tuple[Callable[[], Any], str]] = [
    (lambda: remat.saved_residuals(steps, LEAF), "calls `backward` itself, which frees what its result needs"),
    (lambda: remat.pareto(lambda x: steps(x) or LAYER(x), LEAF), "let it return the loss only."),
    (lambda: remat.nn.budget(META[0], 99, META[1]), "A plan measures allocations, and a tensor here has no data"),
    (lambda: torch.func.grad(lambda x: remat.nn.budget(LAYER, 99, x))(BIG), "can't be called under a torch.func"),
]
POLICY_ERRORS: list[tuple[Callable[[], Any], str]] = [
    (lambda: remat.remat(layer, policy="hidden"), "write `policies.save_only_these_names('hidden')`."),
    (lambda: remat.remat(layer, policy=lambda op: True), "A policy is called with `(ctx, op, *args, **kwargs)`, which"),
    (lambda: policies.save_only_these_names(["a", "b"]), "got ['a', 'b']. Pass the names separately."),
]
SCRIPT = [(lambda: torch.jit.script(model()), "TorchScript can't have regions. Script the model without them: `remat")]
ERRORS = {TypeError: TYPE_ERRORS, PolicyError: POLICY_ERRORS, RuntimeError: RUNTIME_ERRORS, AttributeError: SCRIPT}


@pytest.mark.parametrize(
    ("call", "message", "error"),
    [(*case, error) for error, cases in ERRORS.items() for case in cases],
    ids=[message[:40] for cases in ERRORS.values() for _, message in cases],
)
def test_wrong_calls_have_short_errors_with_a_remedy(call: Callable[[], Any], message: str, error: type) -> None:
    with pytest.raises(error, match=re.escape(message)) as raised:
        call()
    assert len(str(raised.value)) < 350


def test_errors_have_their_public_names() -> None:
    errors = "PolicyError", "MutationError", "RecomputeMismatchError", "CaptureError", "RematError", "RematWarning"
    assert {getattr(remat, name).__module__ for name in errors} == {"remat"}
    with pytest.raises(PolicyError) as raised:
        remat.remat(layer, policy=3)
    assert traceback.format_exception_only(raised.value)[-1].startswith("remat.PolicyError: A policy is one of")


def test_the_names_of_jax_and_torch_and_the_options() -> None:
    assert remat.checkpoint is remat.remat
    assert repr(remat.remat(torch.sin, determinism_check="default")) == repr(remat.remat(torch.sin))
    expected = ["fn", "policy", "preserve_rng_state", "determinism_check", "early_stop", "debug"]
    assert [*inspect.signature(remat.remat).parameters] == expected
    constants = (value for name, value in vars(policies).items() if name in policies.__all__ and not callable(value))
    assert all(value.__doc__ != type(value).__doc__ for value in constants)  # presets have their own help


@pytest.mark.parametrize("removal", ["", "del torch._C._dispatch_has_kernel_for_dispatch_key; "])
@pytest.mark.parametrize("version, warns", [("2.13.0+cpu", False), ("2.16.0", True)])
def test_an_untested_torch_gives_one_warning(version: str, removal: str, warns: bool) -> None:
    """If it lacks a private name, the warning comes before the error."""
    code = f"import torch; torch.__version__='{version}'; {removal}import remat; remat.remat(torch.sin)(torch.ones(3))"
    done = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, text=True)
    text = f"RematWarning: remat was tested with torch 2.11 to 2.15, and this is torch {version}."
    assert done.stderr.count(text) == warns and done.returncode == bool(removal)
    assert ("has no attribute" in done.stderr.rpartition(text)[2]) == bool(removal)
