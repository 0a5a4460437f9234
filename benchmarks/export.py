"""GGUF files: attar against llama.cpp's own quantizer, the same model, types, bytes and calibration text.

    python benchmarks/export.py [--models attar:tiny DIR] [--types Q4_K_M Q3_K_M]
        [--roundings nearest gptq qronos yaqa] [--peers llama-cpp auto-round] [--iterations 200]
        [--samples 128 --length 512] [--seeds 0 1 2] [--tokens 65536] [--cache FILE]
    python benchmarks/export.py --speed [--shape 1.1b | --models DIR] [--types Q4_K_M] [--rounds 2]
        [--timed nearest nearest+imatrix default gptq rtn] [--work DIR]

Quality: every cell is a file of one type mix. llama.cpp quantizes our F16 file, plain and with an importance
matrix of the same calibration rows (ours, in its own format); auto-round learns on these rows, and with 0
iterations only rounds; attar rounds to nearest, plain and with importance, or with data, and
``nearest,effort=good`` tunes the blocks' numbers behind it; ``mix+`` is our own choice of types within the
bytes of the mix. All files are opened by attar's reader and measured on the same held-out text against the
original: KL in nats per token, top-1 agreement, perplexity. ``MB`` counts all tensors; a line says so where
files differ.

Speed: seconds and largest resident set of a process that quantizes: attar from safetensors, llama.cpp from
the F16 file; ``default`` is what the command does unasked: nearest with an importance matrix that it makes
itself; ``rtn`` is ``attar quantize --method rtn --group-size 64`` with its check, its peak the largest
of all processes before. Threads are what OMP_NUM_THREADS says, for both.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from peers import environments
from peers.launch import write_tokens
from quality import append_row, digest_of, read_rows, spread
from quantize import make_model

import attar
from attar.checkpoint import open_checkpoint
from attar.measure.evaluate import measure_quality
from attar.measure.reference import Reference, make_reference
from attar.measure.settings import EvaluateSettings
from attar.measure.subject import load_subject

HERE = Path(__file__).parent
LLAMA_CPP, AUTO_ROUND = "llama-cpp", "auto-round"
DATALESS = {"nearest", "plain", "mix+nearest"}


def threads() -> int:
    """Threads that everybody gets."""
    return int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)


def llama_cpp_quantize(source: Path, target: Path, kind: str, imatrix: Path | None) -> dict[str, Any]:
    """Quantize a file with llama.cpp, in its environment."""
    weighted = str(imatrix) if imatrix else None
    job = {"source": source, "target": target, "type": kind, "threads": threads(), "imatrix": weighted}
    return answer_of(LLAMA_CPP, environments.python(LLAMA_CPP), "llamacpp_run.py", job)


def auto_round_quantize(
    model: str, target: Path, kind: str, iterations: int, plain: Path, common: Any
) -> dict[str, Any]:
    """Quantize with auto-round, in its environment, by the rows that attar would take."""
    tokens, length = target.with_suffix(".safetensors"), common["sequence_length"]
    given = {name: common[name] for name in ("samples", "seed", "data")}
    write_tokens(model, tokens, length=length, **given)
    job = {"model": open_checkpoint(model).path, "tokens": tokens, "target": target, "type": kind}
    job |= {"iterations": iterations, "like": plain}
    return answer_of(AUTO_ROUND, environments.python(AUTO_ROUND), "autoround_gguf_run.py", job)


def our_export(model: str, target: Path, **settings: Any) -> dict[str, Any]:
    """Export with attar, in a process of its own."""
    job = {"model": model, "target": target, "settings": settings}
    return answer_of("attar", sys.executable, "attar_export_run.py", job)


def answer_of(tool: str, python: Path | str, runner: str, job: dict[str, Any]) -> dict[str, Any]:
    """What a tool's runner answers."""
    text = json.dumps({**job, "started": time.time()}, default=str)
    ended = subprocess.run([str(python), str(HERE / "peers" / runner), text], capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"{tool}: {ended.stderr.splitlines()[-1:]}")
    answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return answer


def measured(file: Path, settings: EvaluateSettings, reference: Reference) -> dict[str, Any]:
    """What a file keeps of the model."""
    opened = open_checkpoint(file)
    quality = measure_quality(load_subject(opened), settings, reference)
    return {
        "kl": quality.kl_mean,
        "top1": quality.top1_agreement,
        "perplexity": quality.perplexity,
        "bytes": opened.nbytes,
    }


def quality(name: str, args: argparse.Namespace, cache: dict[str, Any], work: Path) -> str:
    """The table of one model."""
    checkpoint = open_checkpoint(name)
    digest = digest_of(checkpoint)
    settings = EvaluateSettings(data=args.test or args.data, tokens=args.tokens, speed=False, sample="")
    reference = None
    rows: dict[str, dict[tuple[str, str], list[dict[str, Any]]]] = {}
    for kind in args.types:
        for seed, (tool, method) in itertools.product(args.seeds, cells(args)):
            if seed != args.seeds[0] and method in DATALESS:
                continue
            common = {"samples": args.samples, "sequence_length": args.length, "data": args.data}
            common["seed"] = seed

            def key_of(tool: str, method: str, seed: int, kind: str = kind) -> str:
                fields = [digest, kind, tool, method, seed, args.samples, args.length, args.tokens, args.data]
                return json.dumps([*fields, args.test] if args.test else fields)

            key = key_of(tool, method, seed)
            if key not in cache:
                reference = reference or make_reference(checkpoint, settings, memory_limit=2**31)
                file = work / f"{tool}-{method}-{kind}.gguf"
                nearest = key_of("attar", "nearest", args.seeds[0])
                near = cache[nearest]["bytes"] if method.startswith("mix") else 0
                results = make(name, tool, method, kind, file, common, work, near)
                cache[key] = {**measured(file, settings, reference), "seconds": results["seconds"]}
                file.unlink()
                line = f"{checkpoint.name} {kind} {tool} {method} seed {seed}: {cache[key]}"
                print(line, file=sys.stderr, flush=True)
                if args.cache:
                    append_row(args.cache, {"key": key, "found": cache[key]})
            rows.setdefault(kind, {}).setdefault((tool, method), []).append(cache[key])
    return f"### {checkpoint.name}\n\n" + "\n\n".join(table(kind, methods) for kind, methods in rows.items())


def cells(args: argparse.Namespace) -> list[tuple[str, str]]:
    """(tool, method) of each row."""
    ours = [("attar", "nearest"), ("attar", "nearest+imatrix")]
    ours += [("attar", rounding) for rounding in args.roundings if rounding != "nearest"]
    ours += [("attar", f"mix+{rounding}") for rounding in args.mixes]
    theirs = [(LLAMA_CPP, "plain"), (LLAMA_CPP, "imatrix")] if LLAMA_CPP in args.peers else []
    learning = [(AUTO_ROUND, f"{count} iterations") for count in (0, args.iterations)]
    return [*theirs, *(learning if AUTO_ROUND in args.peers else []), *ours]


def make(
    name: str, tool: str, method: str, kind: str, file: Path, common: dict[str, Any], work: Path, near: int
) -> dict[str, Any]:
    """Write one file; ``near``: bytes of tensors that a mix of our own may have."""
    if method.startswith("mix+"):
        count = sum(math.prod(info.shape) for info in open_checkpoint(name).tensors.values())
        bits = math.floor(8e4 * near / count) / 1e4
        rounding = method.removeprefix("mix+")
        return our_export(name, file, bits=bits, rounding=rounding, imatrix="none", **common)
    if tool == "attar":
        method, _, effort = method.partition(",effort=")
        rounding, _, weighted = method.partition("+")
        more = {"imatrix": str(importance(name, common, work)) if weighted else "none"}
        more |= {"effort": effort} if effort else {}
        return our_export(name, file, type=kind, rounding=rounding, **common, **more)
    plain = work / f"{Path(name).name.replace(':', '-')}-F16.gguf"
    if not plain.exists():
        our_export(name, plain, type="F16")
    if tool == AUTO_ROUND:
        return auto_round_quantize(name, file, kind, int(method.split()[0]), plain, common)
    return llama_cpp_quantize(
        plain, file, kind, importance(name, common, work) if method == "imatrix" else None
    )


def importance(name: str, common: dict[str, Any], work: Path) -> Path:
    """The importance matrix of a model, computed once."""
    file = work / f"{Path(name).name.replace(':', '-')}-imatrix-{common['seed']}.gguf"
    if not file.exists():
        folder = work / "with-imatrix"
        attar.export(name, folder, format="gguf", type="Q8_0", imatrix="compute", force=True, **common)
        (folder / "imatrix.gguf").rename(file)
    return file


def table(kind: str, rows: dict[tuple[str, str], list[dict[str, Any]]]) -> str:
    """Markdown, best first: by (tool, method) the mean of the seeds, with the range of KL."""

    def mean(row: tuple[str, str], name: str) -> float:
        return statistics.fmean(result[name] for result in rows[row])

    best = min((mean(row, "kl") for row in rows if row[0] != "attar"), default=math.nan)
    lines = [
        f"| {kind} | method | KL, nats/token | top-1 | perplexity | KL / best peer's | MB | s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: mean(row, "kl")):
        kl = spread([result["kl"] for result in rows[row]], ".3e")
        lines.append(
            f"| {row[0]} | {row[1]} | {kl} | {mean(row, 'top1'):.4f} | {mean(row, 'perplexity'):.3f} "
            f"| {mean(row, 'kl') / best:.2f} | {mean(row, 'bytes') / 1e6:.3f} | {mean(row, 'seconds'):.1f} |"
        )
    if len({mean(row, "bytes") for row in rows}) > 1:
        lines.append("\nThe bytes differ.")
    return "\n".join(lines)


def speed(args: argparse.Namespace, work: Path) -> str:
    """Time and memory of each way of rounding, llama.cpp's nearest in the same run, and of ``attar quantize
    --method rtn`` with its check."""
    model = str(make_model(args.shape, work)) if args.shape else args.models[0]
    plain = work / "F16.gguf"
    if not plain.exists():
        our_export(model, plain, type="F16")
    common = {"samples": args.samples, "sequence_length": args.length, "data": args.data}
    common["seed"] = args.seeds[0]
    imatrix = importance(model, common, work) if any("imatrix" in name for name in args.timed) else None
    lines = ["| type | tool | rounding | wall, s | / llama.cpp | call, s | peak, MB |"]
    lines.append("|---|---|---|---|---|---|---|")
    for kind in args.types:
        runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
        cells = [(tool, name) for name in args.timed for tool in tools(name, args)]
        for number in range(args.rounds):
            for tool, name in cells[:: -1 if number % 2 else 1]:
                runs.setdefault((tool, name), []).append(
                    timed(tool, name, kind, model, plain, imatrix, common, work)
                )
        for tool, name in cells:
            wall, call = (min(run[part] for run in runs[tool, name]) for part in ("wall", "seconds"))
            peak = max(run["peak_rss_mb"] for run in runs[tool, name])
            theirs = min((run["wall"] for run in runs.get((LLAMA_CPP, name), [])), default=math.nan)
            ratio = "" if math.isnan(theirs) else f"{wall / theirs:.2f}"
            lines.append(f"| {kind} | {tool} | {name} | {wall:.1f} | {ratio} | {call:.1f} | {peak:.0f} |")
    return "\n".join(lines)


def tools(name: str, args: argparse.Namespace) -> list[str]:
    """Who rounds so."""
    return (
        ["attar"] if LLAMA_CPP not in args.peers or not name.startswith("nearest") else ["attar", LLAMA_CPP]
    )


def timed(
    tool: str,
    name: str,
    kind: str,
    model: str,
    plain: Path,
    imatrix: Path | None,
    common: dict[str, Any],
    work: Path,
) -> dict[str, Any]:
    """One run; what it writes is removed again."""
    file, weighted = work / f"{tool}.gguf", name.endswith("+imatrix")
    file.unlink(missing_ok=True)
    if name == "rtn":
        return our_quantize(model, work / "rtn")
    if tool == LLAMA_CPP:
        run = llama_cpp_quantize(plain, file, kind, imatrix if weighted else None)
    elif name == "default":
        run = our_export(model, file, type=kind, data=common["data"])
    elif name.startswith("nearest"):
        run = our_export(model, file, type=kind, imatrix=str(imatrix) if weighted else "none")
    else:
        run = our_export(model, file, type=kind, rounding=name, **common)
    file.unlink()
    return run


def our_quantize(model: str, target: Path) -> dict[str, Any]:
    """Round to nearest with 4 bits in groups of 64, the check on held-out text included; from the command."""
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-m", "attar", "quantize", model, "-o", str(target), "--method", "rtn"]
    start = time.perf_counter()
    ended = subprocess.run([*command, "--group-size", "64"], capture_output=True, text=True)
    wall = time.perf_counter() - start
    if ended.returncode:
        raise SystemExit(f"attar: {ended.stderr.splitlines()[-1:]}")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    return {"wall": wall, "seconds": wall, "peak_rss_mb": peak}


def arguments() -> argparse.ArgumentParser:
    """What the command line takes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["attar:tiny"])
    parser.add_argument("--types", nargs="+", default=["Q4_K_M", "Q3_K_M"])
    parser.add_argument("--roundings", nargs="*", default=["gptq", "qronos", "yaqa"])
    parser.add_argument(
        "--mixes", nargs="*", default=["nearest", "qronos"], help="roundings on types of our own choice"
    )
    parser.add_argument("--peers", nargs="*", choices=[LLAMA_CPP, AUTO_ROUND], default=[LLAMA_CPP])
    parser.add_argument("--iterations", type=int, default=200, help="of auto-round, for each block")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of the calibration rows")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=65_536, help="held-out")
    parser.add_argument("--data", default="python-stdlib", help="calibration text")
    parser.add_argument("--test", default="", help="the text to measure on; empty: --data's held-out part")
    parser.add_argument("--cache", type=Path, help="JSON lines of finished cells")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--shape", default="", help="1.1b")
    parser.add_argument(
        "--timed",
        nargs="+",
        default=["nearest"],
        help="of --speed: nearest, nearest+imatrix, default, a rounding, rtn",
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--work", type=Path, help="folder for what is written meanwhile; kept")
    return parser


def read_cache(file: Path | None) -> dict[str, Any]:
    """Finished cells by key."""
    return {row["key"]: row["found"] for row in read_rows(file)}


def main() -> None:
    """Print the tables."""
    args = arguments().parse_args()
    cache = read_cache(args.cache)
    with tempfile.TemporaryDirectory() as scratch:
        work = args.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        if args.speed:
            print(speed(args, work))
            return
        for name in args.models:
            target = work / Path(name).name.replace(":", "-")
            target.mkdir(exist_ok=True)
            print(quality(name, args, cache, target), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
