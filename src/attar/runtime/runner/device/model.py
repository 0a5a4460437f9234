"""A step of a Llama-shaped model as operators on a device: nine in a layer, whatever the batch.

    add + norm, q k v, norms + rotary + write, attention, out, add + norm, gate and up, activation, down

A mixture of experts has its choice and two grouped products in place of the MLP's: ten, with a shared expert
too (shared_expert.py). The sum that ends a layer is part of the next one's first operator. The residual
stream is float32; what products read is of one float type.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attar.kernels.decode import ModelWeights
from attar.kernels.device.attention import paged_attention, rope_write
from attar.kernels.device.elementwise import add_norm, gated, route, tanh
from attar.runtime.kv.hidden_pool import HiddenPool
from attar.runtime.kv.store.mixed import MixedStore
from attar.runtime.kv.store.planes import DenseStore, PlaneStore
from attar.runtime.kv.store.rotated import RotatedStore
from attar.runtime.kv.store.scaled import ScaledStore
from attar.runtime.runner.device.layout import DeviceWeight
from attar.runtime.runner.device.linears import multiply, multiply_experts
from attar.runtime.runner.device.step import StepTensors

LayerPool = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Keys, values, their scales and the basis of keys, as the operators take them."""


@dataclass(frozen=True)
class LayerOutput:
    """What a part of a layer adds to the residual stream: the first arguments of ``add_norm``."""

    y: Tensor | None = None
    share: Tensor | None = None
    routed: Tensor | None = None
    shares: Tensor | None = None


def run_model(
    weights: ModelWeights,
    tensors: StepTensors,
    store: PlaneStore,
    dtype: torch.dtype,
    hidden: HiddenPool | None = None,
) -> Tensor:
    """Logits float32 (W, vocabulary) of a step; writes keys, values and hidden states.

    Args:
        weights: whose products are :class:`DeviceWeight`, all on the device.
        dtype: of what products read.
    """
    x = weights.embedding.index_select(0, tensors.ids).float() * weights.embedding_scale
    output, after = LayerOutput(), None
    for index, layer in enumerate(weights.layers):
        normed = _add(x, output, after, layer.before_attention, weights.eps, dtype)
        _keep(hidden, index - 1, x, tensors)
        attended = _attention(weights, layer, normed, tensors, pool_of(store, index))
        normed = _add(x, attended, layer.after_attention, layer.before_mlp, weights.eps, dtype)
        after = layer.after_mlp
        feed_forward = _mlp if layer.mixture is None else _mixture
        output = feed_forward(layer.mixture or layer, normed, weights.activation)
    normed = _add(x, output, after, weights.norm, weights.eps, dtype)
    _keep(hidden, len(weights.layers) - 1, x, tensors)
    _keep(hidden, len(weights.layers), normed, tensors)
    return head_logits(weights, normed.index_select(0, tensors.rows))


def head_logits(weights: Any, normed: Tensor) -> Tensor:
    """Logits float32 (n, vocabulary) of normed states (n, hidden), with the model's cap."""
    logits = multiply(weights.head, normed, torch.float32)
    cap = weights.final_soft_cap
    return tanh(logits / cap) * cap if cap else logits


def pool_of(store: PlaneStore, layer: int) -> LayerPool:
    """Of a layer, with the shapes of ``kernels/device/attention.py``."""
    if isinstance(store, MixedStore):
        return pool_of(*store.layers[layer])
    if isinstance(store, RotatedStore):
        return *store.codes[layer], *store.pairs[layer], store.basis_rows[layer]
    if isinstance(store, ScaledStore):
        keys, values = store.codes[layer].view(store.code)
        return keys, values, *store.scales[layer], None
    assert isinstance(store, DenseStore), "another store"
    keys, values = store.data[layer]
    return keys, values, None, None, None


def on_device(weights: Any, device: torch.device) -> Any:
    """Weights with all plain tensors moved; a table that layers share is moved once."""
    return _moved(weights, device, {})


def _moved(value: Any, device: torch.device, moved: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        if id(value) not in moved:
            moved[id(value)] = value.to(device)
        return moved[id(value)]
    if isinstance(value, tuple):
        return tuple(_moved(part, device, moved) for part in value)
    if is_dataclass(value) and not isinstance(value, DeviceWeight | type):
        return replace(
            value, **{f.name: _moved(getattr(value, f.name), device, moved) for f in fields(value)}
        )
    return value


def _add(
    x: Tensor, output: LayerOutput, post: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    return add_norm(x, output.y, output.share, output.routed, output.shares, post, weight, eps, dtype)


def _keep(hidden: HiddenPool | None, layer: int, states: Tensor, tensors: StepTensors) -> None:
    """States (T, hidden) that are kept of a layer, if they are, to the slots of their tokens."""
    if hidden is not None and layer in hidden.layers:
        hidden.write(tensors.slots.long(), hidden.layers.index(layer), states)


def _attention(
    weights: ModelWeights,
    layer: Any,
    normed: Tensor,
    tensors: StepTensors,
    pool: LayerPool,
) -> LayerOutput:
    q = rope_write(
        multiply(layer.qkv, normed),
        tensors.positions,
        tensors.slots,
        layer.rotary,
        layer.query_norm,
        layer.key_norm,
        *pool,
        weights.heads,
        weights.eps,
        weights.scale,
        weights.wide_norms,
    )
    per_token = tensors.spans, tensors.positions, tensors.lengths, tensors.firsts, tensors.tree
    attended = paged_attention(
        q, *pool, tensors.tables, *per_token, layer.sinks, layer.window, weights.soft_cap
    )
    return LayerOutput(multiply(layer.out, attended.flatten(1)))


def _mlp(layer: Any, normed: Tensor, activation: str) -> LayerOutput:
    return LayerOutput(multiply(layer.down, gated(multiply(layer.gate_up, normed), activation)))


def _mixture(mixture: Any, normed: Tensor, activation: str) -> LayerOutput:
    routing = mixture.routing
    shared = len(mixture.gate_up.data) - len(mixture.router)
    shares, order, ends, share = route(
        normed,
        mixture.router,
        mixture.bias,
        mixture.correction,
        mixture.shared_gate,
        routing.active,
        routing.scoring,
        routing.normalized,
        routing.scaling,
        routing.groups,
        routing.active_groups,
        routing.group_scores,
        shared,
    )
    inner = multiply_experts(mixture.gate_up, normed, order, ends, routing.active + shared)
    outer = multiply_experts(mixture.down, gated(inner, activation), order, ends, 0)
    routed = outer.view(len(normed), routing.active + shared, -1)
    if mixture.shared_gate_up is None:
        return LayerOutput(None, None, routed, shares)
    apart = multiply(mixture.shared_down, gated(multiply(mixture.shared_gate_up, normed), activation))
    return LayerOutput(apart, share if mixture.shared_gate is not None else None, routed, shares)
