"""The tensors that a function saves for its backward, each with its origin."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TextIO

import torch
from torch.autograd.graph import saved_tensors_hooks

from ._core import trees
from ._core.state import alias
from ._core.tensors import holder, is_in_graph, parts
from ._measure.origins import Kind, Origins, SavedResidual, listing
from ._measure.program import CALLS_BACKWARD, Program, check_surroundings
from ._region.hooks import check_hooks_are_allowed, hooks_allowed, is_hooks_refusal
from .errors import RematError


def saved_residuals(fn: Callable[..., Any], /, *args: Any, inputs: bool = False, **kwargs: Any) -> list[SavedResidual]:
    """List the tensors that ``fn(*args, **kwargs)`` saves in its forward for its backward.

    Runs ``fn`` once, without a backward, and restores gradients, buffers, generators and the state of modules. It is
    differentiated with respect to the tensors that require grad; if its result depends on none, with respect to all
    floating-point arguments.

    Args:
        fn, args: the function or module, and its arguments, any pytrees.
        inputs: also list the arguments and captured tensors that are saved. They take no additional memory.
        kwargs: its keyword arguments. If ``fn`` has a keyword argument named ``inputs``, wrap it in a lambda.

    Returns:
        One entry for each saved storage, the largest first. Its ``source`` is a text such as ``argument params['w1']``,
        ``captured self.weight``, or ``output of aten.mm at file:line (function)``. If ``fn`` calls ``torch.func.grad``
        or ``vjp`` itself, all differentiated inputs are listed.

    Raises:
        RuntimeError: called under ``torch.inference_mode``, or under a ``torch.func`` transform: pass the transformed
            function instead.
        RematError: called where saved-tensor hooks are disabled, or ``fn`` calls ``backward`` and then saves nothing.

    Example:
        >>> import torch, remat
        >>> from remat import saved_residuals
        >>> def f(x, w):
        ...     return torch.tanh(x @ w).sin()
        >>> x, w = torch.ones(4, 2), torch.ones(2, 3)
        >>> [(residual.op, residual.shape, residual.nbytes) for residual in saved_residuals(f, x, w)]
        [('aten.tanh', (4, 3), 48)]
        >>> saved_residuals(remat.remat(f), x, w)
        []
        >>> [residual.source for residual in saved_residuals(remat.remat(f), x, w, inputs=True)]
        ['argument x', 'argument w']

    Modeled on ``jax.ad_checkpoint.saved_residuals``.
    """
    instead = "Pass it the transformed function: `saved_residuals(torch.func.grad(fn), x)`."
    check_surroundings("saved_residuals", instead, with_policies=False)
    check_hooks_are_allowed()
    program = Program(fn, args, kwargs)
    try:
        rows = _listed(program, under_hooks=True)
    except RuntimeError as error:
        if not is_hooks_refusal(error):
            raise
        rows = _listed(program, under_hooks=False)
    rows = [row for row in rows if inputs or not row.is_input]
    return sorted(rows, key=lambda row: (-row.nbytes, row.source))


def print_saved_residuals(
    fn: Callable[..., Any], /, *args: Any, inputs: bool = False, file: TextIO | None = None, **kwargs: Any
) -> None:
    """Print what :func:`saved_residuals` returns, and the total with the inputs, to ``file`` or standard output.

    Layers of the same kind share one row.

    Example:
        >>> import torch
        >>> from remat import print_saved_residuals
        >>> print_saved_residuals(torch.mul, torch.ones(4, 2), torch.ones(2), inputs=True)
        float32[4, 2]  cpu  32 B  argument args[0]
        float32[2]     cpu   8 B  argument args[1]
        total: 0 B in 0 tensors, plus 40 B in 2 inputs
    """
    print(listing(saved_residuals(fn, *args, inputs=True, **kwargs), inputs), file=file)


def _listed(program: Program, under_hooks: bool) -> list[SavedResidual]:
    """Run the function, under saved-tensor hooks or without them, and list the tensors that its graph keeps alive."""
    saved: list[weakref.ref[torch.Tensor]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed = alias(tensor)  # only the graph holds it: while it lives, the tensor is saved
        saved.append(weakref.ref(packed))
        return packed

    pack.takes_all = True  # type: ignore[attr-defined]  # regions pass everything that they save to these hooks
    captured, cut = program.cut()
    operands = program.operands()
    with program.preserved(), cut, hooks_allowed():
        origins = Origins(program.named_modules)
        hooks = saved_tensors_hooks(pack, lambda packed: packed) if under_hooks else nullcontext()
        with torch.enable_grad(), hooks, origins.records_names(), origins:
            leaves = trees.flatten(program.call_and_note(program.fn, operands))[0]
            followed = [t for t in leaves if isinstance(t, torch.Tensor) and is_in_graph(t)]
            graph = list(map(torch.autograd.graph.get_gradient_edge, followed))  # the result need not stay alive
            others = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]  # may be objects with tensors
            del leaves, followed
        if not graph and not any(ref() is not None for ref in saved) and program.turns_to_arguments():
            return _listed(program, under_hooks)
        if under_hooks:
            found = [part for ref in saved if (packed := ref()) is not None for part in parts(packed)]
        else:
            found = [t for t in (*operands, *(t for _, t in captured)) if t.requires_grad]
        inputs: list[tuple[Kind, str, torch.Tensor]] = [
            ("argument", name.removeprefix("argument "), tensor) for name, tensor in zip(program.names, operands)
        ]
        inputs += [("captured", name, tensor) for name, tensor in captured]
        known = {id(holder(p)): _unmade(kind, name, p) for kind, name, t in reversed(inputs) for p in parts(t)}
        found = list({id(holder(tensor)): tensor for tensor in reversed(found)}.values())[::-1]
        rows = [known.get(id(holder(t))) or origins.row(holder(t)) or _unmade("constant", None, t) for t in found]
        if not under_hooks:
            rows += origins.alive()
        del graph, others
    if not rows and program.calls_backward:
        raise RematError(CALLS_BACKWARD)
    return rows


def _unmade(kind: Kind, name: str | None, tensor: torch.Tensor) -> SavedResidual:
    """The row of a tensor that no operation has made."""
    memory, nowhere = holder(tensor), (None, None, None, None)
    if tensor.layout is torch.strided or tensor.is_nested:
        nbytes = memory.nbytes() if isinstance(memory, torch.UntypedStorage) else memory.nbytes
    else:
        entries = tensor.detach().to_sparse()
        nbytes = entries._indices().nbytes + entries._values().nbytes
    return SavedResidual(kind, None, name, *nowhere, tuple(tensor.shape), tensor.dtype, tensor.device, nbytes)
