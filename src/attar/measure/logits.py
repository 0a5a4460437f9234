"""Next-token logits of a model over batches of tokens, one sequence at a time, without copying them.

Letters: B sequences, S tokens, n predicted tokens of a sequence (at most S - 1), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from attar.measure.subject import Subject
from attar.runtime.scoring import prompt_logits

LOGIT_BYTES = 256 * 2**20  # of one forward pass; large vocabularies get smaller batches


def split(batches: list[Tensor], vocabulary: int, limit: int = LOGIT_BYTES) -> list[Tensor]:
    """Split batches int64 (B, S) until the float32 logits of each fit ``limit`` bytes, or one row is left."""
    pieces: list[Tensor] = []
    for batch in batches:
        rows = max(1, limit // (batch.shape[1] * vocabulary * 4))
        pieces.extend(batch.split(rows))
    return pieces


def predicted(tokens: Tensor) -> Tensor:
    """Mask of predicted tokens: bool (B, S - 1) for tokens 1 to S - 1 of int64 (B, S).

    A token counts if neither it nor the token before it is padding.
    """
    real = tokens >= 0
    return real[:, 1:] & real[:, :-1]


def next_token_logits(model: Any, tokens: Tensor, width: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Run a batch through transformers; yield the logits of each sequence and the tokens they predict.

    Args:
        model: a causal language model of transformers in evaluation mode.
        tokens: int64 (B, S), padded (on either side) with ``PADDING``; not modified.
        width: columns to keep, without the columns that pad the vocabulary.

    Yields:
        logits (n, width) in the model's dtype (a view unless the sequence is padded), labels int64 (n,).
    """
    counted, device = predicted(tokens), model.device
    inputs = {"input_ids": tokens.clamp(min=0).to(device)}
    if bool((tokens < 0).any()):
        inputs["attention_mask"] = (tokens >= 0).long().to(device)
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.inference_mode():  # not around the yields, where it would apply to the caller
        logits = model(**inputs, use_cache=False).logits
    for row in range(tokens.shape[0]):
        keep, labels = counted[row], tokens[row, 1:]
        if bool(keep.all()):
            yield logits[row, :-1, :width], labels
        else:
            yield logits[row, :-1, :width][keep.to(device)], labels[keep]


def subject_logits(subject: Subject, tokens: Tensor, width: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The same for a subject, in its engine: transformers, or a runner of the runtime."""
    if subject.loaded is None:
        yield from next_token_logits(subject.model, tokens, width)
        return
    rows = [row[row >= 0] for row in tokens]
    runs = prompt_logits(subject.loaded.runner, [row[:-1].tolist() for row in rows if len(row) > 1])
    for row in rows:
        yield (next(runs)[:, :width] if len(row) > 1 else torch.zeros(0, width)), row[1:]
