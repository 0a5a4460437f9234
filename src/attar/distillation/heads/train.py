"""``attar distill MODEL -o HEAD --head KIND``: train a draft head for a model that stays as it is.

rows      the model answers prompts itself (rows.py)
states    of each batch from a pass of the model over it, or from a cache that was filled before (states.py)
steps     of the head alone (learner.py)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attar.checkpoint.open import open_checkpoint
from attar.checkpoint.output import StageOutput, produce
from attar.data.examples import Examples
from attar.data.packing import row_length
from attar.data.seen import note_texts
from attar.data.sources import fingerprint
from attar.distillation.head_settings import DraftHeadSettings
from attar.distillation.heads import HEAD_FINISHES, HEAD_MAKERS
from attar.distillation.heads.draft_vocabulary import check_draft_vocabulary, choose_tokens
from attar.distillation.heads.learner import HeadLearner
from attar.distillation.heads.report import describe_drafting, drafting_report
from attar.distillation.heads.rows import read_head_text
from attar.distillation.heads.states import NumberedRows, TargetStates, row_bytes
from attar.distillation.learn import mean_loss, training_rows
from attar.distillation.rollouts.teacher import RolloutWriter
from attar.distillation.settings import VERSION, DistillSettings
from attar.distillation.tasks import TASKS, task_of
from attar.errors import DataError, ModelError
from attar.models.device import bf16_products, resolve
from attar.models.draft_heads.folder import save_draft_head
from attar.models.frozen import round_frozen
from attar.models.head import Head, head_of
from attar.models.load import load_tokenizer
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
    own = head_of(target)
    if own is None:
        raise ModelError(f"{source.name}: no draft head can read it: its own head is no plain Linear")
    check_draft_vocabulary(_options(settings).draft_vocabulary, len(own.weight))
    parents: dict[str, Any] = {"signals": [source], "data": authors, "text": fingerprint(settings.data)}
    with produce(out, "distill", settings, VERSION, [source], **parents, force=force, key=key) as output:
        head, history = _trained(source, target, own, settings, output, samples, progress)
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


def _trained(
    source: Checkpoint,
    target: Any,
    own: Head,
    settings: DistillSettings,
    output: StageOutput,
    samples: Path | None,
    progress: Progress,
) -> tuple[Any, TrainHistory]:
    """The head after its last step; adds to the details of the card."""
    device, options, work = own.weight.device, _options(settings), output.work
    precision = resolve(settings.precision, device, work / "train")
    tokenizer, length = load_tokenizer(source), row_length(settings.sequence_length, source.config)
    text = read_head_text(source, tokenizer, settings, training_rows(settings))
    note_texts(output, text.records, progress)
    writer = RolloutWriter(target, tokenizer, settings, length, samples or work / "samples", progress)
    rows, different = NumberedRows.of(text.training_rows(writer))
    held_out = text.held_out_rows(writer)
    for name, part in (("training", rows), ("held-out", held_out)):
        if not part.count():
            raise DataError(f"{settings.data}: the model answers none of the {name} prompts")
    chosen = choose_tokens(different, len(own.weight), options.draft_vocabulary)
    torch.manual_seed(settings.seed)
    head = HEAD_MAKERS[settings.head](target, own, options, chosen).to(device)
    if precision == "bf16":
        round_frozen(target)
    states = TargetStates(target, own, head.config.layers)
    uses = settings.steps * settings.batch_size * settings.accumulate / len(different)
    most = options.cached_bytes(uses) // row_bytes(length, len(head.config.layers), head.config.hidden)
    with bf16_products(device, precision == "bf16"):
        states = states.cached(work / "states", different, most, settings.batch_size, progress)
    loss = HeadLoss(states)
    output.details["rows"] = {"different": len(different), "uses": uses, "states_on_disk": states.rows}
    if chosen is not None:
        covered = torch.isin(held_out.labels, chosen).double().mean()
        output.details["draft_vocabulary"] = {"tokens": len(chosen), "held_out_share": float(covered)}
    history = train(
        HeadLearner(head, options),
        loss,
        rows,
        settings,
        work=work / "train",
        held_out=lambda model: mean_loss(loss, model, held_out, settings.batch_size),
        progress=progress,
        what="distill",
    )
    head.eval()
    if finish := HEAD_FINISHES.get(settings.head):
        batches = [batch.to(device) for batch in held_out.split(settings.batch_size)]
        with torch.no_grad(), bf16_products(device, history.precision == "bf16"):
            chains, more = finish(head, states.run, batches, options)
        output.details["drafting"] = drafting_report(chains) | more
        progress.log(describe_drafting(output.details["drafting"]))
    return head, history


def _options(settings: DistillSettings) -> DraftHeadSettings:
    assert isinstance(settings.head_options, DraftHeadSettings), settings.head
    return settings.head_options
