"""Facts about an operation from its schema, the tensors of its calls, and their floating-point operations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from . import private
from .trees import contents


class Facts:
    """Facts about an operation from its schema. Tables use this as a key, as it hashes faster than the operation."""

    def __init__(self, func: Any) -> None:
        self.func = func
        self.run = functools.partial(_on_zeros, func) if func in _ON_ZEROS else func  # executes it in a mode
        schema, tags = getattr(func, "_schema", None), getattr(func, "tags", ())
        name = "" if schema is None else schema.name  # higher-order operators have none
        arguments: Any = () if schema is None else schema.arguments
        returns: Any = () if schema is None else schema.returns
        # The arguments that it writes to, by position and by name.
        self.writes = [(i, a.name) for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write]
        self.updates_statistics = name in _BATCH_NORMS  # if it writes them, its own result doesn't depend on them
        if self.updates_statistics:
            self.writes = [(3, "running_mean"), (4, "running_var")]
        if torch.Tag.inplace_view in tags or name == "aten::record_stream":
            self.writes = []  # the one changes only shape and strides, the other only informs the allocator
        if self.writes and name.startswith("aten::_foreach_"):  # torch doesn't count versions of lists in a mode
            count: Any = torch.autograd.graph.increment_version
            self.run = lambda *args, **kwargs: (func(*args, **kwargs), count(self.written(args, kwargs)))[0]
        self.makes_nothing = name.startswith(("aten::empty", "aten::new_empty"))
        # It reads only the shape, dtype and device of its arguments.
        self.reads_nothing = name.startswith("aten::new_") or name.endswith("_like")
        namespace = getattr(func, "namespace", "aten")
        # Its tags may be missing. A higher-order operator has none, and what it calls may draw random numbers.
        self.foreign = namespace not in _NAMESPACES
        self.marks = namespace == "profiler"  # the start or end of a range
        self._draws = torch.Tag.nondeterministic_seeded in tags
        self._probability = next((i for i, a in enumerate(arguments) if a.name == "dropout_p"), None)
        # It returns no tensor: Python may branch on the result, or the operation has side effects.
        self.observes = schema is not None and not any("Tensor" in str(r.type) for r in returns)
        # The schema of `_unsafe_view` doesn't say so.
        self.views = name == "aten::_unsafe_view" or (not self.writes and any(r.alias_info for r in returns))

    def draws(self, args: tuple, kwargs: dict) -> bool:
        """Whether a call draws random numbers: attention does only with dropout."""
        if not self._draws or self._probability is None:
            return self._draws
        i = self._probability
        return (args[i] if i < len(args) else kwargs.get("dropout_p", 0.0)) != 0.0

    def written(self, args: tuple, kwargs: dict) -> list[torch.Tensor]:
        """The tensors that a call writes to."""
        return [t for i, name in self.writes for t in tensors(args[i] if i < len(args) else kwargs.get(name))]


# In a mode torch crashes where these get the zeros of forward mode, which have no memory.
_ON_ZEROS = {torch.ops.aten.mul.Scalar, torch.ops.aten.add.Scalar}


def _on_zeros(func: Any, *args: Any, **kwargs: Any) -> Any:
    with private.with_zeros():
        return func(*args, **kwargs)


# Their schemas don't say that they update the running statistics.
_BATCH_NORMS = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}
_NAMESPACES = {"aten", "prims", "_c10d_functional", "c10d"}
facts_of = functools.cache(Facts)


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a call's argument or result."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list, dict)):
        return [t for item in contents(value) for t in tensors(item)]
    return []


def mapped(fn: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """A call's argument with ``fn`` applied to its tensors."""
    return private.tree_map_only(torch.Tensor, fn, value)


# torch's counter has the formulas for the attention kernels of every device but the CPU.
_CPU_ATTENTION: dict[str, Any] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": sdpa_flop_count,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": sdpa_backward_flop_count,
}


def flops(func: Any, args: tuple, kwargs: dict, result: Any) -> int:
    """The FLOPs of one call, by torch's formulas: those of matrix products, convolutions and attention, else 0."""
    packet: Any = getattr(func, "overloadpacket", func)
    if (attention := _CPU_ATTENTION.get(str(packet))) is not None:
        shapes = [arg.shape for arg in args if isinstance(arg, torch.Tensor)]
        return int(attention(*shapes[: 3 + packet.__name__.endswith("backward")]))
    formula: Any = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
