"""What llama.cpp will do otherwise than Hugging Face with a tokenizer that was written: for the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attar.formats.gguf.pretokenizers import by_name, steps
from attar.formats.gguf.tokenizer_bpe import normalizers
from attar.formats.gguf.tokenizer_source import TokenizerFiles
from attar.formats.gguf.tokenizer_special import KNOWN_ENDS, PREFIX, special_ids, unnamed_ends
from attar.formats.gguf.tokenizer_spm import metaspace


def tokenizer_limits(source: TokenizerFiles, metadata: Mapping[str, Any]) -> list[str]:
    """Where llama.cpp's tokens will differ from transformers', one line each; empty where they will not.

    Args:
        source: the tokenizer's files.
        metadata: what ``source_metadata`` made of them.
    """
    kind = metadata[f"{PREFIX}model"]
    found = [*_normalizer(source), *_spaces(source), *_added(source), *_ends(source)]
    if kind == "gpt2" and by_name(metadata[f"{PREFIX}pre"]).approximate:
        found.append("letters with marks and letters outside ASCII may be cut at other places")
    return found


def _normalizer(source: TokenizerFiles) -> list[str]:
    kinds = [step.get("type") for step in normalizers(source.tokenizer.get("normalizer"))]
    return [
        line
        for kind, line in (
            ("NFC", "a text is not brought to NFC first: letters with separate marks make other tokens"),
            ("Precompiled", "a letter with several marks may be normalized otherwise"),
        )
        if kind in kinds
    ]


def _spaces(source: TokenizerFiles) -> list[str]:
    for step in steps(source.tokenizer.get("pre_tokenizer")):
        if metaspace(step):
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
    return [f"{len(flagged)} added tokens ({flagged[0]}, ...) leave the spaces beside them as they are"]


def _ends(source: TokenizerFiles) -> list[str]:
    """Ends of a text that find no place, and tokens that llama.cpp takes for an end by their text."""
    ids = special_ids(source)
    missed = [
        index
        for index in unnamed_ends(source, ids.get("eos"))
        if index not in (ids.get("eot"), ids.get("eom"))
    ]
    lines = [f"token {index} does not end a text: eos, eot and eom are taken" for index in missed]
    plain = [
        text
        for text in KNOWN_ENDS
        if (index := source.vocabulary.get(text)) is not None and index not in source.added
    ]
    return [*lines, *(f"the plain token {text} ends a text, by its look" for text in plain)]
