"""When a sequence that gets no drafts is tried with one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Watch:
    """When a sequence is probed: after ``gap`` passes without drafts, of which ``idle`` have gone by. The
    longest gap is ``last``; ``probe`` says that the pass on its way is one; ``hope``, that drafts could pay
    if all were accepted.
    """

    gap: int
    idle: int = 0
    last: int = 1
    probe: bool = False
    hope: bool = True
