"""Wanda: a weight matters as much as it is large and its input is loud.

Sun, Liu, Bair, Kolter 2023, "A Simple and Effective Pruning Approach for Large Language Models", arXiv
2306.11695, eq. 1:

    S_ij = |W_ij| ||X_j||_2        compared within a row, weights unchanged

Letters: W (N, K) weight; X (T, K) inputs over T tokens, X_j the j-th input; S (N, K) scores.

Differs from the paper: an input that was always zero in the calibration text counts with the median norm of
the others, so that its weights are judged by their magnitude; with its own norm they would all go first,
although other text may need them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from attar.errors import NumericsError
from attar.quantization.hessian import informed

SAMPLE = 1024  # tokens whose inputs are kept, to measure output errors with
SHARE = 16  # of this many tokens of a batch one is kept


class InputNorms:
    """Accumulates ||X_j||_2 over any number of batches, and keeps the inputs of some tokens.

    Args:
        inputs: K.
        sample: tokens whose inputs are kept at most.
    """

    def __init__(self, inputs: int, sample: int = SAMPLE) -> None:
        self.sum = torch.zeros(inputs, dtype=torch.float64)
        self.tokens = 0
        self.spare = sample
        self.kept: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        """Add a batch of inputs (..., K)."""
        rows = x.reshape(-1, x.shape[-1]).float()
        self.sum = self.sum.to(x.device) + rows.square().sum(0, dtype=torch.float64)
        if self.spare:
            generator = torch.Generator().manual_seed(self.tokens)
            chosen = torch.randperm(len(rows), generator=generator)[: min(-(-len(rows) // SHARE), self.spare)]
            self.kept.append(rows[chosen.to(rows.device)].clone())
            self.spare -= len(chosen)
        self.tokens += len(rows)

    def reduce(self, total: Callable[[Tensor], Tensor]) -> None:
        """Add the sums of several processes: ``total`` of a tensor is its sum over them. The tokens that are
        kept stay those of this process."""
        self.sum = total(self.sum)
        self.tokens = int(total(torch.tensor(self.tokens)))

    def value(self) -> Tensor:
        """||X_j||_2, float32 (K,); see :func:`attar.quantization.hessian.informed`.

        Raises:
            NumericsError: an input is not finite.
        """
        norms = self.sum.sqrt().float()
        if not torch.isfinite(norms).all():
            raise NumericsError("an input of a layer is not finite", hint="check the model: attar inspect")
        return informed(norms)

    @property
    def unseen(self) -> int:
        """Inputs that were always zero."""
        return int((self.sum == 0).sum())

    def output_error(self, weight: Tensor, changed: Tensor) -> float:
        """||(W - W') X^T||^2 / ||W X^T||^2 over the tokens kept."""
        X = torch.cat(self.kept) if self.kept else weight.new_zeros(1, weight.shape[1])
        lost, energy = (
            (X @ part.float().T).square().sum(dtype=torch.float64) for part in (weight - changed, weight)
        )
        return float(lost / energy.clamp(min=1e-30))


def wanda_scores(weight: Tensor, norms: Tensor) -> Tensor:
    """S, float32 (N, K).

    Args:
        norms: ||X_j||_2 (K,).
    """
    return weight.float().abs() * norms.to(weight.device)


def observe_norms(
    model: nn.Module, inputs: Mapping[str, int]
) -> tuple[dict[str, InputNorms], list[RemovableHandle]]:
    """Accumulators of some modules' inputs, which hooks fill whenever the model runs, except on meta; and the
    hooks.

    Args:
        inputs: K by module name.
    """
    accumulators = {name: InputNorms(count, sample=0) for name, count in inputs.items()}
    hooks = []
    for name, accumulator in accumulators.items():

        def add(_: nn.Module, args: tuple[Tensor, ...], accumulator: InputNorms = accumulator) -> None:
            if not args[0].is_meta:
                accumulator.add(args[0])

        hooks.append(model.get_submodule(name).register_forward_pre_hook(add))
    return accumulators, hooks
