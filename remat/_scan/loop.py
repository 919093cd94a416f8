"""``remat.scan``: a loop as regions of steps, within which are regions of fewer steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import index
from typing import Any, NamedTuple, TypeVar

import torch

from .._core import private, trees
from .._core.amounts import as_bytes
from .._core.known import known_of
from .._core.state import state
from .._function import call
from .._region.options import Options, checked_options
from .checks import Trees, checked_length, checked_pair
from .results import Results
from .schedule import depth, segments

__all__ = ["scan"]

C = TypeVar("C")


@private.never_traced
def scan(
    step: Callable[[C, Any], tuple[C, Any]],
    carry: C,
    xs: Any = None,
    length: int | None = None,
    *,
    checkpoints: int | str | float | None = None,
    policy: Any = None,
) -> tuple[C, Any]:
    """Call ``step`` for one ``x`` after another, and keep few of the carries between forward and backward.

    The same as this loop, with the same values and derivatives, but in the memory of ``checkpoints`` carries and one
    step::

        for i in range(length):
            carry, y = step(carry, x_i)

    Args:
        step: called as ``step(carry, x)``; returns the next carry and ``y``, each any pytree of tensors. The next carry
            has the structure, shapes, dtypes and devices of the one before. What ``step`` reads besides, tensors,
            modules, random numbers, is treated as in a region of :func:`remat.remat`.
        carry: the first carry, any pytree of tensors.
        xs: a pytree of tensors of shape ``[length, ...]``: a step gets one entry of each. None: steps get None.
        length: the number of steps; it may be left out if ``xs`` tells it.
        checkpoints: how many carries are kept at most, beyond the first one, which is an input. An int, a text such as
            ``"64MiB"`` (as many as fit), or a float in (0, 1], which is that part of all carries. By default about
            the base-2 logarithm of ``length``.
        policy: what may be kept of each step besides, of all of them at once, so that recomputes needn't compute it;
            see :func:`remat.remat`. ``None`` keeps nothing.

    Returns:
        The last carry, and the ``y`` of all steps in the structure of one, with tensors of shape ``[length, ...]``.

    Raises:
        TypeError: ``step`` is not callable, a leaf of a tree is no tensor, or an argument has the wrong type.
        ValueError: ``xs`` and ``length`` don't fit together, there are no steps, a carry or ``y`` changes from one step
            to the next, ``checkpoints`` is out of its range or so low that regions would nest too deep.
        PolicyError: ``policy`` is not a policy.

    Note:
        A backward computes each step once more, and those that it has to start farther back for again: the least
        possible number, by the binomial rule of Griewank and Walther's "revolve". Steps of the first forward
        don't count. With the default that is 2.5 steps for each of 100, and 3.5 for each of 1,000.

        Under ``torch.func`` gradients of what all steps read are added up by regions, so they may differ in the last
        places. ``torch.compile`` breaks its graph here; give it the step, ``scan(torch.compile(step), ...)``, which is
        traced once, not once for each step.

    Example:
        >>> import torch
        >>> import remat
        >>> w = torch.full((4, 4), 0.1, requires_grad=True)
        >>> def step(h, x):
        ...     h = torch.tanh(h @ w + x)
        ...     return h, h.sum()
        >>> h, sums = remat.scan(step, torch.zeros(4), torch.ones(100, 4))
        >>> sums.shape
        torch.Size([100])
        >>> sums.sum().backward()

    After ``jax.lax.scan``; the schedule is that of A. Griewank and A. Walther, "Algorithm 799: revolve", 2000.
    """
    if not callable(step):
        raise TypeError(f"step must be a function of a carry and an x, got {step!r}.")
    options = replace(checked_options(policy), read_inside=True)  # a step may differentiate, at the end of many regions
    count = checked_length(xs, length)
    kinds = Trees(carry, "carry")
    spare = _spare(checkpoints, count, kinds)
    _check_depth(count, spare, options)
    loop = Loop(options, kinds, Results(count))
    last, tokens = _in_regions(step, loop, segments(count + 1, spare), 0, carry, xs)
    return last, loop.results.close(tokens)


def _spare(checkpoints: Any, count: int, kinds: Trees) -> int:
    """How many carries may be kept beyond the first one."""
    if checkpoints is None:
        return count.bit_length()
    if not isinstance(checkpoints, (bool, torch.Tensor)) and hasattr(checkpoints, "__index__"):
        checkpoints = index(checkpoints)
        if checkpoints < 0:
            raise ValueError(f"checkpoints must not be negative, got {checkpoints}.")
        return min(checkpoints, count)
    nbytes = max(1, kinds.nbytes)
    return min(as_bytes(checkpoints, nbytes * count, "checkpoints") // nbytes, count)


def _check_depth(count: int, spare: int, options: Options) -> None:
    """Each region in another one takes some frames of Python, more of them where modes or transforms are around."""
    has_modes = options.policy is not None or state.policies or state.override
    most = (sys.getrecursionlimit() - 200) // (30 if private.transforms_active() else 20 if has_modes else 10)
    if depth(count + 1, spare) > most:
        least = next(k for k in range(spare, count + 1) if depth(count + 1, k) <= most)
        raise ValueError(
            f"With checkpoints={spare}, {depth(count + 1, spare)} regions of {count} steps would be in one another, "
            f"more than Python's recursion limit allows. Give checkpoints of at least {least}."
        )


class Loop(NamedTuple):
    """What all segments share beside the step."""

    options: Options
    carry: Trees
    results: Results


def _in_regions(
    step: Callable, loop: Loop, sizes: Sequence[tuple[int, int]], start: int, carry: Any, xs: Any
) -> tuple[Any, list]:
    """Some steps, in a region for each segment: the carry after them, and what stands for their ``y``."""
    known, tokens = known_of(step), list[Any]()
    for (size, spare), part in zip(sizes, _split(xs, [size for size, _ in sizes])):
        run = partial(_run, step, loop, size, spare, start)
        carry, found = call(run, loop.options, known, (carry, part), {})
        tokens += found
        start += size
    return carry, tokens


def _run(step: Callable, loop: Loop, size: int, spare: int, start: int, carry: Any, xs: Any) -> tuple[Any, list]:
    """One segment: its last step is the region's own, those before it are in regions inside."""
    first, last = _split(xs, [size - 1, 1]) if size > 1 else (None, xs)
    carry, tokens = _in_regions(step, loop, segments(size, spare), start, carry, first)
    number = start + size - 1
    carry, y = checked_pair(step(carry, _entry(last)), number)
    loop.carry.checked(carry, number)
    return carry, [*tokens, loop.results.add(number, y)]


def _split(xs: Any, sizes: list[int]) -> list[Any]:
    """The entries for each segment, by one operation for all of them, so that its gradient is one too."""
    if xs is None:
        return [None] * len(sizes)
    leaves, spec = trees.flatten(xs)
    parts = [leaf.split(sizes) for leaf in leaves]
    return [trees.unflatten(spec, [part[i] for part in parts]) for i in range(len(sizes))]


def _entry(xs: Any) -> Any:
    """The only one."""
    if xs is None:
        return None
    leaves, spec = trees.flatten(xs)
    return trees.unflatten(spec, [leaf[0] for leaf in leaves])
