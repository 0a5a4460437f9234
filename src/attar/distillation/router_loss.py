"""Losses of a student's routers, so that its experts stay in use and its routers' logits small.

    balance = mean over layers of E sum_e f_e P_e
    z       = mean over layers and tokens of (log sum_e exp l_e)^2

balance: Switch, Fedus et al. 2021, arXiv 2101.03961, eq. 4. z: ST-MoE, Zoph et al. 2022, arXiv 2202.08906,
eq. 5.

Letters: E experts, k of them for each token, l (T, E) a router's logits on T tokens, P_e the mean over tokens
of softmax(l)_e, f_e the share of all T k choices that went to e. The balance is 1 where all experts are used
alike, at most E. Choices are the k largest logits; no gradient flows through f.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attar.errors import ModelError
from attar.models.anatomy.discover import discover


@dataclass(frozen=True)
class RouterLoss:
    """The weighted sum of both losses over a model's mixtures.

    Attributes:
        routers: modules whose ``weight`` is (E, H), called with hidden states (..., H).
        active: k.
        balance, z: weights.
    """

    routers: tuple[nn.Module, ...]
    active: int
    balance: float
    z: float

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Inside the context every router's logits (T, E), float32, are appended to the list."""
        logits: list[Tensor] = []

        def record(router: Any, args: tuple[Any, ...]) -> None:
            hidden, bias = args[0].flatten(0, -2).float(), getattr(router, "bias", None)
            bias = bias.float() if isinstance(bias, Tensor) else None
            with torch.autocast(hidden.device.type, enabled=False):  # logits decide, and differ by little
                logits.append(F.linear(hidden, router.weight.float(), bias))

        hooks = [router.register_forward_pre_hook(record) for router in self.routers]
        try:
            yield logits
        finally:
            for hook in hooks:
                hook.remove()

    def loss(self, logits: Sequence[Tensor], mask: Tensor) -> Tensor:
        """The weighted losses of each router's logits (T, E), mean over routers; ``mask`` bool (T,) tells the
        real tokens."""
        parts = [
            self.balance * load_balance(layer_logits[mask], self.active) + self.z * z_loss(layer_logits[mask])
            for layer_logits in logits
        ]
        return torch.stack(parts).mean()


def load_balance(logits: Tensor, active: int) -> Tensor:
    """E sum_e f_e P_e of one router."""
    experts = logits.shape[1]
    chosen = logits.topk(active, dim=1).indices
    shares = torch.bincount(chosen.flatten(), minlength=experts) / chosen.numel()
    return experts * (shares * logits.softmax(1).mean(0)).sum()


def z_loss(logits: Tensor) -> Tensor:
    """Mean over tokens of the squared log of the softmax's denominator."""
    return logits.logsumexp(1).square().mean()


def router_loss(student: Any, balance: float = 0.0, z: float = 0.0) -> RouterLoss | None:
    """The losses of a student's routers; None where both weights are 0.

    Raises:
        ModelError: the student has no mixture of experts.
    """
    if not balance and not z:
        return None
    anatomy = discover(student)
    mixtures = [block.mixture for block in anatomy.blocks if block.mixture is not None]
    if not mixtures:
        raise ModelError(f"{anatomy.family}: the student has no routers", hint="leave out router_loss")
    routers = tuple(student.get_submodule(mixture.router) for mixture in mixtures)
    return RouterLoss(routers, mixtures[0].active, balance, z)
