"""What kind of speculation is asked for, before any model is read; free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attar.errors import SettingsError, nearest
from attar.runtime.kv.compose import FeatureRequests, check_together

METHODS = ("ngram", "lookahead", "self")
MODES = ("coupled", "exact")


@dataclass(frozen=True, kw_only=True)
class SpeculationSettings:
    """How tokens are drafted; see :class:`attar.runtime.llm.LLM`.

    Args:
        speculate: a name of METHODS; None: by ``draft``, or not at all.
        draft: a model that drafts; None: none.
        drafts: of one text in a pass at most; None: what suits the method.
        verification: coupled, exact, or None: coupled where a request has a seed, else exact.

    Raises:
        SettingsError: a setting out of range, or two that exclude each other.
    """

    speculate: str | None = None
    draft: Any = None
    drafts: int | None = None
    verification: str | None = None

    def __post_init__(self) -> None:
        if self.speculate is not None and self.speculate not in METHODS:
            close = nearest(self.speculate, METHODS)
            wish = f" (did you mean {close}?)" if close else ""
            raise SettingsError("speculate", self.speculate, f"{', '.join(METHODS)} or None{wish}")
        if self.speculate is not None and self.draft is not None:
            raise SettingsError("speculate", self.speculate, "None beside a draft model: one of them drafts")
        if self.drafts is not None and self.drafts < 1:
            raise SettingsError("drafts", self.drafts, "at least 1")
        if self.verification not in (None, *MODES):
            raise SettingsError("verification", self.verification, f"{', '.join(MODES)} or None")

    def __bool__(self) -> bool:
        """Whether anything is drafted."""
        return self.speculate is not None or self.draft is not None

    def check_with(self, features: FeatureRequests) -> None:
        """Refuse what does not go together with it.

        Args:
            features: what else is asked for, rows of ``kv/compose.py``.

        Raises:
            SettingsError: names both settings, with the sentence.
        """
        if self:
            drafter = getattr(self.draft, "name", self.draft)  # a path, an open checkpoint, or text
            how = ("draft", drafter) if self.speculate is None else ("speculate", self.speculate)
            check_together({**features, "speculation": how, "tree": how})
