"""Cosines and sines of every position, a table for each type of layer: the family's own module makes them."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor


def layer_kind(config: Any, index: int) -> str:
    """The layer's type, of which the rotary table depends."""
    types = getattr(config, "layer_types", None)
    return types[index] if types else "full_attention"


def rope(config: Any) -> dict[str, dict[str, Any]]:
    """Rotary parameters by type of layer."""
    told = config.rope_parameters
    return told if all(isinstance(value, dict) for value in told.values()) else {"full_attention": told}


def rotary_tables(config: Any, context: int) -> dict[str, Tensor]:
    """Float32 (context, rotated dimensions) by type of layer, from the family's own module."""
    modeling = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    name = next(name for name in sorted(vars(modeling)) if name.endswith("RotaryEmbedding"))
    module, tables = getattr(modeling, name)(config), {}
    kinds = dict.fromkeys(layer_kind(config, index) for index in range(config.num_hidden_layers))
    several = "full_attention" not in rope(config) or len(rope(config)) > 1
    for kind in kinds:
        given = (kind,) if several else ()
        cosines, sines = module(torch.zeros(1), torch.arange(context)[None], *given)
        half = cosines.shape[-1] // 2
        tables[kind] = torch.cat([cosines[0, :, :half], sines[0, :, :half]], dim=1).contiguous()
    return tables
