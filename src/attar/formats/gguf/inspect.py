"""The types and the metadata of a GGUF file, for ``attar inspect``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from attar.checkpoint.open import Checkpoint
from attar.formats.gguf.container import GGUF, read_gguf
from attar.formats.gguf.open import card_of, model_file, model_name
from attar.formats.gguf.reader import METHOD, errors_name_file
from attar.formats.gguf.types import FILE_TYPES

LONG = 8  # elements of an array that are shown

SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
}
"""Keys of every architecture, and their names in a config."""


def open_unknown(path: Path) -> Checkpoint:
    """Open a file whose architecture or tokenizer attar does not know, for inspection: its config has only
    sizes, and it has no folder in the cache. Arguments and errors as
    :func:`attar.formats.gguf.open.open_gguf`."""
    opened = read_gguf(model_file(path))
    file, written = opened.files[0], str(opened.metadata["general.architecture"])
    with errors_name_file(file):
        sizes = {name: opened.metadata.get(f"{written}.{key}") for key, name in SIZES.items()}
        config = {name: value for name, value in sizes.items() if isinstance(value, int)}
        config["vocab_size"] = config.get("vocab_size", opened.tensors["token_embd.weight"].shape[0])
    return Checkpoint(
        path=file,
        name=model_name(file),
        config={
            "model_type": written,
            "architectures": [f"{written}ForCausalLM"],
            "dtype": "float16",
            **config,
            "tie_word_embeddings": "output.weight" not in opened.tensors,
            "quantization_config": {"quant_method": METHOD},
        },
        card=card_of(file),
        tensors={name: tensor.info for name, tensor in opened.tensors.items()},
    )


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Plain content: ``format``, ``version``, ``files``, ``file_type``, ``types`` and ``metadata``.

    Each entry of ``types`` has ``tensors``, ``parameters``, ``bytes`` and ``bits_per_weight``; an array of
    the metadata with more than a few elements is shown as ``kind`` and ``length``.

    Args:
        checkpoint: opened from a GGUF file.

    Raises:
        CheckpointError: the file has changed since.
    """
    opened = read_gguf(checkpoint.source)
    types = _types(opened)
    return {
        "format": "GGUF",
        "version": opened.version,
        "files": [str(file) for file in opened.files],
        "file_type": _file_type(opened, types),
        "types": types,
        "metadata": {key: _shown(opened, key) for key in opened.metadata},
    }


def _types(opened: GGUF) -> list[dict[str, Any]]:
    """One entry for each type, that with most bytes first."""
    sums: dict[str, list[int]] = {}
    for tensor in opened.tensors.values():
        total = sums.setdefault(tensor.kind, [0, 0, 0])
        for i, value in enumerate((1, math.prod(tensor.shape), tensor.nbytes)):
            total[i] += value
    return [
        {
            "type": kind,
            "tensors": tensors,
            "parameters": parameters,
            "bytes": nbytes,
            "bits_per_weight": 8 * nbytes / parameters,
        }
        for kind, (tensors, parameters, nbytes) in sorted(sums.items(), key=lambda item: -item[1][2])
    ]


def _file_type(opened: GGUF, types: list[dict[str, Any]]) -> str:
    """The name of the file's mix; without one, the type with most bytes."""
    number = opened.metadata.get("general.file_type")
    if number is None:
        return str(types[0]["type"]) if types else "none"
    names = {value: name for name, value in FILE_TYPES.items()}
    return names.get(number, f"file type {number}")


def _shown(opened: GGUF, key: str) -> Any:
    value = opened.metadata[key]
    if isinstance(value, list | bytes) and len(value) > LONG:
        return {"kind": opened.kinds[key], "length": len(value)}
    if opened.kinds[key] in ("f32", "[f32]"):
        short = [float(str(np.float32(number))) for number in np.atleast_1d(value)]
        return short if isinstance(value, list) else short[0]
    return value
