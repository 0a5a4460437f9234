"""Block drafters: one pass of a small transformer gives the states of all slots of a block.

    DFlash   Chen et al. 2026, "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv 2602.06036
    DSpark   Cheng et al. 2026, arXiv 2607.05147: adds a Markov head and a confidence head

    c_j = norm(fc [s_j of m layers of the target])             the context, of decided positions j
    x   = [embedding of the anchor; mask; ...; mask]           the anchor is the last decided token, at n
    each layer:   queries of the block;  keys and values = [W c_j, j < n;  W x],  all positions seen
    logits of slot k = target's head(norm x_k) + W2 e_k        the bias: ``markov_head.py``
    confidence_k = sigmoid(w [x_k; W1[token before]] + b)      that slot k's token is accepted, if those
    before

W c_j is the projection of the block's own keys and values, without the layer's input norm; it depends on
decided tokens alone and is kept. Slot k of DSpark predicts token n + 1 + k; of DFlash token n + k, so its
slot 0, the anchor's, predicts nothing. Embedding and head are the target's, frozen; with a reduced vocabulary
``lm_head`` has the rows of its tokens.

Differs from the papers: the mask is a learned embedding, not an unused token of the vocabulary.

Letters: B slots of a block, T slots of all blocks, m layers read, l layers of the head, S positions, H hidden
size, h heads, K kv heads, d head dimension, r Markov rank, V vocabulary of the target, v of the head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from attar.models.draft_heads.config import HeadConfig
from attar.models.draft_heads.decoder_layer import Attend, DraftLayerShape, HeadLayer, normed, rotary
from attar.models.draft_heads.markov_head import MarkovHead
from attar.models.draft_heads.vocabulary import register_vocabulary, tokens_of

SPREAD = 0.02  # standard deviation of new weights


@dataclass(frozen=True, kw_only=True)
class BlockDrafterConfig(HeadConfig):
    """A block drafter.

    Attributes:
        shape: of its layers.
        markov_rank: r; 0: no Markov head.
        markov: its kind.
        confidence: whether there is a confidence head.
        temperatures: that the confidences of the slots are calibrated with; empty: 1.
    """

    skipped: ClassVar[int] = 0  # slots in front that predict nothing
    shape: DraftLayerShape
    markov_rank: int = 0
    markov: str = "plain"
    confidence: bool = False
    temperatures: tuple[float, ...] = ()

    @property
    def block(self) -> int:
        """B."""
        return self.drafts + self.skipped

    @classmethod
    def from_dict(cls, values: dict[str, Any], file: str) -> Self:
        """From JSON content.

        Raises:
            CheckpointError: a field is missing or unknown; names the file.
        """
        temperatures = tuple(values.get("temperatures", ()))
        return super().from_dict({**values, "temperatures": temperatures}, file)


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(BlockDrafterConfig):
    """Slots 1 to ``drafts`` predict."""

    kind: ClassVar[str] = "dflash"
    skipped: ClassVar[int] = 1


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(BlockDrafterConfig):
    """Slots 0 to ``drafts - 1`` predict."""

    kind: ClassVar[str] = "dspark"


class ConfidenceHead(nn.Module):  # type: ignore[misc]
    """w x + b."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(...) of (..., inputs)."""
        out: Tensor = self.proj(x)[..., 0]
        return out


class BlockDrafter(nn.Module):  # type: ignore[misc]
    """DFlash or DSpark, as the config says."""

    def __init__(self, config: BlockDrafterConfig) -> None:
        super().__init__()
        self.config = config
        H, shape, size = config.hidden, config.shape, config.draft_vocabulary or config.vocabulary
        self.fc = nn.Linear(len(config.layers) * H, H, bias=False)
        self.hidden_norm = nn.RMSNorm(H, eps=shape.eps)
        self.layers = nn.ModuleList(HeadLayer(H, shape, index) for index in range(shape.depth))
        self.norm = nn.RMSNorm(H, eps=shape.eps)
        self.mask_embedding = nn.Parameter(torch.zeros(H))
        self.markov_head = self.confidence_head = None
        if config.markov_rank:
            self.markov_head = MarkovHead(config.vocabulary, size, config.markov_rank, config.markov, H)
        if config.confidence:
            self.confidence_head = ConfidenceHead(H + config.markov_rank)
        if config.draft_vocabulary:
            self.lm_head = nn.Linear(H, size, bias=False).requires_grad_(False)
        register_vocabulary(self, config.draft_vocabulary)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=SPREAD)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)

    @property
    def chosen(self) -> Tensor | None:
        """The tokens int64 (v,) that can be drafted; None: all."""
        return tokens_of(self)

    def output_weights(self) -> list[nn.Parameter]:
        """Trained matrices that make logits."""
        return [] if self.markov_head is None else [self.markov_head.markov_w2.weight]

    def context(self, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the context, (l, ..., S, K, d).

        Args:
            states: of the target (..., S, m, H).
            positions: int64 (..., S).
        """
        c = normed(self.hidden_norm, self.fc(states.flatten(-2)))
        turn = rotary(positions, self.config.shape)
        pairs = [layer.self_attn.keys_values(c, turn) for layer in self.layers]
        keys, values = zip(*pairs, strict=True)
        return torch.stack(keys), torch.stack(values)

    def slots(self, anchors: Tensor) -> Tensor:
        """Inputs (..., B, H) of blocks: embeddings (..., H) of their anchors, then masks."""
        masks = self.mask_embedding.expand(*anchors.shape[:-1], self.config.block - 1, -1)
        return torch.cat([anchors[..., None, :], masks.to(anchors.dtype)], -2)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """States (..., T, H), normed, of slots (..., T, H) at positions int64 (..., T).

        Args:
            attend: of a layer's slots to the context and to their own block.
        """
        turn = rotary(positions, self.config.shape)
        for layer in self.layers:
            x = layer(x, turn, attend)
        out: Tensor = self.norm(x)
        return out

    def confidence_logits(self, h: Tensor, tokens: Tensor) -> Tensor:
        """float32 (...) of slots h (..., H) whose token before is int64 (...), not calibrated."""
        assert self.confidence_head is not None, "a drafter without confidence"
        if self.markov_head is not None:
            h = torch.cat([h, self.markov_head.markov_w1(tokens).to(h.dtype)], -1)
        out: Tensor = self.confidence_head(h)
        return out.float() if out.dtype != torch.float64 else out

    def confidence(self, h: Tensor, tokens: Tensor, k: int) -> Tensor:
        """Calibrated probabilities (...) that what slot ``skipped + k`` drafts is accepted."""
        temperatures = self.config.temperatures
        z = self.confidence_logits(h, tokens)
        return torch.sigmoid(z / temperatures[k] if temperatures else z)
