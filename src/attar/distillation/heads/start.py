"""A new block drafter begins near its target: as the target's last layers over the states that enter them.

    W_q, W_k, W_v, W_o, MLP, norms      those of the target's last l layers, where they have the same shape
    fc                                  the identity of the state that enters the first of them, if it is read
    hidden_norm                         the norm in front of it: the context's keys and values are then the
                                        target's own, but for the norm of the keys
    norm                                the target's last
    q_norm, k_norm                      the target's; where it has none, the size that queries and keys have
                                        for inputs of size 1

What does not fit (an MLP without gate, a norm that subtracts the mean) stays random. Differs from the papers,
which begin at random weights and read a hundred times the text.

Letters: l layers of the head, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attar.models.anatomy import discover
from attar.models.draft_heads.block_drafter import BlockDrafter
from attar.models.draft_heads.decoder_layer import HeadLayer
from attar.models.parts import Block, Projection, weight_of


@torch.no_grad()  # type: ignore[untyped-decorator]
def start_near(drafter: BlockDrafter, target: Any) -> None:
    """Set the weights of a new drafter, of a target with at least as many layers."""
    anatomy, layers, H = discover(target), drafter.config.layers, drafter.config.hidden
    blocks = anatomy.blocks[len(anatomy.blocks) - len(drafter.layers) :]
    for layer, block in zip(drafter.layers, blocks, strict=True):
        _start_layer(layer, block, target)
    if (entering := blocks[0].index - 1) in layers:
        column = layers.index(entering) * H
        drafter.fc.weight[:, column : column + H] += torch.eye(H)
        drafter.hidden_norm.weight.copy_(drafter.layers[0].input_layernorm.weight)
    if anatomy.final_norm is not None:
        _copy(drafter.norm.weight, norm_scale(target.get_submodule(anatomy.final_norm)))


def _start_layer(layer: HeadLayer, block: Block, target: Any) -> None:
    own, attention, mlp = layer.self_attn, block.attention, block.mlp
    norms = [norm_scale(target.get_submodule(name)) for name in block.norms]
    if len(norms) == 2:  # with more, some are behind attention and MLP
        _copy(layer.input_layernorm.weight, norms[0])
        _copy(layer.post_attention_layernorm.weight, norms[1])
    parts: list[tuple[nn.Module, Projection | None]] = [
        (own.q_proj, attention.q),
        (own.k_proj, attention.k),
        (own.v_proj, attention.v),
        (own.o_proj, attention.o),
        (layer.mlp.gate_proj, mlp.gate),
        (layer.mlp.up_proj, mlp.up),
        (layer.mlp.down_proj, mlp.down),
    ]
    for linear, part in parts if mlp.gate is not None else parts[:4]:
        assert part is not None, "no gate is among the first four"
        _copy(linear.weight, weight_of(target.get_submodule(part.name))[part.stored_rows()])
    for norm, linear in ((own.q_norm, own.q_proj), (own.k_norm, own.k_proj)):
        norm.weight.fill_((linear.weight * layer.input_layernorm.weight).square().sum(1).mean().sqrt())
    for norm, name in zip((own.q_norm, own.k_norm), attention.norms, strict=False):
        _copy(norm.weight, norm_scale(target.get_submodule(name)))


def norm_scale(norm: nn.Module) -> Tensor | None:
    """What an RMSNorm multiplies with, float32 (H,); None for a norm that does more."""
    weight = getattr(norm, "weight", None)
    if weight is None or "RMS" not in type(norm).__name__ or getattr(norm, "bias", None) is not None:
        return None
    scale: Tensor = norm(torch.ones_like(weight)).float()
    return scale


def _copy(parameter: Tensor, value: Tensor | None) -> None:
    """Set a parameter to a value of its shape; another is left out."""
    if value is not None and value.shape == parameter.shape:
        parameter.copy_(value)
