"""Writing a GGUF file: its header first, then tensors in any order, each at its offset.

    "GGUF" | u32 version 3 | u64 tensors | u64 keys | metadata | tensor infos | zeros | data

    metadata      string key | u32 type | value                                  (values.py)
    tensor info   string name | u32 n | n u64 sizes, the innermost first | u32 type | u64 offset

Offsets count from the start of the data. The data and every tensor start at a multiple of the alignment;
tensors are in the order of their infos without other gaps, as llama.cpp requires.

Several processes may write one file, each its own tensors; the first one makes it and gives it its name.

Split files ``NAME-00001-of-0000N.gguf``: each has ``split.no`` (from 0), ``split.count`` and
``split.tensors.count`` (of all parts); the first alone has the other metadata. Source: ggml ``docs/gguf.md``,
``gguf.cpp``; llama.cpp ``gguf-split.cpp``, whose limit counts tensors, while ours counts whole files.
"""

from __future__ import annotations

import math
import struct
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from attar.checkpoint import atomic
from attar.checkpoint.processes import SINGLE_PROCESS, Processes
from attar.checkpoint.shards import reserve, write_at
from attar.checkpoint.tensors import stored_dtype
from attar.errors import ModelError, OutputError
from attar.formats.gguf.types import TYPES, row_bytes
from attar.formats.gguf.values import MetadataValue, TypedValue, encode, string

if TYPE_CHECKING:
    import torch

MAGIC, VERSION = b"GGUF", 3
ALIGNMENT = 32
LONGEST_NAME = 63  # bytes of a tensor's name that llama.cpp reads
DIMENSIONS = 4
SPLIT = ("split.no", "split.count", "split.tensors.count")


class GGUFTensorInfo(NamedTuple):
    """A tensor to be written: its name, its ggml type (``"Q4_K"``) and its shape in torch's order (N, K);
    blocks divide K."""

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data.

        Raises:
            ModelError: the rows are no multiple of the type's block.
        """
        return math.prod(self.shape[:-1]) * row_bytes(self.kind, self.shape[-1] if self.shape else 1)


class GGUFWriter:
    """Writes tensors of known types and shapes into a GGUF file, or several. Memory: the tensor being added.

    Files are written under hidden names in their folder and renamed by :meth:`finish`; unfinished files are
    deleted on an error, at the end of a ``with`` block, or with the writer. Equal infos and tensors give
    equal bytes, in any order of :meth:`add`.

    Args:
        path: ``NAME.gguf``; an existing file is replaced. Parts are named after it.
        metadata: keys and values, in the order of the file.
        infos: every tensor, in the order of the file.
        alignment: where tensors start; a power of two, at least 8.
        max_bytes: of a file at most; a larger tensor has a separate file. None: one file.
        processes: they write together; all open the writer, and all call :meth:`finish`.

    Raises:
        ModelError: a name, shape, key or value that the format cannot hold.
        OutputError: no folder, no space, or no permission.
    """

    def __init__(
        self,
        path: Path,
        metadata: Mapping[str, MetadataValue],
        infos: Sequence[GGUFTensorInfo],
        *,
        alignment: int = ALIGNMENT,
        max_bytes: int | None = None,
        processes: Processes = SINGLE_PROCESS,
    ) -> None:
        assert alignment >= 8 and not alignment & (alignment - 1), f"alignment {alignment}"
        self.path = Path(path)
        if not self.path.parent.is_dir():
            raise OutputError(f"{self.path}: there is no folder {self.path.parent}", hint="create it first")
        self._infos = {info.name: GGUFTensorInfo(*info) for info in infos}
        _check(list(infos), metadata, alignment)
        self._parts = _plan(self.path, metadata, list(self._infos.values()), alignment, max_bytes)
        self._offsets = {
            name: (part, offset) for part in self._parts for name, offset in part.offsets.items()
        }
        self.processes = processes
        self._missing = dict.fromkeys(self._infos)
        self._written: dict[str, set[int | None]] = {}
        self._unfinished = [part.partial for part in self._parts] if processes.first else []
        self._discard = weakref.finalize(self, _remove, self._unfinished)
        with self._guarded():
            for part in self._parts if processes.first else []:
                atomic.check_file(part.file, force=True)
                reserve(part.partial, part.header, part.size)
        processes.wait()

    @property
    def nbytes(self) -> int:
        """Bytes of all files together."""
        return sum(part.size for part in self._parts)

    def missing(self) -> list[str]:
        """Names of tensors still to be added, in order."""
        return list(self._missing)

    def add(self, name: str, tensor: torch.Tensor, index: int | None = None) -> None:
        """Write one tensor, or one expert of a stack. The input is not changed and not kept.

        Args:
            tensor: of a block type the bytes, uint8 (..., row_bytes); otherwise of the info's type and shape.
            index: along the first dimension, which ``tensor`` then lacks; each once.

        Raises:
            OutputError: no space, or no permission.
        """
        assert name in self._missing, f"{name} is written already, or not in the layout"
        info = self._infos[name]
        (dtype, shape), count = stored_form(info), 1 if index is None else info.shape[0]
        wanted = (dtype, shape if index is None else shape[1:])
        given = (stored_dtype(tensor.dtype), tuple(tensor.shape))
        assert wanted == given, f"{name} must be {wanted}, but is {given}"
        part, offset = self._offsets[name]
        with self._guarded():
            write_at(part.partial, tensor, offset + (index or 0) * (info.nbytes // count))
        written = self._written.setdefault(name, set())
        assert index not in written, f"{name}[{index}] is written already"
        written.add(index)
        if len(written) == count:
            del self._missing[name]

    def finish(self) -> list[Path]:
        """Give the files their names. Returns the files, sorted by name."""
        for written in self.processes.of_all(self._written):
            for name, indices in written.items():
                self._written.setdefault(name, set()).update(indices)
                if len(self._written[name]) == (1 if None in indices else self._infos[name].shape[0]):
                    self._missing.pop(name, None)
        assert not self._missing, f"{len(self._missing)} tensors were never added, first {self.missing()[0]}"
        if not self.processes.first:
            return [part.file for part in self._parts]
        with self._guarded():
            for part in self._parts:
                atomic.fsync(part.partial)
            for part in reversed(self._parts):  # the first part last: a reader that sees it sees all
                part.partial.replace(part.file)
                self._unfinished.append(part.file)
            atomic.fsync(self._parts[0].file.parent)
        self._discard.detach()
        return [part.file for part in self._parts]

    def __enter__(self) -> GGUFWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._discard()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """On an error, delete unfinished files; an OSError becomes an OutputError of one line."""
        try:
            with atomic.explain_os_errors(self.path, self.nbytes):
                yield
        except BaseException:
            self._discard()
            raise


def stored_form(info: GGUFTensorInfo) -> tuple[str, tuple[int, ...]]:
    """Safetensors type and shape in which a tensor is added: bytes for block types."""
    kind = TYPES[info.kind]
    if kind.block == 1:
        return info.kind, tuple(info.shape)
    return "U8", (*info.shape[:-1], row_bytes(info.kind, info.shape[-1]))


def part_name(path: Path, number: int, count: int) -> Path:
    """The file of part ``number``, counted from 0, of a split ``path``."""
    return path.with_name(f"{path.stem}-{number + 1:05d}-of-{count:05d}{path.suffix}")


class _OutputFile(NamedTuple):
    """One file: its bytes up to the data, where each tensor goes, and its size."""

    file: Path
    header: bytes
    offsets: dict[str, int]
    size: int

    @property
    def partial(self) -> Path:
        return atomic.hidden(self.file, "partial")


def _check(infos: list[GGUFTensorInfo], metadata: Mapping[str, MetadataValue], alignment: int) -> None:
    """Refuse what the format, or llama.cpp, cannot hold."""
    assert len({info.name for info in infos}) == len(infos), "a layout names each tensor once"
    for info in infos:
        if not 0 < len(info.name.encode()) <= LONGEST_NAME:
            raise ModelError(f"tensor {info.name!r}: llama.cpp reads names of 1 to {LONGEST_NAME} bytes")
        if len(info.shape) > DIMENSIONS or 0 in info.shape:
            raise ModelError(f"tensor {info.name}: GGUF has no shape {list(info.shape)}")
    stated = metadata.get("general.alignment", alignment)
    assert (stated.value if isinstance(stated, TypedValue) else stated) == alignment, (
        "metadata says another alignment"
    )
    assert not any(key in metadata for key in SPLIT), "the writer counts the parts itself"


def _plan(
    path: Path,
    metadata: Mapping[str, MetadataValue],
    infos: list[GGUFTensorInfo],
    alignment: int,
    max_bytes: int | None,
) -> list[_OutputFile]:
    """Cut the layout, in its order, into files."""
    aligned: dict[str, MetadataValue] = {} if alignment == ALIGNMENT else {"general.alignment": alignment}
    all_keys = {**metadata, **aligned}
    groups = _groups(infos, all_keys, aligned, alignment, max_bytes)
    if len(groups) == 1:
        return [_part(path, all_keys, infos, alignment)]
    parts = []
    for number, group in enumerate(groups):
        split = _split_keys(number, len(groups), len(infos))
        known = {**(all_keys if number == 0 else aligned), **split}
        parts.append(_part(part_name(path, number, len(groups)), known, group, alignment))
    return parts


def _groups(
    infos: list[GGUFTensorInfo],
    first_keys: Mapping[str, MetadataValue],
    later_keys: Mapping[str, MetadataValue],
    alignment: int,
    max_bytes: int | None,
) -> list[list[GGUFTensorInfo]]:
    """The tensors of each file."""
    if not max_bytes:
        return [infos]
    head, data = len(_head(first_keys, 0)), sum(_padded(info.nbytes, alignment) for info in infos)
    info_bytes = sum(len(_info_bytes(info, 0)) for info in infos)
    if _padded(head + info_bytes, alignment) + data <= max_bytes:
        return [infos]
    keys = _split_keys(0, 0, 0)
    head, next_head = len(_head({**first_keys, **keys}, 0)), len(_head({**later_keys, **keys}, 0))
    groups: list[list[GGUFTensorInfo]] = [[]]
    data = 0
    for info in infos:
        head, data = head + len(_info_bytes(info, 0)), data + _padded(info.nbytes, alignment)
        if groups[-1] and _padded(head, alignment) + data > max_bytes:
            groups.append([])
            head, data = next_head + len(_info_bytes(info, 0)), _padded(info.nbytes, alignment)
        groups[-1].append(info)
    return groups


def _split_keys(number: int, count: int, tensors: int) -> dict[str, MetadataValue]:
    values = (TypedValue("u16", number), TypedValue("u16", count), TypedValue("i32", tensors))
    return dict(zip(SPLIT, values, strict=True))


def _head(metadata: Mapping[str, MetadataValue], tensors: int) -> bytes:
    """A file up to its tensor infos."""
    counts = struct.pack("<IQQ", VERSION, tensors, len(metadata))
    return MAGIC + counts + b"".join(encode(key, value) for key, value in metadata.items())


def _info_bytes(info: GGUFTensorInfo, offset: int) -> bytes:
    sizes = struct.pack(f"<I{len(info.shape)}Q", len(info.shape), *reversed(info.shape))
    return string(info.name) + sizes + struct.pack("<IQ", TYPES[info.kind].id, offset)


def _part(
    file: Path, metadata: Mapping[str, MetadataValue], infos: Sequence[GGUFTensorInfo], alignment: int
) -> _OutputFile:
    offsets, end = {}, 0
    for info in infos:
        offsets[info.name] = end
        end += _padded(info.nbytes, alignment)
    header = _head(metadata, len(infos)) + b"".join(_info_bytes(info, offsets[info.name]) for info in infos)
    start = _padded(len(header), alignment)
    return _OutputFile(file, header, {name: start + offset for name, offset in offsets.items()}, start + end)


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _remove(partials: list[Path]) -> None:
    for path in partials:
        path.unlink(missing_ok=True)
