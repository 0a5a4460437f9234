"""``attar distill MODEL -o HEAD --head KIND``: train a draft head for a model that stays as it is.

The model answers prompts of the text itself (``rollouts/``), because a head drafts in contexts that its
target has written; ``--share`` says how many of the rows, the others are text. The target runs over each
batch, and the head learns from that pass: nothing of it is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attar.checkpoint.open import open_checkpoint
from attar.checkpoint.output import produce
from attar.data.examples import Examples
from attar.data.packing import row_length
from attar.data.seen import note_texts
from attar.data.sources import fingerprint
from attar.distillation.head_settings import DraftHeadSettings
from attar.distillation.heads import HEAD_LOSSES
from attar.distillation.heads.target_pass import run_target
from attar.distillation.learn import mean_loss, training_rows
from attar.distillation.rollouts.teacher import RolloutWriter
from attar.distillation.settings import VERSION, DistillSettings
from attar.distillation.tasks import TASKS
from attar.errors import ModelError
from attar.models.anatomy import discover
from attar.models.draft_heads import DRAFT_HEADS
from attar.models.draft_heads.folder import save_draft_head
from attar.models.head import Head, head_of
from attar.models.load import load_tokenizer
from attar.progress import Progress
from attar.walks.train import train

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint


@dataclass(frozen=True)
class HeadLoss:
    """A loss for the train walk, see :data:`attar.walks.objectives.Loss`.

    Attributes:
        target: frozen.
        head: the target's own.
    """

    target: Any
    head: Head
    settings: DistillSettings

    def __call__(self, model: Any, batch: Examples) -> Tensor:
        drafter = getattr(model, "module", model)
        passed = run_target(self.target, self.head, drafter.config.layers, batch)
        return HEAD_LOSSES[self.settings.head](drafter, passed, self.settings.head_options)


def distill_head(
    source: Checkpoint,
    out: Path,
    settings: DistillSettings,
    *,
    authors: Any,
    progress: Progress,
    force: bool,
    key: str | None,
    samples: Path | None = None,
) -> Checkpoint:
    """Train a head of the source; see :func:`attar.distillation.stage.distill`.

    Args:
        settings: fitted to the source.
        authors: of the text.
        samples: folder of the rows that the source writes; None: in the work folder.

    Raises:
        ModelError: the source's own head is more than a Linear, a scale and a cap.
    """
    task = TASKS["causal"]
    target = task.load(source, settings, teacher=True, progress=progress).requires_grad_(False)
    own = head_of(target)
    if own is None:
        raise ModelError(f"{source.name}: no draft head can read it: its own head is no plain Linear")
    parents: dict[str, Any] = {"signals": [source], "data": authors, "text": fingerprint(settings.data)}
    with produce(out, "distill", settings, VERSION, [source], **parents, force=force, key=key) as output:
        count = training_rows(settings)
        note_texts(output, task.records("distill", source, settings, count), progress)
        length = row_length(settings.sequence_length, source.config)
        tokenizer = load_tokenizer(source)
        written = samples or output.work / "samples"
        writer = RolloutWriter(target, tokenizer, settings, length, written, progress)
        text = task.training(source, settings, count)
        assert isinstance(text, Examples), "the causal task has rows"
        rows, held_out = writer.training_rows(count, text), writer.held_out_rows()
        torch.manual_seed(settings.seed)
        drafter = make_draft_head(target, own, settings)
        loss = HeadLoss(target, own, settings)
        history = train(
            drafter,
            loss,
            rows,
            settings,
            work=output.work / "train",
            held_out=lambda model: mean_loss(loss, model, held_out, settings.batch_size),
            progress=progress,
            what="distill",
        )
        save_draft_head(drafter, output.folder, target=source.spelling)
        output.details.update(
            head=drafter.config.to_dict(),
            parameters=sum(parameter.numel() for parameter in drafter.parameters()),
            curve=history.curve,
            tokens=history.tokens,
            steps=history.step,
            precision=history.precision,
        )
    return open_checkpoint(out)


def make_draft_head(target: Any, own: Head, settings: DistillSettings) -> Any:
    """A head before its first step, on the target's device; a kind with more needs has its own function."""
    config_class, module = DRAFT_HEADS[settings.head]
    options = settings.head_options
    assert isinstance(options, DraftHeadSettings), settings.head
    vocabulary, hidden = own.weight.shape
    layers = len(discover(target).blocks)
    config = config_class(hidden=hidden, vocabulary=vocabulary, layers=(layers,), drafts=options.drafts)
    head = module(config)
    head.start_from(own.weight.detach().float())
    return head.to(own.weight.device)
