"""Tuning of a rounded model: its codes stay, the scales of their groups and the norms learn end to end.

    W' = stored(f s) * (code - z)        f a factor for each scale, at first 1; of llama.cpp's blocks for
                                         each float16 number (d, d_m), whose integer codes stay
    w' = f w                             f a factor for each channel of a norm, or of a bias
    minimized: KL(original || tuned), mean over the tokens of text that the rounding did not read

The gradient of a scale is a sum over its group, and some ten thousand tokens are enough to learn it;
the gradients of single codes are noise then. EfficientQAT (Chen 2024, arXiv 2407.11062, second phase) trains
step sizes by cross-entropy, Norm-Tweaking (Li 2023, arXiv 2309.02784) norms layer by layer; here both learn
from the original's distribution, whose last states are computed once and kept.

Letters: R rows of S tokens; h, t (n, H) states before the head, of the tuned model and of the original.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from attar.data.examples import Examples
from attar.models.head import Head, head_of, hidden_states, product_type
from attar.progress import SILENT, Progress
from attar.quantization.grids import GGMLGrid, QuantizedTensor, TileParameters
from attar.quantization.grids.straight_through import through
from attar.quantization.methods.qat import SMALLEST, WeightQuantizer, attach, linear_of
from attar.walks.settings import TrainSettings
from attar.walks.train import TrainHistory, train

CHUNK = 1 << 24  # logits that exist at once
RATES = {2: 2e-3, 3: 1e-3}
RATE = 5e-4
"""Learning rates by bits, rounded down, and above: on SmolLM2-135M-Instruct 1e-2 diverges at 3 bits."""

WARMUP = 4  # steps
LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class TuningResult:
    """What was learned.

    Attributes:
        weights: codes with tuned scales, by module name.
        norms: by parameter name, float32.
        before, after: KL(original || model) on the held-out rows, nats a token.
    """

    weights: dict[str, QuantizedTensor]
    norms: dict[str, Tensor]
    before: float
    after: float
    history: TrainHistory


@dataclass(frozen=True)
class StateExamples(Examples):
    """Rows with the original's last states, bfloat16 (R, S, H)."""

    states: Tensor = field(default_factory=lambda: torch.empty(0))


class Factor(nn.Module):  # type: ignore[misc]
    """A parametrization: a parameter times a factor for each of its numbers."""

    def __init__(self, parameter: Tensor) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones_like(parameter))

    def forward(self, parameter: Tensor) -> Tensor:
        """The tuned parameter."""
        return parameter * self.factor.clamp(min=SMALLEST)


class TunedBlocks(nn.Module):  # type: ignore[misc]
    """A parametrization of a weight in a block format of llama.cpp: its float16 numbers times factors,
    rounded as they are stored.

    Args:
        quantized: codes and what the file holds beside them.
        transposed: the module stores (K, N).
    """

    def __init__(self, quantized: QuantizedTensor, device: torch.device, *, transposed: bool) -> None:
        super().__init__()
        assert isinstance(quantized.grid, GGMLGrid)
        self.grid, self.transposed = quantized.grid, transposed
        self.register_buffer("codes", quantized.codes.to(device), persistent=False)
        self.stored = {name: value.to(device) for name, value in quantized.parameters.stored.items()}
        ones = {
            name: nn.Parameter(torch.ones_like(value, dtype=torch.float32))
            for name, value in self.stored.items()
            if value.is_floating_point()
        }
        self.factors = nn.ParameterDict(ones)

    def forward(self, weight: Tensor) -> Tensor:
        """W' as the module stores it."""
        spread = self._at(torch.float32).map(lambda value: value[:, None, :, None])
        values = self.grid.decode(self.grid.tile(self.codes), spread)
        decoded = self.grid.untile(values, (self.codes.shape[0], self.codes.shape[1]))
        return decoded.T if self.transposed else decoded

    def quantized(self, weight: Tensor) -> QuantizedTensor:
        """The codes and the stored numbers that forward computes with."""
        with torch.no_grad():
            return QuantizedTensor(self.grid, self.codes, self._at(torch.float16))

    def _at(self, kind: torch.dtype) -> TileParameters:
        numbers = {}
        for name, factor in self.factors.items():
            soft = self.stored[name].float() * factor.clamp(min=SMALLEST)
            numbers[name] = through(soft, soft.detach().clamp(-LARGEST, LARGEST).half().float()).to(kind)
        return self.grid.parameters({**self.stored, **numbers})


def original_states(model: nn.Module, rows: Tensor, batch: int) -> StateExamples:
    """Rows int64 (R, S) with the states that the original model's head reads.

    Args:
        model: causal, with a plain head (:func:`~attar.models.head.head_of`).
        batch: rows of a pass.
    """
    device = next(model.parameters()).device
    with torch.no_grad():
        states = [
            hidden_states(model, part.to(device)).to("cpu", torch.bfloat16) for part in rows.split(batch)
        ]
    examples = Examples.of_text(rows)
    return StateExamples(examples.tokens, examples.targets, None, torch.cat(states))


def tune(
    model: nn.Module,
    quantized: Mapping[str, QuantizedTensor],
    examples: StateExamples,
    held_out: StateExamples,
    settings: TrainSettings,
    *,
    norms: Sequence[str],
    work: Path | None = None,
    progress: Progress = SILENT,
) -> TuningResult:
    """Learn the scales of rounded Linears and the norms of a model.

    Args:
        model: causal, float32, original weights, with a plain head; afterwards it holds the tuned ones.
        quantized: codes and scales by module name, on grids whose scales are numbers.
        examples, held_out: text with the original's states: what is learned from, what decides.
        settings: steps, rows of a step, rate.
        norms: names of the parameters of one dimension that are tuned as well.
        work: folder of resumable states.

    Raises:
        SettingsError: a grid searches for its scales itself.
        NumericsError: the training diverged.
        StoppedError: Ctrl-C or SIGTERM came; the state is written.
    """
    head = head_of(model)
    assert head is not None, "the caller looks for the head"
    head = head.to(torch.bfloat16 if settings.precision == "bf16" else torch.float32)
    model.requires_grad_(False)
    quantizers = {name: _attach(linear_of(model, name), stored) for name, stored in quantized.items()}
    for name in norms:
        module, leaf = _owner(model, name)
        parametrize.register_parametrization(module, leaf, Factor(getattr(module, leaf).detach()))
        module.parametrizations[leaf].original.requires_grad_(False)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return head_kl(hidden_states(model, batch.inputs), batch.states, head)

    def measure(model: nn.Module) -> float:
        losses = [loss(model, part.to(head.weight.device)) for part in held_out.split(settings.batch_size)]
        return float(torch.stack(losses).mean())

    with (
        torch.no_grad(),
        torch.autocast(head.weight.device.type, torch.bfloat16, settings.precision == "bf16"),
    ):
        before = measure(model.eval())
    history = train(
        model, loss, examples, settings, work=work, held_out=measure, progress=progress, what="tune"
    )
    weights = {name: quantizer.quantized(torch.empty(0)) for name, quantizer in quantizers.items()}
    tuned = {name: getattr(*_owner(model, name)).detach().clone() for name in norms}
    for name in quantized:
        parametrize.remove_parametrizations(linear_of(model, name), "weight", leave_parametrized=True)
    for name in norms:
        parametrize.remove_parametrizations(*_owner(model, name), leave_parametrized=True)
    return TuningResult(weights, tuned, before, history.best, history)


def _attach(module: nn.Module, quantized: QuantizedTensor) -> WeightQuantizer | TunedBlocks:
    """Parametrize a Linear's weight with its codes and what is learned beside them."""
    if not isinstance(quantized.grid, GGMLGrid):
        return attach(module, quantized.grid, quantized, "scales")
    weight: Any = module.weight
    weight.requires_grad_(False)
    blocks = TunedBlocks(quantized, weight.device, transposed=not isinstance(module, nn.Linear))
    parametrize.register_parametrization(module, "weight", blocks, unsafe=True)
    return blocks


def head_kl(h: Tensor, t: Tensor, head: Head) -> Tensor:
    """KL(original || tuned) in nats, mean over tokens, through one head a chunk of tokens at a time.

    Args:
        h: (..., H), differentiable; t: the original's, of the same shape.
    """
    loss: Tensor = _HeadKL.apply(h.flatten(0, -2), t.flatten(0, -2), head)
    return loss


class _HeadKL(torch.autograd.Function):  # type: ignore[misc]
    """The gradient is made with the loss, chunk by chunk: dh = (softmax(z) - softmax(z_t)) W / n."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, t: Tensor, head: Head) -> Tensor:
        kind = product_type(h)
        used, total = head.to(kind), h.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(h, dtype=torch.float32) if h.requires_grad else None
        for rows in _chunks(len(h), len(head.weight)):
            z = used.logits(h[rows].to(kind))
            log_q = z.float().log_softmax(-1)
            log_p = used.logits(t[rows].to(kind)).float().log_softmax(-1)
            p = log_p.exp()
            total += (p * (log_p - log_q)).sum()
            if gradient is not None:
                dz = used.backward(z, log_q.exp_().sub_(p).div_(len(h)).to(kind))
                gradient[rows] = (dz @ used.weight).float()
        ctx.gradient = gradient
        return total / len(h)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient * upstream[0], None, None


def _chunks(count: int, vocabulary: int) -> Iterator[slice]:
    step = max(CHUNK // vocabulary, 1)
    return (slice(start, start + step) for start in range(0, count, step))


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module of a parameter, and the parameter's name in it."""
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def tunable_norms(model: nn.Module) -> list[str]:
    """Parameters of one dimension named weight or bias: norms, and biases of Linears."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() == 1 and name.rpartition(".")[2] in ("weight", "bias")
    ]
