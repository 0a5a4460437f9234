"""Fuzz attar's readers: ``python -m tests.fuzz.run [TARGET ...] [--runs N]``, or ``make fuzz``.

Each target runs in a process of its own under atheris (libFuzzer), which looks for inputs that reach new
lines of attar. A finding is an input that escapes with another exception than an AttarError, takes more than
a second of processor time, or more than 1 GB. Findings stay in the folder; once mended, they go to
``cases/TARGET/``, where the fast tests replay them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fuzz.targets import TARGETS

CASES = Path(__file__).parent / "cases"
LONGEST = 16384  # bytes of an input


def main() -> int:
    """Run the targets and print a table. 0: nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", help=", ".join(TARGETS))
    parser.add_argument("--runs", type=int, default=1_000_000, help="inputs for each target")
    parser.add_argument("--jobs", type=int, default=2, help="targets side by side")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where corpora and findings are kept; default: a new one")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="attar-fuzz-"))
    if options.child:
        fuzz(options.targets[0], folder / options.targets[0], options.runs, options.seed)
        return 0
    print(f"{folder}\n{'target':12} {'inputs':>9} {'per s':>7} {'slowest':>8}  findings", flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        clean = list(pool.map(lambda name: _row(name, folder, options), options.targets or TARGETS))
    return int(not all(clean))


def fuzz(name: str, folder: Path, runs: int, seed: int) -> None:
    """Fuzz one target in this process; does not return."""
    import atheris

    with atheris.instrument_imports(include=["attar"]):
        module = importlib.import_module(f"tests.fuzz.targets.{name}")
    from tests.fuzz.mutate import mutate
    from tests.fuzz.watch import Watched, limit_memory

    kind = TARGETS[name]
    scratch, corpus = folder / "scratch", folder / "corpus"
    for index in (scratch, corpus):
        index.mkdir(parents=True, exist_ok=True)
    handle = module.target(scratch)
    for number, data in enumerate(_inputs(name, module, scratch)):
        (corpus / f"seed-{number:04d}").write_bytes(data)
        handle(data)  # imports and compilation at first use are not timed
    watched = Watched(handle, folder)

    def mutated(data: bytes, longest: int, number: int) -> bytes:
        rng = random.Random(number)
        if kind == "bytes" or rng.random() < 0.3:
            return atheris.Mutate(data, longest)
        return mutate(kind, data, rng)[:longest]

    limit_memory()
    options = [f"-runs={runs}", f"-seed={seed}", f"-max_len={LONGEST}", "-timeout=60", "-rss_limit_mb=0"]
    arguments = ["fuzz", str(corpus), *options, f"-artifact_prefix={folder}/", "-print_final_stats=1"]
    atheris.Setup(arguments, watched, custom_mutator=mutated)
    atheris.Fuzz()


def _inputs(name: str, module: object, scratch: Path) -> list[bytes]:
    """Seeds, and what was found before."""
    cases = sorted((CASES / name).glob("*"))
    return [*module.seeds(scratch), *(case.read_bytes() for case in cases)]  # type: ignore[attr-defined]


def _row(name: str, folder: Path, options: argparse.Namespace) -> bool:
    """Fuzz one target in a process of its own, print its row; whether nothing was found."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.fuzz.run", name, "--child", "--folder", str(folder)]
    command += ["--runs", str(options.runs), "--seed", str(options.seed)]
    start = time.monotonic()
    with (path / "log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    counts = {"runs": 0, "slowest": 0.0, "findings": {}}
    if (path / "counts.json").exists():
        counts = json.loads((path / "counts.json").read_text())
    rate = counts["runs"] / (time.monotonic() - start)
    ended = "" if code == 0 else f"; ended with code {code}, see {path / 'log'}"
    row = f"{name:12} {counts['runs']:9} {rate:7.0f} {counts['slowest']:7.2f}s"
    print(f"{row}  {len(counts['findings'])}{ended}", *counts["findings"].values(), sep="\n    ", flush=True)
    return code == 0 and not counts["findings"]


if __name__ == "__main__":
    sys.exit(main())
