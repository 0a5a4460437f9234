"""What tokenizer.json says for each kind of GGUF tokenizer, so that it cuts and joins a text as llama.cpp.

gpt2     BPE with the merges of the file; the pre-tokenizer by its name
llama    BPE with bytes to fall back to, and the merges that the scores stand for (merges.py)
t5       Unigram; the space goes before a text only if it has something else than spaces
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attar.errors import CheckpointError, ModelError, SettingsError
from attar.formats.gguf.merges import TokenPair, merges_of
from attar.formats.gguf.pretokenizers import by_name, pre_tokenizer
from attar.formats.gguf.tokenizer_special import PREFIX
from attar.formats.gguf.tokenizer_vocabulary import BEFORE, NORMAL, SPACE, UNUSED, pad_text

Json = dict[str, Any]


@dataclass(frozen=True)
class StoredTokenizer:
    """The tokenizer of a GGUF file.

    Attributes:
        kind: ``tokenizer.ggml.model``.
        metadata: of the file, without types.
        tokens: texts by id.
        types: by id.
        ids: of the special tokens by role.
    """

    kind: str
    metadata: Mapping[str, Any]
    tokens: list[str]
    types: list[int]
    ids: Mapping[str, int]

    def get(self, name: str, default: Any) -> Any:
        """The value of a key below ``tokenizer.ggml.``."""
        return self.metadata.get(PREFIX + name, default)

    def text(self, role: str) -> str | None:
        """The text of a special token."""
        return self.tokens[self.ids[role]] if role in self.ids else None

    @property
    def charsmap(self) -> bytes:
        """The compiled normalization, empty for none."""
        return bytes(byte & 255 for byte in self.get("precompiled_charsmap", ()))

    def fills(self, index: int) -> bool:
        """Whether an id has no token but one that fills its place."""
        return self.types[index] == UNUSED and self.tokens[index] == pad_text(index)


def bpe(stored: StoredTokenizer) -> Json:
    """A byte-level BPE.

    Raises:
        ModelError: the pre-tokenizer's rules are not known here.
        CheckpointError: a merge is no pair.
    """
    name = stored.get("pre", "default")
    try:
        row = by_name(name)
    except SettingsError as error:
        raise ModelError(f"{PREFIX}pre is {name!r}, of which no rule is known here") from error
    bos = row.name in ("llama-bpe", "tekken") and name not in ("glm4", "glm5")
    merges = [_pair(merge) for merge in stored.get("merges", ())]
    return {
        "normalizer": {"type": "NFC"} if row.composed else None,
        "pre_tokenizer": pre_tokenizer(name),
        "post_processor": _around(stored, bos, False),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _model(stored, merges, ignore_merges=row.ignore_merges),
    }


def spm(stored: StoredTokenizer) -> Json:
    """A SentencePiece BPE."""
    score = dict(zip(stored.tokens, stored.get("scores", ()), strict=True))
    pieces = [token for token, kind in zip(stored.tokens, stored.types, strict=True) if kind == NORMAL]
    prefix = bool(stored.get("add_space_prefix", True))
    before: list[Json] = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    strip: list[Json] = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    decoders = [_replace(SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    switches = {"unk_token": stored.text("unk"), "fuse_unk": True, "byte_fallback": True}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, _replace(" ", SPACE)]},
        "pre_tokenizer": None,
        "post_processor": _around(stored, True, False),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _model(stored, merges_of(pieces, score), **switches),
    }


def unigram(stored: StoredTokenizer) -> Json:
    """A unigram model."""
    merged = bool(stored.get("remove_extra_whitespaces", False))
    prefix = bool(stored.get("add_space_prefix", False)) or merged
    steps: list[Json] = [{"type": "Precompiled", "precompiled_charsmap": None}] if stored.charsmap else []
    if merged:
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if prefix:
        steps.append(dict(BEFORE))
    scheme = "always" if prefix else "never"
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*steps, _replace(" ", SPACE)]},
        "pre_tokenizer": None,
        "post_processor": _around(stored, False, True),
        "decoder": {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": True},
        "model": {
            "type": "Unigram",
            "unk_id": stored.ids.get("unk"),
            "vocab": _scored(stored),
            "byte_fallback": False,
        },
    }


MAKERS = {"gpt2": bpe, "llama": spm, "t5": unigram}
"""What makes the stages and the model of a tokenizer.json, by kind."""


def _scored(stored: StoredTokenizer) -> list[list[Any]]:
    """Texts and scores of a unigram model. Its ids are places in a list, so what fills a place between two
    tokens stays; it gets the lowest score that a token has, which is what unknown ones are measured by."""
    scores = [float(score) for score in stored.get("scores", ())]
    normal = [score for score, kind in zip(scores, stored.types, strict=True) if kind == NORMAL]
    last = max((index for index in range(len(scores)) if not stored.fills(index)), default=-1)
    return [
        [stored.tokens[index], min(normal, default=0.0) if stored.types[index] == UNUSED else scores[index]]
        for index in range(last + 1)
    ]


def _model(stored: StoredTokenizer, merges: list[TokenPair], **switches: Any) -> Json:
    """A BPE. Merges of what is no token are left out: they can come to nothing."""
    vocabulary = {token: index for index, token in enumerate(stored.tokens) if not stored.fills(index)}
    usual = {"unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {
        "type": "BPE",
        "dropout": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        **usual,
        **switches,
        "vocab": vocabulary,
        "merges": [
            [left, right]
            for left, right in merges
            if left in vocabulary and right in vocabulary and left + right in vocabulary
        ],
    }


def _around(stored: StoredTokenizer, bos: bool, eos: bool) -> Json:
    """The post_processor that puts bos and eos around a text, where the file says so; where it says nothing,
    where ``bos`` and ``eos`` do."""
    before = [stored.text("bos")] if stored.get("add_bos_token", bos) and "bos" in stored.ids else []
    after = [stored.text("eos")] if stored.get("add_eos_token", eos) and "eos" in stored.ids else []
    parts = {
        letter: [
            *({"SpecialToken": {"id": text, "type_id": place}} for text in before),
            {"Sequence": {"id": letter, "type_id": place}},
            *({"SpecialToken": {"id": text, "type_id": place}} for text in after),
        ]
        for place, letter in enumerate("AB")
    }
    roles = [*(["bos"] if before else []), *(["eos"] if after else [])]
    named = {
        text: {"id": text, "ids": [stored.ids[role]], "tokens": [text]}
        for role in roles
        if (text := stored.text(role)) is not None
    }
    pair = parts["A"] + parts["B"]
    return {"type": "TemplateProcessing", "single": parts["A"], "pair": pair, "special_tokens": named}


def _replace(text: str, by: str) -> Json:
    return {"type": "Replace", "pattern": {"String": text}, "content": by}


def _pair(merge: str) -> TokenPair:
    """A merge as llama.cpp reads it: cut at the first space that is not its first character."""
    cut = merge.find(" ", 1)
    if cut < 0:
        raise CheckpointError(f"{PREFIX}merges: {merge!r} is no pair", hint="the file is damaged")
    return merge[:cut], merge[cut + 1 :]
