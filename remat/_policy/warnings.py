"""Warnings of policies that keep nothing: names that no value has, operators that don't run."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .._core.known import Known
from .._core.lines import user_line, warn
from .names import is_named
from .verdict import Verdict

if TYPE_CHECKING:
    from .._selective.recording import Recording


class Told:
    """What users were told of a policy, by any of the functions or modules that were given it together."""

    silenced = False

    def __init__(self) -> None:
        self.names: set[str] = set()  # that no value has
        self.operators = False  # that it has matched none; true also if it has matched one, or needn't


@contextmanager
def silenced() -> Iterator[None]:
    """Within, nobody is warned by any region, nor counts as warned."""
    before, Told.silenced = Told.silenced, True
    try:
        yield
    finally:
        Told.silenced = before


def warn_of_names(mentioned: Iterable[str], given: Iterable[str], told: Told, known: Known) -> None:
    """Warn of the names that a policy mentions and that no value has, of the region that has just run."""
    if Told.silenced:
        return
    given = sorted(given)
    for pattern in mentioned:
        if any(is_named(name, pattern) for name in given) or pattern in told.names:
            continue
        told.names.add(pattern)
        if known.is_news(pattern):
            near = difflib.get_close_matches(pattern, given, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            seen = f"values named {', '.join(map(repr, given))}" if given else "no named values at all"
            warn(
                f"The policy of a rematerialized function mentions the name {pattern!r}, which no value has: there "
                f"were {seen}.{hint} Names are given with remat.checkpoint_name(x, name).",
                user_line(),
            )


class Unmatched:
    """A region whose policy has matched no operator. Users are told in the backward, as other calls may match one."""

    __slots__ = ("known", "line", "operators", "policy", "told")

    def __init__(self, recording: Recording) -> None:
        self.policy, self.told, self.known = recording.own, recording.told, recording.known
        self.operators = list(dict.fromkeys(str(entry.key[0]) for entry in recording.log.entries))
        self.line = user_line()

    def warn(self) -> None:
        """Warn, unless another call has matched one, or the user was told."""
        if self.told.operators or Told.silenced:
            return
        self.told.operators = True
        if not self.known.is_news(f"the operators of {self.policy!r}"):
            return
        shown, more = self.operators[:_SHOWN], len(self.operators) - _SHOWN
        warn(
            f"The policy {self.policy!r} of a rematerialized function has matched none of the operators that ran, so "
            f"that nothing is kept by it: {', '.join(shown)}{f' and {more} others' if more > 0 else ''}. "
            f"{_OF_FUNCTIONS if self.policy.has_predicate else _OF_OPERATORS}",
            self.line,
        )


def unmatched(recording: Recording) -> Unmatched | None:
    """The region that has just run, if its own policy judges operators and has matched none that ran."""
    own, told = recording.own, recording.told
    if told.operators or own.ignores_operators or not recording.log:
        return None
    if own.asks:
        if own is not recording.policy:
            return None  # the policy of a region around may have spared predicates the question
        matches = bool(recording.log.saveable)
    else:
        verdicts = [own.verdict_for(entry.key[0]) for entry in recording.log.entries]
        for value, names in recording.names.items():
            op = recording.log.maker(value).key[0]
            verdicts.append(own.judge(None, op, (), {}, frozenset(names)))
        matches = any(verdict is not Verdict.RECOMPUTE for verdict in verdicts)
    told.operators |= matches
    return None if matches else Unmatched(recording)


_SHOWN = 8
_OF_OPERATORS = (
    "Let it save some of these, which is what functions such as torch.nn.functional.linear become, or give values "
    "names with remat.checkpoint_name and use policies.save_only_these_names."
)
_OF_FUNCTIONS = (
    "A function that is a policy is called as (ctx, op, *args, **kwargs), as in torch's selective checkpoint. In one "
    "written for JAX, (prim, *avals, **params), `prim` is a context here and the operator comes after it."
)
