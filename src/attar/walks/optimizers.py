"""Optimizers and the learning-rate schedule of training.

AdamW: Loshchilov & Hutter 2017, arXiv 1711.05101. Weight decay touches matrices only, never norms, biases or
embeddings.

Muon: Jordan 2024, kellerjordan.github.io/posts/muon, for the hidden matrices; AdamW takes the rest. Its
update is scaled as in Liu et al. 2025, arXiv 2502.16982, eq. 4, to AdamW's root mean square, so that one
learning rate serves both. Momentum whose singular values are brought near 1:

    B = m B + (1 - m) g ;  O = NS(m B + (1 - m) g) ;  W = (1 - lr d) W - 0.2 lr sqrt(max(N, K)) O
    NS, five times from X / |X|:   A = X X^T ;  X = a X + (b A + c A A) X

Letters: W (N, K) a matrix, g its gradient, B the momentum buffer, m momentum, d weight decay. The experts of
a mixture, which transformers stacks as (E, N, K), are E matrices.

The numbers are those of ``torch.optim.Muon``, which multiplies in bfloat16 on every machine: where bfloat16
is emulated, that costs more than the rest of a step. Here the type is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attar.walks.distributed import gathered, like
from attar.walks.settings import TrainSettings


def build(model: nn.Module, settings: TrainSettings) -> list[torch.optim.Optimizer]:
    """The optimizers of a run over the trainable parameters of ``model``, each parameter in exactly one
    group.

    A model may have ``rate_scales()``, learning rates by those of the settings, of parameters by ``id``: a
    group has its own under ``scale``.

    Args:
        settings: their precision is decided: Muon multiplies in float32 where it is ``fp32``.
    """
    hidden, matrices, others = split(model)
    rate, decay = settings.learning_rate, settings.weight_decay
    scales: dict[int, float] = getattr(model, "rate_scales", dict)()
    adamw = [*_groups(matrices, 0.0, scales), *_groups(others, 0.0, scales)]
    optimizers: list[torch.optim.Optimizer] = []
    if settings.optimizer == "muon" and hidden:
        products = torch.float32 if settings.precision == "fp32" else torch.bfloat16
        muon = _groups(hidden, decay, scales)
        optimizers.append(Muon(muon, rate, weight_decay=decay, products=products))
    else:
        adamw += _groups(hidden, decay, scales)
    if adamw:
        optimizers.append(torch.optim.AdamW(adamw, lr=rate, betas=(0.9, 0.95), fused=True))
    return optimizers


def _groups(
    parameters: list[nn.Parameter], decay: float, scales: Mapping[int, float]
) -> list[dict[str, Any]]:
    """A group of parameters for each learning rate."""
    by_scale: dict[float, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_scale.setdefault(scales.get(id(parameter), 1.0), []).append(parameter)
    return [{"params": part, "weight_decay": decay, "scale": scale} for scale, part in by_scale.items()]


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """Trainable parameters as (hidden matrices and stacks of them; embeddings, heads and convolutions;
    everything else)."""
    outer = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None:
        outer.add(id(head.weight))
    outer |= {id(weight) for weight in getattr(model, "output_weights", tuple)()}
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    outer |= {id(module.weight) for module in model.modules() if isinstance(module, convolutions)}
    hidden, matrices, others = [], [], []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim < 2:
            others.append(parameter)
        elif id(parameter) in outer or parameter.ndim > 3:
            matrices.append(parameter)
        else:
            hidden.append(parameter)
    return hidden, matrices, others


def rate(step: int, settings: TrainSettings) -> float:
    """Learning rate of step ``step`` (from 0): linear warm-up to the peak, then a half cosine down to
    ``final`` of it."""
    warm = round(settings.warmup * settings.steps)
    if step < warm:
        return settings.learning_rate * (step + 1) / warm
    part = (step - warm) / max(settings.steps - 1 - warm, 1)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(part, 1.0)))
    return settings.learning_rate * (settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * cosine)


COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b, c
ITERATIONS = 5
SMALLEST = 1e-7  # norm of a gradient that is divided by


class Muon(torch.optim.Optimizer):  # type: ignore[misc]
    """Muon over matrices, in place.

    Args:
        parameters: matrices, or stacks of them (E, N, K).
        weight_decay: d.
        momentum: m.
        products: type in which NS multiplies: bfloat16 or float32.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        lr: float,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        products: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.products = products

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One step with the gradients as they are."""
        assert closure is None, "the train walk calls no closure"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, W: Tensor, group: dict[str, Any]) -> None:
        state, m, lr = self.state[W], group["momentum"], group["lr"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(W.grad)
        buffer = state["momentum_buffer"].lerp_(W.grad, 1 - m)
        # of a divided matrix each process makes the whole update, and keeps its part
        O = like(W, orthogonal(gathered(W.grad.lerp(buffer, m)), self.products))  # noqa: E741
        W.mul_(1 - lr * group["weight_decay"])
        W.add_(O, alpha=-lr * (0.2 * math.sqrt(max(W.shape[-2:]))))


def orthogonal(matrix: Tensor, products: torch.dtype = torch.bfloat16) -> Tensor:
    """NS of a matrix (N, K), or of each of (E, N, K), in ``products``: U S V^T becomes about U V^T. Does not
    modify it."""
    if matrix.ndim == 3:
        return torch.stack([orthogonal(expert, products) for expert in matrix])
    a, b, c = COEFFICIENTS
    X = matrix.to(products, copy=True)
    X = X.T if matrix.shape[0] > matrix.shape[1] else X
    X.div_(X.norm().clamp(min=SMALLEST))
    for _ in range(ITERATIONS):
        A = X @ X.T
        X = torch.addmm(X, torch.addmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.T if matrix.shape[0] > matrix.shape[1] else X
