"""The Markov head of DSpark: what a block's own last token says of its next, as a low-rank bias of logits.

    b_k = W2 e_k                                                  added to the logits of slot k
    plain   e_k = w_k,   w_k = W1[x_(k-1)]
    gated   e_k = sigmoid(G [h_k; w_k]) * w_k
    rnn     [g; c; o] = J [s_(k-1); w_k; h_k],   s_k = sigmoid(g) s_(k-1) + (1 - sigmoid(g)) tanh(c),
            e_k = tanh(o),   s_0 = 0

Cheng et al. 2026, "DSpark", arXiv 2607.05147; the names of the tensors are those of its published drafters.

Letters: x_k token drafted in slot k (x_0: the anchor), h_k state of slot k, r rank, H hidden size, V
vocabulary of the target, v of the head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MARKOV_KINDS = ("plain", "gated", "rnn")


class MarkovHead(nn.Module):  # type: ignore[misc]
    """The bias.

    Args:
        vocabulary: V.
        size: v.
        rank: r.
        kind: one of MARKOV_KINDS.
        hidden: H.
    """

    def __init__(self, vocabulary: int, size: int, rank: int, kind: str, hidden: int) -> None:
        super().__init__()
        assert kind in MARKOV_KINDS, kind
        self.kind = kind
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, size, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        if kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def start(self, h: Tensor) -> Tensor:
        """s_0 (..., r) of blocks with states (..., H)."""
        return h.new_zeros(*h.shape[:-1], self.markov_w1.embedding_dim)

    def step(self, s: Tensor, tokens: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """s_k and e_k (..., r) of s_(k-1), x_(k-1) int64 (...) and h_k (..., H)."""
        w = self.markov_w1(tokens)
        if self.kind == "gated":
            return s, torch.sigmoid(self.gate_proj(torch.cat([h, w], -1))) * w
        if self.kind == "rnn":
            g, c, o = self.joint_proj(torch.cat([s, w, h], -1)).chunk(3, -1)
            keep = torch.sigmoid(g)
            return keep * s + (1.0 - keep) * torch.tanh(c), torch.tanh(o)
        return s, w

    def latents(self, tokens: Tensor, h: Tensor) -> Tensor:
        """e_1..e_n (..., n, r) of x_0..x_(n-1) int64 (..., n) and h (..., n, H)."""
        s, out = self.start(h[..., 0, :]), []
        for k in range(tokens.shape[-1]):
            s, e = self.step(s, tokens[..., k], h[..., k, :])
            out.append(e)
        return torch.stack(out, -2)
