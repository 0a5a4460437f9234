"""The walk of structured pruning: scores of units, the least important go, the rest is a smaller model.

The structure defines the units (``structures/``), the criterion their scores (``criteria/``). In rounds, what
went before is masked while the rest is scored again; the cut is made once, at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from math import gcd
from typing import Any

import torch
from torch import Tensor

from attar.errors import ModelError, UsageError
from attar.importance.scoring import UnitScoring, no_loss
from attar.models.anatomy.discover import discover
from attar.models.anatomy.parts import Anatomy, weight_of
from attar.models.anatomy.unit_weights import UnitWeights
from attar.models.loading.device import pick_device
from attar.models.loading.empty import empty_model
from attar.models.loading.kept_mtp import NARROWER, keep_mtp
from attar.models.loading.load import load_model, load_tokenizer, save_model
from attar.models.loading.stored import precision_note, stored_precision
from attar.models.surgery.cut_model import cut_model
from attar.models.surgery.cut_plan import CutPlan
from attar.models.surgery.masking import masked_units
from attar.pruning.criteria import HEAD_CRITERIA, LOSS_CRITERIA
from attar.pruning.reconstruction.units import reconstruct_units
from attar.pruning.selection import keep_most_important, keep_over_rows, standardized, without_removed
from attar.pruning.settings import PruneSettings
from attar.pruning.structures import STRUCTURES, Structure, zero_heads
from attar.pruning.task import PruneTask
from attar.quantization.hessian import informed
from attar.walks.distributed import agreed_precision
from attar.walks.objectives import Loss, masked_token_loss, next_token_loss


def prune_units(task: PruneTask) -> None:
    """Remove the least important units of a structure; the config gets the new sizes.

    Raises:
        AttarError: the ratio removes nothing, or the family's config cannot say the result.
    """
    source, settings, output, progress = task.source, task.settings, task.output, task.progress
    structure, options = STRUCTURES[settings.method], task.options
    name = _criterion(structure, options)
    tokenizer = load_tokenizer(source)
    empty = empty_model(source.config)
    _check_even(structure, discover(empty))
    total = structure.total(discover(empty))
    count = structure.count(total, options)
    if count == total:
        raise nothing_removed(total, settings)
    zeroed = _zeroed(empty, structure, count, options)
    for note in (
        _share(total, count, settings),
        _format_note(structure, total, count),
        precision_note(source),
    ):
        if note:
            progress.log(note)
    loaded = load_model(source, dtype=torch.float32, device=pick_device(settings.device))
    anatomy = discover(loaded)
    scoring = UnitScoring(
        loaded,
        anatomy,
        structure.weights(loaded, anatomy),
        task.batches(),
        training_loss(anatomy, tokenizer) if name in HEAD_CRITERIA else no_loss,
        output.shared,
        precision=agreed_precision(output.processes, settings.precision, loaded.device, output.shared),
        processes=output.processes,
        progress=progress,
        what=f"prune {settings.method}",
    )
    scores, keep = choose_units(structure, options, scoring, count)
    plan = structure.plan(anatomy, keep)
    if settings.reconstruction != "none":
        reconstruct_units(task, loaded, anatomy, plan, settings.reconstruction, scoring.batches)
        output.details["reconstruct"] = settings.reconstruction
    output.exit_unless_rank0()
    smaller = zero_heads(loaded, anatomy, plan) if zeroed else checked_cut(scoring, plan)
    save_model(smaller, output.folder, dtype=stored_precision(source))
    keep_mtp(source, output.folder, progress, NARROWER if plan.is_narrower and not zeroed else "")
    output.details["layers"] = _report(structure.parts(anatomy), scores, keep)
    output.details["precision"] = scoring.precision
    output.details["kept"] = {
        "unit": settings.method,
        "of": total,
        "kept": count,
        "asked_ratio": options.ratio,
        "removed_ratio": 1 - sum(map(len, keep)) / (total * len(keep)),
        "criterion": name,
        "cut": "zeroed in place" if zeroed else "removed",
    }
    if plan.layers is not None:
        removed = set(range(total)) - set(plan.layers)
        output.details["kept"]["removed_layers"] = sorted(removed)


def choose_units(
    structure: Structure, options: Any, scoring: UnitScoring, count: int
) -> tuple[Tensor, list[list[int]]]:
    """The scores of all units (rows, units), of the first round, and the units of each row that stay.

    Args:
        count: units of a row that stay, in the mean where the scope is global.
    """
    name = _criterion(structure, options)
    total = structure.total(scoring.anatomy)
    first: Tensor | None = None
    keep: list[list[int]] = []
    for number in range(options.rounds):
        stay = total - round((total - count) * (number + 1) / options.rounds)
        what = scoring.what if options.rounds == 1 else f"{scoring.what}, round {number + 1}"
        plan = structure.plan(scoring.anatomy, keep) if keep else None
        with masked_units(scoring.model, plan) if plan else nullcontext():
            work = scoring.work / f"round-{number}"
            task = replace(scoring, stay=stay, work=work, what=what)
            scores = informed_scores(structure.criteria[name](task), scoring.weights).reshape(-1, total)
        first = scores if first is None else first
        scores = without_removed(scores, keep) if keep else scores
        if getattr(options, "scope", "layer") == "global":
            comparable = scores if name in LOSS_CRITERIA else standardized(scores)
            keep = keep_over_rows(comparable, stay, _multiple(options, count))
        else:
            keep = keep_most_important(scores, stay)
    assert first is not None
    return first, keep


def informed_scores(scores: Tensor, weights: Sequence[UnitWeights]) -> Tensor:
    """Scores (layers, units) with the median of their layer's others where a unit has a score of 0 although
    none of its matrices is zero: the calibration text never switched it on, which says nothing of other
    text."""
    filled = scores.clone()
    for row, layer in zip(filled, weights, strict=False):  # channels and layers have none
        row.copy_(informed(row).where(alive(layer).to(row.device), row))
    return filled


def alive(layer: UnitWeights) -> Tensor:
    """Units whose columns of the consumer, and rows of every producer, are not all zero: bool (U,)."""
    sizes = [layer.sums(weight_of(layer.consumer).detach().abs().sum(0).double())]
    for module, units in layer.producers:
        rows, units = weight_of(module).detach().abs().sum(1).double(), units.to(sizes[0].device)
        sizes.append(torch.zeros_like(sizes[0]).index_add_(0, units[units >= 0], rows[units >= 0]))
    return torch.stack(sizes).amin(0) > 0


def checked_cut(scoring: UnitScoring, plan: CutPlan) -> Any:
    """The cut model, which must compute what the masked one does.

    Raises:
        ModelError: it does not, on a row of the calibration text.
    """
    row = scoring.batches[0][:1, :64].to(scoring.device)
    cut = cut_model(scoring.model, plan)
    with torch.no_grad():
        with masked_units(scoring.model, plan):
            expected = getattr(scoring.model(input_ids=row), "logits", None)
        if expected is not None:
            off = float((cut(input_ids=row).logits - expected).abs().max() / expected.abs().max())
            if not off < 1e-3:
                raise ModelError(
                    f"{scoring.anatomy.family}: the cut model's logits differ from the masked model's by "
                    f"{off:.1e} of the largest",
                    hint="this family does more with its width than attar knows; use method neurons",
                )
    return cut


def nothing_removed(total: int, settings: PruneSettings) -> UsageError:
    """The error of a ratio that removes no unit; its hint is the smallest ratio that removes some."""
    options: Any = settings.options
    structure = STRUCTURES[settings.method]
    problem = (
        f"--ratio {options.ratio:g} removes none of the {total} {structure.noun} of "
        f"{structure.owner.replace('each', 'a')}"
    )
    for step in range(1, 10_000):
        count = structure.count(total, replace(options, ratio=step / 10_000))
        if count < total:
            return UsageError(problem, hint=f"--ratio {step / 10_000:g} removes {total - count} of {total}")
    return UsageError(problem, hint="one must stay" if total == 1 else "a smaller --multiple-of")


def _check_even(structure: Structure, anatomy: Anatomy) -> None:
    """Raise where layers have different numbers of the units, as a global scope leaves them."""
    totals = sorted({structure.total(replace(anatomy, blocks=(block,))) for block in anatomy.blocks})
    if len(totals) > 1:
        raise ModelError(
            f"{anatomy.family}: its layers have {totals[0]} to {totals[-1]} {structure.noun}, and only equal "
            f"layers are scored together",
            hint="prune the original model once, by the whole ratio; or use method layers or hidden",
        )


def _criterion(structure: Structure, options: Any) -> str:
    """The criterion's name; ``auto`` is the structure's first, or the first that compares layers as it is."""
    if options.criterion != "auto":
        return str(options.criterion)
    over_layers = getattr(options, "scope", "layer") == "global"
    return next(name for name in structure.criteria if not over_layers or name in LOSS_CRITERIA)


def _multiple(options: Any, count: int) -> int:
    """The multiple of units that a layer keeps under the global scope."""
    if not hasattr(options, "multiple_of"):
        return 1
    return int(options.multiple_of) or gcd(count, 64)


def _zeroed(empty: Any, structure: Structure, count: int, options: Any) -> bool:
    """Whether the units are zeroed in place, as the config cannot say the result and ``rigid`` allows it.

    Raises:
        ModelError: the config cannot say the result.
    """
    anatomy = discover(empty)
    rows = len(structure.parts(anatomy))
    uneven = getattr(options, "scope", "layer") == "global" and rows > 1
    first = count if not uneven else count - 1 if count > 1 else count + 1
    counts = [first, *[count] * (rows - 1)]
    try:
        cut_model(empty, structure.plan(anatomy, [list(range(number)) for number in counts]))
    except ModelError as error:
        if getattr(options, "rigid", "error") == "zero":
            return True
        hint = error.hint
        if uneven:
            hint = f"--scope layer keeps {count} {structure.noun} in each layer"
        elif hasattr(options, "rigid"):
            hint = "--method neurons, or --rigid zero to zero the heads"
        raise ModelError(error.message, hint=hint) from error
    return False


def _share(total: int, count: int, settings: PruneSettings) -> str:
    """The ratio asked for and the ratio of whole units, on one line."""
    options: Any = settings.options
    structure = STRUCTURES[settings.method]
    removed = total - count
    return (
        f"prune {settings.method}: asked for {options.ratio:.1%}, removes {removed / total:.1%}: "
        f"{removed} of {total} {structure.noun} of {structure.owner}"
    )


def _format_note(structure: Structure, total: int, count: int) -> str | None:
    """What a width costs in a format that the original's fitted."""
    if total % 256 or not count % 256 or structure.noun not in ("neurons", "channels"):
        return None
    return (
        f"{count} {structure.noun} are no multiple of 256: GGUF's k-quants store these layers in larger "
        f"types (--multiple-of 256 avoids it)"
    )


def training_loss(anatomy: Anatomy, tokenizer: Any) -> Loss:
    """The loss the model was trained with, next token or masked token, on whole rows."""
    if anatomy.causal:
        return lambda model, tokens: next_token_loss(model(input_ids=tokens).logits, tokens)
    if anatomy.head is None:
        raise ModelError(
            f"{anatomy.family}: no language-model head, so importance has no loss to differentiate",
            hint="use the checkpoint of the masked language model",
        )
    if tokenizer.mask_token_id is None:
        raise ModelError(
            f"{anatomy.family}: the tokenizer has no mask token", hint="an encoder is judged by masked tokens"
        )
    return lambda model, tokens: masked_token_loss(model, tokens, tokenizer.mask_token_id)


def _report(parts: Sequence[str], scores: Tensor, keep: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Per row: how many units were removed, and their share of the row's summed importance."""
    rows = []
    for part, row, kept in zip(parts, scores, keep, strict=True):
        removed = sorted(set(range(len(row))) - set(kept))
        share = float(row[removed].sum() / row.sum().clamp(min=1e-30))
        rows.append({"name": part, "removed": len(removed), "kept": len(kept), "importance_removed": share})
    return rows
