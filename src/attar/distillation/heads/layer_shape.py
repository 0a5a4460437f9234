"""The sizes of a head's layers: those of its target's own."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from attar.formats.draft_heads.rope_scaling import rope_scaling
from attar.models.anatomy.discover import discover, text_config
from attar.models.draft_heads.decoder_layer import DraftLayerShape


def layer_shape(target: Any, *, depth: int = 1, head_norms: bool = False) -> DraftLayerShape:
    """The shape of ``depth`` layers as wide as the target's first."""
    scaling: dict[str, Any] = {}
    block, config = discover(target).blocks[0], text_config(target)
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # families with sliding windows have two
    with suppress(ValueError):  # frequencies that change with the length: plain ones
        scaling = rope_scaling(rope, getattr(config, "max_position_embeddings", 0))
    return DraftLayerShape(
        depth=depth,
        heads=block.attention.heads,
        kv_heads=block.attention.kv_heads,
        head_dim=block.attention.head_dim,
        intermediate=block.mlp.neurons,
        eps=float(getattr(config, "rms_norm_eps", None) or 1e-6),
        rope_theta=float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or 1e4),
        head_norms=head_norms,
        rope_scaling=scaling,
    )
