"""Three specialists of attar:tiny and what becomes of them when they are merged.

    python benchmarks/specialists.py [--work DIR] [--steps 200] [--train] [--budget 40] [--only NAME ...]

A specialist is attar:tiny trained on one part of Python's standard library. Files belong to the split that
their path's hash says (attar.data.splits), the same that attar:tiny was made with: specialists learn from
the training files of their part, greedy soup and the search of coefficients look at its calibration files,
the table is measured on its evaluation files, held out from training. ``--train`` stops before the table.
Checkpoints stay under ``--work``; what is there already is used.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import attar
from attar.checkpoint import Checkpoint, open_checkpoint
from attar.checkpoint.companions import copy_companions
from attar.checkpoint.output import produce
from attar.data import python_text
from attar.data.packing import end_token, pack_stream, tokenize
from attar.models.loading.load import load_model, load_tokenizer, save_model
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
JUDGED_ROWS = 8  # of a part: what greedy soup and search look at


def texts(part: str, split: str) -> list[str]:
    """The files of a part in one split, in the order of their paths."""
    return [text for name, text in python_text.texts(split) if name.startswith(PARTS[part])]


def rows_of(part: str, split: str, tokenizer: Any, limit: int | None = None) -> Tensor:
    """Rows of tokens, int64 (N, 512); with a limit that many, spread evenly over all of them."""
    rows = pack_stream(tokenize(texts(part, split), tokenizer), LENGTH, end_token(tokenizer))
    if limit is None or len(rows) <= limit:
        return rows
    return rows[torch.arange(limit) * len(rows) // limit]


def mean_loss(model: nn.Module, rows: Tensor) -> float:
    """Cross-entropy in nats a token."""
    with torch.no_grad():
        losses = [float(next_token(model, row[None])) for row in rows]
    return sum(losses) / len(losses)


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
    with produce(out, "specialist", written, VERSION, [base]) as output:
        output.command = "python benchmarks/specialists.py --train"
        model = load_model(base, dtype=torch.float32)
        history = train(
            model,
            next_token,
            rows,
            settings,
            work=output.work / "train",
            held_out=lambda model: mean_loss(model, shown),
            progress=progress,
            what=part,
        )
        save_model(model.eval(), output.folder)
        copy_companions(base.path, output.folder)
        output.details["curve"] = history.curve
    return open_checkpoint(out)


def weighted(method: str, parts: tuple[str, ...] = tuple(PARTS), **config: Any) -> dict[str, Any]:
    """A merge's configuration: every model with the parameters in ``each``, with the rest of the keys."""
    changes = config.pop("each", {})
    models = [{"model": part, **({"parameters": changes} if changes else {})} for part in parts]
    return {"merge_method": method, "dtype": "float32", "models": models, **config}


def merges(budget: int) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Every merge by its name: configuration, and settings of the stage."""
    base = {"base_model": "base"}
    configs: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "linear (uniform soup)": (weighted("linear", each={"weight": 1.0}), {}),
    }
    for one, other in itertools.combinations(PARTS, 2):
        config = weighted("slerp", (one, other), base_model=one, parameters={"t": 0.5})
        configs[f"slerp {one}, {other}"] = (config, {})
    configs |= {
        "karcher": (weighted("karcher"), {}),
        "task arithmetic 0.5": (weighted("task_arithmetic", each={"weight": 0.5}, **base), {}),
        "task arithmetic 0.7": (weighted("task_arithmetic", each={"weight": 0.7}, **base), {}),
        "TIES": (weighted("ties", each={"weight": 1.0, "density": 0.5}, **base), {}),
        "TIES, paper": (weighted("ties", each={"weight": 1.0, "density": 0.2}, **base), {"compat": "paper"}),
        "DARE-TIES": (weighted("dare_ties", each={"weight": 0.7, "density": 0.5}, **base), {}),
        "DELLA": (weighted("della", each={"weight": 1.0, "density": 0.5}, **base), {}),
        "breadcrumbs": (weighted("breadcrumbs", each={"weight": 0.5, "density": 0.9}, **base), {}),
        "SCE": (weighted("sce", **base, parameters={"select_topk": 0.5}), {}),
        "model stock": (weighted("model_stock", **base), {}),
        "greedy soup": (weighted("greedy_soup"), {}),
    }
    if budget:
        config = weighted("task_arithmetic", each={"weight": 0.5}, **base)
        configs[f"task arithmetic, search of {budget}"] = (config, {"search": budget})
        config = weighted("ties", each={"weight": 1.0, "density": 0.5}, **base)
        configs[f"TIES, search of {budget}"] = (config, {"search": budget})
    return configs


def write_judged(file: Path, tokenizer: Any) -> int:
    """The text that greedy soup and search look at, as many calibration rows of each part; how many rows."""
    lines = []
    for part in PARTS:
        for row in rows_of(part, "calibration", tokenizer, JUDGED_ROWS):
            lines.append(json.dumps({"text": tokenizer.decode(row.tolist()), "part": part}))
    file.write_text("\n".join(lines) + "\n")
    return len(lines)


def merged(name: str, config: dict[str, Any], settings: dict[str, Any], work: Path) -> Checkpoint:
    """Make a merge, or open it where it is there already."""
    out = work / "merges" / re.sub(r"\W+", "-", name)
    if (out / "attar.json").exists():
        return open_checkpoint(out)
    models = {"base": BASE, **{part: str(work / part) for part in PARTS}}
    if settings.get("search") or config["merge_method"] == "greedy_soup":
        judged = work / "judged.jsonl"
        samples = write_judged(judged, load_tokenizer(BASE))
        settings = {**settings, "data": str(judged), "samples": samples, "sequence_length": LENGTH}
    return attar.merge(config, out, models=models, progress=Terminal(), **settings)


def measured(model: Checkpoint, rows: dict[str, Tensor]) -> dict[str, float]:
    """Loss on each part, and their mean."""
    loaded = load_model(model, dtype=torch.float32)
    losses = {part: mean_loss(loaded, tokens) for part, tokens in rows.items()}
    return {**losses, "mean": sum(losses.values()) / len(losses)}


def table(rows: dict[str, dict[str, float]]) -> str:
    """Markdown: nats a token, with the perplexity of the mean loss; the smallest of a column is bold."""
    columns = [*PARTS, "mean"]
    best = {column: min(losses[column] for losses in rows.values()) for column in columns}
    lines = [f"| model | {' | '.join(columns)} | perplexity |", "|---" * (len(columns) + 2) + "|"]
    for name, losses in rows.items():
        cells = [
            f"**{losses[column]:.4f}**" if losses[column] == best[column] else f"{losses[column]:.4f}"
            for column in columns
        ]
        lines.append(f"| {name} | {' | '.join(cells)} | {math.exp(losses['mean']):.3f} |")
    return "\n".join(lines)


def arguments() -> argparse.ArgumentParser:
    """What the command line takes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("specialists"), help="folder for checkpoints; kept")
    parser.add_argument("--steps", type=int, default=200, help="of each specialist's training")
    parser.add_argument("--train", action="store_true", help="train, and no more")
    parser.add_argument("--budget", type=int, default=40, help="merges that a search tries; 0: no search")
    parser.add_argument("--only", nargs="+", help="merges by their names in the table; base and parents stay")
    return parser


def main() -> None:
    """Train, merge, print the table."""
    args = arguments().parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    parents = {part: specialist(part, args.work / part, args.steps, Terminal()) for part in PARTS}
    if args.train:
        return
    wanted = merges(args.budget)
    if unknown := sorted(set(args.only or ()) - set(wanted)):
        raise SystemExit(f"no merge {unknown[0]!r}; there are {', '.join(wanted)}")
    base = open_checkpoint(BASE)
    rows = {part: rows_of(part, "evaluation", load_tokenizer(base), HELD_OUT_ROWS) for part in PARTS}
    results = {"base": measured(base, rows)}
    results |= {f"specialist: {part}": measured(parent, rows) for part, parent in parents.items()}
    for name, (config, settings) in wanted.items():
        if args.only and name not in args.only:
            continue
        results[name] = measured(merged(name, config, settings, args.work), rows)
        print(f"{name}: {results[name]}", file=sys.stderr, flush=True)
    tokens = ", ".join(f"{part} {row.numel():,}" for part, row in rows.items())
    print(f"Nats a token on held-out files; tokens: {tokens}.\n\n{table(results)}")


if __name__ == "__main__":
    main()
