"""``remat.sequential``: functions that are called one after another, a few of them in each region."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch

from ._captured.captured import HOOKS
from ._core.known import Known
from ._core.signatures import lists_arguments
from ._function import Remat
from ._modules.region_class import is_sequence
from ._policy.policy import Policy, PolicyLike
from ._region.options import DeterminismCheck, checked_options
from .errors import shown

P = ParamSpec("P")
R = TypeVar("R")


@lists_arguments
def sequential(
    functions: Iterable[Callable[P, R]],
    segments: int | None = None,
    *inputs: NoReturn,
    policy: PolicyLike = None,
    preserve_rng_state: bool = True,
    determinism_check: DeterminismCheck = "metadata",
    early_stop: bool = True,
    debug: bool = False,
) -> Callable[P, R]:
    """Compose functions that are called one after another, with a region for each segment of them.

    Args:
        functions: functions or modules, or a ``torch.nn.Sequential``, which stands for its modules. The first one gets
            the arguments, each other one the result of the previous one.
        segments: the number of regions, of nearly equal length, from 1 to the number of functions. By default the
            square root of that number, rounded.
        policy, preserve_rng_state, determinism_check, early_stop, debug: options of the regions, as in
            :func:`remat.remat`.

    Returns:
        A function. It calls the modules themselves, so their parameters get gradients.

    Raises:
        TypeError: one of ``functions`` can't be called, or an option has the wrong type.
        ValueError: there are no functions, ``segments`` is out of its range, or a ``torch.nn.Sequential`` does more
            than call its modules: it has hooks or a forward of its own.
        PolicyError: ``policy`` is not a policy.

    Example:
        >>> import torch, remat
        >>> layers = [torch.nn.Linear(8, 8) for _ in range(9)]
        >>> f = remat.sequential(layers, segments=3)
        >>> f(torch.ones(2, 8)).sum().backward()

    The square root is from Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
    """
    if any(isinstance(each, Policy) for each in (segments, *inputs)):
        raise TypeError("The policy is a keyword argument: `remat.sequential(fs, policy=...)`.")
    if inputs:
        raise TypeError("remat.sequential returns a function, to call with the input: `remat.sequential(fs, 2)(x)`.")
    options = checked_options(policy, preserve_rng_state, determinism_check, early_stop, debug)
    if isinstance(functions, torch.nn.Sequential):
        own = not is_sequence(functions)
        if own or any(vars(functions).get(name) for name in HOOKS):
            raise ValueError(
                f"The {type(functions).__name__} has {'a forward' if own else 'hooks'} of its own, which would be "
                f"skipped. Pass `list(module)` if they are not needed, or make it one region: `remat(module)`."
            )
    row = row_of(functions, 1 if segments is None else segments)
    count = round(len(row) ** 0.5) if segments is None else segments
    ends = [len(row) * i // count for i in range(count + 1)]
    # The search for captured tensors looks into a partial's arguments.
    regions = [Remat(partial(segment, row[start:end]), options, Known()) for start, end in pairwise(ends)]
    return partial(segment, tuple(regions))


def row_of(functions: Any, segments: Any) -> tuple[Callable, ...]:
    """Return the functions as a tuple, after checking them and the number of segments."""
    if not isinstance(functions, Iterable):
        raise TypeError(f"functions must be an iterable of functions, such as a list; got {shown(functions)}.")
    row = tuple(functions)  # not `children()`, which lists a repeated module only once
    for i, fn in enumerate(row):
        if not callable(fn):
            raise TypeError(f"functions[{i}] must be a function or a module, got {shown(fn)}.")
    if not row:
        raise ValueError("There are no functions to call.")
    if not isinstance(segments, int) or isinstance(segments, bool):
        raise TypeError(f"segments must be an integer, got {shown(segments)}.")
    if not 1 <= segments <= len(row):
        raise ValueError(f"segments must be from 1 to {len(row)}, the number of functions; got {segments}.")
    return row


def segment(functions: tuple[Callable, ...], *args: Any, **kwargs: Any) -> Any:
    """Call functions one after another."""
    result = functions[0](*args, **kwargs)
    for fn in functions[1:]:
        result = fn(result)
    return result
