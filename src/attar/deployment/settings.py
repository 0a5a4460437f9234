"""Settings of export."""

from __future__ import annotations

from dataclasses import dataclass, field

from attar.errors import SettingsError

VERSION = 1

FORMATS = ("dense", "compressed-tensors")
DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """Write a checkpoint for another engine, after checking that it will load there."""

    format: str = field(
        default="compressed-tensors",
        metadata={
            "help": "dense: ordinary safetensors; compressed-tensors: packed codes for transformers and vLLM",
            "choices": FORMATS,
        },
    )
    dtype: str = field(
        default="auto",
        metadata={"help": "number type of the dense tensors; auto: as stored", "choices": DTYPES},
    )

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise SettingsError("format", self.format, " or ".join(FORMATS))
        if self.dtype not in DTYPES:
            raise SettingsError("dtype", self.dtype, ", ".join(DTYPES))
