"""The steps of Medusa-2 (``joint.py``) in which the model learns with its heads, and the folder of both:

OUT             the model: a checkpoint as every other
OUT/head        its heads, whose card has the hash of that model: ``attar generate OUT --draft OUT/head``
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from attar.checkpoint.card import Card, Parent, versions
from attar.checkpoint.companions import copy_companions
from attar.checkpoint.hashing import in_parallel, sha256_file
from attar.checkpoint.lineage import as_parent
from attar.checkpoint.open import Checkpoint, open_checkpoint
from attar.checkpoint.output import StageOutput
from attar.checkpoint.processes import count
from attar.data.examples import Examples
from attar.distillation.adapters import add_adapters
from attar.distillation.head_settings import MedusaSettings, TrainHeadSettings
from attar.distillation.heads.joint import JointLearner, final_states, original_of, text_loss
from attar.distillation.heads.rows import HeadRows
from attar.distillation.heads.states import TargetStates
from attar.distillation.learn import mean_loss
from attar.errors import SettingsError
from attar.models.anatomy.discover import discover
from attar.models.draft_heads.folder import save_draft_head
from attar.models.head import Head, head_of
from attar.models.loading.kept_mtp import keep_mtp
from attar.models.loading.load import save_model
from attar.models.loading.stored import precision_note, stored_precision
from attar.progress import Progress
from attar.walks.distributed import passes_of, shards
from attar.walks.train import TrainHistory, train

HEAD = "head"  # folder of the heads inside the model's


def train_jointly(
    target: Any,
    target_head: Head,
    heads: Any,
    rows: HeadRows,
    settings: TrainHeadSettings,
    output: StageOutput,
    progress: Progress,
) -> tuple[Any, TargetStates, TrainHistory]:
    """Train a model and its heads, in place: the model, a source of its states, and the history. The details
    of the card get the model's own loss on held-out rows before and after.

    Args:
        target: frozen so far.
        own: its head.
    """
    options, rank = cast(MedusaSettings, settings.options), settings.joint.adapter_rank
    steps = settings.joint_steps
    if rank:
        torch.manual_seed(settings.seed)  # A is drawn
        names = [name for block in discover(target).blocks for name in block.linears]
        base = add_adapters(target, names, rank)
    else:
        base = target.requires_grad_(True)
    original = original_of(base, target_head, bool(rank)) if options.together.base_loss == "self" else None
    if shards():
        raise SettingsError("joint", options.together.joint, "0 with --shard: the heads read the whole model")
    passes = passes_of(settings.accumulate, count())
    learner = JointLearner(base, heads, target_head, options, steps, original, passes)
    before = _held_out_loss(learner, rows.held_out, settings)
    history = train(
        learner,
        _loss,
        rows.training,
        replace(settings, steps=steps),
        work=output.work / "joint",
        held_out=lambda model: mean_loss(_loss, model, rows.held_out, settings.batch_size),
        progress=progress,
        what="joint",
    )
    after = _held_out_loss(learner, rows.held_out, settings)
    output.details["model_loss"] = {"before": before, "after": after}
    model = (base.merge_and_unload() if rank else base).eval().requires_grad_(False)
    trained_head = head_of(model)
    assert trained_head is not None, "it had one before"
    return model, TargetStates(model, trained_head, heads.config.layers), history


def _loss(model: nn.Module, batch: Examples) -> torch.Tensor:
    """A loss for the train walk: the learner's, or that of what wraps it."""
    loss: torch.Tensor = model(batch)
    return loss


@torch.no_grad()  # type: ignore[untyped-decorator]
def _held_out_loss(learner: JointLearner, rows: Examples, settings: TrainHeadSettings) -> float:
    """The model's cross-entropy on rows, in nats a token."""
    learner.eval()
    total, device = 0.0, learner.target_head.weight.device
    for batch in rows.split(settings.batch_size):
        batch = batch.trimmed().to(device)
        total += (
            float(text_loss(final_states(learner.base, batch), batch, learner.target_head)) * batch.count()
        )
    return total / rows.count()


def save_joint(
    model: Any, heads: Any, source: Checkpoint, output: StageOutput, out: Path, progress: Progress
) -> None:
    """Write the model and its heads.

    Args:
        out: where the model will be.
    """
    if note := precision_note(source):
        progress.log(note)
    save_model(model, output.folder, dtype=stored_precision(source))
    keep_mtp(source, output.folder, progress)
    copy_companions(source.path, output.folder)
    folder = output.folder / HEAD
    folder.mkdir()
    save_draft_head(heads, folder, target=out.name)
    fingerprint = open_checkpoint(output.folder).fingerprint()
    ancestors = (as_parent(source, "weights", source.fingerprint()),)
    parent = Parent(
        role="weights", name=out.name, stage="train-head", fingerprint=fingerprint, parents=ancestors
    )
    names = sorted(path.name for path in folder.iterdir())
    hashes = in_parallel(lambda name: sha256_file(folder / name), names)
    card = Card(
        name=f"{out.name}/{HEAD}",
        stage="train-head",
        key=output.key,
        parents=(parent,),
        versions=versions(),
        files=dict(zip(names, hashes, strict=True)),
        details={"drafting": output.details["drafting"], "head": heads.config.to_dict()},
        command=output.command,
    )
    card.write(folder)
