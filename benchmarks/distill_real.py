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
EMBEDDING_BITS = 8  # of what is rounded
FARTHER = 10  # times the text, that the curve is asked for
_TITLE = re.compile(r"(?m)^ = [^=].*[^=] = $")


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
        return " + ".join(map(self._articles, self.args.data.split(" + ")))

    def _articles(self, source: str) -> str:
        path = Path(source)
        if not path.is_file() or path.suffix != ".txt":
            return source
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


def curve_of(teacher: RealTeacher, student: str) -> list[tuple[int, dict[str, Any]]]:
    """The stages of a student, run where they are not done, and the last rounded: tokens learned from, and
    the cell."""
    args, start = teacher.args, None
    points: list[tuple[int, dict[str, Any]]] = []
    for stage, seen in enumerate(args.seen):
        out = args.work / f"{re.sub('[^a-z0-9]+', '-', student)}-{seen}"
        tokens = seen - (args.seen[stage - 1] if stage else 0)
        works = {"": partial(train, teacher, student, start, out, stage=stage, tokens=tokens)}
        if seen == args.seen[-1]:
            works |= {scheme: partial(rounded, teacher, out, scheme) for scheme in args.then}
        for then, work in works.items():
            key = teacher.key(student, args.seen[: stage + 1], then)
            if key not in teacher.cells:
                if args.cached:
                    return points
                try:
                    row = work()
                except AttarError as error:
                    raise SystemExit(f"{student}, {seen:,} tokens: {error}") from None
                teacher.cells[key] = row | {"then": then}
                quality.append_row(
                    args.work / "distill.jsonl", {"key": json.loads(key), "found": teacher.cells[key]}
                )
                print(f"{student}, {seen:,} tokens {then}: {row}", file=sys.stderr, flush=True)
            points.append((seen, teacher.cells[key]))
        start = out
    return points


def rounded(teacher: RealTeacher, source: Path, scheme: str) -> dict[str, Any]:
    """What a point keeps in few bits: 4 and fewer by GPTQ, more to nearest."""
    name, _, group = scheme.partition(":")
    method = "gptq" if int(name[1]) <= 4 else "rtn"
    settings = quantize_settings(
        scheme=name,
        group_size=int(group or 0),
        method=method,
        embedding_bits=EMBEDDING_BITS,
        data=teacher.args.data,
    )
    out = source.with_name(f"{source.name}-{name}")
    began = time.monotonic()
    quantize(source, out, settings, progress=Terminal(), force=True)
    seconds = time.monotonic() - began
    return {"seconds": seconds, **teacher.measure(out)}


def train(
    teacher: RealTeacher, student: str, start: Path | None, out: Path, *, stage: int, tokens: int
) -> dict[str, Any]:
    """One stage, and what its student keeps."""
    args = teacher.args
    options = TRAINING | {"sequence_length": args.length, "seed": args.seeds[0] + stage, "data": teacher.data}
    asked = typed(dict(option.split("=") for option in student.split(";")))
    shape = {name: value for name, value in asked.items() if name in SHAPE}
    options |= {name: value for name, value in asked.items() if name not in SHAPE | ZEROS}
    options["steps"] = tokens // (options["batch_size"] * args.length)
    if "features" in asked:
        del options["teacher_top"]  # intermediates are not kept
    common: dict[str, Any] = {"signal": args.work / "signal", "progress": Terminal(), "force": True}
    began = time.monotonic()
    if start is None and "prune" in asked:
        zeros = {"method": asked["prune"], "sparsity": asked["sparsity"], "data": args.data, **SCORED}
        start = args.work / f"{asked['prune']}-{asked['sparsity']}".replace(":", "-")
        if not start.exists():
            prune(teacher.checkpoint, start, prune_settings(**zeros), progress=Terminal())
    if start is None:
        distill(teacher.checkpoint, out, distill_settings(**options, **shape), **common)
    else:
        recover(start, out, recover_settings(**options), teacher=teacher.checkpoint, **common)
    seconds = time.monotonic() - began
    return {"seconds": seconds, **teacher.measure(out)}


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


def student_table(teacher: RealTeacher, student: str, rows: Sequence[tuple[int, dict[str, Any]]]) -> str:
    """The student after each number of tokens, and where its curve leads."""
    head = ["tokens", "MB", "perplexity", "KL, nats", "accuracy", "accuracy kept", "s"]
    forms = {"perplexity": ".2f", "kl": ".3f", "accuracy": ".1%", "kept": ".1%", "seconds": ".0f"}
    cells = []
    for seen, row in rows:
        name = f"{seen:,}, then {row['then']}" if row["then"] else f"{seen:,}"
        numbers = (number(row[name], form) for name, form in forms.items())
        cells.append([name, f"{row['bytes'] / 1e6:.1f}", *numbers])
    share = ""
    if rows:
        share = f", {rows[0][1]['parameters'] / elements(teacher.checkpoint):.1%} of the parameters"
    parts = [f"### {teacher.checkpoint.name} -> {student}{share}", markdown(head, cells)]
    rows = [(seen, row) for seen, row in rows if not row["then"]]
    if len(rows) > 3:
        a, b, c = power_curve([seen for seen, _ in rows], [row["kept"] for _, row in rows])
        far = FARTHER * rows[-1][0]
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
