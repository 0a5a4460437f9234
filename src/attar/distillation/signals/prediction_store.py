"""Predictions on disk, found by the text that they belong to.

A file holds the predictions of many rows, and a hash of each row's tokens. Files appear by rename and are
never changed: a killed run leaves whole ones, several runs may write into one folder, and a damaged file
counts as absent.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from attar.checkpoint import atomic

DIGEST = 16  # bytes of a row's hash
ROWS = "rows"  # the tensor of the hashes in a file


def row_digest(row: Tensor) -> bytes:
    """The hash of a row's tokens int64 (S,)."""
    return hashlib.sha256(row.cpu().numpy().tobytes()).digest()[:DIGEST]


class PredictionStore:
    """A folder of predictions.

    Args:
        folder: made with the first file; what it has when the store is opened is known.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._index: dict[bytes, tuple[Path, int]] = {}
        for file in sorted(folder.glob("*.safetensors")):
            self._add(file)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._index

    def write(self, digests: Sequence[bytes], tensors: dict[str, Tensor]) -> None:
        """Write a file.

        Args:
            digests: of R rows.
            tensors: (R, ...) each.
        """
        file = self.folder / f"{hashlib.sha256(b''.join(digests)).hexdigest()[: 2 * DIGEST]}.safetensors"
        hashes = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8).reshape(-1, DIGEST)
        self.folder.mkdir(parents=True, exist_ok=True)
        atomic.save_tensors(file, {**tensors, ROWS: hashes})
        self._add(file)

    def read(self, digests: Sequence[bytes]) -> dict[str, Tensor]:
        """The tensors (R, ...) of R rows, all in the store."""
        wanted: dict[Path, list[int]] = defaultdict(list)
        for number, digest in enumerate(digests):
            wanted[self._index[digest][0]].append(number)
        parts: dict[str, dict[int, Tensor]] = defaultdict(dict)
        for path, numbers in wanted.items():
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    rows = file.get_slice(name)
                    for number in numbers:
                        parts[name][number] = rows[self._index[digests[number]][1]]
        return {
            name: torch.stack([rows[number] for number in range(len(digests))])
            for name, rows in parts.items()
            if name != ROWS
        }

    def _add(self, path: Path) -> None:
        try:
            with safe_open(path, "pt") as file:
                hashes = file.get_tensor(ROWS)
        except (OSError, SafetensorError):
            return
        for row, digest in enumerate(hashes):
            self._index[digest.numpy().tobytes()] = (path, row)
