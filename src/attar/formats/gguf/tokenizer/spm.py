"""SentencePiece tokenizers: BPE (``tokenizer.ggml.model`` "llama": Llama 2, Mistral, Gemma, Phi-3, ...) and
unigram ("t5").

BPE. Spaces become U+2581, characters are joined by score, and a character without a token becomes its bytes
``<0xNN>``. The scores come from tokenizer.model; without that file the scores are computed from the merges of
tokenizer.json (vocabulary.py). Unigram: the split of a text whose tokens' scores, log probabilities, sum
highest.

    scores f32 (tokens,)
    add_space_prefix                  a space goes before a text (BPE: and after each special token)
    remove_extra_whitespaces          unigram: runs of spaces become one space, at the ends none
    precompiled_charsmap u8           unigram: the compiled normalization (base64 in tokenizer.json)

llama.cpp's unigram (``llm_tokenizer_ugm``) takes a character without a token for unknown; it has no byte
fallback and does not split at spaces.

Differs from Hugging Face where llama.cpp lacks a feature: a Metaspace pre-tokenizer puts no space before a
text that starts with one, and with ``prepend_scheme`` "first" none after a special token; llama.cpp always
does (unigram: unless ``remove_extra_whitespaces``). ``lstrip``, ``rstrip`` and ``single_word`` of added
tokens have no effect.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from attar.errors import CheckpointError, ModelError
from attar.formats.gguf.tokenizer.bpe import normalizer_steps
from attar.formats.gguf.tokenizer.files import TokenizerFiles
from attar.formats.gguf.tokenizer.pretokenizers import pre_tokenizer_steps
from attar.formats.gguf.tokenizer.sentencepiece import BPE, SentencePiece, read_model
from attar.formats.gguf.tokenizer.vocabulary import (
    ADDED_SCORE,
    BEFORE,
    BYTE,
    BYTE_TEXT,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    TokenEntry,
    merge_scores,
    pad_text,
    read_merges,
    token_list,
    vocabulary_metadata,
)
from attar.formats.gguf.values import MetadataValue, TypedValue

ESCAPE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
RUNS = {"Regex": " {2,}"}


def spm_metadata(source: TokenizerFiles) -> dict[str, MetadataValue]:
    """The keys of a SentencePiece BPE.

    Raises:
        ModelError: llama.cpp has no such normalizer or model, or the files disagree.
        CheckpointError: tokenizer.model is damaged.
    """
    model = source.pieces
    if model is not None:
        prefix, entries = model.add_dummy_prefix, _model_entries(source, model)
        if model.charsmap or model.remove_extra_whitespaces:
            raise ModelError(f"{source.file}: its normalizer changes a text; llama.cpp's takes it as it is")
    else:
        prefix, file = _space_prefix(source), source.piece_file
        entries = _json_entries(source) if file is None else _model_entries(source, read_model(file))
    if sum(entry.type == BYTE for entry in entries.values()) < 256:
        raise ModelError(
            f"{source.folder}: the tokenizer has no token for each byte, without which llama.cpp stops"
        )
    return {
        **vocabulary_metadata("llama", token_list(entries, source.size, source.file), scored=True),
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def with_added(
    source: TokenizerFiles, entries: dict[int, TokenEntry], unknown: int | None
) -> dict[int, TokenEntry]:
    """Entries by id with the added tokens; a token of the model keeps its score. A space in an added token is
    written as a space."""
    added = dict(entries)
    for index, token in source.added.items():
        score = entries[index].score if index in entries else ADDED_SCORE
        if token.special:
            added[index] = TokenEntry(token.text, UNKNOWN if index == unknown else CONTROL, score)
        else:
            added[index] = TokenEntry(token.text.replace(SPACE, " "), USER_DEFINED, score)
    return added


def _model_entries(source: TokenizerFiles, model: SentencePiece) -> dict[int, TokenEntry]:
    """Tokens by id from tokenizer.model, and the added ones."""
    if model.kind != BPE:
        raise ModelError(f"{source.piece_file}: a unigram model, but tokenizer.json has a BPE")
    entries = {
        index: TokenEntry(text.replace(SPACE, " ") if kind == USER_DEFINED else text, kind, score)
        for index, (text, kind, score) in enumerate(zip(model.pieces, model.types, model.scores, strict=True))
    }
    for text, index in source.vocabulary.items():
        same = index < len(model.pieces) and model.pieces[index] == text
        if not same and index not in source.added:
            raise ModelError(
                f"{source.file}: token {index} is {text!r}, but tokenizer.model has another there",
                hint="remove the file that is not this model's",
            )
    return with_added(source, entries, model.ids.get("unk"))


def _json_entries(source: TokenizerFiles) -> dict[int, TokenEntry]:
    """Tokens by id from tokenizer.json, with scores computed from its merges."""
    model, where = source.model, str(source.file)
    if not model.get("byte_fallback"):
        raise ModelError(f"{where}: model.byte_fallback is false, without which llama.cpp stops")
    ranks = read_merges(model.get("merges") or (), where)
    order = sorted(source.vocabulary, key=lambda text: source.vocabulary[text])
    plain = [text for text in order if source.vocabulary[text] not in source.added]
    pieces = [text for text in plain if not BYTE_TEXT.fullmatch(text)]
    score = dict(zip(pieces, merge_scores(pieces, ranks, where), strict=True))
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


def _space_prefix(source: TokenizerFiles) -> bool:
    """Whether a space goes before a text.

    Raises:
        ModelError: llama.cpp's SentencePiece has no such normalizer or pre-tokenizer.
    """
    escaped = prefix = False
    for step in normalizer_steps(source.tokenizer.get("normalizer")):
        if step == ESCAPE:
            escaped = True
        elif step.get("type") == "Prepend" and step.get("prepend") == SPACE:
            prefix = True
        elif step.get("type") != "NFC":
            raise ModelError(
                f"{source.file}: normalizer {dict(step)}: llama.cpp's SentencePiece has none such"
            )
    for step in pre_tokenizer_steps(source.tokenizer.get("pre_tokenizer")):
        adds_space = metaspace_prefix(step)
        if adds_space is not None:
            escaped, prefix = True, prefix or adds_space
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


def metaspace_prefix(step: Mapping[str, Any]) -> bool | None:
    """Whether a Metaspace step puts a space before a text; None for another step."""
    if step.get("type") != "Metaspace" or step.get("replacement", SPACE) != SPACE:
        return None
    return bool(step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True))


def _plain(source: TokenizerFiles) -> list[str]:
    return [text for text, index in source.vocabulary.items() if index not in source.added]


def unigram_metadata(source: TokenizerFiles) -> dict[str, MetadataValue]:
    """The keys of a unigram model, from tokenizer.json, or without one from a SentencePiece model.

    Raises:
        ModelError: llama.cpp has no such normalizer, pre-tokenizer or model.
        CheckpointError: a file is damaged.
    """
    return _unigram_from_json(source) if source.pieces is None else _unigram_from_model(source, source.pieces)


def _unigram_from_json(source: TokenizerFiles) -> dict[str, MetadataValue]:
    model = source.model
    if model.get("byte_fallback"):
        raise ModelError(
            f"{source.file}: model.byte_fallback: llama.cpp's unigram has no bytes to fall back to"
        )
    unknown = model.get("unk_id")
    entries = {
        index: TokenEntry(text, UNKNOWN if index == unknown else _unigram_type(text, index), float(score))
        for index, (text, score) in enumerate(model["vocab"])
    }
    merged, charsmap = _unigram_normalizer(source)
    steps_before = normalizer_steps(source.tokenizer.get("normalizer"))
    prefix = any(step.get("type") == "Prepend" or step == BEFORE for step in steps_before)
    for step in pre_tokenizer_steps(source.tokenizer.get("pre_tokenizer")):
        adds_space = metaspace_prefix(step)
        if adds_space is None and (step.get("type") != "WhitespaceSplit" or not charsmap):
            raise ModelError(f"{source.file}: pre_tokenizer {dict(step)}: llama.cpp's unigram has none such")
        merged, prefix = merged or adds_space is None, prefix or bool(adds_space)
    if merged and not prefix:
        raise ModelError(f"{source.file}: no space goes before a text; llama.cpp's unigram puts one there")
    return _unigram_keys(source, with_added(source, entries, unknown), prefix, merged, charsmap)


def _unigram_from_model(source: TokenizerFiles, model: SentencePiece) -> dict[str, MetadataValue]:
    if model.byte_fallback or model.treat_whitespace_as_suffix:
        raise ModelError(
            f"{source.file}: llama.cpp's unigram has no bytes to fall back to and no spaces as suffix"
        )
    entries = {
        index: TokenEntry(text, kind, score)
        for index, (text, kind, score) in enumerate(zip(model.pieces, model.types, model.scores, strict=True))
    }
    full = with_added(source, entries, model.ids.get("unk"))
    return _unigram_keys(source, full, model.add_dummy_prefix, model.remove_extra_whitespaces, model.charsmap)


def _unigram_keys(
    source: TokenizerFiles, entries: dict[int, TokenEntry], prefix: bool, merged: bool, charsmap: bytes
) -> dict[str, MetadataValue]:
    metadata = {
        **vocabulary_metadata("t5", token_list(entries, source.size, source.file), scored=True),
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.add_space_prefix": prefix,
        "tokenizer.ggml.remove_extra_whitespaces": merged,
    }
    if charsmap:
        metadata["tokenizer.ggml.precompiled_charsmap"] = TypedValue("[u8]", list(charsmap))
    return metadata


def _unigram_normalizer(source: TokenizerFiles) -> tuple[bool, bytes]:
    """Whether runs of spaces become one, and the compiled normalization."""
    merged = stripped = False
    charsmap = b""
    for step in normalizer_steps(source.tokenizer.get("normalizer")):
        kind = step.get("type")
        if kind == "Precompiled":
            charsmap = _charsmap(step, source)
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


def _unigram_type(text: str, index: int) -> int:
    """An id without a token is padding in the middle, too."""
    return UNUSED if text == pad_text(index) else NORMAL


def _charsmap(step: Mapping[str, Any], source: TokenizerFiles) -> bytes:
    try:
        return base64.b64decode(step.get("precompiled_charsmap") or "", validate=True)
    except ValueError as error:
        raise CheckpointError(f"{source.file}: normalizer.precompiled_charsmap is no base64") from error
