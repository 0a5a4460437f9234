"""Reading a SentencePiece model (``tokenizer.model``, ``spiece.model``): its pieces, scores and normalizer.

The file is a protocol buffer: fields, each a varint ``number << 3 | wire``, then its value.

    wire 0   varint: seven bits a byte, the lowest first, the high bit set where another byte follows
    wire 1   eight bytes
    wire 2   varint length | bytes
    wire 5   four bytes

    ModelProto       1 piece (each), 2 trainer_spec, 3 normalizer_spec
    SentencePiece    1 text, 2 score f32, 3 type: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused,
                     6 byte
    TrainerSpec      3 model_type: 1 unigram, 2 BPE; 24 treat_whitespace_as_suffix; 35 byte_fallback;
                     40 unk_id, 41 bos_id, 42 eos_id, 43 pad_id (-1 for none)
    NormalizerSpec   2 precompiled_charsmap, 3 add_dummy_prefix, 4 remove_extra_whitespaces

Source: sentencepiece, ``src/sentencepiece_model.proto``. The types of pieces are the numbers of GGUF's
``tokenizer.ggml.token_type``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from attar.errors import CheckpointError

NAMES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
UNIGRAM, BPE = 1, 2
_WIDTH = {1: 8, 5: 4}


@dataclass(frozen=True)
class SentencePiece:
    """A SentencePiece model.

    Attributes:
        types: of each piece, 1 to 6.
        kind: 1 unigram, 2 BPE.
        ids: of ``unk``, ``bos``, ``eos`` and ``pad``, where the model has them.
        byte_fallback: an unknown character becomes its bytes.
        add_dummy_prefix: a space goes before a text.
        remove_extra_whitespaces: runs of spaces become one space, at the ends none.
        treat_whitespace_as_suffix: a space belongs to the word before it.
        charsmap: the compiled normalization, empty for none.
    """

    pieces: list[str]
    scores: list[float]
    types: list[int]
    kind: int
    ids: dict[str, int]
    byte_fallback: bool
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    treat_whitespace_as_suffix: bool
    charsmap: bytes


def read_model(path: Path) -> SentencePiece:
    """A SentencePiece model from its file.

    Raises:
        CheckpointError: the file is truncated, or is no SentencePiece model (some models have a list for
            tiktoken under this name).
    """
    try:
        return _model(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, IndexError, struct.error) as error:
        raise CheckpointError(
            f"{path}: no SentencePiece model: {error}", hint="copy or download the file again"
        ) from error


def _model(data: bytes) -> SentencePiece:
    pieces, scores, types = [], [], []
    trainer, normalizer = b"", b""
    for number, value in fields(data):
        if number == 1:
            text, score, kind = _piece(_blob(value))
            pieces.append(text)
            scores.append(score)
            types.append(kind)
        elif number in (2, 3):
            trainer, normalizer = (_blob(value), normalizer) if number == 2 else (trainer, _blob(value))
    if not pieces:
        raise ValueError("it has no pieces")
    spec, rule = dict(fields(trainer)), dict(fields(normalizer))
    ids = {"unk": spec.get(40, 0), "bos": spec.get(41, 1), "eos": spec.get(42, 2), "pad": spec.get(43, -1)}
    return SentencePiece(
        pieces,
        scores,
        types,
        kind=_int(spec.get(3, UNIGRAM)),
        ids={name: _int(value) for name, value in ids.items() if 0 <= _int(value) < len(pieces)},
        byte_fallback=bool(spec.get(35, 0)),
        add_dummy_prefix=bool(rule.get(3, 1)),
        remove_extra_whitespaces=bool(rule.get(4, 1)),
        treat_whitespace_as_suffix=bool(spec.get(24, 0)),
        charsmap=_blob(rule.get(2, b"")),
    )


def _piece(data: bytes) -> tuple[str, float, int]:
    """Text, score and type of a piece."""
    message = dict(fields(data))
    score = struct.unpack("<f", _blob(message.get(2, bytes(4))))[0]
    return _blob(message.get(1, b"")).decode(), score, _int(message.get(3, 1))


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message: number and value, an int for a varint.

    Raises:
        ValueError: the message is truncated or has a wire type that is not in use.
    """
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        value: int | bytes
        if wire == 0:
            value, at = _varint(data, at)
        else:
            if wire == 2:
                length, at = _varint(data, at)
            elif wire in _WIDTH:
                length = _WIDTH[wire]
            else:
                raise ValueError(f"wire type {wire} at byte {at}")
            if at + length > len(data):
                raise ValueError(f"it ends within a field at byte {at}")
            value, at = data[at : at + length], at + length
        yield number, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A varint, as a signed 64-bit number, and where it ends."""
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError(f"it ends within a number at byte {at}")
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return (value - (1 << 64) if value >= 1 << 63 else value), at


def _blob(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number stands where text should")
    return value


def _int(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("text stands where a number should")
    return value
