"""What the defaults give at each width on SmolLM2-135M-Instruct: questions, size, speed, and one table.

    python benchmarks/real.py --parts tasks table [--questions 400] [--seeds 0 1 2] [--results W4 Q4_K_M ...]

``tasks`` makes each result as ``attar quantize`` and ``attar export`` do without a method, and measures it as
attar serves it: multiple-choice questions, stored bytes, decode speed, with perplexity and KL in exact
arithmetic: the file that the model comes in, its decoding to bf16, and each result once for every seed of
the calibration rows. ``table`` joins that with the best peer's KL from the parts ``quality`` and ``gguf``.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import export as gguf_files
import quality as packed
from real_quality import MODEL, TYPES, dense, gguf_options, options, quality_options

import attar
from attar.checkpoint import open_checkpoint
from attar.measure.evaluate import Quality, evaluate, measure_quality
from attar.measure.reference import Reference, make_reference
from attar.measure.settings import EvaluateSettings
from attar.measure.subject import load_subject

SETS = ("ARC-Easy", "ARC-Challenge", "piqa")
PUBLISHED = {"ARC-Easy": 54.1, "ARC-Challenge": 27.7, "piqa": 66.9}  # of the bf16 original
NORMED = ("ARC-Challenge", "piqa")  # published as acc_norm
Best = tuple[str, list[float]]  # tool and method, KL of each seed


@dataclass(frozen=True)
class Result:
    """A row: how it is made from the dense model.

    Attributes:
        name: of the row.
        verb: quantize or export; empty: the model itself, as its file or decoded to bf16.
        settings: of the verb.
        cell: the scheme or the type under which the peers' cells are kept.
    """

    name: str
    verb: str
    settings: dict[str, Any]
    cell: str


SOURCE = Result("Q4_1, the file itself", "", {}, "")
RESULTS = (
    SOURCE,
    Result("decoded to bf16", "", {}, ""),
    *(
        Result(f"W{bits}", "quantize", {"scheme": f"W{bits}A16", "group_size": 64}, f"W{bits}:64")
        for bits in (8, 4, 3, 2)
    ),
    *(Result(kind, "export", {"format": "gguf", "type": kind, "imatrix": "compute"}, kind) for kind in TYPES),
)


def make(result: Result, args: argparse.Namespace, seed: int) -> str | Path:
    """The checkpoint of a row, made once in the work folder with the settings that a user gets."""
    if not result.verb:
        return MODEL if result is SOURCE else dense(args)
    calibration = {"data": args.valid, "samples": args.samples, "sequence_length": args.length, "seed": seed}
    if result.verb == "quantize":
        calibration["check_tokens"] = 0
    folder = args.work / "results" / f"{result.name}-{sha256_text(result.settings | calibration)[:12]}"
    if not folder.exists():
        getattr(attar, result.verb)(dense(args), folder, **calibration, **result.settings)
    return folder


def sha256_text(value: Any) -> str:
    """Of the JSON of a value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def served(model: str | Path, args: argparse.Namespace) -> dict[str, Any]:
    """Questions, bytes and decode speed of a checkpoint in the runner that serves it."""
    questions = tuple(str(args.data / "choices" / f"{name}.test.jsonl") for name in SETS)
    settings = EvaluateSettings(
        data=args.test, tokens=512, sample="", runner="auto", tasks=questions, tasks_limit=args.questions
    )
    measured = evaluate(model, settings)
    scores = {}
    for name, task in zip(SETS, measured.tasks, strict=True):
        kind = "acc_norm" if name in NORMED else "acc"
        scores[name] = [getattr(task, kind), getattr(task, f"{kind}_stderr")]
    return {"tasks": scores, "bytes": measured.bytes, "decode": measured.decode_tokens_per_s}


def exact(model: str | Path, args: argparse.Namespace, reference: Reference | None) -> dict[str, Any]:
    """Perplexity, KL and quality kept in float32 on decoded weights."""
    settings = exact_settings(args)
    quality = measure_quality(load_subject(open_checkpoint(model)), settings, reference)
    return {
        "kl": quality.kl_mean,
        "perplexity": quality.perplexity,
        "kept": quality.quality_kept,
        "kept_error": kept_error(quality),
    }


def kept_error(quality: Quality) -> float:
    """The largest standard error that the share of quality kept can have by the choice of tokens: hits differ
    by at most one, and only at tokens where the two models' likeliest tokens do."""
    assert quality.accuracy and quality.quality_kept and quality.top1_agreement is not None
    disagreement = 1 - quality.top1_agreement
    return math.sqrt(disagreement / quality.tokens) * quality.quality_kept / quality.accuracy


def exact_settings(args: argparse.Namespace) -> EvaluateSettings:
    """The text that every other part is measured on."""
    return EvaluateSettings(data=args.test, tokens=args.tokens, speed=False, sample="")


def rows(args: argparse.Namespace, wanted: list[str], fill: bool) -> dict[str, list[dict[str, Any]]]:
    """The measurements of each result by name, one a seed, from the cache or, with ``fill``, made now."""
    cache = args.work / "tasks.jsonl"
    kept = {row["key"]: row["found"] for row in packed.read_rows(cache)}
    asked_of = [args.samples, args.length, args.tokens, args.questions]
    reference, results = None, {}
    for seed, result in itertools.product(args.seeds, RESULTS):
        if (wanted and result.name not in wanted) or (seed != args.seeds[0] and not result.verb):
            continue
        key = sha256_text([result.name, result.settings, seed if result.verb else None, *asked_of])
        if key not in kept and fill:
            model = make(result, args, seed)
            reference = reference or make_reference(dense(args), exact_settings(args), memory_limit=2**31)
            kept[key] = {**served(model, args), **exact(model, args, reference)}
            packed.append_row(cache, {"key": key, "result": result.name, "seed": seed, "found": kept[key]})
            print(f"{result.name} seed {seed}: {kept[key]}", file=sys.stderr, flush=True)
        if key in kept:
            results.setdefault(result.name, []).append(kept[key])
    return {result.name: results[result.name] for result in RESULTS if result.name in results}


def score(seeds: list[dict[str, Any]], name: str) -> str:
    """Percent of a set of questions: the mean of the seeds, with the standard error of one: they share the
    questions."""
    right, error = (statistics.fmean(row["tasks"][name][part] for row in seeds) for part in (0, 1))
    return f"{100 * right:.1f} ± {100 * error:.1f}"


def tasks(rest: list[str]) -> str:
    """The questions, as attar serves each result, with the published figures of the original."""
    args, wanted = asked(rest)
    lines = [f"| result | {' | '.join(SETS)} |", "|---|" + "---:|" * len(SETS)]
    lines.append(f"| published, bf16 | {' | '.join(f'{PUBLISHED[name]:.1f}' for name in SETS)} |")
    for name, seeds in rows(args, wanted, fill=True).items():
        lines.append(f"| {name} | {' | '.join(score(seeds, questions) for questions in SETS)} |")
    return "\n".join(lines)


def table(rest: list[str]) -> str:
    """One row a result, for the head of the README, the mean of the seeds with the lowest and the highest;
    reads what the other parts left."""
    args, wanted = asked(rest)
    best = {**best_packed(args), **best_gguf(args)}
    whole = open_checkpoint(dense(args)).nbytes
    lines = [
        "<!-- table:real -->",
        "| SmolLM2-135M | MB | smaller than bf16 | perplexity | quality kept | KL, nats | best peer's KL "
        "| ARC-easy |",
        "|---|" + "---:|" * 7,
    ]
    cells = {result.name: result.cell for result in RESULTS}
    for name, seeds in rows(args, wanted, fill=False).items():
        values = {key: [row[key] for row in seeds] for key in seeds[0] if key != "tasks"}
        size, kept, error = (statistics.fmean(values[key]) for key in ("bytes", "kept", "kept_error"))
        label, theirs = best.get(cells[name], ("", []))
        cell = f"{packed.spread(theirs, '.3f')} {label}" if theirs else "–"
        lines.append(
            f"| {name} | {size / 1e6:.1f} | {whole / size:.1f}x "
            f"| {packed.spread(values['perplexity'], '.2f')} | {100 * kept:.1f} ± {100 * error:.1f} % "
            f"| {packed.spread(values['kl'], '.3f')} | {cell} | {score(seeds, 'ARC-Easy')} |"
        )
    return "\n".join([*lines, "<!-- end -->"])


def asked(rest: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of the parts, and which results."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--results", nargs="+", default=[])
    own, others = parser.parse_known_args(rest)
    return options(others), own.results


def best_packed(args: argparse.Namespace) -> dict[str, Best]:
    """The best peer by scheme."""
    seeds: dict[tuple[str, str], list[float]] = {}
    for text, cell in packed.read_cache(quality_options(args).cache).items():
        key = json.loads(text)
        if "failed" in cell or key["tool"] == packed.OURS:
            continue
        if any(key[name] != getattr(args, name) for name in ("samples", "length", "tokens")):
            continue
        if key["seed"] in args.seeds and key.get("iterations", args.iterations) == args.iterations:
            seeds.setdefault((key["scheme"], f"{key['tool']} {key['method']}"), []).append(cell["kl"])
    return best_of(seeds)


def best_of(seeds: dict[tuple[str, str], list[float]]) -> dict[str, Best]:
    """By the first of (scheme or type, tool and method), which of the second has the least KL in the mean."""
    best: dict[str, Best] = {}
    for (cell, label), values in sorted(seeds.items(), key=lambda row: statistics.fmean(row[1])):
        best.setdefault(cell, (label, values))
    return best


def best_gguf(args: argparse.Namespace) -> dict[str, Best]:
    """The same by type: llama.cpp's."""
    seeds: dict[tuple[str, str], list[float]] = {}
    for text, cell in gguf_files.read_cache(gguf_options(args).cache).items():
        _, kind, tool, method, seed, *measured = json.loads(text)
        if tool != gguf_files.LLAMA_CPP or measured[:3] != [args.samples, args.length, args.tokens]:
            continue
        if seed in args.seeds:
            seeds.setdefault((kind, f"llama.cpp {method}"), []).append(cell["kl"])
    return best_of(seeds)
