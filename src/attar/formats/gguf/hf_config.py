"""From a GGUF file's metadata and tensors to a config.json that transformers builds the same model from.

    config = hf_config(file.metadata, file.tensors, file.load)
    for placement in sources(config, file.tensors):
        tensor = placement.undo(file.load(placement.gguf))          under the name placement.stored

Files of llama.cpp's converter are read as well as attar's own. What a file does not say is taken as
llama.cpp takes it. ``llama`` stands for Llama and for Mistral: a file with a sliding window, or whose width
is no multiple of its heads (which Llama's config refuses), becomes a Mistral.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from attar.errors import CheckpointError, ModelError
from attar.formats.gguf.architectures import expected, query_scalar
from attar.formats.gguf.families import ARCHITECTURES, MISTRAL
from attar.formats.gguf.parts import Architecture
from attar.formats.gguf.placement import Placement
from attar.formats.gguf.rope import TENSORS, rope_config
from attar.formats.gguf.sizes import Sizes, key_of, shortest, usual_pattern

DAMAGED = "the file is incomplete or damaged; get it again"
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}


class ArchitectureMetadata:
    """The metadata of one architecture."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.written = str(metadata.get("general.architecture", ""))

    def get(self, key: str, otherwise: Any = None) -> Any:
        """The value of a key without the architecture's prefix; numbers in as few digits as float32 needs.

        Raises:
            CheckpointError: it is no finite number, where ``otherwise`` is one.
        """
        value = self.metadata.get(f"{self.written}.{key}", otherwise)
        number = isinstance(value, int | float) and math.isfinite(value)
        if isinstance(otherwise, int | float) and not number:
            said = f"{value!r}, not a number" if f"{self.written}.{key}" in self.metadata else "missing"
            raise CheckpointError(f"GGUF: {self.written}.{key} is {said}", hint=DAMAGED)
        return shortest(value) if isinstance(value, float) else value

    def whole(self, key: str, otherwise: int | None = None) -> int:
        """A whole number above 0.

        Raises:
            CheckpointError: it is missing, or differs from block to block.
        """
        value = self.metadata.get(f"{self.written}.{key}", otherwise)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if isinstance(value, list):
            raise CheckpointError(
                f"GGUF: {self.written}.{key} differs from block to block",
                hint="a config of transformers has one number for all",
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            said = "missing" if value is None else f"{value!r}, not a whole number above 0"
            raise CheckpointError(f"GGUF: {self.written}.{key} is {said}", hint=DAMAGED)
        return value


def hf_config(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Any],
    load: Callable[[str], Tensor] | None = None,
) -> dict[str, Any]:
    """The content of config.json.

    Args:
        metadata: of the file, by whole keys.
        tensors: by name; of each the ``shape`` (rows first) is read, and ``kind`` where it has one.
        load: reads a tensor; None: ``tensors`` holds the tensors themselves.

    Raises:
        ModelError: an architecture that attar does not know.
        CheckpointError: a key is missing, or has another value in each block.
    """
    keys = ArchitectureMetadata(metadata)
    found = _family(keys)
    measured = _sizes(keys, tensors)
    factors = {name: load(name) if load else tensors[name] for name in TENSORS if name in tensors}
    return {
        "model_type": found.family,
        "architectures": [found.model_class],
        "dtype": _dtype(tensors),
        **_numbers(keys, found, measured),
        "tie_word_embeddings": "output.weight" not in tensors,
        **{rule.key: rule.default for rule in found.rules if rule.allowed is not None},
        **_biases(found, tensors),
        **_extras(keys, found),
        **_window(keys, found, measured),
        **rope_config(keys.get, found, measured, factors),
        **_tokens(metadata),
    }


def _family(keys: ArchitectureMetadata) -> Architecture:
    """The family of a file."""
    known = {each.written: each for each in reversed(ARCHITECTURES.values())}
    if keys.written not in known:
        raise ModelError(
            f"attar cannot read GGUF's architecture {keys.written!r}",
            hint=f"it can read {', '.join(sorted(known))}",
        )
    if keys.written != MISTRAL.written:
        return known[keys.written]
    uneven = keys.whole("embedding_length") % keys.whole("attention.head_count")
    return MISTRAL if keys.get("attention.sliding_window") or uneven else known[keys.written]


def _sizes(keys: ArchitectureMetadata, tensors: Mapping[str, Any]) -> Sizes:
    hidden, heads = keys.whole("embedding_length"), keys.whole("attention.head_count")
    head = keys.whole("attention.key_length", hidden // heads)
    if keys.whole("attention.value_length", head) != head:
        raise CheckpointError(
            f"GGUF: {keys.written}.attention.value_length is not key_length",
            hint="a config of transformers has one width for keys and values",
        )
    if "token_embd.weight" not in tensors:
        raise CheckpointError("GGUF: there is no token_embd.weight", hint=DAMAGED)
    return Sizes(
        layers=keys.whole("block_count"),
        hidden=hidden,
        heads=heads,
        kv_heads=keys.whole("attention.head_count_kv", heads),
        head=head,
        ff=keys.whole("feed_forward_length"),
        vocabulary=int(tensors["token_embd.weight"].shape[0]),
        context=keys.whole("context_length"),
    )


def _numbers(keys: ArchitectureMetadata, found: Architecture, measured: Sizes) -> dict[str, Any]:
    """Sizes and epsilon, under the family's keys."""
    names = ["hidden", "layers", "heads", "ff", "vocabulary", "context"]
    names += ["kv_heads"] if found.grouped else []
    names += [] if found.square else ["head"]
    kind = "layer_norm" if found.layer_norm else "layer_norm_rms"
    epsilon = keys.get(f"attention.{kind}_epsilon", math.nan)
    said = {key_of(found, name): getattr(measured, name) for name in names}
    return said | {key_of(found, "epsilon"): float(epsilon)}


def _biases(found: Architecture, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that say which parts have a bias."""
    said = [part for part in found.blocks if isinstance(part.bias, str)]
    return {str(part.bias): f"{part.gguf.format(0)}.bias" in tensors for part in reversed(said)}


def _extras(keys: ArchitectureMetadata, found: Architecture) -> dict[str, Any]:
    return {source: keys.get(key, found.defaults.get(source)) for key, source in found.extras}


def _window(keys: ArchitectureMetadata, found: Architecture, measured: Sizes) -> dict[str, Any]:
    """Sliding windows, and the scale of queries that goes with them in Gemma."""
    tokens, marks = keys.get("attention.sliding_window", 0), keys.get("attention.sliding_window_pattern")
    if found.window == "all":
        return {"sliding_window": int(tokens) if tokens else None}
    if found.window == "marked":
        return _marked(int(tokens), marks) if tokens and isinstance(marks, list) else {}
    if found.window is None:
        return {}
    every = marks if isinstance(marks, int) and not isinstance(marks, bool) else int(found.window)
    blocks = marks if isinstance(marks, list) else usual_pattern(every, measured.layers)
    if found.family == "gemma3_text" and not tokens:
        blocks = [False] * measured.layers
    return {
        "sliding_window": int(tokens or found.defaults["sliding_window"]),
        "layer_types": _types(blocks),
        "query_pre_attn_scalar": query_scalar(found, measured),
    }


def _marked(tokens: int, marks: list[bool]) -> dict[str, Any]:
    said = {"use_sliding_window": True, "sliding_window": tokens, "max_window_layers": 0}
    return said | {"layer_types": _types(marks)}


def _types(blocks: list[bool]) -> list[str]:
    return ["sliding_attention" if marked else "full_attention" for marked in blocks]


def _tokens(metadata: Mapping[str, Any]) -> dict[str, Any]:
    said = {key: metadata.get(f"tokenizer.ggml.{name}_token_id") for name, key in TOKENS.items()}
    return {key: None if value is None else int(value) for key, value in said.items()}


def _dtype(tensors: Mapping[str, Any]) -> str:
    """The dtype of the matrices: float32 where all are, bfloat16 where one is, else float16."""
    kinds = [
        getattr(each, "kind", None) or str(each.dtype).removeprefix("torch.")
        for each in tensors.values()
        if len(each.shape) > 1
    ]
    names = [DTYPES.get(kind, kind) for kind in kinds]
    if all(name == "float32" for name in names):
        return "float32"
    return "bfloat16" if "bfloat16" in names else "float16"


def sources(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> list[Placement]:
    """The checkpoint's tensors and where they stand in the file, in the file's order.

    Args:
        config: of :func:`hf_config`.
        tensors: of the file, by name; of each the ``shape`` is read.

    Raises:
        CheckpointError: a tensor is missing, of another shape, or unknown; names it.
    """
    wanted = [each for each in expected(config) if each.stored is not None]
    for each in wanted:
        if each.gguf not in tensors:
            raise CheckpointError(f"GGUF: there is no tensor {each.gguf!r}", hint=DAMAGED)
        shape = tuple(tensors[each.gguf].shape)
        if shape != each.shape:
            raise CheckpointError(
                f"GGUF: tensor {each.gguf!r} is {list(shape)}, but must be {list(each.shape)}"
            )
    known = frozenset(each.gguf for each in wanted)
    for name in tensors:
        if name not in known and name not in TENSORS:
            raise CheckpointError(f"GGUF: tensor {name!r} has no place in a {config['model_type']}")
    return wanted
