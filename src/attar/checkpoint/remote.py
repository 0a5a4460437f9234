"""Models in object stores: ``s3://bucket/folder`` (any store that fsspec knows) and ``hf://org/name@revision``.

A model that is read is downloaded to the cache folder, file by file: a file takes its name when all of its
bytes are there, so an interrupted download goes on where it was. Its identity is the list of names, sizes and
versions (ETags) in the store. A result is written and fsynced on this machine, and uploaded then: weights
first, ``config.json`` after them, the card ``attar.json`` last, so that half an upload is no model. A file
that is uploaded already is not uploaded again.

``fsspec`` and the package of the store (``s3fs``) are optional: ``attar[remote]``.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from attar.checkpoint import atomic, hashing
from attar.checkpoint.card import FILE as CARD
from attar.checkpoint.card import Card
from attar.checkpoint.companions import model_files
from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.names import check_links, is_file_name
from attar.errors import AttarError, CheckpointError, MissingExtraError, OutputError

STORES = ("s3", "gs", "gcs", "az", "abfs")
"""Protocols of fsspec that models may be in."""

HUB = "hf://"
CHUNK = 16 << 20
"""Bytes of one request of a download."""

_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
_UPLOADED = "uploaded.json"
_VERSIONS = ("ETag", "etag", "md5Hash", "content_md5", "LastModified", "mtime", "created")


logger = logging.getLogger(__name__)


def is_remote(model: object) -> bool:
    """Whether a name is an address in a store or of the hub."""
    scheme, separator, _ = str(model).partition("://")
    return bool(separator) and isinstance(model, str) and (scheme in STORES or scheme == "hf")


def hub_id(address: str) -> str:
    """``org/name@revision`` of ``hf://org/name@revision``; any other name as it is."""
    return address.removeprefix(HUB).strip("/") if address.startswith(HUB) else address


def download(address: str, wanted: list[str]) -> Path:
    """The local copy of a model: a folder, or the file of a single-file model.

    Args:
        wanted: patterns of the files to fetch of a folder.

    Raises:
        CheckpointError: there is nothing at the address, it cannot be read, or its files are not the files
            that the card lists.
        OutputError: the files do not fit on the disk.
        MissingExtraError: the store's package is not installed.
    """
    with _explained(address, CheckpointError):
        store, root = _open(address)
        objects = _objects(store, root, wanted)
        if not objects:
            raise CheckpointError(
                f"{address}: no model there", hint="give the folder of a model, or a .gguf file"
            )
        version = hashing.sha256_text(hashing.canonical_json(sorted(map(list, objects))))[:16]
        folder = _cache(address) / version / PurePosixPath(root).name
        if address.endswith(".gguf"):
            folder = folder.parent
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            fetched = _fetch(store, objects, folder)
            damaged = _damaged(folder, objects)
            while damaged and damaged not in fetched:  # on this disk: the store may have it whole
                fetched += _fetch(store, objects, folder)
                damaged = _damaged(folder, objects)
        if damaged:
            raise CheckpointError(
                f"{address}/{damaged}: is not the file that its {CARD} lists", hint="upload the model again"
            )
    return folder / PurePosixPath(root).name if address.endswith(".gguf") else folder


class _Object(NamedTuple):
    """A file in a store: its name, its bytes, what tells two contents apart, and its path in the store."""

    name: str
    size: int
    version: str
    path: str


def _objects(store: Any, root: str, wanted: list[str]) -> list[_Object]:
    """Each file that a model needs, by name."""
    objects = [
        _Object(PurePosixPath(path).name, info["size"], _version(info), path)
        for path, info in sorted(store.find(root, maxdepth=1, detail=True).items())
        if path == root or any(fnmatch.fnmatch(PurePosixPath(path).name, pattern) for pattern in wanted)
    ]
    names = [item.name for item in objects]
    for item in objects:
        if not is_file_name(item.name) or names.count(item.name) > 1:
            raise CheckpointError(f"{item.path!r}: is not the name of a file of a model")
        if not isinstance(item.size, int) or item.size < 0:
            raise CheckpointError(f"{item.path}: the store gives it a size of {str(item.size)[:40]!r}")
    return objects


def _version(info: dict[str, Any]) -> str:
    """What tells two contents of an object apart."""
    return str(next((info[key] for key in _VERSIONS if info.get(key)), ""))


def _fetch(store: Any, objects: list[_Object], folder: Path) -> list[str]:
    """Fetch what is missing of the files; the names of those of which every byte came now."""
    missing = [item for item in objects if not _complete(folder / item.name, item.size)]
    partials = [atomic.hidden(folder / item.name, "partial") for item in missing]
    stored = sum(partial.stat().st_size for partial in partials if partial.is_file())
    needed = sum(item.size for item in missing) - stored
    atomic.check_space(folder, needed, "free some space, or set XDG_CACHE_HOME to a larger disk")
    return [item.name for item in missing if _download_file(store, item, folder / item.name)]


def _complete(target: Path, size: int) -> bool:
    return target.is_file() and target.stat().st_size == size


def _download_file(store: Any, item: _Object, target: Path) -> bool:
    """Fetch what is missing of a file, in order; it gets its name when it is whole and on the disk. Returns
    whether every byte was fetched now.

    The bytes of a partial file count up to the length of which their hash is recorded, if it is theirs: a
    power cut may lose others, and leave the file its length.
    """
    partial, record = (atomic.hidden(target, suffix) for suffix in ("partial", "received"))
    with atomic.explain_os_errors(target, item.size), atomic.open_own(partial) as file:
        start, digest = _received(file, record)
        resumed = start > 0
        while start < item.size:
            end = min(start + CHUNK, item.size)
            block = store.cat_file(item.path, start=start, end=end)
            if not block:
                raise CheckpointError(f"{item.path}: ends after {start} of {item.size} bytes")
            if len(block) > end - start:
                raise CheckpointError(f"{item.path}: is longer than the {item.size} bytes of its listing")
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
            digest.update(block)
            start += len(block)
            atomic.write_json(record, {"bytes": start, "sha256": digest.hexdigest()})
        file.truncate(start)
    atomic.publish(partial, target)
    record.unlink(missing_ok=True)
    return not resumed


def _received(file: BinaryIO, record: Path) -> tuple[int, Any]:
    """How many bytes of a partial file are as they were received, with their hash; the position is behind
    them."""
    try:
        stated = read_json(record)
    except CheckpointError:
        stated = {}
    length, digest = stated.get("bytes"), hashlib.sha256()
    remaining = length if isinstance(length, int) else 0
    while remaining > 0 and (block := file.read(min(remaining, CHUNK))):
        digest.update(block)
        remaining -= len(block)
    if remaining == 0 and length and digest.hexdigest() == stated.get("sha256"):
        return length, digest
    file.seek(0)
    return 0, hashlib.sha256()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process downloads, others wait for it."""
    with atomic.open_own(atomic.hidden(folder, "lock")) as lock:
        while not atomic.try_lock(lock.fileno()):
            time.sleep(0.2)
        yield


def _damaged(folder: Path, objects: list[_Object]) -> str:
    """Compare files with the hashes of the card, once. The name of one that differs, which is removed; empty
    where none does."""
    card = Card.read(folder) if any(item.name == CARD for item in objects) else None
    marker = atomic.hidden(folder, "verified")
    if card is None or marker.exists():
        return ""
    for name in (item.name for item in objects if item.name in card.files):
        if not name.endswith(".md") and hashing.sha256_file(folder / name) != card.files[name]:
            (folder / name).unlink()
            return name
    marker.touch()
    return ""


@contextmanager
def output(out: str | Path, force: bool = False) -> Iterator[tuple[Path, bool]]:
    """The local folder for an output, which is uploaded to ``out`` when the block ends well.

    The folder stays in the cache, also where the upload fails: ``attar upload`` goes on with it.

    Yields:
        the folder, and whether it may be replaced; ``out`` itself and ``force`` where that is a local folder.

    Raises:
        OutputError: there is a model at ``out`` already (without ``force``), or it cannot be written.
        MissingExtraError: the store's package is not installed.
    """
    if not is_remote(out):
        yield Path(out), force
        return
    address = str(out).rstrip("/")
    if not force and exists(address):
        raise OutputError(f"{address}: already exists", hint="pass --force to replace it")
    folder = _cache(address) / "output" / PurePosixPath(address).name
    folder.parent.mkdir(parents=True, exist_ok=True)
    yield folder, True
    try:
        upload(folder, address)
    except OutputError as error:
        error.hint = f"the result is whole; to upload it: attar upload {folder} {address}"
        raise


def check_local(out: str | Path) -> None:
    """Refuse an address in a store where only a local folder will do. Raises OutputError."""
    scheme = str(out).partition(":/")[0]
    if scheme in (*STORES, "hf"):
        hint = "write to a folder of this machine, then: attar upload FOLDER ADDRESS"
        raise OutputError(f"{out}: is an address in a store, not a folder", hint=hint)


def exists(address: str) -> bool:
    """Whether a whole model (its card) is at an address. Raises as :func:`output`."""
    if address.startswith(HUB):
        from huggingface_hub import HfApi

        with _explained(address, OutputError):
            api = HfApi()
            name, _, revision = hub_id(address).partition("@")
            known = api.repo_exists(name) and api.file_exists(name, CARD, revision=revision or None)
            return bool(known)
    with _explained(address, OutputError):
        store, root = _open(address)
        return bool(store.exists(f"{root}/{CARD}"))


def upload(folder: Path, address: str) -> None:
    """Upload a finished checkpoint, its card last; files that an earlier call uploaded are not sent again.

    Raises:
        OutputError: the store refuses, or an object has other bytes than were sent.
        CheckpointError: a file is missing, a link out of the folder, or not the file that the card lists.
    """
    if address.startswith(HUB):
        _upload_to_hub(folder, hub_id(address), address)
        return
    with _explained(address, OutputError):
        store, root = _open(address)
        record = _cache(address) / _UPLOADED  # not next to the model, whose folder may be read-only
        record.parent.mkdir(parents=True, exist_ok=True)
        known = _uploaded(record)
        for name in _in_order(folder):
            path, digest = folder / name, hashing.sha256_file(folder / name)
            before = known.get(name, {})
            target = f"{root}/{name}"
            if before.get("sha256") == digest and before.get("version") == _stored(store, target):
                continue
            store.put_file(str(path), target)
            store.invalidate_cache()
            size, version = store.info(target)["size"], _stored(store, target)
            if size != path.stat().st_size:
                raise OutputError(f"{address}/{name}: has {size} bytes, not {path.stat().st_size}")
            known[name] = {"sha256": digest, "version": version}
            atomic.write_json(record, known)


def _in_order(folder: Path) -> list[str]:
    """The files of a checkpoint: the config after the weights, the card last. Those that are not the model's
    are left out: a warning names them.

    Raises:
        CheckpointError: one is missing, is a link out of the folder, or has other bytes than its card says.
    """
    card = Card.read(folder)
    names = model_files(folder) if card is None else [*card.files, CARD]
    check_links(folder, names)
    for name, digest in card.files.items() if card is not None else ():
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: is missing, and the {CARD} lists it")
        if not name.endswith(".md") and hashing.sha256_file(folder / name) != digest:
            raise CheckpointError(
                f"{folder / name}: is not the file that its {CARD} lists",
                hint="make the model again; or delete the card: the model is uploaded without it",
            )
    present = (path for path in folder.rglob("*") if path.is_file())
    others = sorted({path.relative_to(folder).as_posix() for path in present} - set(names))
    if others:
        logger.warning("not uploaded, as they are no files of the model: %s", ", ".join(others)[:500])
    last = {"config.json": 1, CARD: 2}
    return sorted(names, key=lambda name: (last.get(name, 0), name))


def _uploaded(record: Path) -> dict[str, dict[str, str | None]]:
    try:
        return read_json(record)
    except CheckpointError:
        return {}


def _stored(store: Any, path: str) -> str | None:
    """The version of an object with its size; None where there is none."""
    with suppress(FileNotFoundError):
        info = store.info(path)
        return f"{info['size']} {_version(info)}"
    return None


def _upload_to_hub(folder: Path, repository: str, address: str) -> None:
    """The hub keeps a large file by its hash, and does not take one twice."""
    from huggingface_hub import HfApi

    name, _, revision = repository.partition("@")
    with _explained(address, OutputError):
        files = [glob.escape(file) for file in _in_order(folder) if file != CARD]
        api = HfApi()
        api.create_repo(name, exist_ok=True)
        where = {"repo_id": name, "revision": revision or None}
        api.upload_folder(folder_path=folder, allow_patterns=files, **where)
        if (folder / CARD).is_file():
            api.upload_file(path_or_fileobj=folder / CARD, path_in_repo=CARD, **where)


def _cache(address: str) -> Path:
    return hashing.cache_folder() / "remote" / hashing.sha256_text(address.rstrip("/"))[:16]


def _open(address: str) -> tuple[Any, str]:
    """The file system of a store and the path in it."""
    scheme = address.partition("://")[0]
    try:
        import fsspec
    except ImportError:
        raise MissingExtraError("fsspec", "remote") from None
    try:
        store, root = fsspec.core.url_to_fs(address.rstrip("/"))
    except ImportError:
        package = _PACKAGES.get(scheme, scheme)
        raise MissingExtraError(package, "remote" if package == "s3fs" else None) from None
    store.invalidate_cache()
    return store, root


@contextmanager
def _explained(address: str, kind: type[CheckpointError] | type[OutputError]) -> Iterator[None]:
    """Errors of a store's client as one line."""
    try:
        yield
    except AttarError:
        raise
    except FileNotFoundError as error:
        raise kind(f"{address}: no such bucket or folder", hint="check the spelling") from error
    except PermissionError as error:
        raise kind(f"{address}: the store refuses access", hint="check the credentials' rights") from error
    except Exception as error:  # clients have no common base
        name = type(error).__name__
        if "Credential" in name or "Token" in name:
            hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run the store's login"
            raise kind(f"{address}: no credentials for the store ({name})", hint=hint) from error
        reason = " ".join(str(error).split())[:200]
        raise kind(f"{address}: the store does not answer as it should: {name}: {reason}") from error
