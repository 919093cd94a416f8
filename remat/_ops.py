"""Which operators there are, and the groups of them that policies speak of.

A policy sees the operators that reach a dispatch mode. Many that users write, such as ``linear``, never do: they are
composites, and become other operators first. The groups go by name, so that they also hold operators that this torch
doesn't have or that a package registers later.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

import torch

from . import _torch
from ._errors import PolicyError
from ._facts import facts_of

Op = Any  # an OpOverload or a HigherOrderOperator


def _named(names: str, library: str = "aten") -> frozenset[str]:
    return frozenset(f"{library}::{name}" for name in names.split())


# `aten::linear` and `aten::matmul` are for nested tensors, `_grouped_mm` is the linear layer of experts.
MATMULS_WITHOUT_BATCH_DIMS = (
    _named(
        """
        mm addmm addmm_ _addmm_activation mv addmv addmv_ dot vdot linear
        _int_mm _scaled_mm _scaled_mm_v2 _mixed_dtypes_linear _weight_int8pack_mm _weight_int4pack_mm
        _weight_int4pack_mm_for_cpu _weight_int4pack_mm_with_scales_and_zeros _dyn_quant_matmul_4bit
        _grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2 mkldnn_linear
        _sparse_addmm _sparse_sparse_matmul _sparse_mm_reduce_impl sparse_sampled_addmm hspmm _cslt_sparse_mm
        _sparse_semi_structured_linear _sparse_semi_structured_mm _sparse_semi_structured_addmm
        """
    )
    | {"mkl::_mkl_linear", "mkldnn::_linear_pointwise", "quantized::matmul", "quantized::int4mm_packed_weight_cpu"}
    | {f"quantized::linear{end}" for end in ("", "_relu", "_dynamic", "_relu_dynamic", "_dynamic_fp16")}
    | {"onednn::qlinear_pointwise", "onednn::linear_dynamic_fp16", "onednn::linear_relu_dynamic_fp16"}
)

# The composites among them are for inference mode, in which operators don't decompose.
CONVOLUTIONS = (
    _named(
        """
        convolution _convolution convolution_overrideable conv_tbc conv1d conv2d conv3d
        conv_transpose1d conv_transpose2d conv_transpose3d
        cudnn_convolution cudnn_convolution_transpose cudnn_convolution_relu cudnn_convolution_add_relu
        miopen_convolution miopen_convolution_transpose miopen_depthwise_convolution
        miopen_convolution_relu miopen_convolution_add_relu
        mkldnn_convolution _mps_convolution _mps_convolution_transpose _nnpack_spatial_convolution
        _conv_depthwise2d conv_depthwise3d _slow_conv2d_forward slow_conv3d_forward
        slow_conv_dilated2d slow_conv_dilated3d slow_conv_transpose2d slow_conv_transpose3d
        """
    )
    | {"mkldnn::_convolution_pointwise", "mkldnn::_convolution_transpose_pointwise", "mkldnn_prepacked::conv2d_run"}
    | {f"quantized::conv{n}d{end}" for n in (1, 2, 3) for end in ("", "_relu", "_dynamic")}
    | {"torchvision::deform_conv2d"}
)

MATMULS = (
    MATMULS_WITHOUT_BATCH_DIMS
    | CONVOLUTIONS
    | _named("bmm baddbmm baddbmm_ addbmm addbmm_ matmul _trilinear _foreach_mm")
)

ATTENTION = _named(
    """
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math_for_mps
    _flash_attention_forward _flash_attention_forward_no_dropout_inplace _efficient_attention_forward
    _cudnn_attention_forward _native_multi_head_attention _transformer_encoder_layer_fwd
    _triton_multi_head_attention _triton_scaled_dot_attention scaled_dot_product_attention
    """
) | {
    "higher_order::flex_attention",
    "torch_attn::_varlen_attn",
    "torch_attn::_varlen_attn_out",
    "flash_attn::_flash_attn_forward",
    "flash_attn::_flash_attn_varlen_forward",
    "flash_attn_3::fwd",
    "flash_attn_3::_flash_attn_forward",
    "xformers::efficient_attention_forward_cutlass",
    "xformers_flash::flash_fwd",
    "xformers_flash3::flash_fwd",
}

# Those of `torch.distributed` itself write into their arguments: there is no output to keep.
_COLLECTIVES = """
    all_reduce all_reduce_coalesced all_gather_into_tensor all_gather_into_tensor_coalesced reduce_scatter_tensor
    reduce_scatter_tensor_coalesced all_to_all_single broadcast wait_tensor _wrap_tensor_autograd
"""
COLLECTIVES = (
    _named(_COLLECTIVES, "_c10d_functional")
    | _named(_COLLECTIVES, "_c10d_functional_autograd")
    | {"_dtensor::shard_dim_alltoall"}
)

GROUPS = {
    "save_matmuls": MATMULS,
    "save_matmuls_without_batch_dims": MATMULS_WITHOUT_BATCH_DIMS,
    "save_attention": ATTENTION,
    "save_convolutions": CONVOLUTIONS,
    "save_collectives": COLLECTIVES,
}

# What to say instead of a composite.
_INSTEAD = {
    "policies.save_matmuls": _named(
        "linear matmul linalg_matmul einsum inner tensordot chain_matmul linalg_multi_dot bilinear"
    ),
    "policies.save_attention": _named("scaled_dot_product_attention _scaled_dot_product_attention_math"),
    "policies.save_convolutions": _named(
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d _convolution_mode"
    ),
    "'aten._softmax'": _named("softmax"),
    "'aten._log_softmax'": _named("log_softmax"),
    "'aten.native_layer_norm'": _named("layer_norm"),
    "'aten.native_group_norm'": _named("group_norm"),
    "'aten.native_batch_norm' and 'aten.cudnn_batch_norm'": _named("batch_norm"),
}


def packet_name(op: Op) -> str:
    """``aten::mm`` of every overload of ``aten.mm``."""
    name = op.name().partition(".")[0]
    return name if "::" in name else f"{op.namespace}::{name}"


def text(op: Op) -> str:
    """The name that `find` takes back: ``aten.mm.default``."""
    return f"{op.namespace}.{op.name()}" if isinstance(op, _torch.HigherOrderOperator) else str(op)


def expressions(ops: frozenset[Op]) -> list[str]:
    """The operators as Python expressions, a packet where all that is in it is there."""
    out, rest = [], set(ops)
    for op in sorted(ops, key=text):
        if op not in rest:
            continue
        packet = getattr(op, "overloadpacket", None)
        reaching = _reaching(packet) if packet is not None else frozenset()
        if reaching and reaching <= rest:
            rest -= reaching
            out.append(f"torch.ops.{packet}")
        else:
            out.append(f"torch.ops.{text(op)}")
    return out


def members(group: frozenset[str]) -> Iterator[Op]:
    """One operator of each name in a group that exists here."""
    for name in sorted(group):
        found = _lookup(name)
        if isinstance(found, _torch.OpOverloadPacket):
            yield getattr(found, found.overloads()[0])
        elif found is not None:
            yield found


def find(name: str) -> Any:
    """What stands under a name: an overload, a packet of overloads, or a higher-order operator.

    Raises:
        PolicyError: nothing does; the message has the nearest names.
    """
    found = _lookup(name)
    if found is None:
        raise PolicyError(
            f"There is no operator {name!r}.{_nearest(name)} Operators are written 'aten.mm' or 'aten.mm.default'; if "
            f"a package registers it, import that first. Names given by checkpoint_name go into "
            f"policies.save_only_these_names."
        )
    return found


def resolve(op: Any) -> frozenset[Op]:
    """The operators that a user means: an overload, all overloads of a packet, or what has that name.

    Args:
        op: an ``OpOverload``, ``OpOverloadPacket`` or ``HigherOrderOperator``, a function made by
            ``torch.library.custom_op``, or a name such as ``"aten.mm"``, ``"aten::mm"`` or ``"aten.mm.default"``.

    Returns:
        Those of them that reach a policy.

    Raises:
        PolicyError: there is no such operator, or it becomes others before a policy sees it.

    Example:
        >>> sorted(map(str, resolve("aten::bmm")))[:2]
        ['aten.bmm.default', 'aten.bmm.dtype']
    """
    found = find(op) if isinstance(op, str) else _torch.overload_of(op)
    if isinstance(found, _torch.OpOverloadPacket):
        ops = _reaching(found)
    elif isinstance(found, _torch.OpOverload):
        ops = frozenset((found,) if _torch.reaches_dispatch(found) else ())
    elif isinstance(found, _torch.HigherOrderOperator):
        ops = frozenset((found,))
    else:
        raise PolicyError(f"save_ops takes operators such as torch.ops.aten.mm, got {op!r}.{operator_like(op)}")
    if not ops:
        raise PolicyError(_about_composite(found))
    return ops


def makers_of(op: Any) -> frozenset[Op]:
    """The same of an operator that makes values.

    Raises:
        PolicyError: or it makes views alone, which a policy isn't asked about.
    """
    ops = frozenset(each for each in resolve(op) if not facts_of(each).views)
    if not ops:
        raise PolicyError(
            f"{find(op) if isinstance(op, str) else op} makes views alone, which lie on the memory of what they are "
            f"views of: there is nothing to save. Save the operators that make the values, or give the view a name "
            f"with checkpoint_name and use policies.save_only_these_names, which keeps what it is a view of."
        )
    return ops


def _reaching(packet: Any) -> frozenset[Op]:
    """The overloads that reach a policy; those that write into an argument don't make a composite less of one."""
    ops = frozenset(op for name in packet.overloads() if _torch.reaches_dispatch(op := getattr(packet, name)))
    return ops if any(not text(op).endswith((".out", "_out")) for op in ops) else frozenset()


def _lookup(name: str) -> Any:
    found: Any = torch.ops
    for part in name.removeprefix("torch.ops.").replace("::", ".").split("."):
        found = getattr(found, part, None) if part.isidentifier() else None
    operators = (_torch.OpOverload, _torch.OpOverloadPacket, _torch.HigherOrderOperator)
    return found if isinstance(found, operators) else None


def _nearest(name: str) -> str:
    wanted = name.removeprefix("torch.ops.").replace("::", ".")
    packet = _lookup(wanted.rpartition(".")[0])
    if isinstance(packet, _torch.OpOverloadPacket):
        return f" The overloads of {packet} are {', '.join(packet.overloads())}."
    known = {each.partition(".")[0].replace("::", ".") for each in _torch.operator_names()}
    wanted = wanted if "." in wanted else f"aten.{wanted}"
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.75)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def _about_composite(op: Op) -> str:
    packet = getattr(op, "overloadpacket", op)
    name = str(packet).replace(".", "::")
    instead = [use for use, names in _INSTEAD.items() if name in names] or [
        "the operators that it is made of, or name its result with checkpoint_name and use "
        "policies.save_only_these_names"
    ]
    return (
        f"{op} is a composite: it becomes other operators before a policy sees it, and only those can be saved. "
        f"Use {instead[0]}."
    )


def operator_like(value: Any) -> str:
    """A hint at the operator that a function such as ``torch.mm`` calls."""
    name = getattr(value, "__name__", None)
    packet = _lookup(f"aten.{name}") if callable(value) and isinstance(name, str) else None
    if packet is None:
        return ""
    try:
        resolve(packet)
    except PolicyError as error:
        return f" {error}"
    return f" Did you mean torch.ops.aten.{name}?"
