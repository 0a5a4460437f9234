"""INT4 (kernels/kv_int4.py): keys in a basis of the model, keys and values rotated, 4-bit codes with a scale
and a minimum for each token and head.

c are the mean key of each layer and head, and that of a sequence's first token, on which attention rests and
which is unlike all others. D is 1, or of keys calibrated (``quantization/kv_basis.py``). Both depend on the
model alone (``runner/key_means.py``), so that no request changes the rounding of another. A token has its
final form when it is written: head_dim / 2 + 4 bytes for each token and head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attar.errors import SettingsError
from attar.kernels.kv_int4 import decode, encode, rotated
from attar.runtime.kv.store.planes import Cells, PlaneStore, PoolGeometry


@dataclass(frozen=True)
class CacheBasis:
    """What the keys of a model are rounded in.

    Attributes:
        centers: float32 (2, layers, kv_heads, head_dim), c.
        factors: float32 (layers, kv_heads, head_dim), the diagonals of D.
        formats: of the keys and values of each layer, int4 or int8 (scaled.py); empty: int4 in all.
    """

    centers: Tensor
    factors: Tensor
    formats: tuple[str, ...] = ()

    @classmethod
    def of_centers(cls, centers: Tensor) -> CacheBasis:
        """With D = 1."""
        return cls(centers, torch.ones_like(centers[0]))

    def at(self, *index: Any) -> tuple[Tensor, Tensor]:
        """D (..., head_dim) and c (2, ..., head_dim) of layers, or of layers and heads."""
        return self.factors[index], self.centers[:, *index]

    def to(self, device: torch.device) -> CacheBasis:
        """On a device."""
        return replace(self, centers=self.centers.to(device), factors=self.factors.to(device))

    def rows(self) -> Tensor:
        """For kernels, float32 (layers, kv_heads, 4, head_dim): D, 1 / D and both c D H."""
        return torch.stack((self.factors, 1 / self.factors, *rotated(self.centers * self.factors)), dim=2)


def formats_label(kv_dtype: str, formats: Sequence[str]) -> str:
    """A pool's format in words."""
    wide = sum(name != kv_dtype for name in formats)
    return f"{kv_dtype}, {wide} of {len(formats)} layers int8" if wide else kv_dtype


class RotatedStore(PlaneStore):
    """Two planes: bytes of two codes, and float16 pairs s, m.

    Attributes:
        basis: zeros and ones until it is set. Not to be changed once a key is written.

    Raises:
        SettingsError: a head's numbers do not fill bytes.
    """

    def __init__(self, geometry: PoolGeometry, device: torch.device) -> None:
        n = geometry.head_dim
        if n % 2:
            raise SettingsError("kv_dtype", "int4", f"another one: {n} is no multiple of 2")
        codes = torch.zeros(geometry.plane(n // 2), dtype=torch.uint8, device=device)
        pairs = torch.zeros(geometry.plane(2), dtype=torch.float16, device=device)
        super().__init__(geometry, codes, pairs)
        self.codes, self.pairs = codes, pairs
        zeros = torch.zeros(2, geometry.layers, geometry.kv_heads, n, device=device)
        self.basis = CacheBasis.of_centers(zeros)

    @property
    def basis(self) -> CacheBasis:
        """Of keys."""
        return self._basis

    @basis.setter
    def basis(self, basis: CacheBasis) -> None:
        self._basis, self.basis_rows = basis, basis.rows()

    def write_(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        for kind, x in enumerate(self.geometry.stored(k, v)):
            codes, pairs = encode(x, *(() if kind else self.basis.at(layer)))
            self.rows(self.codes, layer, kind).index_copy_(0, slots, codes)
            self.rows(self.pairs, layer, kind).index_copy_(0, slots, pairs)

    def read_cells(self, cells: Cells, owner: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        kinds = [
            decode(
                codes.flatten(1, 2)[cells],
                pairs.flatten(1, 2)[cells],
                *(() if kind else self.basis.at(*owner)),
            )
            for kind, (codes, pairs) in enumerate(
                zip(self.codes.unbind(1), self.pairs.unbind(1), strict=True)
            )
        ]
        return self.geometry.loaded(*(kind.to(dtype) for kind in kinds))

    def read(
        self, layer: int, blocks: Tensor, dtype: torch.dtype, numbers: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        kinds = [
            decode(
                codes.index_select(0, blocks),
                pairs.index_select(0, blocks),
                *(() if kind else self.basis.at(layer)),
            ).flatten(0, 1)
            for kind, (codes, pairs) in enumerate(zip(self.codes[layer], self.pairs[layer], strict=True))
        ]
        return self.geometry.loaded(*(kind.to(dtype) for kind in kinds))
