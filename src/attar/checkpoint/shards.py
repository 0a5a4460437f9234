"""Weights written as safetensors shards, with bounded memory, and resumable after a kill at any moment.

Names, dtypes and shapes are declared in advance (the *layout*). They fix the shards, their headers and the
offset of every byte, so a tensor is written directly to its offset. A complete shard is fsynced and renamed
from ``.NAME.partial`` to its name; a manifest identifies the layout, and a writer of the same layout resumes
with the shards that have no name yet. Equal layout and equal tensors give equal bytes, in any order of
writing. Several processes may write the shards of one folder, each its own: all of them open it before the
first adds a tensor.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from attar.checkpoint import atomic
from attar.checkpoint.hashing import canonical_json, sha256_text
from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.open import INDEX, SINGLE
from attar.checkpoint.tensors import (
    BITS,
    HeaderEntry,
    TensorInfo,
    read_tensor,
    stored_dtype,
    tensor_bytes,
    write_header,
)
from attar.errors import CheckpointError

if TYPE_CHECKING:
    import torch

MAX_SHARD_BYTES = 5_000_000_000
MANIFEST = ".shards.json"
_CHUNK = 1 << 20  # bytes of one call: larger ones are slower


class TensorSpec(NamedTuple):
    """A tensor to be written: name, the format's dtype name (``"BF16"``) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def tensor_spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    """The spec of a tensor, which may be on the meta device."""
    return TensorSpec(name, stored_dtype(tensor.dtype), tuple(tensor.shape))


class ShardWriter:
    """Writes tensors of a known layout into shards.

    Args:
        folder: an existing folder for the finished shards and their index.
        layout: every tensor as (name, dtype, shape), in the order in which shards are filled.
        max_shard_bytes: most tensor bytes of a shard; a larger tensor has a separate shard.
        work: folder of unfinished shards and the manifest, which survive a kill; on the same file system; by
            default ``folder``.

    Raises:
        OutputError: no space, or no permission.
    """

    def __init__(
        self,
        folder: Path,
        layout: Sequence[tuple[str, str, tuple[int, ...]]],
        *,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        work: Path | None = None,
    ) -> None:
        specs = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in layout]
        assert specs, "a layout has at least one tensor"
        assert len({spec.name for spec in specs}) == len(specs), "a layout names each tensor once"
        self.folder, self.work = folder, work or folder
        self._lock = Lock()
        self._write_lock = Lock()  # without it, threads spin for the system's own lock of the file
        self._order = [spec.name for spec in specs]
        self._shards = _plan(specs, max_shard_bytes)
        self._of = {entry.name: (shard, entry) for shard in self._shards for entry in shard.entries}
        self._waiting = {shard.name: {entry.name for entry in shard.entries} for shard in self._shards}
        self._layout = sha256_text(canonical_json([specs, max_shard_bytes]))
        with atomic.explain_os_errors(self.folder, self.nbytes):
            self._resume()

    @property
    def nbytes(self) -> int:
        """Bytes of all shards together."""
        return sum(shard.size for shard in self._shards)

    @property
    def files(self) -> list[Path]:
        """The finished shards, sorted by name."""
        return [self.folder / shard.name for shard in self._shards]

    def unfinished(self) -> dict[str, int]:
        """Bytes of the shards that are not complete, by file name."""
        return {shard.name: shard.size for shard in self._shards if self._waiting[shard.name]}

    def missing(self, shards: Container[str] | None = None) -> list[str]:
        """Names still to be added, in the layout's order, to all shards or to some; after a kill, all names
        of unfinished shards."""
        files = {name: self._of[name][0].name for name in self._order}
        chosen = [name for name in self._order if shards is None or files[name] in shards]
        return [name for name in chosen if name in self._waiting[files[name]]]

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor; thread-safe. The tensor is neither changed nor kept.

        Raises:
            OutputError: no space, or no permission.
        """
        shard, entry = self._of[name]
        spec = tensor_spec(name, tensor)
        assert spec == (entry.name, entry.dtype, entry.shape), f"layout says {entry}, got {spec}"
        assert name in self._waiting[shard.name], f"{name} is written already"
        partial = atomic.hidden(self.work / shard.name, "partial")
        with atomic.explain_os_errors(self.folder, shard.size):
            with self._lock:
                if not partial.exists():
                    reserve(partial, shard.header, shard.size)
            with self._write_lock:
                write_at(partial, tensor, entry.begin)
            with self._lock:
                self._waiting[shard.name].discard(name)
                if not self._waiting[shard.name]:
                    atomic.publish(partial, self.work / shard.name)

    def finish(self) -> list[Path]:
        """Link the finished shards into ``folder``, and write the index of more than one. Returns the shard
        files, sorted by name."""
        assert not self.missing(), (
            f"{len(self.missing())} tensors were never added, first {self.missing()[0]}"
        )
        with atomic.explain_os_errors(self.folder):
            for shard in self._shards:
                _link(self.work / shard.name, self.folder / shard.name)
            if len(self._shards) > 1:
                atomic.write_json(self.folder / INDEX, self._index())
            if self.work == self.folder:
                (self.work / MANIFEST).unlink(missing_ok=True)
        return self.files

    def _index(self) -> dict[str, object]:
        total = sum(entry.end - entry.begin for _, entry in self._of.values())
        weight_map = {name: self._of[name][0].name for name in sorted(self._order)}
        return {"metadata": {"total_size": total}, "weight_map": weight_map}

    def _resume(self) -> None:
        """Keep the finished shards of an earlier writer of the same layout; delete its other files."""
        same = self._manifest() == self._layout
        finished = [shard.name for shard in self._shards if same and self._complete(shard)]
        for pattern in ("model*.safetensors*", ".model*.safetensors*"):
            for path in sorted(self.work.glob(pattern)):
                if path.name not in finished:
                    path.unlink(missing_ok=True)
        for name in finished:
            self._waiting[name].clear()
        if not same:
            atomic.write_json(self.work / MANIFEST, {"layout": self._layout})

    def _manifest(self) -> object:
        """The layout that the folder's files have."""
        try:
            return read_json(self.work / MANIFEST).get("layout")
        except CheckpointError:
            return None

    def _complete(self, shard: _Shard) -> bool:
        """Whether a shard has its name, and its size."""
        file = self.work / shard.name
        return file.is_file() and file.stat().st_size == shard.size


def write_checkpoint_tensors(
    folder: Path,
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[Path]:
    """Write named tensors as ``model.safetensors``, or as shards with an index. Returns the files written,
    sorted by name.

    Args:
        tensors: a mapping, or an iterator of (name, tensor), which is read one tensor at a time through a
            spool file in ``folder``: memory of one tensor, temporarily twice the disk space.
        max_shard_bytes: most tensor bytes of a shard.

    Raises:
        OutputError: no space, or no permission.
    """
    if isinstance(tensors, Mapping):
        writer = ShardWriter(
            folder,
            [tensor_spec(name, tensor) for name, tensor in tensors.items()],
            max_shard_bytes=max_shard_bytes,
        )
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        return writer.finish()
    return _write_spooled(folder, tensors, max_shard_bytes)


def shard_bytes(layout: Sequence[tuple[str, str, tuple[int, ...]]], max_shard_bytes: int) -> int:
    """Bytes of the shards that a :class:`ShardWriter` of this layout writes, headers included."""
    return sum(shard.size for shard in _plan([TensorSpec(*spec) for spec in layout], max_shard_bytes))


class _Shard(NamedTuple):
    name: str
    header: bytes
    entries: list[HeaderEntry]
    size: int


def _plan(specs: list[TensorSpec], max_shard_bytes: int) -> list[_Shard]:
    """Split the layout, in its order, into shards of at most ``max_shard_bytes``."""
    groups: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        size = tensor_bytes(spec.dtype, spec.shape)
        if groups[-1] and filled + size > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += size
    names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    return [
        _shard(name if len(groups) > 1 else SINGLE, group) for name, group in zip(names, groups, strict=True)
    ]


def _shard(name: str, specs: list[TensorSpec]) -> _Shard:
    # wide types first: every tensor then begins at a multiple of its element size, as readers prefer
    header, entries = write_header(sorted(specs, key=lambda spec: -BITS[spec[1]]))
    return _Shard(name, header, entries, entries[-1].end)


def reserve(partial: Path, header: bytes, size: int) -> None:
    """Create a file of its full size with its header; fails here on a full disk."""
    with partial.open("wb") as file:
        file.write(header)
        file.flush()
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except AttributeError:  # macOS has no posix_fallocate
            file.truncate(size)
        except OSError as error:  # some file systems do not support it
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            file.truncate(size)


def write_at(path: Path, tensor: torch.Tensor, position: int) -> None:
    """Write a tensor's bytes into an existing file."""
    with path.open("r+b", buffering=0) as file:
        _write(file.fileno(), tensor, position)


def _write(descriptor: int, tensor: torch.Tensor, position: int) -> int:
    """Write a tensor's bytes at a position; returns their number."""
    import torch

    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    if not flat.numel():
        return 0
    remaining = memoryview(flat.view(torch.uint8).numpy())
    total = len(remaining)
    while remaining:
        count = os.pwrite(descriptor, remaining[:_CHUNK], position)
        remaining, position = remaining[count:], position + count
    return total


def _link(source: Path, target: Path) -> None:
    """Hard-link a finished shard into the output folder, so that it survives a kill in the work folder."""
    if source == target:
        return
    target.unlink(missing_ok=True)
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.move(source, target)


def _write_spooled(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], max_shard_bytes: int
) -> list[Path]:
    """Write tensors of an unknown layout into a spool file, then from there into shards."""
    spool = folder / ".spool.partial"
    specs: list[TensorSpec] = []
    spooled: list[TensorInfo] = []
    position = 0
    try:
        with atomic.explain_os_errors(folder), spool.open("wb", buffering=0) as file:
            for name, tensor in tensors:
                specs.append(tensor_spec(name, tensor))
                size = _write(file.fileno(), tensor, position)
                spooled.append(TensorInfo(*specs[-1], size, spool, position))
                position += size
        writer = ShardWriter(folder, specs, max_shard_bytes=max_shard_bytes)
        for info in spooled:
            writer.add(info.name, read_tensor(info))
        return writer.finish()
    finally:
        spool.unlink(missing_ok=True)
