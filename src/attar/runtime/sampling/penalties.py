"""Logits adjusted by the tokens so far: penalties, biases and bans, before any temperature.

    repetition r    l / r where l > 0, l r where l < 0, for tokens so far (CTRL, arXiv 1909.05858)
    frequency f     l - f c        c how often the token is in the completion so far
    presence  s     l - s [c > 0]
    bias      b     l + b
    ban             l = -infinity: end tokens before min_tokens, tokens that a grammar forbids

in this order. Repetition counts the prompt, frequency and presence do not (as in vLLM and OpenAI's API).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from attar.runtime.sampling.params import SamplingParams


class TokenHistory:
    """The tokens of a sequence as the penalties see them.

    Args:
        prompt: its tokens; they count for repetition alone.
        generated: the tokens of the completion so far.
    """

    def __init__(self, prompt: Iterable[int], generated: Iterable[int] = ()) -> None:
        self.prompt = torch.tensor(list(dict.fromkeys(prompt)), dtype=torch.long)
        self.counts = Counter(generated)

    def add(self, token: int) -> None:
        """One more token was generated."""
        self.counts[token] += 1

    def after(self, tokens: Iterable[int]) -> TokenHistory:
        """A new history with further tokens, for the positions of a draft."""
        extended = TokenHistory(())
        extended.prompt, extended.counts = self.prompt, self.counts.copy()
        extended.counts.update(tokens)
        return extended


def penalise_(logits: Tensor, params: SamplingParams, history: TokenHistory) -> None:
    """Apply the three penalties to one row.

    Args:
        logits: (V,) float32; changed.
    """
    if params.repetition_penalty != 1.0:
        seen = torch.cat([history.prompt.to(logits.device), _index(history.counts, logits)])
        values = logits[seen]  # a token that is in both is written twice, with the same value
        r = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / r, values * r)
    if history.counts and (params.frequency_penalty or params.presence_penalty):
        generated = _index(history.counts, logits)
        c = torch.tensor(list(history.counts.values()), dtype=logits.dtype, device=logits.device)
        logits[generated] -= params.frequency_penalty * c + params.presence_penalty


def bias_(logits: Tensor, params: SamplingParams) -> None:
    """Add the biases to one row (V,), which is changed."""
    if params.biases:
        tokens, values = zip(*params.biases, strict=True)
        logits[_index(tokens, logits)] += torch.tensor(values, dtype=logits.dtype, device=logits.device)


def ban_(logits: Tensor, tokens: Sequence[int], allowed: Tensor | None = None) -> None:
    """Set tokens of one row (V,), which is changed, to -infinity.

    Args:
        tokens: ids that may not be sampled.
        allowed: bool (V,), False where a token may not be sampled; None allows all.
    """
    if tokens:
        logits[_index(tokens, logits)] = -torch.inf
    if allowed is not None:
        logits.masked_fill_(~allowed.to(logits.device), -torch.inf)


def _index(tokens: Iterable[int], logits: Tensor) -> Tensor:
    return torch.tensor(list(tokens), dtype=torch.long, device=logits.device)
