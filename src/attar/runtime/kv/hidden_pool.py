"""Hidden states of some layers of the target, for every slot of its KV cache: what trained proposers read.

A token's hidden states are where its keys and values are: in the same slot, written in the same pass. So a
prefix that is shared, a block that is copied, an accepted path that moves, a preempted sequence that is run
again and a prompt that is run in chunks have them without any further bookkeeping.

Letters: m layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DTYPE = torch.bfloat16  # the range of float32: a residual stream may leave the range of float16


@dataclass(eq=False)
class HiddenPool:
    """The states.

    Attributes:
        layers: ascending; n: the residual stream after layer n; the number of layers: after the final norm.
        states: bfloat16 (slots, m, H).
    """

    layers: tuple[int, ...]
    states: Tensor

    def add(self, layers: Sequence[int]) -> None:
        """Keep the states of further layers, for another proposer; all that were kept are lost."""
        self.layers = tuple(sorted({*self.layers, *layers}))
        slots, _, hidden = self.states.shape
        self.states = self.states.new_zeros(slots, len(self.layers), hidden)

    @classmethod
    def of(
        cls, layers: Sequence[int], slots: int, hidden: int, device: str | torch.device = "cpu"
    ) -> HiddenPool:
        """An empty pool."""
        return cls(tuple(layers), torch.zeros(slots, len(layers), hidden, dtype=DTYPE, device=device))

    @staticmethod
    def token_bytes(layers: int, hidden: int) -> int:
        """Bytes of a token."""
        return int(layers * hidden * DTYPE.itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return int(self.states.nbytes)

    def read(self, slots: NDArray[np.int64], layers: Sequence[int] | None = None) -> Tensor:
        """States float32 (len(slots), m, H), of some of the layers or of all."""
        states = self.states[torch.from_numpy(slots).to(self.states.device)]
        if layers is not None and tuple(layers) != self.layers:
            states = states[:, [self.layers.index(layer) for layer in layers]]
        return states.float()

    def write(self, slots: Tensor, index: int, states: Tensor) -> None:
        """States (T, H) of a layer, by its place in ``layers``, to slots int64 (T,)."""
        self.states[slots, index] = states.to(DTYPE)

    def copy(self, copies: Sequence[tuple[int, int]], block_size: int) -> None:
        """Blocks (from, to), one after the other."""
        blocks = self.states.view(-1, block_size, *self.states.shape[1:])
        for source, target in copies:
            blocks[target] = blocks[source]

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Slots (from, to), one after the other."""
        for source, target in pairs:
            self.states[target] = self.states[source]
