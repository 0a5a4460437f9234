"""Language-modelling losses that several stages need: next token for decoders, masked token for encoders."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MASKED = 0.15  # fraction of tokens hidden from an encoder (Devlin et al. 2018, arXiv 1810.04805, section 3.1)


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross-entropy of each token given those before it, in nats, mean over the predicted tokens.

    Args:
        logits: (B, S, V).
        tokens: int64 (B, S); -100 where there is no token, which is left out.
    """
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def masked_token_loss(model: nn.Module, tokens: Tensor, mask_token: int, seed: int = 0) -> Tensor:
    """Cross-entropy at 15 % of the places, hidden behind the mask token, in nats, mean over those places.

    Args:
        model: gives ``.logits`` (B, S, V).
        tokens: int64 (B, S).
        mask_token: its number.
        seed: of the choice of places.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.rand(tokens.shape, generator=generator) < MASKED
    hidden[:, 0] = True  # never an empty choice
    hidden = hidden.to(tokens.device)
    logits = model(input_ids=tokens.masked_fill(hidden, mask_token)).logits
    return F.cross_entropy(logits[hidden].float(), tokens[hidden])
