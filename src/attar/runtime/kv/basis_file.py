"""The file of a checkpoint with what keys are rounded in by ``kv_dtype="int4"``: ``attar-kv.json``.

    {"centers": (2, layers, kv_heads, head_dim), "factors": (layers, kv_heads, head_dim),   nested lists
     "formats": ["int4", "int8", ...]}       of each layer, where they differ

``quantize --kv-cache int4`` writes it. It is JSON, because engines read every safetensors file of a folder.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from attar.checkpoint.atomic import write_bytes
from attar.checkpoint.companions import KV_BASIS
from attar.checkpoint.jsonfile import read_json
from attar.errors import CheckpointError
from attar.runtime.kv.memory import HINT, read_formats
from attar.runtime.kv.store.rotated import CacheBasis

DIGITS = 6  # of a number


def write_basis(basis: CacheBasis, folder: Path) -> None:
    """Write a basis into a folder."""

    def rounded(numbers: object) -> object:
        if isinstance(numbers, list):
            return [rounded(number) for number in numbers]
        return float(f"{numbers:.{DIGITS}g}")

    lists = {"centers": basis.centers.tolist(), "factors": basis.factors.tolist()}
    content = {name: rounded(numbers) for name, numbers in lists.items()}
    if basis.formats:
        content["formats"] = basis.formats
    write_bytes(folder / KV_BASIS, json.dumps(content).encode())


def read_basis(folder: Path, layers: int, kv_heads: int, head_dim: int) -> CacheBasis | None:
    """The basis of a checkpoint's folder; None: it has none.

    Raises:
        CheckpointError: the file is damaged, or of another model.
    """
    path = folder / KV_BASIS
    if not path.is_file():
        return None
    stored, shape, formats = read_json(path), (layers, kv_heads, head_dim), read_formats(folder, layers)
    try:
        centers, factors = (
            torch.tensor(stored[name], dtype=torch.float32) for name in ("centers", "factors")
        )
    except (KeyError, TypeError, ValueError) as problem:
        raise CheckpointError(f"{path}: {problem}", hint=HINT) from problem
    finite = centers.isfinite().all() and factors.isfinite().all() and (factors > 0).all()
    if factors.shape != shape or centers.shape != (2, *shape) or not finite:
        raise CheckpointError(
            f"{path}: not finite numbers for {layers} layers of {kv_heads} heads of {head_dim}",
            hint=HINT,
        )
    return CacheBasis(centers, factors, formats)
