"""An objective on logits that exist, as tests of its values need it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attar.distillation.objectives.chunked import LossAndGrad, blockwise, mean_of_chunks


def on_logits(objective: LossAndGrad, z: Tensor, *teacher: Tensor, T: float = 1.0, **options: Any) -> Tensor:
    """The mean of an objective over tokens; a scalar, float32 (float64 for float64 logits), 0 for no tokens.

    Args:
        objective: its loss and gradient.
        z: (..., V) student's logits, any float type; receives the gradient.
        teacher: what the objective reads of it, with the same leading dimensions.
        T: temperature.
        options: of the objective.
    """
    batch = z.shape[:-1]
    assert all(x.shape[: len(batch)] == batch for x in teacher), (z.shape, [x.shape for x in teacher])
    rows = [x.detach().reshape(-1, *x.shape[len(batch) :]) for x in teacher]

    def chunk_loss(chunk: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        return blockwise(objective, chunk, *(x[part] for x in rows), T=T, out=chunk, **options)

    return mean_of_chunks(chunk_loss, z)
