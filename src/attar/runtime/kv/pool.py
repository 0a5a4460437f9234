"""The tensors of the KV cache: blocks of slots for every layer, in one of the formats of ``kv/store``.

``kv/block_manager.py`` decides which sequence owns a block; the pool writes to slots and reads block tables.

    pool.begin(step)                               copy-on-write, before anything is run
    pool.write(layer, slots, k, v)                 of the step's tokens
    k, v = pool.gather(layer, blocks, stop)        of one sequence
    pool.end(step)                                 full blocks may be quantized
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
        kv_dtype: a name of ``kv.store.STORES``.
        dtype: float dtype that ``gather`` returns, the model's.
        formats: of each layer with int4, where layers differ: int4 or int8.

    Raises:
        SettingsError: ``kv_dtype`` is unknown, or does not work with the geometry.
    """

    def __init__(
        self,
        geometry: PoolGeometry,
        kv_dtype: str = "float32",
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        formats: Sequence[str] = (),
    ) -> None:
        self.geometry, self.kv_dtype, self.dtype = geometry, kv_dtype, dtype
        self.device = torch.device(device)
        self.store = make_store(kv_dtype, geometry, self.device, formats)

    @property
    def nbytes(self) -> int:
        """Bytes held now, scales included."""
        return self.store.nbytes

    def begin(self, step: StepInput) -> Tensor:
        """Make the step's copies; the slots of its tokens, int64 (T,)."""
        self.store.copy_(step.copies)
        slots = step.slots(self.geometry.block_size)
        self.store.begin_(slots.tolist())
        return torch.from_numpy(slots).to(self.device)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v (T, kv_heads, head_dim) of any float dtype to slots int64 (T,)."""
        self.store.write_(layer, slots, k, v)

    def gather(
        self, layer: int, blocks: Sequence[int], stop: int, start: int = 0, *, table: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of a sequence's entries [start, stop): tensors (stop - start, kv_heads, head_dim),
        values (..., latent) where they are the end of keys.

        Only blocks with these entries are read; FREED blocks before them are fine.

        Args:
            table: the same blocks on the device, int64; None: they are copied there.
        """
        block = self.geometry.block_size
        part = slice(start // block, -(-stop // block))
        if table is None:
            table = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        k, v = self.store.read(layer, table[part], self.dtype, blocks[part])
        inside = slice(start - part.start * block, stop - part.start * block)
        return k[inside], v[inside]

    def end(self, step: StepInput) -> None:
        """Tell the store which blocks are full of tokens that cannot be rejected any more."""
        for span, tree in step.trees():
            full = committed(span, tree is not None) // self.geometry.block_size
            self.store.settle_([block for block in span.blocks[:full] if block >= 0])

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Move tokens between slots, (from, to), one after the other, in every layer."""
        for pair in pairs:
            source, target = torch.tensor(pair)  # on the host, which some stores read
            sources = source.expand(self.geometry.kv_heads, 1)
            for layer in range(self.geometry.layers):
                self.store.move_(layer, sources, target[None])

    def pack(self, layer: int, old: Sequence[int], new: Sequence[int], keep: Tensor) -> None:
        """Move the entries that eviction keeps of a sequence together, in one layer.

        Args:
            old: its block table until now; FREED blocks are not read.
            new: its block table from now on; no other sequence holds these blocks.
            keep: int64 (kv_heads, m), for each head the entries that stay, ascending; they move to [0, m).
        """
        block = self.geometry.block_size
        sources = torch.tensor(old, dtype=torch.int64)[keep.cpu() // block] * block + keep.cpu() % block
        targets = torch.from_numpy(slots_of(new, 0, keep.shape[1], block))
        assert bool((sources >= 0).all()), "a kept entry is in a block that was released"
        self.store.move_(layer, sources.to(self.device), targets.to(self.device))


def committed(span: TokenSpan, tree: bool) -> int:
    """Entries [0, n) of a span's sequence that stay whether or not its drafts are accepted."""
    if tree:
        return span.offset
    return span.end - max(span.wants - 1, 0)
