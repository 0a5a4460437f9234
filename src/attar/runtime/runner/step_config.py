"""The config that the compiled step reads, and its rotary tables: cosines and sines of every position.

A config is read without transformers where that gives the same result. Then there is one kind of rotary
embedding, and its tables are computed here with the same arithmetic in the same order; else the family's own
module in transformers computes them.

    angle(t, i) = t f_i,   f_i = theta^(-2i / d)          d rotated dimensions, t position
    linear: f_i / factor
    llama3: f_i / factor for waves longer than the old context / low_freq_factor, f_i for short ones, a
            mixture between them
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch
from torch import Tensor

from attar.memory import check_memory
from attar.models.loading.plain_config import PlainConfig, plain_config

SHORTER = "a smaller max_position_embeddings in config.json"
HALVES = ("gpt_oss",)  # whose module gives each angle once


def step_config(checkpoint: Any) -> Any:
    """A :class:`attar.models.loading.plain_config.PlainConfig`, else a config of transformers.

    Raises:
        ModelError: transformers does not know the family.
        CheckpointError: transformers refuses the config.
    """
    plain = plain_config(checkpoint.config)
    if plain is not None:
        return plain
    from attar.models.loading.configs import load_config

    return load_config(checkpoint.path, checkpoint.config)


def layer_kind(config: Any, index: int) -> str:
    """The layer's type, which selects the rotary table."""
    types = getattr(config, "layer_types", None)
    return types[index] if types else "full_attention"


def rope(config: Any) -> dict[str, dict[str, Any]]:
    """Rotary parameters by type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = all(isinstance(value, dict) for value in parameters.values())
    return parameters if nested else {"full_attention": parameters}


def rotary_tables(config: Any, context: int) -> dict[str, Tensor]:
    """Float32 (context, rotated dimensions) by type of layer."""
    size = 3 * 4 * context * (getattr(config, "head_dim", None) or 64)
    check_memory(f"the rotary table of {context:,} positions (max_position_embeddings)", size, hint=SHORTER)
    kinds = dict.fromkeys(layer_kind(config, index) for index in range(config.num_hidden_layers))
    for kind in ("conv", "linear_attention"):  # have no positions
        kinds.pop(kind, None)
    if isinstance(config, PlainConfig):
        return dict.fromkeys(kinds, plain_table(config, context))
    modeling = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    name = next(name for name in sorted(vars(modeling)) if name.endswith("RotaryEmbedding"))
    module, tables = getattr(modeling, name)(config), {}
    several = "full_attention" not in rope(config) or len(rope(config)) > 1
    for kind in kinds:
        given = (kind,) if several else ()
        turns = module(torch.zeros(1), torch.arange(context)[None], *given)
        if isinstance(turns, Tensor):  # complex, each angle once (DeepSeek V2)
            tables[kind] = torch.cat([turns[0].real, turns[0].imag], dim=1).contiguous()
            continue
        cosines, sines = turns
        half = cosines.shape[-1] // (1 if config.model_type in HALVES else 2)
        tables[kind] = torch.cat([cosines[0, :, :half], sines[0, :, :half]], dim=1).contiguous()
    return tables


def plain_table(config: PlainConfig, context: int) -> Tensor:
    """Float32 (context, rotated dimensions): cosines of one half, then sines."""
    rope, d = config.rope_parameters, config.head_dim
    f = 1.0 / (rope["rope_theta"] ** (torch.arange(0, d, 2, dtype=torch.float32) / d))
    if rope["rope_type"] == "linear":
        f = f / rope["factor"]
    elif rope["rope_type"] == "llama3":
        f = _llama3(f, rope)
    angles = torch.arange(context, dtype=torch.float32)[:, None] * f
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def _llama3(f: Tensor, rope: dict[str, Any]) -> Tensor:
    """Frequencies of Llama 3.1, which was trained on a shorter context first."""
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    old = rope["original_max_position_embeddings"]
    wave = 2 * math.pi / f
    longest, shortest = old / low, old / high
    scaled = torch.where(wave > longest, f / factor, f)
    share = (old / wave - low) / (high - low)
    mixed = (1 - share) * scaled / factor + share * scaled
    return torch.where((wave >= shortest) & (wave <= longest), mixed, scaled)
