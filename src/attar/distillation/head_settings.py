"""Settings of draft heads (``attar train-head``). Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attar.checkpoint.units import byte_count
from attar.distillation.settings import RowSettings, TeacherRowSettings
from attar.errors import SettingsError
from attar.models.draft_heads.static_tree import PUBLISHED
from attar.options import check_choices, nest, setting
from attar.walks.settings import check_range

VERSION = 1
STATE_CACHE = 1 << 30  # bytes


@dataclass(frozen=True, kw_only=True)
class DraftHeadSettings:
    """Options that every head has."""

    drafts: int = setting(4, "tokens that the head drafts at most")
    draft_vocabulary: int = setting(
        0, "tokens that the head can propose, the most frequent ones of its rows; 0: all of the model's"
    )
    state_cache: str = setting(
        "",
        "most bytes (2GB) of the model's hidden states that are kept on disk; 0: the model runs in every "
        "step; empty: 1GB where the steps read each row more than twice, else 0",
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_range("drafts", self.drafts, 1, 64, "between 1 and 64")
        check_range("draft_vocabulary", self.draft_vocabulary, 0, 2**31, "0 (all of the model's) or more")
        byte_count("state_cache", self.state_cache)

    def cached_bytes(self, uses: float) -> int:
        """Most bytes of the cache, where each row is read about ``uses`` times."""
        if self.state_cache:
            return byte_count("state_cache", self.state_cache)
        return STATE_CACHE if uses > 2.0 else 0


@dataclass(frozen=True, kw_only=True)
class JointSettings:
    """Medusa-2: the model learns with its heads."""

    joint: float = setting(
        0.0,
        "Medusa-2: the share of the steps, the last ones, in which the model learns too: the output is the "
        "new model, with its heads in the folder head; 0: the model stays as it is",
    )
    base_loss: str = setting(
        "self",
        "what the model learns then: self (to predict what it did before), text (the next tokens)",
        ("self", "text"),
    )
    adapter_rank: int = setting(
        0, "rank of LoRA adapters of the model then, which are merged; 0: all of its weights learn"
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_range("joint", self.joint, 0.0, 1.0, "between 0 and 1")
        check_range("adapter_rank", self.adapter_rank, 0, 2**16, "0 (all weights are trained) or more")
        if self.adapter_rank and not self.joint:
            allowed = "0 unless joint is above 0: the model stays as it is"
            raise SettingsError("adapter_rank", self.adapter_rank, allowed)


@dataclass(frozen=True, kw_only=True)
class MedusaSettings(DraftHeadSettings):
    """Medusa's heads."""

    decay: float = setting(0.8, "weight of each head's loss, by that of the one before")
    residual_layers: int = setting(1, "residual layers of each head")
    tree: str = setting(
        "search",
        "drafts of a pass: chain (the likeliest token of each head), search (the best tree by how often each "
        "rank of each head was right), or a published one: " + ", ".join(PUBLISHED),
        ("search", "chain", *PUBLISHED),
    )
    tree_drafts: int = setting(24, "most drafts of the tree that is searched")
    shared_head: bool = setting(
        False, "one output matrix for all heads: smaller, for models whose vocabulary outweighs their layers"
    )
    together: JointSettings = field(default_factory=JointSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("decay", self.decay, 0.01, 1.0, "between 0.01 and 1")
        check_range("residual_layers", self.residual_layers, 0, 16, "between 0 and 16")
        check_range("tree_drafts", self.tree_drafts, 1, 512, "between 1 and 512")


@dataclass(frozen=True, kw_only=True)
class TreeHeadSettings(DraftHeadSettings):
    """A head that drafts a token after the other, as a chain or as a tree."""

    branches: int = setting(1, "likeliest tokens after each node of a tree of drafts; 1: a chain")
    head_layers: int = setting(1, "transformer layers of the head")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("branches", self.branches, 1, 32, "between 1 and 32")
        check_range("head_layers", self.head_layers, 1, 64, "between 1 and 64")


@dataclass(frozen=True, kw_only=True)
class EagleSettings(TreeHeadSettings):
    """EAGLE, and with branches EAGLE-2."""

    noise: float = setting(
        0.2, "noise of the states that the head reads in training, for rows of 512 tokens; 0: none"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("noise", self.noise, 0.0, 10.0, "between 0 and 10")
        if self.draft_vocabulary:
            raise SettingsError(
                "draft_vocabulary", self.draft_vocabulary, "0: EAGLE drafts with its model's own head"
            )


EAGLE3_NORMS: dict[str, dict[str, bool]] = {
    "plain": {},
    "residual": {"norm_before_residual": True},
    "states": {"norm_before_fc": True},
    "3.1": {"fc_norm": True, "norm_output": True},
}
"""Switches of attar.models.draft_heads.eagle3_module.Eagle3Config, as published heads have them."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Settings(TreeHeadSettings):
    """EAGLE-3."""

    decay: float = setting(0.8, "weight of each step's loss, by that of the one before")
    unrolled: int = setting(7, "drafts one after the other that the head learns from its own states")
    norms: str = setting(
        "plain",
        "what is normalized besides: plain (nothing), residual (the residual input of the draft layer), "
        "states (the states of all layers together), 3.1 (EAGLE-3.1: the states of each layer, and those "
        "of the head that it reads)",
        tuple(EAGLE3_NORMS),
    )
    start: str = setting(
        "target",
        "first weights of the head: target (those of the model's layer) or random",
        ("target", "random"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("decay", self.decay, 0.01, 1.0, "between 0.01 and 1")
        check_range("unrolled", self.unrolled, 1, 64, "between 1 and 64")


@dataclass(frozen=True, kw_only=True)
class BlockSettings(DraftHeadSettings):
    """DFlash, and what DSpark shares with it."""

    drafts: int = setting(7, "tokens that the head drafts at most")
    head_layers: int = setting(2, "transformer layers of the head")
    context_layers: int = setting(5, "layers of the model that the head reads hidden states of")
    anchors: int = setting(64, "positions of a row that a block is trained at, drawn in each step")
    start: str = setting(
        "target",
        "first weights of the head: target (those of the model's last layers) or random",
        ("target", "random"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("head_layers", self.head_layers, 1, 64, "between 1 and 64")
        check_range("context_layers", self.context_layers, 1, 64, "between 1 and 64")
        check_range("anchors", self.anchors, 1, 2**24, "at least 1")


@dataclass(frozen=True, kw_only=True)
class DSparkSettings(BlockSettings):
    """DSpark."""

    markov_rank: int | None = setting(
        None, "rank of the Markov head; 0: none; none: a quarter of the model's channels, at most 256"
    )
    markov: str = setting(
        "plain",
        "what the Markov head reads: plain (the token before), gated (and the slot's state), rnn (and all "
        "tokens of the block)",
        ("plain", "gated", "rnn"),
    )
    confidence: float = setting(1.0, "weight of the confidence head's loss; 0: no confidence head")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("markov_rank", self.markov_rank or 0, 0, 2**16, "0 (none) or more")
        check_range("confidence", self.confidence, 0.0, 1e6, "0 or more")


HEAD_SETTINGS: dict[str, type] = {
    "medusa": MedusaSettings,
    "eagle": EagleSettings,
    "eagle3": Eagle3Settings,
    "dflash": BlockSettings,
    "dspark": DSparkSettings,
}
"""The options of each kind of head; its module is in attar.models.draft_heads, its loss in
attar.distillation.heads."""


@dataclass(frozen=True, kw_only=True)
class HeadRowSettings(TeacherRowSettings):
    """Rows that the model itself writes, and its head learns from."""

    teacher_generated: float = setting(  # type: ignore[assignment]
        1.0, "fraction of the rows that the model generates; the others are text"
    )
    num_rollouts: int = setting(512, "rows that the model generates, repeated where more are needed")
    rollout_temperature: float = setting(  # type: ignore[assignment]
        1.0, "temperature at which rows are generated"
    )


@dataclass(frozen=True, kw_only=True)
class TrainHeadSettings(RowSettings):
    """A draft head, trained for a model that stays as it is, or learns in the last steps (Medusa-2)."""

    head: str = setting("eagle3", "kind of the head: " + ", ".join(HEAD_SETTINGS), tuple(HEAD_SETTINGS))
    options: DraftHeadSettings = field(
        default_factory=Eagle3Settings, metadata={"variants": HEAD_SETTINGS, "by": "head"}
    )
    teacher_rows: HeadRowSettings = field(
        default_factory=HeadRowSettings, metadata={"title": "Generated text"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head not in HEAD_SETTINGS:
            raise SettingsError("head", self.head, " or ".join(HEAD_SETTINGS))

    @property
    def joint(self) -> JointSettings:
        """How the model learns with its head; ``joint`` 0: not at all."""
        return self.options.together if isinstance(self.options, MedusaSettings) else JointSettings()

    @property
    def joint_steps(self) -> int:
        """The last steps, in which the model learns together with its draft head."""
        return round(self.joint.joint * self.steps)

    @property
    def makes_model(self) -> bool:
        """Whether the result is a model with its head, not a head alone."""
        return self.joint_steps > 0

    @property
    def teacher_share(self) -> float:
        """Fraction of the rows that the model generates."""
        return self.teacher_rows.teacher_generated

    @property
    def rollout_temperature(self) -> float:
        """Temperature at which rows are generated."""
        return self.teacher_rows.rollout_temperature

    @property
    def prompt_tokens(self) -> int:
        """Tokens of text in front of each row that is generated."""
        return self.teacher_rows.prompt_tokens


def train_head_settings(**options: Any) -> TrainHeadSettings:
    """Settings from flat options, as recipes and commands have them: ``head="medusa", drafts=3``.

    Raises:
        SettingsError: a value is not allowed, or the head does not take the option.
    """
    return nest(TrainHeadSettings, options)
