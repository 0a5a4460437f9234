"""Settings of draft heads (``attar distill --head``). Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attar.checkpoint.units import byte_count
from attar.errors import SettingsError
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
class MedusaSettings(DraftHeadSettings):
    """Medusa's heads."""

    decay: float = _option(0.8, "weight of each head's loss, by that of the one before")
    residual_layers: int = _option(1, "residual layers of each head")
    shared_head: bool = _option(
        False, "one output matrix for all heads: smaller, for models whose vocabulary outweighs their layers"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("decay", self.decay, 0.01, 1.0, "between 0.01 and 1")
        check_range("residual_layers", self.residual_layers, 0, 16, "between 0 and 16")


@dataclass(frozen=True, kw_only=True)
class NoHeadSettings:
    """Without a head there are no options."""


HEAD_SETTINGS: dict[str, type] = {"none": NoHeadSettings, "medusa": MedusaSettings}
"""The options of each kind of head; its module is in attar.models.draft_heads, its loss in
attar.distillation.heads."""


def check_head(name: str) -> None:
    """Raises SettingsError for an unknown kind."""
    if name not in HEAD_SETTINGS:
        raise SettingsError("head", name, " or ".join(HEAD_SETTINGS))
