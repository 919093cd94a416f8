"""The resolution of what users write to operators.

A policy sees the operators that reach a dispatch mode. Many that users write, such as ``linear``, never do: they are
composites, and decompose into other operators first.
"""

from __future__ import annotations

import difflib
from typing import Any

import torch

from .._core import private
from .._core.facts import facts_of
from ..errors import PolicyError
from .groups import named

Op = Any  # an OpOverload or a HigherOrderOperator

# What error messages suggest instead of a composite.
_INSTEAD = {
    "policies.save_matmuls": named(
        "linear matmul linalg_matmul einsum inner tensordot chain_matmul linalg_multi_dot bilinear"
    ),
    "policies.save_attention": named("scaled_dot_product_attention _scaled_dot_product_attention_math"),
    "policies.save_convolutions": named(
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d _convolution_mode"
    ),
    "'aten._softmax'": named("softmax"),
    "'aten._log_softmax'": named("log_softmax"),
    "'aten.native_layer_norm'": named("layer_norm"),
    "'aten.native_group_norm'": named("group_norm"),
    "'aten.native_batch_norm' and 'aten.cudnn_batch_norm'": named("batch_norm"),
}
_OTHERWISE = "the operators that it decomposes into, or policies.save_only_these_names with a checkpoint_name"


def packet_name(op: Op) -> str:
    """Return the name of an operator's packet: ``aten::mm`` for every overload of ``aten.mm``, and for ``aten::mm``."""
    if isinstance(op, str):
        return op
    name = op.name().partition(".")[0]
    return name if "::" in name else f"{op.namespace}::{name}"


def full_name(op: Op) -> str:
    """Return the full name of an operator, such as ``aten.mm.default``, which `find` accepts."""
    return f"{op.namespace}.{op.name()}" if isinstance(op, private.HigherOrderOperator) else str(op)


def expressions(ops: frozenset[Op]) -> list[str]:
    """Return the operators as Python expressions. A complete set of overloads is shown as its packet."""
    out, rest = [], set(ops)
    for op in sorted(ops, key=full_name):
        if op not in rest:
            continue
        packet = getattr(op, "overloadpacket", None)
        reaching = _reaching(packet) if packet is not None else frozenset()
        if reaching and reaching <= rest:
            rest -= reaching
            out.append(f"torch.ops.{packet}")
        else:
            out.append(f"torch.ops.{full_name(op)}")
    return out


_BACKENDS = "CPU", "CUDA", "MPS", "XPU", "HPU", "MTIA", "PrivateUse1"


def reaches_dispatch(op: Any) -> bool:
    """Whether a dispatch mode sees an operator, rather than the operators that it decomposes into.

    An operator with only a composite kernel is never seen. Kernels for nested tensors (``aten.linear``) are ignored.
    """
    try:
        is_composite = private.has_kernel(op.name(), "CompositeImplicitAutograd")
        return not is_composite or any(private.has_kernel(op.name(), backend) for backend in _BACKENDS)
    except RuntimeError:  # the dispatcher has no operators on numbers and lists
        return False


def find(name: str) -> Any:
    """Look up a name: an overload, an overload packet, or a higher-order operator.

    Raises:
        PolicyError: there is no such operator; the message has the nearest names.
    """
    found = _lookup(name)
    if found is None:
        raise PolicyError(
            f"There is no operator {name!r}.{_nearest(name)} Operators are written 'aten.mm' or 'aten.mm.default'; if "
            f"a package registers the operator, import the package first. For names given by checkpoint_name use "
            f"policies.save_only_these_names."
        )
    return found


def resolve(op: Any) -> frozenset[Op]:
    """Return the operators that an argument refers to: an overload, or all overloads of a packet.

    Args:
        op: an ``OpOverload``, ``OpOverloadPacket`` or ``HigherOrderOperator``, a function made by
            ``torch.library.custom_op``, or a name such as ``"aten.mm"``, ``"aten::mm"`` or ``"aten.mm.default"``.

    Returns:
        The overloads that reach a policy.

    Raises:
        PolicyError: there is no such operator, or it decomposes into others before a policy sees it.

    Example:
        >>> sorted(map(str, resolve("aten::bmm")))[:2]
        ['aten.bmm.default', 'aten.bmm.dtype']
    """
    found = find(op) if isinstance(op, str) else private.overload_of(op)
    if isinstance(found, private.OpOverloadPacket):
        ops = _reaching(found)
    elif isinstance(found, private.OpOverload):
        ops = frozenset((found,) if reaches_dispatch(found) else ())
    elif isinstance(found, private.HigherOrderOperator):
        ops = frozenset((found,))
    else:
        raise PolicyError(f"save_ops takes operators such as torch.ops.aten.mm, got {op!r}.{operator_like(op)}")
    if not ops:
        raise PolicyError(_about_composite(found))
    return ops


def makers_of(op: Any) -> frozenset[Op]:
    """Return the operators that an argument refers to, without those that only return views.

    Raises:
        PolicyError: as in `resolve`, or no operator is left.
    """
    ops = frozenset(each for each in resolve(op) if not facts_of(each).views)
    if not ops:
        raise PolicyError(
            f"{find(op) if isinstance(op, str) else op} only returns views, which share memory with their base, so "
            f"there is nothing to save. Save the operator that computes the base, or give the view a name with "
            f"checkpoint_name and use policies.save_only_these_names, which saves the base."
        )
    return ops


def _reaching(packet: Any) -> frozenset[Op]:
    """Return the overloads that reach a policy: none if only ``out=`` overloads do, as for some composites."""
    ops = frozenset(op for name in packet.overloads() if reaches_dispatch(op := getattr(packet, name)))
    return ops if any(not full_name(op).endswith((".out", "_out")) for op in ops) else frozenset()


def _lookup(name: str) -> Any:
    found: Any = torch.ops
    for part in name.removeprefix("torch.ops.").replace("::", ".").split("."):
        found = getattr(found, part, None) if part.isidentifier() else None
    return found if isinstance(found, private.OPERATORS) else None


def _nearest(name: str) -> str:
    wanted = name.removeprefix("torch.ops.").replace("::", ".")
    packet = _lookup(wanted.rpartition(".")[0])
    if isinstance(packet, private.OpOverloadPacket):
        return f" The overloads of {packet} are {', '.join(packet.overloads())}."
    known = {each.partition(".")[0].replace("::", ".") for each in private.operator_names()}
    wanted = wanted if "." in wanted else f"aten.{wanted}"
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.75)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def _about_composite(op: Op) -> str:
    packet = getattr(op, "overloadpacket", op)
    name = str(packet).replace(".", "::")
    instead = next((use for use, names in _INSTEAD.items() if name in names), _OTHERWISE)
    return (
        f"{op} is a composite: it decomposes into other operators before a policy sees it, and only the results of "
        f"these can be saved. Use {instead}."
    )


def operator_like(value: Any) -> str:
    """Return a hint at the operator that a function such as ``torch.mm`` calls."""
    name = getattr(value, "__name__", None)
    packet = _lookup(f"aten.{name}") if callable(value) and isinstance(name, str) else None
    if packet is None:
        return ""
    try:
        resolve(packet)
    except PolicyError as error:
        return f" {error}"
    return f" Did you mean torch.ops.aten.{name}?"
