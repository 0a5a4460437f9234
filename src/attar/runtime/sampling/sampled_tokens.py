"""What one step decided for one completion: its new tokens, and their log-probabilities.

Letters: R rows of logits in the step, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attar.runtime.results import TARGET, TokenLogprob


@dataclass(frozen=True)
class SampledTokens:
    """New tokens of a completion, before it is checked whether one of them ends it.

    Args:
        tokens: the accepted draft tokens and the one after them.
        rows: rows of the step's logits that decided each token.
        path: indices of the accepted draft tokens, from 1.
        drafted: draft tokens that were run for the completion.
        lossy: some of them may be tokens that plain decoding would not give (typical acceptance).
        proposers: who proposed each accepted draft token, where the request asks for it.
    """

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    path: tuple[int, ...] = ()
    drafted: int = 0
    lossy: bool = False
    proposers: tuple[str, ...] = ()

    def moves(self, length: int) -> tuple[tuple[int, int], ...]:
        """(from, to) cache entries that put the accepted path right after the last certain token, in order.

        Args:
            length: cache entries of the sequence after the step, those of all draft tokens included.
        """
        first = length - self.drafted - 1
        steps = enumerate(self.path, 1)
        return tuple((first + node, first + depth) for depth, node in steps if node != depth)

    def sources(self, wanted: bool) -> tuple[str, ...]:
        """Who proposed each token: a proposer, or the target for a token that was not drafted; none where not
        ``wanted``."""
        return (*self.proposers, *[TARGET] * (len(self.tokens) - len(self.proposers))) if wanted else ()

    def logprobs(self, logits: Tensor, count: int | None) -> tuple[TokenLogprob, ...]:
        """Of each token, from all rows of the step (R, V); none where ``count`` is None."""
        if count is None:
            return ()
        pairs = zip(self.rows, self.tokens, strict=True)
        return tuple(token_logprob(logits[row], token, count) for row, token in pairs)


def token_logprob(logits: Tensor, token: int, count: int) -> TokenLogprob:
    """Log softmax of the model's own logits at a token, and the most likely tokens.

    Args:
        logits: (V,), before any penalty; not modified. Computed in float32.
        count: most likely tokens to report.
    """
    logprobs = logits.float().log_softmax(-1)
    values, tokens = logprobs.topk(min(count, len(logprobs)))
    top = zip(tokens.tolist(), values.tolist(), strict=True)
    return TokenLogprob(token, float(logprobs[token]), tuple(top))
