"""Settings of draft heads (``attar distill --head``). Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attar.errors import SettingsError
from attar.options import check_choices
from attar.walks.settings import check_range


def _option(default: Any, help: str, choices: tuple[Any, ...] = ()) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class DraftHeadSettings:
    """Options that every head has; without a head none is used."""

    drafts: int = _option(4, "tokens that the head drafts at most")

    def __post_init__(self) -> None:
        check_choices(self)
        check_range("drafts", self.drafts, 1, 64, "between 1 and 64")


@dataclass(frozen=True, kw_only=True)
class MedusaSettings(DraftHeadSettings):
    """Medusa's heads."""

    decay: float = _option(0.8, "weight of each head's loss, by that of the one before")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("decay", self.decay, 0.01, 1.0, "between 0.01 and 1")


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
