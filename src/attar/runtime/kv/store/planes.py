"""What all stores have in common, and the stores whose tokens are independent of each other.

A plane is a tensor [layers, 2, blocks, block, kv_heads, n]: keys at [:, 0], values at [:, 1], n numbers for
each token and head. Where values are the last numbers of their keys (MLA's latents), there are only keys:
[layers, 1, ...]. Slot s is row s % block of block s // block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Cells = tuple[Tensor, Tensor, Tensor]
"""Layers, slots and heads, int64 (m,) each: the numbers of one token in one head."""


@dataclass(frozen=True)
class PoolGeometry:
    """The shape of a pool; MHA has as many ``kv_heads`` as heads, MQA has one.

    Attributes:
        latent: how many numbers at the end of a key are its value; 0: values are numbers of their own.
    """

    layers: int
    blocks: int
    block_size: int  # tokens of a block
    kv_heads: int
    head_dim: int
    latent: int = 0

    @property
    def kinds(self) -> int:
        """2, keys and values, or 1."""
        return 1 if self.latent else 2

    def plane(self, numbers: int) -> tuple[int, ...]:
        """Shape of a plane with ``numbers`` for each token and head."""
        return (self.layers, self.kinds, self.blocks, self.block_size, self.kv_heads, numbers)

    def stored(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """What a plane has of keys and values."""
        return (k,) if self.latent else (k, v)

    def loaded(self, *stored: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of what a plane has."""
        return (stored[0], stored[0][..., -self.latent :]) if self.latent else (stored[0], stored[1])


class Store(Protocol):
    """Keys and values of all layers. No operation allocates in proportion to the pool."""

    geometry: PoolGeometry

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        ...

    def begin_(self, slots: Sequence[int]) -> None:
        """A step will write these slots, in each layer."""
        ...

    def write_(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v (T, kv_heads, head_dim) of any float dtype to slots int64 (T,); with ``latent`` v is
        the end of k."""
        ...

    def read(
        self, layer: int, blocks: Tensor, dtype: torch.dtype, numbers: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of whole blocks int64 (n,), which are ``numbers`` on the host: two tensors
        (n * block, kv_heads, head_dim), values (..., latent) where they are the end of keys."""
        ...

    def settle_(self, blocks: Sequence[int]) -> None:
        """These blocks are full and will not be written again."""
        ...

    def copy_(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (from, to) in this order, in each layer."""
        ...

    def move_(self, layer: int, sources: Tensor, targets: Tensor) -> None:
        """Move tokens of one layer, bit for bit; all are read before any is written.

        Args:
            sources: int64 (kv_heads, m), slots, for each head its own.
            targets: int64 (m,), slots.
        """
        ...


class PlaneStore:
    """A store of planes: every token is independent, so that blocks, rows and cells can be moved."""

    def __init__(self, geometry: PoolGeometry, *planes: Tensor) -> None:
        self.geometry = geometry
        self.planes = planes

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes)

    def begin_(self, slots: Sequence[int]) -> None:
        """Nothing to prepare."""

    def settle_(self, blocks: Sequence[int]) -> None:
        """Nothing to do: a token has its final form when it is written."""

    def copy_(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            for plane in self.planes:
                plane[:, :, target] = plane[:, :, source]

    def move_(self, layer: int, sources: Tensor, targets: Tensor) -> None:
        heads = torch.arange(len(sources), device=sources.device)[:, None]
        for plane in self.planes:
            for rows in plane[layer].flatten(1, 2):  # of each kind: (slots, kv_heads, n)
                rows[targets.expand_as(sources), heads] = rows[sources, heads]

    def read_block(self, block: int) -> bytes:
        """The content of a block, all layers."""
        parts = [plane[:, :, block].contiguous().view(torch.uint8).cpu() for plane in self.planes]
        return b"".join(part.numpy().tobytes() for part in parts)

    def write_block(self, block: int, content: bytes) -> None:
        """Put back what :meth:`read_block` returned."""
        data, start = torch.frombuffer(bytearray(content), dtype=torch.uint8), 0
        for plane in self.planes:
            part = plane[:, :, block]
            stop = start + part.numel() * part.itemsize
            part.copy_(data[start:stop].view(plane.dtype).view(part.shape))
            start = stop
        assert start == len(content), f"a block of {len(content)} bytes, not {start}"

    def read_cells(self, cells: Cells, owner: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of cells: two tensors (m, head_dim).

        Args:
            owner: the layer and the head that wrote them, wherever they were moved.
        """
        raise NotImplementedError

    def move_cells_(self, sources: Cells, targets: Cells) -> None:
        """Move keys and values between cells, bit for bit; all are read before any is written."""
        for plane in self.planes:
            for kind in range(self.geometry.kinds):
                cells = plane[:, kind].flatten(1, 2)  # (layers, slots, kv_heads, n)
                cells[targets] = cells[sources]

    def rows(self, plane: Tensor, layer: int, kind: int) -> Tensor:
        """Keys (0) or values (1) of a layer: a view (slots, kv_heads, n) to write to."""
        return plane[layer, kind].flatten(0, 1)


class DenseStore(PlaneStore):
    """float32, bfloat16 or float16: one plane with n = head_dim; written values are rounded to its dtype."""

    def __init__(self, geometry: PoolGeometry, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(geometry, torch.zeros(geometry.plane(geometry.head_dim), dtype=dtype, device=device))
        self.data = self.planes[0]

    def write_(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        for kind, x in enumerate(self.geometry.stored(k, v)):
            self.rows(self.data, layer, kind).index_copy_(0, slots, x.to(self.data.dtype))

    def read_cells(self, cells: Cells, owner: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        kinds = (kind.flatten(1, 2)[cells].to(dtype) for kind in self.data.unbind(1))
        return self.geometry.loaded(*kinds)

    def read(
        self, layer: int, blocks: Tensor, dtype: torch.dtype, numbers: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        kinds = (kind.index_select(0, blocks).flatten(0, 1).to(dtype) for kind in self.data[layer])
        return self.geometry.loaded(*kinds)
