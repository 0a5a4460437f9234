"""Layers of 4 bits and layers of 8 bits in one pool: rotated.py and scaled.py, each for its layers.

Which layers have 8 bits is a property of the model (``quantization/kv_basis.py``), so that a token has its
final form when it is written. Entries do not move from one layer to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attar.runtime.kv.store.planes import PlaneStore, PoolGeometry
from attar.runtime.kv.store.rotated import CacheBasis, RotatedStore
from attar.runtime.kv.store.scaled import ScaledStore


class MixedStore(PlaneStore):
    """The planes of a store of int4 and of a store of int8.

    Attributes:
        layers: of each, its store and its number there.

    Args:
        formats: of each layer, int4 or int8.

    Raises:
        SettingsError: as of int4.
    """

    def __init__(self, geometry: PoolGeometry, device: torch.device, formats: Sequence[str]) -> None:
        indices = [formats[:layer].count(name) for layer, name in enumerate(formats)]
        four, eight = (replace(geometry, layers=formats.count(name)) for name in ("int4", "int8"))
        self._int4, int8 = RotatedStore(four, device), ScaledStore(eight, torch.int8, device)
        super().__init__(geometry, *self._int4.planes, *int8.planes)
        stores: dict[str, RotatedStore | ScaledStore] = {"int4": self._int4, "int8": int8}
        self.layers = [(stores[name], index) for name, index in zip(formats, indices, strict=True)]

    @property
    def basis(self) -> CacheBasis:
        """Of the layers of int4."""
        return self._int4.basis

    @basis.setter
    def basis(self, basis: CacheBasis) -> None:
        """Of all layers."""
        layers = [layer for layer, (store, _) in enumerate(self.layers) if store is self._int4]
        self._int4.basis = CacheBasis(basis.centers[:, layers], basis.factors[layers])

    def write_(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        store, index = self.layers[layer]
        store.write_(index, slots, k, v)

    def read(
        self, layer: int, blocks: Tensor, dtype: torch.dtype, numbers: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        store, index = self.layers[layer]
        return store.read(index, blocks, dtype, numbers)

    def move_(self, layer: int, sources: Tensor, targets: Tensor) -> None:
        store, index = self.layers[layer]
        store.move_(index, sources, targets)
