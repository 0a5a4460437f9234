"""Documents to rows of tokens.

Two ways of packing into rows of S tokens:

- ``stream``: documents joined by the end-of-text token and cut every S tokens. Nothing is padded, nothing
  dropped but the tail; a row may hold the end of one document and the start of the next, as in pre-training.
- ``separate``: no row holds two documents; each is cut into rows of its own, and what is shorter than S is
  filled up with :data:`PADDING`. Nothing leaks across documents, at the price of the padding.

Padding stands at the end of a row, so a causal model never attends to it; losses leave it out, and models are
shown token 0 in its place.

Letters: N rows, S tokens a row, B rows a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from attar.checkpoint.geometry import geometry
from attar.data.chat import render
from attar.data.sources import Document, documents
from attar.errors import DataError

PADDING = -100  # stands where there is no token
CHUNK = 256  # documents tokenized in one call: enough to keep every core busy


def tokenize(texts: Iterable[Document], tokenizer: Any) -> Iterator[list[int]]:
    """The token ids of each document, without special tokens; empty documents are left out."""
    chunk: list[str] = []
    for text in texts:
        chunk.append(render(text, tokenizer))
        if len(chunk) == CHUNK:
            yield from _encode(chunk, tokenizer)
            chunk = []
    if chunk:
        yield from _encode(chunk, tokenizer)


def _encode(chunk: list[str], tokenizer: Any) -> Iterator[list[int]]:
    for ids in tokenizer(chunk, add_special_tokens=False, verbose=False)["input_ids"]:
        if ids:
            yield ids


def end_token(tokenizer: Any) -> list[int]:
    """The token put between documents: end-of-text, else the separator, else none."""
    for token in (tokenizer.eos_token_id, tokenizer.sep_token_id):
        if token is not None:
            return [int(token)]
    return []


def pack_stream(ids: Iterable[list[int]], length: int, end: list[int], rows: int | None = None) -> Tensor:
    """Join documents and cut: int64 (N, S), N at most ``rows``. Stops reading as soon as it has enough."""
    flat: list[int] = []
    for document in ids:
        flat.extend(document)
        flat.extend(end)
        if rows is not None and len(flat) >= rows * length:
            break
    count = len(flat) // length if rows is None else min(rows, len(flat) // length)
    return torch.tensor(flat[: count * length], dtype=torch.int64).reshape(count, length)


def pack_separate(ids: Iterable[list[int]], length: int, end: list[int], rows: int | None = None) -> Tensor:
    """Cut each document into rows of its own: int64 (N, S), filled up with :data:`PADDING` on the right."""
    cut: list[list[int]] = []
    for document in ids:
        whole = document + end
        pieces = [whole[start : start + length] for start in range(0, len(whole), length)]
        cut.extend(piece for piece in pieces if len(piece) > 1)  # a single token predicts nothing
        if rows is not None and len(cut) >= rows:
            break
    cut = cut[:rows]
    tokens = torch.full((len(cut), length), PADDING, dtype=torch.int64)
    for row, piece in enumerate(cut):
        tokens[row, : len(piece)] = torch.tensor(piece)
    return tokens


def pack(
    tokenizer: Any,
    data: str,
    split: str,
    *,
    length: int,
    rows: int | None,
    seed: int,
    packing: str = "stream",
) -> Tensor:
    """Rows of a source's split: int64 (N, S).

    Args:
        length: S, tokens a row.
        rows: how many at most; None: all there is.
        packing: ``stream`` or ``separate``.

    Raises:
        DataError: the split holds less than one row.
    """
    ids = tokenize(documents(data, split, seed), tokenizer)
    packed = (pack_separate if packing == "separate" else pack_stream)(
        ids, length, end_token(tokenizer), rows
    )
    if not len(packed):
        raise DataError(
            f"{data}: the {split} split holds less than one row of {length} tokens",
            hint="give more text, or a smaller --sequence-length",
        )
    return packed


def row_length(wanted: int, config: dict[str, Any]) -> int:
    """S for a model: what the settings ask for, at most the model's context.

    Args:
        wanted: ``sequence_length`` of the settings.
        config: content of config.json. RoBERTa counts its positions from the one after the padding token.
    """
    context = geometry(config, "bfloat16").context
    if context is None:
        return wanted
    offset = int(config.get("pad_token_id") or 0) + 1 if "roberta" in config["model_type"] else 0
    return min(wanted, context - offset)


def evaluation_batches(
    tokenizer: Any, data: str, *, tokens: int, sequence_length: int, batch_size: int, seed: int
) -> list[Tensor]:
    """Held-out rows as a list of int64 (B, S) batches, about ``tokens`` tokens in all."""
    rows = pack(
        tokenizer,
        data,
        "evaluation",
        length=sequence_length,
        rows=max(tokens // sequence_length, 1),
        seed=seed,
    )
    return list(rows.split(batch_size))
