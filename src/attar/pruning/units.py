"""The walk of structured pruning: scores of units, the least important go, the rest is a smaller model.

The structure defines the units (``structures/``), the criterion their importance (``criteria/``).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attar.errors import ModelError, UsageError
from attar.models.anatomy import discover
from attar.models.device import pick_device, resolve
from attar.models.load import load_model, load_tokenizer, save_model
from attar.models.parts import Anatomy
from attar.models.stored import precision_note, stored_precision
from attar.pruning.criteria import CRITERIA
from attar.pruning.criteria.gradient import keep_most_important
from attar.pruning.settings import PruneSettings
from attar.pruning.structures import STRUCTURES
from attar.pruning.structures.heads import zero_heads
from attar.pruning.task import PruneTask
from attar.walks.objectives import masked_token_loss, next_token_loss

if TYPE_CHECKING:
    from attar.pruning.structures.structure import Structure


def prune_units(task: PruneTask) -> None:
    """Remove the least important head groups or neurons of every layer; the config gets the new sizes.

    Raises:
        AttarError: the ratio removes nothing, or the family's config cannot say the result.
    """
    source, settings, output, progress = task.source, task.settings, task.output, task.progress
    tokenizer = load_tokenizer(source)
    loaded = load_model(source, dtype=torch.float32, device=pick_device(settings.device))
    anatomy = discover(loaded)
    structure = STRUCTURES[settings.method]
    modules, owners = structure.units(loaded, anatomy)
    total = int(owners[0].max()) + 1
    count = structure.count(total, task.options)
    if count == total:
        raise nothing_removed(total, settings)
    cut = structure.cut(source.config, anatomy, count, task.options)
    for note in (_share(total, count, settings.method, task.options.ratio), precision_note(source)):
        if note:
            progress.log(note)
    batches = task.batches()
    loss = _loss(anatomy, tokenizer)
    precision = resolve(settings.precision, loaded.device)
    with torch.autocast(loaded.device.type, torch.bfloat16, enabled=precision == "bf16"):
        importance = CRITERIA["gradient"](
            loaded, modules, owners, loss, batches, progress, f"prune {settings.method}"
        )
    keep = keep_most_important(importance, count)
    save_model(cut(loaded, keep), output.folder, dtype=stored_precision(source))
    output.details["layers"] = _report(anatomy, importance, keep, structure)
    output.details["precision"] = precision
    output.details["kept"] = {
        "unit": settings.method,
        "of": total,
        "kept": count,
        "asked_ratio": task.options.ratio,
        "removed_ratio": 1 - count / total,
        "cut": "zeroed in place" if cut is zero_heads else "removed",
    }


def nothing_removed(total: int, settings: PruneSettings) -> UsageError:
    """The error of a ratio that removes no unit; its hint is the smallest ratio that removes some."""
    options: Any = settings.options
    noun = STRUCTURES[settings.method].noun
    problem = f"--ratio {options.ratio:g} removes none of the {total} {noun} of a layer"
    multiple = getattr(options, "multiple_of", 0) or 1
    fewer = math.ceil(total / multiple) - 1  # multiples below the total
    if fewer == 0:
        return UsageError(problem, hint="one must stay" if total == 1 else "a smaller --multiple-of")
    half = (total - (fewer + 0.5) * multiple) / total  # beyond this ratio fewer are kept
    ratio = (math.floor(half * 10_000 + 1e-6) + 1) / 10_000
    removed = total - STRUCTURES[settings.method].count(total, replace(options, ratio=ratio))
    return UsageError(problem, hint=f"--ratio {ratio:g} removes {removed} of {total}")


def _share(total: int, count: int, method: str, ratio: float) -> str:
    """The ratio asked for and the ratio of whole units, on one line."""
    removed = total - count
    return (
        f"prune {method}: asked for {ratio:.1%}, removes {removed / total:.1%}: "
        f"{removed} of {total} {STRUCTURES[method].noun} of each layer"
    )


def _loss(anatomy: Anatomy, tokenizer: Any) -> Any:
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


def _report(
    anatomy: Anatomy, importance: Tensor, keep: list[list[int]], structure: Structure
) -> list[dict[str, Any]]:
    """Per layer: how many units were removed, and their share of the layer's summed importance."""
    rows = []
    for block, scores, kept in zip(anatomy.blocks, importance, keep, strict=True):
        removed = sorted(set(range(len(scores))) - set(kept))
        share = float(scores[removed].sum() / scores.sum().clamp(min=1e-30))
        rows.append(
            {
                "name": structure.part(block),
                "removed": len(removed),
                "kept": len(kept),
                "importance_removed": share,
            }
        )
    return rows
