"""Settings of draft heads (``attar distill --head``). Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attar.checkpoint.units import byte_count
from attar.errors import SettingsError
from attar.models.draft_heads.static_tree import PUBLISHED
from attar.options import check_choices
from attar.walks.settings import check_range

STATE_CACHE = 1 << 30  # bytes


def _option(default: Any, help: str, choices: tuple[Any, ...] = ()) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class DraftHeadSettings:
    """Options that every head has; without a head none is used."""

    drafts: int = _option(4, "tokens that the head drafts at most")
    draft_vocabulary: int = _option(
        0, "tokens that the head can propose, the most frequent ones of its rows; 0: all of the model's"
    )
    state_cache: str = _option(
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

    joint: float = _option(
        0.0,
        "Medusa-2: the share of the steps, the last ones, in which the model learns too: the output is the "
        "new model, with its heads in the folder head; 0: the model stays as it is",
    )
    base_loss: str = _option(
        "self",
        "what the model learns then: self (to predict what it did before), text (the next tokens)",
        ("self", "text"),
    )
    heads_weight: float = _option(0.2, "weight of the heads' loss then, by that of the model")
    heads_schedule: str = _option(
        "sine", "how that weight begins: sine (from 0), constant", ("sine", "constant")
    )
    base_rate: float = _option(0.25, "the model's learning rate, by that of its heads")

    def __post_init__(self) -> None:
        check_choices(self)
        check_range("joint", self.joint, 0.0, 1.0, "between 0 and 1")
        check_range("heads_weight", self.heads_weight, 0.0, 1e6, "0 or more")
        check_range("base_rate", self.base_rate, 0.0, 1e3, "0 or more")


@dataclass(frozen=True, kw_only=True)
class MedusaSettings(DraftHeadSettings):
    """Medusa's heads."""

    decay: float = _option(0.8, "weight of each head's loss, by that of the one before")
    residual_layers: int = _option(1, "residual layers of each head")
    tree: str = _option(
        "search",
        "drafts of a pass: chain (the likeliest token of each head), search (the best tree by how often each "
        "rank of each head was right), or a published one: " + ", ".join(PUBLISHED),
        ("search", "chain", *PUBLISHED),
    )
    tree_drafts: int = _option(24, "most drafts of the tree that is searched")
    shared_head: bool = _option(
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

    branches: int = _option(1, "likeliest tokens after each node of a tree of drafts; 1: a chain")
    head_layers: int = _option(1, "transformer layers of the head")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("branches", self.branches, 1, 32, "between 1 and 32")
        check_range("head_layers", self.head_layers, 1, 64, "between 1 and 64")


@dataclass(frozen=True, kw_only=True)
class EagleSettings(TreeHeadSettings):
    """EAGLE, and with branches EAGLE-2."""

    token_weight: float = _option(0.1, "weight of the predicted tokens, by that of the predicted states")
    noise: float = _option(0.2, "of the states that it reads in training, for rows of 512 tokens; 0: none")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("token_weight", self.token_weight, 0.0, 100.0, "between 0 and 100")
        check_range("noise", self.noise, 0.0, 10.0, "between 0 and 10")
        if self.draft_vocabulary:
            raise SettingsError("draft_vocabulary", self.draft_vocabulary, "0: it has its model's own head")


@dataclass(frozen=True, kw_only=True)
class Eagle3Settings(TreeHeadSettings):
    """EAGLE-3."""

    decay: float = _option(0.8, "weight of each step's loss, by that of the one before")
    unrolled: int = _option(7, "drafts one after the other that it learns from its own states")
    norm_before_residual: bool = _option(False, "what its layer adds to is normed")
    norm_before_fc: bool = _option(False, "the states of all layers are normed together")
    fc_norm: bool = _option(False, "the states of each layer are normed")
    norm_output: bool = _option(False, "its own states are normed before it reads them (EAGLE-3.1)")
    start: str = _option(
        "target", "its first weights: target (those of the model's layer) or random", ("target", "random")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("decay", self.decay, 0.01, 1.0, "between 0.01 and 1")
        check_range("unrolled", self.unrolled, 1, 64, "between 1 and 64")
        if self.norm_before_fc and self.fc_norm:
            raise SettingsError("fc_norm", True, "false with norm_before_fc: states are normed once")


@dataclass(frozen=True, kw_only=True)
class BlockSettings(DraftHeadSettings):
    """DFlash, and what DSpark shares with it."""

    drafts: int = _option(7, "tokens that the head drafts at most")
    head_layers: int = _option(2, "transformer layers of the head")
    context_layers: int = _option(5, "layers of the model that the head reads hidden states of")
    anchors: int = _option(64, "positions of a row that a block is trained at, drawn in each step")
    gamma: float = _option(4.0, "weight of a draft in the loss: exp(-(k - 1) / gamma) at position k")
    start: str = _option(
        "target",
        "its first weights: target (those of the model's last layers) or random",
        ("target", "random"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("head_layers", self.head_layers, 1, 64, "between 1 and 64")
        check_range("context_layers", self.context_layers, 1, 64, "between 1 and 64")
        check_range("anchors", self.anchors, 1, 2**24, "at least 1")
        check_range("gamma", self.gamma, 0.01, 1e6, "at least 0.01")


@dataclass(frozen=True, kw_only=True)
class DSparkSettings(BlockSettings):
    """DSpark."""

    markov_rank: int | None = _option(
        None, "rank of the Markov head; 0: none; none: a quarter of the model's channels, at most 256"
    )
    markov: str = _option(
        "plain",
        "what the Markov head reads: plain (the token before), gated (and the slot's state), rnn (and all "
        "tokens of the block)",
        ("plain", "gated", "rnn"),
    )
    ce_weight: float = _option(0.1, "weight of the cross-entropy of the text")
    l1_weight: float = _option(0.9, "weight of the distance to the model's distribution")
    confidence: float = _option(1.0, "weight of the confidence head's loss; 0: no confidence head")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("markov_rank", self.markov_rank or 0, 0, 2**16, "0 (none) or more")
        for name in ("ce_weight", "l1_weight", "confidence"):
            check_range(name, getattr(self, name), 0.0, 1e6, "0 or more")
        if not self.ce_weight + self.l1_weight:
            raise SettingsError("l1_weight", self.l1_weight, "above 0 where ce_weight is 0")


@dataclass(frozen=True, kw_only=True)
class NoHeadSettings:
    """Without a head there are no options."""


HEAD_SETTINGS: dict[str, type] = {
    "none": NoHeadSettings,
    "medusa": MedusaSettings,
    "eagle": EagleSettings,
    "eagle3": Eagle3Settings,
    "dflash": BlockSettings,
    "dspark": DSparkSettings,
}
"""The options of each kind of head; its module is in attar.models.draft_heads, its loss in
attar.distillation.heads."""


def check_head(name: str) -> None:
    """Raises SettingsError for an unknown kind."""
    if name not in HEAD_SETTINGS:
        raise SettingsError("head", name, " or ".join(HEAD_SETTINGS))
