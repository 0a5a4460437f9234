"""Training batches by number: batch i is a function of (rows, seed, i), so a resumed run sees the same
order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batches:
    """Shuffled batches over rows of tokens; each epoch has its own permutation.

    Attributes:
        rows: int64 (N, S).
        size: B, rows a batch.
        seed: of the permutations.
    """

    rows: Tensor
    size: int
    seed: int

    def __getitem__(self, index: int) -> Tensor:
        """Batch number ``index``, int64 (B, S); runs on through epochs without end."""
        total = self.rows.shape[0]
        places = torch.arange(index * self.size, (index + 1) * self.size)
        orders = {int(epoch): self._order(int(epoch)) for epoch in (places // total).unique()}
        return self.rows[torch.stack([orders[int(place) // total][int(place) % total] for place in places])]

    def _order(self, epoch: int) -> Tensor:
        return torch.randperm(self.rows.shape[0], generator=numbered_generator(self.seed, epoch))


def numbered_generator(seed: int, number: int) -> torch.Generator:
    """A generator for one of many draws of a seed; any whole numbers will do."""
    return torch.Generator().manual_seed((seed * 1_000_003 + number) % 2**64)
