"""``attar sweep``: one recipe with several values of its settings, every combination a run.

SWEEP/sweep.json         the variants with their measurements, and which of them are on the front
SWEEP/runs/NAME/         a run each (``run.py``); equal stages are made once and linked
SWEEP/journal.jsonl      what became of each task
SWEEP/report.html        one table and one picture, pareto.svg
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attar.checkpoint.atomic import write_json
from attar.checkpoint.card import plain as jsonable
from attar.checkpoint.hashing import sha256_text
from attar.checkpoint.jsonfile import read_json
from attar.cluster.settings import ClusterSettings
from attar.cluster.tasks import Workers
from attar.errors import CheckpointError, OutputError, RecipeError
from attar.progress import SILENT, Progress
from attar.recipe.run import Tools
from attar.recipe.runfolder import locked
from attar.recipe.schema import load_recipe
from attar.recipe.variants import RunVariant, VariantResult, run_variants

if TYPE_CHECKING:
    import pandas

    from attar.measure.sweep import SweepRecord

SWEEP, RUNS = "sweep.json", "runs"
MOST = 1000
"""Runs of a sweep."""

_UNSAFE = re.compile(r"[^A-Za-z0-9=+.,_-]+")


@dataclass(frozen=True, repr=False)
class SweepOutcome:
    """A finished sweep: its folder and ``sweep.json``."""

    path: Path
    record: SweepRecord
    failed: int

    @property
    def report(self) -> Path:
        """The path of the report."""
        return self.path / "report.html"

    def to_frame(self) -> pandas.DataFrame:
        """The measurements, a row per run that was measured, the original first."""
        from attar.measure.notebook import frame, run_frame

        run = self.record.as_run()
        return frame({}) if run is None else run_frame(run)

    def __repr__(self) -> str:
        failed = f", {self.failed} failed" if self.failed else ""
        return f"SweepOutcome({str(self.path)!r}: {len(self.record.runs)} runs{failed})"

    def _repr_html_(self) -> str:
        from attar.measure.notebook import run_html
        from attar.measure.sweep import pareto_front

        run = self.record.as_run()
        return escape(repr(self)) if run is None else run_html(run, pareto_front(run.stages[1:]))

    def to_dict(self) -> dict[str, Any]:
        """``sweep.json`` with paths."""
        paths = {"path": str(self.path), "report": str(self.report), "failed": self.failed}
        return {**paths, **self.record.to_dict()}


def split_values(text: str) -> list[str]:
    """``3,4,5`` is three values; commas in brackets, braces and quotes separate nothing."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        depth += (letter in "[{") - (letter in "]}") if not quote else 0
        if letter == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def variants_of(changes: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The product of the values: name of a variant to its changes (``key=value``).

    Names hold the settings with several values, so that they stay when another value is added.

    Raises:
        RecipeError: a change without ``=`` or with an empty or a repeated value; no setting with several
            values; more than ``MOST`` combinations.
    """
    axes: list[tuple[str, list[str]]] = []
    for change in changes:
        key, equals, text = change.partition("=")
        values = split_values(text)
        if not equals or not key.strip() or not all(values):
            hint = "--set stages.quantize.bits=3,4,5"
            raise RecipeError(f"--set {change}: not of the form key=value,value", hint=hint)
        if len(set(values)) < len(values):
            raise RecipeError(f"--set {change}: a value is there twice")
        axes.append((key.strip(), values))
    if all(len(values) == 1 for _, values in axes):
        hint = "--set stages.quantize.bits=3,4,5; attar run does a single one"
        raise RecipeError("no setting has several values", hint=hint)
    count = 1
    for _, values in axes:
        count *= len(values)
    if count > MOST:
        raise RecipeError(f"the values make {count} runs, more than {MOST}", hint="sweep fewer settings")
    variants = {}
    for chosen in product(*(values for _, values in axes)):
        pairs = list(zip(axes, chosen, strict=True))
        shown = [
            f"{key.removeprefix('stages.')}={value}" for (key, values), value in pairs if len(values) > 1
        ]
        name = "+".join(shown)
        variants[_folder(name)] = tuple(f"{key}={value}" for (key, _), value in pairs)
    return variants


def change_of(key: str, values: Iterable[Any]) -> str:
    """``key=value,value`` as :func:`variants_of` reads it; text with commas, brackets or quotes is quoted."""
    return f"{key}={','.join(map(_value_text, values))}"


def _value_text(value: Any) -> str:
    bare = isinstance(value, str) and not set(value) & set(",[]{}\"'")
    return value if bare else json.dumps(value)


def _folder(name: str) -> str:
    """The name as one of a folder; a shortened or changed one ends with a hash."""
    safe = _UNSAFE.sub("_", name)
    return safe if safe == name and len(name) <= 100 else f"{safe[:90]}-{sha256_text(name)[:8]}"


def run_sweep(
    recipe: Path,
    out: Path,
    changes: Sequence[str],
    settings: ClusterSettings,
    *,
    fresh: bool = False,
    workers: Workers | None = None,
    tools: Tools | None = None,
    progress: Progress = SILENT,
) -> SweepOutcome:
    """Run every combination of the values, or go on with them; a failed run does not end the others.

    Args:
        changes: ``key=value,value,...``, as ``attar run --set`` has them.
        workers: None: those of ``settings``.

    Raises:
        RecipeError: a value is wrong in some combination; nothing is run then.
        OutputError: the folder holds other files, or is in use.
    """
    variants = [
        RunVariant(name, load_recipe(recipe, chosen), out / RUNS / name)
        for name, chosen in variants_of(changes).items()
    ]
    _check_folder(out)
    with locked(out):
        if not (out / SWEEP).exists():
            write_json(out / SWEEP, {"recipe": str(recipe), "variants": []})
        ends = run_variants(
            variants, settings, out, fresh=fresh, workers=workers, tools=tools, progress=progress
        )
        return _write(recipe, out, variants, ends, settings)


def _check_folder(out: Path) -> None:
    """Refuse a folder with other files. Raises OutputError."""
    if not out.exists():
        return
    try:
        known = "variants" in read_json(out / SWEEP)
    except CheckpointError:
        known = False
    others = [path.name for path in sorted(out.iterdir()) if path.name != ".lock"] if out.is_dir() else ["it"]
    if others and not known:
        hint = "choose an empty or a new folder with -o"
        raise OutputError(f"{out}: is not the folder of a sweep (it holds {others[0]})", hint=hint)


def _write(
    recipe: Path,
    out: Path,
    variants: Sequence[RunVariant],
    ends: Sequence[VariantResult],
    settings: ClusterSettings,
) -> SweepOutcome:
    from attar.measure.report.sweep_page import write_sweep_report
    from attar.measure.sweep import SweepRecord, sweep_run

    runs = [
        sweep_run(end.name, str(variant.out), end.result.run if end.result else None, end.message)
        for variant, end in zip(variants, ends, strict=True)
    ]
    record = SweepRecord(str(recipe), tuple(runs), settings.jobs if not settings.on else 1)
    content = jsonable(record.to_dict())
    write_json(out / SWEEP, content)
    write_sweep_report(record, out)
    return SweepOutcome(out, record, sum(end.result is None for end in ends))
