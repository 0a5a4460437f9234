"""EAGLE: Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty",
arXiv 2401.15077, section 4.1.

    f^_(i+1) = layer(fc([e(x_(i+1)); f_i]))      f is what the target's head reads: after the final norm
    q(x_(i+2)) = softmax(head(f^_(i+1)))

The layer has no norm before its attention, nor is there one behind it; a head may have further layers, which
have one before (as in EAGLE's own code). e and head are the target's, and are not part of this one. Where
the target has not run a token yet, f^ is in the place of f. EAGLE-2 (Li et al. 2024, arXiv 2406.16858) drafts
trees with the same weights (``runtime/speculate/heads/eagle_tree.py``).

Letters: H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from attar.models.draft_heads.config import HeadConfig
from attar.models.draft_heads.decoder_layer import (
    Attend,
    DraftLayerShape,
    GatedMLP,
    HeadAttention,
    HeadLayer,
    Turn,
)


@dataclass(frozen=True, kw_only=True)
class EagleConfig(HeadConfig):
    """A head of one layer or more.

    Attributes:
        shape: of the layers.
        branches: likeliest tokens after each node of a tree of drafts; 1: chains.
        bias: of fc.
    """

    kind: ClassVar[str] = "eagle"
    shape: DraftLayerShape
    branches: int = 1
    bias: bool = True


class EagleLayer(nn.Module):  # type: ignore[misc]
    """The decoder layer: attention reads the residual stream itself."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.self_attn = HeadAttention(config.hidden, config.shape)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden, eps=config.shape.eps)
        self.mlp = GatedMLP(config.hidden, config.shape.intermediate)

    def output(self, residual: Tensor, y: Tensor) -> Tensor:
        """(..., H) of the residual stream and attended heads (..., N d)."""
        h = residual + self.self_attn.o_proj(y)
        out: Tensor = h + self.mlp(self.post_attention_layernorm(h))
        return out


def further_layers(hidden: int, shape: DraftLayerShape) -> Iterator[HeadLayer]:
    """The layers of a head behind its first."""
    return (HeadLayer(hidden, shape, index) for index in range(1, shape.depth))


def run_layers(layers: nn.ModuleList, x: Tensor, residual: Tensor, turn: Turn, attend: Attend) -> Tensor:
    """(..., T, H) of what the first layer's attention reads, and of the residual stream (..., T, H)."""
    first = layers[0]
    queries, (keys, values) = first.self_attn.queries(x, turn), first.self_attn.keys_values(x, turn)
    h: Tensor = first.output(residual, attend(0, queries, keys, values))
    for layer in layers[1:]:
        h = layer(h, turn, attend)
    return h


class EagleHead(nn.Module):  # type: ignore[misc]
    """The head."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden, config.hidden, bias=config.bias)
        self.layers = nn.ModuleList([EagleLayer(config), *further_layers(config.hidden, config.shape)])

    def start_near(self) -> None:
        """Begin near the target: fc gives the state, and something of the embedding."""
        with torch.no_grad():
            self.fc.weight[:, self.config.hidden :].zero_().fill_diagonal_(1.0)

    def project(self, states: Tensor) -> Tensor:
        """f (..., H) of states (..., 1, H)."""
        return states[..., 0, :]

    def inputs(self, e: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, and the residual stream, which are one: (..., H)."""
        x = self.fc(torch.cat([e.to(f.dtype), f], -1))
        return x, x

    def run(self, e: Tensor, f: Tensor, turn: Turn, attend: Attend) -> Tensor:
        """f^ (..., T, H) of embeddings and states (..., T, H)."""
        return run_layers(self.layers, *self.inputs(e, f), turn, attend)

    def fed_back(self, f: Tensor) -> Tensor:
        """What is in the place of the next f."""
        return f

    def logits(self, f: Tensor, target: Callable[[Tensor], Tensor]) -> Tensor:
        """(..., V): the target's own of f^."""
        return target(f)
