"""The user's context managers around the runs of a region: one for the forward, one for recomputes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ContextDecorator
from typing import Any

from ..errors import RematError


class Contexts:
    """A pair of context managers, as ``context_fn`` of ``torch.utils.checkpoint.checkpoint`` returns them.

    Raises:
        TypeError: ``pair`` is not a pair of context managers.
    """

    __slots__ = ("again", "first")

    def __init__(self, pair: Any) -> None:
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not (is_pair and all(hasattr(type(context), "__enter__") for context in pair)):
            raise TypeError(
                f"context_fn must return two context managers, for the first run and for recomputes; got {pair!r}."
            )
        self.first, self.again = pair

    def run(self, fn: Callable, args: Sequence, kwargs: dict, again: bool) -> Any:
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
