"""``attar list [DIR]``: the results below a folder, with what they were made of and what they lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attar.checkpoint.card import FILE, Card
from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.readme import root_names
from attar.checkpoint.units import bytes_text, table
from attar.cli.command import Answer, build_command, optional_argument
from attar.errors import AttarError, UsageError
from attar.progress import Progress

WEIGHTS = (".safetensors", ".gguf")
DEPTH = 4
"""Folders below the given one that are looked into."""


def build_list(verb: str) -> Any:
    """The command."""
    parameters = [optional_argument("folder", "where to look, four folders deep", "DIR", ".")]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        folder = Path(values["folder"])
        if not folder.is_dir():
            raise UsageError(f"{folder}: is no folder", hint="attar list runs")
        rows = [_row(folder, path, card) for path, card in cards(folder)]
        return Answer({"results": rows}, _text(rows))

    help = "List the results below a folder: what each was made of, its size and what it lost."
    return build_command(verb, help, "attar list runs", parameters, act)


def cards(folder: Path) -> Iterator[tuple[Path, Card]]:
    """Each result with a card, a folder or a single file, sorted by path; hidden folders are left out, and so
    are damaged cards."""
    for path in sorted(folder.glob(f"**/*{FILE}")):
        steps = path.relative_to(folder).parts
        if len(steps) > DEPTH + 1 or any(step.startswith(".") for step in steps):
            continue
        try:
            yield (path.parent if path.name == FILE else _single(path)), Card.from_dict(read_json(path), path)
        except AttarError:
            continue


def _single(card: Path) -> Path:
    """``NAME.attar.json`` -> ``NAME.gguf``."""
    return card.with_name(card.name.removesuffix(f".{FILE}") + ".gguf")


def _row(folder: Path, result: Path, card: Card) -> dict[str, Any]:
    files = [result] if result.is_file() else [file for file in result.glob("*") if file.suffix in WEIGHTS]
    return {
        "result": str(result.relative_to(folder)) if result != folder else result.resolve().name,
        "stage": card.stage,
        "made_of": list(dict.fromkeys(root_names(card.parents))),
        "bytes": sum(file.stat().st_size for file in files),
        "kl_mean": card.measurements.get("kl_mean"),
    }


def _text(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "no results of attar here"
    cells = [
        (
            row["result"],
            row["stage"],
            ", ".join(row["made_of"]) or "-",
            bytes_text(row["bytes"]),
            "-" if row["kl_mean"] is None else f"{row['kl_mean']:.3g}",
        )
        for row in rows
    ]
    return table(("result", "stage", "made of", "size", "KL, nats"), cells, 3)
