"""The verb ``train-head``: ``attar train-head MODEL -o HEAD --head KIND``.

rows      the model answers prompts itself (rows.py)
states    of each batch from a pass of the model over it, or from a cache that was filled before (states.py)
steps     of the head alone; of Medusa-2 the last ones of both (joint_train.py)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attar.checkpoint.open import Checkpoint, open_checkpoint
from attar.checkpoint.output import StageOutput, produce
from attar.data.auto import fit
from attar.data.examples import Examples
from attar.data.sources import fingerprint
from attar.distillation.authors import check_authors
from attar.distillation.head_settings import VERSION, TrainHeadSettings
from attar.distillation.heads import HEADS
from attar.distillation.heads.draft_vocabulary import check_draft_vocabulary, choose_tokens
from attar.distillation.heads.joint_train import save_joint, train_jointly
from attar.distillation.heads.report import describe_drafting, drafting_report
from attar.distillation.heads.rows import HeadRows, write_rows
from attar.distillation.heads.states import TargetStates, row_bytes
from attar.distillation.heads.target_pass import TargetPass
from attar.distillation.learn import mean_loss
from attar.distillation.tasks import TASKS, natural_task
from attar.errors import ModelError
from attar.models.draft_heads.folder import save_draft_head
from attar.models.frozen import round_frozen
from attar.models.head import Head, head_of
from attar.models.loading.device import bf16_products, resolve
from attar.models.loading.fit import admit
from attar.progress import SILENT, Progress
from attar.walks.train import TrainHistory, train


class HeadLearner(nn.Module):  # type: ignore[misc]
    """A draft head as the module that is trained: its forward pass is its loss.

    What wraps a module to spread a run over processes (DDP) adds up gradients behind its forward pass, so the
    loss must be inside.

    Args:
        head: a module of ``attar.models.draft_heads``.
        options: of its kind, see ``head_settings.py``.
    """

    def __init__(self, head: Any, options: Any) -> None:
        super().__init__()
        self.head, self.options = head, options

    def forward(self, passed: TargetPass) -> Tensor:
        """The loss of a batch."""
        return HEADS[self.head.config.kind].loss(self.head, passed, self.options)

    def output_weights(self) -> list[nn.Parameter]:
        """Matrices that make logits, which the optimizers treat as a head."""
        weights = getattr(self.head, "output_weights", None)
        return [] if weights is None else list(weights())


@dataclass(frozen=True)
class HeadLoss:
    """A loss for the train walk, see :data:`attar.walks.objectives.Loss`; the model is a
    :class:`HeadLearner`, or what wraps it."""

    states: TargetStates

    def __call__(self, model: Any, batch: Examples) -> Tensor:
        loss: Tensor = model(self.states.run(batch))
        return loss


def train_head(
    model: str | Path | Checkpoint,
    out: Path,
    settings: TrainHeadSettings,
    *,
    progress: Progress = SILENT,
    force: bool = False,
    key: str | None = None,
    samples: Path | None = None,
) -> Checkpoint:
    """Train a draft head for a model, which stays as it is; with ``joint`` (Medusa-2) it learns too.

    Args:
        model: a dense or packed causal language model.
        out: the head; with ``joint`` the new model, and its head in ``out/head``. The card has acceptance and
            tokens a pass.
        samples: folder of the rows that the model writes, for several heads; None: in the work folder.

    Raises:
        ModelError: the model is no causal language model, or its own head is more than a Linear, a scale and
            a cap.
        AttarError: see errors.py; no output is left.
    """
    source = admit(model, progress, text=True)
    settings = fit(settings, source, progress)
    authors = check_authors(source, [source], settings, progress)
    if natural_task(source.config, settings.data) != "causal":
        kind = (source.config.get("architectures") or ["a model"])[0]
        raise ModelError(f"{source.name}: {kind} predicts no next token, so nothing can be drafted for it")
    target = TASKS["causal"].load(source, settings, teacher=True, progress=progress).requires_grad_(False)
    target_head = head_of(target)
    if target_head is None:
        raise ModelError(f"{source.name}: no draft head can read it: its own head is no plain Linear")
    check_draft_vocabulary(settings.options.draft_vocabulary, len(target_head.weight))
    parents: dict[str, Any] = {"signals": [source], "data": authors, "text": fingerprint(settings.data)}
    with produce(out, "train-head", settings, VERSION, [source], **parents, force=force, key=key) as output:
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
    settings: TrainHeadSettings,
    output: StageOutput,
    progress: Progress,
) -> tuple[Any, TrainHistory]:
    """The head after the steps in which the target stays as it is; adds to the details of the card."""
    device, options, work = target_head.weight.device, settings.options, output.work
    precision = resolve(settings.precision, device, work / "train")
    chosen = choose_tokens(rows.different, len(target_head.weight), options.draft_vocabulary)
    torch.manual_seed(settings.seed)
    head = HEADS[settings.head].make(target, target_head, options, chosen).to(device)
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
        what="train-head",
    )
    return head, history


def _measure(
    head: Any,
    states: TargetStates,
    rows: HeadRows,
    settings: TrainHeadSettings,
    output: StageOutput,
    progress: Progress,
) -> None:
    """Calibrate the head and choose its tree; the details of the card get how well it drafts."""
    head.eval()
    device = states.head.weight.device
    batches = [batch.to(device) for batch in rows.held_out.split(settings.batch_size)]
    precision = resolve(settings.precision, device, output.work / "train")
    with torch.no_grad(), bf16_products(device, precision == "bf16"):
        chains, more = HEADS[settings.head].finish(head, states.run, batches, settings.options)
    output.details["drafting"] = drafting_report(chains) | more
    progress.log(describe_drafting(output.details["drafting"]))
