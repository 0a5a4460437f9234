"""A tokenizer from GGUF metadata: tokenizer.json and tokenizer_config.json, as transformers loads them.

With the key ``attar.tokenizer.pipeline`` (tokenizer_pipeline.py) they are those that the metadata was made
of; without it, those that cut and join a text as llama.cpp does.

    gpt2     BPE with the merges of the file; the pre-tokenizer by its name
    llama    BPE with byte_fallback and the merges that its scores stand for (merges.py)
    t5       Unigram

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
from attar.errors import CheckpointError, ModelError, SettingsError
from attar.formats.gguf.merges import merges_of
from attar.formats.gguf.pretokenizers import by_name, pre_tokenizer
from attar.formats.gguf.tokenizer_pipeline import read_pipeline, with_charsmap
from attar.formats.gguf.tokenizer_special import KEYS, PREFIX
from attar.formats.gguf.tokenizer_vocabulary import (
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    pad_text,
)
from attar.formats.gguf.values import Typed

Json = dict[str, Any]
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
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
    bare = {key: value.value if isinstance(value, Typed) else value for key, value in metadata.items()}
    tokenizer, settings = tokenizer_files(bare)
    write_bytes(Path(folder) / "tokenizer.json", json.dumps(tokenizer, ensure_ascii=False).encode())
    write_json(Path(folder) / "tokenizer_config.json", settings)


def tokenizer_files(metadata: Mapping[str, Any]) -> tuple[Json, Json]:
    """The contents of tokenizer.json and tokenizer_config.json. Arguments and errors as
    :func:`write_tokenizer`, without types."""
    kind = _key(metadata, "model")
    if kind not in _MAKERS:
        raise ModelError(f"{PREFIX}model is {kind!r}; read are {', '.join(_MAKERS)}")
    tokens, types = _key(metadata, "tokens"), _key(metadata, "token_type")
    if len(tokens) != len(types):
        raise CheckpointError(f"{PREFIX}token_type has {len(types)} entries for {len(tokens)} tokens")
    ids = special_ids(metadata, kind)
    kept = read_pipeline(metadata)
    tokenizer = _MAKERS[kind](metadata, tokens, types, ids)
    tokenizer["model"].update(kept.get("model") or {})
    for stage in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if stage in kept:
            tokenizer[stage] = kept[stage]
    tokenizer["normalizer"] = with_charsmap(tokenizer["normalizer"], _charsmap(metadata))
    added = _added(tokens, types, kept.get("flags") or {})
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **tokenizer}
    return whole, _settings(metadata, tokens, ids)


def special_ids(metadata: Mapping[str, Any], kind: str) -> dict[str, int]:
    """Ids of the special tokens by role."""
    named = {role: metadata[PREFIX + key] for role, key in KEYS.items() if PREFIX + key in metadata}
    count = len(_key(metadata, "tokens"))
    found = {**_DEFAULT_IDS.get(kind, {}), **named}
    return {role: index for role, index in found.items() if 0 <= index < count}


def _bpe(metadata: Mapping[str, Any], tokens: list[str], types: list[int], ids: Mapping[str, int]) -> Json:
    name = metadata.get(PREFIX + "pre", "default")
    try:
        row = by_name(name)
    except SettingsError as error:
        raise ModelError(f"{PREFIX}pre is {name!r}, of which no rule is known here") from error
    bos = row.name in ("llama-bpe", "tekken") and name not in ("glm4", "glm5")
    level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return {
        "normalizer": {"type": "NFC"} if row.composed else None,
        "pre_tokenizer": pre_tokenizer(name),
        "post_processor": _around(metadata, tokens, ids, bos, False),
        "decoder": level,
        "model": _bpe_model(
            tokens,
            types,
            [_pair(merge) for merge in _key(metadata, "merges")],
            ignore_merges=row.ignore_merges,
        ),
    }


def _spm(metadata: Mapping[str, Any], tokens: list[str], types: list[int], ids: Mapping[str, int]) -> Json:
    score = dict(zip(tokens, _scores(metadata, tokens), strict=True))
    pieces = [token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL]
    prefix = bool(metadata.get(PREFIX + "add_space_prefix", True))
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    decoders = [_replace(SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    unknown = tokens[ids["unk"]] if "unk" in ids else None
    merges = merges_of(pieces, score)
    return {
        "normalizer": _sequence("normalizers", _spaces(prefix)),
        "pre_tokenizer": None,
        "post_processor": _around(metadata, tokens, ids, True, False),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe_model(tokens, types, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def _unigram(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], ids: Mapping[str, int]
) -> Json:
    scores = _scores(metadata, tokens)
    lowest = min(score for score, kind in zip(scores, types, strict=True) if kind == NORMAL)
    last = max(index for index, token in enumerate(tokens) if not _fills(token, types[index], index))
    vocabulary = [
        [token, lowest if types[index] == UNUSED else scores[index]]
        for index, token in enumerate(tokens[: last + 1])
    ]
    merged = bool(metadata.get(PREFIX + "remove_extra_whitespaces", False))
    prefix = bool(metadata.get(PREFIX + "add_space_prefix", False)) or merged
    compiled: list[Json] = (
        [{"type": "Precompiled", "precompiled_charsmap": None}] if _charsmap(metadata) else []
    )
    runs = [
        {"type": "Strip", "strip_left": True, "strip_right": True},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
    ]
    steps = [*compiled, *(runs if merged else []), *_spaces(prefix)]
    scheme = "always" if prefix else "never"
    return {
        "normalizer": _sequence("normalizers", steps),
        "pre_tokenizer": None,
        "post_processor": _around(metadata, tokens, ids, False, True),
        "decoder": {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": True},
        "model": {
            "type": "Unigram",
            "unk_id": ids.get("unk"),
            "vocab": vocabulary,
            "byte_fallback": False,
        },
    }


_MAKERS = {"gpt2": _bpe, "llama": _spm, "t5": _unigram}


def _bpe_model(tokens: list[str], types: list[int], merges: list[tuple[str, str]], **switches: Any) -> Json:
    vocabulary = {
        token: index for index, token in enumerate(tokens) if not _fills(token, types[index], index)
    }
    usual = {"unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {
        "type": "BPE",
        "dropout": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        **usual,
        **switches,
        "vocab": vocabulary,
        "merges": [list(pair) for pair in merges],
    }


def _added(tokens: list[str], types: list[int], flags: Mapping[str, list[str]]) -> list[Json]:
    """The added tokens of a tokenizer.json."""
    found = []
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind in (CONTROL, UNKNOWN, USER_DEFINED):
            set_ = flags.get(str(index), [])
            entry = {"id": index, "content": token, **{name: name in set_ for name in _FLAGS}}
            found.append({**entry, "special": kind != USER_DEFINED})
    return found


def _settings(metadata: Mapping[str, Any], tokens: list[str], ids: Mapping[str, int]) -> Json:
    """The content of tokenizer_config.json."""
    found: Json = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    roles = ("bos", "eos", "unk", "sep", "pad", "mask")
    found.update({f"{role}_token": tokens[ids[role]] for role in roles if role in ids})
    lengths = [value for key, value in metadata.items() if key.endswith(".context_length")]
    if lengths:
        found["model_max_length"] = int(lengths[0])
    main = metadata.get("tokenizer.chat_template")
    names = metadata.get("tokenizer.chat_templates") or []
    others = [{"name": name, "template": metadata[f"tokenizer.chat_template.{name}"]} for name in names]
    if others:
        found["chat_template"] = [{"name": "default", "template": main}] * (main is not None) + others
    elif main is not None:
        found["chat_template"] = main
    return found


def _around(
    metadata: Mapping[str, Any], tokens: list[str], ids: Mapping[str, int], bos: bool, eos: bool
) -> Json:
    """The post_processor that puts bos and eos around a text; the file first, then what is passed."""
    before = [tokens[ids["bos"]]] if metadata.get(PREFIX + "add_bos_token", bos) and "bos" in ids else []
    after = [tokens[ids["eos"]]] if metadata.get(PREFIX + "add_eos_token", eos) and "eos" in ids else []
    parts = {
        letter: [
            *({"SpecialToken": {"id": text, "type_id": place}} for text in before),
            {"Sequence": {"id": letter, "type_id": place}},
            *({"SpecialToken": {"id": text, "type_id": place}} for text in after),
        ]
        for place, letter in enumerate("AB")
    }
    named = {text: {"id": text, "ids": [tokens.index(text)], "tokens": [text]} for text in (*before, *after)}
    pair = parts["A"] + parts["B"]
    return {"type": "TemplateProcessing", "single": parts["A"], "pair": pair, "special_tokens": named}


def _spaces(prefix: bool) -> list[Json]:
    """A space before the text, and spaces as SentencePiece writes them."""
    return [*([{"type": "Prepend", "prepend": SPACE}] if prefix else []), _replace(" ", SPACE)]


def _replace(text: str, by: str) -> Json:
    return {"type": "Replace", "pattern": {"String": text}, "content": by}


def _sequence(name: str, steps: list[Json]) -> Json:
    return steps[0] if len(steps) == 1 else {"type": "Sequence", name: steps}


def _fills(token: str, kind: int, index: int) -> bool:
    return kind == UNUSED and token == pad_text(index)


def _pair(merge: str) -> tuple[str, str]:
    """A merge as llama.cpp reads it: cut at the first space that is not its first character."""
    cut = merge.find(" ", 1)
    if cut < 0:
        raise CheckpointError(f"{PREFIX}merges: {merge!r} is no pair")
    return merge[:cut], merge[cut + 1 :]


def _charsmap(metadata: Mapping[str, Any]) -> str | None:
    stored = metadata.get(PREFIX + "precompiled_charsmap")
    return base64.b64encode(bytes(byte & 255 for byte in stored)).decode() if stored else None


def _scores(metadata: Mapping[str, Any], tokens: list[str]) -> list[float]:
    scores = [float(score) for score in _key(metadata, "scores")]
    if len(scores) != len(tokens):
        raise CheckpointError(f"{PREFIX}scores has {len(scores)} entries for {len(tokens)} tokens")
    return scores


def _key(metadata: Mapping[str, Any], name: str) -> Any:
    if PREFIX + name not in metadata:
        raise CheckpointError(f"{PREFIX}{name} is missing", hint="the file holds no tokenizer, or is damaged")
    return metadata[PREFIX + name]
