"""Settings of quantization."""

from __future__ import annotations

from dataclasses import dataclass, field

from attar.data.settings import bos_field, check_text, data_field
from attar.errors import SettingsError
from attar.quantization.schemes import SCHEMES
from attar.walks.settings import check_range

VERSION = 3

METHODS = (
    "rtn",
    "smoothquant",
    "awq",
    "gptq",
    "gptaq",
    "qronos",
    "yaqa",
    "autoround",
    "qat",
)
SMOOTHINGS = ("auto", "none", "smoothquant", "awq")
SCALES = ("auto", "absmax", "percentile", "mse", "output")
STARTS = ("auto", "rtn", "gptq", "qronos")
ORDERS = ("off", "static", "group")
ORDERED = ("awq", "gptq", "gptaq", "qronos", "yaqa")
"""Methods that see a layer's inputs before they form its groups, which act-order "group" asks for."""


@dataclass(frozen=True, kw_only=True)
class QuantizeSettings:
    """Store the weights of the blocks' Linears in few bits: choose a scheme (what is stored how), a method
    (how weights are rounded), and, if wanted, what is done to the float model before."""

    scheme: str = field(
        default="W4A16", metadata={"help": "which tensors get how many bits", "choices": tuple(SCHEMES)}
    )
    bits: float = field(
        default=0.0,
        metadata={
            "help": "mixed precision: average stored bits a weight, scales included; each layer's scheme is "
            "chosen by its measured sensitivity. 0: the scheme for all"
        },
    )
    group_size: int = field(
        default=-1,
        metadata={
            "help": "inputs that share a scale: 128, 64, 32; 0: a whole row; "
            "-1: the largest of 128, 64, 32 that divides every layer's inputs, else a whole row"
        },
    )
    method: str = field(
        default="gptq",
        metadata={
            "help": "rtn: to nearest; gptq, gptaq, qronos: with the layer's Hessian; yaqa: with the model's; "
            "smoothquant, awq: to nearest after scaling channels; autoround: learned block by block; "
            "qat: trained end to end",
            "choices": METHODS,
        },
    )
    rotate: bool = field(
        default=False, metadata={"help": "rotate the residual stream by a Hadamard matrix first"}
    )
    untie: bool = field(
        default=False,
        metadata={"help": "rotate: a head tied to the embedding may become a tensor of its own"},
    )
    smooth: str = field(
        default="auto",
        metadata={
            "help": "scale channels first, folded into the layer before; auto: what the method implies",
            "choices": SMOOTHINGS,
        },
    )
    alpha: float = field(
        default=-1.0,
        metadata={"help": "SmoothQuant's migration strength, 0 to 1; -1: searched for each layer"},
    )
    scales: str = field(
        default="auto",
        metadata={
            "help": "how a scale is chosen; mse: least error of the weight, output: of the layer's output; "
            "auto: output at 4 bits and below for methods that see data, else absmax",
            "choices": SCALES,
        },
    )
    refine: int = field(
        default=4,
        metadata={
            "help": "gptq, gptaq, qronos: passes of coordinate descent over the codes afterwards, the scales "
            "refitted between two; 0: off"
        },
    )
    damp: float = field(
        default=0.01, metadata={"help": "lambda, as a fraction of the Hessian's mean diagonal"}
    )
    act_order: str = field(
        default="static",
        metadata={
            "help": "columns of large activations first; group: groups follow that order as well, stored "
            "with each column's group (integers in groups; awq, gptq, gptaq, qronos, yaqa)",
            "choices": ORDERS,
        },
    )
    keep_zeros: bool = field(
        default=False, metadata={"help": "weights that are zero (pruned) stay zero, and the others make up"}
    )
    iterations: int = field(default=200, metadata={"help": "autoround: steps for each block"})
    start: str = field(
        default="auto",
        metadata={
            "help": "autoround, qat: the rounding to start from; auto: rtn for autoround, gptq for qat",
            "choices": STARTS,
        },
    )
    rounds: int = field(default=1, metadata={"help": "yaqa: power iterations for the Kronecker factors"})
    steps: int = field(default=300, metadata={"help": "qat: optimizer steps"})
    learning_rate: float = field(default=1e-4, metadata={"help": "qat: peak learning rate"})
    distill: float = field(
        default=1.0,
        metadata={"help": "qat: weight of the KL to the original model; the rest is cross-entropy"},
    )
    train: str = field(
        default="all",
        metadata={"help": "qat: what is trained; scales: codes stay", "choices": ("all", "scales")},
    )
    embedding_bits: int = field(
        default=0,
        metadata={
            "help": "8: store the embedding (and a tied head) in int8, one scale per row; 0: leave it",
            "choices": (0, 8),
        },
    )
    kv_cache: str = field(
        default="none",
        metadata={"help": "scales for a quantized KV cache", "choices": ("none", "fp8", "int8")},
    )
    double_quant: bool = field(
        default=False, metadata={"help": "NF4: the scales are quantized to 8 bits as well"}
    )
    ignore: tuple[str, ...] = field(
        default=(), metadata={"help": "modules of the blocks left alone: names, or re: and a pattern"}
    )
    overrides: tuple[str, ...] = field(
        default=(),
        metadata={"help": "MODULE=SCHEME for some modules: names, or re: and a pattern; SCHEME may be dense"},
    )
    samples: int = field(default=128, metadata={"help": "calibration sequences"})
    sequence_length: int = field(
        default=512, metadata={"help": "tokens in a calibration sequence, at most the context"}
    )
    batch_size: int = field(default=8, metadata={"help": "sequences in one pass"})
    data: str = data_field()
    bos: str = bos_field()
    check_tokens: int = field(
        default=2048,
        metadata={"help": "held-out tokens on which the result is compared with the original; 0: no check"},
    )
    precision: str = field(
        default="auto",
        metadata={
            "help": "arithmetic of the calibration passes; auto: bf16 where it is fast",
            "choices": ("auto", "fp32", "bf16"),
        },
    )
    seed: int = field(default=0, metadata={"help": "seed of the calibration choice and of learned methods"})
    device: str = field(
        default="auto", metadata={"help": "auto (a GPU where there is one), cpu, cuda or cuda:1"}
    )

    def __post_init__(self) -> None:
        check_text(self)
        _choice("scheme", self.scheme, tuple(SCHEMES))
        _choice("method", self.method, METHODS)
        _choice("smooth", self.smooth, SMOOTHINGS)
        _choice("scales", self.scales, SCALES)
        _choice("act_order", self.act_order, ORDERS)
        _choice("start", self.start, STARTS)
        _choice("train", self.train, ("all", "scales"))
        _choice("kv_cache", self.kv_cache, ("none", "fp8", "int8"))
        _choice("precision", self.precision, ("auto", "fp32", "bf16"))
        if self.embedding_bits not in (0, 8):
            raise SettingsError("embedding_bits", self.embedding_bits, "0 or 8")
        if self.bits:
            check_range("bits", self.bits, 1.0, 16.0, "between 1 and 16, or 0 for one scheme")
        check_range("group_size", self.group_size, -1, 2**20, "-1 (what fits), 0 (a whole row) or more")
        for name in ("damp", "distill"):
            check_range(name, getattr(self, name), 0.0, 1.0, "between 0 and 1")
        if self.alpha != -1.0:
            check_range("alpha", self.alpha, 0.0, 1.0, "between 0 and 1, or -1 to search")
        for name in ("samples", "batch_size", "iterations", "rounds", "steps"):
            check_range(name, getattr(self, name), 1, 2**40, "at least 1")
        check_range("sequence_length", self.sequence_length, 2, 2**24, "at least 2")
        check_range("check_tokens", self.check_tokens, 0, 2**40, "0 (no check) or more")
        check_range("refine", self.refine, 0, 2**20, "0 (off) or more")
        if self.act_order == "group" and self.method not in ORDERED:
            allowed = f"off or static with {self.method}; group goes with {', '.join(ORDERED)}"
            raise SettingsError("act_order", "group", allowed)
        for override in self.overrides:
            if not all(override.rpartition("=")[::2]):
                raise SettingsError("overrides", override, "MODULE=SCHEME")

    @property
    def smoothing(self) -> str:
        """What is done to the channels first: none, smoothquant or awq."""
        if self.smooth != "auto":
            return self.smooth
        return self.method if self.method in ("smoothquant", "awq") else "none"

    @property
    def rounding(self) -> str:
        """How weights are rounded once the float model is as it should be."""
        return "rtn" if self.method in ("smoothquant", "awq") else self.method


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise SettingsError(name, value, " or ".join(allowed))
