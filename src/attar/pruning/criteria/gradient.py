"""Importance of heads and neurons from the gradient of a mask.

Heads: Michel, Levy, Neubig 2019, "Are Sixteen Heads Really Better than One?", arXiv 1905.10650, eq. 2:

    I_h = E_x | dL(x) / d xi_h | ,   xi_h the mask that multiplies head h's output  (= | Att_h^T dL / dAtt_h
    |)

Neurons: the same with the mask on a neuron's activation a_i, the first-order Taylor criterion | a_i dL /
da_i |, summed over the tokens of a sequence before the absolute value (Molchanov et al. 2019, arXiv
1906.10771, eq. 8). E_x runs over sequences.

Letters: U units a layer; xi (B, U) one mask value per sequence and unit, all ones; c (F,) the unit of each
of the F inputs of the Linear that follows. With grouped-query attention a unit is a KV head with all its
query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attar.errors import NumericsError
from attar.progress import SILENT, Progress


@contextmanager
def masked(modules: Sequence[nn.Module], owners: Sequence[Tensor], masks: Sequence[Tensor]) -> Iterator[None]:
    """Multiply the input of each module (B, S, F) by its mask (B, U), spread over the columns of each
    unit."""

    def hook(owner: Tensor, mask: Tensor) -> Callable[..., Any]:
        def multiply(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            x = args[0]
            spread = mask[:, owner].to(x.dtype)
            shape = (spread.shape[0], *[1] * (x.ndim - 2), -1)
            if spread.shape[0] not in (1, x.shape[0]):  # some families flatten (B, S) into one axis
                spread, shape = spread.repeat_interleave(x.shape[0] // spread.shape[0], 0), tuple(x.shape)
            return (x * spread.reshape(shape), *args[1:])

        return multiply

    triples = zip(modules, owners, masks, strict=True)
    handles = [module.register_forward_pre_hook(hook(owner, mask)) for module, owner, mask in triples]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def gradient_importance(
    model: nn.Module,
    modules: Sequence[nn.Module],
    owners: Sequence[Tensor],
    loss: Callable[[nn.Module, Tensor], Tensor],
    batches: Sequence[Tensor],
    progress: Progress = SILENT,
    what: str = "importance",
) -> Tensor:
    """I, float64 (layers, U): mean over sequences of the absolute mask gradient. Does not modify the model.

    Args:
        model: whole, on one device.
        modules: per layer, the Linear that follows the units (output projection, down projection).
        owners: per layer, c.
        loss: ``loss(model, tokens)``, a mean over the tokens of the batch.
        batches: int64 (B, S) each.

    Raises:
        NumericsError: a gradient is not finite.
    """
    device = next(model.parameters()).device
    counts = [int(owner.max()) + 1 for owner in owners]
    total = [torch.zeros(count, dtype=torch.float64) for count in counts]
    sequences = 0
    frozen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        with progress.task(what, total=len(batches)) as task:
            for batch in batches:
                masks = [torch.ones(len(batch), count, device=device, requires_grad=True) for count in counts]
                with masked(modules, [owner.to(device) for owner in owners], masks):
                    value = loss(model, batch.to(device)) * len(batch)  # a sum over sequences
                    gradients = torch.autograd.grad(value, masks)
                for layer, gradient in enumerate(gradients):
                    total[layer] += gradient.abs().sum(0).double().cpu()
                sequences += len(batch)
                task.advance(loss=float(value.detach()) / len(batch))
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
    importance = torch.stack(total) / max(sequences, 1)
    if not torch.isfinite(importance).all():
        raise NumericsError(
            "the importance gradients are not finite", hint="check the model for NaN: attar inspect"
        )
    return importance


def keep_most_important(importance: Tensor, keep: int) -> list[list[int]]:
    """Per layer, the ``keep`` units of the largest importance, ascending; equal ones go to the lower
    number."""
    order = torch.argsort(importance, dim=1, descending=True, stable=True)
    return [sorted(int(unit) for unit in row[:keep]) for row in order]
