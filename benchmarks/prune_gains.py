"""Parts of ``benchmarks/prune.py`` about what zeros bring: decoding in attar's runtime, a recipe's size."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

from peers.launch import OURS, Method, RunnerError
from prune_cells import Bench, markdown, number

import attar

HERE = Path(__file__).parent
RECIPE = HERE.parent / "recipes" / "half-int8.yaml"
CASES = tuple(itertools.product(("S", "M"), ("int4", "bf16"), (1, 2)))  # shape, weights, threads
FIGURES = (("perplexity", ".2f"), ("kl_mean", ".4f"), ("quality_kept", ".1%"))


def speed(bench: Bench) -> str:
    """The lines of ``benchmarks/decode.py``: random models with 2:4 and 50 % zeros over dense ones."""
    lines = []
    for shape, weights, threads in CASES:
        case = {"shape": shape, "weights": weights, "threads": threads, "rounds": bench.args.rounds}
        key = {"part": "speed", "tool": OURS, "method": f"{shape} {weights}, {threads} threads", **case}
        command = decode_command(shape, weights, threads, bench.args.rounds)
        row = bench.cell(key, lambda command=command: {"lines": output_lines(command, bench.args.limit)})
        if row is not None:
            lines += [
                f"{threads} threads: {line}" for line in row.get("lines", [f"failed: {row.get('failed')}"])
            ]
    return "\n".join(f"    {line}" for line in lines)


def decode_command(shape: str, weights: str, threads: int, rounds: int) -> list[str]:
    """One case of ``benchmarks/decode.py``."""
    options = {"--shapes": [shape], "--weights": [weights], "--threads": [threads], "--rounds": [rounds]}
    options |= {"--sparsity": ["2:4", "50%"], "--tasks": ["decode 1"], "--peers": []}
    texts = [str(part) for name, values in options.items() for part in (name, *values)]
    return [sys.executable, str(HERE / "decode.py"), *texts]


def output_lines(command: list[str], limit: float) -> list[str]:
    """What a command prints after its first line.

    Raises:
        RunnerError: it failed, or took longer than the limit.
    """
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        raise RunnerError(f"no end within {limit:.0f} s") from None
    if ran.returncode:
        raise RunnerError((ran.stderr.strip() or "no output").splitlines()[-1])
    return ran.stdout.splitlines()[1:]


def recipe(bench: Bench) -> str:
    """Accuracy kept and size of each stage of recipes/half-int8.yaml, over the original in float32."""
    key = bench.key("recipe", Method(OURS, RECIPE.stem))
    row = bench.cell(key, lambda: run_recipe(bench))
    if row is None:
        return ""
    heading = f"### {bench.checkpoint.name}: recipes/{RECIPE.name}, {bench.args.tokens} held-out tokens"
    return f"{heading}\n\n" + (f"failed: {row['failed']}" if "failed" in row else stages_table(row["stages"]))


def changes(bench: Bench) -> list[str]:
    """What the command line changes in the recipe: the model and the texts."""
    args = bench.args
    result = [f"model={bench.checkpoint.path}", f"data={args.data}", f"evaluate.tokens={args.tokens}"]
    return [*result, *([f"evaluate.data={args.test}"] if args.test else [])]


def run_recipe(bench: Bench) -> dict[str, Any]:
    """Run the recipe; an earlier run that was killed goes on."""
    out = bench.args.work / f"{RECIPE.stem}-{bench.digest[:16]}"
    result = attar.run(RECIPE, out, overrides=changes(bench))
    return {"stages": result.content["stages"]}


def stages_table(stages: list[dict[str, Any]]) -> str:
    """A row for each stage; the size of the original in float32 over that of the stage."""
    float32 = 4 * stages[0]["measurements"]["parameters"]
    rows = []
    for stage in stages:
        measured = stage["measurements"]
        figures = [number(measured[name], form) for name, form in FIGURES]
        rows.append(
            [stage["name"], f"{stage['bytes'] / 1e6:.1f}", f"{float32 / stage['bytes']:.2f}x", *figures]
        )
    return markdown(["stage", "MB", "smaller than float32", "perplexity", "KL, nats", "accuracy kept"], rows)
