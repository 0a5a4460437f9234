"""The output side of the Hessian of the whole model's KL divergence, for two-sided rounding: Tseng, Sun, De
Sa 2025, "Model-Preserving Adaptive Rounding" (YAQA), arXiv 2505.22988, the sketch over tokens.

At the original weights the Hessian of the KL in one weight is the Fisher matrix F = E[ vec G vec G^T ], G
the gradient of the log-likelihood of labels sampled from the model's own output. The nearest Kronecker
product H_O (x) H_I is found by power iteration, H_O <- E[ G H_I G^T ]; its first step, from H_I = 1, is

    H_O = E[ G G^T ] = E[ |x_t|^2 g_t g_t^T ]

Letters: x_t (K,) the input of a Linear and g_t (N,) the gradient at its output for token t; G = g_t x_t^T.

Every token is a sample. A label's loss reaches a layer through several tokens (attention), so products of
different tokens belong to F as well, but in a sequence the products of labels at different positions, whose
mean is zero, dominate them: it takes thousands of sequences.

Differs from the paper: one step (a second left 1 to 2 % more KL of attar:tiny at 2, 3 and 4 bits, for a third
more time), on the calibration text; H_I is the layer's own, of its inputs after rounded layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from attar.errors import ModelError, NumericsError
from attar.progress import SILENT, Progress
from attar.sensitivity.gradients import GradientHooks, gradients


def output_hessians(
    model: nn.Module,
    batches: Sequence[Tensor],
    names: Sequence[str],
    *,
    seed: int = 0,
    autocast: torch.dtype | None = None,
    progress: Progress = SILENT,
    device: str | torch.device = "cpu",
) -> dict[str, Tensor]:
    """H_O of some Linears, float32 (N, N), trace N; zero where no gradient came. Memory besides the model and
    one backward pass: N^2 numbers for each; for less, call it for some modules at a time. Does not modify the
    model.

    Args:
        model: a causal language model in memory, in evaluation mode, on ``device``.
        batches: int64 (B, S) token batches, none padded.
        names: paths of ``nn.Linear`` or Conv1D modules.
        seed: of the labels.
        autocast: run the model in this type (bfloat16); the sums are float32 all the same.

    Raises:
        ModelError: a named module is no Linear.
        NumericsError: a gradient is NaN or infinite.
    """
    sums = {name: torch.zeros(2 * (_outputs(model, name),), device=device) for name in names}

    def add(name: str, x: Tensor, g: Tensor) -> None:
        X, D = x.flatten(0, 1).float(), g.flatten(0, 1).float()
        sums[name].addmm_(D.T, D * X.square().sum(1, keepdim=True))

    generator = torch.Generator(device).manual_seed(seed)
    with progress.task("curvature", total=len(batches)) as task:
        for _ in gradients(model, batches, GradientHooks(names, add), generator, autocast):
            task.advance()
    for name, total in sums.items():
        if not torch.isfinite(total).all():
            raise NumericsError(f"the gradient at {name} is NaN or infinite", hint="use float32")
        symmetric = (total + total.T) / 2
        sums[name] = symmetric * (len(total) / total.trace().clamp(min=1e-30))
    return sums


def _outputs(model: nn.Module, name: str) -> int:
    """N of a Linear or a Conv1D (which stores its weight transposed)."""
    module = model.get_submodule(name)
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or isinstance(module, nn.Embedding):
        raise ModelError(f"{name} is no Linear", hint="name Linear or Conv1D modules")
    outputs: int = weight.shape[0 if isinstance(module, nn.Linear) else 1]
    return outputs
