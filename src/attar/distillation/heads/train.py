"""``attar distill MODEL -o HEAD --head KIND``: train a draft head for a model.

rows      the model answers prompts itself (rows.py)
states    of each batch from a pass of the model over it, or from a cache that was filled before (states.py)
steps     of the head alone (learner.py); of Medusa-2 the last ones of both (joint_train.py)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attar.checkpoint.open import open_checkpoint
from attar.checkpoint.output import StageOutput, produce
from attar.data.examples import Examples
from attar.data.sources import fingerprint
from attar.distillation.head_settings import DraftHeadSettings
from attar.distillation.heads import HEAD_FINISHES, HEAD_MAKERS
from attar.distillation.heads.draft_vocabulary import check_draft_vocabulary, choose_tokens
from attar.distillation.heads.joint_train import save_joint, train_jointly
from attar.distillation.heads.learner import HeadLearner
from attar.distillation.heads.report import describe_drafting, drafting_report
from attar.distillation.heads.rows import HeadRows, write_rows
from attar.distillation.heads.states import TargetStates, row_bytes
from attar.distillation.learn import mean_loss
from attar.distillation.settings import VERSION, DistillSettings
from attar.distillation.tasks import TASKS, task_of
from attar.errors import ModelError
from attar.models.draft_heads.folder import save_draft_head
from attar.models.frozen import round_frozen
from attar.models.head import Head, head_of
from attar.models.loading.device import bf16_products, resolve
from attar.progress import Progress
from attar.walks.train import TrainHistory, train

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint


@dataclass(frozen=True)
class HeadLoss:
    """A loss for the train walk, see :data:`attar.walks.objectives.Loss`; the model is a
    :class:`HeadLearner`, or what wraps it."""

    states: TargetStates

    def __call__(self, model: Any, batch: Examples) -> Tensor:
        loss: Tensor = model(self.states.run(batch))
        return loss


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
        ModelError: the source is no causal language model, or its own head is more than a Linear, a scale and
            a cap.
    """
    if task_of(source.config, settings).name != "causal":
        kind = (source.config.get("architectures") or ["a model"])[0]
        raise ModelError(f"{source.name}: {kind} predicts no next token, so nothing can be drafted for it")
    target = TASKS["causal"].load(source, settings, teacher=True, progress=progress).requires_grad_(False)
    target_head = head_of(target)
    if target_head is None:
        raise ModelError(f"{source.name}: no draft head can read it: its own head is no plain Linear")
    check_draft_vocabulary(_options(settings).draft_vocabulary, len(target_head.weight))
    parents: dict[str, Any] = {"signals": [source], "data": authors, "text": fingerprint(settings.data)}
    with produce(out, "distill", settings, VERSION, [source], **parents, force=force, key=key) as output:
        rows = write_rows(source, target, settings, output, samples, progress)
        head, history = _trained_head(target, target_head, rows, settings, output, progress)
        model, states = target, TargetStates(target, target_head, head.config.layers)
        if settings.joint_steps:
            model, states, history = train_jointly(
                target, target_head, head, rows, settings, output, progress
            )
        output.exit_unless_rank0()
        _measure(head, states, rows, settings, output, progress)
        if settings.joint_steps:
            save_joint(model, head, source, output, out, progress)
        else:
            save_draft_head(head, output.folder, target=source.spelling)
        output.details.update(
            head=head.config.to_dict(),
            parameters=sum(parameter.numel() for parameter in head.parameters()),
            curve=history.curve,
            tokens=history.tokens,
            steps=history.step,
            stopped_early=history.stopped,
            precision=history.precision,
        )
    return open_checkpoint(out)


def _trained_head(
    target: Any,
    target_head: Head,
    rows: HeadRows,
    settings: DistillSettings,
    output: StageOutput,
    progress: Progress,
) -> tuple[Any, TrainHistory]:
    """The head after the steps in which the target stays as it is; adds to the details of the card."""
    device, options, work = target_head.weight.device, _options(settings), output.work
    precision = resolve(settings.precision, device, work / "train")
    chosen = choose_tokens(rows.different, len(target_head.weight), options.draft_vocabulary)
    torch.manual_seed(settings.seed)
    head = HEAD_MAKERS[settings.head](target, target_head, options, chosen).to(device)
    if chosen is not None:
        covered = torch.isin(rows.held_out.labels, chosen).double().mean()
        output.details["draft_vocabulary"] = {"tokens": len(chosen), "held_out_share": float(covered)}
    steps = settings.steps - settings.joint_steps
    if not steps:
        return head, TrainHistory()
    if precision == "bf16" and not settings.joint_steps:
        round_frozen(target)
    states = TargetStates(target, target_head, head.config.layers)
    uses = steps * settings.batch_size * settings.accumulate / len(rows.different)
    row = row_bytes(rows.different.tokens.shape[1], len(head.config.layers), head.config.hidden)
    most = options.cached_bytes(uses) // row
    with bf16_products(device, precision == "bf16"):
        states = states.cached(work / "states", rows.different, most, settings.batch_size, progress)
    loss = HeadLoss(states)
    output.details["rows"] = {"different": len(rows.different), "uses": uses, "states_on_disk": states.rows}
    history = train(
        HeadLearner(head, options),
        loss,
        rows.training,
        replace(settings, steps=steps),
        work=work / "train",
        held_out=lambda model: mean_loss(loss, model, rows.held_out, settings.batch_size),
        progress=progress,
        what="distill",
    )
    return head, history


def _measure(
    head: Any,
    states: TargetStates,
    rows: HeadRows,
    settings: DistillSettings,
    output: StageOutput,
    progress: Progress,
) -> None:
    """Calibrate the head and choose its tree; the details of the card get how well it drafts."""
    head.eval()
    if finish := HEAD_FINISHES.get(settings.head):
        device = states.head.weight.device
        batches = [batch.to(device) for batch in rows.held_out.split(settings.batch_size)]
        precision = resolve(settings.precision, device, output.work / "train")
        with torch.no_grad(), bf16_products(device, precision == "bf16"):
            chains, more = finish(head, states.run, batches, _options(settings))
        output.details["drafting"] = drafting_report(chains) | more
        progress.log(describe_drafting(output.details["drafting"]))


def _options(settings: DistillSettings) -> DraftHeadSettings:
    assert isinstance(settings.head_options, DraftHeadSettings), settings.head
    return settings.head_options
