"""Where a grid applies: which tensors of a checkpoint are quantized, on which grid, and what the format's
config says of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from attar.errors import ModelError, SettingsError
from attar.models.anatomy import discover, is_linear
from attar.models.load import empty_model
from attar.models.names import stored_names
from attar.quantization.grids import IntGrid
from attar.quantization.settings import SCHEMES, QuantizeSettings

FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Site:
    """A Linear that will be quantized.

    Attributes:
        module: its name in the module tree.
        shape: (N, K).
        transposed: stored as (K, N), as Conv1D does.
        grid: the number format, its scales in the type of the stored weight.
    """

    module: str
    shape: tuple[int, int]
    transposed: bool
    grid: IntGrid


@dataclass(frozen=True)
class Plan:
    """What a scheme does to a checkpoint.

    Attributes:
        sites: by the name of the stored weight, in file order.
        embedding: name of the stored embedding that becomes int8, or None.
        tied_head: module name of the head that shares it, or None.
        ignore: Linears that stay dense.
        config: the ``quantization_config`` of the result.
    """

    sites: dict[str, Site]
    embedding: str | None
    tied_head: str | None
    ignore: tuple[str, ...]
    config: dict[str, Any]


def plan(checkpoint: Any, settings: QuantizeSettings) -> Plan:
    """Decide what happens to each tensor. Reads headers only.

    Raises:
        ModelError: the checkpoint is quantized already, or nothing in it can be.
        SettingsError: the group size does not divide a layer's inputs.
    """
    from attar.formats.compressed_tensors import quantization_config

    if checkpoint.config.get("quantization_config"):
        raise ModelError(
            f"{checkpoint.path} is quantized already", hint="start from the dense model it was made from"
        )
    model = empty_model(checkpoint.config)
    anatomy = discover(model)
    names = stored_names(model, checkpoint)
    modules = [
        name for block in anatomy.blocks for name in block.linears if not _ignored(name, settings.ignore)
    ]
    if not modules:
        raise ModelError(f"{checkpoint.path}: every Linear is ignored", hint="ignore fewer modules")
    shapes = {name: _shape(model, name) for name in modules}
    size = group_size(shapes, settings.group_size)
    sites: dict[str, Site] = {}
    for module in modules:
        stored = names[f"{module}.weight"]
        storage = FLOATS.get(checkpoint.tensors[stored].dtype, torch.float32)
        transposed = not isinstance(model.get_submodule(module), nn.Linear)
        grid = IntGrid(SCHEMES[settings.scheme], size, storage=storage)
        sites[stored] = Site(module, shapes[module], transposed, grid)
    order = {name: place for place, name in enumerate(checkpoint.tensors)}
    sites = {name: sites[name] for name in sorted(sites, key=order.__getitem__)}
    embedding = names[f"{anatomy.embedding}.weight"] if settings.embedding_bits else None
    tied = anatomy.head if embedding and anatomy.tied else None
    ignore = tuple(name for name, module in model.named_modules() if is_linear(module) and name not in shapes)
    config = quantization_config(
        bits=SCHEMES[settings.scheme],
        group_size=size,
        ignore=ignore,
        embedding=embedding is not None,
        tied_head=tied,
        transposed=any(site.transposed for site in sites.values()),
    )
    return Plan(sites, embedding, tied, ignore, config)


def _ignored(name: str, patterns: Sequence[str]) -> bool:
    """Whether a module is left alone: its name or last part is listed, or a ``re:`` pattern finds it."""
    for pattern in patterns:
        if pattern.startswith("re:"):
            if re.search(pattern[3:], name):
                return True
        elif name == pattern or name.endswith(f".{pattern}"):
            return True
    return False


def _shape(model: nn.Module, module: str) -> tuple[int, int]:
    """(N, K) of a Linear or a Conv1D."""
    found = model.get_submodule(module)
    rows, columns = found.weight.shape if isinstance(found, nn.Linear) else reversed(found.weight.shape)  # type: ignore[union-attr]
    return int(rows), int(columns)


def group_size(shapes: dict[str, tuple[int, int]], wanted: int) -> int:
    """g for a set of Linears: what is wanted, or for -1 the largest usual size that divides every K.

    Args:
        shapes: (N, K) by module name.
        wanted: g; 0: a whole row; -1: what fits.

    Raises:
        SettingsError: g does not divide some K; names the layer and what would fit.
    """
    fits = [size for size in (128, 64, 32, 16) if all(columns % size == 0 for _, columns in shapes.values())]
    if wanted == -1:
        return fits[0] if fits else 0
    wrong = {name: columns for name, (_, columns) in shapes.items() if wanted and columns % wanted}
    if not wrong:
        return wanted
    first = next(iter(wrong))
    kinds = ", ".join(sorted({name.rpartition(".")[2] for name in wrong}))
    allowed = " or ".join(map(str, fits)) or "0 (a whole row)"
    raise SettingsError(
        "group_size",
        wanted,
        f"a divisor of every layer's inputs: {first} has {wrong[first]} ({len(wrong)} layers: {kinds}); "
        f"{allowed} fits",
    )
