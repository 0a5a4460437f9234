"""Settings of ``attar plan``: the budget, the engine, the text of the measurements. Free of torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from attar.checkpoint.units import byte_count
from attar.data.settings import bos_field, check_text, data_field
from attar.errors import SettingsError
from attar.options import check_choices, setting
from attar.quantization.settings import GROUP_ORDERED
from attar.walks.settings import check_range

NOISE = 0.02
"""Nats a token below which KL says nothing about tasks (arXiv 2606.19558): plans are not ranked there."""

SCHEMES_OF = {
    "attar": ("W2A16", "W3A16", "W4A16", "W5A16", "W6A16", "W8A16"),
    "vllm": ("W4A16", "W8A16"),
}
"""Schemes of a layer by engine; llama.cpp has its types."""

ENGINES = (*SCHEMES_OF, "llama.cpp")

KV_DTYPES_OF = {"attar": ("auto", "int8", "int4")}
"""Formats of keys and values by engine; auto: 16 bits, the only one of the others."""

METHODS = ("rtn", *(name for name in GROUP_ORDERED if name != "yaqa"))
"""Roundings of a plan's recipe."""


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """What a model may take and lose, and where it will run."""

    size: str = setting("", "bytes of weights and KV cache together, such as 5GB; empty: any")
    quality: str = setting(
        "",
        "the most that may be lost, such as kl<=0.05 (nats a token); empty: any, or kl<=0.02 without size",
    )
    speed: str = setting("", "tokens a second of all sequences, such as decode>=40; empty: any")
    context: int | str = setting(0, "tokens of a sequence, such as 32k, whose KV cache counts; 0: none")
    batch: int = setting(1, "sequences at a time")
    engine: str = setting("attar", "the engine that will run it", ENGINES)
    hardware: str = setting(
        "this", "the machine that will run it: this, or a file that attar bench --kernels made there"
    )
    method: str = setting("gptq", "how the recipe rounds weights", METHODS)
    prune: str = setting(
        "",
        "shares of the parameters, such as 0.1,0.25: models cut by so much are tried beside the whole one; "
        "empty: none",
    )
    recover_tokens: int = setting(
        0, "tokens on which a cut model learns from the original, before it is compared and in the recipe"
    )
    check: int = setting(3, "neighbours of the plan that are measured as a whole to correct the prediction")
    data: str = data_field()
    bos: str = bos_field()
    samples: int = setting(
        0, "calibration sequences that losses are measured on, at most 32; 0: 8, of a mixture of experts 32"
    )
    sequence_length: int = setting(128, "tokens in a calibration sequence, at most the context")
    batch_size: int = setting(8, "sequences in one pass")
    seed: int = setting(0, "seed of the choice of text")
    device: str = setting("auto", "auto (a GPU where there is one), cpu, cuda or cuda:1")

    def __post_init__(self) -> None:
        check_choices(self)
        check_text(self)
        for name in ("batch", "batch_size"):
            check_range(name, getattr(self, name), 1, 2**20, "at least 1")
        check_range("samples", self.samples, 0, 2**20, "0 (as many as the model needs) or more")
        check_range("sequence_length", self.sequence_length, 2, 2**24, "at least 2")
        check_range("check", self.check, 0, 64, "0 (no check) to 64")
        check_range("recover_tokens", self.recover_tokens, 0, 2**50, "0 (no recovery) or more")
        _ = self.bytes, self.kl, self.tokens_per_second, self.tokens, self.shares
        if self.recover_tokens and not self.shares:
            raise SettingsError("recover_tokens", self.recover_tokens, "0 without prune: nothing is cut")
        if self.engine == "llama.cpp" and self.method == "awq":
            raise SettingsError("method", self.method, "another one with llama.cpp, as attar export has them")
        if self.speed and self.engine == "vllm":
            raise SettingsError("speed", self.speed, f"empty with {self.engine}, whose kernels are not timed")
        if self.hardware != "this" and self.engine == "llama.cpp":
            raise SettingsError("hardware", self.hardware, "this with llama.cpp, whose steps are timed here")
        if self.hardware != "this" and not self.speed:
            raise SettingsError("hardware", self.hardware, "this without speed, for which alone it is read")

    @property
    def bytes(self) -> int:
        """Bytes of weights and cache; 0: any."""
        size = byte_count("size", self.size)
        if self.size and not size:
            raise SettingsError("size", self.size, "a size such as 4.5GB or 900MiB")
        return size

    @property
    def kl(self) -> float:
        """The largest KL in nats a token; infinite: any."""
        if not self.quality:
            return math.inf if self.size or self.speed else NOISE
        return _bound("quality", self.quality, "kl", "<=", "kl<=0.05")

    @property
    def tokens_per_second(self) -> float:
        """The slowest decoding; 0: any."""
        return _bound("speed", self.speed, "decode", ">=", "decode>=40") if self.speed else 0.0

    @property
    def tokens(self) -> int:
        """The context in tokens."""
        match = re.fullmatch(r"\s*(\d{1,9})\s*([kK]?)\s*", str(self.context))
        if match is None:
            raise SettingsError("context", self.context, "a number of tokens such as 4096 or 32k")
        return int(match[1]) * (1024 if match[2] else 1)

    @property
    def shares(self) -> tuple[float, ...]:
        """Of the parameters that are cut, ascending."""
        try:
            shares = sorted({float(part) for part in self.prune.split(",")} if self.prune else ())
        except ValueError:
            shares = [math.nan]
        if not all(0 < share < 1 for share in shares):
            raise SettingsError("prune", self.prune, "shares between 0 and 1, such as 0.1,0.25")
        return tuple(shares)


def _bound(name: str, text: str, quantity: str, relation: str, example: str) -> float:
    """The number of ``kl<=0.05``."""
    match = re.fullmatch(rf"\s*{quantity}\s*{relation}\s*(\d+\.?\d*(?:[eE]-?\d+)?|\.\d+)\s*", text)
    value = float(match[1]) if match else 0.0
    if not 0 < value < math.inf:
        raise SettingsError(name, text, f"a bound such as {example}")
    return value
