"""Settings of speculation and of its profiler, checked before any model is loaded; free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attar.errors import SettingsError, nearest
from attar.options import check_at_least, setting
from attar.runtime.kv.compose import FeatureRequests, check_together

ALONE = ("ngram", "suffix", "lookahead", "self", "mtp")  # methods that need no draft model
WITH_DRAFT = ("suffix", "draft")  # of a draft model or a head: with suffix trees, or alone
LOSSY = "typical"  # the mode that changes completions
MODES = ("coupled", "exact", LOSSY)


@dataclass(frozen=True, kw_only=True)
class SpeculationSettings:
    """How tokens are drafted; see :class:`attar.runtime.llm.LLM`.

    Args:
        speculate: a name of ALONE, or of WITH_DRAFT where there is a ``draft``; None: "suffix" where there is
            one, else not at all.
        draft: a model or a head that drafts; None: none.
        drafts: of one sequence in a pass at most; None: the method's default.
        verification: coupled, exact, or None: coupled where a request has a seed, else exact. ``typical``
            (``typical.py``) is lossy: sampled completions do not have the model's distribution.

    Raises:
        SettingsError: a setting out of range, or two that exclude each other.
    """

    speculate: str | None = None
    draft: Any = None
    drafts: int | None = None
    verification: str | None = None

    def __post_init__(self) -> None:
        methods = tuple(dict.fromkeys((*ALONE, *WITH_DRAFT)))
        if self.speculate is not None and self.speculate not in methods:
            close = nearest(self.speculate, methods)
            suggestion = f" (did you mean {close}?)" if close else ""
            raise SettingsError("speculate", self.speculate, f"{', '.join(methods)} or None{suggestion}")
        if self.draft is not None and self.speculate not in (None, *WITH_DRAFT):
            allowed = f"{', '.join(WITH_DRAFT)} or None with a draft model: other methods draft alone"
            raise SettingsError("speculate", self.speculate, allowed)
        if self.draft is None and self.speculate not in (None, *ALONE):
            raise SettingsError("speculate", self.speculate, "given with draft, the model that drafts alone")
        check_at_least(self, drafts=1)
        if self.verification not in (None, *MODES):
            raise SettingsError("verification", self.verification, f"{', '.join(MODES)} or None")

    @property
    def both(self) -> bool:
        """Whether suffix trees draft together with a model or a head."""
        return self.draft is not None and self.speculate != "draft"

    def __bool__(self) -> bool:
        """Whether anything is drafted."""
        return self.speculate is not None or self.draft is not None

    def check_with(self, features: FeatureRequests) -> None:
        """Refuse what does not go together with it.

        Args:
            features: other requested features, rows of ``kv/compose.py``.

        Raises:
            SettingsError: names both settings, with the sentence.
        """
        if self:
            drafter = getattr(self.draft, "name", self.draft)  # a path, an open checkpoint, or a name
            how = ("draft", drafter) if self.draft is not None else ("speculate", self.speculate)
            reads = {"hidden_states": how} if self.speculate == "mtp" else {}
            trees = {"tree": how} if self.speculate == "lookahead" else {}  # others may run chains
            check_together({**features, "speculation": how, **trees, **reads})


SETS = ("code", "prose", "json", "repetition", "random")


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """Methods of speculation to compare with plain decoding."""

    speculate: tuple[str, ...] = setting((), "measure this method of speculation against plain decoding",
                                         choices=ALONE)  # fmt: skip
    draft: tuple[str, ...] = setting(
        (), "measure this draft model or head, alone and with suffix trees, against plain decoding"
    )
    drafts: tuple[int, ...] = setting(
        (), "with each method: drafts of a pass at most; none: its usual number"
    )
    verification: str | None = setting(
        None,
        "coupled or exact; typical: LOSSY, likely drafts are accepted; none: coupled, for every prompt has a "
        "seed",
        choices=MODES,
    )
    fixed: bool = setting(False, "always draft this many tokens, also where they do not pay")
    prompts: int = setting(4, "prompts of each set")
    sets: tuple[str, ...] = setting(SETS, "a set of prompts", choices=SETS)
    prompt_file: str | None = setting(
        None, "questions in Spec-Bench's format (JSON lines) instead of the sets"
    )
    temperature: float = setting(0.0, "0: always the likeliest token; above: sampled, with one seed a prompt")

    def __post_init__(self) -> None:
        check_at_least(self, prompts=1, drafts=1)
        if not 0 <= self.temperature <= 100:
            raise SettingsError("temperature", self.temperature, "between 0 and 100")
        if self.fixed and not self.drafts:
            raise SettingsError("fixed", True, "given with drafts, which says how many")

    @property
    def requested(self) -> bool:
        """Whether any method is measured."""
        return bool(self.speculate or self.draft)
