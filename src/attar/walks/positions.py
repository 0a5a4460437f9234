"""How often a token of a calibration row counts, by its position, in the sums of a Linear.

The first tokens of a row carry the attention sinks and the largest activations (Xiao et al. 2023,
arXiv 2309.17453; Sun et al. 2024, arXiv 2402.17762), and every later token reads them; in rows of 512 they
are a thirtieth of the sums. What a position is worth is measured per Linear (sensitivity/positions.py): in
SmolLM2-135M's keys and values the first token counts a hundred times and more, in its MLPs hardly twice.
Where nothing was measured, the first :data:`FIRST` count more. Models that are not causal have
no first token that all others read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

FIRST = 16
"""Tokens of a row that count more where nothing was measured."""

ALIKE = 2.0  # Linears of one input whose weights differ by less than this factor share their sums


@dataclass(frozen=True)
class PositionWeights:
    """How often tokens count.

    Attributes:
        first: how many times the first tokens of a row, where nothing was measured.
        measured: weight of each position, float32 (S,), mean 1, by Linear.
    """

    first: float = 1.0
    measured: Mapping[str, Tensor] = field(default_factory=dict)

    def parts(self, units: Sequence[list[str]]) -> list[list[str]]:
        """Linears of one input in the parts that share their sums; ``units`` are not divided."""
        parts: list[list[str]] = []
        for unit in units:
            part = next((part for part in parts if self._alike(part, unit)), None)
            if part is None:
                parts.append(list(unit))
            else:
                part.extend(unit)
        return parts

    def importance(self, names: Sequence[str], rows: int, length: int, device: torch.device) -> Tensor | None:
        """How often each token counts in the sums of Linears, float32 (rows, length); None: all once."""
        weights = self._mean(names)
        if weights is not None and len(weights) >= length:
            return weights[:length].to(device).expand(rows, length)
        if self.first == 1.0:
            return None
        importance = torch.ones(rows, length, device=device)
        importance[:, :FIRST] = self.first
        return importance

    def _mean(self, names: Sequence[str]) -> Tensor | None:
        measured = [self.measured[name] for name in names if name in self.measured]
        return torch.stack(measured).mean(0) if measured else None

    def _alike(self, names: Sequence[str], others: Sequence[str]) -> bool:
        weights, other_weights = self._mean(names), self._mean(others)
        if weights is None or other_weights is None:
            return weights is other_weights
        smaller, larger = torch.minimum(weights, other_weights), torch.maximum(weights, other_weights)
        return bool((larger <= ALIKE * smaller).all())
