"""Train a student on its teacher: the rows, the signal, the features, the train walk.

The loss is in ``loss.py``; the signal (``signals/``) says where the teacher's predictions come from. A draft
model also trains on rows that its teacher generated (``rollouts/``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.open import Checkpoint
from attar.data.examples import Examples
from attar.distillation.features.feature import LAYER_WEIGHTS
from attar.distillation.features.learned_map import hard_map
from attar.distillation.features.probe import make_features
from attar.distillation.learner import Learner
from attar.distillation.loss import DistillationLoss
from attar.distillation.policy.minillm import TEACHER_MIX
from attar.distillation.rollouts.buffer import RolloutBuffer
from attar.distillation.rollouts.student import StudentWriter
from attar.distillation.rollouts.teacher import RolloutWriter
from attar.distillation.router_loss import router_loss
from attar.distillation.settings import LearnSettings, RowSettings
from attar.distillation.signals import SIGNALS
from attar.distillation.signals.alignment.tokenizers import check_known
from attar.distillation.signals.target import SignalSource
from attar.distillation.tasks.task import Task
from attar.errors import DataError, SettingsError
from attar.models.frozen import round_frozen
from attar.models.head import head_of
from attar.models.loading.device import resolve
from attar.models.loading.load import load_tokenizer
from attar.models.loading.plain_config import end_tokens
from attar.progress import Progress
from attar.walks.distributed import blocks_of, sharded, shards
from attar.walks.masks import Masks
from attar.walks.objectives import Loss
from attar.walks.train import BatchSource, TrainHistory, train


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
    details: dict[str, Any] | None = None,
) -> TrainHistory:
    """Train the student, in place.

    Args:
        student: its parameters with ``requires_grad`` are trained, in float32.
        source: of the signal; none of the teacher's parameters gets a gradient afterwards.
        text: a checkpoint with the tokenizer and the context of both models.
        rollouts: the teacher writes some of the rows, and the held-out ones.
        masks: weights that are zero and stay zero.
        details: of the card; a learned layer map is added.
    """
    routers = router_loss(student, **settings.features.router_weights())
    count = training_rows(settings)
    rows: Examples | BatchSource = task.training(text, settings, count)
    held_out = task.held_out(text, settings) if rollouts is None else rollouts.held_out_rows()
    if rollouts is not None:
        assert isinstance(rows, Examples), "the causal task has rows"
        rows = rollouts.training_rows(count, rows)
    if source.teacher is not None:
        source.teacher.requires_grad_(False)
    features = make_features(student, source.teacher, settings.features, task.name, settings.seed)
    known = tuple(part for part in (rows, held_out) if isinstance(part, Examples))
    if not held_out.count():
        raise DataError(f"{settings.data}: nothing is predicted in the held-out text", hint="give more text")
    for part in known:
        check_known(part.tokens, source.tokens.missing)
    source = replace(source, rows=known, progress=progress)
    signal = SIGNALS[settings.teacher_signal](source, student, settings)
    if settings.student_share:
        assert isinstance(rows, Examples), "the causal task has rows"
        if shards():
            allowed = "0 with --shard: a student writes with its whole model"
            raise SettingsError("student_generated", settings.student_share, allowed)
        rows = student_rollouts(rows, text, source, settings, progress)
    if source.teacher is not None and rollouts is None:
        _save_memory(source, settings)
    alpha = settings.alpha if settings.learns_softly else 0.0
    weight = settings.prediction_weight
    loss = DistillationLoss(signal, alpha, features, head_of(student), weight, routers)
    projections = {name: part for feature in features for name, part in feature.projections.items()}
    model = Learner(student, projections) if projections else student
    if masks is not None and projections:
        masks = masks.inside("student")

    def held_out_loss(trained: nn.Module) -> float:
        return mean_loss(loss, trained, held_out, settings.batch_size)

    options: dict[str, Any] = {"held_out": held_out_loss, "progress": progress, "what": what}
    runs = settings.teacher_signal == "online"  # in step with the student, in every process
    with divided(source.teacher if runs else None):
        history = train(model, loss, rows, settings, work=source.work, masks=masks, **options)
    if LAYER_WEIGHTS in projections:
        matrix = projections[LAYER_WEIGHTS].matrix()
        progress.log(f"{what}: the learned layer map comes down to --feature-map {hard_map(matrix)}")
        if details is not None:
            details["feature_map"] = {"weights": matrix, "hard": hard_map(matrix)}
    return history


@contextmanager
def divided(teacher: Any | None) -> Iterator[None]:
    """Within it, processes that divide what is trained divide the teacher too: each holds a part of every
    block, which is gathered for the block's pass."""
    if teacher is None or not shards() or not blocks_of(teacher):
        yield
        return
    with sharded(teacher):
        yield


def _save_memory(source: SignalSource, settings: LearnSettings) -> None:
    """Round the teacher's weights now, where autocast would do it in each pass."""
    device = next(source.teacher.parameters()).device
    if resolve(settings.precision, device, source.work) == "bf16":
        round_frozen(source.teacher)


def student_rollouts(
    rows: Examples, text: Checkpoint, source: SignalSource, settings: LearnSettings, progress: Progress
) -> RolloutBuffer:
    """Batches of which the student writes its share."""
    tokenizer, config = load_tokenizer(text), text.path / "generation_config.json"
    known = source.tokens.vocabulary  # the teacher must read what is drawn
    writer = StudentWriter(
        vocabulary=min(len(tokenizer), known or len(tokenizer)),
        ends=end_tokens(read_json(config) if config.is_file() else None, text.config, tokenizer),
        temperature=settings.rollout_temperature,
        prompt_tokens=settings.prompt_tokens,
        mix=TEACHER_MIX if settings.soft_loss == "minillm" else 0.0,
        teacher=source.teacher,
    )
    return RolloutBuffer(rows, writer, settings, source.work / "rollouts", progress)


def mean_loss(loss: Loss, model: nn.Module, examples: Examples, batch_size: int) -> float:
    """The loss over examples, mean over their predictions."""
    device = next(model.parameters()).device
    parts = [
        float(loss(model, batch.to(device))) * count
        for batch in examples.split(batch_size)
        if (count := batch.count())
    ]
    return sum(parts) / examples.count()


def training_rows(settings: RowSettings) -> int:
    """Different rows of text to train on: as many as the steps take, or fewer where the settings say so."""
    count = settings.steps * settings.batch_size * settings.accumulate
    return min(settings.rows or count, count)
