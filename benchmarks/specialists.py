"""Three specialists of attar:tiny and what becomes of them when they are merged.

    python benchmarks/specialists.py [--work DIR] [--steps 200] [--train] [--budget 40] [--only NAME ...]

A specialist is attar:tiny trained on one part of Python's standard library. Files belong to the split that
their path's hash says (``attar.data.stdlib``), the same that attar:tiny was made with: specialists learn from
the training files of their part, greedy soup and the search of coefficients look at its calibration files,
the table is measured on its evaluation files, which nobody has seen. ``--train`` stops before the table.
Checkpoints stay under ``--work``; what is there already is used.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attar.checkpoint import Checkpoint, open_checkpoint
from attar.checkpoint.companions import copy_companions
from attar.checkpoint.output import produce
from attar.data import stdlib
from attar.data.packing import end_token, pack_stream, tokenize
from attar.models.load import load_model, load_tokenizer, save_model
from attar.progress import Progress, Terminal
from attar.walks.objectives import next_token
from attar.walks.settings import TrainSettings
from attar.walks.train import train

BASE = "attar:tiny"
PARTS = {
    "codecs": ("encodings/",),
    "concurrency": (
        "asyncio/",
        "concurrent/",
        "multiprocessing/",
        "queue.py",
        "selectors.py",
        "subprocess.py",
        "threading.py",
        "test/_test_multiprocessing.py",
        "test/test_asyncio/",
        "test/test_concurrent_futures",
        "test/test_threading.py",
    ),
    "interfaces": (
        "idlelib/",
        "tkinter/",
        "turtle.py",
        "turtledemo/",
        "test/test_tkinter",
        "test/test_ttk",
        "test/test_turtle",
    ),
}
"""A part is the files whose path inside the library begins so."""

VERSION = 1
LENGTH = 512
HELD_OUT_ROWS = 20  # of a part, at most: 10,240 tokens, so that each part counts about the same


def texts(part: str, split: str) -> list[str]:
    """The files of a part in one split, in the order of their paths."""
    return [text for name, text in stdlib.texts(split) if name.startswith(PARTS[part])]


def rows_of(part: str, split: str, tokenizer: Any, limit: int | None = None) -> Tensor:
    """Rows of tokens, int64 (N, 512)."""
    return pack_stream(tokenize(texts(part, split), tokenizer), LENGTH, end_token(tokenizer), limit)


def mean_loss(model: nn.Module, rows: Tensor) -> float:
    """Cross-entropy in nats a token."""
    with torch.no_grad():
        found = [float(next_token(model, row[None])) for row in rows]
    return sum(found) / len(found)


def settings_of(steps: int) -> TrainSettings:
    """How every specialist is trained."""
    return TrainSettings(
        steps=steps, batch_size=8, sequence_length=LENGTH, learning_rate=1e-3, evaluate_every=50, device="cpu"
    )


def specialist(part: str, out: Path, steps: int, progress: Progress) -> Checkpoint:
    """Train attar:tiny on one part; float32 weights. Takes up a killed run."""
    if (out / "config.json").exists():
        return open_checkpoint(out)
    base, settings = open_checkpoint(BASE), settings_of(steps)
    tokenizer = load_tokenizer(base)
    rows = rows_of(part, "train", tokenizer)
    shown = rows_of(part, "calibration", tokenizer, HELD_OUT_ROWS)
    written = {**asdict(settings), "part": part, "data": " ".join(PARTS[part])}
    with produce(
        out,
        stage="specialist",
        version=VERSION,
        settings=written,
        seed=settings.seed,
        parents=[(base, "weights")],
    ) as output:
        output.command = "python benchmarks/specialists.py --train"
        model = load_model(base, dtype=torch.float32)
        history = train(
            model,
            next_token,
            rows,
            settings,
            work=output.work / "train",
            held_out=lambda each: mean_loss(each, shown),
            progress=progress,
            what=part,
        )
        save_model(model.eval(), output.folder)
        copy_companions(base.path, output.folder)
        output.details["curve"] = history.curve
    return open_checkpoint(out)


def main() -> None:
    """Train, merge, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("specialists"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--train", action="store_true", help="train, and no more")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        made = specialist(part, args.work / part, args.steps, Terminal())
        print(part, made.path, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
