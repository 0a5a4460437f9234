"""A C++ source of this room as a loaded library: compiled for this very machine at first use, then kept.

    csrc/NAME.cpp  ->  CACHE/kernels/NAME-KEY.so        CACHE: $ATTAR_CACHE, or attar in the user's cache

KEY is a hash of everything in csrc/, the flags, the compiler's version and the processor's features: a
changed source, another compiler or a home shared by unlike machines never meets a library made for something
else. The library is written beside and renamed, so that processes may build at the same time; after a build
the newest KEPT of a name stay, and what killed compilations left goes.

A library is code that this process runs: the folder is open to its owner alone, and a library or a folder of
another user is not used. Where the folder is another's, the library is built for this process alone.

Where this cannot be done (no compiler, no place to write) a wheel's prebuilt library is taken,
``prebuilt/NAME-LEVEL.so``, of the best level in levels.py that this processor runs;
scripts/build_wheels.py puts them there. Where a wheel has none, or with ``ATTAR_KERNELS=off``, there is
no library; ``missing`` says why, callers take their pure fallback, and warn of it once (``slower``).
``ATTAR_KERNELS_TARGET`` names another processor to compile for (``x86-64-v3``: with AVX2 alone), as the
compiler's ``-march`` does."""

from __future__ import annotations

import contextlib
import ctypes
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
from pathlib import Path

from attar.kernels.levels import levels

SOURCES = Path(__file__).parent / "csrc"
PREBUILT = Path(__file__).parent / "prebuilt"  # in wheels
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-pthread", "-Wno-psabi")
NATIVE = ("-march=native", "-mcpu=native")  # x86 and most others; some compilers for ARM know only the second
TIMEOUT = 300.0  # seconds
KEPT = 8  # libraries of a name, the last used first: a home may be shared by machines

logger = logging.getLogger(__name__)


def load(name: str) -> ctypes.CDLL | None:
    """The library of ``csrc/NAME.cpp``, built if need be; None where there is none to be had, or where the
    environment says ``ATTAR_KERNELS=off``. Asked again it answers at once."""
    return None if _off() else _load(name, os.environ.get("ATTAR_KERNELS_TARGET", ""))[0]


def missing(name: str) -> str:
    """Why there is no library, in one sentence; empty where there is one."""
    return "ATTAR_KERNELS is off" if _off() else _load(name, os.environ.get("ATTAR_KERNELS_TARGET", ""))[1]


@functools.cache
def slower(message: str) -> None:
    """A warning that slower code runs: once in a process, however often it is said."""
    logger.warning(message)


def _off() -> bool:
    return os.environ.get("ATTAR_KERNELS", "").lower() == "off"


def cache_folder() -> Path:
    """Where libraries are kept."""
    said = os.environ.get("ATTAR_CACHE")
    base = Path(said) if said else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attar"
    return base / "kernels"


@functools.cache
def _load(name: str, target: str) -> tuple[ctypes.CDLL | None, str]:
    """The library, looked for once in a process, and why there is none."""
    try:
        folder = cache_folder()
        if folder.exists() and not _ours(folder):
            return _private(name, folder, target), ""
        return ctypes.CDLL(str(_built(name, folder, target))), ""
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        ready = None if target else _prebuilt(name)
        return ready, "" if ready else " ".join(str(error).split())


def _prebuilt(name: str) -> ctypes.CDLL | None:
    """The wheel's library of the best level that this processor runs; None: it has none that loads here."""
    for level in levels():
        path = PREBUILT / f"{name}-{level.name}.so"
        with contextlib.suppress(OSError):  # none there, or one for another system library
            return ctypes.CDLL(str(path))
    return None


def _private(name: str, folder: Path, target: str) -> ctypes.CDLL:
    """The library for this process alone; its file is gone when it is loaded."""
    slower(f"{folder} belongs to another user: {name} is compiled for this process alone; set ATTAR_CACHE")
    with tempfile.TemporaryDirectory(prefix="attar-kernels-") as own:
        return ctypes.CDLL(str(_built(name, Path(own), target)))


def _ours(path: Path) -> bool:
    """Whether a file or folder belongs to this user."""
    user = getattr(os, "geteuid", None)
    return user is None or path.stat().st_uid == user()


def _built(name: str, folder: Path, target: str = "") -> Path:
    """The library's file, compiled if it is not there.

    Raises:
        RuntimeError: no compiler, or none that takes the source.
        OSError: the folder cannot be written.
        subprocess.SubprocessError: the compiler cannot be run, or does not end.
    """
    compiler = _compiler()
    said = ""
    for native in (f"-march={target}",) if target else NATIVE:
        flags = (*FLAGS, native)
        path = folder / f"{name}-{_key(compiler, flags)}.so"
        if path.exists() and _ours(path):
            with contextlib.suppress(OSError):
                os.utime(path)  # for `_prune`
            return path
        said = _compile(SOURCES / f"{name}.cpp", compiler, flags, path)
        if not said:
            _prune(name, folder)
            return path
    raise RuntimeError(f"{compiler}: {said}")


def _compiler() -> str:
    """The first compiler that is there."""
    for command in (os.environ.get("CXX"), *COMPILERS):
        found = shutil.which(command) if command else None
        if found:
            return found
    raise RuntimeError(f"no compiler: none of {', '.join(COMPILERS)} is in the path")


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    """Hash of all that a library depends on."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=TIMEOUT).stdout
    key = hashlib.sha256(repr((compiler, version, flags, _processor())).encode())
    for source in sorted(path for path in SOURCES.rglob("*") if path.is_file()):
        key.update(source.relative_to(SOURCES).as_posix().encode() + b"\0" + source.read_bytes())
    return key.hexdigest()[:16]


def _processor() -> str:
    """Kind and features of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    told = ("model name", "flags", "Features", "CPU part")
    return "\n".join(
        [platform.machine(), platform.processor(), *sorted({x for x in lines if x.startswith(told)})]
    )


def _compile(source: Path, compiler: str, flags: tuple[str, ...], path: Path) -> str:
    """Compile beside ``path`` and rename; what the compiler says where it fails, else nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.stem}-") as beside:
        made = Path(beside) / path.name
        command = [compiler, *flags, "-o", str(made), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line]
            return lines[0] if lines else f"exit status {done.returncode}"
        made.replace(path)
    return ""


def _prune(name: str, folder: Path) -> None:
    """Removes libraries of a name but the KEPT that were used last, and what killed compilations left. What
    others remove at the same time is no error."""
    aged: list[tuple[float, Path]] = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            aged.append((path.stat().st_mtime, path))
    left = [path for age, path in aged if path.name.startswith(".") and age < time.time() - 2 * TIMEOUT]
    libraries = sorted(
        (each for each in aged if re.fullmatch(rf"{name}-[0-9a-f]+\.so", each[1].name)), reverse=True
    )
    for path in [*left, *(path for _, path in libraries[KEPT:])]:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
