"""Texts for users: errors of a recompute, advice for options of other libraries, warnings."""

from __future__ import annotations

import inspect
import traceback
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat import MutationError, PolicyError, RecomputeMismatchError, RematWarning, is_recomputing, policies


def line_of(fn: Callable, text: str) -> str:
    """The place of a text in a function's code, in the format of messages."""
    lines, first = inspect.getsourcelines(fn)
    number = next(i for i, line in enumerate(lines) if text in line)
    return f"{__file__}:{first + number} ({fn.__name__})"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).tanh().sin()


def model() -> nn.Module:
    return remat.nn.apply(nn.Sequential(Block(), Block()), Block)


# --- errors of a recompute --------------------------------------------------------------------------------------------


def test_an_optimizer_step_between_forward_and_backward() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net(torch.ones(2, 4)).sum().backward()
    loss = net(torch.ones(2, 4)).sum()
    optimizer.step()
    with pytest.raises(MutationError) as raised:
        loss.backward()
    called = line_of(test_an_optimizer_step_between_forward_and_backward, "loss = net(")
    assert str(raised.value) == (
        "captured self.up.weight was changed in place between the region's forward and its backward, which recomputes "
        "the region and would give wrong gradients. The usual cause is an `optimizer.step()` between the two: call it "
        f"after the backward.\nThe region is Block '1' called at {called}."
    )
    assert raised.value.region == f"Block '1' called at {called}"


@pytest.mark.parametrize("by_func", [False, True])
def test_an_argument_has_the_name_of_its_parameter(by_func: bool) -> None:
    @remat.remat
    def scaled(x: Tensor, scale: Tensor) -> Tensor:
        return (x * scale).sin()

    x, scale = torch.ones(3, requires_grad=True), torch.ones(3)
    if by_func:
        out, pull = torch.func.vjp(scaled, x.detach(), scale)
        scale.add_(1)
        with pytest.raises(MutationError) as raised:
            pull(torch.ones_like(out))
    else:
        loss = scaled(x, scale=scale).sum()
        scale.add_(1)
        with pytest.raises(MutationError) as raised:
            loss.backward()
    text, _, region = str(raised.value).partition("\nThe region is ")
    cause = "The usual cause is an `optimizer.step()` between the two: call it after the backward."
    other = "Change it after the backward, use the out-of-place operation, or give the region a copy: `.clone()`."
    assert text == (
        "argument scale was changed in place between the region's forward and its backward, which recomputes the "
        f"region and would give wrong gradients. {cause if by_func else other}"
    )
    assert region.startswith(f"scaled called at {__file__}:")


def branches(x: Tensor) -> Tensor:
    return x.sin().exp().sin() if is_recomputing() else x.sin().cos().exp().sin()


@pytest.mark.parametrize("early_stop", [False, True])
def test_a_mismatch_names_the_region(early_stop: bool) -> None:
    loss = remat.remat(branches, early_stop=early_stop)(torch.ones(3, requires_grad=True)).sum()
    with pytest.raises(RecomputeMismatchError) as raised:
        loss.backward()
    called = line_of(test_a_mismatch_names_the_region, "loss = ")
    assert str(raised.value).endswith(
        f"`remat(..., debug=True)` shows the first operation that differs.\nThe region is branches called at {called}."
    )


def fails(x: Tensor) -> Tensor:
    y = x.sin().exp()
    if is_recomputing():
        raise ValueError("mine")
    return y.cos()


def notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


@pytest.mark.parametrize("policy", [None, policies.save_ops(torch.ops.aten.sin)])
def test_an_error_only_in_a_recompute_has_a_note(policy: Any) -> None:
    loss = remat.remat(fails, policy=policy)(torch.ones(3, requires_grad=True)).sum()
    with pytest.raises(ValueError, match="mine") as raised:
        loss.backward()
    called = line_of(test_an_error_only_in_a_recompute_has_a_note, "loss = ")
    assert notes(raised.value) == [f"while recomputing fails called at {called}"]


def test_an_error_has_a_note_under_torch_func_and_in_nested_regions() -> None:
    with pytest.raises(ValueError, match="mine") as raised:
        torch.func.grad(lambda x: remat.remat(fails)(x).sum())(torch.ones(3))
    assert [note.partition(" called at ")[0] for note in notes(raised.value)] == ["while recomputing fails"]

    @remat.remat
    def outer(x: Tensor) -> Tensor:
        return remat.remat(fails)(x.sin()).sin()

    loss = outer(torch.ones(3, requires_grad=True)).sum()
    with pytest.raises(ValueError, match="mine") as raised:
        loss.backward()
    assert [note.partition(" called at ")[0] for note in notes(raised.value)] == ["while recomputing outer"]


def test_an_error_of_the_forward_has_no_note() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        remat.remat(lambda x: x / (1 // 0))(torch.ones(3, requires_grad=True))
    assert notes(raised.value) == []


def internal(error: BaseException) -> int:
    """The number of the package's frames in a traceback."""
    names = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__)]
    return sum(name.startswith("remat.") for name in names)


@pytest.mark.parametrize("debug", [False, True])
def test_tracebacks_have_few_frames_of_the_package(debug: bool) -> None:
    def divides(x: Tensor) -> Tensor:
        return x / (1 // 0)

    found = []
    for fn in (divides, fails):
        for call in (remat.remat(fn, debug=debug), torch.func.grad(lambda x: remat.remat(fn, debug=debug)(x).sum())):
            with pytest.raises((ValueError, ZeroDivisionError)) as raised:
                call(torch.ones(3, requires_grad=True)).sum().backward()
            found.append(internal(raised.value))
            assert raised.traceback[-1].name == fn.__name__
    assert max(found) > 6 if debug else max(found) <= 4


# --- wrong calls ------------------------------------------------------------------------------------------------------


def layer(x: Tensor) -> Tensor:
    return x.sin()


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: remat.remat(policies.save_matmuls), "The policy is a keyword argument: `remat(fn, policy=...)`."),
    (
        lambda: policies.save_matmuls or policies.save_attention,
        "A policy is neither true nor false. Combine policies by `p | q`, `p & q` and `~p`; compare with None.",
    ),
    (
        lambda: remat.report(layer(torch.ones(3))),
        "Give the function or module first and then its arguments, as in `(fn, x)` for `fn(x)`; got Tensor.",
    ),
    (
        lambda: remat.check(layer, torch.ones(3), loss=3),
        "The option loss of remat.check must be a function, got int. If loss is an argument of fn, wrap fn in a "
        "lambda.",
    ),
    (
        lambda: remat.nn.apply(model(), nn.Linear(4, 4)),
        "where must be a type, a tuple of types, every(n, type), or a function of a submodule's name and the "
        "submodule; got Linear(in_features=4, out_features=4, bias=True).",
    ),
    (
        lambda: remat.nn.apply(model(), layer),
        f"where is called with a submodule's name and the submodule, which {layer!r} doesn't accept.",
    ),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_wrong_calls_have_helpful_errors(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError) as raised:
        call()
    assert str(raised.value) == message


def test_the_determinism_check_of_torch_has_another_name() -> None:
    with pytest.raises(ValueError, match=r"got 'default'\. torch's 'default' is 'metadata' here"):
        remat.remat(layer, determinism_check="default")  # type: ignore[arg-type]


def test_a_name_is_not_a_policy() -> None:
    with pytest.raises(PolicyError, match=r"write `policies.save_only_these_names\('hidden'\)`\.$"):
        remat.remat(layer, policy="hidden")  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match=r"A policy is called with `\(ctx, op, \*args, \*\*kwargs\)`, which"):
        remat.remat(layer, policy=lambda op: True)


def test_the_signature_has_the_options_alone() -> None:
    expected = ["fn", "policy", "preserve_rng_state", "determinism_check", "early_stop", "debug"]
    assert [*inspect.signature(remat.remat).parameters] == expected


def test_debug_says_where_it_compares_nothing() -> None:
    calls = []

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


def test_the_names_of_jax() -> None:
    assert remat.checkpoint is remat.remat
    assert remat.checkpoint_policies is remat.policies


# --- functions that return before they have computed their result -----------------------------------------------------


def generator(x: Tensor) -> Iterator[Tensor]:
    yield x.sin()


async def coroutine(x: Tensor) -> Tensor:
    return x.sin()


async def async_generator(x: Tensor) -> AsyncIterator[Tensor]:
    yield x.sin()


class Generating(nn.Module):
    def forward(self, x: Tensor) -> Iterator[Tensor]:
        yield x.sin()


class Calling:
    def __call__(self, x: Tensor) -> Iterator[Tensor]:
        yield x.sin()

    @classmethod
    def made(cls, x: Tensor) -> Iterator[Tensor]:
        yield x.sin()


@pytest.mark.parametrize(
    ("fn", "what"),
    [
        (generator, "generator is a generator function"),
        (coroutine, "coroutine is an async function"),
        (async_generator, "async_generator is an async generator function"),
        (partial(generator), "partial is a generator function"),
        (Generating(), "Generating is a generator function"),
        (Calling(), "Calling is a generator function"),
        (vars(Calling)["made"], "made is a generator function"),
        (Calling.made, "made is a generator function"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_generators_and_async_functions_are_refused(fn: Any, what: str) -> None:
    with pytest.raises(TypeError) as raised:
        remat.remat(fn)
    assert str(raised.value) == (
        f"remat takes functions that have computed their result when they return, but {what}. "
        "Apply remat to a function that it calls."
    )
    if callable(fn):
        with pytest.raises(TypeError, match=what):
            remat.compat.checkpoint(fn, torch.ones(3), use_reentrant=False)


def test_modules_whose_forward_is_a_generator_are_refused() -> None:
    with pytest.raises(TypeError, match="Generating is a generator function"):
        remat.nn.apply(nn.Sequential(Generating()), Generating)


# --- warnings and names -----------------------------------------------------------------------------------------------


def test_warnings_have_a_category_and_the_line_of_the_user() -> None:
    fn = remat.remat(layer, policy=policies.save_only_these_names("nobody"))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fn(torch.ones(3, requires_grad=True)).sum().backward()
    (warning,) = found
    assert warning.category is RematWarning and issubclass(RematWarning, UserWarning)
    where = line_of(test_warnings_have_a_category_and_the_line_of_the_user, "fn(torch.ones")
    assert where.startswith(f"{warning.filename}:{warning.lineno} ")


def test_errors_have_their_public_names() -> None:
    for name in (
        "PolicyError",
        "MutationError",
        "RecomputeMismatchError",
        "CaptureError",
        "RematError",
        "RematWarning",
    ):
        assert getattr(remat, name).__module__ == "remat"
    with pytest.raises(PolicyError) as raised:
        remat.remat(layer, policy=3)
    assert traceback.format_exception_only(raised.value)[-1].startswith("remat.PolicyError: A policy is one of")


def test_a_region_that_returns_a_generator() -> None:
    def values(x: Tensor) -> Iterator[Tensor]:
        yield x.exp()

    with pytest.raises(TypeError, match=r"<lambda> returned a generator, whose body would run outside the region\."):
        remat.remat(lambda x: values(x))(torch.ones(3, requires_grad=True))
    with pytest.raises(TypeError, match="returned a generator"):
        torch.func.grad(lambda x: next(remat.remat(lambda x: values(x))(x)).sum())(torch.ones(3))
    assert torch.equal(remat.remat(lambda x: [*values(x)])(torch.ones(3))[0], torch.ones(3).exp())


def test_wrong_arguments_are_shown_short() -> None:
    big = torch.ones(1000, 1000)
    for call in (
        lambda: remat.checkpoint_name("h", big),
        lambda: remat.scan(big, big, big),
        lambda: policies.budget(big),
        lambda: remat.remat(layer, early_stop=big),
        lambda: remat.sequential(big),
        lambda: remat.nn.apply(model(), nn.Sequential(*(Block() for _ in range(20)))),
        lambda: policies.save_only_these_names(["a", "b"]),
    ):
        with pytest.raises((TypeError, PolicyError)) as raised:
            call()
        assert len(str(raised.value)) < 350
    with pytest.raises(TypeError, match=r"got a tensor of shape \[1000, 1000\]\. The arguments are swapped\.$"):
        remat.checkpoint_name("h", big)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match=r"got \['a', 'b'\]\. Pass the names separately\.$"):
        policies.save_only_these_names(["a", "b"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Pass the function, not its result: `remat\(fn\)\(x\)`"):
        remat.remat(layer(torch.ones(3)))
    with pytest.raises(TypeError, match="must be a list of policies"):
        remat.report(layer, torch.ones(3), policies="dots")  # type: ignore[arg-type]


def test_an_argument_that_the_forward_changes_has_its_name() -> None:
    with pytest.raises(
        MutationError, match=r"^argument h requires grad and was changed in place by the region"
    ) as raised:
        remat.remat(lambda h: h.mul_(2).sin())(torch.ones(3, requires_grad=True).clone())
    assert "The region is <lambda> called at" in str(raised.value)


def test_a_capture_error_names_the_region() -> None:
    kept = []

    @remat.remat
    def stores(x: Tensor) -> Tensor:
        kept.append(x.sin())
        return x.cos()

    with pytest.raises(remat.CaptureError, match="stored a tensor") as raised:
        torch.func.grad(lambda x: (stores(x) + kept[0]).sum())(torch.ones(3))
    assert raised.value.region is not None and raised.value.region.startswith("stores called at ")


@pytest.mark.parametrize("measure", [remat.check, remat.report])
def test_a_transformed_function_is_not_a_transform(measure: Any) -> None:
    with pytest.raises(TypeError, match=r"such as `torch.func.grad` \(not `torch.func.grad\(fn\)`\)"):
        measure(lambda x: x.sum(), torch.ones(3), transform=torch.func.grad(lambda x: x.sum()))


def test_a_program_that_is_not_differentiated() -> None:
    text = "Nothing was differentiated: no argument or captured tensor requires grad or is floating-point."
    assert str(remat.check(lambda x: x + 1, torch.arange(3))).endswith(text)
    assert str(remat.report(lambda x: x + 1, torch.arange(3))).endswith(text)
    assert "Nothing" not in str(remat.check(lambda x: x + 1, torch.ones(3)))


def test_presets_have_their_own_help() -> None:
    assert policies.save_matmuls.__doc__ == "Saves the results of matrix products and convolutions."
    constants = (value for name, value in vars(policies).items() if name in policies.__all__ and not callable(value))
    assert all(value.__doc__ != type(value).__doc__ for value in constants)
