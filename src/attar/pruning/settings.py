"""Settings of structured pruning."""

from __future__ import annotations

from dataclasses import dataclass, field

from attar.data.settings import bos_field, check_text, data_field
from attar.errors import SettingsError
from attar.walks.settings import check_range

VERSION = 2

METHODS = ("heads", "neurons")


@dataclass(frozen=True, kw_only=True)
class PruneSettings:
    """Remove whole attention head groups or MLP neurons, the least important of each layer.

    Every layer keeps the same number, because a configuration file has one number for all layers.
    """

    method: str = field(
        default="neurons",
        metadata={
            "help": "heads: groups of query heads with their KV head; neurons: of the MLP",
            "choices": METHODS,
        },
    )
    ratio: float = field(default=0.25, metadata={"help": "fraction removed, 0 to below 1"})
    multiple_of: int = field(
        default=0,
        metadata={
            "help": "keep a multiple of this many neurons; 0: a power of two up to 64 that hits the ratio "
            "(within a quarter of what is removed)"
        },
    )
    rigid: str = field(
        default="error",
        metadata={
            "help": "families whose config has no number for fewer heads (GPT-2, OPT, BERT): refuse them, "
            "or zero the heads in place, which makes nothing smaller",
            "choices": ("error", "zero"),
        },
    )
    samples: int = field(default=64, metadata={"help": "calibration sequences whose gradients are averaged"})
    sequence_length: int = field(
        default=256, metadata={"help": "tokens in a calibration sequence, at most the context"}
    )
    batch_size: int = field(default=8, metadata={"help": "sequences in one pass"})
    precision: str = field(
        default="auto",
        metadata={
            "help": "arithmetic of the gradients; auto: bf16 where the device has it, else fp32",
            "choices": ("auto", "bf16", "fp32"),
        },
    )
    data: str = data_field()
    bos: str = bos_field()
    seed: int = field(default=0, metadata={"help": "seed of the calibration choice"})
    device: str = field(
        default="auto", metadata={"help": "auto (a GPU where there is one), cpu, cuda or cuda:1"}
    )

    def __post_init__(self) -> None:
        check_text(self)
        if self.method not in METHODS:
            raise SettingsError("method", self.method, " or ".join(METHODS))
        if self.rigid not in ("error", "zero"):
            raise SettingsError("rigid", self.rigid, "error or zero")
        if self.precision not in ("auto", "bf16", "fp32"):
            raise SettingsError("precision", self.precision, "auto, bf16 or fp32")
        if not 0.0 <= self.ratio < 1.0:
            raise SettingsError("ratio", self.ratio, "the fraction removed: at least 0 and below 1")
        for name in ("samples", "batch_size"):
            check_range(name, getattr(self, name), 1, 2**40, "at least 1")
        check_range("sequence_length", self.sequence_length, 2, 2**24, "at least 2")
        check_range("seed", self.seed, 0, 2**63, "0 or more")
        check_range("multiple_of", self.multiple_of, 0, 2**20, "0 or more")
