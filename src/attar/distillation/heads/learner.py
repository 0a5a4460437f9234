"""A draft head as the module that is trained: its forward pass is its loss.

What wraps a module to spread a run over processes (DDP) adds up gradients behind its forward pass, so the
loss must be inside.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from attar.distillation.heads import HEAD_LOSSES
from attar.distillation.heads.target_pass import TargetPass


class HeadLearner(nn.Module):  # type: ignore[misc]
    """A draft head with its loss.

    Args:
        head: a module of ``attar.models.draft_heads``.
        options: of its kind, see ``head_settings.py``.
    """

    def __init__(self, head: Any, options: Any) -> None:
        super().__init__()
        self.head, self.options = head, options

    def forward(self, passed: TargetPass) -> Tensor:
        """The loss of a batch."""
        return HEAD_LOSSES[self.head.config.kind](self.head, passed, self.options)

    def output_weights(self) -> list[nn.Parameter]:
        """Matrices that make logits, which the optimizers treat as a head."""
        weights = getattr(self.head, "output_weights", None)
        return [] if weights is None else list(weights())
