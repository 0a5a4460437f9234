"""What each way of rounding keeps: attar and other tools on the same models, tokens, bits and measure.

    python benchmarks/quality.py --models attar:tiny DIR --schemes W4:128 W3:128 W2:64 W8A8 FP8 NF4
        [--methods gptq rtn,...] [--peers llmcompressor gptqmodel auto-round bitsandbytes] [--seeds 0 1 2]
        [--data valid.txt --test test.txt] [--cache FILE]

Every cell is one process: a tool quantizes the model on the seed's calibration tokens (the same token ids for
everyone) and leaves a dense checkpoint of the weights that its own file stands for. All of these are measured
here by attar on the same held-out text against the original: KL in nats per token with its standard error
over rows, top-1 agreement, perplexity; and KL again on each further text of ``--test``: other domains.
Seeds change the calibration rows and whatever a method draws; methods without data run once.
With ``--dtype float32`` everyone gets the same copy of the model in float32, so that scales are not rounded
to bf16 by one tool and kept by another (GPTQModel and auto-round compute in bf16 all the same); with ``auto``
the checkpoint as it is, which is what people do.

A scheme is W<bits>:<group>[:asym], or W8A8, FP8, FP8_DYNAMIC, NVFP4A16, NF4[:<block>]. A method is a
name, or ``name,key=value``: ``gptq,act_order=none`` for a tool, ``gptq,damp=0.05`` for attar, whose settings
they are. Finished cells, and those that failed with the reason, go to the cache file at once, and a run that
was killed goes on from there; ``--again attar`` (or ``attar/gptq``) measures these anew.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from peers.activations import measure
from peers.job import Job
from peers.launch import OURS, Method, RunnerError, launch, parse_method, with_method, write_tokens

import attar
from attar.checkpoint import Checkpoint, open_checkpoint
from attar.checkpoint.hashing import sha256_file
from attar.errors import AttarError
from attar.measure.reference import Reference, make_reference
from attar.measure.settings import EvaluateSettings
from attar.quantization.settings import METHOD_SETTINGS

PEER_METHODS: dict[str, dict[str, tuple[str, ...]]] = {
    "llmcompressor": {
        "INT": ("rtn", "gptq,act_order=none", "gptq", "awq"),
        "W8A8": ("rtn", "gptq", "smoothquant", "smoothquant-gptq"),
        "FP8": ("rtn", "gptq"),
        "FP8_DYNAMIC": ("rtn", "gptq"),
        "NVFP4A16": ("rtn", "gptq"),
    },
    "gptqmodel": {"INT": ("rtn", "gptq,act_order=none", "gptq", "gptq,act_order=group", "gptaq")},
    "auto-round": {"INT": ("rtn", "autoround", "autoround-ext"), "NVFP4A16": ("rtn", "autoround")},
    "bitsandbytes": {"NF4": ("rtn", "double")},
}
PLAIN = "gptq,scales=absmax,refine=0"  # the paper's GPTQ with a static order of columns, as the peers have it
LEARNED = ("autoround", "autoround-ext")  # by --iterations
DATALESS = {"rtn", "double"}  # but for the static scales of FP8
STATIC = ("FP8",)


@dataclass(frozen=True)
class Cell:
    """One number of the table.

    Attributes:
        key: everything that decides the result, as it stands in the cache.
        job: without its folders.
        method: the tool and what it is asked for.
    """

    key: dict[str, Any]
    job: Job
    method: Method

    @property
    def text(self) -> str:
        """The key as one string."""
        return json.dumps(self.key, sort_keys=True)


def parse_scheme(text: str) -> dict[str, Any]:
    """Fields of a job from a scheme's short name.

    Raises:
        SystemExit: not a scheme.
    """
    if match := re.fullmatch(r"W([2-8]):(\d+)(:asym)?", text):
        return {
            "scheme": "INT",
            "bits": int(match[1]),
            "group_size": int(match[2]),
            "symmetric": match[3] is None,
        }
    if match := re.fullmatch(r"NF4(?::(\d+))?", text):
        return {"scheme": "NF4", "bits": 4, "group_size": int(match[1] or 64)}
    if text in ("W8A8", "FP8", "FP8_DYNAMIC"):
        return {"scheme": text, "bits": 8, "group_size": 0}
    if text == "NVFP4A16":
        return {"scheme": text, "bits": 4, "group_size": 16}
    known = "W4:128, W4:128:asym, W8A8, FP8, FP8_DYNAMIC, NVFP4A16, NF4 or NF4:64"
    raise SystemExit(f"{text} is no scheme: {known}")


def cells(args: argparse.Namespace, digest: str) -> Iterator[Cell]:
    """Every cell of one model, in the order in which they are run: seeds outermost, tools interleaved."""
    for seed in args.seeds:
        for scheme in args.schemes:
            for method in methods(args, parse_scheme(scheme)["scheme"]):
                fields = parse_scheme(scheme)
                if seed != args.seeds[0] and method.name in DATALESS and fields["scheme"] not in STATIC:
                    continue
                job = with_method(Job(model="", tokens="", out="", method="", seed=seed, **fields), method)
                job = replace(job, dtype="auto", data=args.data)
                if method.name in LEARNED:
                    job = replace(job, iterations=dict(method.changes).get("iterations", args.iterations))
                key = {
                    "model": digest,
                    "scheme": scheme,
                    "tool": method.tool,
                    "method": method.label,
                    "seed": seed,
                    "samples": args.samples,
                    "length": args.length,
                    "data": args.data,
                    "tokens": args.tokens,
                    "dtype": args.dtype,
                }
                if args.test:
                    key["test"], *others = args.test
                    key |= {"others": others} if others else {}
                if method.name in LEARNED:
                    key["iterations"] = job.iterations
                yield Cell(key, job, method)


def methods(args: argparse.Namespace, kind: str) -> list[Method]:
    """attar's methods, then those of each peer that has this kind of scheme."""
    ours = [parse_method(OURS, name) for name in args.methods]
    theirs = [
        parse_method(peer, name)
        for peer in args.peers
        for name in PEER_METHODS.get(peer, {}).get(kind, ())
        if f"{peer}/{name}" not in args.skip
    ]
    return ours + theirs


def read_cache(file: Path | None) -> dict[str, dict[str, Any]]:
    """Finished cells by key."""
    return {json.dumps(row["key"], sort_keys=True): row["found"] for row in read_rows(file)}


def read_rows(file: Path | None) -> list[dict[str, Any]]:
    """The JSON objects of a file's lines; a line that a kill cut short is left out."""
    rows = []
    for line in file.read_text().splitlines() if file and file.is_file() else []:
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def append_row(file: Path, row: dict[str, Any]) -> None:
    """Add a line, behind a line break where a kill left none."""
    with file.open("a+b") as opened:
        if end := opened.tell():
            opened.seek(end - 1)
        torn = end > 0 and opened.read(1) != b"\n"
        opened.write((b"\n" if torn else b"") + json.dumps(row).encode() + b"\n")


def forgotten(cell: Cell, again: list[str]) -> bool:
    """Whether a cell is to be measured anew: its tool, or tool/method, is named."""
    return cell.method.tool in again or f"{cell.method.tool}/{cell.method.label}" in again


def run_cell(
    cell: Cell,
    model: str,
    tokens: Path,
    references: dict[str, tuple[EvaluateSettings, Reference]],
    work: Path,
    limit: float,
) -> dict[str, Any]:
    """Quantize one cell, and measure it on each text."""
    out = work / "out"
    shutil.rmtree(out, ignore_errors=True)
    job = replace(cell.job, model=model, tokens=str(tokens), out=str(out))
    answer = launch(cell.method.tool, job, limit)
    found, *others = [
        {
            "kl": quality.kl_mean,
            "kl_error": quality.kl_mean_row_stderr,
            "kl_p99": quality.kl_p99,
            "top1": quality.top1_agreement,
            "perplexity": quality.perplexity,
        }
        for quality in (measure(out, *each) for each in references.values())
    ]
    cost = {name: answer[name] for name in ("seconds", "cpu", "wall", "peak_rss_mb", "versions")}
    return {**found, "others": dict(zip(list(references)[1:], others, strict=True)), **cost}


def digest_of(checkpoint: Checkpoint) -> str:
    """Of the weights: what the cache knows a model by."""
    return ",".join(sha256_file(file)[:16] for file in checkpoint.weight_files)


def given_model(checkpoint: Checkpoint, dtype: str, copy: Path) -> Path:
    """The folder that every tool is given: the checkpoint itself, or a copy of it in another type."""
    if dtype == "auto":
        return checkpoint.path
    return attar.export(checkpoint, copy, format="dense", dtype=dtype, force=True).path


def run_model(name: str, args: argparse.Namespace, cache: dict[str, dict[str, Any]], work: Path) -> str:
    """Fill the cells of one model; its tables."""
    checkpoint = open_checkpoint(name)
    digest = digest_of(checkpoint)
    references: dict[str, tuple[EvaluateSettings, Reference]] = {}
    source: Path | None = None
    wanted = list(cells(args, digest))
    for number, cell in enumerate(wanted, 1):
        if args.cached or (cell.text in cache and not forgotten(cell, args.again)):
            continue
        references = references or {
            text: (settings, make_reference(checkpoint, settings, memory_limit=2**31))
            for text in args.test or [args.data]
            for settings in [EvaluateSettings(data=text, tokens=args.tokens, speed=False, sample="")]
        }
        source = source or given_model(checkpoint, args.dtype, work / digest[:16])
        tokens = work / f"{digest[:16]}-{cell.job.seed}.safetensors"
        if not tokens.exists():
            write_tokens(
                name, tokens, samples=args.samples, length=args.length, seed=cell.job.seed, data=args.data
            )
        label = f"{cell.key['scheme']} {cell.method.tool} {cell.method.label} seed {cell.job.seed}"
        try:
            result = run_cell(cell, str(source), tokens, references, work, args.limit)
        except (RunnerError, AttarError) as error:
            result = {"failed": str(error)}
        cache[cell.text] = result
        if args.cache:
            append_row(args.cache, {"key": cell.key, "found": result})
        line = result.get("failed") or f"KL {result['kl']:.3e}, {result['cpu']:.0f} CPU s"
        print(f"[{number}/{len(wanted)}] {label}: {line}", file=sys.stderr, flush=True)
    return report(checkpoint.name, args, wanted, cache)


def report(
    name: str,
    args: argparse.Namespace,
    wanted: list[Cell],
    cache: dict[str, dict[str, Any]],
) -> str:
    """A heading, and a table for each scheme."""
    head = (
        f"### {name}: {args.samples} x {args.length} calibration tokens, {args.tokens} held-out tokens, "
        f"{len(args.seeds)} seed{'s' if len(args.seeds) > 1 else ''}"
    )
    parts = [head]
    for scheme in args.schemes:
        rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for cell in wanted:
            if cell.key["scheme"] == scheme and cell.text in cache:
                rows.setdefault((cell.method.tool, cell.method.label), []).append(cache[cell.text])
        if rows:
            parts.append(table(scheme, rows))
    return "\n\n".join(parts)


def table(scheme: str, rows: dict[tuple[str, str], list[dict[str, Any]]]) -> str:
    """Markdown: one row a method, best first; where a cell failed, the reason in place of the figures.

    Args:
        rows: by (tool, method), the cells of its seeds. KL is their mean, with the range.
    """
    failed = {row: cell["failed"] for row, results in rows.items() for cell in results if "failed" in cell}
    ended = [row for row in rows if row not in failed]

    def mean(row: tuple[str, str], name: str) -> float:
        return statistics.fmean(cell[name] for cell in rows[row])

    theirs = [mean(row, "kl") for row in ended if row[0] != OURS]
    best = min(theirs) if theirs else math.nan
    texts = list(rows[ended[0]][0].get("others", {})) if ended else []
    titles = "".join(f" KL, {Path(text).name} |" for text in texts)
    lines = [
        f"| {scheme} | method | KL, nats/token | KL p99 | top-1 | perplexity | KL / best peer's | CPU, s |"
        + titles,
        "|---|---|---|---|---|---|---|---|" + "---|" * len(texts),
    ]
    for row in sorted(ended, key=lambda row: mean(row, "kl")):
        kl = with_error(rows[row])
        others = "".join(f" {with_error([cell['others'][text] for cell in rows[row]])} |" for text in texts)
        ratio = "–" if math.isnan(best) else f"{mean(row, 'kl') / best:.2f}"
        lines.append(
            f"| {row[0]} | {row[1]} | {kl} | {mean(row, 'kl_p99'):.2e} "
            f"| {mean(row, 'top1'):.4f} | {mean(row, 'perplexity'):.3f} | {ratio} "
            f"| {statistics.fmean(cell.get('cpu', math.nan) for cell in rows[row]):.0f} |{others}"
        )
    lines += [f"| {tool} | {name} | failed: {failed[tool, name]} | | | | | |" for tool, name in failed]
    return "\n".join(lines)


def with_error(seeds: list[dict[str, Any]]) -> str:
    """KL of the seeds with its standard error over rows of text, which the seeds share."""
    kl = spread([cell["kl"] for cell in seeds], ".3e")
    errors = [cell["kl_error"] for cell in seeds if cell.get("kl_error")]
    return f"{kl} ± {statistics.fmean(errors):.1e}" if errors else kl


def spread(values: list[float], digits: str) -> str:
    """The mean, and where values differ the lowest and the highest of them: ``0.083 (0.081–0.087)``."""
    low, mean, high = (format(of(values), digits) for of in (min, statistics.fmean, max))
    return mean if low == high else f"{mean} ({low}–{high})"


def arguments() -> argparse.ArgumentParser:
    """What the command line takes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["attar:tiny"])
    parser.add_argument("--schemes", nargs="+", default=["W4:128", "W3:128", "W2:64", "W8A8", "FP8", "NF4"])
    parser.add_argument("--methods", nargs="*", default=[*METHOD_SETTINGS, PLAIN], help="attar's")
    parser.add_argument("--peers", nargs="*", default=[], help=" ".join(PEER_METHODS))
    parser.add_argument(
        "--skip", nargs="*", default=[], metavar="PEER/METHOD", help="methods of peers left out"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=65_536, help="held-out")
    parser.add_argument("--iterations", type=int, default=200, help="of auto-round and of our autoround")
    parser.add_argument("--data", default="python-stdlib", help="calibration text")
    parser.add_argument(
        "--test",
        nargs="*",
        default=[],
        help="texts to measure on, the first decides; none: --data's held-out part",
    )
    parser.add_argument("--dtype", default="float32", help="float32, or auto: the checkpoint's")
    parser.add_argument("--limit", type=float, default=7200.0, help="seconds that one cell may take")
    parser.add_argument("--cache", type=Path, help="JSON lines of finished cells")
    parser.add_argument("--cached", action="store_true", help="print what the cache has, and run nothing")
    parser.add_argument("--again", nargs="*", default=[], metavar="TOOL[/METHOD]")
    parser.add_argument("--work", type=Path, help="folder for what is written meanwhile")
    return parser


def main() -> None:
    """Print the tables."""
    args = arguments().parse_args()
    for scheme in args.schemes:
        parse_scheme(scheme)
    if unknown := [peer for peer in args.peers if peer not in PEER_METHODS]:
        raise SystemExit(f"no peer {unknown[0]!r}; there are {', '.join(PEER_METHODS)}")
    cache = read_cache(args.cache)
    if args.work is not None:
        args.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        for name in args.models:
            print(run_model(name, args, cache, Path(work)), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
