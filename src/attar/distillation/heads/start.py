"""A new head begins near its target. A block drafter: as the target's last layers over the states that enter
them. EAGLE-3: as the layer behind the last of those that it reads.

    W_q, W_k, W_v, W_o, MLP, norms      those of the target's layers, where they have the same shape
    fc                                  the identity of the state that enters the first of them, if it is read
    hidden_norm                         the norm in front of it: the context's keys and values are then the
                                        target's own, but for the norm of the keys
    norm                                the target's last
    q_norm, k_norm                      the target's; where it has none, the size that queries and keys have
                                        for inputs of size 1

What does not fit (an MLP without gate, a norm that subtracts the mean) stays random. Differs from the papers,
which begin at random weights and read a hundred times the text.

Letters: H hidden size.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from attar.formats.draft_heads.rope_scaling import rope_scaling
from attar.models.anatomy.discover import discover, text_config
from attar.models.anatomy.parts import Block, Projection, weight_of
from attar.models.draft_heads.block_module import BlockDrafter
from attar.models.draft_heads.decoder_layer import DraftLayerShape
from attar.models.draft_heads.eagle3_module import Eagle3Head


def layer_shape(target: Any, *, depth: int = 1, head_norms: bool = False) -> DraftLayerShape:
    """The shape of ``depth`` layers as wide as the target's first."""
    scaling: dict[str, Any] = {}
    block, config = discover(target).blocks[0], text_config(target)
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # families with sliding windows have two
    with suppress(ValueError):  # frequencies that change with the length: plain ones
        scaling = rope_scaling(rope, getattr(config, "max_position_embeddings", 0))
    return DraftLayerShape(
        depth=depth,
        heads=block.attention.heads,
        kv_heads=block.attention.kv_heads,
        head_dim=block.attention.head_dim,
        intermediate=block.mlp.neurons,
        eps=float(getattr(config, "rms_norm_eps", None) or 1e-6),
        rope_theta=float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or 1e4),
        head_norms=head_norms,
        rope_scaling=scaling,
    )


@torch.no_grad()  # type: ignore[untyped-decorator]
def start_block_drafter(drafter: BlockDrafter, target: Any) -> None:
    """Set the weights of a new drafter, of a target with at least as many layers."""
    anatomy, layers, H = discover(target), drafter.config.layers, drafter.config.hidden
    blocks = anatomy.blocks[len(anatomy.blocks) - len(drafter.layers) :]
    for layer, block in zip(drafter.layers, blocks, strict=True):
        _start_layer(layer, layer.input_layernorm, block, target)
    if (entering := blocks[0].index - 1) in layers:
        column = layers.index(entering) * H
        drafter.fc.weight[:, column : column + H] += torch.eye(H)
        drafter.hidden_norm.weight.copy_(drafter.layers[0].input_layernorm.weight)
    _start_norm(drafter.norm, anatomy.final_norm, target)


@torch.no_grad()  # type: ignore[untyped-decorator]
def start_eagle3(head: Eagle3Head, target: Any) -> None:
    """Set the weights of a new head but for fc and W: what reads e stays random."""
    anatomy, layer = discover(target), head.layers[0]
    behind = min(head.config.layers[-1] + 1, len(anatomy.blocks) - 1)
    _start_layer(layer, layer.hidden_norm, anatomy.blocks[behind], target)
    _start_norm(head.norm, anatomy.final_norm, target)


def _start_layer(layer: Any, entering: nn.RMSNorm, block: Block, target: Any) -> None:
    """A layer as a block of the target, with the norm of its residual stream in front of attention; the
    residual stream is the last that attention reads."""
    self_attn, attention, mlp = layer.self_attn, block.attention, block.mlp
    if len(block.norms) == 2:  # with more, some are behind attention and MLP
        _start_norm(entering, block.norms[0], target)
        _start_norm(layer.post_attention_layernorm, block.norms[1], target)
    parts: list[tuple[nn.Linear, Projection | None]] = [
        (self_attn.q_proj, attention.q),
        (self_attn.k_proj, attention.k),
        (self_attn.v_proj, attention.v),
        (self_attn.o_proj, attention.o),
        (layer.mlp.gate_proj, mlp.gate),
        (layer.mlp.up_proj, mlp.up),
        (layer.mlp.down_proj, mlp.down),
    ]
    for linear, part in parts if mlp.gate is not None else parts[:4]:
        assert part is not None, "no gate is among the first four"
        weight = weight_of(target.get_submodule(part.name))[part.stored_rows()]
        columns = linear.weight[:, -weight.shape[1] :]
        if columns.shape == weight.shape:
            columns.copy_(weight)
    if self_attn.shape.head_norms:
        for norm, linear in ((self_attn.q_norm, self_attn.q_proj), (self_attn.k_norm, self_attn.k_proj)):
            norm.weight.fill_((linear.weight * entering.weight).square().sum(1).mean().sqrt())
        for norm, name in zip((self_attn.q_norm, self_attn.k_norm), attention.norms, strict=False):
            _start_norm(norm, name, target)


def _start_norm(norm: nn.RMSNorm, name: str | None, target: Any) -> None:
    """A norm as one of the target, where it is of its kind and size."""
    scale = None if name is None else norm_scale(target.get_submodule(name))
    if scale is not None and scale.shape == norm.weight.shape:
        norm.weight.copy_(scale)


def norm_scale(norm: nn.Module) -> Tensor | None:
    """What an RMSNorm multiplies with, float32 (H,); None for a norm that does more."""
    weight = getattr(norm, "weight", None)
    if weight is None or "RMS" not in type(norm).__name__ or getattr(norm, "bias", None) is not None:
        return None
    scale: Tensor = norm(torch.ones_like(weight)).float()
    return scale
