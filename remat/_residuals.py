"""The tensors that a function saves for its backward, each with its origin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TextIO

from ._core import private
from ._measure.listing import Listing
from ._measure.origins import SavedResidual, listing
from ._region.hooks import check_hooks_are_allowed, is_hooks_refusal

__all__ = ["SavedResidual", "print_saved_residuals", "saved_residuals"]


def saved_residuals(fn: Callable[..., Any], /, *args: Any, inputs: bool = False, **kwargs: Any) -> list[SavedResidual]:
    """List the tensors that ``fn(*args, **kwargs)`` saves in its forward for its backward.

    Runs ``fn`` once, without a backward, and restores gradients, buffers, generators and the state of modules. It is
    differentiated with respect to the tensors that require grad; if none does, with respect to all floating-point
    arguments.

    Args:
        fn, args: the function or module, and its arguments, any pytrees.
        inputs: also list the arguments and captured tensors that are saved. They take no additional memory.
        kwargs: its keyword arguments. If ``fn`` has a keyword argument named ``inputs``, wrap it in a lambda.

    Returns:
        One entry for each saved storage, the largest first. Its ``source`` is a text such as ``argument params['w1']``,
        ``captured self.weight``, or ``output of aten.mm at file:line (function)``. If ``fn`` calls ``torch.func.grad``
        or ``vjp`` itself, all differentiated inputs are listed.

    Raises:
        RuntimeError: called under a ``torch.func`` transform. Pass the transformed function instead.
        RematError: called where saved-tensor hooks are disabled.

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
    if private.transforms_active():
        raise RuntimeError(
            "saved_residuals can't be called under a torch.func transform. Pass it the transformed function: "
            "`saved_residuals(torch.func.grad(fn), x)`."
        )
    check_hooks_are_allowed()
    try:
        rows = Listing(fn, args, kwargs).run(under_hooks=True)
    except RuntimeError as error:
        if not is_hooks_refusal(error):
            raise
        rows = Listing(fn, args, kwargs).run(under_hooks=False)
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
