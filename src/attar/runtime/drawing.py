"""From a step's logits to tokens, for the sequences that are due one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from attar.errors import NumericsError
from attar.runtime.batch import Output
from attar.runtime.job import Job
from attar.runtime.sampling.logprobs import token_logprob
from attar.runtime.sampling.sample import sample
from attar.runtime.text import Text


def wanted(logits: Tensor, outputs: Sequence[Output]) -> Tensor:
    """The last row of each output: (R, V); the logits themselves where that is all of them, in order."""
    rows = [output.rows[-1] for output in outputs]
    return logits if rows == list(range(len(logits))) else logits[rows]


def draw_tokens(logits: Tensor, texts: Sequence[Text]) -> list[int | NumericsError]:
    """A token for each row (R, V), or what is wrong with it: one bad row does not stop the others."""
    try:
        return list(sample(logits, [text.row() for text in texts], [text.key() for text in texts]))
    except NumericsError as error:
        if len(texts) == 1:
            return [error]
        return [draw_tokens(row[None], [text])[0] for row, text in zip(logits, texts, strict=True)]


def score_prompt(job: Job, output: Output, logits: Tensor) -> None:
    """Log-probabilities of the prompt's tokens, where they are asked for; the job keeps them."""
    count = job.params.prompt_logprobs
    if count is None or output.sequence.index:
        return
    for place, row in enumerate(output.rows, output.position + 1):
        if place < len(job.prompt):
            job.scored.append(token_logprob(logits[row], job.prompt[place], count))
