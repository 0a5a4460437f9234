"""What the defaults give at each width on SmolLM2-135M-Instruct: questions, size, speed, and one table.

    python benchmarks/real.py --parts tasks table [--questions 400] [--results W4 Q4_K_M ...]

``tasks`` makes each result as ``attar quantize`` and ``attar export`` do without a method, and measures it as
attar serves it: multiple-choice questions, stored bytes, decode speed, with perplexity and KL in exact
arithmetic. ``table`` joins that with the best peer's KL from the parts ``quality`` and ``gguf``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import export as gguf_files
import quality as packed
from real_quality import TYPES, dense, gguf_options, options, quality_options

import attar
from attar.checkpoint import open_checkpoint
from attar.measure.evaluate import evaluate, measure_quality
from attar.measure.reference import Reference, make_reference
from attar.measure.settings import EvaluateSettings
from attar.measure.subject import load_subject

SETS = ("ARC-Easy", "ARC-Challenge", "piqa")
PUBLISHED = {"ARC-Easy": 54.1, "ARC-Challenge": 27.7, "piqa": 66.9}  # of the bf16 original
NORMED = ("ARC-Challenge", "piqa")  # published as acc_norm


@dataclass(frozen=True)
class Result:
    """A row: how it is made from the dense model.

    Attributes:
        name: of the row.
        verb: quantize or export; empty: the model itself.
        settings: of the verb.
        cell: the scheme or the type under which the peers' cells are kept.
    """

    name: str
    verb: str
    settings: dict[str, Any]
    cell: str


RESULTS = (
    Result("original", "", {}, ""),
    *(
        Result(f"W{bits}", "quantize", {"scheme": f"W{bits}A16", "group_size": 64}, f"W{bits}:64")
        for bits in (8, 4, 3, 2)
    ),
    *(Result(kind, "export", {"format": "gguf", "type": kind, "imatrix": "compute"}, kind) for kind in TYPES),
)


def make(result: Result, args: argparse.Namespace) -> Path:
    """The checkpoint of a row, made once in the work folder with the settings that a user gets."""
    if not result.verb:
        return dense(args)
    calibration = {"data": args.valid, "samples": args.samples, "sequence_length": args.length}
    if result.verb == "quantize":
        calibration["check_tokens"] = 0
    folder = args.work / "results" / f"{result.name}-{sha256_text(result.settings | calibration)[:12]}"
    if not folder.exists():
        getattr(attar, result.verb)(dense(args), folder, **calibration, **result.settings)
    return folder


def sha256_text(value: Any) -> str:
    """Of the JSON of a value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def served(model: Path, args: argparse.Namespace) -> dict[str, Any]:
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


def exact(model: Path, args: argparse.Namespace, reference: Reference | None) -> dict[str, Any]:
    """Perplexity, KL and quality kept in float32 on decoded weights."""
    settings = exact_settings(args)
    quality = measure_quality(load_subject(open_checkpoint(model)), settings, reference)
    return {"kl": quality.kl_mean, "perplexity": quality.perplexity, "kept": quality.quality_kept}


def exact_settings(args: argparse.Namespace) -> EvaluateSettings:
    """The text that every other part is measured on."""
    return EvaluateSettings(data=args.test, tokens=args.tokens, speed=False, sample="")


def rows(args: argparse.Namespace, wanted: list[str], fill: bool) -> dict[str, dict[str, Any]]:
    """The measurements of each result by name, from the cache or, with ``fill``, made now."""
    cache = args.work / "tasks.jsonl"
    kept = {row["key"]: row["found"] for row in packed.read_rows(cache)}
    reference, results = None, {}
    for result in RESULTS:
        if wanted and result.name not in wanted:
            continue
        key = sha256_text(
            [result.name, result.settings, args.samples, args.length, args.tokens, args.questions]
        )
        if key not in kept and fill:
            model = make(result, args)
            reference = reference or make_reference(dense(args), exact_settings(args), memory_limit=2**31)
            kept[key] = {**served(model, args), **exact(model, args, reference)}
            packed.append_row(cache, {"key": key, "result": result.name, "found": kept[key]})
        if key in kept:
            results[result.name] = kept[key]
    return results


def tasks(rest: list[str]) -> str:
    """The questions, as attar serves each result, with the published figures of the original."""
    args, wanted = asked(rest)
    lines = [f"| result | {' | '.join(SETS)} |", "|---|" + "---:|" * len(SETS)]
    lines.append(f"| published, bf16 | {' | '.join(f'{PUBLISHED[name]:.1f}' for name in SETS)} |")
    for name, row in rows(args, wanted, fill=True).items():
        scores = (row["tasks"][one] for one in SETS)
        lines.append(f"| {name} | {' | '.join(f'{100 * s:.1f} ± {100 * e:.1f}' for s, e in scores)} |")
    return "\n".join(lines)


def table(rest: list[str]) -> str:
    """One row a result, for the head of the README; reads what the other parts left."""
    args, wanted = asked(rest)
    best = {**best_packed(args), **best_gguf(args)}
    whole = open_checkpoint(dense(args)).nbytes
    lines = [
        "<!-- table:real -->",
        "| SmolLM2-135M | MB | smaller | perplexity | quality kept | KL, nats | best peer's KL | ARC-easy |",
        "|---|" + "---:|" * 7,
    ]
    cells = {result.name: result.cell for result in RESULTS}
    for name, row in rows(args, wanted, fill=False).items():
        theirs = best.get(cells[name])
        lines.append(
            f"| {name} | {row['bytes'] / 1e6:.1f} | {whole / row['bytes']:.1f}x "
            f"| {row['perplexity']:.2f} | {100 * row['kept']:.1f} % | {row['kl']:.3f} "
            f"| {'–' if theirs is None else f'{theirs[1]:.3f} ({theirs[0]})'} "
            f"| {100 * row['tasks']['ARC-Easy'][0]:.1f} |"
        )
    return "\n".join([*lines, "<!-- end -->"])


def asked(rest: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of the parts, and which results."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--results", nargs="+", default=[])
    own, others = parser.parse_known_args(rest)
    return options(others), own.results


def best_packed(args: argparse.Namespace) -> dict[str, tuple[str, float]]:
    """(tool and method, KL) of the best peer by scheme."""
    best: dict[str, tuple[str, float]] = {}
    for text, cell in packed.read_cache(quality_options(args).cache).items():
        key = json.loads(text)
        if "failed" in cell or key["tool"] == packed.OURS:
            continue
        if any(key[name] != getattr(args, name) for name in ("samples", "length", "tokens")):
            continue
        if key["scheme"] not in best or cell["kl"] < best[key["scheme"]][1]:
            best[key["scheme"]] = (f"{key['tool']} {key['method']}", cell["kl"])
    return best


def best_gguf(args: argparse.Namespace) -> dict[str, tuple[str, float]]:
    """The same by type: llama.cpp's."""
    best: dict[str, tuple[str, float]] = {}
    for text, cell in gguf_files.read_cache(gguf_options(args).cache).items():
        _, kind, tool, method, *measured = json.loads(text)
        if tool != gguf_files.PEER or measured[:3] != [args.samples, args.length, args.tokens]:
            continue
        if kind not in best or cell["kl"] < best[kind][1]:
            best[kind] = (f"llama.cpp {method}", cell["kl"])
    return best
