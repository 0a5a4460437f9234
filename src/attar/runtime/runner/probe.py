"""What a model asks of the KV cache, found by running one token instead of trusting the config.

A token that is alone attends to itself, so its attention output is its own value; what each layer passes to
attention shows how many kv heads it has and how long they are. Layers that carry a state (Mamba, linear
attention, short convolutions) show the shape of it (``state_layers.py``). A layer that does neither is
refused, unless the config calls it an MLP or a mixture of experts.

Rotation, which StreamingLLM and Reread need to turn queries:

    turned(x, a): in each pair (x_i, x_{i + m}) of the first 2m numbers, an angle of a f_i        f = inv_freq

It is verified in each layer: the hidden states of a token that is alone do not depend on its position, so its
key at position 7 must be its key at position 0, turned by 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attar.errors import ModelError
from attar.runtime.runner import attention
from attar.runtime.runner.latent import cache_latents
from attar.runtime.runner.state_layers import StateLayers, StateProbe

ROPES_OF_LENGTH = ("dynamic", "longrope")  # their angles change with the length of the batch
STATELESS = ("mlp", "moe")  # in a config's layer_types
AT = 7  # position at which the rotation is verified


@dataclass(frozen=True)
class ModelShape:
    """Facts about a model that a runner needs."""

    attending: tuple[int, ...]  # layers with keys and values
    kv_heads: int
    head_dim: int
    vocabulary: int  # columns of the logits
    context: int | None  # positions
    windows: tuple[int | None, ...]  # positions each layer looks back, its own included
    latent: int = 0  # numbers at the end of a key that are its value (MLA); 0: values are stored apart
    state_bytes: int = 0  # of the states of a sequence; 0: no layer carries one
    stepwise: frozenset[str] = frozenset()  # see ``StateProbe``

    @property
    def layers(self) -> int:
        """Layers with keys and values."""
        return len(self.attending)

    @property
    def token_numbers(self) -> int:
        """Numbers that a pool keeps of a token."""
        return self.layers * self.kv_heads * self.head_dim * (1 if self.latent else 2)

    @property
    def window(self) -> int | None:
        """Most positions that any layer looks back; None where one looks back to the first."""
        known = [window for window in self.windows if window is not None]
        return max(known) if known and len(known) == self.layers else None


class AttentionProbe:
    """Takes the place of an AttentionPass: records what each layer passes to attention."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int, int]] = {}  # layer -> kv_heads, numbers of a key, of a value
        self.windows: dict[int, int | None] = {}
        self.keys: dict[int, Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        self.shapes[layer] = (k.shape[1], k.shape[2], v.shape[2])
        self.windows[layer], self.keys[layer] = options["window"], k
        values, latent = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1), options["latent"]
        return values if latent is None else latent.values(values)


def probe(model: Any) -> ModelShape:
    """Set a causal language model's attention and probe it; afterwards it runs through a runner only.

    Raises:
        ModelError: its attention is not supported, with its name.
    """
    attention.register()
    name = type(model).__name__
    try:
        model.set_attn_implementation(attention.NAME)
    except ValueError as problem:
        raise ModelError(f"{name}: its attention cannot be replaced: {problem}") from problem
    if any(hasattr(module, "indexer") for module in model.modules()):
        raise ModelError(f"{name}: its attention chooses what it reads (an indexer), which no runner does")
    latent = cache_latents(model)
    config, stateful, states = model.config.get_text_config(), StateLayers(model), StateProbe()
    with stateful.running(states):
        record, logits = run_probe(model, 0)
    _refuse_states(name, model, stateful, states)
    _check(name, record.shapes, states, config)
    attending = tuple(sorted(record.shapes))
    kv_heads, head_dim, of_value = record.shapes[attending[0]] if attending else (0, 0, 0)
    windows = tuple(record.windows[layer] for layer in attending)
    context, vocabulary = _context(config), logits.shape[-1]
    of_states = states.sequence_bytes, frozenset(states.stepwise)
    sizes = attending, kv_heads, head_dim, vocabulary, context, windows
    return ModelShape(*sizes, of_value if latent else 0, *of_states)


def run_probe(model: Any, position: int) -> tuple[AttentionProbe, Tensor]:
    """The record of token 1 alone at a position, and its logits (1, 1, vocabulary)."""
    record, token = AttentionProbe(), torch.ones(1, 1, dtype=torch.int64, device=model.device)
    with torch.no_grad():
        logits = model(input_ids=token, position_ids=token * position, use_cache=False, paged=record).logits
    return record, logits


def _refuse_states(name: str, model: Any, layers: StateLayers, states: StateProbe) -> None:
    """Raise where a layer keeps a state that the probe has not seen."""
    kept = {path for path, state in states.states.items() if state.tensors}
    for path, module in model.named_modules():
        inside = any(f"{path}.".startswith(f"{layer}.") for layer in kept)
        if not inside and (path in layers.names or "A_log" in module._parameters):
            raise ModelError(f"{name}: {path} keeps a state from token to token, which no runner stores")


def _check(name: str, seen: dict[int, tuple[int, int, int]], states: StateProbe, config: Any) -> None:
    layers, kinds = config.num_hidden_layers, getattr(config, "layer_types", None) or ()
    carry = {state.layer for state in states.states.values()}
    without = {layer for layer, kind in enumerate(kinds) if kind in STATELESS}
    missing = [layer for layer in range(layers) if layer not in {*seen, *carry, *without}]
    if missing or not set(seen) <= set(range(layers)):
        raise ModelError(
            f"{name}: layers {missing} keep no keys and values that the runtime could store"
            if missing
            else f"{name}: layers {list(seen)} attend, but its config names {layers}"
        )
    first = min(seen, default=0)
    for layer, (kv_heads, of_key, of_value) in sorted(seen.items()):
        if of_key < of_value:
            raise ModelError(f"{name}: layer {layer} has keys of {of_key} numbers and values of {of_value}")
        if (kv_heads, of_key, of_value) != seen[first]:
            raise ModelError(
                f"{name}: layer {layer} keeps {kv_heads} heads of {of_key} numbers, "
                f"layer {first} {seen[first][0]} of {seen[first][1]}; the pool has one shape for all layers"
            )


def _context(config: Any) -> int | None:
    """Positions the model was trained for; those of its first training where longer contexts change the
    angles, and those of a chunk where layers attend inside chunks (Llama 4)."""
    most = getattr(config, "max_position_embeddings", None)
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        most = min(filter(None, (most, config.attention_chunk_size)))
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, dict) and rope.get("rope_type") in ROPES_OF_LENGTH:
            most = rope.get("original_max_position_embeddings") or most
    return most


class Rotary:
    """The rotation of queries and keys in each layer.

    Args:
        layers: of the model, those with keys and values; from then on they are known by their index here.

    Raises:
        ModelError: its keys are not rotated in this way.
    """

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        self.frequencies = [_frequencies(model, layer) for layer in layers]
        zero, far = (run_probe(model, position)[0].keys for position in (0, AT))
        for index, layer in enumerate(layers):
            shift = torch.tensor([AT], device=zero[layer].device)
            want = self.turned(zero[layer].float(), shift, index)
            tolerance = 1e-3 * float(want.abs().max()) * _tolerance(model)
            if not torch.allclose(far[layer].float(), want, atol=tolerance):
                raise ModelError(
                    f"{type(model).__name__}: layer {layer} does not rotate its keys by position"
                )

    def turned(self, x: Tensor, positions: Tensor, layer: int) -> Tensor:
        """x (t, heads, d) turned by positions int64 (t,), which may be negative; computed in float32."""
        f = self.frequencies[layer]
        angles = positions.to(torch.float64)[:, None] * f.to(torch.float64)
        cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]  # (t, 1, m)
        m = len(f)
        a, b, unrotated = x[..., :m].float(), x[..., m : 2 * m].float(), x[..., 2 * m :]
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        return torch.cat([turned.to(x.dtype), unrotated], dim=-1)


def _frequencies(model: Any, layer: int) -> Tensor:
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    names = (f"{kinds[layer]}_inv_freq", "inv_freq") if kinds else ("inv_freq",)
    for name in names:
        for module in model.modules():
            frequencies = getattr(module, name, None)
            if isinstance(frequencies, torch.Tensor):
                return frequencies.detach()
    raise ModelError(f"{type(model).__name__} has no rotary positions")


def _tolerance(model: Any) -> float:
    """Factor on the tolerance for a model's dtype."""
    return 1.0 if model.dtype == torch.float32 else 30.0
