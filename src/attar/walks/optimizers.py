"""Optimizers and the learning-rate schedule of the train walk.

AdamW: Loshchilov & Hutter 2017, arXiv 1711.05101. Weight decay touches matrices only, never norms, biases or
embeddings. Muon (muon.py) makes updates of AdamW's root mean square, so that one learning rate serves both.
It takes the hidden matrices; AdamW takes the rest.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from attar.walks.muon import Muon
from attar.walks.settings import TrainSettings


def build(model: nn.Module, settings: TrainSettings) -> list[torch.optim.Optimizer]:
    """The optimizers of a run over the trainable parameters of ``model``, each parameter in exactly one
    group.

    Args:
        settings: their precision is decided: Muon multiplies in float32 where it is ``fp32``.
    """
    hidden, matrices, rest = split(model)
    rate, decay = settings.learning_rate, settings.weight_decay
    adamw = [{"params": matrices, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.0}]
    optimizers: list[torch.optim.Optimizer] = []
    if settings.optimizer == "muon" and hidden:
        products = torch.float32 if settings.precision == "fp32" else torch.bfloat16
        optimizers.append(Muon(hidden, rate, weight_decay=decay, products=products))
    else:
        adamw.append({"params": hidden, "weight_decay": decay})
    groups = [group for group in adamw if group["params"]]
    if groups:
        optimizers.append(torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True))
    return optimizers


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """Trainable parameters as (hidden matrices, embedding and head matrices, everything else)."""
    outer = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None:
        outer.add(id(head.weight))
    hidden, matrices, rest = [], [], []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim < 2:
            rest.append(parameter)
        elif id(parameter) in outer or parameter.ndim > 2:
            matrices.append(parameter)
        else:
            hidden.append(parameter)
    return hidden, matrices, rest


def rate(step: int, settings: TrainSettings) -> float:
    """Learning rate of step ``step`` (from 0): linear warm-up to the peak, then a half cosine down to
    ``final`` of it."""
    warm = round(settings.warmup * settings.steps)
    if step < warm:
        return settings.learning_rate * (step + 1) / warm
    part = (step - warm) / max(settings.steps - 1 - warm, 1)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(part, 1.0)))
    return settings.learning_rate * (settings.final + (1.0 - settings.final) * cosine)
