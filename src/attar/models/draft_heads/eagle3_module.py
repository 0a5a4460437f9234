"""EAGLE-3: Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", arXiv 2503.01840, section 3.1.

    g_i = fc([l_i; m_i; h_i])                       states of a low, a middle and a high layer of the target
    a_i = layer([norm(e(x_(i+1))); norm(g_i)]) + g_i       attention reads 2 H, the residual stream is g
    q(x_(i+2)) = softmax(W norm(a_i))               W of a reduced vocabulary (``vocabulary.py``)

A head may have further layers, which read a alone. Where the target has not run a token yet, the head's own
a_i is in the place of g_(i+1). e is the target's embedding, and is not part of the head.

Switches of published heads: ``norm_before_residual`` the residual stream is norm(g); ``norm_before_fc`` and
``fc_norm`` norms before fc, over all states at once or over those of each layer; ``norm_output`` norm(a) is
fed back in the place of a (EAGLE-3.1).

Differs from the paper: fc starts as the last of its layers, and W as the target's head.

Letters: m layers, H hidden size, V vocabulary of the target, v of the head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from attar.models.draft_heads.config import HeadConfig
from attar.models.draft_heads.decoder_layer import Attend, DraftLayerShape, GatedMLP, HeadAttention, Turn
from attar.models.draft_heads.eagle_module import further_layers, run_layers
from attar.models.draft_heads.vocabulary import register_vocabulary, spread, tokens_of


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(HeadConfig):
    """A head of one layer or more.

    Attributes:
        shape: of the layers.
        branches: likeliest tokens after each node of a tree of drafts; 1: chains.
        norm_before_residual, norm_before_fc, fc_norm, norm_output: see above.
    """

    kind: ClassVar[str] = "eagle3"
    shape: DraftLayerShape
    branches: int = 1
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


class Eagle3Layer(nn.Module):  # type: ignore[misc]
    """The decoder layer."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        hidden, shape = config.hidden, config.shape
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = nn.RMSNorm(hidden, eps=shape.eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps=shape.eps)
        self.self_attn = HeadAttention(hidden, shape, inputs=2 * hidden)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=shape.eps)
        self.mlp = GatedMLP(hidden, shape.intermediate)

    def inputs(self, e: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads (..., 2 H), and the residual stream (..., H)."""
        normed = self.hidden_norm(g)
        residual = normed if self.norm_before_residual else g
        return torch.cat([self.input_layernorm(e).to(normed.dtype), normed], -1), residual

    def output(self, residual: Tensor, y: Tensor) -> Tensor:
        """(..., H) of the residual stream and attended heads (..., N d)."""
        h = residual + self.self_attn.o_proj(y)
        out: Tensor = h + self.mlp(self.post_attention_layernorm(h))
        return out


class Eagle3Head(nn.Module):  # type: ignore[misc]
    """The head. ``d2t`` is there where its vocabulary is reduced."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        hidden, count = config.hidden, len(config.layers)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(count * hidden, eps=config.shape.eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(hidden, eps=config.shape.eps) for _ in range(count))
        self.fc = nn.Linear(count * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config), *further_layers(hidden, config.shape)])
        self.norm = nn.RMSNorm(hidden, eps=config.shape.eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocabulary or config.vocabulary, bias=False)
        register_vocabulary(self, config.draft_vocabulary)

    def start_from(self, weight: Tensor) -> None:
        """Begin near the target: W are rows of its head (V, H), and g is the state of the last layer."""
        tokens = tokens_of(self)
        with torch.no_grad():
            self.lm_head.weight.copy_(weight if tokens is None else weight[tokens])
            self.fc.weight.zero_()[:, -self.config.hidden :].fill_diagonal_(1.0)

    def project(self, states: Tensor) -> Tensor:
        """g (..., H) of states (..., m, H)."""
        if self.config.fc_norm:
            states = torch.stack([norm(states[..., i, :]) for i, norm in enumerate(self.fc_norm)], -2)
        flat = states.flatten(-2)
        out: Tensor = self.fc(self.input_norm(flat) if self.config.norm_before_fc else flat)
        return out

    def inputs(self, e: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """What the first attention reads (..., 2 H), and the residual stream (..., H)."""
        inputs: tuple[Tensor, Tensor] = self.layers[0].inputs(e, g)
        return inputs

    def run(self, e: Tensor, g: Tensor, turn: Turn, attend: Attend) -> Tensor:
        """a (..., T, H) of embeddings and states (..., T, H)."""
        return run_layers(self.layers, *self.inputs(e, g), turn, attend)

    def fed_back(self, a: Tensor) -> Tensor:
        """What is in the place of the next g (..., H)."""
        out: Tensor = self.norm(a) if self.config.norm_output else a
        return out

    def logits(self, a: Tensor, target: Callable[[Tensor], Tensor]) -> Tensor:
        """(..., V) with its own W; -inf of tokens that it cannot propose."""
        draft_logits: Tensor = self.lm_head(self.norm(a))
        tokens = tokens_of(self)
        return draft_logits if tokens is None else spread(draft_logits, tokens, self.config.vocabulary)

    def output_weights(self) -> list[nn.Parameter]:
        """W, which the optimizers treat as a head."""
        return [self.lm_head.weight]
