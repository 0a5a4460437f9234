"""How many bytes keys and values take: context x batch x format, before anything is loaded.

    bytes of a block = sum over layers of 2 B h (d bits / 8) + constants        h kv heads, d numbers of a
    head

MHA has as many kv heads as heads, GQA fewer, MQA one; nothing else changes. Constants are those of
``kv/store``:

    int8, fp8    one float32 scale for each token and head
    kivi         scale and minimum in float16: keys for each channel and 32 tokens, values for each token
    and 32
                 channels; and the block that a sequence is filling, in float32 (the residual)

All layers share one block table, so a pool pays for layers with a sliding window like for the others,
unless every layer has one: then blocks behind the widest window are given back. ``needed`` says what the
layers would need each for itself.

Checked against the example that is often given wrong: Llama-2-7B at 4,096 tokens in float16 takes 2 * 32 *
32 * 128 * 4096 * 2 = 2,147,483,648 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attar.errors import ModelError, SettingsError, nearest
from attar.runtime.kv.blocks import blocks_for

GROUP = 32  # tokens of a group of keys, channels of a group of values (KIVI)


@dataclass(frozen=True)
class KVFormat:
    """How a number is kept.

    Args:
        bits: of a number.
        scale_bytes: for each token and head.
        pair_bytes: of a group's scale and minimum (KIVI); 0: no groups.
    """

    bits: int
    scale_bytes: int = 0
    pair_bytes: int = 0


KV_FORMATS = {
    "float32": KVFormat(32),
    "bfloat16": KVFormat(16),
    "float16": KVFormat(16),
    "int8": KVFormat(8, scale_bytes=4),
    "fp8": KVFormat(8, scale_bytes=4),
    "kivi4": KVFormat(4, pair_bytes=4),
    "kivi2": KVFormat(2, pair_bytes=4),
}


@dataclass(frozen=True)
class LayerShape:
    """One layer's keys and values.

    Args:
        kv_heads: h.
        head_dim: d.
        window: tokens it looks back at; None: all.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None


def format_of(name: str) -> KVFormat:
    """The format of a name.

    Raises:
        SettingsError: the name is not known.
    """
    if name not in KV_FORMATS:
        close = nearest(name, KV_FORMATS)
        wish = f" (did you mean {close}?)" if close else ""
        raise SettingsError("kv_dtype", name, f"one of {', '.join(KV_FORMATS)}{wish}")
    return KV_FORMATS[name]


def layer_shapes(config: Mapping[str, Any]) -> tuple[LayerShape, ...]:
    """The layers of a model, from its ``config.json``.

    Raises:
        ModelError: a field is missing, or a layer keeps something other than keys and values for each head.
    """
    config = config.get("text_config") or config
    if config.get("kv_lora_rank"):
        raise ModelError(
            "kv_lora_rank: the model keeps keys and values compressed, which the pool does not do"
        )
    layers, heads = _number(config, _LAYERS), _number(config, _HEADS)
    head_dim = config.get("head_dim") or _number(config, _WIDTH) // heads
    kv_heads = _kv_heads(config, heads)
    return tuple(LayerShape(kv_heads, head_dim, window) for window in _windows(config, layers))


def block_bytes(layers: Sequence[LayerShape], kv_dtype: str, block_size: int) -> int:
    """Bytes of one block of the pool, all layers, constants included."""
    return sum(_layer_bytes(layer, format_of(kv_dtype), block_size) for layer in layers)


def residual_bytes(layers: Sequence[LayerShape], kv_dtype: str, block_size: int) -> int:
    """Bytes beside the pool for each running sequence: KIVI's block in float32; 0 for all others."""
    if not format_of(kv_dtype).pair_bytes:
        return 0
    return sum(2 * block_size * layer.kv_heads * layer.head_dim * 4 for layer in layers)


def cache_bytes(
    layers: Sequence[LayerShape], kv_dtype: str, context: int, batch: int = 1, block_size: int = 16
) -> int:
    """Bytes that a pool needs for ``batch`` sequences of ``context`` tokens.

    Where every layer has a window, a sequence holds the blocks of the widest one and the block being filled.
    """
    blocks = blocks_for(context, block_size)
    if layers and all(layer.window for layer in layers):
        blocks = min(blocks, blocks_for(max(layer.window or 0 for layer in layers), block_size) + 1)
    each = blocks * block_bytes(layers, kv_dtype, block_size) + residual_bytes(layers, kv_dtype, block_size)
    return batch * each


def needed_bytes(
    layers: Sequence[LayerShape], kv_dtype: str, context: int, batch: int = 1, block_size: int = 16
) -> int:
    """As ``cache_bytes``, if each layer held only the blocks of its own window."""
    return sum(cache_bytes([layer], kv_dtype, context, batch, block_size) for layer in layers)


def blocks_within(layers: Sequence[LayerShape], kv_dtype: str, block_size: int, budget_bytes: int) -> int:
    """Blocks of a pool that stays within a budget.

    Raises:
        SettingsError: not even one block fits.
    """
    each = block_bytes(layers, kv_dtype, block_size)
    if budget_bytes < each:
        raise SettingsError("the memory of the cache", budget_bytes, f"at least {each:,} bytes, one block")
    return budget_bytes // each


def table(
    layers: Sequence[LayerShape],
    contexts: Sequence[int] = (1024, 4096, 32768),
    batches: Sequence[int] = (1, 8),
    kv_dtypes: Sequence[str] = tuple(KV_FORMATS),
    block_size: int = 32,
) -> str:
    """For people: what the model is, and GiB, a line for each format, a column for each context and batch."""
    head = ["KV cache, GiB", *(f"{context:,} x {batch}" for context in contexts for batch in batches)]
    rows = [head]
    for name in kv_dtypes:
        sizes = [cache_bytes(layers, name, c, b, block_size) for c in contexts for b in batches]
        rows.append([name, *(f"{size / 2**30:.3f}" for size in sizes)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(pairs)
        ).rstrip()
        for pairs in ([*zip(row, widths, strict=True)] for row in rows)
    ]
    return "\n".join([describe(layers), *lines])


def describe(layers: Sequence[LayerShape]) -> str:
    """One line: layers, heads, windows, bytes of a token in bfloat16."""
    windowed = [layer.window for layer in layers if layer.window]
    shapes = sorted({(layer.kv_heads, layer.head_dim) for layer in layers})
    of_heads = ", ".join(f"{heads} kv heads of {dim}" for heads, dim in shapes)
    of_windows = f", {len(windowed)} with a window of {max(windowed):,}" if windowed else ""
    token = block_bytes(layers, "bfloat16", 1)
    return f"{len(layers)} layers{of_windows}, {of_heads}: {token:,} bytes a token in bfloat16"


_LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_WIDTH = ("hidden_size", "n_embd", "d_model")
_PLAIN = ("full_attention", "sliding_attention")


def _layer_bytes(layer: LayerShape, kept: KVFormat, block_size: int) -> int:
    rows, d = block_size * layer.kv_heads, layer.head_dim
    plain = 2 * rows * (d * kept.bits // 8 + kept.scale_bytes)
    if not kept.pair_bytes:
        return plain
    keys = blocks_for(block_size, GROUP) * layer.kv_heads * d * kept.pair_bytes
    values = rows * (d // math.gcd(d, GROUP)) * kept.pair_bytes
    return plain + keys + values


def _number(config: Mapping[str, Any], names: Sequence[str]) -> int:
    for name in names:
        if config.get(name):
            return int(config[name])
    raise ModelError(f"the model's config has no {' or '.join(names)}")


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return int(config.get("num_key_value_heads") or config.get("num_kv_heads") or heads)


def _windows(config: Mapping[str, Any], layers: int) -> list[int | None]:
    """Each layer's window; ``layer_types`` decides where a config has them."""
    kinds = config.get("layer_types")
    window = config.get("sliding_window")
    if kinds is None:
        return [window if config.get("use_sliding_window", True) else None] * layers
    strange = [kind for kind in kinds if kind not in _PLAIN]
    if strange:
        raise ModelError(f"layer_types: a layer of {strange[0]!r} keeps no keys and values for each token")
    return [window if kind == "sliding_attention" else None for kind in kinds]
