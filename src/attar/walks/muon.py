"""Muon: Jordan 2024, kellerjordan.github.io/posts/muon, its update scaled as in Liu et al. 2025, arXiv
2502.16982, eq. 4: momentum whose singular values are brought near 1.

    B = m B + (1 - m) g ;  O = NS(m B + (1 - m) g) ;  W = (1 - lr d) W - 0.2 lr sqrt(max(N, K)) O
    NS, five times from X / |X|:   A = X X^T ;  X = a X + (b A + c A A) X

Letters: W (N, K) a matrix, g its gradient, B the momentum buffer, m momentum, d weight decay.

The numbers are those of ``torch.optim.Muon``, which multiplies in bfloat16 on every machine: where bfloat16
is emulated, that costs more than the whole rest of a step. Here the type is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b, c
ITERATIONS = 5
SMALLEST = 1e-7  # norm of a gradient that is divided by


class Muon(torch.optim.Optimizer):  # type: ignore[misc]
    """Muon over matrices, in place.

    Args:
        parameters: of two dimensions each.
        lr: learning rate, of AdamW's size.
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
        O = orthogonal(W.grad.lerp(buffer, m), self.products)  # noqa: E741
        W.mul_(1 - lr * group["weight_decay"])
        W.add_(O, alpha=-lr * (0.2 * math.sqrt(max(W.shape))))


def orthogonal(matrix: Tensor, products: torch.dtype = torch.bfloat16) -> Tensor:
    """NS of a matrix (N, K), in ``products``: U S V^T becomes about U V^T. Does not modify it."""
    a, b, c = COEFFICIENTS
    X = matrix.to(products, copy=True)
    X = X.T if matrix.shape[0] > matrix.shape[1] else X
    X.div_(X.norm().clamp(min=SMALLEST))
    for _ in range(ITERATIONS):
        A = X @ X.T
        X = torch.addmm(X, torch.addmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.T if matrix.shape[0] > matrix.shape[1] else X
