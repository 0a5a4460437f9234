"""SentencePiece BPE (``tokenizer.ggml.model`` "llama"): Llama 2, Mistral, Gemma, Phi-3, ...

Spaces become U+2581, characters are joined by score, and a character without a token becomes its bytes
``<0xNN>``. The scores are those of tokenizer.model; where there is none they come from the merges of
tokenizer.json (merges.py).

    scores f32 (tokens,)      add_space_prefix      a space goes before a text and after each special token

Differs from Hugging Face where llama.cpp has nothing for it: a Metaspace pre-tokenizer puts no space before a
text that begins with one, and with ``prepend_scheme`` "first" none after a special token; llama.cpp always
does. ``lstrip``, ``rstrip`` and ``single_word`` of added tokens have no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attar.errors import ModelError
from attar.formats.gguf.merges import read_merges, scores
from attar.formats.gguf.pretokenizers import steps
from attar.formats.gguf.sentencepiece import BPE, SentencePiece, read_model
from attar.formats.gguf.tokenizer_bpe import normalizers
from attar.formats.gguf.tokenizer_source import TokenizerFiles
from attar.formats.gguf.tokenizer_vocabulary import (
    ADDED_SCORE,
    BYTE,
    BYTE_TEXT,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    USER_DEFINED,
    TokenEntry,
    listed,
    metadata,
)
from attar.formats.gguf.values import MetadataValue

ESCAPE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}


def spm_metadata(source: TokenizerFiles) -> dict[str, MetadataValue]:
    """The keys of a SentencePiece BPE.

    Raises:
        ModelError: llama.cpp has no such normalizer or model, or the files disagree.
        CheckpointError: tokenizer.model is damaged.
    """
    read = source.pieces
    if read is not None:
        prefix, entries = read.add_dummy_prefix, _model_entries(source, read)
        if read.charsmap or read.remove_extra_whitespaces:
            raise ModelError(f"{source.file}: its normalizer changes a text; llama.cpp's takes it as it is")
    else:
        prefix, file = _prefix(source), source.piece_file
        entries = _json_entries(source) if file is None else _model_entries(source, read_model(file))
    if sum(entry.type == BYTE for entry in entries.values()) < 256:
        raise ModelError(
            f"{source.folder}: the tokenizer has no token for each byte, without which llama.cpp stops"
        )
    return {
        **metadata("llama", listed(entries, source.size, source.file), scored=True),
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def with_added(
    source: TokenizerFiles, entries: dict[int, TokenEntry], unknown: int | None
) -> dict[int, TokenEntry]:
    """Entries with those of added tokens in their places; a token of the model keeps its score. A space
    within one is written as a space."""
    found = dict(entries)
    for index, token in source.added.items():
        score = entries[index].score if index in entries else ADDED_SCORE
        if token.special:
            found[index] = TokenEntry(token.text, UNKNOWN if index == unknown else CONTROL, score)
        else:
            found[index] = TokenEntry(token.text.replace(SPACE, " "), USER_DEFINED, score)
    return found


def _model_entries(source: TokenizerFiles, read: SentencePiece) -> dict[int, TokenEntry]:
    """Tokens by id from tokenizer.model, and the added ones."""
    if read.kind != BPE:
        raise ModelError(f"{source.piece_file}: a unigram model, but tokenizer.json has a BPE")
    entries = {
        index: TokenEntry(text.replace(SPACE, " ") if kind == USER_DEFINED else text, kind, score)
        for index, (text, kind, score) in enumerate(zip(read.pieces, read.types, read.scores, strict=True))
    }
    for text, index in source.vocabulary.items():
        same = index < len(read.pieces) and read.pieces[index] == text
        if not same and index not in source.added:
            raise ModelError(
                f"{source.file}: token {index} is {text!r}, but tokenizer.model has another there",
                hint="remove the one that is not this model's",
            )
    return with_added(source, entries, read.ids.get("unk"))


def _json_entries(source: TokenizerFiles) -> dict[int, TokenEntry]:
    """Tokens by id from tokenizer.json, with scores made from its merges."""
    model, where = source.model, str(source.file)
    if not model.get("byte_fallback"):
        raise ModelError(f"{where}: model.byte_fallback is false, without which llama.cpp stops")
    ranks = read_merges(model.get("merges") or (), where)
    order = sorted(source.vocabulary, key=lambda text: source.vocabulary[text])
    plain = [text for text in order if source.vocabulary[text] not in source.added]
    pieces = [text for text in plain if not BYTE_TEXT.fullmatch(text)]
    score = dict(zip(pieces, scores(pieces, ranks, where), strict=True))
    entries = {
        source.vocabulary[text]: TokenEntry(text, NORMAL, score[text])
        if text in score
        else TokenEntry(text, BYTE)
        for text in plain
    }
    unknown = source.id_of(model.get("unk_token"))
    if unknown is not None and unknown not in source.added:
        entries[unknown] = entries[unknown]._replace(type=UNKNOWN)
    return with_added(source, entries, unknown)


def _prefix(source: TokenizerFiles) -> bool:
    """Whether a space goes before a text.

    Raises:
        ModelError: the text is changed or cut in a way that llama.cpp's SentencePiece does not have.
    """
    escaped = prefix = False
    for step in normalizers(source.tokenizer.get("normalizer")):
        if step == ESCAPE:
            escaped = True
        elif step.get("type") == "Prepend" and step.get("prepend") == SPACE:
            prefix = True
        elif step.get("type") != "NFC":
            raise ModelError(
                f"{source.file}: normalizer {dict(step)}: llama.cpp's SentencePiece has none such"
            )
    for step in steps(source.tokenizer.get("pre_tokenizer")):
        spaced = metaspace(step)
        if spaced is not None:
            escaped, prefix = True, prefix or spaced
            if step.get("split", True) and any(SPACE in text[1:] for text in _plain(source)):
                raise ModelError(
                    f"{source.file}: pre_tokenizer Metaspace cuts at spaces, and some tokens have one "
                    "inside; llama.cpp would make them"
                )
        elif step.get("pattern") != {"String": " "} or not escaped:
            raise ModelError(
                f"{source.file}: pre_tokenizer {dict(step)}: llama.cpp's SentencePiece does not cut a text"
            )
    if not escaped:
        raise ModelError(f"{source.file}: nothing writes spaces as U+2581, as llama.cpp's SentencePiece does")
    return prefix


def metaspace(step: Mapping[str, Any]) -> bool | None:
    """Whether a Metaspace step puts a space before a text; None for another step."""
    if step.get("type") != "Metaspace" or step.get("replacement", SPACE) != SPACE:
        return None
    return bool(step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True))


def _plain(source: TokenizerFiles) -> list[str]:
    return [text for text, index in source.vocabulary.items() if index not in source.added]
