"""Files and folders that appear atomically: written under a hidden name, fsynced, renamed.

A reader never sees half a file or half a folder, after a power cut either. The remains of a killed process
are hidden (``.NAME.partial``, ``.NAME.old``), have fixed names, and are removed by the next write to the same
path.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from attar.checkpoint.names import LONGEST
from attar.checkpoint.units import bytes_text
from attar.errors import AttarError, OutputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
# torch and the Rust libraries wrap the system's error into their own and keep only its text
_FULL_TEXTS = ("No space left on device", "os error 28", "PytorchStreamWriter failed", "unexpected pos")
_LARGE_TEXTS = ("File too large", "os error 27")
_REFUSED_TEXTS = ("Read-only file system", "os error 30", "os error 13")


@contextmanager
def file(final: Path, needed: int | None = None) -> Iterator[Path]:
    """A temporary sibling file that takes the name ``final`` when the block ends well.

    Yields:
        the path to write to; an older file at ``final`` stays until the new one is on disk.

    Raises:
        OutputError: no space (of ``needed`` bytes), or no permission.
    """
    partial = hidden(final, "partial")
    with explain_os_errors(final, needed):
        if partial.is_symlink() or partial.exists():
            partial.unlink()  # not written to: it may be a link to another file
        try:
            yield partial
            publish(partial, final)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def publish(partial: Path, final: Path) -> None:
    """Flush a finished file or folder to the disk, rename it to ``final``, and flush the new name."""
    fsync_tree(partial) if partial.is_dir() else fsync(partial)
    partial.replace(final)
    fsync(final.parent)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file. Raises as :func:`file`."""
    with file(path, len(data)) as partial:
        partial.write_bytes(data)


def write_json(path: Path, obj: Any) -> None:
    """Write an object as indented UTF-8 JSON. Raises as :func:`file`."""
    write_bytes(path, (json.dumps(obj, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write a config as transformers does: indented JSON in ASCII, keys sorted. Raises as :func:`file`."""
    write_bytes(path, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())


def save_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file. Raises as :func:`file`."""
    from safetensors.torch import save_file

    with file(path) as partial:
        partial.touch()
        mode = partial.stat().st_mode  # as the umask has it: safetensors' own files are for their owner alone
        save_file(dict(tensors), partial, metadata=metadata)
        partial.chmod(mode)


@contextmanager
def folder(final: Path, force: bool = False) -> Iterator[Path]:
    """A temporary sibling folder that takes the name ``final`` when the block ends well.

    An exception removes the temporary folder and leaves ``final`` untouched. With ``force`` an existing
    checkpoint is renamed to ``.NAME.old`` and deleted after the new one has its name.

    Yields:
        the empty folder to write into.

    Raises:
        OutputError: ``final`` exists (without ``force``), is not a checkpoint, or cannot be written.
    """
    final = target(final)
    partial = hidden(final, "partial")
    with explain_os_errors(final):
        for path in (partial, hidden(final, "old")):
            check_own_folder(path)
        recover(final)
        check_target(final, force)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            yield partial
            fsync_tree(partial)
            check_target(final, force)
            _swap(partial, final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def target(out: Path) -> Path:
    """The absolute path of an output folder, symbolic links followed.

    Raises:
        OutputError: no folder can have this path.
    """
    final = Path(os.path.realpath(os.path.expanduser(out)))  # noqa: PTH111 (never raises)
    if not final.name:
        raise OutputError(f"{out}: cannot be an output folder", hint="give the name of a new folder")
    if len(os.fsencode(final.name)) > LONGEST:
        raise OutputError(f"{out}: the name is too long", hint=f"at most {LONGEST} bytes")
    parent = next(parent for parent in final.parents if parent.exists())
    if not parent.is_dir():
        raise OutputError(f"{out}: {parent} is a file", hint="choose another output folder")
    return final


def hidden(final: Path, suffix: str) -> Path:
    """The hidden sibling ``.NAME.suffix`` of a path."""
    return final.with_name(f".{final.name}.{suffix}")


def open_own(path: Path) -> BinaryIO:
    """A file under a hidden or derived name (a lock, a journal, a partial file) to read and write, created
    if it is missing. The name is predictable: where others put a link or a pipe there, it is not followed.

    Raises:
        OutputError: it is no ordinary file, or cannot be opened.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with explain_os_errors(path):
        try:
            descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise _not_ours(path, "file") from None
            raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_ours(path, "file")
    return os.fdopen(descriptor, "r+b")


def check_own_folder(path: Path) -> None:
    """Refuse a link or a file where attar has a hidden folder of its own. Raises OutputError."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise _not_ours(path, "folder")


def _not_ours(path: Path, kind: str) -> OutputError:
    return OutputError(
        f"{path}: is no {kind} of attar's, which would write there",
        hint="remove it, or choose another output",
    )


def check_target(final: Path, force: bool) -> None:
    """Refuse an output folder that exists without ``force``, or that is not a checkpoint.

    An existing folder is replaced only if it is empty or looks like a model, so that ``-o ~ --force`` deletes
    nothing.

    Raises:
        OutputError: the folder must not be replaced.
    """
    if not final.exists() and not final.is_symlink():
        return
    if not final.is_dir():
        raise OutputError(f"{final}: exists and is not a folder", hint="choose another output folder")
    names = [child.name for child in final.iterdir()]
    if not names:
        return
    if not force:
        raise OutputError(
            f"{final}: already exists", hint="pass --force to replace it, or choose another folder"
        )
    if "config.json" not in names and "attar.json" not in names:
        raise OutputError(
            f"{final}: is not a checkpoint, so it is not deleted", hint="choose another output folder"
        )


def check_file(final: Path, force: bool) -> None:
    """Refuse an output file that exists without ``force``, or that is a folder. Raises OutputError."""
    if final.is_dir():
        raise OutputError(f"{final}: is a folder", hint="choose another name")
    if final.exists() and not force:
        raise OutputError(f"{final}: already exists", hint="pass --force to replace it")


@contextmanager
def explain_os_errors(path: Path, needed: int | None = None) -> Iterator[None]:
    """Raise a full disk, a missing permission or a read-only file system as an OutputError about ``path``.

    Args:
        needed: its size in bytes, where known.
    """
    try:
        yield
    except AttarError:
        raise
    except OSError as error:
        if error.errno in _FULL:
            raise _full(path, needed) from error
        if error.errno == errno.EFBIG:
            raise _too_large(path) from error
        if error.errno in _REFUSED:
            raise _refused(Path(error.filename or path), error.strerror or "refused") from error
        raise
    except Exception as error:
        text = str(error)
        if any(sign in text for sign in _LARGE_TEXTS):
            raise _too_large(path) from error
        if any(sign in text for sign in _FULL_TEXTS):
            raise _full(path, needed) from error
        if any(sign in text for sign in _REFUSED_TEXTS):
            raise _refused(path, "read-only, or not permitted") from error
        raise


def check_space(path: Path, needed: int, hint: str | None = None) -> None:
    """Refuse a file system of ``path`` with fewer than ``needed`` bytes free. Raises OutputError."""
    free = free_bytes(path)
    if free is not None and free < needed:
        error = _full(path, needed)
        error.hint = hint or error.hint
        raise error


def try_lock(descriptor: int) -> bool:
    """Take a record lock on an open file, released when the process ends; False if another process has it.

    Not flock: forked children inherit that, so an orphaned worker would block the next run.
    """
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def fsync(path: Path) -> None:
    """Flush a file's bytes, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some file systems (FUSE, a few network ones) cannot sync a folder; other errors count
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def fsync_tree(root: Path) -> None:
    """:func:`fsync` every file under a folder, then every folder, then the folder itself."""
    for parent, _, files in os.walk(root, topdown=False):
        for name in sorted(files):
            fsync(Path(parent, name))
        fsync(Path(parent))


def recover(final: Path) -> None:
    """Undo or finish a :func:`_swap` that was killed between its renames."""
    old = hidden(final, "old")
    if not old.exists():
        return
    if final.exists():
        shutil.rmtree(old)
    else:
        old.rename(final)


def _swap(partial: Path, final: Path) -> None:
    """Give ``partial`` the name ``final``; an old ``final`` is deleted afterwards."""
    old = hidden(final, "old")
    replaced = final.exists() and any(final.iterdir())
    if replaced:
        final.rename(old)
    try:
        partial.rename(final)
    except BaseException:
        if replaced:
            old.rename(final)
        raise
    fsync(final.parent)
    if replaced:
        shutil.rmtree(old, ignore_errors=True)


def free_bytes(path: Path) -> int | None:
    """Free bytes of the file system of ``path``; None if unknown."""
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _full(path: Path, needed: int | None) -> OutputError:
    free = free_bytes(path)
    sizes = [f"{bytes_text(needed)} needed"] if needed else []
    sizes += [f"{bytes_text(free)} free"] if free is not None else []
    detail = f" ({', '.join(sizes)})" if sizes else ""
    return OutputError(
        f"{path}: no space left on the disk{detail}", hint="free some space or write elsewhere with -o"
    )


def _too_large(path: Path) -> OutputError:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    limited = limit != resource.RLIM_INFINITY
    most = f"{bytes_text(limit)}, the limit of this process's files" if limited else "its file system allows"
    return OutputError(
        f"{path}: larger than {most}",
        hint="raise it (ulimit -f unlimited), or write to another file system",
    )


def _refused(path: Path, reason: str) -> OutputError:
    return OutputError(f"{path}: {reason[:1].lower()}{reason[1:]}", hint="choose a folder you may write to")
