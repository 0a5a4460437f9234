"""Rotary frequencies of a head's own layers: those of its target, scaled as transformers scales them.

Which scalings there are: ``formats/draft_heads/rope_scaling.py``. A head keeps the keys of decided tokens, so
its frequencies stay as they are: those of a target whose own change with the length of a sequence are plain,
which the target's are in short sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor


def frequencies(head_dim: int, theta: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """float32 (head_dim / 2,), and the factor of cosines and sines."""
    if not scaling:
        half = torch.arange(0, head_dim, 2, dtype=torch.float32)
        return theta ** (-half / head_dim), 1.0
    return _scaled(head_dim, theta, tuple(sorted(scaling.items())))


@cache
def _scaled(head_dim: int, theta: float, items: tuple[tuple[str, Any], ...]) -> tuple[Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {**dict(items), "rope_theta": theta}
    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, rope_parameters=parameters
    )
    inverse, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    return inverse.float(), float(factor)
