"""The groups of operators that the presets in ``remat.policies`` save.

They are sets of names, so they may contain operators that this torch lacks or that a package registers later.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch


def named(names: str, library: str = "aten") -> frozenset[str]:
    """Return the qualified names of a library's operators."""
    return frozenset(f"{library}::{name}" for name in names.split())


# Nested tensors execute `aten::linear` and `aten::matmul`; mixture-of-experts layers execute `_grouped_mm`.
MATMULS_WITHOUT_BATCH_DIMS = (
    named(
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

# Composites such as `conv2d` are listed for inference mode, in which operators don't decompose.
CONVOLUTIONS = (
    named(
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

# The collectives of `torch.distributed` itself write into their arguments, so they have no output to save.
_COLLECTIVES = """
    all_reduce all_reduce_coalesced all_gather_into_tensor all_gather_into_tensor_coalesced reduce_scatter_tensor
    reduce_scatter_tensor_coalesced all_to_all_single broadcast wait_tensor _wrap_tensor_autograd
"""
COLLECTIVES = (
    named(_COLLECTIVES, "_c10d_functional")
    | named(_COLLECTIVES, "_c10d_functional_autograd")
    | {"_dtensor::shard_dim_alltoall"}
)


def is_unbatched_einsum(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether this is a ``bmm`` with batch size 1 by which ``torch.einsum`` multiplies two matrices.

    Its arguments look like those of a user's own ``bmm``, so the call stack is searched for ``torch.einsum``.
    """
    if not args or args[0].shape[0] != 1:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not torch.functional.einsum.__code__:
        frame = frame.f_back
    return frame is not None
