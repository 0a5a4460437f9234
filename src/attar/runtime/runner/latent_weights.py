"""From a checkpoint's tensors to a layer's latent attention (MLA), as the compiled step reads it.

    kv_b_proj (heads (nope + wide), rank)  =  of each head U (nope, rank), then V (wide, rank)

U and V keep the codes of a quantized checkpoint. U^T, which absorbs queries, has its groups along the wrong
side, and is bfloat16.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from attar.errors import ModelError
from attar.kernels.latents import LatentShape, LatentWeights
from attar.runtime.runner.codes import PackedCodes
from attar.runtime.runner.expert_weights import LayerTensors

FAMILIES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu")
EPS = 1e-6  # of the norms of latents in transformers, whatever the config's
NORMS = {"query_norm": "self_attn.q_a_layernorm", "key_norm": "self_attn.kv_a_layernorm"}


def latent_shape(config: Any) -> LatentShape | None:
    """The shape; None where the family has no latents."""
    if config.model_type not in FAMILIES:
        return None
    return LatentShape(
        rank=config.kv_lora_rank,
        nope=config.qk_nope_head_dim,
        wide=config.v_head_dim,
        eps=EPS,
        interleaved=bool(getattr(config, "rope_interleave", True)),
    )


def latent_scale(config: Any) -> float:
    """What multiplies queries: of YaRN with its correction (DeepSeek-V2, appendix)."""
    scale = float((config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5)
    rope = config.rope_parameters
    wanted = rope.get("mscale_all_dim", 0)
    if rope.get("rope_type", "default") == "default" or not wanted or rope["factor"] <= 1:
        return scale
    return scale * float(0.1 * wanted * math.log(rope["factor"]) + 1.0) ** 2


def latent_weights(config: Any, shape: LatentShape, layer: LayerTensors) -> LatentWeights:
    """A layer's matrices.

    Raises:
        ModelError: ``kv_b_proj`` has other rows, or a bias.
    """
    heads, rows = config.num_attention_heads, shape.nope + shape.wide
    name = "self_attn.kv_b_proj.weight"
    if layer.has("self_attn.kv_b_proj.bias"):
        raise ModelError("the compiled runner has no place for a bias of kv_b_proj")
    weight = layer.codes(name) or layer.tensor(name)
    dense = weight.dense() if isinstance(weight, PackedCodes) else weight
    if dense.shape != (heads * rows, shape.rank):
        raise ModelError(f"kv_b_proj is {tuple(dense.shape)}, not {(heads * rows, shape.rank)}")
    starts = range(0, heads * rows, rows)
    ups = [dense[start : start + shape.nope] for start in starts]
    query = None
    if layer.has(f"{NORMS['query_norm']}.weight"):
        query = layer.product("self_attn.", ("q_b_proj",))
    return LatentWeights(
        absorb=tuple(layer.unrounded(up.T) for up in ups),
        up_keys=_of_heads(layer, weight, starts, 0, shape.nope),
        up_values=_of_heads(layer, weight, starts, shape.nope, rows),
        query=query,
    )


def first_product(layer: LayerTensors) -> Any:
    """Queries, or their latents, with the latents of keys and the rotated key."""
    queries = "q_a_proj" if layer.has(f"{NORMS['query_norm']}.weight") else "q_proj"
    return layer.product("self_attn.", (queries, "kv_a_proj_with_mqa"))


def _of_heads(
    layer: LayerTensors, weight: Tensor | PackedCodes, starts: range, first: int, last: int
) -> tuple[Any, ...]:
    """Rows [first, last) of each head. All are of one kind: where zero points make codes differ, bfloat16."""
    bounds = [(start + first, start + last) for start in starts]
    if isinstance(weight, Tensor):
        return tuple(layer.packed(weight[a:b]) for a, b in bounds)
    parts = tuple(layer.packed(weight.rows(slice(a, b))) for a, b in bounds)
    if len({part.zeros for part in parts}) == 1:
        return parts
    return tuple(layer.unrounded(weight.rows(slice(a, b)).dense()) for a, b in bounds)
