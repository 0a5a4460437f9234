"""Settings of the filters of collected text. Free of torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from attar.errors import SettingsError
from attar.options import setting

NAMES = (
    "length",
    "refusal",
    "language",
    "contamination",
    "self_consistency",
    "near_duplicates",
)
"""The filters in the order in which they run: votes are counted before copies of an answer are removed."""

ALWAYS = ("length", "refusal", "near_duplicates")
ON_REQUEST = {"language": "language", "contamination": "evaluation", "self_consistency": "agreement"}
"""With ``auto``, a filter on request runs where the option it needs is given."""


@dataclass(frozen=True, kw_only=True)
class FilterSettings:
    """Which rows of a collection are kept."""

    filters: str = setting(
        "auto",
        "none, or their names with commas: length, refusal, language, contamination, "
        "self_consistency, near_duplicates; auto: length, refusal, near_duplicates, and those whose "
        "option is given",
    )
    least_words: int = setting(1, "fewest words of an answer")
    most_words: int = setting(0, "most words of an answer; 0: any number")
    keep_cut: bool = setting(False, "keep answers that ended at the limit of their tokens")
    refusals: str = setting(
        "", "a text file with phrases that begin a refusal, one a line; none: attar's own"
    )
    language: str = setting("", "language codes that an answer may have: en, or en,de; none: any")
    evaluation: tuple[str, ...] = setting(
        (), "text or JSONL files of evaluations: rows that share a run of words with them go"
    )
    evaluation_run: int = setting(13, "words in such a run (GPT-3 took 13)")
    agreement: float = setting(
        0.0,
        "least share of a prompt's samples that must have one final answer; those that have "
        "another go; 0: no vote",
    )
    similarity: float = setting(0.8, "Jaccard similarity from which on a later row is a near-duplicate")

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in NAMES:
                raise SettingsError("filters", self.filters, f"auto, none, or of {', '.join(NAMES)}")
            option = ON_REQUEST.get(name)
            if option and not getattr(self, option):
                raise SettingsError(option, getattr(self, option), f"given for the filter {name}")
        if self.least_words < 0 or not (self.most_words == 0 or self.most_words >= self.least_words):
            raise SettingsError(
                "most_words", self.most_words, "0, or not below least_words, itself 0 or more"
            )
        if self.evaluation_run < 1:
            raise SettingsError("evaluation_run", self.evaluation_run, "at least 1")
        if not 0.0 <= self.agreement <= 1.0:
            raise SettingsError("agreement", self.agreement, "between 0 and 1")
        if not 0.1 <= self.similarity <= 1.0:
            raise SettingsError("similarity", self.similarity, "between 0.1 and 1")
        if not re.fullmatch(r"([a-z]{2,3}(,[a-z]{2,3})*)?", self.language):
            raise SettingsError("language", self.language, "codes with commas between them: en or en,de")

    @property
    def names(self) -> tuple[str, ...]:
        """The filters that run, in their order."""
        if self.filters == "none":
            return ()
        if self.filters == "auto":
            return tuple(
                name for name in NAMES if name in ALWAYS or getattr(self, ON_REQUEST.get(name, ""), None)
            )
        listed = [name.strip().replace("-", "_") for name in self.filters.split(",")]
        return tuple(sorted(listed, key=lambda name: NAMES.index(name) if name in NAMES else -1))
