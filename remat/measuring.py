"""What rematerialization does for a user's program: what it saves and costs, and that the numbers are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from . import policies as policies_
from ._core import private
from ._core.state import disable_remat
from ._measure.comparison import CheckResult, compared
from ._measure.costs import Costs, Share, distinct, measured
from ._measure.program import Program
from ._measure.subject import Subject
from ._measure.summary import Report
from ._policy.policy import PolicyLike, as_policy
from ._policy.warnings import silenced
from ._region.options import override
from .nn import Where, apply
from .transform import remat

__all__ = ["CheckResult", "Costs", "Report", "Share", "check", "report"]


def check(
    fn: Callable[..., Any],
    /,
    *args: Any,
    policy: PolicyLike = None,
    transform: Callable[..., Any] | None = None,
    loss: Callable[..., Any] | None = None,
    where: Where | None = None,
    **kwargs: Any,
) -> CheckResult:
    """Compare a program with rematerialization and without: values, gradients, generators and what it changes.

    It runs ``fn(*args, **kwargs)`` and the backward of a loss, once without any region and once as
    ``remat(fn, policy=policy)`` with ``determinism_check="values"``. Gradients, buffers, generators, hooks and the
    state of modules are left as they were, also if the program fails. It is differentiated by what requires grad; if
    nothing does, by all floating-point arguments.

    Args:
        fn: the function or module. It may have regions in it, which are plain calls in the first run.
        *args: its arguments, any pytrees.
        policy: what the region may keep, as in :func:`remat.remat`.
        transform: what to make of the function, such as ``torch.func.grad``: then ``transform(remat(fn))(*args,
            **kwargs)`` is compared, and there is no loss.
        loss: a function of the result. By default the result's ``.loss`` where it has one, else the sum of its
            floating-point tensors.
        where: which submodules of a model are regions, as in :func:`remat.nn.apply`, instead of the model as a whole.
        **kwargs: its keyword arguments.

    Returns:
        A result that is true if all is the same; printed it says what differs and where. A program that fails is a
        result too.

    Raises:
        RuntimeError: it is called under a ``torch.func`` transform. Give it that as ``transform``.
        PolicyError: ``policy`` is not a policy.
        TypeError: ``fn`` can't be a region, or has no modules ``where`` they are chosen.

    Example:
        >>> import torch
        >>> import remat
        >>> def f(w, x):
        ...     return torch.tanh(x @ w).sum()
        >>> w, x = torch.ones(4, 4), torch.ones(2, 4)
        >>> print(remat.check(f, w, x))
        The same with remat and without it, to the last bit: 1 result, 2 gradients and the random generators.
        >>> remat.check(f, w, x, transform=torch.func.grad).ok
        True
        >>> calls = []
        >>> def other_each_time(x):
        ...     calls.append(None)
        ...     return x.sin() if len(calls) % 2 else x.cos()
        >>> remat.check(other_each_time, x).ok
        False
    """
    _check_levels("check")
    program = Program(Subject(fn, args, kwargs, transform, loss), transform, loss)
    with_remat = _with_regions(fn, policy, where, determinism_check="values")
    with with_remat():  # what can't be a region is an error now
        pass
    return compared(program, _without_regions(fn), with_remat)


def report(
    fn: Callable[..., Any],
    /,
    *args: Any,
    policies: Iterable[PolicyLike] | None = None,
    transform: Callable[..., Any] | None = None,
    loss: Callable[..., Any] | None = None,
    where: Where | None = None,
    **kwargs: Any,
) -> Report:
    """What a program saves for its backward and recomputes in it, without rematerialization and under policies.

    It runs ``fn(*args, **kwargs)`` and the backward of a loss: without any region; as it is, if it has regions; and as
    ``remat(fn, policy=policy)`` for each policy. Gradients, buffers, generators, hooks and the state of modules are
    left as they were. It is differentiated by what requires grad; if nothing does, by all floating-point arguments.

    Bytes are those of tensors, counted at each operation, and FLOPs those of matrix products, convolutions and
    attention. On a CPU they are the same in each run; on a device the peak of its allocator is there beside them.

    Args:
        fn: the function or module.
        *args: its arguments, any pytrees.
        policies: what may be kept, each as in :func:`remat.remat`. By default nothing, attention, matrix products, and
            both, without those that come to the same.
        transform: what to make of the function, such as ``torch.func.grad``: ``transform(remat(fn))(*args, **kwargs)``
            runs then, and there is no loss.
        loss: a function of the result. By default the result's ``.loss`` where it has one, else the sum of its
            floating-point tensors.
        where: which submodules of a model are regions, as in :func:`remat.nn.apply`, instead of the model as a whole.
        **kwargs: its keyword arguments.

    Returns:
        A report. Printed it is a table; in a notebook it is a page with pictures, as ``to_html("report.html")`` writes.
        ``rows`` has the figures, ``pareto`` the policies that no other one beats, ``residuals`` what is saved by module
        and operation, ``timeline`` the live bytes over the operations, and ``to_dict()`` all of it.

    Raises:
        RuntimeError: it is called under a ``torch.func`` transform. Give it that as ``transform``.
        PolicyError: one of the ``policies`` is not a policy.
        TypeError: ``policies`` is no list, or ``fn`` can't be a region.

    Example:
        >>> import torch
        >>> import remat
        >>> def f(w, x):
        ...     return torch.tanh(torch.tanh(x @ w) @ w).sum()
        >>> report = remat.report(f, torch.ones(64, 64), torch.ones(256, 64))
        >>> [(row.label, row.saved_bytes, row.recomputed_flops) for row in report.policies]
        [('no policy', 4, 4194304), ('save_matmuls', 131076, 0)]
        >>> [row.label for row in report.pareto]
        ['no policy', 'save_matmuls']
    """
    _check_levels("report")
    program = Program(Subject(fn, args, kwargs, transform, loss), transform, loss)
    if policies is not None and not isinstance(policies, Iterable):
        raise TypeError(f"policies is a list of policies: `policies=[{policies!r}]`.")
    asked = [None if policy is None else as_policy(policy) for policy in (_USUAL if policies is None else policies)]
    plain = measured(program, "without remat", _without_regions(fn))
    as_it_is = measured(program, "as it is", lambda: nullcontext(fn), plain)
    rows = distinct([plain, as_it_is])
    with silenced() if policies is None else nullcontext():  # the user hasn't asked for these
        found = [
            measured(program, label, _with_regions(fn, policy, where), plain, policy, under_policy=True)
            for label, policy in zip(_labels(asked), asked)
        ]
    return Report(
        _name(fn, transform), _environment(program), (*rows, *(distinct(found) if policies is None else found))
    )


_USUAL = (
    None,
    policies_.save_attention,
    policies_.save_matmuls,
    policies_.save_matmuls | policies_.save_attention,
)


def _labels(asked: Sequence[Any]) -> list[str]:
    """What policies are called, each in another way."""
    texts = ["no policy" if policy is None else repr(policy).replace("policies.", "") for policy in asked]
    return [
        text if texts.count(text) == 1 else f"{text} ({texts[: i + 1].count(text)})" for i, text in enumerate(texts)
    ]


def _name(fn: Any, transform: Any) -> str:
    name = getattr(fn, "__name__", type(fn).__name__)
    how = getattr(transform, "__name__", "") if transform is not None else ""
    return f"{how}({name})" if how.isidentifier() else name


def _environment(program: Program) -> dict[str, str]:
    kinds = sorted({tensor.device.type for tensor in program.subject.inputs()} - {"cpu", "meta"})
    modules = [torch.get_device_module(kind) for kind in kinds]
    names = [
        module.get_device_name() if hasattr(module, "get_device_name") else kind for module, kind in zip(modules, kinds)
    ]
    return {"torch": f"torch {torch.__version__}", "device": ", ".join(names) or "CPU"}


def _check_levels(name: str) -> None:
    if private.transforms_active():
        raise RuntimeError(
            f"remat.{name} can't be called under a torch.func transform. Give it the transform instead: "
            f"`remat.{name}(fn, x, transform=torch.func.vmap)`."
        )


Way = Callable[[], AbstractContextManager[Any]]


def _without_regions(fn: Callable) -> Way:
    @contextmanager
    def way() -> Iterator[Callable]:
        with disable_remat():
            yield fn

    return way


def _with_regions(fn: Any, policy: Any, where: Any, **options: Any) -> Way:
    """The function as a region; or the model with regions ``where`` they are chosen, and as before in the end."""
    region = remat(fn, policy=policy) if where is None else None

    @contextmanager
    def way() -> Iterator[Any]:
        classes = [(each, type(each)) for each in fn.modules()] if isinstance(fn, torch.nn.Module) else []
        try:
            with override(**options):
                yield region if where is None else apply(fn, where, policy=policy)
        finally:
            for module, cls in classes:
                if type(module) is not cls:
                    module.__class__ = cls

    return way
