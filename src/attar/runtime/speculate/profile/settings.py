"""What ``attar bench --speculate`` measures: flat, and free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attar.errors import SettingsError
from attar.runtime.speculate.wanted import METHODS, MODES

SETS = ("code", "prose", "json", "repetition", "random")


def _option(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """Methods of speculation beside plain decoding."""

    speculate: tuple[str, ...] = _option((), "measure this method of speculation beside plain decoding",
                                         choices=METHODS)  # fmt: skip
    draft: tuple[str, ...] = _option((), "measure this draft model beside plain decoding")
    drafts: tuple[int, ...] = _option(
        (), "with each method: drafts of a pass at most; none: its usual number"
    )
    verification: str | None = _option(None, "coupled or exact; none: coupled, for every prompt has a seed",
                                       choices=MODES)  # fmt: skip
    fixed: bool = _option(False, "always make so many drafts, also where they do not pay")
    prompts: int = _option(4, "prompts of each set")
    sets: tuple[str, ...] = _option(SETS, "a set of prompts", choices=SETS)
    prompt_file: str | None = _option(
        None, "questions in Spec-Bench's format (JSON lines) instead of the sets"
    )
    temperature: float = _option(0.0, "0: always the likeliest token; above: sampled, with one seed a prompt")

    def __post_init__(self) -> None:
        for name in ("prompts", *(("drafts",) if self.drafts else ())):
            value = getattr(self, name)
            for each in value if isinstance(value, tuple) else (value,):
                if each < 1:
                    raise SettingsError(name, each, "at least 1")
        if not 0 <= self.temperature <= 100:
            raise SettingsError("temperature", self.temperature, "between 0 and 100")
        if self.fixed and not self.drafts:
            raise SettingsError("fixed", True, "given with drafts, which says how many")

    @property
    def asked(self) -> bool:
        """Whether there is anything to measure beside plain decoding."""
        return bool(self.speculate or self.draft)
