"""``benchmarks/distill.py --parts real``: what a student of a real teacher keeps, after how much text.

A student learns in stages, each from where the one before ended, so that every point of the curve is a
finished training (the learning rate has come down), and all text counts. The teacher's predictions, stored
once for each row, are the same for all students. With ``prune=alps;sparsity=0.5`` the student is the teacher
with zeros, which stay. With ``--then W8A16 W4A16:64`` the last point is rounded, too.

The curve is kept(n) = a + b n^-c, n tokens learned from: a and b by least squares for each c of a grid; a is
what endless text would bring, if the curve holds that far, which few points far from it cannot show. All
text beyond the data's own length is text seen again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import quality
import torch
from prune_cells import markdown, number

from attar.checkpoint import Checkpoint, open_checkpoint
from attar.distillation.settings import distill_settings, recover_settings
from attar.distillation.stage import distill, recover
from attar.distillation.student_settings import StudentSettings
from attar.errors import AttarError
from attar.measure.evaluate import measure_quality
from attar.measure.reference import Reference, make_reference
from attar.measure.settings import EvaluateSettings
from attar.measure.subject import load_subject
from attar.progress import Terminal
from attar.pruning.settings import prune_settings
from attar.pruning.stage import prune
from attar.quantization.settings import quantize_settings
from attar.quantization.stage import quantize

STUDENTS = ("keep_layers=0.5;layer_map=influence",)
TRAINING: dict[str, Any] = {
    "batch_size": 8,
    "learning_rate": 1e-3,
    "min_lr_ratio": 0.02,
    "warmup": 0.1,
    "optimizer": "muon",
    "teacher_top": 64,
    "checkpoint_every": 4,
    "device": "cpu",
}
SHAPE = frozenset(option.name for option in fields(StudentSettings))  # settings of the first stage alone
ZEROS = frozenset(("prune", "sparsity"))  # the first stage is a pruning
SCORED = {"samples": 64, "sequence_length": 256}  # rows that a pruning reads
FARTHER = 10  # times the text, that the curve is asked for
_TITLE = re.compile(r"(?m)^ = [^=].*[^=] = $")


@dataclass(frozen=True)
class Point:
    """A point of a curve.

    Attributes:
        tokens: learned from.
        then: options of the rounding after it; empty: none.
        row: what was measured.
    """

    tokens: int
    then: str
    row: dict[str, Any]


@dataclass
class RealTeacher:
    """One teacher, the text, and the cells that are done.

    Attributes:
        cells: finished ones by key, in WORK/distill.jsonl.
    """

    args: argparse.Namespace
    checkpoint: Checkpoint
    cells: dict[str, dict[str, Any]]

    @cached_property
    def settings(self) -> EvaluateSettings:
        """The text that every student is measured on."""
        data = self.args.test or self.args.data
        return EvaluateSettings(
            data=data, tokens=self.args.tokens, speed=False, sample="", runner="transformers"
        )

    @cached_property
    def reference(self) -> Reference:
        """The teacher on that text."""
        return make_reference(self.checkpoint, self.settings, memory_limit=2**32)

    @cached_property
    def data(self) -> str:
        """The text to learn from; of WikiText an article a line, so that stages read them in orders of their
        own."""
        path = Path(self.args.data)
        if not path.is_file() or path.suffix != ".txt":
            return str(self.args.data)
        text, file = path.read_text(), self.args.work / f"{path.stem}.jsonl"
        starts = [0, *(match.start() for match in _TITLE.finditer(text)), len(text)]
        articles = [text[start:end] for start, end in pairwise(starts)]
        lines = [json.dumps({"text": article}) for article in articles if article.strip()]
        file.write_text("\n".join(lines) + "\n")
        return str(file)

    def key(self, student: str, seen: Sequence[int], then: str = "") -> str:
        """Everything that decides a cell."""
        common = {name: getattr(self.args, name) for name in ("data", "test", "tokens", "length")}
        model = quality.digest_of(self.checkpoint)
        key = {"part": "real", "model": model, **common, "seed": self.args.seeds[0]}
        rounded = {"then": then} if then else {}
        return json.dumps({**key, "student": student, "seen": list(seen), **rounded}, sort_keys=True)

    def measure(self, folder: Path) -> dict[str, Any]:
        """Perplexity, KL to the teacher and accuracy kept."""
        checkpoint = open_checkpoint(folder)
        result = measure_quality(load_subject(checkpoint), self.settings, self.reference)
        return {
            "parameters": elements(checkpoint),
            "bytes": checkpoint.nbytes,
            "perplexity": result.perplexity,
            "kl": result.kl_mean,
            "accuracy": result.accuracy,
            "kept": result.quality_kept,
        }


def real(args: argparse.Namespace) -> str:
    """A table for each student."""
    cells = quality.read_cache(args.work / "distill.jsonl")
    teacher = RealTeacher(args, open_checkpoint(args.teacher), cells)
    return "\n\n".join(
        student_table(teacher, student, curve_of(teacher, student)) for student in args.methods or STUDENTS
    )


def curve_of(teacher: RealTeacher, student: str) -> list[Point]:
    """The stages of a student, run where they are not done, and the last rounded: what each is, and its
    cell."""
    args, start = teacher.args, None
    points: list[Point] = []
    for stage, seen in enumerate(args.seen):
        out = args.work / f"{file_name(student)}-{seen}"
        tokens = seen - (args.seen[stage - 1] if stage else 0)
        works = {"": partial(train, teacher, student, start, out, stage=stage, tokens=tokens)}
        if seen == args.seen[-1]:
            works |= {then: partial(rounded, teacher, out, then) for then in args.then}
        for then, work in works.items():
            key = teacher.key(student, args.seen[: stage + 1], then)
            if key not in teacher.cells:
                if args.cached:
                    return points
                try:
                    row = work()
                except AttarError as error:
                    raise SystemExit(f"{student}, {seen:,} tokens: {error}") from None
                teacher.cells[key] = row
                quality.append_row(args.work / "distill.jsonl", {"key": json.loads(key), "found": row})
                print(f"{student}, {seen:,} tokens {then}: {row}", file=sys.stderr, flush=True)
            points.append(Point(seen, then, teacher.cells[key]))
        start = out
    return points


def rounded(teacher: RealTeacher, source: Path, then: str) -> dict[str, Any]:
    """What a point keeps in few bits."""
    settings = quantize_settings(data=teacher.args.data, **options_of(then))
    out = source.with_name(f"{source.name}-{file_name(then)}")
    began = time.monotonic()
    quantize(source, out, settings, progress=Terminal(), force=True)
    seconds = time.monotonic() - began
    return {"seconds": seconds, **teacher.measure(out)}


def train(
    teacher: RealTeacher, student: str, start: Path | None, out: Path, *, stage: int, tokens: int
) -> dict[str, Any]:
    """One stage, and what its student keeps."""
    args = teacher.args
    asked = options_of(student)
    shape = {name: value for name, value in asked.items() if name in SHAPE}
    options = training_of(asked, tokens=tokens, length=args.length)
    options |= {"seed": args.seeds[0] + stage, "data": teacher.data}
    common: dict[str, Any] = {"signal": args.work / "signal", "progress": Terminal(), "force": True}
    began = time.monotonic()
    if start is None and "prune" in asked:
        zeros = {"method": asked["prune"], "sparsity": asked["sparsity"], "data": args.data, **SCORED}
        made_of = json.dumps([quality.digest_of(teacher.checkpoint), zeros], sort_keys=True)
        start = args.work / f"zeros-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}"
        if not start.exists():
            prune(teacher.checkpoint, start, prune_settings(**zeros), progress=Terminal())
    if start is None:
        distill(teacher.checkpoint, out, distill_settings(**options, **shape), **common)
    else:
        recover(start, out, recover_settings(**options), teacher=teacher.checkpoint, **common)
    seconds = time.monotonic() - began
    return {"seconds": seconds, **teacher.measure(out)}


def training_of(asked: dict[str, Any], *, tokens: int, length: int) -> dict[str, Any]:
    """Settings of a stage that learns from so many tokens: :data:`TRAINING`, and what a method asks for."""
    options = TRAINING | {name: value for name, value in asked.items() if name not in SHAPE | ZEROS}
    if "features" in asked:
        del options["teacher_top"]  # intermediates are not kept
    return options | {"sequence_length": length, "steps": tokens // (options["batch_size"] * length)}


def options_of(text: str) -> dict[str, Any]:
    """The options of ``name=value;name=value``."""
    return typed(dict(option.split("=", 1) for option in text.split(";")))


def file_name(text: str) -> str:
    """Options as the name of a folder."""
    return re.sub("[^a-z0-9.]+", "-", text.lower())


def typed(options: dict[str, str]) -> dict[str, Any]:
    """Options with numbers as numbers, and features as a list."""
    values: dict[str, Any] = {
        name: int(value) if value.isdecimal() else float(value) if re.fullmatch(r"\d+\.\d+", value) else value
        for name, value in options.items()
    }
    if "features" in values:
        values["features"] = values["features"].split(",")
    return values


def elements(checkpoint: Checkpoint) -> int:
    """Stored parameters."""
    return sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())


def student_table(teacher: RealTeacher, student: str, points: Sequence[Point]) -> str:
    """The student after each number of tokens, and where its curve leads."""
    head = ["tokens", "MB", "perplexity", "KL, nats", "accuracy", "accuracy kept", "s"]
    forms = {"perplexity": ".2f", "kl": ".3f", "accuracy": ".1%", "kept": ".1%", "seconds": ".0f"}
    cells = []
    for point in points:
        row, then = point.row, f", then {point.then}" if point.then else ""
        size = f"{row['bytes'] / 1e6:.1f}" if "bytes" in row else "-"
        cells.append(
            [f"{point.tokens:,}{then}", size, *(number(row[name], form) for name, form in forms.items())]
        )
    share = ""
    if points:
        share = f", {points[0].row['parameters'] / elements(teacher.checkpoint):.1%} of the parameters"
    parts = [f"### {teacher.checkpoint.name} -> {student}{share}", markdown(head, cells)]
    trained = [point for point in points if not point.then]
    if len(trained) > 3:
        a, b, c = power_curve([point.tokens for point in trained], [point.row["kept"] for point in trained])
        far = FARTHER * trained[-1].tokens
        parts.append(f"kept(n) = {a:.3f} {b:+.3g} n^-{c:.2f}: at {far:,} tokens {a + b * far**-c:.1%}")
    return "\n\n".join(parts)


def power_curve(seen: Sequence[float], kept: Sequence[float]) -> tuple[float, float, float]:
    """a, b, c of the least squares of kept - (a + b n^-c) with a at most 1."""
    n, y = (torch.tensor(list(values), dtype=torch.float64) for values in (seen, kept))
    best = (float("inf"), 0.0, 0.0, 0.0)
    for step in range(1, 201):
        c = step / 100
        x = n**-c
        slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
        a = float(y.mean() - slope * x.mean())
        if a > 1.0:
            a, slope = 1.0, ((y - 1) * x).sum() / x.square().sum()
        error = float((y - a - slope * x).square().sum())
        best = min(best, (error, a, float(slope), c))
    return best[1:]
