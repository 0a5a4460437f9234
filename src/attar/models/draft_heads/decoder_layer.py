"""The transformer layer of draft heads, in the shape of Qwen3 or Llama: RMSNorm, attention with grouped
queries, norms of each query and key (Qwen3), rotary positions, SwiGLU.

What a layer attends to is the caller's: its own tokens, and keys and values that were made before.

Letters: T tokens, S positions attended to, H hidden size, I inputs of attention, h heads, K kv heads, d head
    dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, q, k, v)`` of queries (..., T, h, d), keys and values (..., T, K, d) of the same tokens to
(..., T, h d)."""

Turn = tuple[Tensor, Tensor]
"""Cosines and sines of positions, (..., T, 1, d)."""


@dataclass(frozen=True, kw_only=True)
class DraftLayerShape:
    """Sizes of the layers of a head.

    Attributes:
        depth: layers.
        heads: h.
        kv_heads: K, which divides h.
        head_dim: d, even.
        intermediate: of the MLP.
        eps: of the norms.
        rope_theta: base of the rotary frequencies.
        bias: of the projections to queries, keys and values.
        head_norms: of each query and key.
        rope_scaling: of the frequencies (``rope.py``); empty: plain ones.
    """

    depth: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float = 1e-6
    rope_theta: float = 10000.0
    bias: bool = False
    head_norms: bool = True
    rope_scaling: dict[str, Any] = field(default_factory=dict)


def rotary(positions: Tensor, shape: DraftLayerShape) -> Turn:
    """Cosines and sines of positions int64 (..., T), float32."""
    half, factor = frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling)
    angles = positions[..., None, None].float() * torch.cat([half, half]).to(positions.device)
    return angles.cos() * factor, angles.sin() * factor


def turned(x: Tensor, turn: Turn) -> Tensor:
    """Queries or keys (..., T, h, d) at their positions: channel i with channel i + d / 2, as in Llama."""
    low, high = x.chunk(2, -1)
    return x * turn[0] + torch.cat([-high, low], -1) * turn[1]


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax attention (..., T, h d).

    The heads that share keys and values are put one behind the other as further queries, so that nothing is
    repeated.

    Args:
        q: (..., T, h, d).
        k, v: (..., S, K, d).
        mask: bool (..., T, S), whether a token sees a position; None: it sees all.
    """
    *batch, T, h, d = q.shape
    K = k.shape[-2]
    q = q.unflatten(-2, (K, h // K)).movedim(-4, -2).flatten(-3, -2)  # (..., K, h / K T, d)
    k, v = k.transpose(-3, -2), v.transpose(-3, -2)
    if mask is not None:
        mask = mask[..., None, :, :].repeat_interleave(h // K, -3).flatten(-3, -2)[..., None, :, :]
    out = F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), attn_mask=mask)
    return out.unflatten(-2, (h // K, T)).movedim(-2, -4).reshape(*batch, T, h * d)


def normed(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """A norm of x in the type of its weight: products may be narrower."""
    out: Tensor = norm(x.to(norm.weight.dtype))
    return out


class HeadAttention(nn.Module):  # type: ignore[misc]
    """Projections of an attention.

    Args:
        inputs: columns that queries, keys and values read, I; None: H.
    """

    def __init__(self, hidden: int, shape: DraftLayerShape, inputs: int | None = None) -> None:
        super().__init__()
        self.shape = shape
        inputs = hidden if inputs is None else inputs
        self.q_proj = nn.Linear(inputs, shape.heads * shape.head_dim, bias=shape.bias)
        self.k_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=shape.bias)
        self.v_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=shape.bias)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, hidden, bias=False)
        if shape.head_norms:
            self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.eps)
            self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.eps)

    def queries(self, x: Tensor, turn: Turn) -> Tensor:
        """(..., T, h, d) of (..., T, I)."""
        queries = self.q_proj(x).unflatten(-1, (-1, self.shape.head_dim))
        return turned(normed(self.q_norm, queries) if self.shape.head_norms else queries, turn)

    def keys_values(self, x: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        """Two of (..., T, K, d) of (..., T, I)."""
        keys = self.k_proj(x).unflatten(-1, (-1, self.shape.head_dim))
        keys = normed(self.k_norm, keys) if self.shape.head_norms else keys
        return turned(keys, turn), self.v_proj(x).unflatten(-1, (-1, self.shape.head_dim))


class GatedMLP(nn.Module):  # type: ignore[misc]
    """SwiGLU: W_down (SiLU(W_gate x) * W_up x)."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., H) to (..., H)."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class HeadLayer(nn.Module):  # type: ignore[misc]
    """A layer: x + attention(norm x), then x + MLP(norm x).

    Args:
        index: of the layer, for ``attend``.
    """

    def __init__(self, hidden: int, shape: DraftLayerShape, index: int) -> None:
        super().__init__()
        self.index = index
        self.input_layernorm = nn.RMSNorm(hidden, eps=shape.eps)
        self.self_attn = HeadAttention(hidden, shape)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=shape.eps)
        self.mlp = GatedMLP(hidden, shape.intermediate)

    def forward(self, x: Tensor, turn: Turn, attend: Attend) -> Tensor:
        """(..., T, H) to (..., T, H)."""
        y = self.input_layernorm(x)
        queries, (keys, values) = self.self_attn.queries(y, turn), self.self_attn.keys_values(y, turn)
        x = x + self.self_attn.o_proj(attend(self.index, queries, keys, values))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def frequencies(head_dim: int, theta: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Rotary frequencies of a head's layers, float32 (head_dim / 2,), and the factor of cosines and sines.

    They are those of the target, scaled as transformers scales them (formats/draft_heads/rope_scaling.py).
    A head keeps the keys of decided tokens, so its frequencies stay as they are: those of a target whose own
    change with the length of a sequence are plain, which the target's are in short sequences.
    """
    if not scaling:
        half = torch.arange(0, head_dim, 2, dtype=torch.float32)
        return theta ** (-half / head_dim), 1.0
    return _scaled(head_dim, theta, tuple(sorted(scaling.items())))


@cache
def _scaled(head_dim: int, theta: float, items: tuple[tuple[str, Any], ...]) -> tuple[Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {**dict(items), "rope_theta": theta}
    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, rope_parameters=parameters
    )
    inverse, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    return inverse.float(), float(factor)
