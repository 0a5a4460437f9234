"""Candidates: plans of a size compared after a short distillation from the original, with the same tokens.

Rankings turn when models recover: of two plans of a size, the worse one may be the better one after training
(Minitron, Muralidharan et al. 2024, arXiv 2407.14679, section 4; Puzzle, Bercovich et al. 2024, arXiv
2411.19146). Each candidate is cut from the original, trained on KL(original || cut) for some steps, and
judged by that KL on held-out text. Of the best one the cut before training is kept: ``attar recover``
follows, with more tokens.

A finished candidate is a file in the work folder, and an unfinished one resumes from its last state.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attar.checkpoint.atomic import write_json
from attar.checkpoint.jsonfile import read_json
from attar.data.packing import pack, row_length
from attar.data.seen import note_texts, record
from attar.errors import DataError, ModelError
from attar.models.anatomy.parts import Anatomy
from attar.models.loading.load import load_tokenizer
from attar.models.surgery.cut_model import cut_model
from attar.pruning.planning.study import CutScan, CutStudy
from attar.pruning.planning.trials import PlanTrial
from attar.pruning.task import PruneTask
from attar.walks.objectives import distillation_loss, soft_loss, token_kl
from attar.walks.settings import TrainSettings
from attar.walks.train import train

HELD_OUT = 8_192  # tokens on which candidates are judged
LEARNING_RATE = 2e-4  # as in attar recover


@dataclass(frozen=True)
class CandidateTexts:
    """Rows (N, S) for training, and rows of the calibration split that no score and no scan has read."""

    rows: Tensor
    held_out: Tensor


def candidate_texts(task: PruneTask, anatomy: Anatomy) -> CandidateTexts:
    """The text of the candidates.

    Raises:
        ModelError: an encoder.
        DataError: no calibration text is left for the judgement.
    """
    if not anatomy.causal:
        raise ModelError("candidates are causal models: an encoder is not distilled", hint="--candidates 1")
    settings, options = task.settings, task.options
    tokenizer, length = load_tokenizer(task.source), row_length(settings.sequence_length, task.source.config)
    count = options.candidate_steps * settings.batch_size
    judged = max(HELD_OUT // length, 1)
    records = [
        record("prune", tokenizer, settings, split, length=length, rows=number)
        for split, number in (("train", count), ("calibration", settings.samples + judged))
    ]
    note_texts(task.output, records, task.progress)

    def rows(split: str, number: int) -> Tensor:
        return pack(
            tokenizer, settings.data, split, length=length, rows=number, seed=settings.seed, bos=settings.bos
        ).rows

    held_out = rows("calibration", settings.samples + judged)[settings.samples :]
    if not len(held_out):
        raise DataError(
            f"{settings.data}: the calibration split has no rows after the first {settings.samples}",
            hint="fewer --samples, or more text",
        )
    return CandidateTexts(rows("train", count), held_out)


def compare_candidates(
    task: PruneTask,
    texts: CandidateTexts,
    study: CutStudy,
    scanned: CutScan,
    trials: Sequence[PlanTrial],
) -> tuple[PlanTrial, list[dict[str, Any]]]:
    """The plan that is best after training; for each candidate its sizes, its held-out KL before and after.

    Args:
        trials: plans within the budget, the best first.
    """
    options, full = task.options, study.space.full
    cuts = [trial.sizes.cut_structures(full) for trial in trials]
    chosen = pick_candidates(trials, cuts, options.candidates)
    study.model.requires_grad_(False)
    table = []
    for number, trial in enumerate(chosen, start=1):
        file = task.output.work / "candidates" / f"{'-'.join(map(str, trial.sizes))}.json"
        if not file.exists():
            layers = scanned.planned.kept_layers(trial.sizes.layers)
            student = cut_model(study.model, study.space.cut_plan(trial.sizes, study.ranking, layers))
            before = held_out_kl(study.model, student, texts.held_out)
            what = f"candidate {number} of {len(chosen)}"
            train(
                student.requires_grad_(True),
                distillation_loss(soft_loss(study.model)),
                texts.rows,
                _training(task),
                work=file.with_suffix(""),
                progress=task.progress,
                what=what,
            )
            after = held_out_kl(study.model, student.eval(), texts.held_out)
            write_json(file, {"kl_before": before, "kl_after": after})
            shutil.rmtree(file.with_suffix(""), ignore_errors=True)
        known = {"plan": trial.sizes.text(full), "kl": trial.kl, "parameters": trial.parameters}
        table.append(known | read_json(file))
    best = min(range(len(chosen)), key=lambda index: table[index]["kl_after"])
    for number, row in enumerate(table):
        row["chosen"] = number == best
    return chosen[best], table


def pick_candidates(trials: Sequence[Any], structures: Sequence[tuple[str, ...]], count: int) -> list[Any]:
    """The best trial, the best one that cuts layers alone, the best one that cuts widths alone, and then the
    best others.

    Args:
        trials: the best first; structures: the structures that each trial cuts.
    """
    pairs = list(zip(trials, structures, strict=True))
    depth = [trial for trial, cut in pairs if cut == ("layers",)]
    width = [trial for trial, cut in pairs if "layers" not in cut]
    ordered = [*trials[:1], *depth[:1], *width[:1], *trials]
    return [trial for number, trial in enumerate(ordered) if trial not in ordered[:number]][:count]


def held_out_kl(original: nn.Module, cut: nn.Module, rows: Tensor, batch: int = 8) -> float:
    """KL(original || cut), mean over the tokens of rows (N, S)."""
    total = 0.0
    device = next(original.parameters()).device
    with torch.no_grad():
        for tokens in rows.split(batch):
            p, q = (model(input_ids=tokens.to(device)).logits.flatten(0, 1) for model in (original, cut))
            total += float(token_kl(p, q).sum())
    return float(total / rows.numel())


def _training(task: PruneTask) -> TrainSettings:
    settings, options = task.settings, task.options
    return TrainSettings(
        steps=options.candidate_steps,
        batch_size=settings.batch_size,
        sequence_length=settings.sequence_length,
        learning_rate=LEARNING_RATE,
        precision=settings.precision,
        data=settings.data,
        seed=settings.seed,
        device=settings.device,
    )
