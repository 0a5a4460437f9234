"""``benchmarks/distill.py --parts objectives``: one student, trained with each objective on the same tokens.

The student has half of the teacher's layers. Its generations (64 after held-out prompts, at temperature 1)
are judged by the teacher: log-probability a token, and by themselves: repeated 4-grams, distinct 2-grams.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import attar
from attar.checkpoint.hashing import identity

METHODS: dict[str, dict[str, Any]] = {
    "hard": {"objective": "hard"},
    "hard, random init": {"objective": "hard", "init": "random"},
    "kl": {"objective": "kl"},
    "kl, random init": {"objective": "kl", "init": "random"},
    "kl + hard": {"objective": "kl", "alpha": 0.5},
    "kl, T 2": {"objective": "kl", "temperature": 2.0},
    "reverse-kl": {"objective": "reverse-kl"},
    "jsd 0.1": {"objective": "jsd", "beta": 0.1},
    "jsd 0.5": {"objective": "jsd", "beta": 0.5},
    "skew-kl": {"objective": "skew-kl"},
    "skew-reverse-kl": {"objective": "skew-reverse-kl"},
    "tv": {"objective": "tv"},
    "kl + hidden": {"objective": "kl", "features": ["hidden:0.1"]},
    "kl + patient": {"objective": "kl", "features": ["patient:0.1"]},
    "kl + relation": {"objective": "kl", "features": ["relation:0.1"]},
    "on-policy reverse-kl": {"objective": "reverse-kl", "student_generated": 0.5},
    "policy-gradient": {"objective": "policy-gradient", "student_generated": 1.0},
    "minillm": {"objective": "minillm", "student_generated": 1.0},
}
ROW = "| {} | {} | {} | {} | {} | {} | {} | {} |"
HEAD = ROW.format(
    "method",
    "KL",
    "perplexity",
    "accuracy kept",
    "teacher's score",
    "repeated 4-grams",
    "distinct 2-grams",
    "s",
)


def objectives(args: argparse.Namespace) -> str:
    """The table: mean over seeds, and the standard deviation with several."""
    lines = [HEAD, "|---|---|---|---|---|---|---|---|"]
    for name in args.methods or METHODS:
        cells = [cell for seed in args.seeds if (cell := run_cell(name, seed, args)) is not None]
        if cells:
            lines.append(row(name, cells))
    note = (
        f"{args.teacher}, half the layers, {args.steps} steps of {args.batch_size} x {args.length} tokens, "
        f"seeds {args.seeds}; KL in nats a token on {args.tokens:,} held-out tokens"
    )
    return "\n".join([note, "", *lines])


def run_cell(name: str, seed: int, args: argparse.Namespace) -> dict[str, Any] | None:
    """The figures of one student; trained unless its cell is there."""
    settings = {
        "steps": args.steps,
        "batch_size": args.batch_size,
        "sequence_length": args.length,
        "data": args.data,
        "seed": seed,
        **METHODS[name],
    }
    key = identity("distill-benchmark", 1, {**settings, "tokens": args.tokens}, [args.teacher, args.test])
    folder, file = args.work / f"student-{key}", args.work / f"{key}.json"
    if file.exists() and name not in args.again:
        return dict(json.loads(file.read_text())) | judged(folder, args)
    if args.cached:
        return None
    began = time.perf_counter()
    if not (folder / "attar.json").exists() or name in args.again:
        attar.distill(args.teacher, folder, force=True, **settings)
    seconds = time.perf_counter() - began
    numbers = attar.evaluate(
        folder, reference=args.teacher, data=args.test or args.data, tokens=args.tokens, speed=False
    ).to_dict()
    cell = {"method": name, "seed": seed, "seconds": seconds, **quality_of(numbers)}
    file.write_text(json.dumps(cell))
    print(cell, flush=True)
    return cell | judged(folder, args)


def quality_of(numbers: dict[str, Any]) -> dict[str, float]:
    """What the table shows of an evaluation."""
    return {key: float(numbers[key]) for key in ("kl_mean", "perplexity", "quality_kept")}


def judged(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """The judgement of what the student writes, kept beside it."""
    from distill_generations import judge

    file = folder.with_suffix(".generations.json")
    if not file.exists():
        file.write_text(json.dumps(judge(folder, args.teacher, args.test or args.data)))
    return dict(json.loads(file.read_text()))


def row(name: str, cells: list[dict[str, Any]]) -> str:
    """A line of the table."""
    keys = ("kl_mean", "perplexity", "quality_kept", "teacher_score", "repeated", "distinct", "seconds")
    digits = (4, 3, 4, 3, 3, 3, 0)
    shown = [spread([cell[key] for cell in cells], many) for key, many in zip(keys, digits, strict=True)]
    return ROW.format(name, *shown)


def spread(values: list[float], digits: int) -> str:
    """Mean, and standard deviation with several values."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.{digits}f}"
