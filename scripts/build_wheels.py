"""Wheels that hold the compiled libraries, so that a machine without a compiler runs the compiled step.

    python scripts/build_wheels.py [--out dist] [--machine x86_64 aarch64] [--sdist]

For each machine the wheel is built by pip, then libraries of all levels of attar/kernels/levels.py are
compiled, put into attar/kernels/prebuilt, and the wheel is tagged for the machine: Linux with a glibc at
least as new as the symbols that the libraries ask for, which is printed. libstdc++ and libgcc are linked
in. For another machine than this one a cross compiler is needed (Debian: g++-aarch64-linux-gnu). The
sdist stays without libraries."""

from __future__ import annotations

import argparse
import base64
import hashlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src" / "attar" / "kernels"))

from levels import LEVELS, Level  # noqa: E402 - the file alone: nothing of attar is imported

SOURCES = ROOT / "src" / "attar" / "kernels" / "csrc"
FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-pthread", "-Wno-psabi")  # those of attar/kernels/build.py
LINKED = ("-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL", "-s")
MACHINES = tuple(dict.fromkeys(level.machine for level in LEVELS))
INSIDE = "attar/kernels/prebuilt"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--machine", nargs="+", choices=MACHINES, default=None)
    parser.add_argument("--levels", nargs="+", help="only these (default: all of the machine)")
    parser.add_argument("--sdist", action="store_true", help="the sdist too")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as workdir:
        plain = plain_wheel(Path(workdir))
        for machine in options.machine or [name for name in MACHINES if compiler(name)]:
            wanted = [x for x in LEVELS if x.machine == machine and x.name in (options.levels or [x.name])]
            print(wheel(plain, machine, wanted, options.out))
        if options.sdist:
            sdist(Path(workdir), options.out)


def plain_wheel(workdir: Path) -> Path:
    """The wheel without libraries."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(workdir), str(ROOT)]
    subprocess.run(command, check=True)
    return next(workdir.glob("attar-*.whl"))


def sdist(workdir: Path, out: Path) -> None:
    """Made by hatchling in an environment of its own."""
    subprocess.run([sys.executable, "-m", "venv", str(workdir / "hatch")], check=True)
    python = workdir / "hatch" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "hatchling"], check=True)
    subprocess.run(
        [python, "-m", "hatchling", "build", "-t", "sdist", "-d", str(out.resolve())], cwd=ROOT, check=True
    )


def compiler(machine: str) -> str | None:
    """This machine's own, or a cross compiler."""
    return shutil.which("g++" if machine == platform.machine() else f"{machine}-linux-gnu-g++")


def wheel(plain: Path, machine: str, levels: list[Level], out: Path) -> Path:
    """The wheel with the libraries of these levels."""
    command = compiler(machine)
    if command is None:
        sys.exit(f"no compiler for {machine}; on Debian: apt-get install g++-{machine}-linux-gnu")
    with tempfile.TemporaryDirectory() as folder:
        libraries = [
            compiled(command, source, level, Path(folder))
            for level in levels
            for source in sorted(SOURCES.glob("*.cpp"))
        ]
        needed = max(glibc(library, command) for library in libraries)
        print(f"{machine}: {len(libraries)} libraries, glibc {needed[0]}.{needed[1]}")
        tag = f"py3-none-manylinux_{needed[0]}_{needed[1]}_{machine}"
        path = out / plain.name.replace("py3-none-any", tag)
        repacked(plain, {f"{INSIDE}/{x.name}": x.read_bytes() for x in libraries}, tag, path)
    return path


def compiled(command: str, source: Path, level: Level, folder: Path) -> Path:
    path = folder / f"{source.stem}-{level.name}.so"
    subprocess.run([command, *FLAGS, *level.flags, *LINKED, "-o", str(path), str(source)], check=True)
    return path


def glibc(library: Path, command: str) -> tuple[int, int]:
    """The newest version of glibc's symbols that a library asks for."""
    objdump = command.replace("g++", "objdump")
    symbols = subprocess.run([objdump, "-T", str(library)], capture_output=True, text=True, check=True).stdout
    return max((int(a), int(b)) for a, b in re.findall(r"GLIBC_(\d+)\.(\d+)", symbols))


def repacked(plain: Path, more: dict[str, bytes], tag: str, path: Path) -> None:
    """A wheel with more files, and another tag; its record says so."""
    with zipfile.ZipFile(plain) as wheel:
        files = {name: wheel.read(name) for name in wheel.namelist()}
    (info,) = (name for name in files if name.endswith(".dist-info/WHEEL"))
    text = files[info].decode().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
    files[info] = re.sub("(?m)^Tag: .*$", f"Tag: {tag}", text).encode()
    (record,) = (name for name in files if name.endswith(".dist-info/RECORD"))
    del files[record]
    files |= more
    lines = [f"{name},sha256={digest(data)},{len(data)}" for name, data in files.items()]
    files[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
            entry.external_attr, entry.compress_type = 0o644 << 16, zipfile.ZIP_DEFLATED
            wheel.writestr(entry, data)


def digest(data: bytes) -> str:
    """As RECORD has it."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    main()
