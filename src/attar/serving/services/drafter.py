"""Drafters as the engine sees them: one replica, or what a coordinator has chosen."""

from __future__ import annotations

from typing import Protocol

from attar.serving.services.messages import Open, ServiceMessage
from attar.serving.services.turnaround import Turnaround


class Drafter(Protocol):
    """One drafter as the engine sees it; called from the engine's thread, never blocks.

    Attributes:
        name: for metrics.
        ready: whether it answers; once it does not, its requests are opened elsewhere.
        turnaround: measured by the proposer.
    """

    name: str
    turnaround: Turnaround

    @property
    def ready(self) -> bool: ...

    def send(self, message: ServiceMessage) -> None:
        """Send soon, in order."""
        ...

    def judged(self, drafted: int, accepted: int) -> None:
        """Count the drafted tokens that a pass verified and accepted."""
        ...


class DrafterPool(Protocol):
    """The drafters of an engine."""

    def ready_for(self, request: str) -> bool:
        """Whether one may be ready for a request, by the client's id of it: asked in every pass, so cheap."""
        ...

    def choose(self, opening: Open) -> Drafter | None:
        """The drafter for a request; None where none is ready."""
        ...
