"""Settings of pruning: those that every method takes, and a class for each method. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attar.data.settings import bos_field, check_text, data_field
from attar.errors import SettingsError
from attar.options import check_choices, nest
from attar.sparsity import parse_sparsity
from attar.walks.settings import check_range

VERSION = 3


def _option(default: Any, help: str, choices: tuple[Any, ...] = ()) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


def _ratio() -> Any:
    return _option(0.25, "fraction removed, 0 to below 1")


@dataclass(frozen=True, kw_only=True)
class ZerosSettings:
    """Set single weights of the blocks' Linears to zero."""

    sparsity: float | str = _option(
        0.5, "how many: a fraction (0.5, 50%), or N:M (2:4: of every 4 consecutive inputs 2 stay)"
    )
    ignore: tuple[str, ...] = field(
        default=(), metadata={"help": "modules of the blocks left alone: names, or re: and a pattern"}
    )

    def __post_init__(self) -> None:
        check_choices(self)
        parse_sparsity(self.sparsity)


@dataclass(frozen=True, kw_only=True)
class UnitSettings:
    """Remove whole units of every layer, the least important ones.

    Every layer keeps the same number where a configuration file has one number for all layers.
    """

    ratio: float = _ratio()

    def __post_init__(self) -> None:
        check_choices(self)
        if not 0.0 <= self.ratio < 1.0:
            raise SettingsError("ratio", self.ratio, "the fraction removed: at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class HeadSettings(UnitSettings):
    """Remove attention heads, in groups: a KV head with its query heads."""

    rigid: str = _option(
        "error",
        "families whose config has no number for fewer heads (GPT-2, OPT, BERT): refuse them, "
        "or zero the heads in place, which makes nothing smaller",
        ("error", "zero"),
    )


@dataclass(frozen=True, kw_only=True)
class NeuronSettings(UnitSettings):
    """Remove neurons of the MLPs."""

    multiple_of: int = _option(
        0,
        "keep a multiple of this many neurons; 0: a power of two up to 64 that hits the ratio "
        "(within a quarter of what is removed)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("multiple_of", self.multiple_of, 0, 2**20, "0 or more")


METHOD_SETTINGS: dict[str, type] = {"heads": HeadSettings, "neurons": NeuronSettings}
"""The options of each method. What the methods do is in stage.METHODS."""

PruneMethodSettings = UnitSettings | ZerosSettings


@dataclass(frozen=True, kw_only=True)
class PruneSettings:
    """Remove the least important parts of a model: choose a method (what is removed, and by which scores)
    and how much."""

    method: str = _option(
        "neurons",
        "heads: groups of query heads with their KV head; neurons: of the MLP",
        tuple(METHOD_SETTINGS),
    )
    options: PruneMethodSettings = field(
        default_factory=NeuronSettings, metadata={"variants": METHOD_SETTINGS, "by": "method"}
    )
    reconstruct: str = _option(
        "auto",
        "give back what was lost, layer by layer: linear (least squares for the weights that stay), block "
        "(linear, then each block is trained to the original's outputs), none; auto: what won on every model "
        "tried, see docs/prune.md",
        ("auto", "none", "linear", "block"),
    )
    reconstruct_epochs: int = _option(4, "of block: passes over the calibration sequences")
    samples: int = _option(64, "calibration sequences")
    sequence_length: int = _option(256, "tokens in a calibration sequence, at most the context")
    batch_size: int = _option(8, "sequences in one pass")
    precision: str = _option(
        "auto",
        "arithmetic of the calibration; auto: bf16 where the device has it, else fp32",
        ("auto", "bf16", "fp32"),
    )
    data: str = data_field()
    bos: str = bos_field()
    seed: int = _option(0, "seed of the calibration choice")
    device: str = _option("auto", "auto (a GPU where there is one), cpu, cuda or cuda:1")

    def __post_init__(self) -> None:
        check_choices(self)
        check_text(self)
        for name in ("samples", "batch_size", "reconstruct_epochs"):
            check_range(name, getattr(self, name), 1, 2**40, "at least 1")
        check_range("sequence_length", self.sequence_length, 2, 2**24, "at least 2")
        check_range("seed", self.seed, 0, 2**63, "0 or more")


def prune_settings(**options: Any) -> PruneSettings:
    """Settings from flat options, as recipes and commands have them: ``method="wanda", sparsity="2:4"``.

    Raises:
        SettingsError: a value is not allowed, or the method does not take the option.
    """
    return nest(PruneSettings, options)
