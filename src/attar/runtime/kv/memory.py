"""Bytes of a KV cache by context, batch and format, and what fits a budget: from a model's config alone.

    bytes of a block = sum over layers of 2 B h (d bits / 8) + constants        h kv heads of d numbers

MHA has as many kv heads as heads, GQA fewer, MQA one; nothing else changes. MLA (DeepSeek V2 and its
successors) keeps one latent and one rotated key of a token, B (rank + rope) numbers without the 2. Constants
come from ``kv/store``:

    int8, fp8    one float32 scale for each token and head
    int4         scale and minimum in float16 for each token and head; the layers that calibration chose int8
    kivi         scale and minimum in float16: keys for each channel and 32 tokens, values for each token and
                 32 channels; and the block that a sequence is filling, in float32 (the residual)

All layers share one block table, so a pool pays for layers with a sliding window as for the others, unless
every layer has one: then blocks before the widest window are released.

Checked against an example that is often given wrong: Llama-2-7B at 4,096 tokens in float16 takes 2 * 32 *
32 * 128 * 4096 * 2 = 2,147,483,648 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attar.checkpoint.companions import KV_BASIS
from attar.errors import CheckpointError, ModelError, SettingsError, nearest
from attar.runtime.kv.blocks import blocks_for

HINT = "quantize --kv-cache int4 writes it"
GROUP = 32  # tokens of a group of keys, channels of a group of values (KIVI)
LONGEST = 1 << 27  # tokens: beyond it a context counts as unbounded (windows in every layer)


@dataclass(frozen=True)
class KVFormat:
    """How a number is stored.

    Args:
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
    "int4": KVFormat(4, scale_bytes=4),
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
        latent: how many numbers at the end of a key are its value (MLA); 0: values are stored apart.
        int4: the format that it has with ``kv_dtype="int4"``.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    latent: int = 0
    int4: str = "int4"


@dataclass(frozen=True)
class CacheSize:
    """Bytes of ``batch`` sequences of ``context`` tokens; ``fits`` tells whether they are within the budget,
    None without one."""

    kv_dtype: str
    context: int
    batch: int
    bytes: int
    fits: bool | None


@dataclass(frozen=True)
class LongestContext:
    """The longest context of ``batch`` sequences within the budget, in tokens; None: any length."""

    kv_dtype: str
    batch: int
    context: int | None


@dataclass(frozen=True)
class KVPlan:
    """Every context with every batch in every format.

    Args:
        model: layers, heads and windows, in a line.
        token_bytes: of a token in all layers, by format; constants of a block are spread over its tokens, and
            hidden states are in it.
        rooms: the longest contexts; empty without a budget.
        hidden_bytes: of a token's hidden states, for a draft head.
        state_bytes: of a sequence's states in float32, in layers that carry them.
    """

    model: str
    block_size: int
    budget: int | None
    token_bytes: dict[str, float]
    cells: tuple[CacheSize, ...]
    rooms: tuple[LongestContext, ...]
    hidden_bytes: int = 0
    state_bytes: int = 0


def plan_kv(
    layers: Sequence[LayerShape],
    *,
    contexts: Sequence[int],
    batches: Sequence[int],
    kv_dtypes: Sequence[str] = (),
    budget: int | None = None,
    block_size: int = 32,
    hidden_bytes: int = 0,
    state_bytes: int = 0,
) -> KVPlan:
    """The sizes.

    Args:
        state_bytes: of a sequence's states; a step holds those before and after it.
        kv_dtypes: formats; empty: all that the layers can have.
        hidden_bytes: of a token's hidden states, which are kept where its keys and values are.

    Raises:
        SettingsError: a number below 1, or an unknown format.
    """
    kv_dtypes = kv_dtypes or formats_of(layers)
    sizes = {"context": contexts, "batch": batches, "block_size": [block_size], "budget": [budget or 1]}
    for name, values in sizes.items():
        for value in values:
            if value < 1:
                raise SettingsError(name, value, "at least 1")

    def cell(kv_dtype: str, context: int, batch: int) -> CacheSize:
        size = cache_bytes(layers, kv_dtype, context, batch, block_size, hidden_bytes)
        size += 2 * batch * state_bytes
        return CacheSize(kv_dtype, context, batch, size, None if budget is None else size <= budget)

    def of_cache(batch: int) -> int:
        return (budget or 0) - 2 * batch * state_bytes

    return KVPlan(
        describe_layers(layers),
        block_size,
        budget,
        {name: block_bytes(layers, name, block_size) / block_size + hidden_bytes for name in kv_dtypes},
        tuple(cell(name, context, batch) for name in kv_dtypes for context in contexts for batch in batches),
        tuple(
            LongestContext(
                name, batch, longest_context(layers, name, batch, of_cache(batch), block_size, hidden_bytes)
            )
            for name in (kv_dtypes if budget is not None else ())
            for batch in batches
        ),
        hidden_bytes,
        state_bytes,
    )


def longest_context(
    layers: Sequence[LayerShape],
    kv_dtype: str,
    batch: int,
    budget: int | None,
    block_size: int,
    hidden_bytes: int = 0,
) -> int | None:
    """Tokens of the longest context that fits, in whole blocks; None: any."""
    low, high = 0, LONGEST // block_size  # blocks: ``low`` fits, ``high`` does not

    def fits(blocks: int) -> bool:
        context = blocks * block_size
        size = cache_bytes(layers, kv_dtype, context, batch, block_size, hidden_bytes) if blocks else 0
        return size <= (budget or 0)

    if fits(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * block_size


def plan_table(plan: KVPlan) -> tuple[list[str], list[list[str]]]:
    """Header and rows for display: a row for each format, a column for each context and batch."""
    columns = list(dict.fromkeys((cell.context, cell.batch) for cell in plan.cells))
    head = ["KV", "bytes a token", *(f"{context:,} x {batch}" for context, batch in columns)]
    head += [f"longest x {batch}" for batch in dict.fromkeys(room.batch for room in plan.rooms)]
    rows = []
    for name, token_bytes in plan.token_bytes.items():
        sizes = [_size_text(cell) for cell in plan.cells if cell.kv_dtype == name]
        longest = [room.context for room in plan.rooms if room.kv_dtype == name]
        contexts = ["any" if context is None else f"{context:,}" for context in longest]
        rows.append([name, f"{token_bytes:,.0f}", *sizes, *contexts])
    return head, rows


def _size_text(cell: CacheSize) -> str:
    small = cell.bytes < 2**30
    size = f"{cell.bytes / 2**20:.1f} MiB" if small else f"{cell.bytes / 2**30:.2f} GiB"
    return f"{size} !" if cell.fits is False else size


def config_path(model: Any) -> Path:
    """The folder of a model, or its ``config.json`` alone, as it was named."""
    from attar.checkpoint.paths import resolve

    return Path(model) if str(model).endswith(".json") else resolve(model)


def read_config(model: Any) -> dict[str, Any]:
    """The ``config.json`` of a model: of a checkpoint, of a folder with nothing else, or the file itself.

    Raises:
        CheckpointError: there is none.
    """
    from attar.checkpoint import open_checkpoint
    from attar.checkpoint.jsonfile import read_json

    path = config_path(model)
    if path.suffix == ".json":
        return dict(read_json(path))
    bare = path.is_dir() and (path / "config.json").is_file() and not any(path.glob("*.safetensors"))
    return dict(read_json(path / "config.json") if bare else open_checkpoint(model).config)


def read_formats(folder: Path, layers: int) -> tuple[str, ...]:
    """The format of each layer with ``kv_dtype="int4"``, by a checkpoint's ``attar-kv.json``; empty: int4.

    Raises:
        CheckpointError: the file names other formats, or those of another number of layers.
    """
    from attar.checkpoint.jsonfile import read_json

    path = folder / KV_BASIS
    formats = read_json(path).get("formats") if path.is_file() else None
    if formats in (None, ["int4"] * layers):
        return ()
    known = isinstance(formats, list) and all(name in ("int4", "int8") for name in formats)
    if not known or len(formats) != layers:
        raise CheckpointError(f"{path}: formats are not int4 or int8 for each of {layers} layers", hint=HINT)
    return tuple(formats)


def with_formats(layers: Sequence[LayerShape], folder: Path) -> tuple[LayerShape, ...]:
    """The layers with what :func:`read_formats` says of them."""
    formats = read_formats(folder, len(layers)) or ("int4",) * len(layers)
    return tuple(replace(layer, int4=name) for layer, name in zip(layers, formats, strict=True))


def layer_shapes(config: Mapping[str, Any]) -> tuple[LayerShape, ...]:
    """The layers of a model, from its ``config.json``.

    Raises:
        ModelError: a field is missing, or a layer keeps something other than keys and values for each head.
    """
    config = config.get("text_config") or config
    layers = _number(config, _LAYERS)
    if config.get("kv_lora_rank"):
        rank, rope = (_number(config, (name,)) for name in ("kv_lora_rank", "qk_rope_head_dim"))
        return tuple(LayerShape(1, rope + rank, window, rank) for window in _windows(config, layers))
    heads = _number(config, _HEADS)
    head_dim = config.get("head_dim") or _number(config, _WIDTH) // heads
    kv_heads = _kv_heads(config, heads)
    return tuple(LayerShape(kv_heads, head_dim, window) for window in _windows(config, layers))


def formats_of(layers: Sequence[LayerShape]) -> tuple[str, ...]:
    """The formats that all layers can have: KIVI has no latents. Without layers, formats do not differ."""
    latent = any(layer.latent for layer in layers)
    if not layers:
        return ("float32",)
    return tuple(name for name, kind in KV_FORMATS.items() if not (latent and kind.pair_bytes))


def block_bytes(layers: Sequence[LayerShape], kv_dtype: str, block_size: int) -> int:
    """Bytes of one block of the pool, all layers, constants included.

    Raises:
        SettingsError: the format is not known, or does not have the layers.
    """
    return sum(
        _layer_bytes(layer, _format(layer.int4 if kv_dtype == "int4" else kv_dtype), block_size)
        for layer in layers
    )


def residual_bytes(layers: Sequence[LayerShape], kv_dtype: str, block_size: int) -> int:
    """Bytes in addition to the pool for each running sequence: KIVI's block in float32; 0 for all others."""
    if not _format(kv_dtype).pair_bytes:
        return 0
    return sum(2 * block_size * layer.kv_heads * layer.head_dim * 4 for layer in layers)


def cache_bytes(
    layers: Sequence[LayerShape],
    kv_dtype: str,
    context: int,
    batch: int = 1,
    block_size: int = 16,
    hidden_bytes: int = 0,
) -> int:
    """Bytes that a pool needs for ``batch`` sequences of ``context`` tokens, ``hidden_bytes`` a token more.

    Where every layer has a window, a sequence holds the blocks of the widest one and the block being filled.
    """
    blocks = blocks_for(context, block_size)
    if layers and all(layer.window for layer in layers):
        blocks = min(blocks, blocks_for(max(layer.window or 0 for layer in layers), block_size) + 1)
    in_pool = blocks * (block_bytes(layers, kv_dtype, block_size) + block_size * hidden_bytes)
    return batch * (in_pool + residual_bytes(layers, kv_dtype, block_size))


def describe_layers(layers: Sequence[LayerShape]) -> str:
    """One line: layers, heads, windows, bytes of a token in bfloat16."""
    if not layers:
        return "no layers with keys and values"
    windowed = [layer.window for layer in layers if layer.window]
    shapes = sorted({(layer.kv_heads, layer.head_dim) for layer in layers})
    kind = "latents" if any(layer.latent for layer in layers) else "kv heads"
    of_heads = ", ".join(f"{heads} {kind} of {dim}" for heads, dim in shapes)
    of_windows = f", {len(windowed)} with a window of {max(windowed):,}" if windowed else ""
    token = block_bytes(layers, "bfloat16", 1)
    return f"{len(layers)} layers{of_windows}, {of_heads}: {token:,} bytes a token in bfloat16"


_LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_WIDTH = ("hidden_size", "n_embd", "d_model")
_SUPPORTED_LAYERS = ("full_attention", "sliding_attention")


def _format(name: str) -> KVFormat:
    if name not in KV_FORMATS:
        close = nearest(name, KV_FORMATS)
        hint = f" (did you mean {close}?)" if close else ""
        raise SettingsError("kv_dtype", name, f"one of {', '.join(KV_FORMATS)}{hint}")
    return KV_FORMATS[name]


def _layer_bytes(layer: LayerShape, kv_format: KVFormat, block_size: int) -> int:
    rows, d = block_size * layer.kv_heads, layer.head_dim
    numbers = (1 if layer.latent else 2) * rows * (d * kv_format.bits // 8 + kv_format.scale_bytes)
    if not kv_format.pair_bytes:
        return numbers
    if layer.latent:
        raise SettingsError("kv_dtype", "kivi", f"one of {', '.join(formats_of([layer]))} for latents (MLA)")
    keys = blocks_for(block_size, GROUP) * layer.kv_heads * d * kv_format.pair_bytes
    values = rows * (d // math.gcd(d, GROUP)) * kv_format.pair_bytes
    return numbers + keys + values


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
    others = [kind for kind in kinds if kind not in _SUPPORTED_LAYERS]
    if others:
        raise ModelError(f"layer_types: a layer of {others[0]!r} keeps no keys and values for each token")
    return [window if kind == "sliding_attention" else None for kind in kinds]
