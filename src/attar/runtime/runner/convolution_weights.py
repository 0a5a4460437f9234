"""LFM2's layers as the compiled step reads them: names in Llama's words, and short convolutions.

    B, C, x = in_proj(h),   u = B x,   y = out_proj(C sum_j kernel_j u_(t - width + 1 + j))

A layer has attention with norms of heads, or this in its place; all else is Llama's under other names.
"""

from __future__ import annotations

from typing import Any

from attar.kernels.decode import ConvolutionWeights
from attar.runtime.runner.expert_weights import LayerTensors

FAMILIES = ("lfm2", "lfm2_moe")
KERNEL = "conv.conv"
NAMES = (
    (r"model\.embedding_norm\.", "model.norm."),
    (r"\.operator_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.self_attn\.([qk])_layernorm\.", r".self_attn.\1_norm."),
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
    (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
    (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
    (r"\.feed_forward\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
    (r"\.feed_forward\.", ".mlp."),
)


def convolution_weights(layer: LayerTensors) -> ConvolutionWeights | None:
    """The convolution of a layer; None where it attends."""
    if not layer.has(f"{KERNEL}.weight"):
        return None
    return depthwise(layer, KERNEL)


def depthwise(layer: LayerTensors, name: str) -> ConvolutionWeights:
    """A convolution of each channel."""
    kernel = layer.tensor(f"{name}.weight").float()[:, 0].T.contiguous()
    bias = layer.tensor(f"{name}.bias").float() if layer.has(f"{name}.bias") else None
    return ConvolutionWeights(kernel, bias)


def convolution_products(layer: LayerTensors) -> tuple[Any, Any]:
    """What makes B, C and x, and the output projection."""
    return layer.product("conv.", ("in_proj",)), layer.product("conv.", ("out_proj",))
