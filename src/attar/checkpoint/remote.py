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
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from attar.checkpoint import atomic, hashing
from attar.checkpoint.card import FILE as CARD
from attar.checkpoint.card import Card
from attar.checkpoint.jsonfile import read_json
from attar.errors import AttarError, CheckpointError, MissingExtraError, OutputError

STORES = ("s3", "gs", "gcs", "az", "abfs")
"""Protocols of fsspec that models may be in."""

HUB = "hf://"
CHUNK = 16 << 20
"""Bytes of one request of a download."""

_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
_UPLOADED = "uploaded.json"
_VERSIONS = ("ETag", "etag", "md5Hash", "content_md5", "LastModified", "mtime", "created")


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
        CheckpointError: there is nothing at the address, it cannot be read, or its files are not those that
            the card lists.
        MissingExtraError: the store's package is not installed.
    """
    with _explained(address, CheckpointError):
        store, root = _open(address)
        objects = _objects(store, root, wanted)
        if not objects:
            raise CheckpointError(
                f"{address}: no model there", hint="give the folder of a model, or a .gguf file"
            )
        version = hashing.sha256_text(hashing.canonical_json(sorted(map(list, objects.values()))))[:16]
        folder = _cache(address) / version / PurePosixPath(root).name
        if address.endswith(".gguf"):
            folder = folder.parent
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            for path, (name, size, _) in sorted(objects.items()):
                _download_file(store, path, folder / name, size)
    if address.endswith(".gguf"):
        return folder / PurePosixPath(root).name
    _verify(folder, address)
    return folder


def _objects(store: Any, root: str, wanted: list[str]) -> dict[str, tuple[str, int, str]]:
    """Path in the store to name, bytes and version of each file that a model needs."""
    details = store.find(root, maxdepth=1, detail=True)
    return {
        path: (PurePosixPath(path).name, int(info["size"]), _version(info))
        for path, info in details.items()
        if path == root or any(fnmatch.fnmatch(PurePosixPath(path).name, pattern) for pattern in wanted)
    }


def _version(info: dict[str, Any]) -> str:
    """What tells two contents of an object apart."""
    return str(next((info[key] for key in _VERSIONS if info.get(key)), ""))


def _download_file(store: Any, path: str, target: Path, size: int) -> None:
    """Fetch what is missing of a file, in order; it gets its name when it is whole and on the disk."""
    if target.is_file() and target.stat().st_size == size:
        return
    partial = atomic.hidden(target, "partial")
    start = partial.stat().st_size if partial.exists() else 0
    if start > size:
        partial.unlink()
        start = 0
    with atomic.explain_os_errors(target, size), partial.open("ab") as file:
        while start < size:
            block = store.cat_file(path, start=start, end=min(start + CHUNK, size))
            if not block:
                raise CheckpointError(f"{path}: ends after {start} of {size} bytes")
            file.write(block)
            start += len(block)
    atomic.publish(partial, target)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process downloads, others wait for it."""
    with atomic.hidden(folder, "lock").open("a") as lock:
        while not atomic.try_lock(lock.fileno()):
            time.sleep(0.2)
        yield


def _verify(folder: Path, address: str) -> None:
    """Compare files with the hashes of the card, once. Raises CheckpointError, and drops what differs."""
    card = Card.read(folder)
    marker = atomic.hidden(folder, "verified")
    if card is None or marker.exists():
        return
    for name, digest in card.files.items():
        path = folder / name
        if path.suffix != ".md" and path.is_file() and hashing.sha256_file(path) != digest:
            path.unlink()
            raise CheckpointError(
                f"{address}/{name}: is not the file that its {CARD} lists", hint="upload the model again"
            )
    marker.touch()


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
    """
    if address.startswith(HUB):
        _upload_to_hub(folder, hub_id(address), address)
        return
    with _explained(address, OutputError):
        store, root = _open(address)
        record = _cache(address) / _UPLOADED  # not next to the model, whose folder may be read-only
        record.parent.mkdir(parents=True, exist_ok=True)
        known = _uploaded(record)
        for path in _in_order(folder):
            name, digest = path.relative_to(folder).as_posix(), hashing.sha256_file(path)
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


def _in_order(folder: Path) -> list[Path]:
    """The files of a checkpoint: the config after the weights, the card last."""
    last = {"config.json": 1, CARD: 2}
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return sorted(files, key=lambda path: last.get(path.relative_to(folder).as_posix(), 0))


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
        api = HfApi()
        api.create_repo(name, exist_ok=True)
        where = {"repo_id": name, "revision": revision or None}
        api.upload_folder(folder_path=folder, ignore_patterns=[CARD], **where)
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
        raise MissingExtraError(_PACKAGES.get(scheme, scheme), "remote") from None
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
