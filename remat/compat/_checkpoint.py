"""``torch.utils.checkpoint.checkpoint`` and ``checkpoint_sequential``, implemented with regions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ContextDecorator
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch.utils.checkpoint import CheckpointPolicy, noop_context_fn

from .. import _function
from .._compile import lowering as compiled
from .._core import private
from .._core.known import known_of
from .._policy.policy import Policy, PolicyLike, as_policy
from .._region.options import DeterminismCheck, Options, check_returns, checked_options
from .._sequential import row_of, segment
from ..errors import RematError, shown

_TWO_POLICIES = "There are two policies: one in context_fn, and policy. Combine them, as in `policy=p | [*ops]`."

P = ParamSpec("P")
R = TypeVar("R")


class Contexts:
    """A pair of context managers, as ``context_fn`` of ``torch.utils.checkpoint.checkpoint`` returns them."""

    def __init__(self, pair: Any) -> None:
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not (is_pair and all(hasattr(type(context), "__enter__") for context in pair)):
            raise TypeError(f"context_fn must return two context managers, for forward and recompute; got {pair!r}.")
        self.first, self.again = pair

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], again: bool) -> Any:
        """Call ``fn`` in the context for this run."""
        context = self.again if again else self.first
        results: list[Any] = []

        def call() -> None:
            results.append(fn(*args, **kwargs))

        if isinstance(context, ContextDecorator):  # as from `@contextmanager`, which can be entered only once itself
            context(call)()
        else:
            with context:
                call()
        if not results and not again:
            raise RematError(
                "The first context of context_fn suppressed an exception of the region's function, so there is no "
                "result. Let the context propagate exceptions, and handle them around the region."
            )
        return results[0] if results else None


@overload
def checkpoint(
    function: Callable[..., R],
    *args: Any,
    use_reentrant: bool | None = False,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], Any] = noop_context_fn,
    determinism_check: DeterminismCheck = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    policy: PolicyLike = None,
    **kwargs: Any,
) -> R: ...


@overload
def checkpoint(
    *,
    use_reentrant: bool | None = False,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], Any] = noop_context_fn,
    determinism_check: DeterminismCheck = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    policy: PolicyLike = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def checkpoint(
    function: Callable[..., Any] | None = None,
    *args: Any,
    use_reentrant: bool | None = False,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], Any] = noop_context_fn,
    determinism_check: DeterminismCheck = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    policy: PolicyLike = None,
    **kwargs: Any,
) -> Any:
    """Call ``function(*args, **kwargs)`` as a region. A drop-in for ``torch.utils.checkpoint.checkpoint``.

    Without ``function`` it returns a decorator, where the options are set; all keyword arguments of a call then go to
    the function.

    Args:
        function, args, kwargs: the function that is called now and recomputed in the backward pass, and its arguments.
        use_reentrant: must not be true, as there is no reentrant variant.
        context_fn: returns two context managers, for the forward and for recomputes. If torch's
            ``create_selective_checkpoint_contexts`` made the pair, its policy is the region's policy.
        determinism_check: as in :func:`remat.remat`; ``"default"`` is ``"metadata"``.
        preserve_rng_state, policy, debug, early_stop: as in :func:`remat.remat`. torch's
            ``set_checkpoint_debug_enabled`` and ``set_checkpoint_early_stop`` override the last two.
        respect_saved_tensors_hooks: must not be false, as saved-tensor hooks around the region, such as those of
            ``save_on_cpu``, always get what the policy saves.

    Returns:
        What ``function`` returns; a decorator if ``function`` is not given.

    Raises:
        ValueError: an option has a value that is not supported, there are two policies, or an option is unknown.
        TypeError: ``function`` can't be called, is a generator or async function, or ``context_fn`` doesn't return two
            context managers.
        PolicyError: ``policy`` is not a policy.
        CheckpointError: in the backward; the errors of :func:`remat.remat` are subclasses of it.

    Example:
        >>> import torch
        >>> from remat.compat import checkpoint
        >>> x = torch.ones(3, requires_grad=True)
        >>> checkpoint(lambda x, scale: (x * scale).sin().cos(), x, scale=2.0, use_reentrant=False).sum().backward()

    Based on torch's documentation of ``torch.utils.checkpoint``. :doc:`/reference/differences` lists the differences.
    """
    if respect_saved_tensors_hooks is False:
        raise ValueError(
            "respect_saved_tensors_hooks=False is not supported: saved-tensor hooks around a region get what its "
            "policy saves. Remove the option, and call the regions that the hooks must not see outside of the hooks."
        )
    _check_reentrant(use_reentrant)
    options = checked_options(policy, bool(preserve_rng_state), determinism_check, bool(early_stop), bool(debug))
    if function is not None or args:
        return _call(function, options, context_fn, args, kwargs)
    if kwargs:
        raise ValueError(f"checkpoint has no option {', '.join(kwargs)}. Without a function it takes only options.")
    return functools.partial(_decorated, options, context_fn)


def _decorated(options: Options, context_fn: Callable, function: Callable) -> Callable:
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return _call(function, options, context_fn, args, kwargs)

    return functools.update_wrapper(checkpointed, function, updated=())


@private.skipped_unless_inlined  # as calls of rematerialized functions
def _call(function: Any, options: Options, context_fn: Callable, args: tuple, kwargs: dict) -> Any:
    if torch.compiler.is_compiling():  # Dynamo can't trace the checks for all kinds of callables
        given = None if context_fn is noop_context_fn else context_fn
        if given is not None and options.policy is not None:  # only a selective context_fn can be traced, as in torch
            raise ValueError(_TWO_POLICIES)
        return compiled.call(function, options, args, kwargs, given)
    if not callable(function):
        raise TypeError(f"checkpoint takes a function and its arguments, got {type(function).__name__}.")
    check_returns(function)
    if isinstance(context_fn, Policy):
        raise TypeError(f"context_fn was the policy {context_fn!r}. A policy is the option `policy=`.")
    if not callable(context_fn):
        raise TypeError(f"context_fn must be a function that returns two context managers, got {shown(context_fn)}.")
    if context_fn is not noop_context_fn:
        contexts = Contexts(context_fn())
        if (type(contexts.first), type(contexts.again)) != private.SelectiveModes:
            options = replace(options, contexts=contexts)
        elif options.policy is not None:
            raise ValueError(_TWO_POLICIES)
        else:
            policy_fn = contexts.first.policy_fn
            policy = functools.update_wrapper(functools.partial(_answer, policy_fn), policy_fn, updated=())
            options = replace(options, policy=as_policy(policy))
    return _function.call(function, options, known_of(function), args, kwargs)


def _answer(policy_fn: Callable, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool | CheckpointPolicy:
    """The answer of torch's policy function; like torch, read any other value (and None) as "recompute"."""
    answer = policy_fn(ctx, op, *args, **kwargs)
    return answer if isinstance(answer, (bool, CheckpointPolicy)) else False


def _check_reentrant(use_reentrant: Any) -> None:
    if use_reentrant:
        raise ValueError(
            "use_reentrant=True is not supported: the reentrant variant runs the forward without a graph and starts a "
            "backward pass of its own, so torch.autograd.grad, torch.func, and tensors in keyword arguments or "
            "containers fail with it. Pass use_reentrant=False, which supports all that the reentrant variant supports."
        )


def checkpoint_sequential(
    functions: Any,
    segments: int,
    input: Any,
    use_reentrant: bool | None = False,
    *,
    policy: PolicyLike = None,
    **kwargs: Any,
) -> Any:
    """Call functions one after another, in regions. A drop-in for ``torch.utils.checkpoint.checkpoint_sequential``.

    As in torch, the last segment is not a region, and contains the remainder of the division.
    :func:`remat.sequential` makes one function of the functions.

    Args:
        functions: a ``torch.nn.Sequential``, or a list of modules or functions, each with one argument and one result.
        segments: the number of segments, from 1 to the number of functions.
        input: the argument of the first function.
        use_reentrant: must not be true, as there is no reentrant variant.
        policy: what may be saved beyond the inputs of a segment; see :func:`remat.remat`.
        kwargs: ``preserve_rng_state``, by default true.

    Raises:
        ValueError: ``segments`` is out of its range, ``use_reentrant`` is true, or there are other keyword arguments.
        TypeError: ``functions`` contains something that can't be called, or there is a second input.
        PolicyError: ``policy`` is not a policy.

    Example:
        >>> import torch
        >>> from remat.compat import checkpoint_sequential
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6)))
        >>> checkpoint_sequential(model, 3, torch.ones(2, 4), use_reentrant=False).sum().backward()
    """
    preserve = kwargs.pop("preserve_rng_state", True)
    if kwargs:
        raise ValueError(f"checkpoint_sequential has no option {', '.join(kwargs)}.")
    if use_reentrant is not None and not isinstance(use_reentrant, int):
        raise TypeError(
            f"checkpoint_sequential takes one input, for the first function, and then use_reentrant, a bool; got "
            f"an object of type {type(use_reentrant).__name__} for use_reentrant. Pass several inputs as one tuple, "
            f"or call remat.sequential(functions, segments)(*inputs), whose first function takes any arguments."
        )
    _check_reentrant(use_reentrant)
    row = row_of(functions, segments)
    size = len(row) // segments
    for i in range(segments - 1):
        part = functools.partial(segment, row[i * size : (i + 1) * size])
        input = checkpoint(part, input, policy=policy, preserve_rng_state=preserve)
    return segment(row[(segments - 1) * size :], input)
