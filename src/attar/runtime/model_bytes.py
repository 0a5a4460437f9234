"""Bytes that a model takes in memory while it is served, estimated from its headers: weights, cache, states.

    compiled   2 bytes a number of a dense Linear and of the embedding, which a tied head has once more;
               Linears as codes: 4 or 8 bits a number, and at most 2 for scale and zero point
    modules    numbers of the dtype; Linears as codes as above, those of other grids as they are stored
    cache      as the runner allocates it (``kv/memory.py``), with the hidden states that embeddings read
    states     of the sequences that run, before and after a step, and of all snapshots

Norms and biases are counted like other dense numbers. What a step needs besides is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from attar.checkpoint import Checkpoint
from attar.formats import readers
from attar.formats.readers import Decoded
from attar.kernels.decode import TILE
from attar.kernels.memory import PAGE
from attar.models.loading.device import pick_device
from attar.runtime.encoder import is_encoder
from attar.runtime.kv.blocks import blocks_for
from attar.runtime.kv.hidden_pool import HiddenPool
from attar.runtime.kv.memory import LayerShape, block_bytes, with_formats
from attar.runtime.loading import pool_tokens, torch_dtype
from attar.runtime.runner.choice import RunnerSettings, why_not_compiled
from attar.runtime.runner.compiled_weights import EMBEDDING, HEAD
from attar.runtime.runner.kept_shapes import kept_shapes, states_in_memory

_INTEGER_GRIDS = ("compressed-tensors", "gguf", "gptq", "awq", "mlx")
_CODES = {4: 0.75, 8: 1.25}  # bytes a number, with scale and zero point of a group of 16
_STORED = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def model_bytes(
    checkpoint: Checkpoint,
    *,
    embeddings: bool = False,
    sequences: int = 1,
    prefix_cache: bool | None = None,
    **options: Any,
) -> int:
    """The estimate.

    Args:
        embeddings: the final hidden states of prompts are kept.
        sequences: that run together.
        prefix_cache: of :class:`attar.runtime.llm.LLM`.
        options: fields of :class:`attar.runtime.runner.choice.RunnerSettings`.

    Raises:
        ModelError: the runtime does not run such a model, or it is of an unknown layout.
    """
    if is_encoder(checkpoint.config):
        return 4 * sum(math.prod(info.shape) for info in Decoded(checkpoint).tensors.values())
    settings = RunnerSettings(**options)
    compiled = not why_not_compiled(checkpoint, settings)
    dtype = torch_dtype(settings.dtype, settings.device)
    layers, state_bytes = kept_shapes(checkpoint.config, dtype)
    layers = with_formats(layers, checkpoint.path)
    cache = _cache(checkpoint, settings, layers, compiled, embeddings)
    states = states_in_memory(state_bytes, sequences, prefix_cache=prefix_cache)
    return _weights(checkpoint, settings, compiled) + cache + states


def _weights(checkpoint: Checkpoint, settings: RunnerSettings, compiled: bool) -> int:
    view, total = Decoded(checkpoint), 0.0
    dense = 2.0 if compiled else float(_itemsize(settings, view))
    integers = settings.dtype in ("auto", "bfloat16") and _integer_grid(checkpoint)
    for name, info in view.tensors.items():
        count = math.prod(info.shape)
        if view.is_coded(name) and integers and len(info.shape) == 2:
            total += count * _CODES[_bits(checkpoint.tensors[info.stored], count)]
        elif compiled and view.is_coded(name) and len(info.shape) == 3:  # experts in MXFP4
            total += count * _CODES[8]
        elif settings.weights and len(info.shape) == 2 and name != EMBEDDING:
            total += count * _CODES[int(settings.weights.removeprefix("int"))]
        else:
            total += count * dense
    if compiled and EMBEDDING in view.tensors and HEAD not in view.tensors:
        rows = math.prod(view.tensors[EMBEDDING].shape)
        total += rows * (_CODES[int(settings.weights.removeprefix("int"))] if settings.weights else 2.0)
    return int(total)


def _cache(
    checkpoint: Checkpoint,
    settings: RunnerSettings,
    layers: tuple[LayerShape, ...],
    compiled: bool,
    embeddings: bool,
) -> int:
    """Of the whole pool, which is allocated at once."""
    config = checkpoint.config.get("text_config") or checkpoint.config
    if compiled:
        layers = tuple(replace(layer, head_dim=blocks_for(layer.head_dim, TILE) * TILE) for layer in layers)
    dense = "bfloat16" if compiled else _dtype_name(settings, Decoded(checkpoint))
    kv_dtype = dense if settings.kv_dtype == "auto" else settings.kv_dtype
    size = settings.block_size
    kept = len(settings.hidden_layers) + embeddings
    hidden = HiddenPool.token_bytes(kept, _width(config)) if kept else 0
    token_bytes = block_bytes(layers, kv_dtype, size) // size + hidden
    tokens = settings.kv_tokens or pool_tokens(token_bytes, config.get("max_position_embeddings"))
    total = blocks_for(tokens, size) * size * token_bytes
    return blocks_for(total, PAGE) * PAGE if compiled else total


def _width(config: Mapping[str, Any]) -> int:
    return int(config.get("hidden_size") or config.get("n_embd") or config.get("d_model") or 0)


def _integer_grid(checkpoint: Checkpoint) -> bool:
    """Whether the codes of a quantized checkpoint stay codes in memory."""
    method = readers.quant_method(checkpoint)
    stated = checkpoint.config.get("quantization_config") or {}
    if method != "compressed-tensors":
        return method in _INTEGER_GRIDS and stated.get("mode") != "mxfp8"
    groups = stated.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values() if isinstance(group, dict)]
    return all(grid.get("type", "int") == "int" for grid in weights)


def _bits(stored: Any, count: int) -> int:
    """4 or 8, from the bytes of the codes: a group's scales may be among them."""
    return 4 if 8 * stored.nbytes / count <= 5 else 8


def _dtype_name(settings: RunnerSettings, view: Decoded) -> str:
    dtype = torch_dtype(settings.dtype, settings.device)
    if dtype is not None:
        return str(dtype).removeprefix("torch.")
    assert pick_device(settings.device).type != "cpu", "a CPU computes in float32 by default"
    return {2: "bfloat16", 4: "float32", 8: "float32"}[_widest(view)]


def _itemsize(settings: RunnerSettings, view: Decoded) -> int:
    return 4 if _dtype_name(settings, view) == "float32" else 2


def _widest(view: Decoded) -> int:
    return max((_STORED.get(info.dtype, 2) for info in view.tensors.values()), default=2)
