"""llama.cpp's own programs, built from the sources that come with llama-cpp-python.

    python benchmarks/peers/environments.py llama-server llama-batched-bench

The libraries of the environment ``llama-cpp`` are used as they are; what is compiled here is the program's
folder of ``tools``, and of the server its HTTP library (three minutes on one core), without the page for
people.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from pathlib import Path

_LIBRARIES = ("llama-common", "mtmd", "llama", "ggml", "ggml-base", "ggml-cpu")
_FLAGS = (
    *("-O2", "-DNDEBUG", "-std=c++17", "-w", "-DLLAMA_SUBPROCESS", "-DLLAMA_SHARED", "-DGGML_SHARED"),
    *("-DGGML_BACKEND_SHARED", "-DCPPHTTPLIB_LISTEN_BACKLOG=512", "-DCPPHTTPLIB_TCP_NODELAY=1"),
    *(
        "-DCPPHTTPLIB_FORM_URL_ENCODED_PAYLOAD_MAX_LENGTH=1048576",
        "-DCPPHTTPLIB_REQUEST_URI_MAX_LENGTH=32768",
    ),
)
FOLDERS = {"llama-server": "server", "llama-batched-bench": "batched-bench"}  # of tools
_INCLUDED = ("", "include", "common", "ggml/include", "tools/mtmd", "vendor", "tools/server")


def build(folder: Path, python: Path, version: str) -> Path:
    """Compile the program that the folder is named after, one of :data:`FOLDERS`.

    Args:
        folder: of its own.
        python: interpreter of the environment ``llama-cpp``.
        version: of llama-cpp-python there.

    Returns:
        the program.

    Raises:
        SystemExit: pip or the compiler failed; says where the log is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    print(f"building {folder}", file=sys.stderr)
    with folder.with_name(f"{folder.name}.log").open("w") as log:
        source = _sources(folder, python, version, log)
        libraries = next(python.parent.parent.glob("lib/python*/site-packages/lib"))
        if folder.name == "llama-server":
            _page(source, folder)
        parts = []
        for file in _files(source, folder):
            parts.append(str(folder / f"{file.stem}.o"))
            included = (f"-I{source / name}" for name in _INCLUDED)
            _run(["g++", *_FLAGS, f"-I{folder}", *included, "-c", file, "-o", parts[-1]], log)
        linked = [f"-L{libraries}", *(f"-l{name}" for name in _LIBRARIES), "-lpthread"]
        linked += [f"-Wl,-rpath,{libraries},--disable-new-dtags"]  # of what the libraries need as well
        executable = folder / folder.name
        _run(["g++", "-o", f"{executable}.part", *parts, *linked], log)
    Path(f"{executable}.part").replace(executable)
    return executable


def _sources(folder: Path, python: Path, version: str, log: object) -> Path:
    """The unpacked folder of llama.cpp."""
    name = "llama-cpp-python"
    wanted = ["--no-deps", "--no-binary", name, f"{name}=={version}", "-d", folder]
    _run([python, "-m", "pip", "download", "--quiet", *wanted], log)
    with tarfile.open(next(folder.glob("llama_cpp_python-*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.glob("llama_cpp_python-*/vendor/llama.cpp"))


def _page(source: Path, folder: Path) -> None:
    """The two files that would hold the page, with none in it."""
    for name in ("ui.h", "ui.cpp"):
        text = (source / "tools/ui" / f"{name}.in").read_text().replace("@USE_GZIP@", "false")
        text = re.sub(r"#cmakedefine.*|@ASSET_\w+@", "", text.replace("@N_ASSETS@", "0"))
        (folder / name).write_text(text)


def _files(source: Path, folder: Path) -> list[Path]:
    own = sorted((source / "tools" / FOLDERS[folder.name]).glob("*.cpp"))
    served = [folder / "ui.cpp", source / "vendor/cpp-httplib/httplib.cpp"]
    return [*served, *own] if folder.name == "llama-server" else own


def _run(command: list[object], log: object) -> None:
    words = [str(word) for word in command]
    if subprocess.run(words, stdout=log, stderr=subprocess.STDOUT).returncode:  # type: ignore[call-overload]
        raise SystemExit(f"{' '.join(words)} failed; see {log.name}")  # type: ignore[attr-defined]
