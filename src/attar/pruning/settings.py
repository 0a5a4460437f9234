"""Settings of pruning: the settings of every method, and a class for each method. Free of torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

from attar.checkpoint.units import byte_count
from attar.data.settings import bos_field, check_text, data_field
from attar.errors import SettingsError
from attar.options import check_choices, listed, nest, setting
from attar.patterns import RegexError, check
from attar.sparsity import parse_sparsity
from attar.walks.settings import check_range

VERSION = 4


def _ratio() -> Any:
    return setting(0.25, "fraction removed, 0 to below 1")


def _scope() -> Any:
    return setting(
        "layer",
        "weights or units are compared within a layer, or over all layers at once (units: where the family's "
        "config has a number for each layer)",
        ("layer", "global"),
    )


@dataclass(frozen=True, kw_only=True)
class ZerosSettings:
    """Set single weights of the blocks' Linears to zero. The model keeps its shapes."""

    sparsity: float | str = setting(
        0.5, "how many: a fraction (0.5, 50%), or N:M (2:4: of every 4 consecutive inputs 2 stay)"
    )
    allocation: str = setting(
        "uniform",
        "how a fraction is spread: every layer the same; owl: blocks with outliers keep more; measured: by "
        "the KL that pruning each group of layers alone costs",
        ("uniform", "owl", "measured"),
    )
    ignore: tuple[str, ...] = setting(
        (), "Linears of the blocks left alone: names, ends of names, or re: and a regular expression"
    )

    def __post_init__(self) -> None:
        check_choices(self)
        amount = parse_sparsity(self.sparsity)
        if amount.of and self.allocation != "uniform":
            allowed = f"uniform with {amount}: every layer has the pattern; a fraction such as 0.5 can differ"
            raise SettingsError("allocation", self.allocation, allowed)
        for pattern in self.ignore:
            _check_pattern(pattern)

    @property
    def by_row(self) -> bool:
        """Whether Wanda's scores, where the method uses them, are compared within a row."""
        return True


def _check_pattern(pattern: str) -> None:
    """Raise where a pattern is no regular expression, though it says so."""
    try:
        check(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
    except RegexError as error:
        raise SettingsError("ignore", pattern, f"a regular expression after re: ({error.message})") from error


@dataclass(frozen=True, kw_only=True)
class MagnitudeSettings(ZerosSettings):
    """The smallest weights."""

    scope: str = _scope()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scope != "global":
            return
        if parse_sparsity(self.sparsity).of:
            allowed = f"layer with {self.sparsity}: N:M compares the inputs of one row"
            raise SettingsError("scope", self.scope, allowed)
        if self.allocation != "uniform":
            allowed = f"layer with allocation {self.allocation}: one threshold spreads the zeros itself"
            raise SettingsError("scope", self.scope, allowed)


@dataclass(frozen=True, kw_only=True)
class WandaSettings(ZerosSettings):
    """The smallest products of a weight and the norm of its input."""

    compare: str = setting(
        "row", "weights are compared within a row, as the paper does, or within the layer", ("row", "layer")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compare == "layer" and parse_sparsity(self.sparsity).of:
            allowed = f"row with {self.sparsity}: N:M compares the inputs of one row"
            raise SettingsError("compare", self.compare, allowed)

    @property
    def by_row(self) -> bool:
        """Whether weights are compared within a row."""
        return self.compare == "row"


@dataclass(frozen=True, kw_only=True)
class SparseGPTSettings(ZerosSettings):
    """The weights whose loss the remaining ones of the row compensate best."""

    damp: float = setting(0.01, "added to the Hessian's diagonal, as a fraction of its mean")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("damp", self.damp, 0.0, 1.0, "between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class ALPSSettings(SparseGPTSettings):
    """The weights whose loss the remaining ones compensate best, found by ADMM: the mask may change as a
    whole in every step."""

    iterations: int = setting(300, "steps of ADMM, at most")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("iterations", self.iterations, 1, 2**40, "at least 1")


@dataclass(frozen=True, kw_only=True)
class UnitSettings:
    """Remove whole units of every layer, the least important ones.

    Every layer keeps the same number where a configuration file has one number for all layers.
    """

    criteria: ClassVar[tuple[str, ...]] = ()  # names of criterion besides auto

    ratio: float = _ratio()
    criterion: str = setting(
        "auto",
        "the scores. Heads and neurons: wanda (share of the next projection's output), gradient (of a mask), "
        "taylor (of the weights), activation; channels: activation; layers: influence, kl (of leaving each "
        "out), run (of consecutive layers); auto: the first named, with scope global gradient",
    )
    rounds: int = setting(1, "steps in which the units go, with fresh scores before each")

    def __post_init__(self) -> None:
        check_choices(self)
        if not 0.0 <= self.ratio < 1.0:
            raise SettingsError("ratio", self.ratio, "the fraction removed: at least 0 and below 1")
        if self.criterion not in ("auto", *self.criteria):
            raise SettingsError("criterion", self.criterion, listed(("auto", *self.criteria)))
        check_range("rounds", self.rounds, 1, 1000, "between 1 and 1000")
        if self.rounds > 1 and self.criterion == "run":
            raise SettingsError("rounds", self.rounds, "1 for criterion run: its layers go at once")


def _multiple_of() -> Any:
    return setting(
        0,
        "keep a multiple of this many; 0: a power of two up to 64 that hits the ratio (within a quarter of "
        "what is removed)",
    )


@dataclass(frozen=True, kw_only=True)
class HeadSettings(UnitSettings):
    """Remove attention heads, in groups: a KV head with its query heads."""

    criteria: ClassVar[tuple[str, ...]] = ("wanda", "gradient", "taylor", "activation")

    scope: str = _scope()
    rigid: str = setting(
        "error",
        "families whose config has no number for fewer heads (GPT-2, OPT, BERT): refuse them, "
        "or zero the heads in place, which makes nothing smaller",
        ("error", "zero"),
    )


@dataclass(frozen=True, kw_only=True)
class NeuronSettings(UnitSettings):
    """Remove neurons of the MLPs."""

    criteria: ClassVar[tuple[str, ...]] = ("wanda", "gradient", "taylor", "activation")

    scope: str = _scope()
    multiple_of: int = _multiple_of()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("multiple_of", self.multiple_of, 0, 2**20, "0 or more")


@dataclass(frozen=True, kw_only=True)
class QueryHeadSettings(UnitSettings):
    """Remove query heads, as many of every KV head; the KV heads stay."""

    criteria: ClassVar[tuple[str, ...]] = ("wanda", "gradient", "taylor", "activation")


@dataclass(frozen=True, kw_only=True)
class HiddenSettings(UnitSettings):
    """Remove channels of the residual stream."""

    criteria: ClassVar[tuple[str, ...]] = ("activation",)

    multiple_of: int = _multiple_of()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("multiple_of", self.multiple_of, 0, 2**20, "0 or more")


@dataclass(frozen=True, kw_only=True)
class LayerSettings(UnitSettings):
    """Remove whole layers."""

    criteria: ClassVar[tuple[str, ...]] = ("influence", "kl", "run")


@dataclass(frozen=True, kw_only=True)
class ExpertSettings:
    """Remove or merge experts of every mixture, or let fewer of them work on a token."""

    ratio: float = setting(0.25, "fraction of each layer's experts removed, 0 to below 1; without experts")
    experts: int = setting(0, "experts of a layer that stay; 0: by ratio")
    active: int = setting(0, "experts of a token; 0: as many as before")
    criterion: str = setting(
        "auto",
        "reap: gate times length of the output, mean over the tokens that chose the expert; output: their "
        "sum; frequency: these tokens; gates: sum of its gates; cluster: experts with similar outputs are "
        "merged; auto: reap",
        ("auto", "reap", "output", "frequency", "gates", "cluster"),
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_range("ratio", self.ratio, 0.0, 0.9999, "the fraction removed: at least 0 and below 1")
        check_range("experts", self.experts, 0, 2**20, "0 (by ratio) or more")
        check_range("active", self.active, 0, 2**20, "0 (as before) or more")


@dataclass(frozen=True, kw_only=True)
class MixedSettings:
    """Remove heads, neurons, channels and layers together, as much of each as costs least quality."""

    ratio: float = setting(0.25, "fraction of the parameters removed, 0 to below 1; without size and speed")
    size: str = setting("", "most bytes of the result's weights, such as 100MB")
    speed: str = setting("", "least speed of decoding at batch 1 over the original's, such as 1.5x")
    criterion: str = setting("auto", "the scores of heads and neurons")
    scan: str = setting("", "file of the measured cuts, for other runs; empty: not kept")
    candidates: int = setting(
        1, "plans that are compared after a short distillation from the original; 1: by their KL alone"
    )
    candidate_steps: int = setting(100, "optimizer steps of each of these distillations")

    def __post_init__(self) -> None:
        check_choices(self)
        check_range("ratio", self.ratio, 0.0, 0.9999, "the fraction removed: at least 0 and below 1")
        if self.criterion not in ("auto", *HeadSettings.criteria):
            raise SettingsError("criterion", self.criterion, listed(("auto", *HeadSettings.criteria)))
        byte_count("size", self.size)
        if self.speed:
            speed_factor(self.speed)
        if self.size and self.speed:
            raise SettingsError("speed", self.speed, "left out with a size: a plan has one budget")
        check_range("candidates", self.candidates, 1, 64, "between 1 and 64")
        check_range("candidate_steps", self.candidate_steps, 1, 2**40, "at least 1")


def speed_factor(text: str) -> float:
    """The factor of a speed such as ``1.5x``.

    Raises:
        SettingsError: no such speed, or none above 1.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*x?\s*", text)
    if not match or float(match[1]) <= 1.0:
        raise SettingsError("speed", text, "a factor above 1, such as 1.5x")
    return float(match[1])


METHOD_SETTINGS: dict[str, type] = {
    "magnitude": MagnitudeSettings,
    "wanda": WandaSettings,
    "sparsegpt": SparseGPTSettings,
    "alps": ALPSSettings,
    "heads": HeadSettings,
    "query-heads": QueryHeadSettings,
    "neurons": NeuronSettings,
    "hidden": HiddenSettings,
    "layers": LayerSettings,
    "experts": ExpertSettings,
    "mixed": MixedSettings,
}
"""The options of each method. What the methods do is in stage.METHODS."""

PruneMethodSettings = UnitSettings | ZerosSettings | ExpertSettings | MixedSettings


@dataclass(frozen=True, kw_only=True)
class PruneSettings:
    """Remove the least important parts of a model: choose a method (what is removed, and by which scores)
    and how much."""

    method: str = setting(
        "neurons",
        "magnitude, wanda: zeros where weights are small, or small for their inputs; sparsegpt, alps: where "
        "others compensate them, found column by column, or by ADMM, better and slower; "
        "heads: groups of query heads with their KV head; query-heads: as many of each KV head; neurons: of "
        "the MLP; hidden: channels of the residual stream; layers: whole ones; experts: of a mixture; "
        "mixed: as much of each as costs least quality, by a scan",
        tuple(METHOD_SETTINGS),
    )
    options: PruneMethodSettings = field(
        default_factory=NeuronSettings, metadata={"variants": METHOD_SETTINGS, "by": "method"}
    )
    reconstruct: str = setting(
        "auto",
        "give back what was lost, layer by layer: linear (least squares for the weights that stay), block "
        "(linear, then each block is trained to the original's outputs), none; auto: linear, but none for "
        "magnitude, hidden, layers, experts and mixed",
        ("auto", "none", "linear", "block"),
    )
    reconstruct_epochs: int = setting(4, "of block: passes over the calibration sequences")
    samples: int = setting(64, "calibration sequences")
    sequence_length: int = setting(256, "tokens in a calibration sequence, at most the context")
    batch_size: int = setting(8, "sequences in one pass")
    precision: str = setting(
        "auto",
        "arithmetic of the calibration; auto: bf16 where the device has it, else fp32",
        ("auto", "bf16", "fp32"),
    )
    data: str = data_field()
    bos: str = bos_field()
    seed: int = setting(0, "seed of the calibration choice")
    device: str = setting("auto", "auto (a GPU where there is one), cpu, cuda or cuda:1")

    def __post_init__(self) -> None:
        check_choices(self)
        check_text(self)
        for name in ("samples", "batch_size", "reconstruct_epochs"):
            check_range(name, getattr(self, name), 1, 2**40, "at least 1")
        check_range("sequence_length", self.sequence_length, 2, 2**24, "at least 2")
        check_range("seed", self.seed, 0, 2**63, "0 or more")
        if self.method == "hidden" and self.reconstruct in ("linear", "block"):
            allowed = "none or auto with method hidden, which leaves no layer its inputs; use attar recover"
            raise SettingsError("reconstruct", self.reconstruct, allowed)
        if self.method == "experts" and self.reconstruct in ("linear", "block"):
            allowed = "none or auto with method experts; use attar recover"
            raise SettingsError("reconstruct", self.reconstruct, allowed)

    @property
    def reconstruction(self) -> str:
        """What is reconstructed: none, linear or block."""
        if self.reconstruct != "auto":
            return self.reconstruct
        dense = ("magnitude", "hidden", "layers", "experts", "mixed")
        return "none" if self.method in dense else "linear"


def prune_settings(**options: Any) -> PruneSettings:
    """Settings from flat options, as recipes and commands have them: ``method="wanda", sparsity="2:4"``.

    Raises:
        SettingsError: a value is not allowed, or the method does not take the option.
    """
    return nest(PruneSettings, options)
