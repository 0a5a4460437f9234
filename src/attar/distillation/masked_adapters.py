"""Low-rank adapters on a sparse student: the weights that are zero stay zero under the adapters too.

    W' = W + c / r * M o (B A) ;  M = (W != 0) ;  A (r, K), B (N, r) trained ;  c = 2 r

While it is trained, W' is a parametrization of each Linear's weight; afterwards W' is the weight. The change
M o (B A) has not rank r, so no file of adapters can hold it: peft, and whatever adds B A alone, would fill
the zeros.

Letters: W (N, K) weight of a Linear of the student, frozen; M its mask; r rank; c scaling.

Differs from LoRA (adapters.py, arXiv 2106.09685): the mask, and that B A is multiplied out in every step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from attar.distillation.adapters import SCALING, error_of, start_at
from attar.walks.masks import Masks


class MaskedLowRank(nn.Module):  # type: ignore[misc]
    """A parametrization: W -> W + c / r * M o (B A).

    Args:
        weight: as the module stores it; gives shape and device.
        mask: M of the same shape; None: the weight has no zeros to keep.
        transposed: the module stores (K, N).
        error: W_teacher - W (N, K), whose best fit on the mask A and B start at; None: B starts at zero.
    """

    def __init__(
        self, weight: Tensor, mask: Tensor | None, rank: int, *, transposed: bool, error: Tensor | None = None
    ) -> None:
        super().__init__()
        N, K = reversed(weight.shape) if transposed else weight.shape
        self.transposed = transposed
        self.A = nn.Parameter(torch.empty(rank, K))
        self.B = nn.Parameter(torch.zeros(N, rank))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))  # drawn on the CPU, so the same on every device
        self.to(weight.device)
        self.register_buffer("mask", mask, persistent=False)
        if error is not None:
            kept = error if mask is None else error * (mask.T if transposed else mask)
            start_at(self.A, self.B, kept)

    def forward(self, weight: Tensor) -> Tensor:
        """W' as the module stores it."""
        change = self.A.T @ self.B.T if self.transposed else self.B @ self.A
        return weight + SCALING * (change if self.mask is None else change * self.mask)


def add_masked_adapters(
    student: Any, names: Sequence[str], rank: int, masks: Masks, teacher: Any | None = None
) -> Any:
    """Freeze a model and put masked adapters on some of its Linears, in place. Returns it.

    Args:
        names: paths of the Linears.
        masks: of their weights.
        teacher: with the original weights, for the start at W_teacher - W; None: B starts at zero.

    Raises:
        SettingsError: the teacher has a Linear of another shape.
    """
    errors = {} if teacher is None else {name: error_of(student, teacher, name) for name in names}
    student.requires_grad_(False)
    for name in names:
        module = student.get_submodule(name)
        adapter = MaskedLowRank(
            module.weight,
            masks.kept.get(f"{name}.weight"),
            rank,
            transposed=not isinstance(module, nn.Linear),
            error=errors.get(name),
        )
        parametrize.register_parametrization(module, "weight", adapter, unsafe=True)
    return student


def merge_masked_adapters(student: Any, names: Sequence[str]) -> Any:
    """Make W' the weight of each Linear, in place. Returns the model."""
    for name in names:
        parametrize.remove_parametrizations(student.get_submodule(name), "weight", leave_parametrized=True)
    return student
