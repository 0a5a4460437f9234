"""Documents to rows of tokens, and rows to batches for training, calibration and evaluation.

Packing into rows of S tokens:

- ``stream``: documents are joined by the end-of-text token and cut every S tokens. No padding, only the tail
  is dropped; a row may hold the end of one document and the start of the next, as in pre-training.
- ``separate``: each document is cut into separate rows, and a shorter row is filled with :data:`PADDING`.

Every row starts with BOS if the tokenizer puts it before a text, and the token after it is the first that is
predicted. A model trained with BOS depends on it: without, its figures can be wrong by orders of magnitude.

Padding is at the end of a row, so a causal model never attends to it; losses ignore it, and models read
token 0 instead.

Letters: N rows, S tokens a row, B rows a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attar.chat_template import apply_template
from attar.checkpoint.geometry import geometry
from attar.data.sources import COMPRESSION, in_turns, read_split, sources
from attar.data.splits import Document
from attar.errors import DataError

PADDING = -100  # marks a position without a token
SORTED = 32  # batches that are sorted by length together
CHUNK = 256  # most documents of one tokenizer call: enough for every core
CHOSEN_FROM = 1 << 19  # tokens of a compression's text that its rows are chosen from, at least


@dataclass(frozen=True)
class PackedRows:
    """Rows of a split.

    Attributes:
        rows: int64 (N, S).
        shared: the reason why other splits hold the same text; empty if they do not.
    """

    rows: Tensor
    shared: str = ""


def tokenize(texts: Iterable[Document], tokenizer: Any) -> Iterator[list[int]]:
    """The token ids of each document, without special tokens and without empty documents."""
    chunk: list[str] = []
    size = 4  # small at first, because often a few rows are enough
    for text in texts:
        chunk.append(render(text, tokenizer))
        if len(chunk) == size:
            yield from _encode(chunk, tokenizer)
            chunk, size = [], min(2 * size, CHUNK)
    if chunk:
        yield from _encode(chunk, tokenizer)


def _encode(chunk: list[str], tokenizer: Any) -> Iterator[list[int]]:
    for ids in tokenizer(chunk, add_special_tokens=False, verbose=False)["input_ids"]:
        if ids:
            yield ids


def end_token(tokenizer: Any) -> list[int]:
    """The token between documents: end-of-text, else the separator, else none."""
    for token in (tokenizer.eos_token_id, tokenizer.sep_token_id):
        if token is not None:
            return [int(token)]
    return []


def front_tokens(tokenizer: Any, bos: str = "auto") -> list[int]:
    """The first tokens of every row: the tokens that the tokenizer puts before a text, usually BOS.

    Found by tokenizing a text, because not every tokenizer follows ``add_bos_token``. An encoder's [CLS] does
    not count: its rows are masked and cut from the middle of texts.

    Args:
        bos: ``auto``, ``always`` or ``never``.

    Raises:
        DataError: ``always``, and the tokenizer has no BOS token.
    """
    if bos == "never":
        return []
    text = tokenizer("x", add_special_tokens=False)["input_ids"]
    ids = tokenizer("x")["input_ids"]
    starts = [n for n in range(len(ids) - len(text) + 1) if ids[n : n + len(text)] == text]
    front = [int(token) for token in ids[: starts[0]]] if starts else []
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
    """Join documents and cut: int64 (N, S), N at most ``rows``, each row ``front`` and S - len(front) tokens
    of text. Stops reading at ``rows``."""
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
    """Cut each document into separate rows, each after ``front``: int64 (N, S), :data:`PADDING` on the
    right."""
    filled: list[list[int]] = []
    body = length - len(front)
    for document in ids:
        text = _without(front, document) + end
        parts = [[*front, *text[start : start + body]] for start in range(0, len(text), body)]
        filled.extend(part for part in parts if len(part) > 1)  # a single token predicts nothing
        if rows is not None and len(filled) >= rows:
            break
    filled = filled[:rows]
    tokens = torch.full((len(filled), length), PADDING, dtype=torch.int64)
    for row, part in enumerate(filled):
        tokens[row, : len(part)] = torch.tensor(part)
    return tokens


def _without(front: Sequence[int], document: list[int]) -> list[int]:
    """A document without the front tokens of its chat template, so that no row has them twice."""
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
) -> PackedRows:
    """Rows of a source's split; of the compression's text, the seed's choice of its rows. If a source of few
    documents has less than one row in the split, they are of its whole text, and ``shared`` says so.

    Args:
        length: S.
        rows: the largest N; None: the whole split.
        packing: ``stream`` or ``separate``.
        bos: see :func:`front_tokens`.

    Raises:
        DataError: the source holds less than one row.
    """
    if len(names := sources(data)) > 1:
        share = None if rows is None else -(-rows // len(names))
        options: dict[str, Any] = {"length": length, "seed": seed, "packing": packing, "bos": bos}
        parts = [pack(tokenizer, name, split, rows=share, **options) for name in names]
        shared = next((part.shared for part in parts if part.shared), "")
        return PackedRows(torch.stack(list(in_turns(part.rows for part in parts))[:rows]), shared)
    front, end = front_tokens(tokenizer, bos), end_token(tokenizer)
    if len(front) >= length:
        raise DataError(f"rows of {length} tokens hold only {len(front)} of the tokenizer's own in front")
    cut, chosen = pack_separate if packing == "separate" else pack_stream, split == COMPRESSION
    most = max(CHOSEN_FROM // length, rows) if chosen and rows is not None else rows
    for unsplit in (False, True):
        text = read_split(data, split, seed, unsplit=unsplit)
        packed = cut(tokenize(text.documents, tokenizer), length, end, most, front)
        if chosen:
            packed = packed[torch.randperm(len(packed), generator=numbered_generator(seed, 0))[:rows]]
        if len(packed):
            return PackedRows(packed, text.shared)
    raise DataError(
        f"{data}: the {split} split holds less than one row of {length} tokens",
        hint="give more text, or a smaller --sequence-length",
    )


def row_length(wanted: int, config: dict[str, Any]) -> int:
    """S: the settings' ``sequence_length``, at most the model's context.

    RoBERTa counts its positions from the one after the padding token.
    """
    context = geometry(config, "bfloat16").context
    if context is None:
        return wanted
    offset = int(config.get("pad_token_id") or 0) + 1 if "roberta" in config["model_type"] else 0
    return min(wanted, context - offset)


def evaluation_rows(
    tokenizer: Any, data: str, *, tokens: int, sequence_length: int, seed: int, bos: str = "auto"
) -> PackedRows:
    """Rows of the evaluation split, about ``tokens`` tokens in total."""
    count = max(tokens // sequence_length, 1)
    return pack(tokenizer, data, "evaluation", length=sequence_length, rows=count, seed=seed, bos=bos)


def calibration_batches(
    tokenizer: Any,
    data: str,
    *,
    samples: int,
    sequence_length: int,
    batch_size: int,
    seed: int,
    bos: str = "auto",
    split: str = "calibration",
) -> list[Tensor]:
    """``samples`` rows of a split in the seed's order, as int64 (B, S) batches.

    Raises:
        DataError: the source holds less than one row.
    """
    packed = pack(tokenizer, data, split, length=sequence_length, rows=samples, seed=seed, bos=bos)
    return list(packed.rows.split(batch_size))


@dataclass(frozen=True)
class Batches:
    """Training batches of ``size`` rows by number, shuffled by a permutation per epoch.

    A batch is a function of (rows, seed, number), so a resumed run sees the same batches.

    Attributes:
        rows: int64 (N, S), or :class:`attar.data.examples.Examples`.
    """

    rows: Any
    size: int
    seed: int

    def batch(self, number: int, model: Any) -> Any:
        """See :class:`attar.walks.train.BatchSource`; the model does not matter."""
        return self[number]

    def __getitem__(self, index: int) -> Any:
        """Batch number ``index``: as many rows, of the kind of ``rows``; epochs follow without end."""
        total = len(self.rows)
        numbers = range(index * self.size, (index + 1) * self.size)
        orders = {epoch: self._order(epoch) for epoch in {number // total: None for number in numbers}}
        return self.rows[torch.stack([orders[number // total][number % total] for number in numbers])]

    def _order(self, epoch: int) -> Tensor:
        return torch.randperm(len(self.rows), generator=numbered_generator(self.seed, epoch))


@dataclass(frozen=True)
class SimilarLengths:
    """Training batches of ``size`` examples of similar length by number, so that little of them is padding.

    An epoch's permutation is cut into parts of :data:`SORTED` batches, each part sorted by length and cut
    into batches, and the batches shuffled; the last of an epoch may be smaller. A batch is a function of
    (rows, seed, number), as with :class:`Batches`.

    Attributes:
        rows: :class:`attar.data.examples.Examples`.
    """

    rows: Any
    size: int
    seed: int

    def batch(self, number: int, model: Any) -> Any:
        """See :class:`attar.walks.train.BatchSource`; the model does not matter."""
        epoch, index = divmod(number, -(-len(self.rows) // self.size))
        generator = numbered_generator(self.seed, epoch)
        lengths = self.rows.mask.sum(1)
        parts = torch.randperm(len(self.rows), generator=generator).split(self.size * SORTED)
        batches = [
            chosen for part in parts for chosen in part[lengths[part].argsort(stable=True)].split(self.size)
        ]
        return self.rows[batches[int(torch.randperm(len(batches), generator=generator)[index])]]


def numbered_generator(seed: int, number: int) -> torch.Generator:
    """A generator for draw ``number`` of a seed."""
    return torch.Generator().manual_seed((seed * 1_000_003 + number) % 2**64)


def render(document: Document, tokenizer: Any) -> str:
    """The text of a document; messages are formatted by the tokenizer's chat template.

    Raises:
        DataError: the tokenizer has no template for a conversation, or the template fails.
    """
    if isinstance(document, str):
        return document
    if is_plain(document, tokenizer):
        return "".join(str(message["content"]) for message in document)
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            "the data holds conversations, but the tokenizer has no chat template",
            hint="use a model with a chat template, or data with a plain text field",
        )
    try:
        return apply_template(tokenizer, document, add_generation_prompt=False)
    except Exception as error:  # a template is a program of the checkpoint and may raise anything
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        where = getattr(document, "where", "a conversation")
        raise DataError(
            f"{where}: the model's chat template refuses the messages: {reason}",
            hint="give roles in the order it wants, mostly user and assistant in turns, contents as text",
        ) from error


def is_plain(messages: Sequence[dict[str, Any]], tokenizer: Any) -> bool:
    """Whether a prompt and its answer are one text: a row says so, or the tokenizer has no chat template, as
    for the checkpoint that continued the prompt."""
    if getattr(messages, "plain", False):
        return True
    roles = [message.get("role") for message in messages]
    texts = all(isinstance(message.get("content"), str) for message in messages)
    return not getattr(tokenizer, "chat_template", None) and roles == ["user", "assistant"] and texts
