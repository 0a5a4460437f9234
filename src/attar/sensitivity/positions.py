"""What each position of a row is worth at the output of a Linear.

    w_s = mean over rows and features of g_s^2,   / mean over s

Letters: g_s (N,) the gradient at the Linear's output for the token at position s, of the log-likelihood of
labels sampled from the model's own output (gradients.py): with the Fisher matrix taken as w_s times 1 for
each token, a change E of the weight costs tr(E H E^T) with H = sum over tokens of w_s x x^T. GuidedQuant (Kim
et al. 2025, arXiv 2505.07004) weighs single tokens so. Here tokens of one position share a weight, and
neighbouring positions do, ever more of them: the first, second, third, fourth, two, two, four, four, eight
... A few rows are enough then, where a token's own gradient is noise: at 4 bits SmolLM2-135M loses 6 % more
with weights of single tokens from all rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from attar.errors import NumericsError
from attar.progress import SILENT, Progress
from attar.sensitivity.gradients import GradientHooks, gradients


def position_weights(
    model: nn.Module,
    rows: Tensor,
    names: Sequence[str],
    *,
    seed: int = 0,
    autocast: torch.dtype | None = None,
    progress: Progress = SILENT,
    device: str | torch.device = "cpu",
) -> dict[str, Tensor]:
    """w (S,), float32, mean 1, of some Linears. Does not modify the model.

    Args:
        model: a causal language model in memory, in evaluation mode, on ``device``.
        rows: int64 (R, S), none padded.
        names: paths of ``nn.Linear`` or Conv1D modules; those whose inputs are not rows of tokens (experts)
            and those that no gradient reached are not in the result.
        autocast: run the model in this type (bfloat16).

    Raises:
        NumericsError: a gradient is NaN or infinite.
    """
    count, length = rows.shape
    sums: dict[str, Tensor] = {}

    def add(name: str, _: Tensor, g: Tensor) -> None:
        if g.shape[:2] == (1, length):
            sums[name] = sums.get(name, 0.0) + g[0].float().square().mean(-1).double()

    generator = torch.Generator(device).manual_seed(seed)
    with progress.task("positions", total=count) as task:
        for _ in gradients(model, rows.split(1), GradientHooks(names, add), generator, autocast):
            task.advance()
    weights = {}
    for name, energy in sums.items():
        if not torch.isfinite(energy).all():
            raise NumericsError(f"the gradient at {name} is NaN or infinite", hint="use float32")
        shared = torch.cat([part.mean().expand(len(part)) for part in energy.split(shares(length))])
        if shared.sum() > 0:
            weights[name] = (shared / shared.mean()).float().cpu()
    return weights


def shares(length: int) -> list[int]:
    """Sizes of the runs of positions with one weight: 1, 1, 1, 1, 2, 2, 4, 4, 8, 8 and so on; the last ends
    with the row."""
    sizes = [1, 1, 1, 1]
    while sum(sizes) < length:
        start = sum(sizes)
        sizes += [start // 2, start // 2]
    while sum(sizes) > length:
        over = sum(sizes) - length
        last = sizes.pop()
        if last > over:
            sizes.append(last - over)
    return sizes
