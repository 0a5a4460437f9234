"""generation_config.json as metadata of a GGUF file, and back: the tokens that end a text, and how to sample.

    tokenizer.ggml.eos_token_id, eot_, eom_, fim_pad_, fim_rep_, fim_sep_    tokens that end a text
    tokenizer.ggml.suppress_tokens                                           tokens that are never sampled
    general.sampling.temp, top_k, top_p, min_p, penalty_repeat               sampling by default
    attar.generation_config    JSON: ``content``, the file as it was, and ``keys``, values of the keys above

A file of another writer ends a text where llama.cpp does: at the tokens of these keys, and at tokens with a
well-known text (``llama-vocab.cpp``, ``special_eog_ids``). With ``attar.generation_config`` the original file
is restored, unless one of the keys was changed since.

Source: llama.cpp ``src/llama-vocab.cpp``, ``common/common.cpp``, ``gguf-py/gguf/metadata.py``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from attar.errors import CheckpointError
from attar.formats.gguf.architecture import shortest
from attar.formats.gguf.tokenizer.special_tokens import (
    KNOWN_ENDS,
    NO_END_BESIDE,
    PREFIX,
    TEXT_ENDS,
    stored_ids,
)
from attar.formats.gguf.values import MetadataValue, TypedValue

KEY = "attar.generation_config"
SAMPLING = {
    "temperature": ("temp", "f32"),
    "top_k": ("top_k", "i32"),
    "top_p": ("top_p", "f32"),
    "min_p": ("min_p", "f32"),
    "repetition_penalty": ("penalty_repeat", "f32"),
}
"""Names in ``general.sampling.`` and types of transformers' sampling parameters."""
SUPPRESSED = f"{PREFIX}suppress_tokens"
ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")


def generation_metadata(
    content: Mapping[str, Any], ends: list[int], metadata: Mapping[str, MetadataValue]
) -> dict[str, MetadataValue]:
    """The keys of a generation config.

    Args:
        content: of generation_config.json, empty where there is none.
        ends: all tokens that end a text.
        metadata: the tokenizer's keys.
    """
    keys: dict[str, MetadataValue] = {
        f"general.sampling.{key}": TypedValue(kind, int(content[name]) if kind == "i32" else content[name])
        for name, (key, kind) in SAMPLING.items()
        if _is_number(content.get(name))
    }
    suppressed = content.get("suppress_tokens")
    if isinstance(suppressed, list) and suppressed and all(type(index) is int for index in suppressed):
        keys[SUPPRESSED] = TypedValue("[i32]", suppressed)
    restored = {**content, "eos_token_id": ends[0] if len(ends) == 1 else ends}
    kept = {"content": restored, "keys": _keys({**metadata, **keys})}
    return {**keys, KEY: json.dumps(kept, ensure_ascii=False, separators=(",", ":"))}


def generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The content of generation_config.json, empty where a file says nothing of it.

    Args:
        metadata: of the file, without types.

    Raises:
        CheckpointError: ``attar.generation_config`` is no JSON object with ``content`` and ``keys``.
    """
    kept = _kept(metadata)
    if kept is not None and kept["keys"] == _keys(metadata):
        return dict(kept["content"])
    ids, ends = stored_ids(metadata), end_tokens(metadata)
    config: dict[str, Any] = {f"{role}_token_id": ids[role] for role in ("bos", "pad") if role in ids}
    if ends:
        config["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    if isinstance(metadata.get(SUPPRESSED), list):
        config["suppress_tokens"] = metadata[SUPPRESSED]
    stated = {name: metadata.get(f"general.sampling.{key}") for name, (key, _) in SAMPLING.items()}
    sampling = {
        name: shortest(value) if isinstance(value, float) else value
        for name, value in stated.items()
        if _is_number(value)
    }
    if sampling:
        config |= {"do_sample": sampling.get("temperature", 1.0) > 0, **sampling}
    return config


def end_tokens(metadata: Mapping[str, Any]) -> list[int]:
    """The tokens at which llama.cpp ends a text, ``eos`` first.

    Args:
        metadata: of the file, without types.
    """
    ids, tokens = stored_ids(metadata), metadata.get(f"{PREFIX}tokens") or []
    named = [ids[role] for role in ENDS if role in ids]
    texts = [text for text in KNOWN_ENDS if "eot" not in ids or text in TEXT_ENDS]
    index_of = {text: index for index, text in enumerate(tokens) if text in texts}
    for others, text in NO_END_BESIDE:
        if any(all(other in index_of for other in group) for group in others):
            index_of.pop(text, None)
            named = [index for index in named if tokens[index] != text]
    return list(dict.fromkeys((*named, *sorted(index_of.values()))))


def _keys(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the keys that a generation config becomes, as JSON holds them; floats as float32."""
    names = [f"{PREFIX}{role}_token_id" for role in ENDS]
    names += [SUPPRESSED, *(f"general.sampling.{key}" for key, _ in SAMPLING.values())]
    values = {name: metadata[name] for name in names if name in metadata}
    bare = {name: getattr(value, "value", value) for name, value in values.items()}
    return {name: shortest(value) if isinstance(value, float) else value for name, value in bare.items()}


def _kept(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        kept = json.loads(metadata.get(KEY, "null"))
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{KEY}: not JSON: {error}") from error
    fields = ("content", "keys")
    if kept is not None and not (
        isinstance(kept, dict) and all(isinstance(kept.get(name), dict) for name in fields)
    ):
        raise CheckpointError(f"{KEY}: not a JSON object with {' and '.join(fields)}")
    return kept


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
