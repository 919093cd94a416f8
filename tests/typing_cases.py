"""Calls that type checkers must accept or reject. Each ignored line is an error for mypy and for pyright."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import remat
from remat import compat, policies


def block(x: Tensor, scale: float = 1.0) -> Tensor:
    return (x * scale).sin()


def predicate(ctx: object, op: object, *args: object, **kwargs: object) -> bool:
    return True


x, net = torch.ones(3), nn.Linear(3, 3)

# --- accepted calls, and their results --------------------------------------------------------------------------------

y: Tensor = remat.remat(block)(x, scale=2.0)
same: nn.Linear = remat.remat(net)
decorated: Tensor = remat.remat(policy=policies.save_matmuls)(block)(x)
remat.remat(block, policy=policies.save_matmuls | [torch.ops.aten.mm])
remat.remat(block, policy=predicate, determinism_check="values")
remat.remat(block, policy=None, preserve_rng_state=False)
remat.checkpoint(block, policy=remat.checkpoint_policies.dots_saveable)
in_place: nn.Linear = remat.nn.apply(net, nn.Linear, policy=~policies.save_attention)
row: Callable[[Tensor, float], Tensor] = remat.sequential([block, block], 2)
called: Tensor = compat.checkpoint(block, x, use_reentrant=False)
wrapped: Callable[..., Tensor] = compat.checkpoint(use_reentrant=False)(block)
report: remat.Report = remat.report(block, x, policies=[None, policies.save_matmuls])
result: remat.CheckResult = remat.check(net, x, where=nn.Linear)
rows: list[remat.SavedResidual] = remat.saved_residuals(block, x, inputs=True)
own: remat.PolicyLike = ["aten.mm"]

# --- rejected ---------------------------------------------------------------------------------------------------------

remat.remat(block, policy=3)  # type: ignore
remat.remat(block, policy="save_matmuls")  # type: ignore
remat.remat(block, policies.save_matmuls)  # type: ignore
remat.remat(block, determinism_check="value")  # type: ignore
remat.remat(block, static_argnums=(1,))  # type: ignore
remat.remat(block)(x, scale="big")  # type: ignore
remat.nn.apply(net, nn.Linear, policy=3)  # type: ignore
remat.sequential([block], policy=3)  # type: ignore
compat.checkpoint(block, x, determinism_check="value")  # type: ignore
compat.checkpoint(use_reentrant=False)(block)(x, scale="big")  # type: ignore
remat.check(block, x, policy=3)  # type: ignore
remat.report(block, x, policies=[3])  # type: ignore
_ = policies.save_matmuls | 3  # type: ignore
