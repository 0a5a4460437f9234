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
    inside = {name for block in anatomy.blocks for name in block.linears}
    chosen = {name for name in inside if not _ignored(name, settings.ignore)}
    sites: dict[str, Site] = {}
    for module in (name for block in anatomy.blocks for name in block.linears if name in chosen):
        sites[names[f"{module}.weight"]] = _site(model, checkpoint, module, names, settings)
    if not sites:
        raise ModelError(f"{checkpoint.path}: every Linear is ignored", hint="ignore fewer modules")
    _check_groups(sites, settings)
    order = {name: place for place, name in enumerate(checkpoint.tensors)}
    sites = {name: sites[name] for name in sorted(sites, key=order.__getitem__)}
    embedding = names[f"{anatomy.embedding}.weight"] if settings.embedding_bits else None
    tied = anatomy.head if embedding and anatomy.tied else None
    ignore = tuple(name for name, module in model.named_modules() if is_linear(module) and name not in chosen)
    config = quantization_config(
        bits=SCHEMES[settings.scheme],
        group_size=settings.group_size,
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


def _site(
    model: nn.Module, checkpoint: Any, module: str, names: dict[str, str], settings: QuantizeSettings
) -> Site:
    info = checkpoint.tensors[names[f"{module}.weight"]]
    transposed = not isinstance(model.get_submodule(module), nn.Linear)
    rows, columns = reversed(info.shape) if transposed else info.shape
    storage = {"F16": torch.float16, "BF16": torch.bfloat16}.get(info.dtype, torch.float32)
    grid = IntGrid(SCHEMES[settings.scheme], settings.group_size, storage=storage)
    return Site(module, (rows, columns), transposed, grid)


def _check_groups(sites: dict[str, Site], settings: QuantizeSettings) -> None:
    size = settings.group_size
    wrong = [site for site in sites.values() if size and site.shape[1] % size]
    if not wrong:
        return
    fits = [g for g in (128, 64, 32, 16) if all(site.shape[1] % g == 0 for site in sites.values())]
    names = sorted({site.module.rpartition(".")[2] for site in wrong})
    raise SettingsError(
        "group_size",
        size,
        f"a divisor of every layer's inputs: {wrong[0].module} has {wrong[0].shape[1]} "
        f"({len(wrong)} layers: {', '.join(names)}); "
        f"{' or '.join(map(str, fits)) or '0 (a whole row)'} fits",
    )
