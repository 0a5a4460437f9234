"""The target behind the nodes of a draft in the engine: nothing is asked of it behind the end of a text.

Behind an end token, or where a grammar is complete, no token may be allowed any more, and there is none to be
decided: what is said there the text drops.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attar.runtime.completion import Completion
from attar.runtime.speculate.draft import Floats
from attar.runtime.speculate.target import TargetLogits

BEHIND = -1  # stands for a token behind the end; no draft is it


@dataclass(frozen=True, eq=False)
class Nodes(TargetLogits):
    """Args: as of :class:`TargetLogits`, and the text itself."""

    text: Completion

    def token(self, node: int) -> int:
        return BEHIND if self._over(node) else super().token(node)

    def p(self, node: int) -> Floats:
        if self._over(node):  # any law will do
            size = self.logits.shape[1]
            return np.full(size, 1 / size, dtype=np.float32)
        return super().p(node)

    def _over(self, node: int) -> bool:
        return self.text.ends_within(self.draft.text(self.draft.path(node)))
