"""Counted passes, and the figures computed from them.

A pass of a sequence has d drafts in a tree of depth k (0 and 0 without a draft), of which n are accepted, and
gives n + 1 tokens.

    acceptance rate     accepted / drafted, of all branches
    a                   acceptance rate at the depths that were reached:
                        accepted / (accepted + passes with n < k)
    tokens a pass       mean of n + 1, passes without drafts included
    theory              mean of (1 - a^(k+1)) / (1 - a): tokens a pass if a were the same at every depth

The theory is above the measured mean where acceptances are correlated (half of the passes all, half none),
below it where the first drafts have the highest rate.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145),
    *(2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048),
    *(2.045, 2.042),
)
"""Student's t, 97.5 %, at 1, 2, ... degrees of freedom; beyond 30 the last one, a little too wide."""


@dataclass
class AcceptanceCounts:
    """How often a pass had d drafts of depth k and n accepted: {(d, k, n): passes}."""

    counts: Counter[tuple[int, int, int]] = field(default_factory=Counter)

    def note(self, drafted: int, depth: int, accepted: int) -> None:
        """Count a pass."""
        assert 0 <= accepted <= depth <= drafted, f"{accepted} accepted at depth {depth} of {drafted} drafts"
        self.counts[drafted, depth, accepted] += 1

    @property
    def total(self) -> int:
        """Passes."""
        return self.counts.total()

    @property
    def drafted(self) -> int:
        """Drafts."""
        return sum(drafts * count for (drafts, _, _), count in self.counts.items())

    @property
    def accepted(self) -> int:
        """Accepted drafts."""
        return sum(accepted * count for (_, _, accepted), count in self.counts.items())

    @property
    def rate(self) -> float | None:
        """Accepted / drafted; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def chance(self) -> float | None:
        """a; None where nothing was drafted."""
        stopped = sum(count for (_, depth, accepted), count in self.counts.items() if accepted < depth)
        tried = self.accepted + stopped
        return self.accepted / tried if tried else None

    @property
    def tokens_per_pass(self) -> float | None:
        """Measured; None where no pass was counted."""
        return 1 + self.accepted / self.total if self.total else None

    @property
    def theory(self) -> float | None:
        """Tokens a pass computed from a and the depths."""
        if not self.total:
            return None
        chance = self.chance or 0.0
        passes = self.counts.items()
        return sum(expected_tokens(chance, depth) * count for (_, depth, _), count in passes) / self.total

    @property
    def histogram(self) -> tuple[int, ...]:
        """Passes with 0, 1, 2, ... accepted drafts, of the passes with a draft."""
        passes: Counter[int] = Counter()
        for (_, depth, accepted), count in self.counts.items():
            if depth:
                passes[accepted] += count
        return tuple(passes[accepted] for accepted in range(max(passes, default=-1) + 1))


def expected_tokens(chance: float, drafts: int) -> float:
    """(1 - a^(K+1)) / (1 - a): tokens of a pass over a chain of K drafts, each accepted with chance a if the
    one before it was."""
    if chance == 1:
        return drafts + 1.0
    return float((1 - chance ** (drafts + 1)) / (1 - chance))


@dataclass(frozen=True)
class Speedup:
    """How many times as fast.

    Args:
        value: the geometric mean of the pairs' ratios.
        low, high: 95 % of it, by Student's t of the ratios' logarithms; equal to value where there is one
            pair only, which says nothing of the spread.
        pairs: prompts, each timed both ways.
    """

    value: float
    low: float
    high: float
    pairs: int


def speedup(plain: Sequence[float], other: Sequence[float]) -> Speedup:
    """From seconds a token of the same prompts without and with speculation, at least one, all above 0."""
    logs = [math.log(before / after) for before, after in zip(plain, other, strict=True)]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return Speedup(math.exp(mean), math.exp(mean), math.exp(mean), 1)
    reach = T95[min(len(logs) - 1, len(T95)) - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    return Speedup(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach), len(logs))


@dataclass(frozen=True)
class ProfileRow:
    """A method on a set.

    Attributes:
        texts: completions; same: of them equal to those of plain decoding.
        tokens_per_s: decoded, all rounds together.
        speedup, low, high: over plain decoding, with 95 % of confidence; None for plain decoding itself.
        acceptance: accepted of drafted; chance: a; None where nothing was drafted.
        tokens_per_pass, theory: of one sequence, measured and from a.
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
        lossy: drafts were accepted that plain decoding would not give (typical acceptance).
    """

    model: str
    runner: str
    tokens: int
    rounds: int
    temperature: float
    rows: tuple[ProfileRow, ...]
    held_out_note: str = ""
    lossy: bool = False

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)
