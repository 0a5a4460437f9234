"""A tokenizer from GGUF metadata: tokenizer.json and tokenizer_config.json, as transformers loads them.

With the key ``attar.tokenizer.pipeline`` (to_gguf.py) they are the original ones; without it, they tokenize a
text as llama.cpp does:

    gpt2     BPE with the merges of the file; the pre-tokenizer by its name
    llama    BPE with byte fallback, and the merges that follow from the scores (vocabulary.py)
    t5       Unigram; a space goes before a text unless it has only spaces

Control, unknown and user-defined tokens become added tokens. Unused tokens ``[PAD<id>]`` are left out; the
ids of the others stay. ``clean_up_tokenization_spaces`` is false, as transformers has it for all BPE.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attar.checkpoint.atomic import write_bytes, write_json
from attar.errors import CheckpointError, ModelError, SettingsError
from attar.formats.gguf.tokenizer.pretokenizers import by_name, pre_tokenizer
from attar.formats.gguf.tokenizer.special_tokens import PREFIX, TEXT_ENDS, stored_ids
from attar.formats.gguf.tokenizer.to_gguf import PIPELINE, STAGES, SWITCHES, read_pipeline, with_charsmap
from attar.formats.gguf.tokenizer.vocabulary import (
    BEFORE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    SymbolPair,
    merges_of,
    pad_text,
)
from attar.formats.gguf.values import TypedValue

Json = dict[str, Any]
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_TEMPLATE = "tokenizer.chat_template"


@dataclass(frozen=True)
class StoredTokenizer:
    """The tokenizer of a GGUF file.

    Attributes:
        kind: ``tokenizer.ggml.model``.
        metadata: of the file, without types.
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

    def is_padding(self, index: int) -> bool:
        """Whether an id has only the unused token ``[PAD<id>]``."""
        return self.types[index] == UNUSED and self.tokens[index] == pad_text(index)


def write_tokenizer(metadata: Mapping[str, Any], folder: str | Path) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    Args:
        metadata: of a GGUF file, with or without types; not modified.

    Raises:
        CheckpointError: a key is missing or its lists have different lengths; names it.
        ModelError: attar does not know the kind of tokenizer.
        OutputError: the folder cannot be written.
    """
    untyped = {
        key: value.value if isinstance(value, TypedValue) else value for key, value in metadata.items()
    }
    tokenizer, settings = tokenizer_files(untyped)
    write_bytes(Path(folder) / "tokenizer.json", json.dumps(tokenizer, ensure_ascii=False).encode())
    write_json(Path(folder) / "tokenizer_config.json", settings)


def tokenizer_files(metadata: Mapping[str, Any]) -> tuple[Json, Json]:
    """The contents of tokenizer.json and tokenizer_config.json. Arguments and errors as
    :func:`write_tokenizer`, without types."""
    stored = _stored(metadata)
    kept = read_pipeline(metadata)
    tokenizer = BUILDERS[stored.kind](stored)
    switches = kept.get("model") or {}
    tokenizer["model"].update({name: switches[name] for name in SWITCHES if name in switches})
    tokenizer.update({stage: kept[stage] for stage in STAGES if stage in kept})
    charsmap = base64.b64encode(stored.charsmap).decode() if stored.charsmap else None
    tokenizer["normalizer"] = with_charsmap(tokenizer["normalizer"], charsmap)
    added = _added(stored, kept.get("flags") or {})
    content = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **tokenizer}
    return content, _settings(stored)


def _stored(metadata: Mapping[str, Any]) -> StoredTokenizer:
    """The checked tokenizer of a file."""
    kind = metadata.get(PREFIX + "model")
    if kind is None:
        raise CheckpointError(f"{PREFIX}model is missing", hint="the file holds no tokenizer")
    if kind not in BUILDERS:
        raise ModelError(f"{PREFIX}model is {kind!r}; read are {', '.join(BUILDERS)}")
    lists = {
        "gpt2": ("token_type", "merges"),
        "llama": ("token_type", "scores"),
        "t5": ("token_type", "scores"),
    }
    for name in ("tokens", *lists[kind]):
        if PREFIX + name not in metadata:
            raise CheckpointError(f"{PREFIX}{name} is missing", hint="the file is damaged")
    tokens = metadata[PREFIX + "tokens"]
    for name in lists[kind]:
        if name != "merges" and len(metadata[PREFIX + name]) != len(tokens):
            raise CheckpointError(
                f"{PREFIX}{name} has {len(metadata[PREFIX + name])} entries for {len(tokens)} tokens",
                hint="the file is damaged",
            )
    return StoredTokenizer(kind, metadata, tokens, _types(metadata, tokens), stored_ids(metadata))


def _types(metadata: Mapping[str, Any], tokens: list[str]) -> list[int]:
    """Types of the tokens. In a file of another writer a plain token with the text of an end is a control
    token, as in llama.cpp."""
    types: list[int] = metadata[PREFIX + "token_type"]
    if PIPELINE in metadata:
        return types
    return [
        CONTROL if kind == NORMAL and token in TEXT_ENDS else kind
        for token, kind in zip(tokens, types, strict=True)
    ]


def _added(stored: StoredTokenizer, flags: Mapping[str, list[str]]) -> list[Json]:
    """The added tokens of a tokenizer.json."""
    added = []
    for index, (token, kind) in enumerate(zip(stored.tokens, stored.types, strict=True)):
        if kind in (CONTROL, UNKNOWN, USER_DEFINED):
            given = flags.get(str(index), [])
            entry = {"id": index, "content": token, **{name: name in given for name in _FLAGS}}
            added.append({**entry, "special": kind != USER_DEFINED})
    return added


def _settings(stored: StoredTokenizer) -> Json:
    """The content of tokenizer_config.json."""
    metadata = stored.metadata
    settings: Json = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings.update({f"{role}_token": stored.text(role) for role in _NAMED if role in stored.ids})
    lengths = [value for key, value in metadata.items() if key.endswith(".context_length")]
    if lengths:
        settings["model_max_length"] = int(lengths[0])
    main = metadata.get(_TEMPLATE)
    names = [key.removeprefix(f"{_TEMPLATE}.") for key in metadata if key.startswith(f"{_TEMPLATE}.")]
    templates = [{"name": name, "template": metadata[f"{_TEMPLATE}.{name}"]} for name in names]
    if main is not None:
        templates.insert(0, {"name": "default", "template": main})
    if templates:
        settings["chat_template"] = templates if names else main
    return settings


def bpe(stored: StoredTokenizer) -> Json:
    """A byte-level BPE.

    Raises:
        ModelError: attar does not know the pre-tokenizer.
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
        "post_processor": _post_processor(stored, bos, False),
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
        "post_processor": _post_processor(stored, True, False),
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
        "post_processor": _post_processor(stored, False, True),
        "decoder": {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": True},
        "model": {
            "type": "Unigram",
            "unk_id": stored.ids.get("unk"),
            "vocab": _scored(stored),
            "byte_fallback": False,
        },
    }


def _scored(stored: StoredTokenizer) -> list[list[Any]]:
    """Texts and scores of a unigram model. Its ids are list indices, so padding between two tokens stays,
    with the lowest score of a token, from which the score of unknown ones is computed."""
    scores = [float(score) for score in stored.get("scores", ())]
    normal = [score for score, kind in zip(scores, stored.types, strict=True) if kind == NORMAL]
    last = max((index for index in range(len(scores)) if not stored.is_padding(index)), default=-1)
    return [
        [stored.tokens[index], min(normal, default=0.0) if stored.types[index] == UNUSED else scores[index]]
        for index in range(last + 1)
    ]


def _model(stored: StoredTokenizer, merges: list[SymbolPair], **switches: Any) -> Json:
    """A BPE without merges of anything but tokens, which have no effect."""
    vocabulary = {token: index for index, token in enumerate(stored.tokens) if not stored.is_padding(index)}
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


def _post_processor(stored: StoredTokenizer, bos: bool, eos: bool) -> Json:
    """The post_processor that adds bos before a text and eos after it, where the file's keys or else ``bos``
    and ``eos`` are true."""
    before = [stored.text("bos")] if stored.get("add_bos_token", bos) and "bos" in stored.ids else []
    after = [stored.text("eos")] if stored.get("add_eos_token", eos) and "eos" in stored.ids else []
    parts = {
        letter: [
            *({"SpecialToken": {"id": text, "type_id": number}} for text in before),
            {"Sequence": {"id": letter, "type_id": number}},
            *({"SpecialToken": {"id": text, "type_id": number}} for text in after),
        ]
        for number, letter in enumerate("AB")
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


def _pair(merge: str) -> SymbolPair:
    """A merge as llama.cpp reads it: split at the first space that is not its first character."""
    cut = merge.find(" ", 1)
    if cut < 0:
        raise CheckpointError(f"{PREFIX}merges: {merge!r} is no pair", hint="the file is damaged")
    return merge[:cut], merge[cut + 1 :]


BUILDERS = {"gpt2": bpe, "llama": spm, "t5": unigram}
"""Functions that return the stages and the model of a tokenizer.json, by kind."""
