"""Regions with a budget: which steps are saved is chosen when a program has run, for all later runs of it.

The first run of a program saves nothing. A later run is compared with the known programs while it executes, and saves
the choices of all programs that it matches so far. A run that turns out to be a new program saves nothing after all.
Its program is known afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, NamedTuple

from .._core.facts import flops, tensors
from .._core.known import Known
from .._core.lines import Line
from .._core.tensors import is_dense
from .._policy.operators import full_name
from .._policy.policy import Budget, Verdict
from .program import Program, Step
from .search import Choice, Problem, best_of, corners, cost_of, pareto
from .values import Storages

_PROGRAMS = 16  # for which a function remembers a choice
_POLICIES = 16  # for which a function remembers programs: each call may create a policy with a new cost function


class Tradeoff(NamedTuple):
    """The choices for one program."""

    keys: tuple[tuple, ...]  # of the program's operations; they identify it
    lines: dict[int, Line]  # the user's lines, by steps
    options: list[Choice]  # the Pareto-optimal choices, by increasing bytes
    is_exact: bool  # whether `options` has all of them, or only the corners of their convex hull
    whole: int  # the bytes that the region saves without remat
    nothing: Choice  # that of saving not even results, which count as no bytes in the others
    results: frozenset[int]  # the steps that make results of the region

    @property
    def operators(self) -> tuple[str, ...]:
        """The names of the program's operators."""
        return tuple(full_name(facts.func) for facts, *_ in self.keys)

    def choice(self, policy: Budget) -> Choice:
        """Return the choice with the least cost within this budget."""
        most = policy.nbytes(self.whole)
        *_, best = (each for each in self.options if each.nbytes <= most)
        return best


class Choices:
    """What a region with a budget saves in one first run."""

    def __init__(self, policy: Budget, known: Known) -> None:
        self._policy = policy
        choices = known.choices
        if policy not in choices and len(choices) >= _POLICIES:
            del choices[next(iter(choices))]
        self._known: list[tuple[Tradeoff, Choice]] = choices.setdefault(policy, [])
        # The known choices that match so far, each with its program: the keys of the operations, or their names.
        self._matches: list[tuple[tuple, frozenset[int]]] = [(each.keys, choice.steps) for each, choice in self._known]
        if policy.chosen is not None:
            self._matches.append(policy.chosen)
        self._warn_once = known.warn_once
        self.costs: list[float] = []  # of the steps
        self.flops: list[int] = []  # of the steps
        self.sizes: dict[int, int] = {}  # of values, in bytes

    def steps(self, program: Program) -> frozenset[int] | None:
        """Return the saved steps of the program that has run, or None if the program is new."""
        self._keep([(keys, steps) for keys, steps in self._matches if len(keys) == len(program.steps)])
        return next((steps for _, steps in self._matches), None)

    def _keep(self, matches: list[tuple[tuple, frozenset[int]]]) -> None:
        """Drop the other matches. If the policy's own choice was the last match, it was made for another program."""
        chosen = self._policy.chosen
        if not matches and chosen in self._matches:
            self._warn_once(
                f"another program than that of {chosen}",
                f"{self._policy!r} was chosen for a different sequence of operations. What is saved is chosen again, "
                f"for the same number of bytes. Make the plan (`remat.nn.budget`) or the curve (`remat.pareto`) with "
                f"arguments, settings such as autocast, and transforms like those of this call.",
            )
        self._matches = matches

    def ran(self, step: Step, args: tuple, kwargs: dict, result: Any, storages: Storages) -> Verdict:
        """Record the cost of a step and the sizes of the values that it has made, and return the verdict on them."""
        facts, number = step.facts, len(self.costs)
        self.costs.append(cost_of(self._policy.cost, facts, args, kwargs, result))
        self.flops.append(flops(facts.func, args, kwargs, result))
        for tensor in tensors((result, facts.written(args, kwargs))):
            value = storages.find(tensor)
            if value is not None and is_dense(tensor):
                self.sizes[value] = tensor.untyped_storage().nbytes()
        now, found = (step.key, full_name(facts.func)), self._matches
        self._keep([(keys, steps) for keys, steps in found if number < len(keys) and keys[number] in now])
        return Verdict.SAVE if any(number in steps for _, steps in self._matches) else Verdict.RECOMPUTE

    def close(self, program: Program, roots: Mapping[int, int], results: Set[Any]) -> None:
        """Choose what later runs of a new program save, when it has run."""
        made = [(value, step) for step in program.steps for value in step.outs]
        # Results of the region count as 0 bytes, as the caller has them.
        sizes = {value: 0 if value in results else self.sizes.get(value, 0) for value, _ in made}
        keepable = {value for value, step in made if step.is_judged}
        problem = Problem(program, self.costs, sizes, keepable, roots)
        exact = pareto(problem)
        found = exact or corners(problem)
        found.append(Choice(0, 0.0, frozenset()))  # fits every budget; a plan may need more bytes than the search found
        planned = [_as_planned(each, problem, self.flops) for each in found]
        whole = sum(problem.sizes.get(value, 0) for value in roots)
        of_results = frozenset(i for i, step in enumerate(program.steps) if not results.isdisjoint(step.outs))
        keys = tuple([step.key for step in program.steps])
        tradeoff = Tradeoff(keys, program.lines, best_of(planned), bool(exact), whole, planned[-1], of_results)
        if len(self._known) >= _PROGRAMS:
            self._known.clear()
            self._warn_once(
                "many programs",
                f"A region under {self._policy!r} has executed {_PROGRAMS} different programs, and the first call "
                f"with each program saves nothing. Pass numbers that change from call to call as tensors, or use a "
                f"policy of operators or names.",
            )
        self._known.append((tradeoff, tradeoff.choice(self._policy)))


def _as_planned(choice: Choice, problem: Problem, flops: list[int]) -> Choice:
    """Return the choice with the bytes, cost and FLOPs of the plan of its recompute."""
    program = problem.program
    saveable = {value for i in choice.steps for value in program.steps[i].outs if value in problem.keepable}
    owned = saveable.intersection(problem.roots)
    missing = [value for value in problem.roots if value not in owned]
    end = max((problem.roots[value] for value in missing), default=0)
    saved = owned | program.used(missing, end, saveable)
    runs = program.plan(missing, end, saved).run
    nbytes = sum(problem.sizes[value] for value in saved)
    cost, count = (sum(each[number] for number in sorted(runs)) for each in (problem.costs, flops))
    return Choice(nbytes, cost, choice.steps, int(count))
