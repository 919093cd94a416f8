"""``remat.scan``: a loop as regions of several steps, which contain regions of fewer steps.

The binomial schedule decides which carries are saved, so that the fewest steps are recomputed. A run of ``count``
steps starts from a carry that is saved already, and may save ``spare`` more. All steps but the last are divided into
segments: each is a region, which saves the carry that it starts from. The last step is the first one that a backward
needs. When the backward comes to a segment, the carries of the segments after it have been freed.
By default a step of this schedule is a block of steps that save little, as small steps take less time than a region.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import comb
from operator import index
from typing import Any, NamedTuple, TypeVar

import torch

from ._core import private, trees
from ._core.amounts import parse_amount
from ._core.known import known_of
from ._core.signatures import lists_arguments
from ._core.state import disable_remat, own_work, state, unseen
from ._engine.lowering import Saver
from ._function import call
from ._measure.program import Program
from ._policy.policy import PolicyLike
from ._region.error_context import add_note
from ._region.fingerprints import fingerprint
from ._region.hooks import hooks_hidden, of_region
from ._region.options import Options, checked_options
from .errors import shown


def segments(count: int, spare: int) -> list[tuple[int, int]]:
    """Divide all steps but the last into segments: the number of steps of each, and of carries that it may save."""
    found = []
    while count > 1:
        repeats = depth(count, spare)
        size = max(1, _reach(spare + 1, repeats - 2), count - _reach(spare, repeats))
        found.append((size, spare))
        count, spare = count - size, spare - 1
    return found


def depth(count: int, spare: int) -> int:
    """The number of nested segments, which is also the most times that a step is recomputed."""
    repeats = 0
    while _reach(spare + 1, repeats) < count:
        repeats += 1
    return repeats


def _reach(carries: int, repeats: int) -> int:
    """The number of steps that can be reversed with so many carries, including the first, and repeats of a step."""
    return comb(carries + repeats, carries) if repeats >= 0 else 0


C = TypeVar("C")
Tensors = Sequence[torch.Tensor]
BLOCK = 2**20  # bytes that the steps of a block may save together


@private.never_traced
@lists_arguments
def scan(
    step: Callable[[C, Any], tuple[C, Any]],
    carry: C,
    xs: Any = None,
    length: int | None = None,
    *,
    reverse: bool = False,
    checkpoints: int | str | float | None = None,
    policy: PolicyLike = None,
    preserve_rng_state: bool = True,
) -> tuple[C, Any]:
    """Call ``step`` for one ``x`` after another, and save only a few of the carries for the backward.

    Computes the same values and derivatives as this loop, but in the memory of ``checkpoints`` carries and one step, or
    by default 1 MiB of steps::

        for i in range(length):
            carry, y = step(carry, x_i)

    Args:
        step: called as ``step(carry, x)``; returns the next carry and ``y``, each any pytree of tensors. All carries
            have the same structure, shapes, dtypes and devices. Captured tensors, modules and random numbers are
            handled as in a region of :func:`remat.remat`.
        carry: the first carry, any pytree of tensors.
        xs: a pytree of tensors of shape ``[length, ...]``: a step gets one entry of each. If None, steps get None.
            A list of one tensor for each step must be stacked: ``torch.stack(xs)``.
        length: the number of steps; optional if ``xs`` has tensors. Without steps, ``step`` is called once, with
            zeros for ``x``, to find the shapes of ``y``, and what it changes is restored.
        reverse: run the steps from the last entries of ``xs`` to the first. The ``y`` are stacked in the order of
            ``xs``: that of the first step comes last.
        checkpoints: the maximum number of saved carries, without the first one, which is an input. An int, a string
            such as ``"64MiB"`` (as many as fit), or a float in (0, 1], a fraction of all carries. By default the
            base-2 logarithm of ``length``, between blocks of steps, see below.
        policy: values of the steps that may be saved too, for all steps at the same time, so that they are not
            recomputed; see :func:`remat.remat`. ``None`` saves none.
        preserve_rng_state: make the recompute draw the same random numbers as the forward.

    Returns:
        A pair of the last carry and the stacked ``y``, which has the structure of one ``y`` and tensors of shape
        ``[length, ...]``.

    Raises:
        TypeError: ``step`` is not callable, a leaf is not a tensor, or an argument has the wrong type.
        ValueError: ``xs`` and ``length`` don't agree, the structure or metadata of a carry or ``y`` changes between
            steps, ``checkpoints`` is out of its range, or so low that regions would nest too deep.
        PolicyError: ``policy`` is not a policy.

    The backward recomputes each step once, and some steps several times, as few carries are saved. The total for this
    number of ``checkpoints`` is the least possible: 3.5 times ``length`` for 10 carries and 1,000 steps.

    By default a block of steps is recomputed together, so many that each step is recomputed once, but not more than
    save 1 MiB for the backward. It is measured in the second step. So small steps take less time, and steps that save
    more than 512 KiB, or call ``torch.func``, are recomputed one by one as with ``checkpoints``.

    Under ``torch.func``, gradients of tensors that all steps read are summed region by region, so they may differ by
    rounding. ``torch.compile`` breaks its graph here; compile the step, which is then traced once.

    Example:
        >>> import torch, remat
        >>> w = torch.full((4, 4), 0.1, requires_grad=True)
        >>> def step(h, x):
        ...     h = torch.tanh(h @ w + x)
        ...     return h, h.sum()
        >>> h, sums = remat.scan(step, torch.zeros(4), torch.ones(100, 4))
        >>> sums.shape
        torch.Size([100])
        >>> sums.sum().backward()

        Backwards, for the sums of each entry and all later ones:

        >>> remat.scan(lambda h, x: (h + x, h + x), torch.zeros(()), torch.arange(4.0), reverse=True)[1]
        tensor([6., 6., 5., 3.])

    Modeled on ``jax.lax.scan``; the schedule is that of A. Griewank and A. Walther, "Algorithm 799: revolve", 2000.
    """
    if not callable(step):
        raise TypeError(f"step must be a function of a carry and an x, got {shown(step)}.")
    if not isinstance(reverse, bool):
        raise TypeError(f"reverse must be True or False, got {shown(reverse)}.")
    # A step may run a backward pass, inside many regions.
    options = replace(checked_options(policy, preserve_rng_state), read_inside=True)
    leaves, spec = ([], None) if xs is None else trees.flatten(xs)
    count = checked_length(leaves, spec, length)
    loop = Loop(step, options, Trees("carry"), spec, Trees("y"), slice(None, None, -1 if reverse else 1))
    loop.carry.checked(carry)
    spare = _spare(checkpoints, count, loop.carry)
    if count == 0:
        # A step runs on zeros. Its changes are restored, and regions around must not see it.
        preserved = Program(step, (carry,), {}).preserved()
        with own_work(), unseen(), hooks_hidden(), disable_remat(), torch.no_grad(), preserved:
            _, y = loop.call(0, carry, [leaf.new_zeros(leaf.shape[1:]) for leaf in leaves])
        stacks = [None if t is None else torch.empty((0, *t.shape), dtype=t.dtype, device=t.device) for t in y]
        return carry, loop.y.spec.unflatten(stacks)
    _check_depth(count, spare, options)
    run = loop.in_blocks if checkpoints is None and count > 2 else loop.in_regions
    try:
        last, ys = run(count, spare, 0, carry, leaves)
    except Exception as error:
        if type(xs) is list and len({leaf.shape for leaf in leaves}) == 1:
            add_note(
                error,
                "xs is a list: a step gets a list with one entry of each of its tensors. If they are the steps, stack "
                "them: `torch.stack(xs)`.",
            )
        raise
    stacks = [None if column[0] is None else torch.stack(column[loop.order]) for column in zip(*ys)]
    return last, loop.y.spec.unflatten(stacks)


def _spare(checkpoints: Any, count: int, kinds: Trees) -> int:
    """The number of carries that may be saved, without the first one."""
    if checkpoints is None:
        return count.bit_length()
    if not isinstance(checkpoints, (bool, torch.Tensor)) and hasattr(checkpoints, "__index__"):
        checkpoints = index(checkpoints)  # NumPy's integers are accepted too
    nbytes = max(1, kinds.nbytes)
    amount = parse_amount(checkpoints, nbytes * count, "checkpoints", "carries")
    return min(amount if isinstance(checkpoints, int) else amount // nbytes, count)


def _check_depth(count: int, spare: int, options: Options) -> None:
    """Check the recursion limit: each nested region takes some Python frames, more under modes or transforms."""
    has_modes = options.policy is not None or state.policies or state.override
    most = (sys.getrecursionlimit() - 200) // (30 if private.transforms_active() else 20 if has_modes else 10)
    if depth(count + 1, spare) > most:
        least = next(k for k in range(spare, count + 1) if depth(count + 1, k) <= most)
        raise ValueError(
            f"With checkpoints={spare}, a loop of {count} steps needs {depth(count + 1, spare)} nested regions, more "
            f"than Python's recursion limit allows. Use checkpoints of at least {least}."
        )


class Loop(NamedTuple):
    """Objects that all segments share."""

    step: Callable
    options: Options
    carry: Trees
    spec: Any  # of ``xs``; None if there are none
    y: Trees
    order: slice  # of entries; the last one comes first if the loop runs backwards
    width: int = 1  # the number of steps in a block

    def call(self, number: int, carry: Any, leaves: Iterable[torch.Tensor]) -> tuple[Any, list]:
        """Call step ``number`` with these leaves of ``x``. Return the next carry and the leaves of ``y``, checked."""
        pair = self.step(carry, None if self.spec is None else self.spec.unflatten(leaves))
        if not isinstance(pair, tuple) or len(pair) != 2:
            got = f"a tuple of {len(pair)}" if isinstance(pair, tuple) else f"an object of type {type(pair).__name__}"
            raise TypeError(f"step must return a pair, the next carry and y (or None); step {number} returned {got}.")
        carry, y = pair
        self.carry.checked(carry, number)
        return carry, self.y.checked(y, number)

    def in_blocks(self, count: int, spare: int, start: int, carry: Any, xs: Tensors) -> tuple[Any, list]:
        """``in_regions`` with blocks of several steps, if the second step saves little.

        The first one may save less than the others, as the first carry may not require grad.
        """
        first, rest = self._split(xs, [2, count - 2])
        carry, ys, saved = call(self._first_two, self.options, known_of(self.step), (carry, first), {})
        # Each block of this width is recomputed once. A block is shorter if so many steps save more than it may.
        width = 1 if saved is None else max(1, min(-(-(count - 2) // spare), BLOCK // max(1, saved)))
        last, more = self._replace(width=width).in_regions(count - 2, spare - 1, start + 2, carry, rest)
        return last, [*ys, *more]

    def _first_two(self, carry: Any, xs: Tensors) -> tuple[Any, list, int | None]:
        """Run the first two steps. Return also the bytes that the second one saves, where that is known."""
        carry, ys = self._segment(2, 0, 0, carry, xs)
        hooks = of_region(private.top_hooks(True))
        if not isinstance(hooks, Saver):
            return carry, ys, None
        values = [slot.value for slot in hooks.frame.slots.alive() if slot is not None]
        return carry, ys, sum(value.numel() * value.element_size() for value in values if value is not None)

    def in_regions(self, count: int, spare: int, start: int, carry: Any, xs: Tensors) -> tuple[Any, list]:
        """Run steps, in a region for each segment. Return the carry after them, and the leaves of each ``y``."""
        known, ys = known_of(self.step), list[Any]()
        parts = segments(-(-count // self.width) + 1, spare)
        sizes = [size * self.width for size, _ in parts]
        sizes[-1:] = [count - sum(sizes[:-1])]  # the last block may be shorter
        for size, (_, left), part in zip(sizes, parts, self._split(xs, sizes)):
            carry, found = call(partial(self._segment, size, left, start), self.options, known, (carry, part), {})
            ys += found
            start += size
        return carry, ys

    def _segment(self, count: int, spare: int, start: int, carry: Any, xs: Tensors) -> tuple[Any, list]:
        """Run one segment: its last block itself, the blocks before it in inner regions."""
        before = (count - 1) // self.width * self.width
        ys = list[Any]()
        if before:
            first, xs = self._split(xs, [before, count - before])
            carry, ys = self.in_regions(before, spare, start, carry, first)
        entries = list(zip(*(leaf.unbind()[self.order] for leaf in xs))) or [()] * (count - before)
        for i, x in enumerate(entries, start + before):
            carry, y = self.call(i, carry, x)
            # Copies, as the memory of `y` may be a part of a larger tensor, or be changed by a later step.
            ys.append([None if leaf is None else leaf.clone() for leaf in y])
        return carry, ys

    def _split(self, xs: Tensors, sizes: list[int]) -> Sequence[Tensors]:
        """Split into the entries for each segment, by a single operation, whose gradient is a single operation too."""
        return list(zip(*(leaf.split(sizes[self.order])[self.order] for leaf in xs))) or [()] * len(sizes)


class Trees:
    """The structure of a pytree and the kinds of its leaves, tensors or None, from the first one that is checked."""

    def __init__(self, what: str) -> None:
        self.what = what  # its name in errors
        self.spec: Any = None

    def checked(self, tree: Any, number: int = 0) -> list[Any]:
        """Return the leaves of what step ``number`` returned. ValueError if its structure, or a kind, has changed."""
        leaves, spec = trees.flatten(tree)
        if self.spec is None:
            self.spec, self.kinds = spec, list(map(_kind, leaves))
            for i, leaf in enumerate(leaves):
                if leaf is not None and not isinstance(leaf, torch.Tensor):
                    raise TypeError(
                        f"{self._name(i)} must be a tensor, got {shown(leaf)}. Convert numbers with "
                        f"`torch.as_tensor`, and let the step function capture values that steps don't change."
                    )
            self.nbytes = sum(leaf.numel() * leaf.element_size() for leaf in leaves if leaf is not None)
        if spec != self.spec:
            raise ValueError(
                f"Step {number} changes the structure of {self.what}: "
                f"{trees.describe_difference(self.spec, spec, self.what)} It must not change."
            )
        for i, (leaf, kind) in enumerate(zip(leaves, self.kinds)):
            if (now := _kind(leaf)) != kind:
                raise ValueError(f"Step {number} changes {self._name(i)} from {kind} to {now}. It must not change.")
        return leaves

    def _name(self, i: int) -> str:
        return trees.paths(self.spec, self.what)[i]


def _kind(leaf: Any) -> Any:
    return fingerprint(leaf, "metadata") if isinstance(leaf, torch.Tensor) else leaf


def checked_length(leaves: list, spec: Any, length: Any) -> int:
    """Return the number of steps, for these leaves of ``xs``, or raise the errors that `scan` documents."""
    if length is not None:
        if isinstance(length, (bool, torch.Tensor)) or not hasattr(length, "__index__"):
            raise TypeError(f"length must be an integer, got {shown(length)}.")
        length = index(length)  # NumPy's integers are accepted too
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            got = "a tensor without dimensions" if isinstance(leaf, torch.Tensor) else repr(leaf)
            raise TypeError(f"{trees.paths(spec, 'xs')[i]} must be a tensor of shape [length, ...], got {got}.")
        if length is None:
            length = len(leaf)
        elif len(leaf) != length:
            raise ValueError(f"{trees.paths(spec, 'xs')[i]} has {len(leaf)} entries, but there are {length} steps.")
    if length is None:
        raise ValueError("The number of steps is unknown: pass `length`, or `xs` with at least one tensor.")
    if length < 0:
        raise ValueError(f"The number of steps must not be negative, got {length}.")
    return length
