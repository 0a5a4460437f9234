"""INT8 and FP8 (e4m3), symmetric, with a scale for each token and head.

x (kernels/kv_codes.py) is the key or the value of one token in one head, so that no calibration is needed,
and no token changes the rounding of another: appending, sharing and copying blocks work as for plain
numbers. INT8 is better on smooth rows, FP8 where a few numbers of a row are much larger than the rest.

Source: vLLM's ``int8_per_token_head`` (``v1/attention/ops/triton_reshape_and_cache_flash.py``). Scales are
float32: head_dim + 4 bytes for each token and head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attar.kernels.kv_codes import encode
from attar.runtime.kv.store.planes import Cells, PlaneStore, PoolGeometry


class ScaledStore(PlaneStore):
    """Two planes: codes of one byte, and scales (n = 1).

    Args:
        code: ``torch.int8`` or ``torch.float8_e4m3fn``.
    """

    def __init__(self, geometry: PoolGeometry, code: torch.dtype, device: torch.device) -> None:
        codes = torch.zeros(geometry.plane(geometry.head_dim), dtype=torch.int8, device=device)
        scales = torch.zeros(geometry.plane(1), dtype=torch.float32, device=device)
        super().__init__(geometry, codes, scales)  # FP8 codes are stored as bytes: torch indexes no float8
        self.codes, self.scales, self.code = codes, scales, code

    def write_(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        for kind, x in enumerate(self.geometry.stored(k, v)):
            q, s = encode(x, self.code)
            self.rows(self.codes, layer, kind).index_copy_(0, slots, q.view(torch.int8))
            self.rows(self.scales, layer, kind).index_copy_(0, slots, s)

    def read_cells(self, cells: Cells, owner: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        kinds = (
            (q.flatten(1, 2)[cells].view(self.code).float() * s.flatten(1, 2)[cells]).to(dtype)
            for q, s in zip(self.codes.unbind(1), self.scales.unbind(1), strict=True)
        )
        return self.geometry.loaded(*kinds)

    def read(
        self, layer: int, blocks: Tensor, dtype: torch.dtype, numbers: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        kinds = (
            q.index_select(0, blocks).view(self.code).float().mul_(s.index_select(0, blocks)).flatten(0, 1)
            for q, s in zip(self.codes[layer], self.scales[layer], strict=True)
        )
        return self.geometry.loaded(*(kind.to(dtype) for kind in kinds))
