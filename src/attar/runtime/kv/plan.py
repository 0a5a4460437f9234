"""What a cache of keys and values would take, and what fits a budget: from a model's config alone.

Bytes are those of ``layout.py``: of the pool that would hold so many sequences of so many tokens, with its
constants and residuals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attar.errors import SettingsError
from attar.runtime.kv.layout import KV_FORMATS, LayerShape, block_bytes, cache_bytes, describe

FORMATS_SHOWN = tuple(KV_FORMATS)
LONGEST = 1 << 27  # tokens: beyond it a context counts as unbounded (windows in every layer)


@dataclass(frozen=True)
class CacheSize:
    """One size.

    Args:
        bytes: of ``batch`` sequences of ``context`` tokens.
        fits: whether that is within the budget; None without one.
    """

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
    """The table.

    Args:
        model: layers, heads and windows, in a line.
        token_bytes: of a token in all layers, by format; constants of a block are spread over its tokens.
        rooms: empty without a budget.
    """

    model: str
    block_size: int
    budget: int | None
    token_bytes: dict[str, float]
    cells: tuple[CacheSize, ...]
    rooms: tuple[LongestContext, ...]


def plan_kv(
    layers: Sequence[LayerShape],
    *,
    contexts: Sequence[int],
    batches: Sequence[int],
    kv_dtypes: Sequence[str] = FORMATS_SHOWN,
    budget: int | None = None,
    block_size: int = 32,
) -> KVPlan:
    """Every context with every batch in every format.

    Raises:
        SettingsError: a number below 1, or an unknown format.
    """
    sizes = {"context": contexts, "batch": batches, "block_size": [block_size], "budget": [budget or 1]}
    for name, values in sizes.items():
        for value in values:
            if value < 1:
                raise SettingsError(name, value, "at least 1")

    def cell(kv_dtype: str, context: int, batch: int) -> CacheSize:
        size = cache_bytes(layers, kv_dtype, context, batch, block_size)
        return CacheSize(kv_dtype, context, batch, size, None if budget is None else size <= budget)

    return KVPlan(
        describe(layers),
        block_size,
        budget,
        {name: block_bytes(layers, name, block_size) / block_size for name in kv_dtypes},
        tuple(cell(name, context, batch) for name in kv_dtypes for context in contexts for batch in batches),
        tuple(
            LongestContext(name, batch, longest(layers, name, batch, budget, block_size))
            for name in (kv_dtypes if budget is not None else ())
            for batch in batches
        ),
    )


def longest(
    layers: Sequence[LayerShape], kv_dtype: str, batch: int, budget: int | None, block_size: int
) -> int | None:
    """Tokens of the longest context that fits, in whole blocks; None: any."""
    low, high = 0, LONGEST // block_size  # blocks: the first fits, what is above the second does not count

    def fits(blocks: int) -> bool:
        size = cache_bytes(layers, kv_dtype, blocks * block_size, batch, block_size) if blocks else 0
        return size <= (budget or 0)

    if fits(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * block_size


def shown(plan: KVPlan) -> tuple[list[str], list[list[str]]]:
    """Header and rows for people: a row for each format, a column for each context and batch."""
    columns = list(dict.fromkeys((cell.context, cell.batch) for cell in plan.cells))
    head = ["KV", "bytes a token", *(f"{context:,} x {batch}" for context, batch in columns)]
    head += [f"longest x {batch}" for batch in dict.fromkeys(room.batch for room in plan.rooms)]
    rows = []
    for name, token_bytes in plan.token_bytes.items():
        sizes = [_size(cell) for cell in plan.cells if cell.kv_dtype == name]
        rooms = [_room(room) for room in plan.rooms if room.kv_dtype == name]
        rows.append([name, f"{token_bytes:,.0f}", *sizes, *rooms])
    return head, rows


def config_of(model: Any) -> dict[str, Any]:
    """The ``config.json`` of a model: of a checkpoint, of a folder with nothing else, or the file itself.

    Raises:
        CheckpointError: there is none.
    """
    from attar.checkpoint import open_checkpoint
    from attar.checkpoint.jsonfile import read_json
    from attar.checkpoint.paths import resolve

    if str(model).endswith(".json"):
        return dict(read_json(Path(model)))
    place = resolve(model)
    bare = place.is_dir() and (place / "config.json").is_file() and not any(place.glob("*.safetensors"))
    return dict(read_json(place / "config.json") if bare else open_checkpoint(model).config)


def _size(cell: CacheSize) -> str:
    small = cell.bytes < 2**30
    size = f"{cell.bytes / 2**20:.1f} MiB" if small else f"{cell.bytes / 2**30:.2f} GiB"
    return f"{size} !" if cell.fits is False else size


def _room(room: LongestContext) -> str:
    return "any" if room.context is None else f"{room.context:,}"
