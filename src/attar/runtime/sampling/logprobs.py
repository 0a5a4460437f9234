"""Log-probabilities of tokens under the model itself: log softmax of the logits as they came.

Letters: V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from attar.runtime.results import TokenLogprob


def token_logprob(logits: Tensor, token: int, count: int) -> TokenLogprob:
    """How likely a token was, and which were likeliest.

    Args:
        logits: (V,), before any penalty; not modified. Computed in float32.
        token: the one that was drawn.
        count: likeliest tokens to name.
    """
    logprobs = logits.float().log_softmax(-1)
    values, tokens = logprobs.topk(min(count, len(logprobs)))
    top = zip(tokens.tolist(), values.tolist(), strict=True)
    return TokenLogprob(token, float(logprobs[token]), tuple(top))
