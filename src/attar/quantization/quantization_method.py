"""What a rounding method is: a walk that makes the codes of a model, and how a layer is rounded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from attar.checkpoint.open import Checkpoint
from attar.checkpoint.processes import SINGLE_PROCESS, Processes
from attar.progress import Progress
from attar.quantization.calibration import batches_of
from attar.quantization.columns import RoundingResult
from attar.quantization.grids import QuantizedTensor
from attar.quantization.plan import QuantizationPlan
from attar.quantization.settings import MethodSettings, QuantizeSettings
from attar.walks.sweep import AfterBlocks

CodeSource = Callable[[str, Callable[[], Tensor]], QuantizedTensor]
"""``codes(stored name, load)``: the quantized weight of a layer; ``load()`` reads the dense one as it is
stored."""


@dataclass(frozen=True)
class RoundingTask:
    """What a walk is given.

    Attributes:
        checkpoint: dense; the plan was made for it.
        work: folder of finished parts, which the processes share; survives a kill.
        processes: all that take the walk together.
        after_blocks: called with the hidden states after the last block, where a sweep rounds.
    """

    checkpoint: Checkpoint
    plan: QuantizationPlan
    settings: QuantizeSettings
    work: Path
    progress: Progress
    after_blocks: AfterBlocks | None = None
    processes: Processes = SINGLE_PROCESS

    def batches(self) -> list[Tensor]:
        """The calibration batches, int64 (B, S)."""
        return batches_of(self.checkpoint, self.settings)


@dataclass(frozen=True)
class RoundedModel:
    """What a walk returns.

    Attributes:
        codes: see :data:`CodeSource`.
        reports: one row a layer, once all codes have been read.
        input_scales: learned static scales of inputs, by module name.
        precision: of the calibration's or the training's products: ``bf16`` or ``fp32``; empty where there
            were none.
        norms: learned norms and biases, float32, by stored name.
        tuning: what the card says of the tuning; empty where there was none.
        mtp: codes of a multi-token prediction head's Linears, by stored name; those that are not there are
            rounded to nearest.
        mtp_reports: one row of each.
    """

    codes: CodeSource
    reports: Callable[[], list[dict[str, Any]]]
    input_scales: Mapping[str, float] = field(default_factory=dict)
    curve: list[dict[str, float]] = field(default_factory=list)
    precision: str = ""
    norms: Mapping[str, Tensor] = field(default_factory=dict)
    tuning: Mapping[str, Any] = field(default_factory=dict)
    mtp: Mapping[str, QuantizedTensor] = field(default_factory=dict)
    mtp_reports: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class QuantizationMethod:
    """A rounding method.

    Attributes:
        walk: makes the codes of a checkpoint.
        solver: rounds one weight, for rounding.round_layers; None: to nearest.
        original_inputs: the solver compares with the original model's inputs: ``cross=``.
        model_hessian: the solver is given the output side of the model's Hessian: ``output_hessian=``.
        stacked: weights with the same inputs are rounded in one call.
        refined: coordinate descent on the codes follows.
        search_below: bits a weight under which ``scales: auto`` searches for the least output error.
        sees_text: calibration text is run through the model.
    """

    settings: type[MethodSettings]
    walk: Callable[[RoundingTask], RoundedModel]
    solver: Callable[..., RoundingResult] | None = None
    original_inputs: bool = False
    model_hessian: bool = False
    stacked: bool = False
    refined: bool = False
    search_below: float = 0.0
    sees_text: bool = True
