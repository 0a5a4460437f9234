"""What a model asks of the KV cache, found by running one token: no config is believed.

A token that is alone attends to itself, so its attention is its own value; what each layer hands over shows
how many heads of keys and values it has and how long they are. Layers that keep another state (Mamba,
linear attention) never ask, and are noticed by that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attar.errors import ModelError
from attar.runtime.runner import attention

ROPES_OF_LENGTH = ("dynamic", "longrope")  # their angles change with the length of the batch


@dataclass(frozen=True)
class ModelShape:
    """What a runner must know of a model."""

    layers: int
    kv_heads: int
    head_dim: int
    vocabulary: int  # columns of the logits
    context: int | None  # positions
    windows: tuple[int | None, ...]  # positions that each layer looks back, its own among them

    @property
    def window(self) -> int | None:
        """Positions that every layer looks back at most; None where one looks back to the first."""
        known = [window for window in self.windows if window is not None]
        return max(known) if len(known) == self.layers else None


class AttentionProbe:
    """Stands in for a pass: writes down what each layer hands over."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, int, int]] = {}  # layer -> kv_heads, numbers of a key, of a value
        self.windows: dict[int, int | None] = {}
        self.keys: dict[int, Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        self.seen[layer] = (k.shape[1], k.shape[2], v.shape[2])
        self.windows[layer], self.keys[layer] = options["window"], k
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


def probe(model: Any) -> ModelShape:
    """Take a causal language model over and look at it; afterwards it runs through a runner only.

    Raises:
        ModelError: its attention is not what the runtime does, by name.
    """
    attention.register()
    name = type(model).__name__
    try:
        model.set_attn_implementation(attention.NAME)
    except ValueError as problem:
        raise ModelError(f"{name}: its attention cannot be taken over: {problem}") from problem
    seen, logits = shown(model, 0)
    config = model.config.get_text_config()
    _check(name, seen.seen, config.num_hidden_layers)
    kv_heads, head_dim, _ = seen.seen[0]
    windows = tuple(seen.windows[layer] for layer in range(len(seen.seen)))
    return ModelShape(len(seen.seen), kv_heads, head_dim, logits.shape[-1], _context(config), windows)


def shown(model: Any, position: int) -> tuple[AttentionProbe, Tensor]:
    """What each layer hands over for token 1 alone at a position, and the logits (1, 1, vocabulary)."""
    seen, token = AttentionProbe(), torch.ones(1, 1, dtype=torch.int64, device=model.device)
    with torch.no_grad():
        logits = model(input_ids=token, position_ids=token * position, use_cache=False, paged=seen).logits
    return seen, logits


def _check(name: str, seen: dict[int, tuple[int, int, int]], layers: int) -> None:
    missing = [layer for layer in range(layers) if layer not in seen]
    if missing or len(seen) != layers:
        raise ModelError(
            f"{name}: layers {missing} keep no keys and values that the runtime could hold"
            if missing
            else f"{name}: {len(seen)} layers attend, but its config names {layers}"
        )
    for layer, (kv_heads, of_key, of_value) in sorted(seen.items()):
        if of_key != of_value:
            raise ModelError(f"{name}: layer {layer} has keys of {of_key} numbers and values of {of_value}")
        if (kv_heads, of_key, of_value) != seen[0]:
            raise ModelError(
                f"{name}: layer {layer} keeps {kv_heads} heads of {of_key} numbers, "
                f"layer 0 {seen[0][0]} of {seen[0][1]}; the pool has one shape for all layers"
            )


def _context(config: Any) -> int | None:
    """Positions the model was made for; those of its first training where longer texts change the angles."""
    most = getattr(config, "max_position_embeddings", None)
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, dict) and rope.get("rope_type") in ROPES_OF_LENGTH:
            most = rope.get("original_max_position_embeddings") or most
    return most
