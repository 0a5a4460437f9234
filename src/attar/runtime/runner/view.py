"""What the tokens of one span may see: masks made of places.

A token sees what lies before its span, its ancestors inside the span (a chain: every earlier token) and
itself; with a sliding window w only positions above its own minus w. Letters: t tokens of the span, n places
that are looked at.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from attar.runtime.step import TokenSpan, depths


class SpanView:
    """One span of a pass: its rows of the step, its block table, and what its tokens may see."""

    def __init__(
        self, span: TokenSpan, tree: tuple[int, ...] | None, rows: slice, device: torch.device
    ) -> None:
        self.span, self.tree, self.rows, self.device = span, tree, rows, device
        self.blocks = torch.tensor(span.blocks, dtype=torch.int64, device=device)
        self.fresh = tree is None and span.place == 0 and span.count > 1
        self._masks: dict[int | None, Tensor | None] = {}

    def first(self, window: int | None) -> int:
        """First place that any of the span's tokens sees."""
        return 0 if window is None else max(0, self.span.place - window + 1)

    def mask(self, window: int | None) -> Tensor | None:
        """bool (t, n): the places [first, end) that each token sees; None where that is all, or a triangle.

        A window that nothing of the span reaches counts as none.
        """
        assert window is None or self.span.kept is None, "no sliding window over a cache that was packed"
        if window is not None and self.span.end <= window:
            window = None
        if window not in self._masks:
            self._masks[window] = self._made(window)
        return self._masks[window]

    def _made(self, window: int | None) -> Tensor | None:
        span, first = self.span, self.first(window)
        plain = span.count == 1 or self.fresh
        if plain and window is None:
            return None
        inside = self.inside
        if window is not None:
            inside = inside & (self.depths[None, :] > self.depths[:, None] - window)
        before = torch.ones(span.count, span.place - first, dtype=torch.bool, device=self.device)
        if window is not None:
            positions = span.start + self.depths
            before &= torch.arange(first, span.place, device=self.device) > positions[:, None] - window
        return torch.cat([before, inside], dim=1)

    @cached_property
    def depths(self) -> Tensor:
        """int64 (t,): a token's position is the span's start and this."""
        return torch.from_numpy(depths(self.span.count, self.tree)).to(self.device)

    @cached_property
    def inside(self) -> Tensor:
        """bool (t, t): ancestors and oneself."""
        if self.tree is None:
            return torch.ones(self.span.count, self.span.count, dtype=torch.bool, device=self.device).tril()
        seen = torch.eye(self.span.count, dtype=torch.bool)
        for token, parent in enumerate(self.tree):
            if parent >= 0:
                seen[token] |= seen[parent]
        return seen.to(self.device)
