"""The claims of the articles and papers that attar follows, measured on SmolLM2-135M-Instruct: one table,
and the same in short for the README.

    python benchmarks/headlines.py --data DIR [--only int8 gptq ...] [--questions 0] [--minutes 20]
    python benchmarks/headlines.py --data DIR --cached

DIR holds wikitext-2, choices, spec-bench, gsm8k and sst2. A row has our number with a 95 % interval. A claim
holds where all of the interval is at or above the low end of what is claimed, in part where the low end lies
in it, and does not where all of it is below. Where the text gives no number, 95 % is our reading.

A finished cell goes to WORK/headlines.jsonl at once, and a run that was killed goes on from there; a WORK
belongs to one DIR. What is trained has ``--minutes`` each, and its row says how many tokens it saw.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import headlines_cells as cells
import processor_time
import quality
import torch
from headlines_cells import ACCURACY, PAGED, Bench, Found
from real_quality import DATA, MODEL

TRAINED, CACHE = (*ACCURACY, "minutes"), ("length", "texts")
SPEED = ("prompts", "completion", "rounds", "threads", "processor_time")
DRAFTER = (*SPEED, "minutes", "rows")
NUMBERS = {
    "questions": (400, "of each of the four sets; 0: all 5,886"),
    "tokens": (8192, "of held-out text, for top-1"),
    "samples": (128, "calibration rows of 256 tokens"),
    "rows": (512, "that the model writes for its drafters"),
    "prompts": (4, "of each of Spec-Bench's six kinds"),
    "completion": (64, "tokens of an answer"),
    "rounds": (3, "of timings"),
    "requests": (48, "of the paged cache's load"),
    "length": (4096, "tokens of a text for the cache's rows"),
    "texts": (8, "of the cache's rows; DARE's are 8 times as many"),
    "threads": (2, "of torch and the runtime"),
}
FOLDERS = ("wikitext-2", "choices", "spec-bench", "gsm8k", "sst2")
COMPRESSION, INFERENCE = "Distillation & Model Compression", "LLM Inference Optimization, part 2"


@dataclass(frozen=True)
class Claim:
    """A row.

    Attributes:
        claimed: "96 to 99 %" or "2 to 3x": the low end decides; "near 95 %" where 95 % is our reading.
        options: of the command line, that decide its cell.
        command: the command or setting behind the number.
    """

    name: str
    text: str
    where: str
    claimed: str
    options: tuple[str, ...]
    command: str
    measure: Callable[[Bench], Found]

    @property
    def low(self) -> float:
        """The low end, in per cent or times."""
        return float(re.findall(r"[\d.]+", self.claimed)[0])


CLAIMS = (
    Claim("int8", "INT8", COMPRESSION, "99 %", ACCURACY, "quantize --scheme W8A8",
          partial(cells.compressed, scheme="W8A8")),
    Claim("gptq", "GPTQ, 4 bits", COMPRESSION, "96 to 99 %", ACCURACY, "quantize --method gptq",
          partial(cells.compressed, scheme="W4A16", method="gptq")),
    Claim("awq", "AWQ, 4 bits", COMPRESSION, "97 to 99 %", ACCURACY, "quantize --method awq",
          partial(cells.compressed, scheme="W4A16", method="awq")),
    Claim("student", "student of half the layers", COMPRESSION, "95 to 97 %", TRAINED,
          "distill --keep-layers 0.5", partial(cells.compressed, half=True)),
    Claim("pruned-int8", "50 % pruned, recovered, INT8", COMPRESSION, "93 to 96 %", TRAINED,
          "prune --method alps; recover; quantize --scheme W8A8",
          partial(cells.compressed, zeros="alps", sparsity=0.5, scheme="W8A8")),
    Claim("student-gptq", "distilled, GPTQ in 4 bits", COMPRESSION, "90 to 95 %", TRAINED,
          "distill; quantize --method gptq",
          partial(cells.compressed, half=True, scheme="W4A16", method="gptq")),
    Claim("sparsegpt-50", "SparseGPT, 50 % zeros", "Frantar & Alistarh 2023", "near 95 %", ACCURACY,
          "prune --method sparsegpt --sparsity 0.5", partial(cells.compressed, sparsity=0.5)),
    Claim("sparsegpt-60", "SparseGPT, 60 % zeros", "Frantar & Alistarh 2023", "near 95 %", ACCURACY,
          "prune --method sparsegpt --sparsity 0.6", partial(cells.compressed, sparsity=0.6)),
    Claim("paged-use", "paged cache: memory that holds tokens", INFERENCE, "90 %", PAGED,
          "kv_tokens 4096", cells.paged_usage),
    Claim("paged-throughput", "paged cache: throughput over static slots", INFERENCE, "2 to 4x", PAGED,
          "kv_tokens 4096", cells.paged_throughput),
    Claim("prefix", "cached prefix: less time to the first token", INFERENCE, "50 to 90 %",
          ("threads", "processor_time"), "prefix_cache on", cells.prefix),
    Claim("h2o", "H2O, 20 % of the cache: right tokens", INFERENCE, "near 95 %", CACHE, "eviction h2o",
          partial(cells.cache_kept, kind="H2O")),
    Claim("int4-cache", "cache in 4 bits: right tokens", "Liu 2024 (KIVI)", "near 95 %", CACHE,
          "kv_dtype kivi4", partial(cells.cache_kept, kind="kivi4")),
    Claim("draft", "speculation, draft model", INFERENCE, "2 to 2.5x", DRAFTER, "distill --for-drafting",
          partial(cells.speculated, kind="draft model")),
    Claim("lookahead", "lookahead decoding", INFERENCE, "1.5 to 2x", SPEED, "speculate lookahead",
          partial(cells.speculated, kind="lookahead")),
    Claim("medusa", "Medusa", INFERENCE, "2 to 3x", DRAFTER, "train-head --head medusa",
          partial(cells.speculated, kind="medusa")),
    Claim("eagle", "EAGLE-2", INFERENCE, "3 to 4x", DRAFTER, "train-head --head eagle",
          partial(cells.speculated, kind="eagle")),
    Claim("greedy", "greedy completions unchanged by drafts", INFERENCE, "100 %", SPEED,
          "speculate ngram, lookahead", partial(cells.lossless, temperature=0.0)),
    Claim("seeded", "seeded completions unchanged by drafts", INFERENCE, "100 %", SPEED,
          "the same at temperature 1", partial(cells.lossless, temperature=1.0)),
    Claim("dare-90", "DARE drops 90 %: what was learned stays", "Yu 2024", "near 95 %", ("minutes", "texts"),
          "dare_linear, density 0.1", partial(cells.dare, density=0.1)),
    Claim("dare-99", "DARE drops 99 %: what was learned stays", "Yu 2024", "near 95 %", ("minutes", "texts"),
          "dare_linear, density 0.01", partial(cells.dare, density=0.01)),
)  # fmt: skip


def verdict(low: float, high: float, claimed: float) -> str:
    """Of an interval, against the low end of what is claimed."""
    if low >= claimed:
        return "holds"
    return "does not" if high < claimed else "in part"


def number(claim: Claim, found: Found | None) -> tuple[str, str]:
    """Our number with its interval, and the verdict."""
    if found is None or "failed" in found:
        return ("not measured" if found is None else "failed"), "–"
    form, unit = (".2f", "x") if claim.claimed.endswith("x") else (".1f", " %")
    value, low, high = (format(found[name], form) for name in ("value", "low", "high"))
    reach = f" ({low} to {high})" if low != high else ""
    return f"{value}{unit}{reach}", verdict(found["low"], found["high"], claim.low)


def row(claim: Claim, found: Found | None) -> str:
    """A line of the table."""
    text, outcome = number(claim, found)
    if found is not None:
        text += f": {found['failed']}" if "failed" in found else f"; {found['note']}"
    text = " ".join(text.replace("|", "/").split())
    return f"| {claim.text} | {claim.claimed} | {claim.where} | {text} | {outcome} | {claim.command} |"


def tables(bench: Bench, claims: tuple[Claim, ...]) -> tuple[str, str]:
    """A row for each claim, measured where it is not there yet, and the machines of the measured ones; the
    same rows in short."""
    found = [bench.cell(claim.name, claim.options, partial(claim.measure, bench)) for claim in claims]
    lines = [
        "<!-- table:headlines -->",
        f"| claim | claimed | where | {bench.args.model} (95 %) | verdict | command or setting |",
        "|---|---|---|---|---|---|",
        *map(row, claims, found),
    ]
    if measured := [each for each in found if each]:
        names = ", ".join(sorted({each["cpu"] for each in measured}))
        loads = [each["load"] for each in measured]
        lines += ["", f"{names}; {bench.args.threads} threads; load {min(loads):.1f} to {max(loads):.1f}"]
    short = [
        "<!-- table:claims -->",
        "| claim | claimed | measured (95 %) | verdict |",
        "|---|---:|---:|---|",
    ]
    for claim, cell in zip(claims, found, strict=True):
        short.append(f"| {claim.text} | {claim.claimed} | {' | '.join(number(claim, cell))} |")
    return "\n".join([*lines, "<!-- end -->"]), "\n".join([*short, "<!-- end -->"])


def arguments() -> argparse.ArgumentParser:
    """What the command line takes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [claim.name for claim in CLAIMS]
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names)
    )
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--work", type=Path, default=Path("~/.cache/attar/headlines").expanduser())
    parser.add_argument("--cached", action="store_true", help="print what is there, and measure nothing")
    parser.add_argument(
        "--again", nargs="*", default=[], metavar="NAME", help="measure anew; also original, load"
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="of --threads cores, for each training")
    for name, (default, text) in NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    processor_time.add_flag(parser)
    return parser


def main() -> None:
    """Print the table."""
    parser = arguments()
    args = parser.parse_args()
    processor_time.check(parser, args)
    if small := [name for name in NUMBERS if getattr(args, name) < (name != "questions")]:
        parser.error(f"--{small[0]} is {getattr(args, small[0])}, and must be at least 1")
    missing = [name for name in FOLDERS if not args.cached and not (args.data / name).is_dir()]
    if missing:
        parser.error(f"--data {args.data} has no folder {missing[0]}; it takes {', '.join(FOLDERS)}")
    args.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    bench = Bench(args, quality.read_cache(args.work / "headlines.jsonl"))
    print(*tables(bench, tuple(claim for claim in CLAIMS if claim.name in args.only)), sep="\n\n")


if __name__ == "__main__":
    main()
