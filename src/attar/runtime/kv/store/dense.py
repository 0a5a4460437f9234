"""Keys and values as they are, in float32, bfloat16 or float16."""

from __future__ import annotations

import torch
from torch import Tensor

from attar.runtime.kv.store.geometry import Cells, PlaneStore, PoolGeometry


class DenseStore(PlaneStore):
    """One plane [layers, 2, blocks, block, kv_heads, head_dim]; what is written is rounded to its dtype."""

    def __init__(self, geometry: PoolGeometry, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(geometry, torch.zeros(geometry.plane(geometry.head_dim), dtype=dtype, device=device))
        self.data = self.planes[0]

    def write_(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        for kind, x in enumerate((k, v)):
            self.rows(self.data, layer, kind).index_copy_(0, slots, x.to(self.data.dtype))

    def read_cells(self, cells: Cells, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        k, v = (self.data[:, kind].flatten(1, 2)[cells].to(dtype) for kind in range(2))
        return k, v

    def read(self, layer: int, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        k, v = (kind.index_select(0, blocks).flatten(0, 1).to(dtype) for kind in self.data[layer])
        return k, v
