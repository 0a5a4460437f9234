"""Byte-level BPE (``tokenizer.ggml.model`` "gpt2"): GPT-2, Llama 3, Qwen, SmolLM, ...

A text is cut by the pre-tokenizer, its bytes are written as 256 printable characters, and merges join them.
llama.cpp has the tokens and merges in that writing, a merge as ``"a b"``; special tokens it finds in the text
before anything else, written as they are.

Differs from Hugging Face where llama.cpp has nothing for it: a text is not brought to NFC first (Qwen does);
``lstrip``, ``rstrip`` and ``single_word`` of added tokens have no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attar.errors import ModelError
from attar.formats.gguf.merges import complete, read_merges
from attar.formats.gguf.pretokenizers import by_name, recognise
from attar.formats.gguf.tokenizer_source import TokenizerFiles
from attar.formats.gguf.tokenizer_vocabulary import (
    CONTROL,
    NORMAL,
    USER_DEFINED,
    TokenEntry,
    listed,
    metadata,
)
from attar.formats.gguf.values import MetadataValue, TypedValue

_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
ALPHABET = {
    **{byte: chr(byte) for byte in _PRINTED},
    **{byte: chr(256 + place) for place, byte in enumerate(_OTHERS)},
}
"""The character that stands for each byte, as GPT-2 has it."""


def bpe_metadata(source: TokenizerFiles, pre: str | None) -> dict[str, MetadataValue]:
    """The keys of a byte-level BPE.

    Args:
        source: the tokenizer's files.
        pre: the name of the pre-tokenizer, where it shall not be recognised.

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
            lambda: complete(plain, ranks),
            where,
        )
    by_name(pre)
    return {
        **metadata("gpt2", listed(_entries(source), source.size, source.file), scored=False),
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.merges": TypedValue(
            "[str]", [f"{left} {right}" for left, right in ranks if " " not in left + right]
        ),
    }


def _entries(source: TokenizerFiles) -> dict[int, TokenEntry]:
    """Tokens by id. Text that is in no byte's writing can come from no merge; it is written in bytes, so
    that llama.cpp reads it the same (not with ignore_merges, which would then find it)."""
    characters, respelt = set(ALPHABET.values()), not source.model.get("ignore_merges")
    found = {}
    for text, index in source.vocabulary.items():
        if respelt and not characters.issuperset(text):
            spelt = "".join(ALPHABET[byte] for byte in text.encode())
            text = text if spelt in source.vocabulary else spelt
        found[index] = TokenEntry(text, NORMAL)
    for index, token in source.added.items():
        found[index] = TokenEntry(token.text, CONTROL if token.special else USER_DEFINED)
    return found


def _check(source: TokenizerFiles) -> None:
    """Refuse what llama.cpp's byte-level BPE does not do."""
    model = source.model
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise ModelError(f"{source.file}: model.{name} is {model[name]!r}; llama.cpp's BPE has none")
    missing = [char for char in ALPHABET.values() if char not in source.vocabulary]
    if missing and model.get("unk_token") is not None:
        raise ModelError(
            f"{source.file}: model.unk_token stands for bytes without a token ({missing[0]!r}, ...); "
            "llama.cpp leaves them out",
            hint="a vocabulary with all 256 bytes needs no unk_token",
        )
    wrong = [
        step["type"] for step in normalizers(source.tokenizer.get("normalizer")) if step["type"] != "NFC"
    ]
    if wrong:
        raise ModelError(f"{source.file}: normalizer {wrong[0]}: llama.cpp's BPE takes a text as it is")


def normalizers(tree: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The steps of a tokenizer.json's normalizer, in their order."""
    if not tree:
        return []
    if tree.get("type") != "Sequence":
        return [tree]
    return [leaf for branch in tree.get("normalizers") or () for leaf in normalizers(branch)]
