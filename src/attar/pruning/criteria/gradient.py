"""Importance of heads and neurons from the gradient of a mask.

Heads: Michel, Levy, Neubig 2019, "Are Sixteen Heads Really Better than One?", arXiv 1905.10650, eq. 2:

    I_h = E_x | dL(x) / d xi_h | ,   xi_h the mask that multiplies head h's output  (= | Att_h^T dL / dAtt_h
    |)

Neurons: the same with the mask on a neuron's activation a_i, the first-order Taylor criterion | a_i dL /
da_i |, summed over the tokens of a sequence before the absolute value (Molchanov et al. 2019, arXiv
1906.10771, eq. 8). E_x runs over sequences.

Letters: U units a layer; xi (B, U) one mask value per sequence and unit, all ones; c (F,) the unit of each
of the F inputs of the Linear that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from attar.importance.scoring import UnitScoring
    from attar.models.anatomy.unit_weights import UnitWeights


@contextmanager
def masked(weights: Sequence[UnitWeights], masks: Sequence[Tensor]) -> Iterator[None]:
    """Multiply the input of each layer's consumer (B, S, F) by its mask (B, U), spread over the columns of
    each unit."""

    def hook(columns: Tensor, mask: Tensor) -> Callable[..., Any]:
        def multiply(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            x = args[0]
            spread = mask[:, columns].to(x.dtype)
            shape = (spread.shape[0], *[1] * (x.ndim - 2), -1)
            if spread.shape[0] not in (1, x.shape[0]):  # some families flatten (B, S) into one axis
                spread, shape = spread.repeat_interleave(x.shape[0] // spread.shape[0], 0), tuple(x.shape)
            return (x * spread.reshape(shape), *args[1:])

        return multiply

    pairs = list(zip(weights, masks, strict=True))
    handles = [
        layer.consumer.register_forward_pre_hook(hook(layer.columns.to(mask.device), mask))
        for layer, mask in pairs
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def gradient_importance(scoring: UnitScoring) -> Tensor:
    """I, float64 (layers, U): mean over sequences of the absolute mask gradient. Does not modify the model.

    Raises:
        NumericsError: a gradient is not finite.
    """
    layers = scoring.weights

    def measure(batch: Tensor) -> Tensor:
        masks = [
            torch.ones(len(batch), layer.count, device=scoring.device, requires_grad=True) for layer in layers
        ]
        with masked(layers, masks):
            loss = scoring.loss(scoring.model, batch) * len(batch)  # a sum over sequences
            gradients = torch.autograd.grad(loss, masks)
        return torch.stack([gradient.abs().double().sum(0) for gradient in gradients])

    with scoring.frozen():
        return scoring.total("gradient", measure) / scoring.sequences
