"""A new block drafter begins near its target: as the target's last layers over the states that enter them.

    W_q, W_k, W_v, W_o, MLP, norms      those of the target's last l layers, where they have the same shape
    fc                                  picks the state that enters the first of them, if it is read at all
    hidden_norm                         the norm in front of it, so that the context's keys and values are the
                                        target's own
    norm                                the target's last one
    q_norm, k_norm                      the size that queries and keys have without them, for inputs of size 1

What does not fit (a layer without gate, a norm that subtracts the mean) stays random. The papers begin at
random weights, with a hundred times the text.

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
    """Set the weights of a new drafter."""
    anatomy, H = discover(target), drafter.config.hidden
    blocks = anatomy.blocks[len(anatomy.blocks) - len(drafter.layers) :]
    for layer, block in zip(drafter.layers, blocks, strict=True):
        _start_layer(layer, block, target)
    entering = blocks[0].index - 1
    if entering in drafter.config.layers:
        column = drafter.config.layers.index(entering) * H
        drafter.fc.weight[:, column : column + H] += torch.eye(H)
        _copy(drafter.hidden_norm.weight, drafter.layers[0].input_layernorm.weight)
    if anatomy.final_norm is not None:
        _copy(drafter.norm.weight, scale_of(target.get_submodule(anatomy.final_norm)))


def _start_layer(layer: HeadLayer, block: Block, target: Any) -> None:
    norms = [scale_of(target.get_submodule(name)) for name in block.norms]
    if len(norms) == 2:
        _copy(layer.input_layernorm.weight, norms[0])
        _copy(layer.post_attention_layernorm.weight, norms[1])
    attention, own = block.attention, layer.self_attn
    pairs = [(own.q_proj, attention.q), (own.k_proj, attention.k), (own.v_proj, attention.v)]
    pairs += [(own.o_proj, attention.o), (layer.mlp.up_proj, block.mlp.up)]
    pairs += [(layer.mlp.down_proj, block.mlp.down)]
    pairs += [] if block.mlp.gate is None else [(layer.mlp.gate_proj, block.mlp.gate)]
    for linear, part in pairs:
        _copy(linear.weight, _weight(target, part))
    for norm, linear in ((own.q_norm, own.q_proj), (own.k_norm, own.k_proj)):
        reads = linear.weight * layer.input_layernorm.weight
        norm.weight.fill_(float(reads.square().sum(1).mean().sqrt()))


def scale_of(norm: nn.Module) -> Tensor | None:
    """What an RMSNorm multiplies with; None for other norms."""
    weight = getattr(norm, "weight", None)
    if weight is None or getattr(norm, "bias", None) is not None or "RMS" not in type(norm).__name__:
        return None
    out: Tensor = norm(torch.ones_like(weight)).float()
    return out


def _weight(target: Any, part: Projection) -> Tensor:
    """(out, in) of a projection."""
    return weight_of(target.get_submodule(part.name))[part.stored_rows()]


def _copy(parameter: Tensor, value: Tensor | None) -> None:
    if value is not None and value.shape == parameter.shape:
        parameter.copy_(value)


