"""A tokenizer from GGUF metadata: tokenizer.json and tokenizer_config.json, as transformers loads them.

With the key ``attar.tokenizer.pipeline`` (tokenizer_pipeline.py) they are those that the metadata was made
of; without it, those that cut and join a text as llama.cpp does (tokenizer_kinds.py).

An added token is every control, unknown and user-defined one. Unused tokens ``[PAD<id>]`` are left out; the
ids of the others stay. ``clean_up_tokenization_spaces`` is false, as transformers has it for all BPE.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attar.checkpoint.atomic import write_bytes, write_json
from attar.errors import CheckpointError, ModelError
from attar.formats.gguf.tokenizer_kinds import MAKERS, Json, StoredTokenizer
from attar.formats.gguf.tokenizer_pipeline import STAGES, SWITCHES, read_pipeline, with_charsmap
from attar.formats.gguf.tokenizer_special import KEYS, PREFIX
from attar.formats.gguf.tokenizer_vocabulary import CONTROL, UNKNOWN, USER_DEFINED
from attar.formats.gguf.values import TypedValue

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
_NAMED = ("bos", "eos", "unk", "sep", "pad", "mask")
_TEMPLATE = "tokenizer.chat_template"
_DEFAULT_IDS = {"llama": {"bos": 1, "eos": 2, "unk": 0}, "t5": {"eos": 1, "unk": 2, "pad": 0}}
"""What llama.cpp takes where a file names none. For "gpt2" it takes token 11, which nobody means."""


def write_tokenizer(metadata: Mapping[str, Any], folder: str | Path) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    Args:
        metadata: of a GGUF file, with or without types. Not modified.
        folder: exists.

    Raises:
        CheckpointError: a key is missing or its lists have different lengths; names it.
        ModelError: the file has a kind of tokenizer that is not known here.
        OutputError: the folder cannot be written.
    """
    bare = {key: value.value if isinstance(value, TypedValue) else value for key, value in metadata.items()}
    tokenizer, settings = tokenizer_files(bare)
    write_bytes(Path(folder) / "tokenizer.json", json.dumps(tokenizer, ensure_ascii=False).encode())
    write_json(Path(folder) / "tokenizer_config.json", settings)


def tokenizer_files(metadata: Mapping[str, Any]) -> tuple[Json, Json]:
    """The contents of tokenizer.json and tokenizer_config.json. Arguments and errors as
    :func:`write_tokenizer`, without types."""
    stored = _stored(metadata)
    kept = read_pipeline(metadata)
    tokenizer = MAKERS[stored.kind](stored)
    switches = kept.get("model") or {}
    tokenizer["model"].update({name: switches[name] for name in SWITCHES if name in switches})
    tokenizer.update({stage: kept[stage] for stage in STAGES if stage in kept})
    charsmap = base64.b64encode(stored.charsmap).decode() if stored.charsmap else None
    tokenizer["normalizer"] = with_charsmap(tokenizer["normalizer"], charsmap)
    added = _added(stored, kept.get("flags") or {})
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **tokenizer}
    return whole, _settings(stored)


def _stored(metadata: Mapping[str, Any]) -> StoredTokenizer:
    """The vocabulary of a file, looked over."""
    kind = metadata.get(PREFIX + "model")
    if kind is None:
        raise CheckpointError(f"{PREFIX}model is missing", hint="the file holds no tokenizer")
    if kind not in MAKERS:
        raise ModelError(f"{PREFIX}model is {kind!r}; read are {', '.join(MAKERS)}")
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
    named = {role: metadata[PREFIX + key] for role, key in KEYS.items() if PREFIX + key in metadata}
    ids = {**_DEFAULT_IDS.get(kind, {}), **named}
    inside = {role: index for role, index in ids.items() if 0 <= index < len(tokens)}
    return StoredTokenizer(kind, metadata, tokens, metadata[PREFIX + "token_type"], inside)


def _added(stored: StoredTokenizer, flags: Mapping[str, list[str]]) -> list[Json]:
    """The added tokens of a tokenizer.json."""
    found = []
    for index, (token, kind) in enumerate(zip(stored.tokens, stored.types, strict=True)):
        if kind in (CONTROL, UNKNOWN, USER_DEFINED):
            given = flags.get(str(index), [])
            entry = {"id": index, "content": token, **{name: name in given for name in _FLAGS}}
            found.append({**entry, "special": kind != USER_DEFINED})
    return found


def _settings(stored: StoredTokenizer) -> Json:
    """The content of tokenizer_config.json."""
    metadata = stored.metadata
    found: Json = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    found.update({f"{role}_token": stored.text(role) for role in _NAMED if role in stored.ids})
    lengths = [value for key, value in metadata.items() if key.endswith(".context_length")]
    if lengths:
        found["model_max_length"] = int(lengths[0])
    main = metadata.get(_TEMPLATE)
    names = [
        name for name in metadata.get("tokenizer.chat_templates") or [] if f"{_TEMPLATE}.{name}" in metadata
    ]
    templates = [{"name": name, "template": metadata[f"{_TEMPLATE}.{name}"]} for name in names]
    if main is not None:
        templates.insert(0, {"name": "default", "template": main})
    if templates:
        found["chat_template"] = templates if names else main
    return found
