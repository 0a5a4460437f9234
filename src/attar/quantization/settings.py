"""Settings of quantization: the settings of every method, and a class for each method. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from attar.data.settings import bos_field, check_text, data_field
from attar.errors import SettingsError
from attar.options import check_choices, listed, nest, setting
from attar.quantization.schemes import ALIASES, KV_CACHES, SCHEMES, scheme_hint
from attar.sparsity import Sparsity, parse_sparsity
from attar.walks.settings import FIRST_WEIGHT, check_range

VERSION = 3


@dataclass(frozen=True, kw_only=True)
class StorageSettings:
    """Which tensors are stored in which form."""

    scheme: str = setting(
        "W4A16",
        "which tensors get how many bits; W4 is W4A16",
        choices=tuple(SCHEMES),
        aliases=ALIASES,
        hint=scheme_hint,
    )
    bits: float = setting(
        0.0,
        "mixed precision: average stored bits a weight, scales included; each layer's scheme is chosen by "
        "its measured sensitivity. 0: the scheme for all",
    )
    group_size: int = setting(
        -1,
        "inputs that share a scale: 128, 64, 32; 0: a whole row; -1: the largest of 128, 64, 32 that divides "
        "every layer's inputs, else a whole row",
    )
    keep_zeros: str = setting(
        "auto",
        "weights that are zero stay zero, and the other weights compensate; auto: zeros of a pruned model",
        ("auto", "true", "false"),
    )
    embedding_bits: int = setting(
        0, "8: store the embedding (and a tied head) in int8, one scale per row; 0: leave it", (0, 8)
    )
    kv_cache: str = setting(
        "none", "what a quantized KV cache needs: scales; int4: of attar's runtime", tuple(KV_CACHES)
    )
    kv_bits: float = setting(
        0.0,
        "average bits of a number in the int4 cache, scales included: the layers that lose most keep 8 bits. "
        "0: 4 bits in all",
    )
    double_quant: bool = setting(False, "NF4: the scales are quantized to 8 bits as well")
    moe_schemes: str = setting(
        "together",
        "schemes of a layer's experts, with bits and overrides: together: one for all, as engines need it; "
        "apart: each expert may have its own, for attar",
        ("together", "apart"),
    )
    qkv: str = setting(
        "together",
        "schemes of q, k and v, with bits and overrides: together: one for all, because engines run them as "
        "one matrix; apart: each may have its own, for attar and transformers",
        ("together", "apart"),
    )
    ignore: tuple[str, ...] = setting((), "modules of the blocks left alone: names, or re: and a pattern")
    overrides: tuple[str, ...] = setting(
        (), "MODULE=SCHEME for some modules: names, or re: and a pattern; SCHEME may be dense"
    )

    def __post_init__(self) -> None:
        check_choices(self)
        if self.bits:
            check_range("bits", self.bits, 1.0, 16.0, "between 1 and 16, or 0 for one scheme")
        if self.kv_bits and self.kv_cache != "int4":
            raise SettingsError("kv_bits", self.kv_bits, f"0 with kv_cache {self.kv_cache}; it is for int4")
        if self.kv_bits:
            check_range("kv_bits", self.kv_bits, 4.0, 12.0, "between the bits of int4 and of int8, or 0")
        check_range("group_size", self.group_size, -1, 2**20, "-1 (what fits), 0 (a whole row) or more")
        for override in self.overrides:
            if not all(override.rpartition("=")[::2]):
                raise SettingsError("overrides", override, "MODULE=SCHEME")

    def check_sizes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse a group size that fits no tensor, by the headers; the plan looks at each Linear.

        Args:
            shapes: of the checkpoint's tensors by name.

        Raises:
            SettingsError: ``group_size`` divides no size of a matrix in the blocks.
        """
        matrices = {name: shape for name, shape in shapes.items() if len(shape) > 1 and "layers." in name}
        sizes = {size for shape in matrices.values() for size in shape}
        if not sizes or self.group_size < 1 or any(size % self.group_size == 0 for size in sizes):
            return
        fits = [str(group) for group in (128, 64, 32, 16) if all(size % group == 0 for size in sizes)]
        allowed = " or ".join(fits) or "0 (a whole row)"
        name, shape = next(iter(matrices.items()))
        message = f"a divisor of the layers' inputs: {name} is {list(shape)}; {allowed} fits"
        raise SettingsError("group_size", self.group_size, message)


@dataclass(frozen=True, kw_only=True)
class TransformSettings:
    """What is done to the float model before it is rounded."""

    rotate: bool = setting(False, "rotate the residual stream by a Hadamard matrix first")
    untie: bool = setting(False, "rotate: a head tied to the embedding may become a separate tensor")
    smooth: str = setting(
        "auto",
        "scale channels first, folded into the layer before; auto: what the method implies",
        ("auto", "none", "smoothquant", "awq"),
    )
    alpha: float = setting(-1.0, "SmoothQuant's migration strength, 0 to 1; -1: searched for each layer")

    def __post_init__(self) -> None:
        check_choices(self)
        if self.alpha != -1.0:
            check_range("alpha", self.alpha, 0.0, 1.0, "between 0 and 1, or -1 to search")


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings:
    """The text that is run through the model while it is quantized."""

    samples: int = setting(128, "calibration sequences")
    sequence_length: int = setting(512, "tokens in a calibration sequence, at most the context")
    batch_size: int = setting(8, "sequences in one pass")
    first_tokens: float = setting(
        -1.0,
        "how many times the first 16 tokens of a row count, which every later one reads; -1: as often as the "
        "model's gradients say, position by position and Linear by Linear, or 8 times where it does not fit "
        "in memory or a block is learned as a whole; not with smoothquant, qat or sparsity",
    )
    precision: str = setting(
        "auto",
        "arithmetic of the calibration passes; auto: bf16 where it is fast",
        ("auto", "fp32", "bf16"),
    )
    moe_calibrate: str = setting(
        "routed",
        "tokens that count for an expert: routed: the tokens of its router, filled up to moe_floor; "
        "all: every token. What leaves the experts is what the router chose either way",
        ("routed", "all"),
    )
    moe_floor: float = setting(
        1.0,
        "an expert that saw fewer tokens than this many times its inputs is filled up with others' "
        "tokens; 0: with none",
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_range("moe_floor", self.moe_floor, 0.0, 1e6, "0 (none) or more")
        if self.first_tokens != -1.0:
            check_range("first_tokens", self.first_tokens, 0.0, 1e6, "0 or more, or -1 (measured)")
        for name in ("samples", "batch_size"):
            check_range(name, getattr(self, name), 1, 2**40, "at least 1")
        check_range("sequence_length", self.sequence_length, 2, 2**24, "at least 2")

    @property
    def first_weight(self) -> float:
        """How many times the first tokens of a row count where nothing is measured."""
        return FIRST_WEIGHT if self.first_tokens < 0 else self.first_tokens


STEP_TOKENS = 256, 1024
"""Tokens of a step of tuning: rows of up to 256 tokens together, or one of any length. A step of more than
1,024 tokens counts as one of 1,024."""

HELD_OUT = 8192
"""Tokens that decide whether a tuning is taken, or 8 rows."""

TUNE_TOKENS = {"fast": 0, "good": 1 << 15, "best": 1 << 17}
"""Tokens of tuning by effort."""

AUTO_BITS = 3  # and below: the rounding loses enough for the tuning to pay
BEST_SAMPLES = 256  # calibration sequences of the best effort, at least
BACKWARD = 8  # bytes of a tuned weight beside itself: its code, and what the backward pass keeps


@dataclass(frozen=True, kw_only=True)
class TuningSettings:
    """What is learned after the rounding, at the same bytes."""

    effort: str = setting(
        "auto",
        "time for quality at the same bytes: fast: the rounding alone; good: tuning on 32,768 tokens; best: "
        "on 131,072, and 256 calibration sequences at least; auto: good at 3 bits and below, else fast. "
        "Of method auto good and best round by yaqa",
        ("auto", *TUNE_TOKENS),
    )
    tune: int = setting(
        -1,
        "steps in which scales and norms learn end to end from the original, on fresh text, a row each or "
        "rows of 256 tokens together; the codes stay. 0: none; -1: as effort says",
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_range("tune", self.tune, -1, 2**20, "0 (none) or more, or -1 (as effort says)")

    def preset(self, method: str, bits: float) -> str:
        """The effort, "fast", "good" or "best", behind a method whose codes have ``bits`` bits.

        "auto" is fast behind a method that reads no text, and behind training.
        """
        if self.effort != "auto":
            return self.effort
        return "good" if bits <= AUTO_BITS and method not in ("rtn", "smoothquant", "qat") else "fast"

    def steps(self, method: str, bits: float, length: int) -> int:
        """Steps of tuning behind a method whose codes have ``bits`` bits, with rows of ``length`` tokens."""
        return self.tune if self.tune >= 0 else tuning_steps(self.preset(method, bits), length)


def tuning_steps(effort: str, length: int) -> int:
    """Steps of tuning with rows of ``length`` tokens."""
    shortest, longest = STEP_TOKENS
    return TUNE_TOKENS[effort] // min(max(length, shortest), longest)


def tuning_rows(steps: int, length: int) -> tuple[int, int, int]:
    """Rows of a step of tuning, held-out rows, and those of the whole tuning; none without steps."""
    step, held_out = max(STEP_TOKENS[0] // length, 1), max(HELD_OUT // length, 8)
    return (step, held_out, steps * step + held_out) if steps else (0, 0, 0)


def tuning_memory(parameters: float, rounded: float) -> float:
    """Bytes of the tuning of a model, without a batch's activations: float32 weights; of those that are
    rounded also the codes, and what the backward pass keeps."""
    return 4 * parameters + BACKWARD * rounded


def _scales() -> Any:
    return setting(
        "auto",
        "how a scale is chosen; mse: least error of the weight, output: of the layer's output; auto: output "
        "at 4 bits and below for methods that see data, else absmax",
        ("auto", "absmax", "percentile", "mse", "output"),
    )


def _act_order() -> Any:
    return setting(
        "static",
        "columns of large activations first; group: groups follow that order as well, stored with each "
        "column's group (integers in groups; not with qat)",
        ("off", "static", "group"),
    )


@dataclass(frozen=True, kw_only=True)
class RTNSettings:
    """Round to nearest."""

    smoothing: ClassVar[str] = "none"  # what --smooth auto means

    scales: str = _scales()

    def __post_init__(self) -> None:
        check_choices(self)


@dataclass(frozen=True, kw_only=True)
class SmoothQuantSettings(RTNSettings):
    """Round to nearest after SmoothQuant's scaling of channels."""

    smoothing: ClassVar[str] = "smoothquant"


@dataclass(frozen=True, kw_only=True)
class AWQSettings:
    """Round to nearest with clipped ranges after AWQ's scaling of channels."""

    smoothing: ClassVar[str] = "awq"

    scales: str = _scales()
    act_order: str = _act_order()

    def __post_init__(self) -> None:
        check_choices(self)


@dataclass(frozen=True, kw_only=True)
class GPTQSettings:
    """Round with the layer's Hessian."""

    smoothing: ClassVar[str] = "none"

    scales: str = _scales()
    refine: int = setting(
        4,
        "passes of coordinate descent over the codes afterwards, the scales refitted between two; 0: off",
    )
    damp: float = setting(0.01, "lambda, as a fraction of the Hessian's mean diagonal")
    act_order: str = _act_order()

    def __post_init__(self) -> None:
        check_choices(self)
        check_range("refine", self.refine, 0, 2**20, "0 (off) or more")
        check_range("damp", self.damp, 0.0, 1.0, "between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class SparseGPTQSettings(GPTQSettings):
    """Round with the layer's Hessian, and prune in the same pass: gptq."""

    sparsity: float | str = setting(
        0.0,
        "also set weights to zero, chosen in the same loop as the codes: a fraction (0.5, 50%), or N:M (2:4: "
        "of every 4 consecutive inputs 2 stay); 0: none",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prunes:
            parse_sparsity(self.sparsity)

    @property
    def prunes(self) -> bool:
        """Whether weights become zero."""
        return str(self.sparsity).strip() not in ("0", "0.0")

    @property
    def amount(self) -> Sparsity | None:
        """How many weights become zero; None: the method does not choose."""
        return parse_sparsity(self.sparsity) if self.prunes else None


@dataclass(frozen=True, kw_only=True)
class CorrectingSettings(GPTQSettings):
    """Round with the layer's Hessian towards the original model's output: gptaq, qronos, yaqa."""

    correct: float = setting(
        0.25,
        "fraction of what the layers before have lost that a layer makes up for; 1: all, which fits the "
        "calibration's text; 0: none, which loses least on other text",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("correct", self.correct, 0.0, 1.0, "between 0 and 1")


GPTQ_KIN = ("gptq", "gptaq", "qronos", "yaqa")
"""Methods that move columns against the errors of others."""

START = "the rounding to start from; autoround: rtn (auto) or gptq; qat: any of these, gptq (auto)"


@dataclass(frozen=True, kw_only=True)
class AutoRoundSettings:
    """Learn the rounding block by block."""

    smoothing: ClassVar[str] = "none"

    iterations: int = setting(200, "steps for each block")
    start: str = setting("auto", START, ("auto", "rtn", "gptq"))
    update: str = setting(
        "adam", "a step follows the gradient's sign (the paper's), or Adam", ("adam", "sign")
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_range("iterations", self.iterations, 1, 2**40, "at least 1")


@dataclass(frozen=True, kw_only=True)
class QATSettings(GPTQSettings):
    """Train the whole model under quantization; scales, refine, damp and act_order are for the start."""

    start: str = setting("auto", START, ("auto", "rtn", *GPTQ_KIN))
    steps: int = setting(300, "optimizer steps")
    learning_rate: float = setting(1e-4, "peak learning rate")
    distill: float = setting(1.0, "weight of the KL to the original model; the rest is cross-entropy")
    train: str = setting("all", "what is trained; scales: codes stay", ("all", "scales"))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("distill", self.distill, 0.0, 1.0, "between 0 and 1")
        check_range("steps", self.steps, 1, 2**40, "at least 1")


METHOD_SETTINGS: dict[str, type] = {
    "rtn": RTNSettings,
    "smoothquant": SmoothQuantSettings,
    "awq": AWQSettings,
    "gptq": SparseGPTQSettings,
    "gptaq": CorrectingSettings,
    "qronos": CorrectingSettings,
    "yaqa": CorrectingSettings,
    "autoround": AutoRoundSettings,
    "qat": QATSettings,
}
"""The options of each method. What the methods do is in rounding.METHODS."""

OPTION_TOKENS = 1 << 15
"""Tokens of the Hessians by which options are rounded whose sensitivities are measured."""

GROUP_ORDERED = ("awq", *GPTQ_KIN)
"""Methods that see a layer's inputs before they form its groups, which act-order "group" asks for."""

MethodSettings = RTNSettings | AWQSettings | GPTQSettings | AutoRoundSettings


@dataclass(frozen=True, kw_only=True)
class QuantizeSettings:
    """Store the weights of the blocks' Linears in few bits: choose a scheme (what is stored how), a method
    (how weights are rounded), and, if wanted, what is done to the float model before."""

    storage: StorageSettings = field(
        default_factory=StorageSettings, metadata={"title": "What is stored how"}
    )
    method: str = setting(
        "auto",
        "rtn: to nearest; gptq, gptaq, qronos: with the layer's Hessian; yaqa: with the model's; "
        "smoothquant, awq: to nearest after scaling channels; autoround: learned block by block; "
        "qat: trained end to end; auto: gptq, or yaqa by effort good and best where the whole model fits in "
        "memory, has no experts, and no weights become zero",
        ("auto", *METHOD_SETTINGS),
    )
    rounding: MethodSettings = field(
        default_factory=SparseGPTQSettings,
        metadata={"variants": {"auto": SparseGPTQSettings, **METHOD_SETTINGS}, "by": "method"},
    )
    transform: TransformSettings = field(
        default_factory=TransformSettings, metadata={"title": "Before the rounding"}
    )
    tuning: TuningSettings = field(default_factory=TuningSettings, metadata={"title": "After the rounding"})
    calibration: CalibrationSettings = field(
        default_factory=CalibrationSettings, metadata={"title": "Calibration"}
    )
    data: str = data_field()
    bos: str = bos_field()
    check_tokens: int = setting(
        2048, "held-out tokens on which the result is compared with the original; 0: no check"
    )
    seed: int = setting(0, "seed of the calibration choice and of learned methods")
    device: str = setting("auto", "auto (a GPU where there is one), cpu, cuda or cuda:1")

    def __post_init__(self) -> None:
        check_choices(self)
        check_text(self)
        check_range("check_tokens", self.check_tokens, 0, 2**40, "0 (no check) or more")
        grouped = getattr(self.rounding, "act_order", "off") == "group"
        if grouped and self.method not in ("auto", *GROUP_ORDERED):
            allowed = f"off or static with {self.method}; group goes with {listed(GROUP_ORDERED)}"
            raise SettingsError("act_order", "group", allowed)
        if grouped and self.tuning.tune > 0:
            raise SettingsError("act_order", "group", "off or static with --tune")

    @property
    def amount(self) -> Sparsity | None:
        """How many weights become zero while they are rounded; None: the method does not choose."""
        return self.rounding.amount if isinstance(self.rounding, SparseGPTQSettings) else None

    @property
    def smoothing(self) -> str:
        """How channels are scaled first: none, smoothquant or awq."""
        return self.rounding.smoothing if self.transform.smooth == "auto" else self.transform.smooth

    def with_method(self, bits: float, *, differentiable: bool = True) -> QuantizeSettings:
        """The settings with what the method "auto" means for codes of ``bits`` bits.

        Args:
            differentiable: a backward pass through the model can be had, and is worth it.
        """
        if self.method != "auto":
            return self
        if not differentiable or self.amount is not None or self.tuning.preset("auto", bits) == "fast":
            return self.rounded_by("gptq")
        return self.rounded_by("yaqa")

    def rounded_by(self, method: str) -> QuantizeSettings:
        """The settings with another method, and of its options what this one has of them."""
        kind = METHOD_SETTINGS[method]
        names = {field.name for field in fields(kind)} & {field.name for field in fields(self.rounding)}
        shared = {name: getattr(self.rounding, name) for name in names}
        return replace(self, method=method, rounding=kind(**shared))


def quantize_settings(**options: Any) -> QuantizeSettings:
    """Settings from flat options, as recipes and commands have them: ``method="gptq", damp=0.02``.

    Raises:
        SettingsError: a value is not allowed, or the method does not take the option.
    """
    return nest(QuantizeSettings, options)
