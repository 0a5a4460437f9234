"""The verb ``prune``: attention head groups or MLP neurons, the least important ones, really removed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attar.checkpoint.companions import copy_companions
from attar.checkpoint.open import open_checkpoint
from attar.checkpoint.output import produce
from attar.data.auto import fit
from attar.data.packing import calibration_batches, row_length
from attar.data.seen import note_texts, record
from attar.data.sources import fingerprint
from attar.errors import ModelError, SettingsError, UsageError
from attar.models.anatomy import discover
from attar.models.device import pick_device, resolve
from attar.models.load import empty_model, load_model, load_tokenizer, save_model
from attar.models.parts import Anatomy, weight_of
from attar.models.stored import precision_note, stored_precision
from attar.models.surgery import keep_heads, keep_neurons
from attar.progress import SILENT, Progress
from attar.pruning.criteria.gradient import gradient_importance, keep_most_important, units_of
from attar.pruning.settings import VERSION, PruneSettings
from attar.walks.objectives import masked_token_loss, next_token_loss

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint

UnitCut = Callable[[Any, Sequence[Sequence[int]]], Any]


def prune(
    model: str | Path | Checkpoint,
    out: Path,
    settings: PruneSettings,
    *,
    progress: Progress = SILENT,
    force: bool = False,
    key: str | None = None,
) -> Checkpoint:
    """Remove the least important head groups or neurons of every layer.

    Args:
        model: a dense or packed checkpoint.
        out: the folder to make; its config says the new sizes.

    Raises:
        AttarError: see errors.py; nothing is left behind.
    """
    source = open_checkpoint(model)
    tokenizer = load_tokenizer(source)
    settings = fit(settings, source, progress)
    loaded = load_model(source, dtype=torch.float32, device=pick_device(settings.device))
    anatomy = discover(loaded)
    modules, owners = units(loaded, anatomy, settings.method)
    total = int(owners[0].max()) + 1
    keep = kept_units(total, settings)
    if keep == total:
        raise nothing_removed(total, settings)
    cut = _cut(source, anatomy, settings, keep)
    text = fingerprint(settings.data)
    with produce(out, "prune", settings, VERSION, [source], text=text, force=force, key=key) as output:
        for note in (_share(total, keep, settings), precision_note(source)):
            if note:
                progress.log(note)
        length = row_length(settings.sequence_length, source.config)
        read = record("prune", tokenizer, settings, "calibration", length=length, rows=settings.samples)
        note_texts(output, [read], progress)
        batches = calibration_batches(
            tokenizer,
            settings.data,
            samples=settings.samples,
            sequence_length=length,
            batch_size=settings.batch_size,
            seed=settings.seed,
            bos=settings.bos,
        )
        loss = _loss(anatomy, tokenizer)
        precision = resolve(settings.precision, loaded.device)
        with torch.autocast(loaded.device.type, torch.bfloat16, enabled=precision == "bf16"):
            importance = gradient_importance(
                loaded, modules, owners, loss, batches, progress, f"prune {settings.method}"
            )
        chosen = keep_most_important(importance, keep)
        save_model(cut(loaded, chosen), output.folder, dtype=stored_precision(source))
        copy_companions(source.path, output.folder)
        output.details["layers"] = _report(anatomy, importance, chosen, settings.method)
        output.details["precision"] = precision
        output.details["kept"] = {
            "unit": settings.method,
            "of": total,
            "kept": keep,
            "asked_ratio": settings.ratio,
            "removed_ratio": 1 - keep / total,
            "cut": "zeroed in place" if cut is zero_heads else "removed",
        }
    return open_checkpoint(out)


def _cut(source: Checkpoint, anatomy: Anatomy, settings: PruneSettings, keep: int) -> UnitCut:
    """How units are removed; a family that cannot express it is found out here, on a model without weights.

    Raises:
        ModelError: the family's config has no number for fewer heads, and ``rigid`` is ``error``.
    """
    if settings.method == "neurons":
        return keep_neurons
    try:
        keep_heads(empty_model(source.config), [list(range(keep))] * len(anatomy.blocks))
    except ModelError as error:
        if settings.rigid == "zero":
            return zero_heads
        raise ModelError(error.message, hint="--method neurons, or --rigid zero to zero the heads") from error
    return keep_heads


def zero_heads(model: nn.Module, keep: Sequence[Sequence[int]]) -> nn.Module:
    """Zero the output projection's columns of the heads that are not kept, in place. Nothing gets smaller."""
    with torch.no_grad():
        for block, kept in zip(discover(model).blocks, keep, strict=True):
            weight = weight_of(model.get_submodule(block.attention.o.name))
            for number, group in enumerate(block.attention.groups()):
                if number not in kept:
                    weight[:, list(group.o_columns)] = 0.0
    return model


def units(model: nn.Module, anatomy: Anatomy, method: str) -> tuple[list[nn.Module], list[Tensor]]:
    """Per layer, the Linear whose inputs the units are, and the unit of each of its inputs (int64 (F,))."""
    if method == "heads":
        modules = [model.get_submodule(block.attention.o.name) for block in anatomy.blocks]
        owners = [
            units_of([group.o_columns for group in block.attention.groups()], block.attention.o.in_features)
            for block in anatomy.blocks
        ]
    else:
        modules = [model.get_submodule(block.mlp.down.name) for block in anatomy.blocks]
        owners = [torch.arange(block.mlp.neurons) for block in anatomy.blocks]
    return modules, owners


def kept_units(total: int, settings: PruneSettings) -> int:
    """How many units of a layer stay: the fraction asked for, as a multiple that quantization groups can use.

    Raises:
        SettingsError: the multiple leaves nothing to keep or does not fit.
    """
    wanted = total * (1.0 - settings.ratio)
    if settings.method == "heads":
        return max(round(wanted), 1)
    if settings.multiple_of > total:
        raise SettingsError("multiple_of", settings.multiple_of, f"at most the {total} neurons of a layer")
    if settings.multiple_of:
        return _nearest(total, wanted, settings.multiple_of)
    return next(
        _nearest(total, wanted, m)
        for m in (64, 32, 16, 8, 4, 2, 1)
        if m == 1 or (total % m == 0 and wanted >= 8 * m and _hits(total, wanted, m))
    )


def _nearest(total: int, wanted: float, multiple: int) -> int:
    """The multiple nearest to the number wanted; at least one, at most all."""
    return min(max(round(wanted / multiple), 1) * multiple, total)


def _hits(total: int, wanted: float, multiple: int) -> bool:
    """Whether the multiple misses by a quarter of what is to be removed at most."""
    return abs(_nearest(total, wanted, multiple) - wanted) <= 0.25 * (total - wanted)


def nothing_removed(total: int, settings: PruneSettings) -> UsageError:
    """What is said of a ratio that removes no unit, with the least that removes some."""
    problem = f"--ratio {settings.ratio:g} removes none of the {total} {_units(settings)} of a layer"
    multiple = 1 if settings.method == "heads" else settings.multiple_of or 1
    fewer = math.ceil(total / multiple) - 1  # multiples below the total
    if fewer == 0:
        return UsageError(problem, hint="one must stay" if total == 1 else "a smaller --multiple-of")
    half = (total - (fewer + 0.5) * multiple) / total  # beyond this ratio fewer are kept
    ratio = (math.floor(half * 10_000 + 1e-6) + 1) / 10_000
    removed = total - kept_units(total, replace(settings, ratio=ratio))
    return UsageError(problem, hint=f"--ratio {ratio:g} removes {removed} of {total}")


def _share(total: int, keep: int, settings: PruneSettings) -> str:
    """What was asked for and what whole units allow, in a line."""
    removed = total - keep
    return (
        f"prune {settings.method}: asked for {settings.ratio:.1%}, removes {removed / total:.1%}: "
        f"{removed} of {total} {_units(settings)} of each layer"
    )


def _units(settings: PruneSettings) -> str:
    return "head groups" if settings.method == "heads" else "neurons"


def _loss(anatomy: Anatomy, tokenizer: Any) -> Any:
    """The language-modelling loss that the model was made for, on whole rows."""
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
    anatomy: Anatomy, importance: Tensor, chosen: list[list[int]], method: str
) -> list[dict[str, Any]]:
    """Per layer: what was removed, and which part of the layer's summed importance went with it."""
    rows = []
    for block, scores, kept in zip(anatomy.blocks, importance, chosen, strict=True):
        removed = sorted(set(range(len(scores))) - set(kept))
        lost = float(scores[removed].sum() / scores.sum().clamp(min=1e-30))
        name = block.attention.name if method == "heads" else block.mlp.name
        rows.append({"name": name, "removed": len(removed), "kept": len(kept), "importance_removed": lost})
    return rows
