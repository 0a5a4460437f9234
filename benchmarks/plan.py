"""How good plans are: predicted against measured, and against other recipes of the same bytes.

    python benchmarks/plan.py                                   # attar:tiny, twelve budgets
    python benchmarks/plan.py --model attar:tiny-moe --method rtn
    python benchmarks/plan.py --budgets 60MB 80MB --schemes W3A16 W4A16 --model DIR --data TEXT --test TEXT
    python benchmarks/plan.py --engine llama.cpp --method rtn   # the bytes of llama.cpp's own mixes
    python benchmarks/plan.py --rivals auto-round --schemes     # the bytes of what AutoScheme chooses
    python benchmarks/plan.py --rivals modelopt --schemes       # of what ModelOpt's auto_quantize chooses

First the rivals are made and measured: one scheme for all layers (``--schemes``), for llama.cpp its own
mixes (``--types``, with an importance matrix), and what another tool's search chooses (``--rivals``,
``--bits``): its bits of each layer in attar's schemes, rounded by the same ``--method``, so that choices
alone are compared. With ``--embedding-bits 8`` they have the embedding in int8, as plans do. Budgets are the
bytes of the rivals and the geometric means of neighbours, ``--count`` of them, or ``--budgets``. Then a plan
of each budget is made and run. Runs and rivals are kept in ``--out``: what is done is not done again.
Predictions see no run of this benchmark: each is what a new user gets.

Prints, for each budget: bytes predicted and in the files; KL predicted with its interval, and measured; the
factor between them; the best rival that fits and its KL; ln(measured / loss), of which the priors of
planner/correction.py are made.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import export as gguf_files
import yaml
from peers.launch import write_tokens
from peers.mixes import chosen_bits

import attar
from attar.checkpoint import open_checkpoint
from attar.checkpoint.units import byte_count, table
from attar.errors import NumericsError, UsageError
from attar.kernels.build import cache_folder as kernels_folder
from attar.measure.evaluate import measure_quality
from attar.measure.reference import make_reference
from attar.measure.settings import EvaluateSettings
from attar.measure.subject import load_subject
from attar.planner.costs import layer_groups, patterns_of
from attar.planner.settings import SCHEMES_OF

HEADER = (
    "budget",
    "predicted",
    "files",
    "KL",
    "90 %",
    "measured",
    "inside",
    "factor",
    "best rival that fits",
    "its KL",
    "ln(measured / loss)",
)
TYPES = ("Q2_K", "Q3_K_M", "Q4_K_M")
WITHIN = 1.5
SAMPLES, LENGTH = 32, 256  # calibration rows of the peers' searches and of importance matrices


@dataclass(frozen=True)
class Rival:
    """A recipe of somebody else: its bytes on disk, and its KL."""

    name: str
    bytes: int
    kl: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="attar:tiny")
    parser.add_argument("--engine", default="attar", choices=("attar", "llama.cpp"))
    parser.add_argument("--method", default="gptq")
    parser.add_argument("--schemes", nargs="*", default=SCHEMES_OF["attar"], choices=SCHEMES_OF["attar"])
    parser.add_argument(
        "--embedding-bits", nargs="*", type=int, default=[0], choices=(0, 8), help="of rivals"
    )
    parser.add_argument("--types", nargs="*", default=TYPES, help="mixes of llama.cpp, for its engine")
    parser.add_argument("--rivals", nargs="*", default=[], choices=("auto-round", "modelopt"))
    parser.add_argument("--bits", nargs="*", type=float, default=[3.0, 5.0], help="average, of the rivals")
    parser.add_argument("--count", type=int, default=12, help="of budgets")
    parser.add_argument("--budgets", nargs="*", help="sizes in place of those of the rivals")
    parser.add_argument("--data", default="python-stdlib", help="text of calibration")
    parser.add_argument("--test", default="", help="text of the measurement; empty: held out of --data")
    parser.add_argument("--tokens", type=int, default=16384, help="held-out tokens")
    parser.add_argument("--out", type=Path, default=Path("bench/plans"))
    options = parser.parse_args()
    options.out = options.out.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    rivals = list(made_rivals(options))
    rows = [row for size in budgets(options, rivals) if (row := planned_row(size, rivals, options))]
    print(f"{options.model} for {options.engine}, {options.method}, {options.tokens} held-out tokens\n")
    print(table(HEADER, rows, left=1))
    for rival in rivals:
        print(f"{rival.name}: {rival.bytes:,} bytes, KL {rival.kl:.4g}")
    exact = sum(row[1] == row[2] for row in rows)
    inside = sum(row[6] == "yes" for row in rows)
    close = sum(max(float(row[7]), 1 / float(row[7])) <= WITHIN for row in rows)
    against = [row for row in rows if row[9] != "-"]
    better = sum(float(row[5]) < float(row[9]) for row in against)
    print(
        f"\nof {len(rows)}: {exact} exact to the byte, {inside} inside, {close} within a factor {WITHIN}; "
        f"{better} of {len(against)} below every rival that fits"
    )


def budgets(options: argparse.Namespace, rivals: list[Rival]) -> list[int]:
    """Bytes, ascending: of the rivals, between them, and below the smallest."""
    if options.budgets:
        return sorted(byte_count("budgets", size) for size in options.budgets)
    sizes = sorted({rival.bytes for rival in rivals})
    between = [math.isqrt(low * high) for low, high in itertools.pairwise(sizes)]
    below = [int(sizes[0] * 0.95)]
    return sorted([*sizes, *between, *below][: options.count])


def made_rivals(options: argparse.Namespace) -> Iterator[Rival]:
    """The rivals, measured; known ones are read."""
    makers: dict[str, Any] = {}
    if options.engine == "llama.cpp":
        makers |= {f"llama.cpp {kind}": (llama_cpp_mix, kind) for kind in options.types}
    else:
        for bits in options.embedding_bits:
            also = f" and an int{bits} embedding" if bits else ""
            makers |= {f"{scheme}{also}": (uniform, scheme, bits) for scheme in options.schemes}
            for tool, average in itertools.product(options.rivals, options.bits):
                makers[f"{tool} {average:g} bits{also}"] = (searched, tool, average, bits)
    for name, (maker, *arguments) in makers.items():
        stem = f"{options.method}-{name}".replace(" ", "-")
        file = options.out / f"{stem}.json"
        if not file.exists():
            size, kl = maker(*arguments, options, options.out / stem)
            file.write_text(json.dumps({"bytes": size, "kl": kl}))
        yield Rival(name, **json.loads(file.read_text()))


def uniform(scheme: str, embedding_bits: int, options: argparse.Namespace, out: Path) -> tuple[int, float]:
    """One scheme for all layers."""
    return run_stage({"scheme": scheme, "embedding_bits": embedding_bits}, options, out)


def searched(
    tool: str, bits: float, embedding_bits: int, options: argparse.Namespace, out: Path
) -> tuple[int, float]:
    """The bits that another tool's search gives each layer, in our schemes and by our rounding."""
    checkpoint = open_checkpoint(options.model)
    folder, tokens = options.out / "dense", options.out / "tokens.safetensors"
    if not folder.exists():
        attar.export(options.model, folder, format="dense", progress=False)
    if not tokens.exists():
        write_tokens(options.model, tokens, samples=SAMPLES, length=LENGTH, seed=0, data=options.data)
    modules = [module for group in layer_groups(checkpoint).values() for module in group]
    chosen = chosen_bits(tool, folder, tokens, bits, modules)
    patterns = patterns_of({module: f"W{chosen[module]}A16" for module in modules})
    overrides = [f"re:{p}={s}" for p, s in patterns]
    asked = {"scheme": "W4A16", "overrides": overrides, "embedding_bits": embedding_bits}
    return run_stage(asked, options, out)


def llama_cpp_mix(kind: str, options: argparse.Namespace, out: Path) -> tuple[int, float]:
    """A mix of llama.cpp's, made by llama.cpp with an importance matrix."""
    common = {"samples": SAMPLES, "sequence_length": LENGTH, "data": options.data, "seed": 0}
    file, work = out.with_name(f"{out.name}.gguf"), options.out
    gguf_files.make(options.model, gguf_files.LLAMA_CPP, "imatrix", kind, file, common, work, 0)
    settings = EvaluateSettings(
        data=options.test or options.data, tokens=options.tokens, speed=False, sample=""
    )
    reference = make_reference(open_checkpoint(options.model), settings, memory_limit=2**31)
    kl = measure_quality(load_subject(open_checkpoint(file)), settings, reference).kl_mean
    return file.stat().st_size, kl


def run_stage(settings: dict[str, Any], options: argparse.Namespace, out: Path) -> tuple[int, float]:
    """Bytes and KL of a quantization, however broken the model is."""
    stage = {"stage": "quantize", "method": options.method, "check_tokens": 0, **settings}
    recipe = {
        "model": options.model,
        "data": options.data,
        "evaluate": evaluation(options),
        "stages": [stage],
    }
    path = out.with_name(f"{out.name}.yaml")
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    result = attar.run(path, out, progress=False)
    entry = result.content["stages"][-1]
    files = sum(path.stat().st_size for path in (result.path / entry["path"]).glob("*.safetensors"))
    return files, float(entry["measurements"]["kl_mean"])


def evaluation(options: argparse.Namespace) -> dict[str, Any]:
    """The key ``evaluate`` of a recipe."""
    test = {"data": options.test} if options.test else {}
    return {**test, "tokens": options.tokens, "speed": False, "answers": 0, "sample": ""}


def planned_row(size: int, rivals: list[Rival], options: argparse.Namespace) -> tuple[str, ...] | None:
    """The plan of a budget, run: a row of the table; None: there is none."""
    stem = f"{options.engine}-{options.method}-plan-{size}"
    path = options.out / f"{stem}.yaml"
    changes = [f"evaluate.{name}={value}" for name, value in evaluation(options).items() if name != "sample"]
    with own_history(options.out / "cache"):
        try:
            if not path.exists():
                attar.plan(
                    options.model, path, size=f"{size}B", method=options.method, data=options.data,
                    engine=options.engine, progress=False,
                )  # fmt: skip
            planned = attar.run(path, options.out / stem, overrides=changes, progress=False)
        except (UsageError, NumericsError) as error:  # nothing is that small; what was made is broken
            print(f"{size:,} bytes: {error.message}", file=sys.stderr)
            return None
    predicted, measured = (planned.content["recipe"][name] for name in ("predicted", "measured"))
    fitting = [rival for rival in rivals if rival.bytes <= size]
    best = min(fitting, key=lambda rival: rival.kl, default=None)
    return (
        f"{size:,}",
        f"{predicted['bytes']:,}",
        f"{measured['bytes']:,}",
        f"{predicted['kl']:.4g}",
        f"{predicted['kl_low']:.2g} to {predicted['kl_high']:.2g}",
        f"{measured['kl']:.4g}",
        "yes" if predicted["kl_low"] <= measured["kl"] <= predicted["kl_high"] else "no",
        f"{measured['kl'] / predicted['kl']:.2f}",
        best.name if best else "-",
        f"{best.kl:.4g}" if best else "-",
        f"{math.log(measured['kl'] / predicted['loss']):.2f}",
    )


@contextmanager
def own_history(cache: Path) -> Iterator[None]:
    """Within it attar's cache is this folder, with what was measured, but no history of plans."""
    kept = os.environ.get("ATTAR_CACHE")
    cache.mkdir(exist_ok=True)
    if not (cache / "kernels").exists():
        (cache / "kernels").symlink_to(kernels_folder())
    os.environ["ATTAR_CACHE"] = str(cache)
    (cache / "plans.jsonl").unlink(missing_ok=True)
    try:
        yield
    finally:
        if kept is None:
            del os.environ["ATTAR_CACHE"]
        else:
            os.environ["ATTAR_CACHE"] = kept


if __name__ == "__main__":
    main()
