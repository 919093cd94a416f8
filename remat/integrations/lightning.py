"""lightning's ``Trainer``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._core.signatures import accepts
from ..errors import RematError
from ..nn import Amount, budget

__all__ = ["budget_callback"]


def budget_callback(amount: Amount, *, cost: str | Callable[..., float] = "roofline") -> Any:
    """Return a callback for lightning's ``Trainer`` that plans a memory budget with the first batch.

    It calls :func:`remat.nn.budget` for the module's ``training_step``, which must not optimize itself. What the module
    logs while it is measured is dropped.

    Args:
        amount, cost: as in :func:`remat.nn.budget`.

    Returns:
        A ``lightning.Callback``, whose attribute ``plan`` is the plan when training has begun.

    Raises:
        ImportError: lightning is not installed.

    Example (needs lightning)::

        Trainer(callbacks=[remat.integrations.lightning.budget_callback("8GiB")]).fit(module, loader)
    """
    try:
        from lightning import Callback
    except ImportError as error:
        raise ImportError("remat.integrations.lightning needs lightning: `pip install lightning`.") from error

    class Planning(Callback):
        plan: Any = None

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            if self.plan is not None:
                return
            if not module.automatic_optimization:
                raise RematError(
                    "The module optimizes in its training_step, so a step of it can't be measured. Call "
                    "`remat.nn.budget` for its model in `configure_model`."
                )

            def step(batch: Any) -> Any:
                given = (batch, index)
                found = module.training_step(*(given if accepts(module.training_step, given) else given[:1]))
                return found["loss"] if isinstance(found, dict) else found

            module.log = module.log_dict = lambda *_, **__: None
            try:
                with trainer.precision_plugin.train_step_context():
                    self.plan = budget(step, amount, batch, cost=cost)
            finally:
                del module.log, module.log_dict

    return Planning()
