"""Unigram SentencePiece (``tokenizer.ggml.model`` "t5"): the cut of a text whose tokens' scores sum highest.

    scores f32 (tokens,)              log probabilities
    add_space_prefix                  a space goes before a text
    remove_extra_whitespaces          runs of spaces become one, those at the ends none
    precompiled_charsmap u8           SentencePiece's compiled normalization, in tokenizer.json as base64

llama.cpp's (``llm_tokenizer_ugm``) takes a character without a token for unknown; it has no bytes to fall
back to, and cuts at no spaces.

Differs from Hugging Face where llama.cpp has nothing for it: a Metaspace pre-tokenizer puts no space before a
text that begins with one; llama.cpp does, unless ``remove_extra_whitespaces``.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from attar.errors import CheckpointError, ModelError
from attar.formats.gguf.pretokenizers import steps
from attar.formats.gguf.sentencepiece import SentencePiece
from attar.formats.gguf.tokenizer_bpe import normalizers
from attar.formats.gguf.tokenizer_source import TokenizerFiles
from attar.formats.gguf.tokenizer_spm import ESCAPE, metaspace, with_added
from attar.formats.gguf.tokenizer_vocabulary import (
    BEFORE,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    TokenEntry,
    listed,
    metadata,
    pad_text,
)
from attar.formats.gguf.values import MetadataValue, TypedValue

RUNS = {"Regex": " {2,}"}


def unigram_metadata(source: TokenizerFiles) -> dict[str, MetadataValue]:
    """The keys of a unigram model, from tokenizer.json, or from a SentencePiece model where there is none.

    Raises:
        ModelError: llama.cpp has no such normalizer, pre-tokenizer or model.
        CheckpointError: a file is damaged.
    """
    return _from_json(source) if source.pieces is None else _from_model(source, source.pieces)


def _from_json(source: TokenizerFiles) -> dict[str, MetadataValue]:
    model = source.model
    if model.get("byte_fallback"):
        raise ModelError(
            f"{source.file}: model.byte_fallback: llama.cpp's unigram has no bytes to fall back to"
        )
    unknown = model.get("unk_id")
    entries = {
        index: TokenEntry(text, UNKNOWN if index == unknown else _type(text, index), float(score))
        for index, (text, score) in enumerate(model["vocab"])
    }
    merged, charsmap = _normalizer(source)
    steps_before = normalizers(source.tokenizer.get("normalizer"))
    prefix = any(step.get("type") == "Prepend" or step == BEFORE for step in steps_before)
    for step in steps(source.tokenizer.get("pre_tokenizer")):
        spaced = metaspace(step)
        if spaced is None and (step.get("type") != "WhitespaceSplit" or not charsmap):
            raise ModelError(f"{source.file}: pre_tokenizer {dict(step)}: llama.cpp's unigram has none such")
        merged, prefix = merged or spaced is None, prefix or bool(spaced)
    if merged and not prefix:
        raise ModelError(f"{source.file}: no space goes before a text; llama.cpp's unigram puts one there")
    return _keys(source, with_added(source, entries, unknown), prefix, merged, charsmap)


def _from_model(source: TokenizerFiles, read: SentencePiece) -> dict[str, MetadataValue]:
    if read.byte_fallback or read.treat_whitespace_as_suffix:
        raise ModelError(
            f"{source.file}: llama.cpp's unigram has no bytes to fall back to and no spaces as suffix"
        )
    entries = {
        index: TokenEntry(text, kind, score)
        for index, (text, kind, score) in enumerate(zip(read.pieces, read.types, read.scores, strict=True))
    }
    full = with_added(source, entries, read.ids.get("unk"))
    return _keys(source, full, read.add_dummy_prefix, read.remove_extra_whitespaces, read.charsmap)


def _keys(
    source: TokenizerFiles, entries: dict[int, TokenEntry], prefix: bool, merged: bool, charsmap: bytes
) -> dict[str, MetadataValue]:
    found = {
        **metadata("t5", listed(entries, source.size, source.file), scored=True),
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.add_space_prefix": prefix,
        "tokenizer.ggml.remove_extra_whitespaces": merged,
    }
    if charsmap:
        found["tokenizer.ggml.precompiled_charsmap"] = TypedValue("[u8]", list(charsmap))
    return found


def _normalizer(source: TokenizerFiles) -> tuple[bool, bytes]:
    """Whether runs of spaces become one, and the compiled normalization."""
    merged = stripped = False
    charsmap = b""
    for step in normalizers(source.tokenizer.get("normalizer")):
        kind = step.get("type")
        if kind == "Precompiled":
            charsmap = _decoded(step, source)
        elif kind == "Replace" and step.get("pattern") == RUNS and step.get("content") in (" ", SPACE):
            merged = True
        elif kind == "Strip" and step.get("strip_right"):
            stripped = True
        elif kind != "Prepend" and step not in (ESCAPE, BEFORE):
            raise ModelError(
                f"{source.file}: normalizer {dict(step)}: llama.cpp's unigram has a precompiled_charsmap only"
            )
    if merged != stripped:
        raise ModelError(
            f"{source.file}: normalizer: llama.cpp's unigram drops extra spaces everywhere or nowhere"
        )
    return merged, charsmap


def _type(text: str, index: int) -> int:
    """An id in the middle that has no token is filled here too."""
    return UNUSED if text == pad_text(index) else NORMAL


def _decoded(step: Mapping[str, Any], source: TokenizerFiles) -> bytes:
    try:
        return base64.b64decode(step.get("precompiled_charsmap") or "", validate=True)
    except ValueError as error:
        raise CheckpointError(f"{source.file}: normalizer.precompiled_charsmap is no base64") from error
