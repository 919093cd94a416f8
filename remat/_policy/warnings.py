"""Warnings about policies that save nothing: names that no value has, operators that are not executed."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .._core.known import Known
from .._core.lines import user_line, warn
from .names import is_named
from .policy import Verdict


class Warned:
    """The warnings already given about a policy, shared by all functions or modules that got it in one call."""

    silenced = False

    def __init__(self) -> None:
        self.names: set[str] = set()  # names that were warned about
        self.operators = False  # whether no (further) warning about unmatched operators is due


@contextmanager
def silenced() -> Iterator[None]:
    """Within the context, no region warns, and no warning counts as given."""
    before, Warned.silenced = Warned.silenced, True
    try:
        yield
    finally:
        Warned.silenced = before


def warn_of_names(verdicts: Any, known: Known) -> None:
    """Warn of the names that a policy mentions but that no value of the region has, after the region's first run."""
    if Warned.silenced:
        return
    given = sorted(verdicts.given)
    for pattern in verdicts.own.mentioned_names:
        if any(is_named(name, pattern) for name in given) or pattern in verdicts.warned.names:
            continue
        verdicts.warned.names.add(pattern)
        if known.is_new_warning(pattern):
            near = difflib.get_close_matches(pattern, given, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            seen = f"Values were named {', '.join(map(repr, given))}" if given else "There were no named values"
            warn(
                f"The policy of a rematerialized function mentions the name {pattern!r}, but no value has this name. "
                f"{seen}.{hint} Values get names from remat.checkpoint_name(x, name).",
                user_line(),
            )


class Unmatched:
    """A region whose policy has matched no operator. It warns in the backward pass, as later calls may match one."""

    __slots__ = ("known", "line", "operators", "policy", "warned")

    def __init__(self, recording: Any) -> None:
        self.policy, self.warned, self.known = recording.verdicts.own, recording.verdicts.warned, recording.known
        self.operators = list(dict.fromkeys(str(step.facts.func) for step in recording.log.steps))
        self.line = user_line()

    def warn(self) -> None:
        """Warn, unless another call has matched an operator or this warning was given before."""
        if self.warned.operators or Warned.silenced:
            return
        self.warned.operators = True
        if not self.known.is_new_warning(f"the operators of {self.policy!r}"):
            return
        shown, more = self.operators[:_SHOWN], len(self.operators) - _SHOWN
        warn(
            f"The policy {self.policy!r} of a rematerialized function saves nothing, because it has matched none of "
            f"the operators that were executed: {', '.join(shown)}{f' and {more} more' if more > 0 else ''}. "
            f"{_OF_FUNCTIONS if self.policy.has_predicate else _OF_OPERATORS}",
            self.line,
        )


def unmatched(recording: Any) -> Unmatched | None:
    """Return the region that has just run, if its own policy judges operators and has matched none of them."""
    verdicts, log = recording.verdicts, recording.log
    own, warned, alone = verdicts.own, verdicts.warned, verdicts.own is verdicts.policy
    if warned.operators or own.ignores_operators or not log.steps:
        return None
    if own.asks and not alone:
        return None  # the outer region's policy may have decided, so that the predicates were not called
    found = set() if own.asks else {own.verdict_for(step.facts.func) for step in log.steps}
    for value, names in verdicts.names.items() if not own.asks else ():
        found.add(own.judge(None, log.maker(value).facts.func, (), {}, frozenset(names)))
    warned.operators = bool(alone and recording.saved_values.numbers()) or not found <= {Verdict.RECOMPUTE}
    return None if warned.operators else Unmatched(recording)


_SHOWN = 8
_OF_OPERATORS = (
    "Save some of these operators (functions such as torch.nn.functional.linear decompose into others), or give values "
    "names with remat.checkpoint_name and use policies.save_only_these_names."
)
_OF_FUNCTIONS = (
    "A predicate is called as (ctx, op, *args, **kwargs), as in torch's selective checkpoint. If it is written for "
    "JAX, as (prim, *avals, **params), `prim` gets the context, and the operator is the next argument."
)
