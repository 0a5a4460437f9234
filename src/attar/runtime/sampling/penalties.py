"""Logits adjusted by what has been said: penalties, biases and bans, before any temperature.

    repetition r    l / r where l > 0, l r where l < 0, for tokens in prompt or text (CTRL, arXiv 1909.05858)
    frequency f     l - f c        c how often the token is in the text so far
    presence  s     l - s [c > 0]
    bias      b     l + b
    ban             l = -infinity: end tokens before min_tokens, tokens a grammar does not allow

in this order. Repetition counts the prompt, frequency and presence do not (as vLLM and OpenAI have it).
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
        text: the tokens generated so far.
    """

    def __init__(self, prompt: Iterable[int], text: Iterable[int] = ()) -> None:
        self.prompt = torch.tensor(list(dict.fromkeys(prompt)), dtype=torch.long)
        self.counts = Counter(text)

    def add(self, token: int) -> None:
        """One more token was generated."""
        self.counts[token] += 1

    def after(self, tokens: Iterable[int]) -> TokenHistory:
        """The history with further tokens, as a verifier sees a draft. This one is not changed."""
        later = TokenHistory(())
        later.prompt, later.counts = self.prompt, self.counts.copy()
        later.counts.update(tokens)
        return later


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
        said = _index(history.counts, logits)
        c = torch.tensor(list(history.counts.values()), dtype=logits.dtype, device=logits.device)
        logits[said] -= params.frequency_penalty * c + params.presence_penalty


def bias_(logits: Tensor, params: SamplingParams) -> None:
    """Add the biases to one row (V,), which is changed."""
    if params.biases:
        tokens, values = zip(*params.biases, strict=True)
        logits[_index(tokens, logits)] += torch.tensor(values, dtype=logits.dtype, device=logits.device)


def ban_(logits: Tensor, tokens: Sequence[int], allowed: Tensor | None = None) -> None:
    """Make tokens impossible in one row (V,), which is changed.

    Args:
        tokens: ids that may not be drawn.
        allowed: bool (V,), False where a token may not be drawn; None allows all.
    """
    if tokens:
        logits[_index(tokens, logits)] = -torch.inf
    if allowed is not None:
        logits.masked_fill_(~allowed.to(logits.device), -torch.inf)


def _index(tokens: Iterable[int], logits: Tensor) -> Tensor:
    return torch.tensor(list(tokens), dtype=torch.long, device=logits.device)
