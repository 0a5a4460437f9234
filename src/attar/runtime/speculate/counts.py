"""What speculation did, for metrics."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass
class SpeculationCounts:
    """What happened since the start.

    Attributes:
        drafts: times a draft was verified.
        drafted: tokens in them.
        accepted: of these.
        accepted_at: accepted tokens at each position of a draft, from the first.
    """

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)

    def copy(self) -> SpeculationCounts:
        """The counts as they are now, for another thread."""
        return replace(self, accepted_at=list(self.accepted_at))

    def note(self, drafted: int, accepted: int) -> None:
        """A draft was verified."""
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        self.accepted_at += [0] * (accepted - len(self.accepted_at))
        for position in range(accepted):
            self.accepted_at[position] += 1
