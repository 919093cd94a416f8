"""What rematerialization does for a program of the user's: whether its numbers are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ._core import private
from ._core.state import disable_remat
from ._measure.comparison import CheckResult, compared
from ._measure.program import Program
from ._measure.subject import Subject
from ._region.options import override
from .nn import apply
from .transform import remat

__all__ = ["CheckResult", "check"]


def check(
    fn: Callable,
    /,
    *args: Any,
    policy: Any = None,
    transform: Callable | None = None,
    loss: Callable | None = None,
    where: Any = None,
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
    with_remat = partial(_with_regions, fn, policy, where, determinism_check="values")
    with with_remat():  # what can't be a region is an error now
        pass
    return compared(program, partial(_without_regions, fn), with_remat)


def _check_levels(name: str) -> None:
    if private.transforms_active():
        raise RuntimeError(
            f"remat.{name} can't be called under a torch.func transform. Give it the transform instead: "
            f"`remat.{name}(fn, x, transform=torch.func.vmap)`."
        )


@contextmanager
def _without_regions(fn: Callable) -> Iterator[Callable]:
    with disable_remat():
        yield fn


@contextmanager
def _with_regions(fn: Any, policy: Any, where: Any, **options: Any) -> Iterator[Callable]:
    """The function as a region; or the model with regions ``where`` they are chosen, and as before in the end."""
    if where is None:
        region = remat(fn, policy=policy)
        with override(**options):
            yield region
        return
    classes = [(module, type(module)) for module in fn.modules()] if isinstance(fn, torch.nn.Module) else []
    try:
        with override(**options):
            yield apply(fn, where, policy=policy)
    finally:
        for module, cls in classes:
            if type(module) is not cls:
                module.__class__ = cls
