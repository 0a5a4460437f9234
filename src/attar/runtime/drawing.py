"""From a step's logits to tokens, for the sequences that are due some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from attar.runtime.batch import StepOutput
from attar.runtime.completion import Completion
from attar.runtime.job import RequestState
from attar.runtime.results import TokenLogprob
from attar.runtime.sampling.logprobs import token_logprob
from attar.runtime.sampling.sample import sample

if TYPE_CHECKING:
    from attar.runtime.speculate.speculator import Speculator


@dataclass(frozen=True)
class SampledTokens:
    """New tokens of a text, before it has said whether it ends with one of them.

    Args:
        tokens: accepted drafts, and the one behind.
        rows: of the step's logits that each was decided on.
        path: indices of the accepted drafts, from 1.
        drafted: drafts that were run for it.
    """

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    path: tuple[int, ...] = ()
    drafted: int = 0

    def moves(self, places: int) -> tuple[tuple[int, int], ...]:
        """(from, to) places that bring the accepted path behind the last certain token, in order.

        Args:
            places: of the sequence in use behind the pass, those of all drafts among them.
        """
        first = places - self.drafted - 1
        steps = enumerate(self.path, 1)
        return tuple((first + node, first + depth) for depth, node in steps if node != depth)

    def logprobs(self, logits: Tensor, count: int | None) -> tuple[TokenLogprob, ...]:
        """Of each token, from all rows of the step (R, V); none where nobody asks."""
        if count is None:
            return ()
        pairs = zip(self.rows, self.tokens, strict=True)
        return tuple(token_logprob(logits[row], token, count) for row, token in pairs)


def draw_tokens(
    logits: Tensor,
    outputs: Sequence[StepOutput],
    texts: Sequence[Completion],
    speculator: Speculator | None = None,
) -> list[SampledTokens | Exception]:
    """Tokens for each output, from all rows of the step (R, V), or what went wrong with it: an error of one
    does not stop the others."""
    found: dict[int, SampledTokens | Exception] = {}
    plain = []
    for place, (output, text) in enumerate(zip(outputs, texts, strict=True)):
        if speculator is None or not speculator.has(output):
            plain.append(place)
            continue
        try:
            found[place] = speculator.judge(output, logits, text)
        except Exception as error:
            found[place] = error
    rows = [outputs[place].rows[-1] for place in plain]
    drawn = _drawn(logits, rows, [texts[place] for place in plain])
    for place, row, token in zip(plain, rows, drawn, strict=True):
        found[place] = token if isinstance(token, Exception) else SampledTokens((token,), (row,))
    return [found[place] for place in range(len(outputs))]


def _drawn(logits: Tensor, rows: Sequence[int], texts: Sequence[Completion]) -> list[int | Exception]:
    """A token for each of some rows of (R, V); where they cannot be drawn together, each by itself."""
    if not texts:
        return []
    try:
        some = logits if rows == list(range(len(logits))) else logits[rows]
        return list(sample(some, [text.row() for text in texts], [text.key() for text in texts]))
    except Exception as error:
        if len(texts) == 1:
            return [error]
        return [_drawn(logits, [row], [text])[0] for row, text in zip(rows, texts, strict=True)]


def score_prompt(job: RequestState, output: StepOutput, logits: Tensor) -> None:
    """Log-probabilities of the prompt's tokens, where they are asked for; the job keeps them."""
    count = job.params.prompt_logprobs
    if count is None or output.sequence.index:
        return
    for place, row in enumerate(output.rows, output.position + 1):
        if place < len(job.prompt):
            job.scored.append(token_logprob(logits[row], job.prompt[place], count))
