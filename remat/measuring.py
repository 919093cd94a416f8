"""Measures what rematerialization saves and costs in a user's program, and checks that it changes no numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from . import policies as policies_
from ._core.devices import accelerators_of
from ._core.state import disable_remat, overriding
from ._measure.comparison import CheckResult, Difference, checked
from ._measure.costs import AS_WRITTEN, WITHOUT, Costs, Report, Share, distinct, measured
from ._measure.program import FROZEN, NOT_DIFFERENTIATED, Program, Way, check_surroundings, relative_times
from ._modules.region_class import regions, regions_of
from ._planning.plan import options_of
from ._planning.planner import plan_for
from ._policy.policy import Budget, Policy, PolicyLike, as_policy
from ._policy.warnings import Warned
from ._region.options import checked_options, override
from ._transform import wrapped
from .errors import PolicyError, RematError, RematWarning, shown
from .nn import Where, chosen_modules

__all__ = ["CheckResult", "Costs", "Difference", "Report", "Share", "check", "report"]


def check(
    fn: Callable[..., Any],
    /,
    *args: Any,
    policy: PolicyLike = None,
    transform: Callable[..., Any] | None = None,
    loss: Callable[..., Any] | None = None,
    where: Where | None = None,
    **kwargs: Any,
) -> CheckResult:
    """Compare a program with and without rematerialization: values, gradients, buffers and random generators.

    Runs ``fn(*args, **kwargs)`` and the backward of a loss, once without any region and once as
    ``remat(fn, policy=policy)`` with ``determinism_check="values"``; if neither ``policy`` nor ``where`` is given, also
    as it is, with the regions that it has. Gradients, buffers, generators, hooks and the state of modules are restored
    afterwards, even if the program fails. The program is differentiated with respect to the tensors that require grad;
    if its result depends on none, with respect to all floating-point arguments.

    Args:
        fn, args: the function or module, and its arguments, any pytrees.
        policy: what the region may save, as in :func:`remat.remat`.
        transform: such as ``torch.func.grad``: compare ``transform(remat(fn))(*args, **kwargs)``, without a loss.
        loss: a function of the result. By default ``result.loss`` if it exists, else the sum of the floating-point
            tensors in the result.
        where: which modules are regions, as in :func:`remat.nn.apply`: of the model, or of those that the function
            captures or gets. By default ``fn`` is one region.
        kwargs: its keyword arguments. If it has one with the name of an option above, wrap it in a lambda.

    Returns:
        A result that is true if both runs agree. Its text names what differs, or the error of a run.

    Raises:
        RuntimeError: called under a ``torch.func`` transform, which can be passed as ``transform``, or under
            ``torch.inference_mode``.
        RematError: FSDP wraps a module already, a tensor has no data (a report needs none without ``time``), or
            :func:`remat.override` or ``disable_remat`` replaces the policies.
        PolicyError: ``policy`` is not a policy.
        TypeError: ``fn`` can't be a region, or ``where`` has the wrong type.
        ValueError: ``where`` selects no module.

    Example:
        >>> import torch, remat
        >>> def f(w, x):
        ...     return torch.tanh(x @ w).sum()
        >>> w, x = torch.ones(4, 4), torch.ones(2, 4)
        >>> print(remat.check(f, w, x))
        Identical with and without remat: 1 result, 2 gradients and the random generators.
        >>> remat.check(f, w, x, transform=torch.func.grad).ok
        True
    """
    _check_surroundings("remat.check")
    given = kwargs.get("policies")
    if isinstance(given, (list, tuple)) and any(each is None or isinstance(each, (Policy, str)) for each in given):
        raise TypeError("remat.check takes one policy: `policy=...`. remat.report compares several.")
    program = Program(fn, args, kwargs, transform, loss)
    program.check_is_whole("remat.check")
    program.check_has_data("A check compares values")
    ways = [_with_regions(program, policy, where, Warned())]
    if policy is None and where is None:
        ways = [Way(fn, nullcontext), Way(ways[0].fn, _quietly)]
    if transform is not None:
        with program.preserved():  # raises here if it is not a transform; later errors are results
            program.transformed(fn)
    with override(determinism_check="values"):
        return checked(program, ways)


def report(
    fn: Callable[..., Any],
    /,
    *args: Any,
    policies: Iterable[PolicyLike] | None = None,
    transform: Callable[..., Any] | None = None,
    loss: Callable[..., Any] | None = None,
    where: Where | None = None,
    time: bool = False,
    **kwargs: Any,
) -> Report:
    """Measure what a program saves and recomputes, without rematerialization and under policies.

    Runs ``fn(*args, **kwargs)`` and the backward of a loss as :func:`check` does: without any region; as it is, if it
    has regions; and under each policy: with this policy for all of its regions, or as ``remat(fn, policy=policy)`` if
    it has none. The bytes of live tensors and the FLOPs are deterministic. On a device, the report also has the peak of
    its allocator.

    Args:
        fn, args: the function or module, and its arguments, any pytrees.
        policies: the policies to try, each as in :func:`remat.remat`, or a string such as ``"budget 60%"`` for the plan
            of :func:`remat.nn.budget`, without ``transform``. By default no policy, attention, matrix products, and
            both; policies with identical costs are listed once.
        transform, loss, where, kwargs: as in :func:`check`.
        time: also measure the time of a step, as its ratio to a step without any region.

    Returns:
        A :class:`Report`. Its text is a table, and ``plot()`` draws it.

    Raises:
        TypeError: ``policies`` is not a list.
        ValueError: ``loss`` returns more than one number. Others as in :func:`check`.

    Example:
        >>> import torch, remat
        >>> def f(w, x):
        ...     return torch.tanh(torch.tanh(x @ w) @ w).sum()
        >>> report = remat.report(f, torch.ones(64, 64), torch.ones(256, 64))
        >>> [(row.label, row.saved_bytes, row.recomputed_flops) for row in report.policies]
        [('policy=None', 4, 4194304), ('save_matmuls', 131076, 0)]
        >>> report.pareto  # with a single region, the peak is that of the plain program, so no policy is better
        []
    """
    _check_surroundings("remat.report")
    if isinstance(kwargs.get("policy"), Policy):
        raise TypeError("remat.report takes a list of policies: `policies=[...]`. remat.check takes one.")
    program = Program(fn, args, kwargs, transform, loss)
    if policies is not None and (isinstance(policies, str) or not isinstance(policies, Iterable)):
        raise TypeError(f"policies must be a list such as `[None, policies.save_matmuls]`, got {shown(policies)}.")
    if not isinstance(time, bool):
        raise TypeError(
            f"time must be True or False, got {shown(time)}. If it is an argument of fn, wrap fn in a lambda."
        )
    if time:
        program.check_has_data("time=True measures steps")
    asked = [_asked(policy) for policy in (_USUAL if policies is None else policies)]
    if transform is not None and (plan := next((each for each in asked if isinstance(each, str)), None)):
        raise TypeError(f"A plan is for the backward of a loss, so {plan!r} takes no transform: use policies.budget.")
    costs = (_PLANNED_BY if isinstance(each, str) else each.cost for each in asked if isinstance(each, (str, Budget)))
    objective = next((cost for cost in costs if cost != "flops"), None)
    ways = {WITHOUT: Way(fn, disable_remat), AS_WRITTEN: Way(fn, nullcontext)}
    plain = measured(program, WITHOUT, ways[WITHOUT], objective=objective)
    if program.turns_to_arguments() or program.is_sharded:  # the first run of FSDP allocates its buffers
        plain = measured(program, WITHOUT, ways[WITHOUT], objective=objective)
    rows = [plain, measured(program, AS_WRITTEN, ways[AS_WRITTEN], plain, objective=objective)]
    if not (time and any(map(regions_of, program.named_modules.values()))):  # their time may differ alone
        rows = distinct(rows)
    own = len(rows) > 1 and where is None  # its regions get the policies
    found, notes = list[Costs](), list[str]()
    for label, policy in zip(_labels(asked), asked):
        warned = Warned(operators=policies is None)  # no warnings about policies that nobody chose
        try:
            way = ways[label] = _way(program, policy, where, own, warned)
        except RematError as error:
            if not isinstance(policy, str) or isinstance(error, PolicyError):
                raise
            notes.append(f"{label}: {error}")  # no plan fits; the other rows are worth having
            continue
        if isinstance(policy, Budget):  # its first call chooses
            with program.preserved(), way.context():
                program.run(way.fn)
        found.append(measured(program, label, way, plain, None if isinstance(policy, str) else policy, objective))
    if policies is None:  # only those that save more than nothing
        found = [row for row in distinct(found) if row is found[0] or row.saved_bytes > found[0].saved_bytes]
    rows += found
    if time:
        times = relative_times(program, [ways[row.label] for row in rows])
        rows = [replace(row, time=ratio) for row, ratio in zip(rows, times)]
    has_parts = isinstance(fn, torch.nn.Module) and any(fn.children())
    if transform is None and not program.has_gradients:
        notes.append(NOT_DIFFERENTIATED)
    elif transform is None and program.is_frozen:
        notes.append(FROZEN)
    elif found and own:
        notes.append("Each policy is that of the program's own regions.")
    elif where is None and has_parts and not all(isinstance(policy, str) for policy in asked):
        notes.append("Under each policy the model is one region. With `where=Block` modules of that class are regions.")
    return Report(_name(fn, transform), _environment(program), tuple(rows), "\n".join(notes), objective)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without warnings that the program's own regions are inside of a region that nobody asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RematWarning)
        yield


def _way(program: Program, policy: Any, where: Any, own: bool, warned: Warned) -> Way:
    """Run the program under a policy or a plan. ``own``: its own regions get the policy."""
    if isinstance(policy, str):
        plan = plan_for(program, policy.removeprefix(_BUDGET), _PLANNED_BY)
        chosen = {program.named_modules[name]: each for name, each in options_of(plan.regions, plan.cost).items()}
        return Way(program.fn, partial(regions, chosen))
    if own:
        return Way(program.fn, partial(overriding, policy=as_policy(policy), warned=warned))
    return _with_regions(program, policy, where, warned)


def _asked(policy: Any) -> Any:
    if isinstance(policy, str) and policy.startswith(_BUDGET):
        return policy
    if isinstance(policy, str) and any(map(str.isdigit, policy)):
        raise PolicyError(f"A plan of remat.nn.budget is written 'budget 60%' or 'budget 8GiB'; got {shown(policy)}.")
    return None if policy is None else as_policy(policy)


_BUDGET, _PLANNED_BY = "budget ", "roofline"  # the cost is the default of remat.nn.budget
_USUAL = (None, policies_.save_attention, policies_.save_matmuls, policies_.save_matmuls | policies_.save_attention)


def _labels(asked: Sequence[Any]) -> list[str]:
    """A distinct label for each policy."""
    texts = ["policy=None" if policy is None else str(policy).replace("policies.", "") for policy in asked]
    return [t if texts.count(t) == 1 else f"{t} ({texts[: i + 1].count(t)})" for i, t in enumerate(texts)]


def _name(fn: Any, transform: Any) -> str:
    name = getattr(fn, "__name__", type(fn).__name__)
    how = getattr(transform, "__name__", "") if transform is not None else ""
    return f"{how}({name})" if how.isidentifier() else name


def _environment(program: Program) -> dict[str, str]:
    found = accelerators_of(program.inputs()).items()
    names = [getattr(module, "get_device_name", kind.lower)() for kind, module in found]
    return {"torch": f"torch {torch.__version__}", "device": ", ".join(names) or "CPU"}


def _check_surroundings(name: str) -> None:
    check_surroundings(name, f"Pass it the transform instead: `{name}(fn, x, transform=torch.func.grad)`.")


def _with_regions(program: Program, policy: Any, where: Any, warned: Warned) -> Way:
    """Run the program's function as a region, or with modules that are regions."""
    options = replace(checked_options(policy), warned=warned)
    if where is None:
        return Way(wrapped(program.fn, options), nullcontext)
    chosen = chosen_modules(program.named_modules, where)
    return Way(program.fn, partial(regions, {module: replace(options, name=name) for name, module in chosen}))
