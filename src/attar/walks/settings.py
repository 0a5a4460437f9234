"""Settings of the training loop, shared by every stage that trains."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from attar.data.settings import check_text, data_field
from attar.errors import SettingsError

FIRST_WEIGHT = 8.0
"""How many times the first tokens of a row count in the sums of a sweep where nothing was measured."""

MEASURED_ROWS = 8
"""Calibration rows that a backward pass measures what each position counts on."""


def check_range(name: str, value: float, low: float, high: float, allowed: str) -> None:
    """Raise SettingsError unless ``low <= value <= high``."""
    if not low <= value <= high:
        raise SettingsError(name, value, allowed)


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """One training run: AdamW, linear warm-up, cosine decay, clipping, gradient accumulation.

    A step sees ``batch_size * accumulate`` sequences of ``sequence_length`` tokens.
    """

    steps: int = field(default=200, metadata={"help": "optimizer steps"})
    batch_size: int = field(default=8, metadata={"help": "sequences in one forward pass"})
    accumulate: int = field(default=1, metadata={"help": "forward passes added up before a step"})
    sequence_length: int = field(default=512, metadata={"help": "tokens in a sequence, at most the context"})
    packing: str = field(
        default="stream",
        metadata={
            "help": "stream: documents one after another; separate: no row holds two, rows are padded",
            "choices": ("stream", "separate"),
        },
    )
    learning_rate: float = field(default=1e-3, metadata={"help": "peak learning rate"})
    optimizer: str = field(
        default="adamw",
        metadata={
            "help": "adamw, or muon for the matrices with adamw for the rest",
            "choices": ("adamw", "muon"),
        },
    )
    warmup: float = field(default=0.05, metadata={"help": "fraction of the steps spent warming up"})
    min_lr_ratio: float = field(
        default=0.1, metadata={"help": "learning rate at the end, as a fraction of the peak"}
    )
    weight_decay: float = field(default=0.1, metadata={"help": "decoupled weight decay of the matrices"})
    precision: str = field(
        default="auto",
        metadata={
            "help": "arithmetic of the products; auto: bf16 where the device has it, else fp32",
            "choices": ("auto", "bf16", "fp32"),
        },
    )
    gradient_checkpointing: bool = field(
        default=False,
        metadata={"help": "activations are computed again in the backward pass: less memory, a third slower"},
    )
    evaluate_every: int = field(
        default=0, metadata={"help": "steps between held-out losses; 0: only at the end"}
    )
    checkpoint_every: int = field(default=50, metadata={"help": "steps between resumable states"})
    patience: int = field(
        default=0, metadata={"help": "stop after this many held-out losses without a better one; 0: never"}
    )
    data: str = data_field()
    bos: ClassVar[str] = "auto"  # where the tokenizer itself puts one
    seed: int = field(default=0, metadata={"help": "seed of the data order and of every draw"})
    device: str = field(
        default="auto", metadata={"help": "auto (a GPU where there is one), cpu, cuda or cuda:1"}
    )

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
        if self.optimizer not in ("adamw", "muon"):
            raise SettingsError("optimizer", self.optimizer, "adamw or muon")
        if self.packing not in ("stream", "separate"):
            raise SettingsError("packing", self.packing, "stream or separate")
        if self.precision not in ("auto", "bf16", "fp32"):
            raise SettingsError("precision", self.precision, "auto, bf16 or fp32")
        if self.patience and not self.evaluate_every:
            raise SettingsError("patience", self.patience, "0 unless evaluate_every is set")
