"""A model's config as metadata of a GGUF file (``general.*`` and the architecture's keys), and back.

    metadata(config, "SmolLM2-135M")
    config = hf_config(file.metadata, file.tensors, file.load)
    for placement in file_placements(config, file.tensors):
        tensor = placement.undo(file.load(placement.gguf))          under the name placement.stored

The writer of a file adds the tokenizer's keys, ``general.file_type`` and ``general.quantization_version``.
Differs from llama.cpp's converter: widths of heads, size of the vocabulary, rotary settings and windows are
written for every family, also where its loader has the same default.

Files of llama.cpp's converter are read as well as attar's own; what a file leaves out has llama.cpp's
default. ``llama`` is the architecture of Llama and of Mistral: a file with a sliding window, or whose width
is no multiple of its heads (which Llama's config refuses), becomes a Mistral.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from attar.errors import CheckpointError, ModelError
from attar.formats.gguf.architecture import (
    Architecture,
    Sizes,
    SlidingWindow,
    key_of,
    number,
    shortest,
    sizes,
    usual_pattern,
    window,
)
from attar.formats.gguf.families import ARCHITECTURES, MISTRAL
from attar.formats.gguf.rope import TENSORS, read_rope, rope_config, rope_metadata
from attar.formats.gguf.tensor_map import Placement, architecture, expected_placements, query_scalar

DAMAGED = "the file is incomplete or damaged; get it again"
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}


def metadata(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """``general.*`` and the architecture's keys, in a fixed order.

    Args:
        name: ``general.name``.

    Raises:
        ModelError: as :func:`architecture`.
    """
    arch = architecture(config)
    measured = sizes(config, arch)
    count = sum(math.prod(placement.shape) for placement in expected_placements(config))
    general = {
        "general.architecture": arch.arch,
        "general.type": "model",
        "general.name": name,
        "general.size_label": size_label(count),
    }
    keys = _dimensions(arch, measured, float(number(config, arch, "epsilon")))
    rope = read_rope(config, arch, measured)
    if rope:
        keys |= rope_metadata(rope, arch, measured.context)
    keys |= _window_keys(arch, window(config, arch, measured.layers), measured.layers)
    for key, source in arch.extras:
        value = config.get(source, arch.defaults.get(source))
        if value is not None:
            keys[key] = value if isinstance(value, bool) else float(value)
    return general | {f"{arch.arch}.{key}": value for key, value in keys.items()}


def _dimensions(arch: Architecture, measured: Sizes, epsilon: float) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "block_count": measured.layers,
        "context_length": measured.context,
        "embedding_length": measured.hidden,
        "feed_forward_length": measured.ff,
        "attention.head_count": measured.heads,
        "attention.head_count_kv": measured.kv_heads,
        "attention.key_length": measured.head,
        "attention.value_length": measured.head,
        "vocab_size": measured.vocabulary,
    }
    name = "attention.layer_norm_epsilon" if arch.layer_norm else "attention.layer_norm_rms_epsilon"
    return keys | {name: epsilon}


def _window_keys(arch: Architecture, seen: SlidingWindow | None, layers: int) -> dict[str, Any]:
    """The window, and its blocks where llama.cpp assumes others."""
    if arch.window is None:
        return {}
    if seen is None:
        return {"attention.sliding_window": 0} if arch.family == "phi3" else {}
    keys: dict[str, Any] = {"attention.sliding_window": seen.tokens}
    usual = isinstance(arch.window, int) and list(seen.blocks) == usual_pattern(arch.window, layers)
    if arch.window != "all" and not usual:
        keys["attention.sliding_window_pattern"] = list(seen.blocks)
    return keys


def size_label(count: int) -> str:
    """A number of parameters with at least two digits: 1.1B, 135M."""
    powers = {"T": 12, "B": 9, "M": 6, "K": 3}
    letter = next((letter for letter, power in powers.items() if count > 10**power), "K")
    scaled = count / 10 ** powers[letter]
    digits = len(str(round(scaled)).lstrip("0"))
    return f"{scaled:.{max(2 - digits, 0)}f}{letter}"


def notes(config: Mapping[str, Any]) -> list[str]:
    """How llama.cpp computes differently from transformers with the file, in sentences."""
    arch = architecture(config)
    measured = sizes(config, arch)
    sentences = []
    seen = window(config, arch, measured.layers)
    if seen and not arch.window_applied and seen.tokens < measured.context:
        sentences.append(
            f"llama.cpp does not apply the sliding window: texts beyond {seen.tokens} tokens differ"
        )
    if config.get(arch.activation) == "gelu":
        sentences.append("llama.cpp computes gelu by its tanh approximation")
    rope = read_rope(config, arch, measured)
    if rope and rope.kind == "longrope":
        sentences.append(
            f"llama.cpp takes the long rope factors where a context over {rope.original} is allocated, "
            "transformers where the text is longer than that"
        )
    return sentences


class ArchitectureMetadata:
    """Checked access to the keys of a file's architecture, ``<architecture>.*``."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.arch = str(metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key without the architecture's prefix; floats with as few digits as float32 needs.

        Raises:
            CheckpointError: it is no finite number, but ``default`` is one.
        """
        value = self.metadata.get(f"{self.arch}.{key}", default)
        is_number = isinstance(value, int | float) and math.isfinite(value)
        if isinstance(default, int | float) and not is_number:
            problem = f"{value!r}, not a number" if f"{self.arch}.{key}" in self.metadata else "missing"
            raise CheckpointError(f"GGUF: {self.arch}.{key} is {problem}", hint=DAMAGED)
        return shortest(value) if isinstance(value, float) else value

    def positive(self, key: str, default: int | None = None) -> int:
        """A whole number above 0.

        Raises:
            CheckpointError: it is missing, or differs from block to block.
        """
        value = self.metadata.get(f"{self.arch}.{key}", default)
        if isinstance(value, list) and value and all(number == value[0] for number in value):
            value = value[0]
        if isinstance(value, list):
            raise CheckpointError(
                f"GGUF: {self.arch}.{key} differs from block to block",
                hint="a config of transformers has one number for all",
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            problem = "missing" if value is None else f"{value!r}, not a whole number above 0"
            raise CheckpointError(f"GGUF: {self.arch}.{key} is {problem}", hint=DAMAGED)
        return value


def hf_config(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Any],
    load: Callable[[str], Tensor] | None = None,
) -> dict[str, Any]:
    """The content of config.json.

    Args:
        tensors: by name, each with a ``shape`` (rows first) and perhaps a ``kind``.
        load: reads a tensor; None: ``tensors`` are the tensors themselves.

    Raises:
        ModelError: an architecture that attar does not know.
        CheckpointError: a key is missing, or has another value in each block.
    """
    keys = ArchitectureMetadata(metadata)
    arch = _family(keys)
    measured = _sizes(keys, tensors)
    factors = {name: load(name) if load else tensors[name] for name in TENSORS if name in tensors}
    return {
        "model_type": arch.family,
        "architectures": [arch.model_class],
        "dtype": _dtype(tensors),
        **_numbers(keys, arch, measured),
        "tie_word_embeddings": "output.weight" not in tensors,
        **{rule.key: rule.default for rule in arch.rules if rule.allowed is not None},
        **_biases(arch, tensors),
        **_extras(keys, arch),
        **_window(keys, arch, measured),
        **rope_config(keys.get, arch, measured, factors),
        **_tokens(metadata),
    }


def _family(keys: ArchitectureMetadata) -> Architecture:
    """The family of a file."""
    known = {family.arch: family for family in reversed(ARCHITECTURES.values())}
    if keys.arch not in known:
        raise ModelError(
            f"attar cannot read GGUF's architecture {keys.arch!r}",
            hint=f"it can read {', '.join(sorted(known))}",
        )
    if keys.arch != MISTRAL.arch:
        return known[keys.arch]
    uneven = keys.positive("embedding_length") % keys.positive("attention.head_count")
    return MISTRAL if keys.get("attention.sliding_window") or uneven else known[keys.arch]


def _sizes(keys: ArchitectureMetadata, tensors: Mapping[str, Any]) -> Sizes:
    hidden, heads = keys.positive("embedding_length"), keys.positive("attention.head_count")
    head = keys.positive("attention.key_length", hidden // heads)
    if keys.positive("attention.value_length", head) != head:
        raise CheckpointError(
            f"GGUF: {keys.arch}.attention.value_length is not key_length",
            hint="a config of transformers has one width for keys and values",
        )
    if "token_embd.weight" not in tensors:
        raise CheckpointError("GGUF: there is no token_embd.weight", hint=DAMAGED)
    return Sizes(
        layers=keys.positive("block_count"),
        hidden=hidden,
        heads=heads,
        kv_heads=keys.positive("attention.head_count_kv", heads),
        head=head,
        ff=keys.positive("feed_forward_length"),
        vocabulary=int(tensors["token_embd.weight"].shape[0]),
        context=keys.positive("context_length"),
    )


def _numbers(keys: ArchitectureMetadata, arch: Architecture, measured: Sizes) -> dict[str, Any]:
    """Sizes and epsilon, under the family's keys."""
    names = ["hidden", "layers", "heads", "ff", "vocabulary", "context"]
    names += ["kv_heads"] if arch.grouped else []
    names += [] if arch.square else ["head"]
    kind = "layer_norm" if arch.layer_norm else "layer_norm_rms"
    epsilon = keys.get(f"attention.{kind}_epsilon", math.nan)
    config = {key_of(arch, name): getattr(measured, name) for name in names}
    return config | {key_of(arch, "epsilon"): float(epsilon)}


def _biases(arch: Architecture, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that state which modules have a bias."""
    optional = [module for module in arch.blocks if isinstance(module.bias, str)]
    return {str(module.bias): f"{module.gguf.format(0)}.bias" in tensors for module in reversed(optional)}


def _extras(keys: ArchitectureMetadata, arch: Architecture) -> dict[str, Any]:
    return {source: keys.get(key, arch.defaults.get(source)) for key, source in arch.extras}


def _window(keys: ArchitectureMetadata, arch: Architecture, measured: Sizes) -> dict[str, Any]:
    """Sliding windows, and the scale of queries that goes with them in Gemma."""
    tokens, marks = keys.get("attention.sliding_window", 0), keys.get("attention.sliding_window_pattern")
    if arch.window == "all":
        return {"sliding_window": int(tokens) if tokens else None}
    if arch.window == "marked":
        return _marked(int(tokens), marks) if tokens and isinstance(marks, list) else {}
    if arch.window is None:
        return {}
    interval = marks if isinstance(marks, int) and not isinstance(marks, bool) else int(arch.window)
    blocks = marks if isinstance(marks, list) else usual_pattern(interval, measured.layers)
    if arch.family == "gemma3_text" and not tokens:
        blocks = [False] * measured.layers
    return {
        "sliding_window": int(tokens or arch.defaults["sliding_window"]),
        "layer_types": _types(blocks),
        "query_pre_attn_scalar": query_scalar(arch, measured),
    }


def _marked(tokens: int, marks: list[bool]) -> dict[str, Any]:
    config = {"use_sliding_window": True, "sliding_window": tokens, "max_window_layers": 0}
    return config | {"layer_types": _types(marks)}


def _types(blocks: list[bool]) -> list[str]:
    return ["sliding_attention" if marked else "full_attention" for marked in blocks]


def _tokens(metadata: Mapping[str, Any]) -> dict[str, Any]:
    ids = {key: metadata.get(f"tokenizer.ggml.{name}_token_id") for name, key in TOKENS.items()}
    return {key: None if index is None else int(index) for key, index in ids.items()}


def _dtype(tensors: Mapping[str, Any]) -> str:
    """The dtype of the matrices: float32 where all are, bfloat16 where one is, else float16."""
    kinds = [
        getattr(tensor, "kind", None) or str(tensor.dtype).removeprefix("torch.")
        for tensor in tensors.values()
        if len(tensor.shape) > 1
    ]
    names = [DTYPES.get(kind, kind) for kind in kinds]
    if all(name == "float32" for name in names):
        return "float32"
    return "bfloat16" if "bfloat16" in names else "float16"


def file_placements(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> list[Placement]:
    """The placements of the checkpoint's tensors, in the file's order.

    Args:
        config: of :func:`hf_config`.
        tensors: of the file, by name, placement with a ``shape``.

    Raises:
        CheckpointError: a tensor is missing, of another shape, or unknown; names it.
    """
    wanted = [placement for placement in expected_placements(config) if placement.stored is not None]
    for placement in wanted:
        if placement.gguf not in tensors:
            raise CheckpointError(f"GGUF: there is no tensor {placement.gguf!r}", hint=DAMAGED)
        shape = tuple(tensors[placement.gguf].shape)
        if shape != placement.shape:
            raise CheckpointError(
                f"GGUF: tensor {placement.gguf!r} is {list(shape)}, but must be {list(placement.shape)}"
            )
    known = frozenset(placement.gguf for placement in wanted)
    for name in tensors:
        if name not in known and name not in TENSORS:
            raise CheckpointError(f"GGUF: tensor {name!r} has no place in a {config['model_type']}")
    return wanted
