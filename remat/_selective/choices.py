"""A policy with a budget at work: which steps it keeps is chosen when a program has run, for all later runs of it.

The first run of a program keeps nothing. While a later one goes on, it is compared with the programs that are known,
and what is kept is what those say that have done the same so far. One that turns out to be new keeps nothing more, and
is known from then on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from .._core.facts import Facts, tensors
from .._core.flops import flops
from .._core.known import Known
from .._core.layout import is_dense
from .._core.lines import Line, user_line, warn
from .._core.private import top_hooks
from .._policy.budget import Budget, Chosen
from .._policy.operators import full_name
from .._policy.verdict import Verdict
from .._region.lowerings import as_in_first_run
from .costs import cost_of
from .hull import hull
from .log import Log
from .plan import Leave, always, can_be_left, never
from .program import Program
from .storages import Storages
from .tradeoff import Choice, Problem, TooMany, best_of, pareto
from .values import is_judged

_PROGRAMS = 16  # for which a function remembers what was chosen
_POLICIES = 16  # with which it does, as one with a cost function may be made anew for each call


class Tradeoff(NamedTuple):
    """What can be chosen for one program, told by the keys of its operations."""

    keys: tuple[tuple, ...]
    lines: dict[int, Line]  # of the user's, by steps
    options: list[Choice]  # those that no other beats, the one that keeps the least first
    is_exact: bool  # these are all; else the corners of their convex hull
    whole: int  # the bytes that the region keeps without remat

    def choice(self, policy: Budget) -> Choice:
        """The one that costs the least within this budget."""
        most = policy.nbytes(self.whole)
        return min((each for each in self.options if each.nbytes <= most), key=lambda each: (each.cost, each.nbytes))


class Choices:
    """What a policy with a budget keeps in one first run."""

    def __init__(self, policy: Budget, known: Known) -> None:
        self._policy = policy
        if policy not in known.choices and len(known.choices) >= _POLICIES:
            del known.choices[next(iter(known.choices))]
        self._known: list[tuple[Tradeoff, Choice]] = known.choices.setdefault(policy, [])
        # Those that have done the same so far. A recompute of a region around knows what that knew.
        self._left = as_in_first_run([] if _may_run_again_unseen() else [*self._known])
        self._given = policy.chosen  # a choice that was made before, as long as the operators are its own
        self.so_far: frozenset[int] = frozenset()  # if the program is new: one choice, as all would be too much
        self._news = known.is_news
        self.costs: list[float] = []  # of the steps
        self.flops: list[int] = []
        self.sizes: dict[int, int] = {}  # of values

    def verdict(self, number: int, key: tuple) -> Verdict | None:
        """Whether what this step makes is kept."""
        if self._left:
            self.so_far = self._left[0][1].steps
        self._left = [each for each in self._left if number < len(each[0].keys) and each[0].keys[number] == key]
        given = self._given
        if given is not None and given.operators[number : number + 1] != (full_name(key[0]),):
            self._is_other(given)
        chosen = [choice.steps for _, choice in self._left] + ([] if self._given is None else [self._given.steps])
        return Verdict.SAVE if any(number in steps for steps in chosen) else None

    def steps(self, program: Program) -> frozenset[int] | None:
        """Those that are kept of the program that has run, None if it is new."""
        keys = tuple([step.key for step in program.steps])
        known = next((choice for tradeoff, choice in self._left if tradeoff.keys == keys), None)
        if known is not None:
            return known.steps
        given = self._given
        if given is not None and len(keys) != len(given.operators):
            self._is_other(given)
        return None if self._given is None else self._given.steps

    def _is_other(self, given: Chosen) -> None:
        """The program is not the one that a choice was made for: from the next run on it has its own."""
        self._given = None
        self.so_far = self.so_far or given.steps
        if not self._left and self._news(f"a choice for {len(given.operators)} operations"):
            warn(
                f"{self._policy!r} was made for another program than the one that runs here, which has other "
                f"operations: what it keeps is chosen anew, for the same number of bytes. Call `remat.pareto` with "
                f"arguments like those of this call, or use `policies.budget`.",
                user_line(),
            )

    def ran(self, func: Any, facts: Facts, args: tuple, kwargs: dict, result: Any, storages: Storages) -> None:
        """Note what a step costs, and how large the values are that it has made."""
        self.costs.append(cost_of(self._policy.cost, func, facts, args, kwargs, result))
        self.flops.append(flops(func, args, kwargs, result))
        for tensor in tensors((result, facts.written(args, kwargs))):
            value = storages.find(tensor)
            if value is not None and is_dense(tensor):
                self.sizes[value] = tensor.untyped_storage().nbytes()

    def close(self, log: Log, program: Program, roots: Mapping[int, int], results: Collection[Any], lazy: bool) -> None:
        """A new program has run: choose what is kept of it from now on."""
        keys = tuple([step.key for step in program.steps])
        if any(tradeoff.keys == keys for tradeoff, _ in self._known):
            return  # it was new when the region around ran first
        problem = self._problem(program, roots, results, lazy)
        try:
            found, is_exact = pareto(problem), True
        except TooMany:
            found, is_exact = hull(problem), False
        options = best_of(_as_planned(each, program, problem, self.flops, lazy) for each in found)
        whole = sum(problem.sizes.get(value, 0) for value in roots)
        tradeoff = Tradeoff(keys, dict(log.lines), options, is_exact, whole)
        if len(self._known) >= _PROGRAMS:
            self._known.clear()
            if self._news("many programs"):
                warn(
                    f"A region under {self._policy!r} has run {_PROGRAMS} different programs, and each saves nothing "
                    f"when it runs for the first time. Pass numbers that change from call to call as tensors, or use a "
                    f"policy of operators or names.",
                    user_line(),
                )
        self._known.append((tradeoff, tradeoff.choice(self._policy)))

    def _problem(self, program: Program, roots: Mapping[int, int], results: Collection[Any], lazy: bool) -> Problem:
        """What there is to choose from. What a region returns takes no memory of its own."""
        values = [(value, step) for step in program.steps for value in step.outs]
        sizes = {value: 0 if value in results else self.sizes.get(value, 0) for value, _ in values}
        keepable = {
            value
            for value, step in values
            if is_judged(step.result, step.facts) and (step.facts.writes or value not in program.overwritten)
        }
        stays = {step.number for step in program.steps if not (lazy and step.can_be_left)}
        return Problem(program.steps, self.costs, sizes, keepable, roots, stays)


def _may_run_again_unseen() -> bool:
    """Whether torch's checkpoint is around: what its recompute may know isn't told apart from what its forward knew."""
    hooks = top_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


def _as_planned(choice: Choice, program: Program, problem: Problem, flops: list[int], lazy: bool) -> Choice:
    """The choice with the bytes, the cost and the FLOPs that the plans of a recompute have."""
    steps = [step for step in problem.steps if step.number in choice.steps]
    may_be_kept = {value for step in steps for value in step.outs if value in problem.keepable}
    owned = may_be_kept.intersection(problem.roots)
    missing = [value for value in problem.roots if value not in owned]
    end = max((problem.roots[value] for value in missing), default=0)
    leave: Leave = can_be_left if lazy else always
    kept = owned | program.plan(missing, end, may_be_kept, leave).used
    runs = program.plan(missing, end, kept, leave if lazy else never).run
    nbytes = sum(problem.sizes[value] for value in kept)
    cost, count = (sum(each[number] for number in sorted(runs)) for each in (problem.costs, flops))
    beside = nbytes - sum(problem.sizes[value] for value in owned)
    return Choice(nbytes, cost, choice.steps, int(count), beside)
