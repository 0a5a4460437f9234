"""How far estimates are from what stages take: the stages of the demo recipe and single ones, run for real.

    export OMP_WAIT_POLICY=PASSIVE                          # as the command attar does
    python benchmarks/estimates.py                          # all stages, of attar:tiny: some minutes
    python benchmarks/estimates.py --stages rtn gptq awq    # these, and the stages they start from
    python benchmarks/estimates.py --model ORG/NAME --stages rtn gptq-few
    python benchmarks/estimates.py --progress               # and what the bars said of the time left

Prints, for each stage, the estimate before the run (the plan's), the time, and estimate over time; and the
same with the estimate made when the stages before were done (a run's own line "starts, about ..."). With
``--progress``, for each bar of a second or more: the time left that it said when a quarter and half of it was
done, over the time that was left then.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attar.checkpoint.open import open_checkpoint
from attar.checkpoint.units import table
from attar.measure.evaluate import evaluate
from attar.measure.reference import make_reference
from attar.recipe.history import kind_of, read_history
from attar.recipe.plan import make_plan
from attar.recipe.run import run_recipe
from attar.recipe.runfolder import read_receipt
from attar.recipe.schema import Recipe, parse_recipe

LEARNING = "optimizer: muon, learning_rate: 0.0025, min_lr_ratio: 0.02, rows: 768, teacher_top: 64"
STAGES = {  # as a recipe writes them; the first six are those of recipes/quickstart.yaml, of fewer steps
    "distill": f"stage: distill, keep_layers: 0.625, steps: {{steps}}, {LEARNING}",
    "heads": "stage: prune, method: heads, ratio: 0.25, rigid: zero, from: distill",
    "neurons": "stage: prune, method: neurons, ratio: 0.33, from: heads",
    "recover": f"stage: recover, teacher: original, steps: {{steps}}, {LEARNING}, from: neurons",
    "rtn": "stage: quantize, method: rtn, group_size: -1, embedding_bits: 8, from: original",
    "gptq": "stage: quantize, method: gptq, group_size: -1, embedding_bits: 8, from: original",
    "gptq-few": "stage: quantize, method: gptq, group_size: -1, samples: 8, from: original",
    "gptq-plain": "stage: quantize, method: gptq, group_size: -1, samples: 16, refine: 0, from: original",
    "awq": "stage: quantize, method: awq, group_size: -1, from: original",
    "gguf": "stage: export, format: gguf, from: original",
}
EVALUATE = "evaluate"  # not a stage: what follows every stage


@dataclass
class Watched:
    """A progress that draws nothing and keeps when each unit of each task was done."""

    tasks: list[tuple[str, int, list[float]]] = field(default_factory=list)
    at_starts: list[list[float]] = field(default_factory=list)
    factors: Callable[[], list[float]] = list

    @contextmanager
    def task(self, what: str, total: int, done: int = 0) -> Iterator[Any]:
        """Open a task; its times start with its own start and end with its end."""
        times = [time.monotonic()]
        self.tasks.append((what, total - done, times))
        yield _Task(times)
        times.append(time.monotonic())

    def log(self, line: str) -> None:
        """When a stage starts: what its estimate is multiplied by then."""
        if ": starts, about " in line:
            self.at_starts.append(self.factors())


@dataclass
class _Task:
    times: list[float]

    def advance(self, n: int = 1, **numbers: float) -> None:
        self.times += [time.monotonic()] * n


def said_over_left(total: int, times: list[float], part: float) -> float:
    """The time left that a task's bar says when ``part`` of its units is done, over the time that is left."""
    done = max(round(total * part), 1)
    estimate = (times[done] - times[0]) / done * (total - done)
    return estimate / max(times[-1] - times[done], 1e-9)


def main() -> None:
    """Plan, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="attar:tiny")
    parser.add_argument("--data", default="auto")
    parser.add_argument("--stages", nargs="+", choices=[*STAGES, EVALUATE], default=[*STAGES, EVALUATE])
    parser.add_argument("--steps", type=int, default=30, help="of each training")
    parser.add_argument("--progress", action="store_true")
    arguments = parser.parse_args()
    watched = Watched()
    wanted = [name for name in arguments.stages if name != EVALUATE]
    rows = (
        _stage_rows(_recipe(arguments.model, arguments.data, wanted, arguments.steps), watched)
        if wanted
        else []
    )
    if EVALUATE in arguments.stages:
        rows.append(_evaluation_row(arguments.model, arguments.data))
    print(table(("stage", "estimate, s", "time, s", "ratio", "ratio when it starts"), rows))
    if arguments.progress:
        print(table(("bar", "units", "time, s", "ratio at 25 %", "ratio at 50 %"), _bar_rows(watched)))


def _recipe(model: str, data: str, wanted: list[str], steps: int = 30) -> Recipe:
    """The wanted stages, and before them those they start from."""
    names: list[str] = []
    for name in wanted:
        chain = [name]
        while (parent := STAGES[chain[-1]].partition("from: ")[2]) in STAGES:
            chain.append(parent)
        names += [one for one in reversed(chain) if one not in names]
    lines = (STAGES[name].replace("{steps}", str(steps)) for name in names)
    stages = "\n".join(f"  - {{{line}, name: {name}}}" for name, line in zip(names, lines, strict=True))
    return parse_recipe(f"model: {model}\ndata: {data}\nevaluate: false\nstages:\n{stages}")


def _stage_rows(recipe: Recipe, watched: Watched) -> list[tuple[str, ...]]:
    """Estimate and time of each stage."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        plan = make_plan(recipe, out, open_checkpoint(recipe.model))
        watched.factors = lambda: [
            read_history(out).correction(kind_of(step.entry.stage, step.entry.settings)).factor
            for step in plan.steps
        ]
        run_recipe(recipe, out, progress=watched)
        receipts = [read_receipt(out, step.entry.folder) for step in plan.steps]
    return [
        _row(
            step.entry.name, step.estimate.time.seconds, receipt.seconds, receipt.estimated * at_start[number]
        )
        for number, (step, receipt, at_start) in enumerate(
            zip(plan.steps, receipts, watched.at_starts, strict=True)
        )
        if receipt is not None
    ]


def _evaluation_row(model: str, data: str) -> tuple[str, ...]:
    """Estimate and time of the evaluation of one checkpoint, with a reference at hand."""
    recipe = parse_recipe(f"model: {model}\ndata: {data}\nstages: [{{{STAGES['rtn']}}}]")
    with tempfile.TemporaryDirectory() as folder:
        plan = make_plan(recipe, Path(folder) / "run", open_checkpoint(model))
        settings = plan.recipe.evaluate
        assert settings is not None
        reference = make_reference(model, settings)
        estimated, start = plan.original_time.seconds, time.monotonic()
        evaluate(model, settings, reference=reference)
    return _row(EVALUATE, estimated, time.monotonic() - start, estimated)


def _row(name: str, before: float, seconds: float, at_start: float) -> tuple[str, ...]:
    return name, f"{before:.1f}", f"{seconds:.1f}", f"{before / seconds:.2f}", f"{at_start / seconds:.2f}"


def _bar_rows(watched: Watched) -> list[tuple[str, ...]]:
    """A row for each bar of a second or more and four units or more."""
    return [
        (
            what,
            str(total),
            f"{times[-1] - times[0]:.1f}",
            *(f"{said_over_left(total, times, part):.2f}" for part in (0.25, 0.5)),
        )
        for what, total, times in watched.tasks
        if total >= 4 and len(times) == total + 2 and times[-1] - times[0] >= 1
    ]


if __name__ == "__main__":
    main()
