"""The floating-point operations of one call of an operation, by torch's formulas."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

# torch's counter has the formulas for the attention kernels of every device but the CPU.
_CPU_ATTENTION: dict[str, Any] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": sdpa_flop_count,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": sdpa_backward_flop_count,
}


def flops(func: Any, args: tuple, kwargs: dict, result: Any) -> int:
    """The floating-point operations of one call, by torch's formulas: matrix products, convolutions and attention.

    Other operations count as 0.
    """
    packet: Any = getattr(func, "overloadpacket", func)
    if (attention := _CPU_ATTENTION.get(str(packet))) is not None:
        shapes = [arg.shape for arg in args if isinstance(arg, torch.Tensor)]
        return int(attention(*shapes[: 3 + packet.__name__.endswith("backward")]))
    formula: Any = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
