"""Importance matrices, the mean squares of the inputs of each weight, in llama.cpp's files.

llama.cpp, ``tools/imatrix/imatrix.cpp`` and ``common/imatrix-loader.cpp``.

    in_sum2[k] = sum over tokens of x[k]^2        counts = tokens        importance = in_sum2 / counts

Letters: x (K,) the input of a weight for one token; E experts.

GGUF format: ``general.type`` "imatrix"; ``imatrix.datasets`` names of texts; ``imatrix.chunk_count`` and
``imatrix.chunk_size`` u32, rows of text and tokens in each; for each weight, in the order of names, two F32
tensors, NAME.in_sum2 (K,) and NAME.counts (1,), or (E, K) and (E, 1) for experts.

The older binary format (``imatrix.dat``), little-endian, is read only:

    i32 n;  n times: i32 length, name, i32 calls, i32 K, f32[K] values;  maybe: i32 chunks, i32 length, text

with values = in_sum2 / counts * calls, so that values / calls is the importance as well.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from attar.errors import CheckpointError
from attar.formats.gguf import container
from attar.formats.gguf.writer import GGUFTensorInfo, GGUFWriter

SUMS, COUNTS = ".in_sum2", ".counts"
DATASETS, CHUNK_COUNT, CHUNK_SIZE = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"
MAGIC = b"GGUF"


@dataclass(frozen=True)
class ImportanceEntry:
    """The inputs of one weight.

    Attributes:
        in_sum2: float32 (K,), sums of squares; (E, K) for experts.
        count: tokens in the sums; float32 (E, 1) for experts.
    """

    in_sum2: Tensor
    count: float | Tensor

    def importance(self) -> Tensor:
        """Mean squares, of the shape of ``in_sum2``; 1 without tokens, as in llama.cpp."""
        count = torch.as_tensor(self.count, dtype=torch.float32)
        return torch.where(count > 0, self.in_sum2 / count.clamp(min=1.0), torch.ones_like(self.in_sum2))

    @property
    def unseen(self) -> int:
        """Inputs that were always zero, where there were tokens."""
        return int(((self.in_sum2 == 0) & (torch.as_tensor(self.count) > 0)).sum())


ImportanceMatrix = dict[str, ImportanceEntry]
"""Entries by GGUF name of the weight."""


def write_imatrix(
    path: Path,
    importance: Mapping[str, ImportanceEntry],
    datasets: Sequence[str],
    chunks: int,
    chunk_size: int,
) -> None:
    """Write llama.cpp's GGUF format, entries in the order of their names; the file appears when it is
    complete.

    Raises:
        CheckpointError: an entry is not finite.
        OutputError: the file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    for name in sorted(importance):
        entry = importance[name]
        _check(path, name, entry)
        tensors[f"{name}{SUMS}"] = entry.in_sum2.float().contiguous()
        tensors[f"{name}{COUNTS}"] = _counts(entry)
    metadata: dict[str, container.MetadataValue] = {
        "general.type": "imatrix",
        DATASETS: list(datasets),
        CHUNK_COUNT: chunks,
        CHUNK_SIZE: chunk_size,
    }
    infos = [GGUFTensorInfo(name, "F32", tuple(tensor.shape)) for name, tensor in tensors.items()]
    with GGUFWriter(path, metadata, infos) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.finish()


def _counts(entry: ImportanceEntry) -> Tensor:
    if isinstance(entry.count, Tensor):
        return entry.count.float().contiguous()
    return torch.tensor([entry.count], dtype=torch.float32)


def read_imatrix(path: Path) -> ImportanceMatrix:
    """Entries of a file of either format, by weight.

    Raises:
        CheckpointError: the file is no importance matrix, is damaged, or holds infinite numbers.
    """
    matrix = _read_gguf(path) if _is_gguf(path) else _read_binary(path)
    for name, entry in matrix.items():
        _check(path, name, entry)
    return matrix


def _is_gguf(path: Path) -> bool:
    try:
        with Path(path).open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}", hint="give the file of an imatrix") from error


def _check(path: Path, name: str, entry: ImportanceEntry) -> None:
    count = torch.as_tensor(entry.count)
    if not (torch.isfinite(entry.in_sum2).all() and torch.isfinite(count).all()) or (entry.in_sum2 < 0).any():
        raise CheckpointError(f"{path}: {name} holds what is no sum of squares", hint="compute it again")


def _read_gguf(path: Path) -> ImportanceMatrix:
    opened = container.read_gguf(path)
    names = [name.removesuffix(SUMS) for name in opened.tensors if name.endswith(SUMS)]
    if not names:
        raise CheckpointError(f"{path}: holds no importance matrix", hint="give the file of an imatrix")
    return {name: _entry(path, opened, name) for name in names}


def _entry(path: Path, opened: container.GGUF, name: str) -> ImportanceEntry:
    """The two tensors of a weight; without experts their leading 1 is removed."""
    pair = [opened.tensors.get(f"{name}{leaf}") for leaf in (SUMS, COUNTS)]
    if any(info is None or info.kind != "F32" for info in pair):
        raise CheckpointError(f"{path}: {name} has no {SUMS} and {COUNTS} in F32", hint="compute it again")
    sums, counts = opened.load(f"{name}{SUMS}"), opened.load(f"{name}{COUNTS}").flatten()
    if sums.numel() % counts.numel():
        raise CheckpointError(
            f"{path}: {name} has {sums.numel()} sums for {counts.numel()} counts", hint="compute it again"
        )
    if counts.numel() > 1:
        return ImportanceEntry(sums.reshape(counts.numel(), -1), counts[:, None])
    return ImportanceEntry(sums.flatten(), float(counts))


class _ByteReader:
    """A binary file read from its start; errors name it."""

    def __init__(self, path: Path) -> None:
        self.path, self.data, self.offset = path, Path(path).read_bytes(), 0

    def take(self, count: int) -> bytes:
        """The next bytes."""
        start, end = self.offset, self.offset + count
        if count < 0 or end > len(self.data):
            raise CheckpointError(
                f"{self.path}: is no imatrix of llama.cpp's, or is cut off at byte {len(self.data)}",
                hint="give the whole file",
            )
        self.offset = end
        return self.data[start:end]

    def number(self) -> int:
        """The next 32 bits."""
        return int(struct.unpack("<i", self.take(4))[0])

    def numbers(self) -> Tensor:
        """The next float32 numbers, after their count."""
        count = self.number()
        return torch.frombuffer(bytearray(self.take(4 * count if count > 0 else -1)), dtype=torch.float32)

    def text(self) -> str:
        """The next string, after its length."""
        return self.take(self.number()).decode("utf-8", "replace")


def _read_binary(path: Path) -> ImportanceMatrix:
    """The older format, which does not state the number of experts. A source may follow."""
    file, entries = _ByteReader(path), {}
    for _ in range(file.number()):
        name, calls = file.text(), file.number()
        entries[name] = ImportanceEntry(file.numbers(), float(max(calls, 1)))
    if not entries:
        raise CheckpointError(f"{path}: holds no importance matrix", hint="give the file of an imatrix")
    if file.offset < len(file.data):
        file.number()  # chunks
    if file.offset < len(file.data):
        file.text()
    return entries
