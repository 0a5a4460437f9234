"""The tensors of the KV cache: blocks of slots for every layer, in one of the formats of ``kv/store``.

``kv/block_manager.py`` decides which sequence owns a block; the pool writes to slots and reads block tables.

    pool.begin(step)                               copy-on-write, before anything is run
    pool.write(layer, slots, k, v)                 of the step's tokens
    k, v = pool.gather(layer, blocks, stop)        of one sequence
    pool.end(step)                                 blocks that are full and final may be packed tighter
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attar.runtime.kv.store import PoolGeometry, make_store
from attar.runtime.step import StepInput, TokenSpan
from attar.runtime.step import slots as slots_of


class KVPool:
    """Keys and values of all sequences.

    Args:
        geometry: the measures.
        kv_dtype: a name of ``kv.store.STORES``.
        dtype: float dtype of what ``gather`` returns, that of the model.

    Raises:
        SettingsError: there is no such ``kv_dtype``, or it does not suit the geometry.
    """

    def __init__(
        self,
        geometry: PoolGeometry,
        kv_dtype: str = "float32",
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        self.geometry, self.kv_dtype, self.dtype = geometry, kv_dtype, dtype
        self.device = torch.device(device)
        self.store = make_store(kv_dtype, geometry, self.device)

    @property
    def nbytes(self) -> int:
        """Bytes held now, scales included."""
        return self.store.nbytes

    def begin(self, step: StepInput) -> Tensor:
        """Make the step's copies; the slots of its tokens, int64 (T,)."""
        self.store.copy_(step.copies)
        slots = torch.from_numpy(step.slots(self.geometry.block_size)).to(self.device)
        self.store.begin_(slots)
        return slots

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Keep k and v (T, kv_heads, head_dim) of any float dtype at slots int64 (T,)."""
        self.store.write_(layer, slots, k, v)

    def gather(
        self, layer: int, blocks: Sequence[int] | Tensor, stop: int, start: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of a sequence's places [start, stop): tensors (stop - start, kv_heads, head_dim).

        Only blocks with such places are looked at: holes before them are fine.
        """
        block = self.geometry.block_size
        first, last = start // block, -(-stop // block)
        table = torch.as_tensor(blocks[first:last], dtype=torch.int64, device=self.device)
        k, v = self.store.read(layer, table, self.dtype)
        inside = slice(start - first * block, stop - first * block)
        return k[inside], v[inside]

    def end(self, step: StepInput) -> None:
        """Tell the store which blocks are full of tokens that no rejected draft can take back."""
        for span, tree in step.trees():
            full = committed(span, tree is not None) // self.geometry.block_size
            self.store.settle_([block for block in span.blocks[:full] if block >= 0])

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Move tokens between slots, (from, to), one after the other, in every layer."""
        for pair in pairs:
            source, target = torch.tensor(pair, device=self.device)
            sources = source.expand(self.geometry.kv_heads, 1)
            for layer in range(self.geometry.layers):
                self.store.move_(layer, sources, target[None])

    def pack(self, layer: int, old: Sequence[int], new: Sequence[int], keep: Tensor) -> None:
        """Move what eviction keeps of a sequence together, in one layer.

        Args:
            old: its block table until now; a hole is not read.
            new: its block table from now on; the sequence is the only owner of these blocks.
            keep: int64 (kv_heads, m), for each head the places that stay, ascending; they go to [0, m).
        """
        block = self.geometry.block_size
        sources = torch.tensor(old, dtype=torch.int64)[keep.cpu() // block] * block + keep.cpu() % block
        targets = torch.from_numpy(slots_of(new, 0, keep.shape[1], block))
        assert bool((sources >= 0).all()), "what is kept lies in a block that was given back"
        self.store.move_(layer, sources.to(self.device), targets.to(self.device))


def committed(span: TokenSpan, tree: bool) -> int:
    """Places [0, n) of a span's sequence that stay whatever becomes of its drafts."""
    if tree:
        return span.place
    return span.end - max(span.wants - 1, 0)
