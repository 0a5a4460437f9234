"""The scaling of a head's rotary frequencies, from a config's rotary parameters.

linear, llama3, yarn      scaled once
dynamic, longrope         change with the length of a sequence, which a head that keeps keys cannot follow
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""The numbers that each kind of scaling must have."""

_SEPARATE = ("rope_theta", "type", "partial_rotary_factor")  # they are no part of a scaling


def rope_scaling(parameters: Mapping[str, Any], context: int) -> dict[str, Any]:
    """The scaling in rotary parameters of a config, as transformers 5 has them; empty: there is none.

    Args:
        context: tokens of the longest sequence, which some configs do not repeat.

    Raises:
        ValueError: a kind that heads do not have, or a number is missing; says which.
    """
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default" or (kind == "linear" and parameters.get("factor") == 1.0):
        return {}
    if kind not in NEEDED:
        raise ValueError(f"rotary frequencies of type {kind}; heads have the types {', '.join(NEEDED)}")
    scaling = {key: value for key, value in parameters.items() if key not in _SEPARATE} | {"rope_type": kind}
    if "original_max_position_embeddings" in NEEDED[kind] and context:
        scaling.setdefault("original_max_position_embeddings", context)
    for name in NEEDED[kind]:
        value = scaling.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise ValueError(f"rotary frequencies of type {kind} with {name} {value!r}")
    return scaling
