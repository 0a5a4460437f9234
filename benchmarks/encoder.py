"""An encoder made a classifier, then distilled: what half its depth, or half its width, keeps.

    python benchmarks/encoder.py MODEL --data FOLDER [--work DIR] [--seeds 0 1] [--shape depth width]

MODEL is a bare encoder, such as all-MiniLM-L6-v2. FOLDER holds train.tsv, dev.tsv and test.tsv: SST-2. The
classifier is trained on the labels alone (``attar recover --alpha 0``), then every student sees the same
texts for as many steps; TinyBERT's two phases divide them. Accuracy on test.tsv is reported, that on dev.tsv
shown to choose by. Checkpoints stay under ``--work``; what is there already is used.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import attar
from attar.checkpoint.atomic import write_bytes
from attar.progress import Terminal

HINTON = {"alpha": 0.7, "temperature": 2.0}
STUDENTS: dict[str, tuple[dict[str, Any], ...]] = {
    "labels alone": ({"alpha": 0.0},),
    "Hinton": (HINTON,),
    "DistilBERT": ({**HINTON, "features": ("hidden-cosine:0.15",)},),
    "PKD": ({**HINTON, "features": ("patient:0.15",)},),
    "TinyBERT": (
        {"features": ("hidden", "attention-scores", "embeddings"), "objective": "none"},
        {"alpha": 1.0, "temperature": 1.0},
    ),
}
"""The losses of each student, one for each of its phases."""
SHAPES: dict[str, dict[str, Any]] = {
    "depth": {"layers": 3, "learning_rate": 1e-4},
    "width": {"heads": 6, "neurons": 768, "hidden": 192, "learning_rate": 3e-4},
}
"""Half of all-MiniLM-L6-v2: it has 6 layers, 12 heads, 1,536 neurons, 384 channels."""


@dataclass(frozen=True)
class Cell:
    """One student: a method, a shape, a seed."""

    method: str
    shape: str
    seed: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.shape}-{self.method.replace(' ', '-')}-{self.seed}".lower()


class Bench:
    """The texts, the common settings and the checkpoints."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.work = Path(args.work)
        self.common: dict[str, Any] = {
            "task": "classification",
            "data": str(args.data / "train.tsv"),
            "sequence_length": 64,
            "batch_size": 32,
            "warmup": 0.1,
            "min_lr_ratio": 0.02,
            "weight_decay": 0.01,
        }

    def train(self) -> Path:
        """The classifier, which teaches all students."""
        make = partial(attar.recover, self.args.model, alpha=0.0, learning_rate=1e-4)
        return self.cached("teacher", partial(make, steps=self.args.teacher_steps))

    def distill(self, cell: Cell) -> Path:
        """The student of a cell."""
        teacher = self.train()
        *first, last = STUDENTS[cell.method]
        steps = self.args.steps // (len(first) + 1)
        shape = dict(SHAPES[cell.shape])
        options = {"steps": steps, "seed": cell.seed, "learning_rate": shape.pop("learning_rate")}
        student = teacher
        for number, losses in enumerate([*first, last]):
            name = cell.name if losses is last else f"{cell.name}-phase{number + 1}"
            if number:
                make = partial(attar.recover, student, teacher=teacher, **losses, **options)
            else:
                make = partial(attar.distill, teacher, **shape, **losses, **options)
            student = self.cached(name, make)
        return student

    def cached(self, name: str, make: Callable[..., Any]) -> Path:
        """A checkpoint of the work folder, made where it is missing."""
        folder = self.work / name
        if not folder.exists():
            make(out=folder, progress=Terminal(), **self.common)
        return folder

    def accuracy(self, folder: Path, file: str) -> float:
        """Accuracy on all of a file, kept beside the checkpoint."""
        kept = self.work / "measured.json"
        known = json.loads(kept.read_text()) if kept.exists() else {}
        key = f"{folder.name} {file}"
        if key not in known:
            data = f"whole:{self.args.data / file}"
            measured = attar.evaluate(folder, data=data, speed=False, batch_size=64, sequence_length=64)
            known[key] = measured.accuracy
            write_bytes(kept, json.dumps(known, indent=1).encode())
        return float(known[key])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", default="runs/encoder")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--shape", nargs="+", default=["depth"], choices=list(SHAPES))
    parser.add_argument("--only", nargs="+", default=list(STUDENTS), choices=list(STUDENTS))
    parser.add_argument("--steps", type=int, default=390)
    parser.add_argument("--teacher-steps", type=int, default=585)
    parser.add_argument("--train", action="store_true", help="stop before the table")
    args = parser.parse_args()
    bench = Bench(args)
    cells = [Cell(*names) for names in itertools.product(args.only, args.shape, args.seeds)]
    folders = {cell: bench.distill(cell) for cell in cells}
    if not args.train:
        table(bench, folders)


def table(bench: Bench, folders: dict[Cell, Path]) -> None:
    """Print the accuracies, as markdown: the mean over seeds, and how far they lie apart."""
    print("| model | shape | parameters | dev | test | kept | seeds | spread of test |")
    print("|---|---|---|---|---|---|---|---|")
    teacher = bench.train()
    whole = bench.accuracy(teacher, "test.tsv")
    rows: dict[tuple[str, str], list[Path]] = {("classifier", "whole"): [teacher]}
    for cell, folder in folders.items():
        rows.setdefault((cell.method, cell.shape), []).append(folder)
    for (method, shape), members in rows.items():
        size = sum(math.prod(info.shape) for info in attar.open_checkpoint(members[0]).tensors.values()) / 1e6
        devs, tests = (
            [bench.accuracy(folder, file) for folder in members] for file in ("dev.tsv", "test.tsv")
        )
        dev, test = statistics.mean(devs), statistics.mean(tests)
        row = (method, shape, f"{size:.1f} M", f"{dev:.2%}", f"{test:.2%}", f"{test / whole:.1%}")
        print("| " + " | ".join((*row, str(len(members)), f"{max(tests) - min(tests):.2%}")) + " |")


if __name__ == "__main__":
    main()
