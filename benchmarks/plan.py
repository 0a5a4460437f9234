"""How good plans are: predicted against measured, and against one scheme for all layers at the same bytes.

    python benchmarks/plan.py                                  # attar:tiny: six pairs, under an hour
    python benchmarks/plan.py --model ORG/NAME --schemes W3A16 W4A16 --out bench/plans
    python benchmarks/plan.py --method rtn                     # without calibration: minutes

For each scheme the uniform recipe is run, then a plan of at most its bytes. Runs are kept in ``--out``: what
is done is not done again. Predictions see no run of this benchmark, so that each is what a new user gets.

Prints, for each pair: bytes predicted and in the files, KL predicted with its interval and measured, KL of
the uniform recipe, ln(measured / loss), which is what the priors of planner/correction.py are made of.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

import attar
from attar.checkpoint.units import table
from attar.planner.settings import SCHEMES_OF

HEADER = (
    "bytes of",
    "predicted",
    "files",
    "KL",
    "90 %",
    "measured",
    "inside",
    "uniform",
    "ln(measured / loss)",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="attar:tiny")
    parser.add_argument("--method", default="gptq")
    parser.add_argument("--schemes", nargs="+", default=SCHEMES_OF["attar"], choices=SCHEMES_OF["attar"])
    parser.add_argument("--tokens", type=int, default=16384, help="held-out tokens")
    parser.add_argument("--out", type=Path, default=Path("bench/plans"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = [pair(scheme, options) for scheme in options.schemes]
    print(table(HEADER, rows, left=1))
    inside = sum(row[6] == "yes" for row in rows)
    better = sum(float(row[5]) < float(row[7]) for row in rows)
    print(f"\n{inside} of {len(rows)} inside, {better} of {len(rows)} below the uniform recipe of their size")


def pair(scheme: str, options: argparse.Namespace) -> tuple[str, ...]:
    """A uniform recipe and the plan of its bytes: a row of the table."""
    cache = options.out / f"cache-{options.method}-{scheme}"  # holds no history of the other pairs
    evaluate = f"{{tokens: {options.tokens}, speed: false, answers: 0, sample: ''}}"
    text = f"model: {options.model}\nevaluate: {evaluate}\nstages:\n- {{stage: quantize, scheme: {scheme}, "
    recipe = options.out / f"{options.method}-{scheme}-uniform.yaml"
    recipe.write_text(f"{text}method: {options.method}}}\n")
    uniform = attar.run(recipe, recipe.with_suffix(""))
    size, kl = bytes_and_kl(uniform)
    kept = os.environ.get("ATTAR_CACHE")
    os.environ["ATTAR_CACHE"] = str(cache)
    try:
        path = options.out / f"{options.method}-{scheme}-plan.yaml"
        if not path.exists():
            attar.plan(options.model, path, size=f"{size}B", method=options.method)
        changes = [f"evaluate.{name}" for name in (f"tokens={options.tokens}", "speed=false", "answers=0")]
        planned = attar.run(path, path.with_suffix(""), overrides=changes)
    finally:
        if kept is None:
            del os.environ["ATTAR_CACHE"]
        else:
            os.environ["ATTAR_CACHE"] = kept
    predicted, measured = (planned.content["recipe"][name] for name in ("predicted", "measured"))
    inside = predicted["kl_low"] <= measured["kl"] <= predicted["kl_high"]
    return (
        scheme,
        f"{predicted['bytes']:,}",
        f"{measured['bytes']:,}",
        f"{predicted['kl']:.4g}",
        f"{predicted['kl_low']:.2g} to {predicted['kl_high']:.2g}",
        f"{measured['kl']:.4g}",
        "yes" if inside else "no",
        f"{kl:.4g}",
        f"{math.log(measured['kl'] / predicted['loss']):.2f}",
    )


def bytes_and_kl(run: Any) -> tuple[int, float]:
    """Bytes of the weight files of a run's last stage, and its KL."""
    entry = run.content["stages"][-1]
    files = sum(path.stat().st_size for path in (run.path / entry["path"]).glob("*.safetensors"))
    return files, float(entry["measurements"]["kl_mean"])


if __name__ == "__main__":
    main()
