"""A C++ source of this package as a loaded library: compiled for this machine at first use, then cached.

    csrc/NAME.cpp  ->  CACHE/kernels/NAME-KEY.so        CACHE: $ATTAR_CACHE, or attar in the user's cache

KEY is a hash of csrc/, the flags, the compiler's version and the processor's features, so that a changed
source, another compiler or a home shared by different machines never loads the wrong library. The library is
written to a temporary file and renamed. A process that needs a library which another one compiles waits for
it, as long as a compilation may take. After a build the KEPT newest
libraries of a name stay; leftovers of killed compilations are removed.

A library is code that this process runs: only the owner may access the folder, whatever the umask, and what
another user owns or may write is not used. If the folder is another user's, the library is built for this
process alone; if others could write to ours, what is in it is built again.

Without a compiler or a writable folder, a wheel's prebuilt library is used, ``prebuilt/NAME-LEVEL.so``, of
the best level in levels.py that this processor runs (scripts/build_wheels.py puts them there). Without that,
or with ``ATTAR_KERNELS=off``, there is no library: ``why_missing`` returns the reason, callers use their
fallback in torch and warn once (``warn_slower``). With ``ATTAR_KERNELS=required``, as in an image that was
built for some levels, a library that is missing is an error. ``ATTAR_KERNELS_TARGET`` is a processor to
compile for, as in ``-march`` (``x86-64-v3``: AVX2).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from attar.errors import AttarError
from attar.kernels.levels import levels

SOURCES = Path(__file__).parent / "csrc"
PREBUILT = Path(__file__).parent / "prebuilt"  # in wheels
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-pthread", "-Wno-psabi")
X86 = platform.machine().lower() in ("x86_64", "amd64", "i686")  # there -mcpu only tunes
NATIVE = ("-march=native",) if X86 else ("-march=native", "-mcpu=native")  # some ARM compilers know only that
TIMEOUT = 1200.0  # seconds: a slow machine that was busy took more than 300
KEPT = 8  # libraries of a name, the most recently used: a home may be shared by machines

logger = logging.getLogger(__name__)


def load(name: str) -> ctypes.CDLL | None:
    """The library of ``csrc/NAME.cpp``, built if necessary; None if there is none, or with
    ``ATTAR_KERNELS=off``. Cached in the process.

    Raises:
        AttarError: there is none, and ``ATTAR_KERNELS=required``.
    """
    if _off():
        return None
    library, why = _load(name, os.environ.get("ATTAR_KERNELS_TARGET", ""))
    if library is None and os.environ.get("ATTAR_KERNELS", "").lower() == "required":
        raise AttarError(
            f"no compiled {name}: {why}", hint="build the image for this processor, or unset ATTAR_KERNELS"
        )
    return library


def why_missing(name: str) -> str:
    """Why there is no library, in one sentence; empty if there is one."""
    return "ATTAR_KERNELS is off" if _off() else _load(name, os.environ.get("ATTAR_KERNELS_TARGET", ""))[1]


@functools.cache
def warn_slower(message: str) -> None:
    """Warn that slower code runs, once per process and message."""
    logger.warning(message)


def _off() -> bool:
    return os.environ.get("ATTAR_KERNELS", "").lower() == "off"


def cache_folder() -> Path:
    """Where libraries are cached."""
    cache = os.environ.get("ATTAR_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attar"
    return (Path(cache).expanduser().absolute() if cache else home) / "kernels"


@functools.cache
def _load(name: str, target: str) -> tuple[ctypes.CDLL | None, str]:
    """The library or the reason why there is none, once per process."""
    try:
        folder = cache_folder()
        if folder.exists() and not _owned(folder):
            return _private(name, folder, target), ""
        if folder.exists() and not _ours(folder):
            _empty(folder)
        return ctypes.CDLL(str(_built(name, folder, target))), ""
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        ready = None if target else _prebuilt(name)
        return ready, "" if ready else "; ".join([" ".join(str(error).split()), *_unfit(name)])


def _prebuilt(name: str) -> ctypes.CDLL | None:
    """The wheel's library of the best level that this processor runs; None: none loads here."""
    for level in levels():
        path = PREBUILT / f"{name}-{level.name}.so"
        with contextlib.suppress(OSError):  # missing, or built against another libc
            return ctypes.CDLL(str(path))
    return None


def _unfit(name: str) -> list[str]:
    """A sentence about the levels of which a wheel has the library, where it has any."""
    names = sorted(path.stem.removeprefix(f"{name}-") for path in PREBUILT.glob(f"{name}-*.so"))
    return [f"this processor runs no library that is there: {', '.join(names)}"] if names else []


def _private(name: str, folder: Path, target: str) -> ctypes.CDLL:
    """The library for this process alone; its file is removed once loaded."""
    warn_slower(
        f"{folder} belongs to another user: {name} is compiled for this process alone; set ATTAR_CACHE"
    )
    with tempfile.TemporaryDirectory(prefix="attar-kernels-") as private_folder:
        return ctypes.CDLL(str(_built(name, Path(private_folder), target)))


def _owned(path: Path) -> bool:
    """Whether a file or folder belongs to this user."""
    user = getattr(os, "geteuid", None)
    return user is None or path.stat().st_uid == user()


def _ours(path: Path) -> bool:
    """Whether it belongs to this user, who alone may write it."""
    return _owned(path) and not path.stat().st_mode & 0o022


def _empty(folder: Path) -> None:
    """Close a folder to other users, and remove the files that others may have put there. Raises OSError."""
    folder.chmod(0o700)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _built(name: str, folder: Path, target: str = "") -> Path:
    """The library's file, compiled if it is not there.

    Raises:
        RuntimeError: no compiler, or it rejects the source.
        OSError: the folder cannot be written.
        subprocess.SubprocessError: the compiler cannot be run, or does not finish.
    """
    compiler = _compiler()
    message = ""
    for native in (f"-march={target}",) if target else NATIVE:
        flags = (*FLAGS, native)
        path = folder / f"{name}-{_key(compiler, flags)}.so"
        if _ready(path):
            return path
        with _alone(path):
            message = "" if _ready(path) else _compile(SOURCES / f"{name}.cpp", compiler, flags, path)
        if not message:
            _prune(name, folder)
            return path
    raise RuntimeError(f"{compiler}: {message}")


def _ready(path: Path) -> bool:
    """Whether the library is there; it is now among the most recently used, for :func:`_prune`."""
    ready = path.is_file() and not path.is_symlink() and _ours(path)
    if ready:
        with contextlib.suppress(OSError):
            os.utime(path)
    return ready


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """While no other process compiles the same library, or after :data:`TIMEOUT`: one that was stopped must
    not stop others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    lock, end = path.with_name(f".{path.stem}.lock"), time.monotonic() + TIMEOUT
    with lock.open("w") as file:
        while time.monotonic() < end:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
            except OSError:  # a file system without locks
                break
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _compiler() -> str:
    """The first compiler in the path."""
    for command in (os.environ.get("CXX"), *COMPILERS):
        path = shutil.which(command) if command else None
        if path:
            return path
    raise RuntimeError(f"no compiler: none of {', '.join(COMPILERS)} is in the path")


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    """Hash of everything that a library depends on."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=TIMEOUT).stdout
    key = hashlib.sha256(repr((compiler, version, flags, _processor())).encode())
    for source in sorted(path for path in SOURCES.rglob("*") if path.is_file()):
        key.update(source.relative_to(SOURCES).as_posix().encode() + b"\0" + source.read_bytes())
    return key.hexdigest()[:16]


def _processor() -> str:
    """Model and features of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    fields = ("model name", "flags", "Features", "CPU part")
    return "\n".join(
        [platform.machine(), platform.processor(), *sorted({x for x in lines if x.startswith(fields)})]
    )


def _compile(source: Path, compiler: str, flags: tuple[str, ...], path: Path) -> str:
    """Compile to a temporary file and rename it to ``path``; the compiler's error message, or nothing."""
    logger.info("compiling %s for this processor, once: about a minute", source.stem)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.stem}-") as folder:
        output = Path(folder) / path.name
        command = [compiler, *flags, "-o", str(output), str(source)]
        process = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT)
        if process.returncode:
            lines = [line for line in process.stderr.splitlines() if "error" in line]
            return lines[0] if lines else f"exit status {process.returncode}"
        output.chmod(0o700)
        output.replace(path)
    return ""


def _prune(name: str, folder: Path) -> None:
    """Remove all but the KEPT most recently used libraries of a name, and leftovers of killed compilations.
    Other processes may do the same at the same time."""
    aged: list[tuple[float, Path]] = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            aged.append((path.stat().st_mtime, path))
    leftovers = [path for age, path in aged if path.name.startswith(".") and age < time.time() - 2 * TIMEOUT]
    libraries = sorted(
        (item for item in aged if re.fullmatch(rf"{name}-[0-9a-f]+\.so", item[1].name)), reverse=True
    )
    for path in [*leftovers, *(path for _, path in libraries[KEPT:])]:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
