"""The operators that users write, resolved, and the groups of operators that the presets in ``remat.policies`` save.

A policy sees the operators that reach a dispatch mode. Composites, such as ``linear``, decompose into others first.
"""

from __future__ import annotations

import difflib
import sys
from traceback import walk_stack
from typing import Any

import torch

from .._core import private
from .._core.facts import facts_of
from ..errors import PolicyError


def named(names: str, library: str = "aten") -> frozenset[str]:
    """Return the qualified names of operators. Those that don't name their own library are in ``library``."""
    return frozenset(name if "::" in name else f"{library}::{name}" for name in names.split())


# Nested tensors execute `aten::linear` and `aten::matmul`; mixture-of-experts layers execute `_grouped_mm`.
MATMULS_WITHOUT_BATCH_DIMS = named(
    """
    mm addmm addmm_ _addmm_activation mv addmv addmv_ dot vdot linear
    _int_mm _scaled_mm _scaled_mm_v2 _mixed_dtypes_linear _weight_int8pack_mm _weight_int4pack_mm
    _weight_int4pack_mm_for_cpu _weight_int4pack_mm_with_scales_and_zeros _dyn_quant_matmul_4bit
    _grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2 mkldnn_linear
    _sparse_addmm _sparse_sparse_matmul _sparse_mm_reduce_impl sparse_sampled_addmm hspmm _cslt_sparse_mm
    _sparse_semi_structured_linear _sparse_semi_structured_mm _sparse_semi_structured_addmm
    mkl::_mkl_linear mkldnn::_linear_pointwise quantized::matmul quantized::int4mm_packed_weight_cpu
    quantized::linear quantized::linear_relu
    quantized::linear_dynamic quantized::linear_relu_dynamic quantized::linear_dynamic_fp16
    onednn::qlinear_pointwise onednn::linear_dynamic_fp16 onednn::linear_relu_dynamic_fp16
    """
)

# Composites such as `conv2d` are listed for inference mode, in which operators don't decompose.
CONVOLUTIONS = named(
    """
    convolution _convolution convolution_overrideable conv_tbc conv1d conv2d conv3d
    conv_transpose1d conv_transpose2d conv_transpose3d
    cudnn_convolution cudnn_convolution_transpose cudnn_convolution_relu cudnn_convolution_add_relu
    miopen_convolution miopen_convolution_transpose miopen_depthwise_convolution
    miopen_convolution_relu miopen_convolution_add_relu
    mkldnn_convolution _mps_convolution _mps_convolution_transpose _nnpack_spatial_convolution
    _conv_depthwise2d conv_depthwise3d _slow_conv2d_forward slow_conv3d_forward
    slow_conv_dilated2d slow_conv_dilated3d slow_conv_transpose2d slow_conv_transpose3d
    mkldnn::_convolution_pointwise mkldnn::_convolution_transpose_pointwise mkldnn_prepacked::conv2d_run
    quantized::conv1d quantized::conv1d_relu quantized::conv1d_dynamic
    quantized::conv2d quantized::conv2d_relu quantized::conv2d_dynamic
    quantized::conv3d quantized::conv3d_relu quantized::conv3d_dynamic
    torchvision::deform_conv2d
    """
)

MATMULS = (
    MATMULS_WITHOUT_BATCH_DIMS
    | CONVOLUTIONS
    | named("bmm baddbmm baddbmm_ addbmm addbmm_ matmul _trilinear _foreach_mm")
)

ATTENTION = named(
    """
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math_for_mps
    _flash_attention_forward _flash_attention_forward_no_dropout_inplace _efficient_attention_forward
    _cudnn_attention_forward _native_multi_head_attention _transformer_encoder_layer_fwd
    _triton_multi_head_attention _triton_scaled_dot_attention scaled_dot_product_attention
    higher_order::flex_attention torch_attn::_varlen_attn torch_attn::_varlen_attn_out
    flash_attn::_flash_attn_forward flash_attn::_flash_attn_varlen_forward
    flash_attn_3::fwd flash_attn_3::_flash_attn_forward
    xformers::efficient_attention_forward_cutlass xformers_flash::flash_fwd xformers_flash3::flash_fwd
    """
)

# The collectives of `torch.distributed` itself write into their arguments, so they have no output to save.
_COLLECTIVES = """
    all_reduce all_reduce_coalesced all_gather_into_tensor all_gather_into_tensor_coalesced reduce_scatter_tensor
    reduce_scatter_tensor_coalesced all_to_all_single broadcast wait_tensor _wrap_tensor_autograd
    _dtensor::shard_dim_alltoall
"""
COLLECTIVES = named(_COLLECTIVES, "_c10d_functional") | named(_COLLECTIVES, "_c10d_functional_autograd")


def is_unbatched_einsum(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether this is a ``bmm`` of batch size 1 that ``torch.einsum``, somewhere in the call stack, has issued."""
    if not args or args[0].shape[0] != 1:
        return False
    return any(frame.f_code is torch.functional.einsum.__code__ for frame, _ in walk_stack(sys._getframe(1)))


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
    """Return the full name of an operator, such as ``aten.mm.default``, which `resolve` accepts."""
    return f"{op.namespace}.{op.name()}" if isinstance(op, private.HigherOrderOperator) else str(op)


def expressions(ops: frozenset[Op]) -> list[str]:
    """Return the operators as Python expressions. A complete set of overloads is shown as its packet."""
    out = []
    for op in sorted(ops, key=full_name):
        packet = getattr(op, "overloadpacket", None)
        whole = packet is not None and frozenset() < _reaching(packet) <= ops
        out.append(f"torch.ops.{packet if whole else full_name(op)}")
    return list(dict.fromkeys(out))


_BACKENDS = "CPU", "CUDA", "MPS", "XPU", "HPU", "MTIA", "PrivateUse1"


def reaches_dispatch(op: Any) -> bool:
    """Whether a dispatch mode sees an operator: not if it has only a composite kernel, which decomposes it."""
    try:
        is_composite = private.has_kernel(op.name(), "CompositeImplicitAutograd")
        return not is_composite or any(private.has_kernel(op.name(), backend) for backend in _BACKENDS)
    except RuntimeError:  # the dispatcher has no operators on numbers and lists
        return False


def resolve(op: Any) -> frozenset[Op]:
    """Return the overloads that reach a policy, of an operator, a packet, or a name. PolicyError if there are none."""
    found = _lookup(op) if isinstance(op, str) else private.overload_of(op)
    if isinstance(op, str) and found is None:
        raise PolicyError(
            f"There is no operator {op!r}.{_nearest(op)} Operators are written 'aten.mm' or 'aten.mm.default'; if "
            f"a package registers the operator, import the package first. For names given by checkpoint_name use "
            f"policies.save_only_these_names."
        )
    if isinstance(found, private.OpOverloadPacket):
        ops = _reaching(found)
    elif isinstance(found, private.OpOverload):
        ops = frozenset((found,) if reaches_dispatch(found) else ())
    elif isinstance(found, private.HigherOrderOperator):
        ops = frozenset((found,))
    else:
        hint = " Pass them separately." if isinstance(op, (list, tuple, set)) else operator_like(op)
        raise PolicyError(f"save_ops takes operators such as torch.ops.aten.mm, got {op!r}.{hint}")
    if not ops:
        name = str(getattr(found, "overloadpacket", found)).replace(".", "::")
        instead = next((use for use, names in _INSTEAD.items() if name in names), _OTHERWISE)
        raise PolicyError(
            f"{found} is a composite: it decomposes into other operators before a policy sees it, and only the results "
            f"of these can be saved. Use {instead}."
        )
    return ops


def makers_of(op: Any) -> frozenset[Op]:
    """Return what `resolve` returns, without operators that only return views. PolicyError if none is left."""
    ops = frozenset(each for each in resolve(op) if not facts_of(each).views)
    if not ops:
        raise PolicyError(
            f"{op} only returns views, which share memory with their base, so there is nothing to save. Save the "
            f"operator that computes the base, or give the view a name with checkpoint_name and use "
            f"policies.save_only_these_names, which saves the base."
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
    wanted = name.removeprefix("torch.ops.").removeprefix("torch.").replace("::", ".")
    packet = _lookup(wanted.rpartition(".")[0])
    if isinstance(packet, private.OpOverloadPacket):
        return f" The overloads of {packet} are {', '.join(packet.overloads())}."
    known = {each.partition(".")[0].replace("::", ".") for each in private.operator_names()}
    wanted = wanted if "." in wanted else f"aten.{wanted}"
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.75)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def operator_like(value: Any) -> str:
    """Return a hint at the operator that a function such as ``torch.mm`` calls."""
    packet = _lookup(f"aten.{getattr(value, '__name__', '')}")
    if packet is None:
        return ""
    try:
        resolve(packet)
    except PolicyError as error:
        return f" {error}"
    return f" Did you mean torch.ops.{packet}?"
