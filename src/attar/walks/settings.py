"""Settings of the training loop, shared by every stage that trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attar.data.settings import check_text, data_field
from attar.errors import SettingsError
from attar.options import check_choices, setting

FIRST_WEIGHT = 8.0
"""How many times the first tokens of a row count in the sums of a sweep where nothing was measured."""

CURVATURE_ROWS = 32
"""Calibration rows that yaqa's curvature is collected on, or a quarter of more than four times as many: a
backward pass costs three forward ones."""

MEASURED_ROWS = 8
"""Calibration rows that a backward pass measures what each position counts on."""


def curvature_rows(samples: int) -> int:
    """Rows that yaqa's curvature is collected on, of ``samples`` calibration rows."""
    return min(samples, max(CURVATURE_ROWS, samples // 4))


def check_range(name: str, value: float, low: float, high: float, allowed: str) -> None:
    """Raise SettingsError unless ``low <= value <= high``."""
    if not low <= value <= high:
        raise SettingsError(name, value, allowed)


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """One training run: AdamW, linear warm-up, cosine decay, clipping, gradient accumulation.

    A step sees ``batch_size * accumulate`` sequences of ``sequence_length`` tokens.
    """

    steps: int = setting(200, "optimizer steps")
    batch_size: int = setting(8, "sequences in one forward pass")
    accumulate: int = setting(1, "forward passes added up before a step")
    sequence_length: int = setting(512, "tokens in a sequence, at most the context")
    packing: str = setting(
        "stream",
        "stream: documents one after another; separate: no row holds two, rows are padded",
        choices=("stream", "separate"),
    )
    learning_rate: float = setting(1e-3, "peak learning rate")
    optimizer: str = setting(
        "adamw", "adamw, or muon for the matrices with adamw for the rest", choices=("adamw", "muon")
    )
    warmup: float = setting(0.05, "fraction of the steps spent warming up")
    min_lr_ratio: float = setting(0.1, "learning rate at the end, as a fraction of the peak")
    weight_decay: float = setting(0.1, "decoupled weight decay of the matrices")
    precision: str = setting(
        "auto",
        "arithmetic of the products; auto: bf16 where the device has it, else fp32",
        choices=("auto", "bf16", "fp32"),
    )
    gradient_checkpointing: bool = setting(
        False, "activations are computed again in the backward pass: less memory, a third slower"
    )
    evaluate_every: int = setting(0, "steps between held-out losses; 0: only at the end")
    checkpoint_every: int = setting(50, "steps between resumable states")
    patience: int = setting(0, "stop after this many held-out losses without a better one; 0: never")
    data: str = data_field()
    bos: ClassVar[str] = "auto"  # where the tokenizer itself puts one
    seed: int = setting(0, "seed of the data order and of every draw")
    device: str = setting("auto", "auto (a GPU where there is one), cpu, cuda or cuda:1")

    def __post_init__(self) -> None:
        check_text(self)
        for name in ("steps", "batch_size", "accumulate", "checkpoint_every"):
            check_range(name, getattr(self, name), 1, 2**40, "at least 1")
        for name in ("evaluate_every", "patience", "weight_decay"):
            check_range(name, getattr(self, name), 0, 2**63, "0 or more")
        check_range("sequence_length", self.sequence_length, 2, 2**24, "at least 2")
        check_range("learning_rate", self.learning_rate, 1e-12, 10.0, "between 1e-12 and 10")
        check_range("warmup", self.warmup, 0.0, 1.0, "between 0 and 1")
        check_range("min_lr_ratio", self.min_lr_ratio, 0.0, 1.0, "between 0 and 1")
        check_choices(self)
        if self.patience and not self.evaluate_every:
            raise SettingsError("patience", self.patience, "0 unless evaluate_every is set")
