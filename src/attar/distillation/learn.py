"""Train a student on its teacher: the rows, the signal, the features, the train walk.

The loss is in ``loss.py``; the signal (``signals/``) says where the teacher's predictions come from. A draft
model also trains on rows that its teacher generated (``rollouts/``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from attar.data.examples import Examples
from attar.distillation.features import FEATURES, Feature
from attar.distillation.learner import Learner
from attar.distillation.loss import DistillationLoss
from attar.distillation.rollouts.teacher import RolloutWriter
from attar.distillation.settings import LearnSettings
from attar.distillation.signals import SIGNALS
from attar.distillation.signals.target import SignalSource
from attar.distillation.tasks.causal import training_text
from attar.distillation.tasks.task import Task
from attar.models.head import head_of
from attar.progress import Progress
from attar.walks.masks import Masks
from attar.walks.objectives import Loss
from attar.walks.train import TrainHistory, train

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint


def learn(
    student: Any,
    source: SignalSource,
    text: Checkpoint,
    task: Task,
    settings: LearnSettings,
    *,
    progress: Progress,
    what: str,
    rollouts: RolloutWriter | None = None,
    masks: Masks | None = None,
) -> TrainHistory:
    """Train the student, in place.

    Args:
        student: its parameters with ``requires_grad`` are trained, in float32.
        source: of the signal; none of the teacher's parameters gets a gradient afterwards.
        text: a checkpoint with the tokenizer and the context of both models.
        rollouts: the teacher writes some of the rows, and the held-out ones.
        masks: weights that are zero and stay zero.
    """
    count = training_rows(settings)
    if rollouts is None:
        rows, held_out = task.training(text, settings, count), task.held_out(text, settings)
    else:
        rows = Examples.of_text(rollouts.training_rows(count, training_text(text, settings, count)))
        held_out = Examples.of_text(rollouts.held_out_rows())
    if source.teacher is not None:
        source.teacher.requires_grad_(False)
    features = make_features(student, source.teacher, settings)
    signal = SIGNALS[settings.teacher_signal](source, student, settings)
    loss = DistillationLoss(signal, settings.alpha, features, head_of(student))
    projections = {name: part for feature in features for name, part in feature.projections.items()}
    model = Learner(student, projections) if projections else student

    def held_out_loss(trained: nn.Module) -> float:
        return mean_loss(loss, trained, held_out, settings.batch_size)

    options: dict[str, Any] = {"held_out": held_out_loss, "progress": progress, "what": what}
    return train(model, loss, rows, settings, work=source.work, masks=masks, **options)


def make_features(student: Any, teacher: Any, settings: LearnSettings) -> list[Feature]:
    """The features that the settings name."""
    named = (text.partition(":") for text in settings.features.features)
    return [FEATURES[name](student, teacher, settings, float(weight or 1.0)) for name, _, weight in named]


def mean_loss(loss: Loss, model: nn.Module, examples: Examples, batch_size: int) -> float:
    """The loss over examples, mean over their predictions."""
    device = next(model.parameters()).device
    parts = [
        float(loss(model, batch.to(device))) * count
        for batch in examples.split(batch_size)
        if (count := batch.count())
    ]
    return sum(parts) / examples.count()


def training_rows(settings: LearnSettings) -> int:
    """Different rows of text to train on: as many as the steps take, or fewer where the settings say so."""
    count = settings.steps * settings.batch_size * settings.accumulate
    return min(settings.rows or count, count)
