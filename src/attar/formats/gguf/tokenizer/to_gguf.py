"""Tokenizers as GGUF metadata. from_gguf.py is the way back.

    tokenizer.json has                                tokenizer.ggml.model
    BPE, ByteLevel                                    gpt2     bpe.py, pretokenizers.py
    BPE, byte_fallback; or tokenizer.model (BPE)      llama    spm.py, vocabulary.py, sentencepiece.py
    Unigram; or spiece.model (unigram)                t5       spm.py

llama.cpp's keys do not hold all of a tokenizer.json. attar adds the key ``attar.tokenizer.pipeline``, which
other readers ignore: a JSON object with ``normalizer``, ``pre_tokenizer``, ``post_processor`` and ``decoder``
as in tokenizer.json, ``model`` (the BPE's switches), ``flags`` (of added tokens by id) and ``keys`` (the
values of llama.cpp's keys that say the same: a part whose key was changed since is left out). With it,
from_gguf.py restores the original tokenizer. A compiled normalization is null there, because the file has it
already.

Source: llama.cpp ``src/llama-vocab.cpp``, ``gguf-py/gguf/constants.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from attar.errors import CheckpointError, ModelError
from attar.formats.gguf.generation import generation_metadata
from attar.formats.gguf.tokenizer.bpe import bpe_metadata, normalizer_steps
from attar.formats.gguf.tokenizer.files import TokenizerFiles, check_added_ids
from attar.formats.gguf.tokenizer.pretokenizers import by_name, pre_tokenizer_steps
from attar.formats.gguf.tokenizer.sentencepiece import UNIGRAM
from attar.formats.gguf.tokenizer.special_tokens import (
    KNOWN_ENDS,
    PREFIX,
    ends_of,
    special_ids,
    special_token_metadata,
    unnamed_ends,
)
from attar.formats.gguf.tokenizer.spm import metaspace_prefix, spm_metadata, unigram_metadata
from attar.formats.gguf.values import MetadataValue

PIPELINE = "attar.tokenizer.pipeline"
STAGES = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
SWITCHES = ("unk_token", "fuse_unk", "byte_fallback", "ignore_merges")
PARTS = (
    (("pre", "add_space_prefix", "remove_extra_whitespaces"),
     ("normalizer", "pre_tokenizer", "decoder", "model")),
    (("add_bos_token", "add_eos_token", "bos_token_id", "eos_token_id"), ("post_processor",)),
)  # fmt: skip
"""llama.cpp's keys, and the parts of a pipeline that say the same more exactly."""
CHARSMAP = "precompiled_charsmap"


def source_metadata(source: TokenizerFiles, pre: str | None = None) -> dict[str, MetadataValue]:
    """The GGUF metadata of a tokenizer and a generation config: all keys below ``tokenizer.`` and
    ``general.sampling.``, and the keys of attar.

    Args:
        pre: llama.cpp's name for the pre-tokenizer of a byte-level BPE; None: it is recognised.

    Raises:
        CheckpointError: there is no tokenizer, or a file is damaged.
        ModelError: llama.cpp cannot do what this tokenizer does; names the part.
        SettingsError: llama.cpp has no pre-tokenizer ``pre``.
    """
    kind = _kind(source)
    if kind == "gpt2":
        metadata = bpe_metadata(source, pre)
    else:
        metadata = spm_metadata(source) if kind == "llama" else unigram_metadata(source)
    check_added_ids(source)
    metadata.update(special_token_metadata(source))
    ends = ends_of(source, special_ids(source)["eos"])
    metadata.update(generation_metadata(source.generation, ends, metadata))
    if source.tokenizer:
        metadata[PIPELINE] = json.dumps(pipeline(source, metadata), ensure_ascii=False, separators=(",", ":"))
    return metadata


def _kind(source: TokenizerFiles) -> str:
    """``tokenizer.ggml.model`` of a tokenizer."""
    if source.pieces is not None:
        return "t5" if source.pieces.kind == UNIGRAM else "llama"
    if not source.tokenizer:
        raise CheckpointError(
            f"{source.folder}: no tokenizer.json and no tokenizer.model",
            hint="AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes tokenizer.json",
        )
    model = source.model
    kind = model.get("type") or ("BPE" if "merges" in model else None)
    if kind == "Unigram":
        return "t5"
    if kind != "BPE":
        raise ModelError(
            f"{source.file}: model {kind}: GGUF is written for BPE, SentencePiece and unigram tokenizers"
        )
    levels = [step.get("type") for step in pre_tokenizer_steps(source.tokenizer.get("pre_tokenizer"))]
    return "gpt2" if "ByteLevel" in levels else "llama"


def pipeline(source: TokenizerFiles, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The content of ``attar.tokenizer.pipeline``.

    Args:
        metadata: the keys of llama.cpp.
    """
    kept = {stage: source.tokenizer.get(stage) for stage in STAGES}
    kept["normalizer"] = with_charsmap(kept["normalizer"], None)
    kept["model"] = {name: source.model[name] for name in SWITCHES if name in source.model}
    kept["flags"] = {str(index): list(token.flags) for index, token in source.added.items() if token.flags}
    return {**kept, "keys": _keys(metadata)}


def _keys(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """llama.cpp's keys of the parts of a pipeline."""
    names = [name for names, _ in PARTS for name in names]
    return {name: metadata[PREFIX + name] for name in names if PREFIX + name in metadata}


def read_pipeline(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The content of ``attar.tokenizer.pipeline``, empty in a file of another writer, without the parts whose
    keys were changed since.

    Raises:
        CheckpointError: it is no JSON object.
    """
    try:
        kept = json.loads(metadata.get(PIPELINE, "{}"))
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{PIPELINE}: not JSON: {error}") from error
    if not isinstance(kept, dict) or not isinstance(kept.get("keys", {}), dict):
        raise CheckpointError(f"{PIPELINE}: not a JSON object")
    current = _keys(metadata)
    before = kept.get("keys", current)  # a file of an earlier version has none
    changed = {name for name in {**before, **current} if before.get(name) != current.get(name)}
    dropped = {part for names, parts in PARTS if changed.intersection(names) for part in parts}
    return {part: value for part, value in kept.items() if part not in dropped}


def with_charsmap(tree: Any, charsmap: str | None) -> Any:
    """A normalizer with its compiled normalization replaced."""
    if not isinstance(tree, dict):
        return tree
    if "normalizers" in tree:
        return {**tree, "normalizers": [with_charsmap(step, charsmap) for step in tree["normalizers"]]}
    return {**tree, CHARSMAP: charsmap} if CHARSMAP in tree else tree


def tokenizer_differences(source: TokenizerFiles, metadata: Mapping[str, Any]) -> list[str]:
    """How llama.cpp's tokens differ from transformers', one line each.

    Args:
        metadata: :func:`source_metadata` of them.
    """
    kind = metadata[f"{PREFIX}model"]
    lines = [*_normalizer(source), *_spaces(source), *_added(source), *_ends(source)]
    if kind == "gpt2" and by_name(metadata[f"{PREFIX}pre"]).approximate:
        lines.append("letters with marks and letters outside ASCII may be cut at other places")
    return lines


def _normalizer(source: TokenizerFiles) -> list[str]:
    kinds = [step.get("type") for step in normalizer_steps(source.tokenizer.get("normalizer"))]
    return [
        line
        for kind, line in (
            ("NFC", "a text is not brought to NFC first: letters with separate marks make other tokens"),
            ("Precompiled", "a letter with several marks may be normalized otherwise"),
        )
        if kind in kinds
    ]


def _spaces(source: TokenizerFiles) -> list[str]:
    for step in pre_tokenizer_steps(source.tokenizer.get("pre_tokenizer")):
        if metaspace_prefix(step):
            first = step.get("prepend_scheme") == "first"
            after = ", and after a special token" if first else ""
            return [f"a text that begins with a space gets one more{after}"]
    return []


def _added(source: TokenizerFiles) -> list[str]:
    flagged = [
        token.text
        for token in source.added.values()
        if {"lstrip", "rstrip", "single_word"}.intersection(token.flags)
    ]
    if not flagged:
        return []
    return [f"{len(flagged)} added tokens ({flagged[0]}, ...) leave adjacent spaces as they are"]


def _ends(source: TokenizerFiles) -> list[str]:
    """End tokens beyond eos, eot and eom, and plain tokens that llama.cpp takes for an end by their text."""
    ids = special_ids(source)
    named = {ids.get(role) for role in ("eos", "eot", "eom")}
    missed = [index for index in unnamed_ends(source, ids["eos"]) if index not in named]
    lines = [f"token {index} does not end a text: eos, eot and eom are taken" for index in missed]
    plain = [
        text
        for text in KNOWN_ENDS
        if (index := source.vocabulary.get(text)) is not None and index not in source.added
    ]
    return [*lines, *(f"the plain token {text} ends a text, by its look" for text in plain)]
