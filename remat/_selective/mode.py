"""The base class of the dispatch modes of a region with a policy."""

from __future__ import annotations

from typing import Any

from .._core.facts import Facts
from .._core.known import Known
from .._core.private import DispatchMode
from .._core.ranges import Ranges
from .._core.state import state
from .._policy.policy import Policy


class RegionMode(DispatchMode):
    """The base class of the dispatch modes of a region with a policy."""

    def __init__(self, policy: Policy, known: Known, drawing: set[Facts]) -> None:
        super().__init__()
        self._policy, self._known = policy, known
        self._drawing = drawing  # operations of other libraries that have drawn random numbers
        self.number = 0  # of enclosing regions in a first run under a policy
        self.count = 0  # of the operations so far that have drawn random numbers
        self.ranges = Ranges()

    def go_back(self, count: int) -> None:
        """Forget later draws: an inner run was abandoned, which draws the same numbers when it starts again."""
        self.count = count

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]
        self._known.compiles |= super().ignore_compile_internals()
        return self._known.compiles

    def draw(self, facts: Facts, args: tuple, kwargs: dict) -> int | None:
        """Return the index of an operation among those that draw random numbers, or None if it does not draw."""
        if facts not in self._drawing and not facts.draws(args, kwargs):
            return None
        self.count += 1
        return self.count - 1

    def __enter__(self) -> Any:
        self.number = len(state.recordings)
        state.policies, state.logs = (*state.policies, self._policy), (*state.logs, self)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        state.policies = state.policies[:-1]  # the state of the run, which ends next, restores the logs
