"""Does training for acceptance make a better draft model than plain training? One student, trained each way.

    python benchmarks/drafting.py WORK --cuts 3
    python benchmarks/drafting.py WORK --layer-map 0,3,6 --seeds 0 1 2
    python benchmarks/drafting.py WORK --layers 2 --width 128 --methods plain kl

``--cuts L`` trains nothing: of all ways to keep L of the teacher's layers, those that agree with it best.
Otherwise:

    plain       cross-entropy on text, nothing from the teacher
    longer      the same for as many steps as fit into the time of the slowest of the others, in which the
                teacher also wrote its rows
    written     cross-entropy on text and on rows that the teacher wrote
    kl lk tv    the soft losses of distillation/for_drafting.py, on text and rows that the teacher wrote

All students of a seed have the same initial weights and batch size. They are measured on the same rows, which
the teacher generated at temperature 1 from held-out prompts: mean over the seeds, and the standard deviation
with several. The last column is the speedup at the best K, computed from the measured times of both
models: tokens a pass, t(1) / (t(K + 1) + K d).

A killed benchmark resumes from WORK, which belongs to one set of flags.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from attar.checkpoint.companions import copy_companions
from attar.checkpoint.open import open_checkpoint
from attar.data.packing import row_length
from attar.distillation.for_drafting import DRAFTS, draft_report
from attar.distillation.learn import learn
from attar.distillation.rollouts.teacher import RolloutWriter
from attar.distillation.settings import DistillSettings, distill_settings
from attar.distillation.signals.target import SignalSource
from attar.distillation.students import make_student
from attar.distillation.tasks import TASKS
from attar.models.loading.load import load_model, load_tokenizer, save_model
from attar.models.surgery.cut_model import keep_layers
from attar.options import flatten
from attar.progress import SILENT
from attar.runtime.loading import load
from attar.runtime.speculate.latency import measure

SOFT = ("kl", "lk", "tv")
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"alpha": 0.0, "teacher_generated": 0.0},
    "written": {"alpha": 0.0},
    **{name: {"objective": name} for name in SOFT},
    "longer": {"alpha": 0.0, "teacher_generated": 0.0},
}


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    claim(arguments)
    teacher = load_model(arguments.teacher, dtype=torch.float32)
    if arguments.cuts:
        cuts(teacher, arguments)
        return
    runs = {
        name: [trained(name, seed, teacher, arguments) for seed in arguments.seeds]
        for name in METHODS
        if name in arguments.methods
    }
    times, price = passes(teacher, arguments)
    print(f"torch {torch.__version__}, {arguments.threads} threads; seeds {arguments.seeds}")
    print("t(T) of the target, ms:", {size: round(1e3 * t, 3) for size, t in times.items()}, end="; ")
    print(f"d: {1e3 * price:.3f} ms")
    table(runs, times, price)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    defaults = flatten(distill_settings())
    parser.add_argument("work", type=Path)
    parser.add_argument("--teacher", default="attar:tiny")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--cuts", type=int, default=0)
    for name in ("layers", "layer_map", "width", "batch_size", "learning_rate", "optimizer", "data"):
        value = defaults[name]
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--teacher-generated", type=float, default=0.5)
    parser.add_argument("--num-rollouts", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def claim(arguments: argparse.Namespace) -> None:
    """Refuse a folder that holds the runs of other flags."""
    kept = ("work", "methods", "seeds", "threads", "cuts")
    flags = {name: value for name, value in vars(arguments).items() if name not in kept}
    file = arguments.work / "flags.json"
    if file.exists() and json.loads(file.read_text()) != flags:
        raise SystemExit(f"{arguments.work} holds runs of other flags: {file.read_text()}")
    arguments.work.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(flags))


def cuts(teacher: Any, arguments: argparse.Namespace) -> None:
    """Acceptance of untrained cuts, on rows that the teacher writes from training text."""
    settings = settings_of("kl", arguments.seeds[0], arguments, teacher_generated=1.0)
    writer = replace(writer_of(teacher, settings, arguments), work=arguments.work / "cuts")
    source = open_checkpoint(arguments.teacher)
    rows = writer.training_rows(8, TASKS["causal"].training(source, settings, 8)).tokens
    ways = itertools.combinations(range(teacher.config.num_hidden_layers), arguments.cuts)
    reports = {way: draft_report(keep_layers(teacher, way), teacher, rows, writer.prompt, 8) for way in ways}
    for way in sorted(reports, key=lambda way: -reports[way]["acceptance"])[:10]:
        print(",".join(map(str, way)), f"{reports[way]['acceptance']:.4f}")


def writer_of(teacher: Any, settings: DistillSettings, arguments: argparse.Namespace) -> RolloutWriter:
    """The teacher as a writer; its rows are shared by all runs of a seed."""
    source, work = open_checkpoint(arguments.teacher), arguments.work / f"rows-{settings.seed}"
    length = row_length(settings.sequence_length, source.config)
    return RolloutWriter(teacher, load_tokenizer(source), settings, length, work, SILENT)


def settings_of(name: str, seed: int, arguments: argparse.Namespace, **changes: Any) -> DistillSettings:
    """What a run learns from; ``longer`` needs those of its seed before it."""
    given = {key: value for key, value in vars(arguments).items() if key in flatten(DistillSettings())}
    chosen = {**given, **METHODS[name], "seed": seed, "for_drafting": True, **changes}
    if name == "longer":
        before = [json.loads(file.read_text()) for file in arguments.work.glob(f"*-{seed}.json")]
        seconds = {run["name"]: run["seconds"] + run["writing"] for run in before}
        per_step = next(run for run in before if run["name"] == "plain")["seconds"] / arguments.steps
        chosen["steps"] = max(round(max(seconds.values()) / per_step), 1)
    return distill_settings(**chosen)


def trained(name: str, seed: int, teacher: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """The result of one run, or of an earlier one."""
    file = arguments.work / f"{name}-{seed}.json"
    if file.exists():
        return dict(json.loads(file.read_text()))
    settings, source = settings_of(name, seed, arguments), open_checkpoint(arguments.teacher)
    writer = writer_of(teacher, settings, arguments)
    rows, written = writer.held_out_rows().tokens, arguments.work / f"writing-{seed}.txt"
    writing = seconds_of_writing(writer, source, written)
    (_, student), work = make_student(teacher, settings.student, seed), arguments.work / "run"
    shutil.rmtree(work, ignore_errors=True)  # what is left of a killed run; its time would not count
    began = time.perf_counter()
    origin = SignalSource(teacher, source, work / "signal", work / "train")
    history = learn(
        student, origin, source, TASKS["causal"], settings, progress=SILENT, what=name, rollouts=writer
    )
    seconds = time.perf_counter() - began
    result = {"name": name, "steps": history.step, "seconds": seconds, "writing": writing}
    result |= draft_report(student, teacher, rows, writer.prompt, settings.batch_size)
    file.write_text(json.dumps(result))
    print(name, seed, f"{seconds:.0f} s, acceptance {result['acceptance']:.4f}", flush=True)
    return result


def seconds_of_writing(writer: RolloutWriter, source: Any, file: Path) -> float:
    """How long the teacher takes for the rows of its settings, which are the same in every run of a seed;
    0 where it writes none."""
    if not writer.settings.teacher_share:
        return 0.0
    if not file.exists():
        shutil.rmtree(writer.work / "train", ignore_errors=True)
        wanted = writer.settings.steps * writer.settings.batch_size
        text = TASKS["causal"].training(source, writer.settings, wanted)
        began = time.perf_counter()
        writer.training_rows(wanted, text)
        file.write_text(str(time.perf_counter() - began))
    return float(file.read_text())


def passes(teacher: Any, arguments: argparse.Namespace) -> tuple[dict[int, float], float]:
    """Seconds of the target's passes over 1, ... tokens, and of the student's over one."""
    folder, source = arguments.work / "shape", open_checkpoint(arguments.teacher)
    if not (folder / "config.json").exists():
        _, student = make_student(teacher, settings_of("plain", 0, arguments).student)
        save_model(student, folder, dtype=torch.bfloat16)
        copy_companions(source.path, folder)
    sizes = {1: (1, *(K + 1 for K in DRAFTS))}
    target = measure(load(arguments.teacher, kv_tokens=256).runner, sizes, budget=5)[1]
    return target, measure(load(folder, kv_tokens=256).runner, {1: (1,)}, budget=5)[1][1]


def table(runs: dict[str, list[dict[str, Any]]], times: dict[int, float], price: float) -> None:
    """A line for each method."""
    heads = "".join(f"{f'tok/pass K={K}':>14}" for K in DRAFTS)
    print(f"{'':8}{'steps':>7}{'s':>6}{'writing':>9}{'acceptance':>17}{'greedy':>8}{heads}{'speedup':>16}")
    for name, results in runs.items():
        steps, seconds, writing, a, greedy = (
            [run[key] for run in results]
            for key in ("steps", "seconds", "writing", "acceptance", "greedy_agreement")
        )
        tokens = {K: statistics.mean(run["by_rows"][str(K)] for run in results) for K in DRAFTS}
        gains = {K: tokens[K] * times[1] / (times[K + 1] + K * price) for K in DRAFTS}
        best = max(gains, key=lambda K: gains[K])
        spread = f" +- {statistics.stdev(a):.4f}" if len(a) > 1 else ""
        print(f"{name:8}{statistics.mean(steps):7.0f}{statistics.mean(seconds):6.0f}", end="")
        print(f"{statistics.mean(writing):9.0f}{f'{statistics.mean(a):.4f}{spread}':>17}", end="")
        print(f"{statistics.mean(greedy):8.4f}", *(f"{tokens[K]:13.3f}" for K in DRAFTS), end="")
        print(f"{f'{gains[best]:.2f} at K {best}':>16}")


if __name__ == "__main__":
    main()
