"""Documents to rows of tokens.

Two ways of packing into rows of S tokens:

- ``stream``: documents joined by the end-of-text token and cut every S tokens. Nothing is padded, nothing
  dropped but the tail; a row may hold the end of one document and the start of the next, as in pre-training.
- ``separate``: no row holds two documents; each is cut into rows of its own, and what is shorter than S is
  filled up with :data:`PADDING`. Nothing leaks across documents, at the price of the padding.

Every row begins as the model's texts do: where the tokenizer puts BOS in front of a text, it stands in front
of each row, and the token after it is the first that is predicted. A model trained with BOS has learned to
lean on it; without, its figures can be wrong by orders of magnitude.

Padding stands at the end of a row, so a causal model never attends to it; losses leave it out, and models are
shown token 0 in its place.

Letters: N rows, S tokens a row, B rows a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attar.checkpoint.geometry import geometry
from attar.data.sources import read_split
from attar.data.splits import Document
from attar.errors import DataError

PADDING = -100  # stands where there is no token
CHUNK = 256  # documents tokenized in one call, at most: enough to keep every core busy


@dataclass(frozen=True)
class PackedRows:
    """Rows of a split.

    Attributes:
        rows: int64 (N, S).
        shared: why other splits hold the same text; empty where they do not.
    """

    rows: Tensor
    shared: str = ""


def tokenize(texts: Iterable[Document], tokenizer: Any) -> Iterator[list[int]]:
    """The token ids of each document, without special tokens; empty documents are left out."""
    chunk: list[str] = []
    enough = 4  # few at first, for a few rows are often all that is asked for
    for text in texts:
        chunk.append(render(text, tokenizer))
        if len(chunk) == enough:
            yield from _encode(chunk, tokenizer)
            chunk, enough = [], min(2 * enough, CHUNK)
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


def front_tokens(tokenizer: Any, bos: str = "auto") -> list[int]:
    """What stands in front of every row: the tokens that the tokenizer puts in front of a text, mostly BOS.

    The tokenizer is asked with a text: ``add_bos_token`` and its like are not what every tokenizer obeys. An
    encoder's [CLS] is no BOS: its rows are cut from the middle of texts and masked.

    Args:
        bos: ``auto``, ``always`` or ``never``.

    Raises:
        DataError: ``always``, and the tokenizer has no BOS token.
    """
    if bos == "never":
        return []
    text = tokenizer("x", add_special_tokens=False)["input_ids"]
    whole = tokenizer("x")["input_ids"]
    starts = [n for n in range(len(whole) - len(text) + 1) if whole[n : n + len(text)] == text]
    front = [int(token) for token in whole[: starts[0]]] if starts else []
    if front and tokenizer.cls_token_id in front:
        front = []
    if bos == "always" and not front:
        if tokenizer.bos_token_id is None:
            raise DataError("the tokenizer has no BOS token", hint="--bos auto")
        return [int(tokenizer.bos_token_id)]
    return front


def pack_stream(
    ids: Iterable[list[int]], length: int, end: list[int], rows: int | None = None, front: Sequence[int] = ()
) -> Tensor:
    """Join documents and cut: int64 (N, S), N at most ``rows``, ``front`` before each row's S - len(front)
    tokens of text. Stops reading as soon as it has enough."""
    flat: list[int] = []
    body = length - len(front)
    for document in ids:
        flat.extend(_without(front, document))
        flat.extend(end)
        if rows is not None and len(flat) >= rows * body:
            break
    count = len(flat) // body if rows is None else min(rows, len(flat) // body)
    text = torch.tensor(flat[: count * body], dtype=torch.int64).reshape(count, body)
    return torch.cat([torch.tensor(front, dtype=torch.int64).expand(count, -1), text], 1)


def pack_separate(
    ids: Iterable[list[int]], length: int, end: list[int], rows: int | None = None, front: Sequence[int] = ()
) -> Tensor:
    """Cut each document into rows of its own, ``front`` before each: int64 (N, S), filled up with
    :data:`PADDING` on the right."""
    cut: list[list[int]] = []
    body = length - len(front)
    for document in ids:
        whole = _without(front, document) + end
        pieces = [[*front, *whole[start : start + body]] for start in range(0, len(whole), body)]
        cut.extend(piece for piece in pieces if len(piece) > 1)  # a single token predicts nothing
        if rows is not None and len(cut) >= rows:
            break
    cut = cut[:rows]
    tokens = torch.full((len(cut), length), PADDING, dtype=torch.int64)
    for row, piece in enumerate(cut):
        tokens[row, : len(piece)] = torch.tensor(piece)
    return tokens


def _without(front: Sequence[int], document: list[int]) -> list[int]:
    """A document without the front tokens that a chat template has put there: no row begins with two."""
    return document[len(front) :] if front and document[: len(front)] == list(front) else document


def pack(
    tokenizer: Any,
    data: str,
    split: str,
    *,
    length: int,
    rows: int | None,
    seed: int,
    packing: str = "stream",
    bos: str = "auto",
) -> Tensor:
    """Rows of a source's split: int64 (N, S).

    Args:
        length: S, tokens a row.
        rows: how many at most; None: all there is.
        packing: ``stream`` or ``separate``.
        bos: what stands in front of each row, see :func:`front_tokens`.

    Raises:
        DataError: the source holds less than one row.
    """
    return pack_split(
        tokenizer, data, split, length=length, rows=rows, seed=seed, packing=packing, bos=bos
    ).rows


def pack_split(
    tokenizer: Any,
    data: str,
    split: str,
    *,
    length: int,
    rows: int | None,
    seed: int,
    packing: str = "stream",
    bos: str = "auto",
) -> PackedRows:
    """:func:`pack`, and whether the rows are the split's own.

    A source of few documents whose split holds less than one row gives rows of its whole text, and says so.
    """
    front, end = front_tokens(tokenizer, bos), end_token(tokenizer)
    if len(front) >= length:
        raise DataError(f"rows of {length} tokens hold only {len(front)} of the tokenizer's own in front")
    cut = pack_separate if packing == "separate" else pack_stream
    for whole in (False, True):
        text = read_split(data, split, seed, whole=whole)
        packed = cut(tokenize(text.documents, tokenizer), length, end, rows, front)
        if len(packed):
            return PackedRows(packed, text.shared)
    raise DataError(
        f"{data}: the {split} split holds less than one row of {length} tokens",
        hint="give more text, or a smaller --sequence-length",
    )


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
    tokenizer: Any,
    data: str,
    *,
    tokens: int,
    sequence_length: int,
    batch_size: int,
    seed: int,
    bos: str = "auto",
) -> list[Tensor]:
    """Held-out rows as a list of int64 (B, S) batches, about ``tokens`` tokens in all."""
    packed = evaluation_rows(
        tokenizer, data, tokens=tokens, sequence_length=sequence_length, seed=seed, bos=bos
    )
    return list(packed.rows.split(batch_size))


def evaluation_rows(
    tokenizer: Any, data: str, *, tokens: int, sequence_length: int, seed: int, bos: str = "auto"
) -> PackedRows:
    """Rows of the evaluation split, about ``tokens`` tokens in all, and whether they are held out."""
    count = max(tokens // sequence_length, 1)
    return pack_split(tokenizer, data, "evaluation", length=sequence_length, rows=count, seed=seed, bos=bos)


def calibration_batches(
    tokenizer: Any,
    data: str,
    *,
    samples: int,
    sequence_length: int,
    batch_size: int,
    seed: int,
    bos: str = "auto",
) -> list[Tensor]:
    """The first ``samples`` rows of the calibration split in the seed's order, as int64 (B, S) batches.

    Raises:
        DataError: the source holds less than one row.
    """
    rows = pack(tokenizer, data, "calibration", length=sequence_length, rows=samples, seed=seed, bos=bos)
    return list(rows.split(batch_size))


@dataclass(frozen=True)
class Batches:
    """Shuffled batches over rows of tokens; each epoch has its own permutation.

    Attributes:
        rows: int64 (N, S).
        size: B, rows a batch.
        seed: of the permutations.
    """

    rows: Tensor
    size: int
    seed: int

    def __getitem__(self, index: int) -> Tensor:
        """Batch number ``index``, int64 (B, S); runs on through epochs without end."""
        total = self.rows.shape[0]
        places = torch.arange(index * self.size, (index + 1) * self.size)
        orders = {int(epoch): self._order(int(epoch)) for epoch in (places // total).unique()}
        return self.rows[torch.stack([orders[int(place) // total][int(place) % total] for place in places])]

    def _order(self, epoch: int) -> Tensor:
        return torch.randperm(self.rows.shape[0], generator=numbered_generator(self.seed, epoch))


def numbered_generator(seed: int, number: int) -> torch.Generator:
    """A generator for one of many draws of a seed; any whole numbers will do."""
    return torch.Generator().manual_seed((seed * 1_000_003 + number) % 2**64)


def render(document: Document, tokenizer: Any) -> str:
    """The text a model would see: plain text as it is, messages through the tokenizer's chat template.

    Raises:
        DataError: the document is a conversation and the tokenizer has no template, or the template refuses
            it.
    """
    if isinstance(document, str):
        return document
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            "the data holds conversations, but the tokenizer has no chat template",
            hint="use a model with a chat template, or data with a plain text field",
        )
    try:
        return str(tokenizer.apply_chat_template(document, tokenize=False, add_generation_prompt=False))
    except Exception as error:  # a template is a program of the checkpoint's and may raise anything
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        where = getattr(document, "where", "a conversation")
        raise DataError(
            f"{where}: the model's chat template refuses the messages: {reason}",
            hint="give roles in the order it wants, mostly user and assistant in turns, contents as text",
        ) from error
