"""Kronecker factors of the Hessian of the whole model's KL divergence, for two-sided rounding: Tseng, Sun, De
Sa 2025, "Model-Preserving Adaptive Rounding" (YAQA), arXiv 2505.22988, the sketches over tokens and over
sequences.

At the original weights the Hessian of the KL in one weight is the Fisher matrix F = E[ vec G vec G^T ], G
the gradient of the log-likelihood of labels sampled from the model's own output. The nearest Kronecker
product H_O (x) H_I is found by power iteration:

    H_I <- E[ G^T H_O G ] ,  H_O <- E[ G H_I G^T ]          both from the factors of the round before

Letters: N outputs, K inputs of a Linear; x_t (K,) its input and g_t (N,) the gradient at its output for token
t; G (N, K) = sum over the tokens of a span of g_t x_t^T; S tokens a sequence; X (c, K) and D (c, N) inputs
and gradients of a span of c tokens, so that G^T H_O G = X^T (D H_O D^T) X and no G is formed.

The span: a label's loss reaches a layer through several tokens (attention), so products of g_t x_t^T and
g_u x_u^T of different tokens belong to the Hessian. With a span of the whole sequence (0) F is exact in the
mean, but a sequence is one sample, and the products of labels at different positions, whose mean is zero,
dominate it: it takes thousands of sequences. With a span of 1 every token is a sample, and products between
tokens are left out.

Scale: H_O has trace N (mean diagonal 1) and H_I carries the rest, tr(H_O) tr(H_I) = E ||G||^2 a token, so
that 1/2 tr(E^T H_O E H_I) estimates the KL, in nats per token, that a change E of the weight costs.

Differs from the paper: every round samples fresh labels, so that the noise of one round's factors is
independent of the next round's; contexts are the calibration text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from attar.errors import ModelError, NumericsError
from attar.progress import SILENT, Progress
from attar.sensitivity.gradients import GradientHooks, gradients


@dataclass(frozen=True)
class KroneckerFactors:
    """The factors of one Linear's Hessian.

    Attributes:
        output: H_O, float32 (N, N), trace N.
        input: H_I, float32 (K, K), with the scale; (0, 0) where it was not asked for.
    """

    output: Tensor
    input: Tensor


def collect(
    model: nn.Module,
    batches: Sequence[Tensor],
    names: Sequence[str],
    *,
    rounds: int = 2,
    draws: int = 1,
    span: int = 1,
    seed: int = 0,
    inputs: bool = True,
    autocast: torch.dtype | None = None,
    progress: Progress = SILENT,
    device: str | torch.device = "cpu",
) -> dict[str, KroneckerFactors]:
    """The factors of some Linears. Memory besides the model and one backward pass: 2 (N^2 + K^2) numbers
    for each, or N^2 for one round without H_I; for less, call it for some modules at a time. Does not modify
    the model.

    Args:
        model: a causal language model in memory, in evaluation mode, on ``device``.
        batches: int64 (B, S) token batches, none padded.
        names: paths of ``nn.Linear`` or Conv1D modules.
        rounds: power iterations from H_O = 1, H_I = 1; each is one pass over the batches.
        draws: label sets sampled for a batch in each round; more of them is less noise.
        span: c, tokens whose products with each other count; 0: all of a sequence.
        inputs: collect H_I in the last round as well.
        autocast: run the model in this type (bfloat16); the factors are float32 all the same.

    Raises:
        ModelError: a named module is no Linear.
        NumericsError: a gradient is NaN or infinite.
    """
    shapes = {name: _shape(model, name) for name in names}
    factors: dict[str, KroneckerFactors] = {}
    generator = torch.Generator(device).manual_seed(seed)
    with progress.task("kronecker", total=rounds * draws * len(batches)) as task:
        for left in reversed(range(rounds)):
            sums = {
                name: _Sums(shape, factors.get(name), span, inputs or left > 0, device)
                for name, shape in shapes.items()
            }
            hooks = GradientHooks(names, partial(_add, sums))
            passes = gradients(model, batches, hooks, draws, generator, autocast)
            for _ in passes:
                task.advance()
            factors = {name: total.value() for name, total in sums.items()}
    for name, factor in factors.items():
        if not (torch.isfinite(factor.input).all() and torch.isfinite(factor.output).all()):
            raise NumericsError(f"the gradient at {name} is NaN or infinite", hint="use float32")
    return factors


def _add(sums: dict[str, _Sums], name: str, x: Tensor, g: Tensor) -> None:
    sums[name].add(x, g)


class _Sums:
    """Sums of G^T H_O G and G H_I G^T over spans of tokens; ``factor`` None: of 1, which no product needs."""

    def __init__(
        self,
        shape: tuple[int, int],
        factor: KroneckerFactors | None,
        span: int,
        inputs: bool,
        device: str | torch.device,
    ) -> None:
        N, K = shape
        self.factor, self.span = factor, span
        self.output = torch.zeros(N, N, device=device)
        self.input = torch.zeros(K, K, device=device) if inputs else None
        self.energy = torch.zeros((), dtype=torch.float64, device=device)
        self.tokens = 0

    def add(self, x: Tensor, g: Tensor) -> None:
        """Add the sequences of a batch: inputs (B, S, K), gradients (B, S, N)."""
        X, D = _spans(x.float(), self.span), _spans(g.float(), self.span)  # (number, c, K or N)
        through_input = X if self.factor is None else X @ self.factor.input
        self.output.addmm_(D.flatten(0, 1).T, (through_input @ X.mT @ D).flatten(0, 1))
        self.tokens += x.shape[0] * x.shape[1]
        if self.input is not None:
            through_output = D if self.factor is None else D @ self.factor.output
            self.input.addmm_(X.flatten(0, 1).T, (through_output @ D.mT @ X).flatten(0, 1))
            self.energy += ((D @ D.mT) * (X @ X.mT)).sum(dtype=torch.float64)

    def value(self) -> KroneckerFactors:
        """The factors, with the scale in H_I; a Linear that no gradient reached has a zero H_I."""
        output = _symmetric(self.output)
        output = output * (len(output) / output.trace().clamp(min=1e-30))
        if self.input is None:
            return KroneckerFactors(output, output.new_empty(0, 0))
        into, energy = _symmetric(self.input), (self.energy / max(self.tokens, 1)).float()
        return KroneckerFactors(output, into * (energy / len(output) / into.trace().clamp(min=1e-30)))


def _spans(value: Tensor, span: int) -> Tensor:
    """(B, S, features) cut into (number, c, features), the last span of a sequence filled up with zeros."""
    span = span or value.shape[1]
    filled = nn.functional.pad(value, (0, 0, 0, -value.shape[1] % span))
    return filled.reshape(-1, span, value.shape[-1])


def _symmetric(H: Tensor) -> Tensor:
    return (H + H.T) / 2


def _shape(model: nn.Module, name: str) -> tuple[int, int]:
    """(N, K) of a Linear or a Conv1D (which stores its weight transposed)."""
    module = model.get_submodule(name)
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or isinstance(module, nn.Embedding):
        raise ModelError(f"{name} is no Linear", hint="name Linear or Conv1D modules")
    outputs, inputs = weight.shape if isinstance(module, nn.Linear) else weight.T.shape
    return outputs, inputs
