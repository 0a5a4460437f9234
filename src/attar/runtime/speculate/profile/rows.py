"""What the profiler found: plain data, for a table, JSON and a picture."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ProfileRow:
    """A method on a set.

    Attributes:
        texts: how many were asked for; same: of them equal to plain decoding's.
        tokens_per_s: decoded, all rounds together.
        speedup, low, high: over plain decoding, with 95 % of confidence; None for plain decoding itself.
        acceptance: accepted of drafted; chance: a; None where nothing was drafted.
        tokens_per_pass, theory: of one text, measured and from a.
        draft_share: of the time, spent in the proposer.
        histogram: passes with 0, 1, 2, ... accepted drafts.
    """

    set: str
    method: str
    batch: int
    texts: int
    same: int
    tokens_per_s: float
    speedup: float | None
    low: float | None
    high: float | None
    acceptance: float | None
    chance: float | None
    tokens_per_pass: float | None
    theory: float | None
    draft_share: float
    histogram: tuple[int, ...]


@dataclass(frozen=True)
class Profile:
    """All rows.

    Attributes:
        held_out_note: which prompts the target or a draft model was trained on, as far as their records
            tell; empty where none.
    """

    model: str
    runner: str
    tokens: int
    rounds: int
    temperature: float
    rows: tuple[ProfileRow, ...]
    held_out_note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)
