"""Rotating a model: what becomes of each parameter when the residual stream h is written as h R.

    embedding, positions      E R
    norm                      weight 1, bias 0: n(h R) = n(h) R
    readers (q, k, v, up)     W diag(g) R ,  bias + W b         (g weight, b bias of the norm before)
    writers (o, down)         R^T W ,  bias R
    v, o                      each head's rows of v R2^T W, columns of o W R2

Where a reader has no bias (a head after a LayerNorm), the norm keeps (b / g) R instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attar.errors import ModelError
from attar.models.residual import HeadValues, NormRead, Residual
from attar.quantization.transforms.rotation import Rotation, random_rotation

ParameterChange = Callable[[str, Tensor], Tensor]
"""``change(leaf, tensor)``: what becomes of a module's ``weight`` or ``bias``, float32, as stored."""

Load = Callable[[str], Tensor]
"""A parameter of the model by name, float32, as stored."""

SMALLEST = 1e-4  # of |g| relative to its largest, where b / g is needed


def rotation_changes(
    facts: Residual, model: Any, width: int, load: Load, seed: int, device: str | torch.device = "cpu"
) -> dict[str, ParameterChange]:
    """What a random rotation does to each module it touches.

    Args:
        facts: who reads and writes the residual stream.
        model: the model whose modules are named; on meta or not. Not changed.
        width: of the residual stream.
        load: reads a parameter.
        seed: of the rotations.
        device: where the arithmetic is done.

    Raises:
        ModelError: a norm's bias can go nowhere.
    """
    R = random_rotation(width, seed, keep_mean=facts.centred)
    steps: dict[str, list[ParameterChange]] = {}

    def add(name: str, step: ParameterChange) -> None:
        steps.setdefault(name, []).append(step)

    for name in facts.embeddings:
        add(name, lambda leaf, tensor: R.columns(tensor))
    for norm in facts.norms:
        for name, step in _norm_steps(norm, model, load, R):
            add(name, step)
    for number, value in enumerate(facts.values):
        for name, step in _value_steps(value, random_rotation(value.head_dim, seed + 1 + number)):
            add(name, step)
    for name in facts.writers:
        add(name, lambda leaf, tensor: R.rows(tensor) if leaf == "weight" else R.columns(tensor))
    return {name: _composed(model.get_submodule(name), made, device) for name, made in steps.items()}


def _composed(module: nn.Module, steps: list[ParameterChange], device: str | torch.device) -> ParameterChange:
    """Steps on (N, K) weights as one change of the stored tensor."""
    transposed = not isinstance(module, nn.Linear | nn.Embedding)

    def change(leaf: str, tensor: Tensor) -> Tensor:
        turn = transposed and tensor.dim() == 2
        value = tensor.to(device).float()
        value = value.T if turn else value
        for step in steps:
            value = step(leaf, value)
        return (value.T if turn else value).contiguous()

    return change


def _norm_steps(norm: NormRead, model: Any, load: Load, R: Rotation) -> list[tuple[str, ParameterChange]]:
    """A norm without weight, its weight and bias in its readers."""
    g = load(f"{norm.name}.weight") + norm.offset
    biased = getattr(model.get_submodule(norm.name), "bias", None) is not None
    b = load(f"{norm.name}.bias") if biased else None
    moves = b is not None and all(model.get_submodule(name).bias is not None for name in norm.readers)
    kept = torch.zeros_like(g) if b is None or moves else R.columns(_divided(norm.name, b, g)[None])[0]

    def emptied(leaf: str, tensor: Tensor) -> Tensor:
        return torch.full_like(tensor, 1.0 - norm.offset) if leaf == "weight" else kept.to(tensor.device)

    def read(name: str) -> ParameterChange:
        def step(leaf: str, tensor: Tensor) -> Tensor:
            if leaf == "weight":
                return R.columns(tensor * g.to(tensor.device))
            if b is None or not moves:
                return tensor
            weight = load(f"{name}.weight")
            weight = weight if isinstance(model.get_submodule(name), nn.Linear) else weight.T
            return tensor + (weight @ b).to(tensor.device)

        return step

    return [(norm.name, emptied), *((name, read(name)) for name in norm.readers)]


def _divided(name: str, b: Tensor, g: Tensor) -> Tensor:
    """b / g, 0 where b is 0."""
    if bool(((g.abs() <= SMALLEST * g.abs().max()) & (b != 0)).any()):
        raise ModelError(
            f"{name}: its bias cannot move: the Linear behind has none, and a weight of the norm is zero",
            hint="this model cannot be rotated; smoothing needs no rotation",
        )
    return torch.where(b == 0, torch.zeros_like(b), b / g)


def _value_steps(value: HeadValues, R2: Rotation) -> list[tuple[str, ParameterChange]]:
    """The values of each head rotated: rows of v, columns of o."""
    rows = list(value.v_rows)

    def on_v(leaf: str, tensor: Tensor) -> Tensor:
        result = tensor.clone()
        result[rows] = R2.head_rows(tensor[rows])
        return result

    def on_o(leaf: str, tensor: Tensor) -> Tensor:
        return R2.head_columns(tensor) if leaf == "weight" else tensor

    return [(value.v, on_v), (value.o, on_o)]
