"""Distil with attar, a step at a time (turns.py): the counterpart of trl_run.py.

    python attar_train_run.py '{"student", "teacher", "tokens", "steps", "batch_size", "precision", ...}'

The train walk with the loss of ``attar distill``, on the rows of ``tokens`` in their order. ``settings`` are
further settings of distillation, ``teacher_top`` among them: then the teacher's predictions come from
``cache``, a folder, which is filled before the first step. With ``held_out``, a file like ``tokens``, the
last line has the student's forward KL to the teacher there.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from turns import Turns


def main() -> None:
    """Do the job."""
    job = json.loads(sys.argv[1])
    turns = Turns()
    import torch
    from safetensors.torch import load_file

    from attar.checkpoint import open_checkpoint
    from attar.data.examples import Examples
    from attar.distillation.learn import mean_loss
    from attar.distillation.loss import DistillationLoss
    from attar.distillation.outputs import NOTHING
    from attar.distillation.settings import distill_settings
    from attar.distillation.signals import SIGNALS
    from attar.distillation.signals.online import online_signal
    from attar.distillation.signals.target import SignalSource
    from attar.distillation.tasks import TASKS
    from attar.models.frozen import round_frozen
    from attar.models.head import head_of
    from attar.walks.train import train

    class Source:
        """The rows in their order, each batch when it is its turn."""

        def __init__(self, rows: torch.Tensor, size: int) -> None:
            self.batches = list(Examples.of_text(rows).split(size))

        def batch(self, number: int, model: Any) -> Examples:
            turns.begin()
            return self.batches[number % len(self.batches)]

    class Stepwise:
        """A progress that reports each step."""

        @contextmanager
        def task(self, what: str, total: int, done: int = 0) -> Iterator[Stepwise]:
            yield self

        def advance(self, n: int = 1, **numbers: float) -> None:
            turns.end(numbers["loss"])

        def log(self, line: str) -> None:
            print(line, file=sys.stderr)

    settings = distill_settings(
        steps=job["steps"],
        batch_size=job["batch_size"],
        precision=job["precision"],
        learning_rate=1e-4,
        warmup=0.0,
        min_lr_ratio=1.0,
        checkpoint_every=10**6,
        **job.get("settings", {}),
    )
    student, teacher = (
        TASKS["causal"].load(open_checkpoint(job[name]), settings) for name in ("student", "teacher")
    )
    teacher.requires_grad_(False)
    source = Source(load_file(job["tokens"])["tokens"], job["batch_size"])
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(job.get("cache") or folder)
        origin = SignalSource(teacher, open_checkpoint(job["teacher"]), cache, Path(folder))
        signal = SIGNALS[settings.teacher_signal](origin, student, settings)
        if settings.teacher_signal == "cached":
            with torch.autocast("cpu", torch.bfloat16, enabled=job["precision"] == "bf16"):
                for batch in source.batches:
                    signal.target(batch, NOTHING)
        if job["precision"] == "bf16":
            round_frozen(teacher)
        loss = DistillationLoss(signal, settings.alpha, head=head_of(student))
        train(student, loss, source, settings, progress=Stepwise())
        if job.get("held_out"):
            rows = Examples.of_text(load_file(job["held_out"])["tokens"])
            exact = DistillationLoss(online_signal(origin, student, settings), head=head_of(student))
            with torch.no_grad():
                turns.say({"held_out": mean_loss(exact, student.eval(), rows, job["batch_size"])})


if __name__ == "__main__":
    main()
