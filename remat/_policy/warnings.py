"""Warnings about policies that save nothing: names that no value has, operators that are not executed."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial
from typing import Any

from .._core.known import Known
from .._core.lines import Line, user_line
from .names import is_named
from .policy import If, Policy, Verdict
from .predicates import SIGNATURE


class Warned:
    """The warnings already given about a policy, shared by all functions or modules that got it in one call."""

    def __init__(self, operators: bool = False) -> None:
        self.names: set[str] = set()  # names that were warned about
        self.operators: bool = operators  # whether no (further) warning about unmatched operators is due

    def of_names(self, judge: Any, known: Known) -> None:
        """Warn of the names that a policy mentions but that no value of the region has, after its first run."""
        given = sorted(judge.given)
        for pattern in judge.own.mentioned_names:
            if any(is_named(name, pattern) for name in given) or pattern in self.names:
                continue
            self.names.add(pattern)
            near = difflib.get_close_matches(pattern, given, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            seen = f"Values were named {', '.join(map(repr, given))}" if given else "There were no named values"
            known.warn_once(
                f"the name {pattern!r}",
                f"The policy of a rematerialized function mentions the name {pattern!r}, but no value has this "
                f"name. {seen}.{hint} Values get names from remat.checkpoint_name(x, name).",
            )

    def unmatched(self, recording: Any) -> Callable[[], None] | None:
        """Return a warning if a region's own policy judges operators, and none of those of its first run matches.

        It is given in the backward pass, as later calls may match one.
        """
        judge, log = recording.judge, recording.log
        own, alone = judge.own, judge.own is judge.policy
        # An outer region's policy may have decided, so that the predicates were not called.
        if self.operators or not (alone if own.predicates else own.mentioned_ops) or not log.steps:
            return None
        found = {own.verdict_for(step.facts.func) for step in log.steps}
        found |= {own.verdict_for(log.maker(i).facts.func, frozenset(names)) for i, names in judge.names.items()}
        # Where a predicate decides, that is None: what it has allowed counts.
        self.operators = bool(alone and recording.saved_values.allowed) or not found <= {Verdict.RECOMPUTE, None}
        executed = list(dict.fromkeys(str(step.facts.func) for step in log.steps))
        return None if self.operators else partial(self._of_operators, own, recording.known, executed, user_line())

    def _of_operators(self, policy: Policy, known: Known, executed: list[str], line: Line) -> None:
        """Warn, unless another call has matched an operator or this warning was given before."""
        if self.operators:
            return
        self.operators = True
        more, name = len(executed) - _SHOWN, repr(policy)
        hint = SIGNATURE if isinstance(policy, If) else _OF_OPERATORS
        if isinstance(policy, If) and getattr(policy.predicate, "__module__", "") == "torch.utils.checkpoint":
            name, hint = _TORCHS, _OF_OPERATORS  # the predicate is torch's own, which looks at operators
        known.warn_once(
            f"the operators of {policy!r}",
            f"The policy {name} of a rematerialized function saves nothing, because it has matched none of the "
            f"operators that were executed: {', '.join(executed[:_SHOWN])}"
            f"{f' and {more} more' if more > 0 else ''}. {hint}",
            line,
        )


_SHOWN = 8
_TORCHS = "(the list that create_selective_checkpoint_contexts got)"
_OF_OPERATORS = (
    "Save some of these operators (functions such as torch.nn.functional.linear decompose into others), or give values "
    "names with remat.checkpoint_name and use policies.save_only_these_names."
)
