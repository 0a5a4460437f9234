"""Settings of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field

from attar.data.settings import bos_field, check_text, data_field
from attar.errors import SettingsError

VERSION = 1

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class EvaluateSettings:
    """What is measured, on which text, and how precisely."""

    data: str = data_field()
    bos: str = bos_field()
    tokens: int = field(default=16384, metadata={"help": "held-out tokens to evaluate on"})
    sequence_length: int = field(
        default=512,
        metadata={"help": "tokens in a sequence, at most the context; the first is not predicted"},
    )
    batch_size: int = field(
        default=8, metadata={"help": "sequences in one pass (fewer when their logits are large)"}
    )
    speed: bool = field(default=True, metadata={"help": "measure prefill and decode tokens/s"})
    prompt_tokens: int = field(default=128, metadata={"help": "prompt of the speed measurement"})
    decode_tokens: int = field(
        default=32, metadata={"help": "tokens decoded in a round of the speed measurement"}
    )
    sample: str = field(
        default="def __init__(self", metadata={"help": "prompt of the greedy sample; empty: no sample"}
    )
    sample_tokens: int = field(default=48, metadata={"help": "length of the greedy sample"})
    seed: int = field(default=0, metadata={"help": "seed of the choice of text"})
    device: str = field(default="cpu", metadata={"help": "cpu, cuda or cuda:0"})
    dtype: str = field(
        default="auto",
        metadata={
            "help": "what to compute in; auto: float32 on a CPU, the checkpoint's own on a GPU",
            "choices": DTYPES,
        },
    )

    def __post_init__(self) -> None:
        check_text(self)
        for name, least in (
            ("tokens", 2),
            ("sequence_length", 2),
            ("batch_size", 1),
            ("prompt_tokens", 1),
            ("decode_tokens", 1),
            ("sample_tokens", 1),
        ):
            value = getattr(self, name)
            if value < least:
                raise SettingsError(name, value, f"at least {least}")
        if self.dtype not in DTYPES:
            raise SettingsError("dtype", self.dtype, ", ".join(DTYPES[:-1]) + f" or {DTYPES[-1]}")
