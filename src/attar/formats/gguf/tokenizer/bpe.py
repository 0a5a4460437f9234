"""Byte-level BPE (``tokenizer.ggml.model`` "gpt2"): GPT-2, Llama 3, Qwen, SmolLM, ...

The pre-tokenizer splits a text, its bytes are mapped to 256 printable characters, and merges join them.
llama.cpp has the tokens and merges in these characters, a merge as ``"a b"``; special tokens, in their own
characters, are matched in the text before anything else.

Differs from Hugging Face where llama.cpp lacks a feature: a text is not normalized to NFC (Qwen does);
``lstrip``, ``rstrip`` and ``single_word`` of added tokens have no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attar.errors import ModelError
from attar.formats.byte_alphabet import BYTE_ALPHABET
from attar.formats.gguf.tokenizer.files import TokenizerFiles
from attar.formats.gguf.tokenizer.pretokenizers import by_name, recognise
from attar.formats.gguf.tokenizer.vocabulary import (
    CONTROL,
    NORMAL,
    USER_DEFINED,
    TokenEntry,
    merges_make_all,
    read_merges,
    token_list,
    vocabulary_metadata,
)
from attar.formats.gguf.values import MetadataValue, TypedValue


def bpe_metadata(source: TokenizerFiles, pre: str | None) -> dict[str, MetadataValue]:
    """The keys of a byte-level BPE.

    Args:
        pre: the name of the pre-tokenizer; None: it is recognised.

    Raises:
        ModelError: llama.cpp has no such pre-tokenizer, normalizer or model.
        SettingsError: ``pre`` is not a name that llama.cpp has.
    """
    model, where = source.model, str(source.file)
    _check(source)
    ranks = read_merges(model.get("merges") or (), where)
    plain = [text for text, index in source.vocabulary.items() if index not in source.added]
    if pre is None:
        pre = recognise(
            source.tokenizer.get("pre_tokenizer"),
            bool(model.get("ignore_merges")),
            lambda: merges_make_all(plain, ranks),
            where,
        )
    by_name(pre)
    return {
        **vocabulary_metadata("gpt2", token_list(_entries(source), source.size, source.file), scored=False),
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.merges": TypedValue(
            "[str]", [f"{left} {right}" for left, right in ranks if " " not in left + right]
        ),
    }


def _entries(source: TokenizerFiles) -> dict[int, TokenEntry]:
    """Tokens by id. No merge makes a text with characters outside the byte alphabet; it is mapped to the
    alphabet, so that llama.cpp reads it the same (not with ignore_merges, which would then match it)."""
    characters, respell = set(BYTE_ALPHABET.values()), not source.model.get("ignore_merges")
    entries = {}
    for text, index in source.vocabulary.items():
        if respell and not characters.issuperset(text):
            spelled = "".join(BYTE_ALPHABET[byte] for byte in text.encode())
            text = text if spelled in source.vocabulary else spelled
        entries[index] = TokenEntry(text, NORMAL)
    for index, token in source.added.items():
        entries[index] = TokenEntry(token.text, CONTROL if token.special else USER_DEFINED)
    return entries


def _check(source: TokenizerFiles) -> None:
    """Refuse what llama.cpp's byte-level BPE does not do."""
    model = source.model
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise ModelError(f"{source.file}: model.{name} is {model[name]!r}; llama.cpp's BPE has none")
    missing = [char for char in BYTE_ALPHABET.values() if char not in source.vocabulary]
    if missing and model.get("unk_token") is not None:
        raise ModelError(
            f"{source.file}: model.unk_token stands for bytes without a token ({missing[0]!r}, ...); "
            "llama.cpp leaves them out",
            hint="a vocabulary with all 256 bytes needs no unk_token",
        )
    wrong = [
        step["type"] for step in normalizer_steps(source.tokenizer.get("normalizer")) if step["type"] != "NFC"
    ]
    if wrong:
        raise ModelError(f"{source.file}: normalizer {wrong[0]}: llama.cpp's BPE takes a text as it is")


def normalizer_steps(tree: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The steps of a tokenizer.json's normalizer, in their order."""
    if not tree:
        return []
    if tree.get("type") != "Sequence":
        return [tree]
    return [leaf for branch in tree.get("normalizers") or () for leaf in normalizer_steps(branch)]
