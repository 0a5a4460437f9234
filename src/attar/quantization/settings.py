"""Settings of quantization."""

from __future__ import annotations

from dataclasses import dataclass, field

from attar.errors import SettingsError
from attar.walks.settings import check_range

VERSION = 1

SCHEMES: dict[str, int] = {"W4A16": 4, "W8A16": 8}
"""Scheme name (compressed-tensors' words) to bits of a weight."""

METHODS = ("rtn", "gptq")


@dataclass(frozen=True, kw_only=True)
class QuantizeSettings:
    """Store the weights of the decoder's Linears in few bits, symmetric, with one scale per group."""

    scheme: str = field(
        default="W4A16", metadata={"help": "which tensors get how many bits", "choices": tuple(SCHEMES)}
    )
    group_size: int = field(
        default=128,
        metadata={
            "help": "inputs that share a scale: 128, 64, 32; 0: a whole row; "
            "-1: the largest of 128, 64, 32, 16 that divides every layer's inputs, else a whole row"
        },
    )
    method: str = field(
        default="gptq",
        metadata={"help": "rtn: round to nearest; gptq: round with the layer's Hessian", "choices": METHODS},
    )
    damp: float = field(
        default=0.01, metadata={"help": "GPTQ's lambda, as a fraction of the Hessian's mean diagonal"}
    )
    act_order: bool = field(
        default=True, metadata={"help": "GPTQ: columns of large activations first (static groups)"}
    )
    embedding_bits: int = field(
        default=0,
        metadata={
            "help": "8: store the embedding (and a tied head) in int8, one scale per row; 0: leave it",
            "choices": (0, 8),
        },
    )
    samples: int = field(default=128, metadata={"help": "calibration sequences"})
    sequence_length: int = field(
        default=512, metadata={"help": "tokens in a calibration sequence, at most the context"}
    )
    batch_size: int = field(default=8, metadata={"help": "sequences in one pass"})
    ignore: tuple[str, ...] = field(
        default=(), metadata={"help": "modules of the blocks left alone: names, or re: and a pattern"}
    )
    data: str = field(
        default="python-stdlib",
        metadata={"help": "python-stdlib, a file, a folder, JSONL[:field] or a hub data set"},
    )
    seed: int = field(default=0, metadata={"help": "seed of the calibration choice"})
    device: str = field(
        default="auto", metadata={"help": "auto (a GPU where there is one), cpu, cuda or cuda:1"}
    )

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise SettingsError("scheme", self.scheme, " or ".join(SCHEMES))
        if self.method not in METHODS:
            raise SettingsError("method", self.method, " or ".join(METHODS))
        if self.embedding_bits not in (0, 8):
            raise SettingsError("embedding_bits", self.embedding_bits, "0 or 8")
        check_range("group_size", self.group_size, -1, 2**20, "-1 (what fits), 0 (a whole row) or more")
        check_range("damp", self.damp, 0.0, 1.0, "between 0 and 1")
        for name in ("samples", "batch_size"):
            check_range(name, getattr(self, name), 1, 2**40, "at least 1")
        check_range("sequence_length", self.sequence_length, 2, 2**24, "at least 2")
