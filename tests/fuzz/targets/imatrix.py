"""Importance matrices, in both of llama.cpp's flavours."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import torch

from attar.errors import AttarError
from attar.formats.gguf import imatrix


def seeds(folder: Path) -> list[bytes]:
    """One file of each flavour."""
    path = folder / "seed.gguf"
    entries = {
        f"blk.{layer}.ffn_up.weight": imatrix.ImportanceEntry(torch.rand(8), 4.0) for layer in range(2)
    }
    imatrix.write_imatrix(path, entries, datasets=["text"], chunks=2, chunk_size=4)
    name = b"blk.0.ffn_up.weight"
    old = struct.pack("<i", 1) + struct.pack("<i", len(name)) + name + struct.pack("<ii8f", 3, 8, *[1.0] * 8)
    return [path.read_bytes(), old]


def target(folder: Path) -> Callable[[bytes], bool]:
    """Reads the bytes as a file."""
    path = folder / "input.imatrix"

    def handle(data: bytes) -> bool:
        path.write_bytes(data)
        try:
            for entry in imatrix.read_imatrix(path).values():
                entry.importance()
            return True
        except AttarError:
            return False

    return handle
