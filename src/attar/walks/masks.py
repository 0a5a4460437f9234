"""Masks of a sparse model while it is trained: weights that are zero stay zero.

    g = mask * g  before clipping and the optimizer's moments;   W = mask * W  after every optimizer step

so that the norm that is clipped and the moments see kept weights only, and neither momentum, weight decay
nor Muon's orthogonal update (which is dense) brings a pruned weight back. N:M patterns stay N:M.

Letters: W (N, K) the weight of a Linear as its module stores it, g its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from attar.errors import NumericsError
from attar.walks.distributed import like, own_part

MaskOf = Callable[[Tensor], Tensor | None]


@dataclass(frozen=True)
class Masks:
    """Which weights are trained.

    Attributes:
        kept: by parameter name, bool of the parameter's shape: False where the weight stays zero.
    """

    kept: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, modules: Sequence[str], mask_of: MaskOf) -> Masks:
        """The masks of some Linears, named by module.

        Args:
            mask_of: the mask of a weight; None: all of it is trained.
        """
        names = [f"{module}.weight" for module in modules]
        masks = {name: mask_of(model.get_parameter(name).detach()) for name in names}
        return cls({name: mask for name, mask in masks.items() if mask is not None})

    def inside(self, wrapper: str) -> Masks:
        """The same for a module that holds the model under the name ``wrapper``."""
        return Masks({f"{wrapper}.{name}": mask for name, mask in self.kept.items()})

    def __bool__(self) -> bool:
        return bool(self.kept)

    @property
    def sparsity(self) -> float:
        """Fraction of the masked weights that stay zero."""
        total = sum(int(mask.numel()) for mask in self.kept.values())
        return 1.0 - sum(int(mask.count_nonzero()) for mask in self.kept.values()) / max(total, 1)

    def pairs(self, model: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
        """The parameters with their pruned weights: bool, True where the weight stays zero; of a divided
        parameter (distributed.py) both are what this process holds."""
        parameters = dict(model.named_parameters())
        return [
            (parameters[name], own_part(like(parameters[name], ~mask.to(parameters[name].device))))
            for name, mask in self.kept.items()
        ]

    def check(self, model: nn.Module) -> None:
        """Raise unless every masked weight is zero.

        Raises:
            NumericsError: names the first Linear with other values.
        """
        for name, mask in self.kept.items():
            weight = model.get_parameter(name).detach()
            filled = int(weight[~mask.to(weight.device)].count_nonzero())
            if filled:
                raise NumericsError(
                    f"{name}: {filled} pruned weights are no longer zero after training",
                    hint="recover the pruned model again; --keep-zeros false gives its zeros up",
                )


@torch.no_grad()  # type: ignore[untyped-decorator]
def mask_gradients(pairs: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    """Clear the gradients of pruned weights; see :meth:`Masks.pairs`."""
    for parameter, pruned in pairs:
        if parameter.grad is not None:
            own_part(parameter.grad).masked_fill_(pruned, 0.0)


@torch.no_grad()  # type: ignore[untyped-decorator]
def mask_weights(pairs: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    """Set pruned weights to zero; see :meth:`Masks.pairs`."""
    for parameter, pruned in pairs:
        own_part(parameter).masked_fill_(pruned, 0.0)
