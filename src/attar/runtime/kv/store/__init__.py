"""Formats of keys and values, and the table of their names.

A store is append-only: a slot is written once and never quantized again from its own rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from attar.errors import SettingsError, nearest
from attar.runtime.kv.store.kivi import KIVIStore
from attar.runtime.kv.store.mixed import MixedStore
from attar.runtime.kv.store.planes import DenseStore, PoolGeometry, Store
from attar.runtime.kv.store.rotated import RotatedStore
from attar.runtime.kv.store.scaled import ScaledStore

STORES: dict[str, Callable[[PoolGeometry, torch.device], Store]] = {
    "float32": lambda geometry, device: DenseStore(geometry, torch.float32, device),
    "bfloat16": lambda geometry, device: DenseStore(geometry, torch.bfloat16, device),
    "float16": lambda geometry, device: DenseStore(geometry, torch.float16, device),
    "int8": lambda geometry, device: ScaledStore(geometry, torch.int8, device),
    "fp8": lambda geometry, device: ScaledStore(geometry, torch.float8_e4m3fn, device),
    "int4": RotatedStore,
    "kivi4": lambda geometry, device: KIVIStore(geometry, 4, device),
    "kivi2": lambda geometry, device: KIVIStore(geometry, 2, device),
}


def make_store(name: str, geometry: PoolGeometry, device: torch.device, formats: Sequence[str] = ()) -> Store:
    """The store of a name, empty.

    Args:
        formats: of each layer with int4, where layers differ: int4 or int8.

    Raises:
        SettingsError: the name is not known, or the geometry does not suit the format.
    """
    if name not in STORES:
        close = nearest(name, STORES)
        hint = f" (did you mean {close}?)" if close else ""
        raise SettingsError("kv_dtype", name, f"one of {', '.join(STORES)}{hint}")
    return MixedStore(geometry, device, formats) if formats else STORES[name](geometry, device)


__all__ = ["STORES", "PoolGeometry", "Store", "make_store"]
