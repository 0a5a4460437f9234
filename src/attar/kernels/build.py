"""A C++ source of this room as a loaded library: compiled for this very machine at first use, then kept.

    csrc/NAME.cpp  ->  CACHE/kernels/NAME-KEY.so        CACHE: $ATTAR_CACHE, or attar in the user's cache

KEY is a hash of everything in csrc/, the flags, the compiler's version and the processor's features: a
changed source, another compiler or a home shared by unlike machines never meets a library made for something
else. The library is written beside and renamed, so that processes may build at the same time.

Where this cannot be done (no compiler, no place to write, ``ATTAR_KERNELS=off``) there is no library;
``missing`` says why, callers take their pure fallback, and warn of it once (``slower``).
``ATTAR_KERNELS_TARGET`` names another processor to compile for (``x86-64-v3``: with AVX2 alone), as the
compiler's ``-march`` does.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-pthread", "-Wno-psabi")
NATIVE = ("-march=native", "-mcpu=native")  # x86 and most others; some compilers for ARM know only the second
TIMEOUT = 300.0  # seconds

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
        return ctypes.CDLL(str(_built(name, cache_folder(), target))), ""
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return None, " ".join(str(error).split())


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
        if path.exists():
            return path
        said = _compile(SOURCES / f"{name}.cpp", compiler, flags, path)
        if not said:
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
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.stem}-") as beside:
        made = Path(beside) / path.name
        command = [compiler, *flags, "-o", str(made), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line]
            return lines[0] if lines else f"exit status {done.returncode}"
        made.replace(path)
    return ""
