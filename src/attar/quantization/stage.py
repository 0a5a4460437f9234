"""The verb ``quantize``: a checkpoint in, a packed one out. A packed source is decoded as it is read.

    allocate    bits for each layer from measured sensitivities              (mixed_precision/, with --bits)
    transform   rotate, smooth: a dense model of the same function           (transforms/apply.py)
    round       codes on each layer's grid, by any method                    (rounding.py)
    write       codes and everything else in the scheme's format             (write.py)
    check       each layer, and the model against the original               (check.py)

The steps exchange checkpoints and codes only, so that any rounding follows any transform and ends in any
format. Each keeps its results in the work folder; a killed run resumes there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from attar.checkpoint.companions import copy_companions
from attar.checkpoint.lineage import texts_of
from attar.checkpoint.open import Checkpoint, open_checkpoint
from attar.checkpoint.output import produce
from attar.data.auto import fit
from attar.data.packing import row_length
from attar.data.seen import note_texts, record
from attar.data.sources import COMPRESSION, fingerprint
from attar.models.loading.fit import admit
from attar.models.loading.load import load_tokenizer
from attar.models.loading.single_experts import single_experts
from attar.models.loading.stored import stored_precision
from attar.models.surgery.zeros import resolve_zeros, stated_zeros
from attar.progress import SILENT, Progress
from attar.quantization.calibration import batches_of, static_scales
from attar.quantization.carried import NOTHING_ROUNDED, CarriedCodes, carried, loss_note, without
from attar.quantization.check import check_result
from attar.quantization.effort import with_effort
from attar.quantization.gates import rarest_expert
from attar.quantization.kv_basis import calibrate_basis
from attar.quantization.mixed_precision.search import choose_bits
from attar.quantization.plan import QuantizationPlan, embedding_note, group_sizes, mtp_note, plan
from attar.quantization.quantization_method import RoundingTask
from attar.quantization.rounding import METHODS, rounds_mtp
from attar.quantization.settings import (
    VERSION,
    AWQSettings,
    GPTQSettings,
    MethodSettings,
    QATSettings,
    QuantizeSettings,
    SparseGPTQSettings,
    tuning_rows,
)
from attar.quantization.transforms.apply import apply_transforms
from attar.quantization.tuning import tuned
from attar.quantization.write import loads_in, warnings, write
from attar.sparsity import STORED_AS_CODES, Sparsity, zeros_statement


def quantize(
    model: str | Path | Checkpoint,
    out: Path,
    settings: QuantizeSettings,
    *,
    progress: Progress = SILENT,
    force: bool = False,
    key: str | None = None,
) -> Checkpoint:
    """Quantize the Linears of a model's blocks. Returns the packed checkpoint; its card lists every layer
    with its error, and the results of the gates.

    Args:
        force: replace an existing ``out``.
        key: identity of this work, when a recipe knows it.

    Raises:
        NumericsError: a layer or the whole result failed its gate; names the layer.
        AttarError: see errors.py; no partial output is left.
    """
    checkpoint = admit(model, progress, text=settings.check_tokens > 0, dense=True)
    settings = _with_zeros(settings, checkpoint, progress)
    ordered = _stores_order(settings.rounding)
    first = plan(checkpoint, settings.storage, group_order=ordered)  # refuses before any work is done
    for layer in first.sites.values():
        if settings.amount is not None:
            settings.amount.check(layer.shape[1], layer.module)
    settings = with_effort(settings, first, checkpoint, progress)
    for note in (embedding_note(checkpoint, first), mtp_note(checkpoint, first, rounds_mtp(settings))):
        if note:
            progress.log(note)
    if _calibrates(settings, first) or settings.check_tokens:
        settings = fit(settings, checkpoint, progress)
    text = fingerprint(settings.data)
    with produce(out, "quantize", settings, VERSION, [checkpoint], text=text, force=force, key=key) as output:
        details: dict[str, Any] = output.details
        note_texts(output, _records(checkpoint, settings, first), progress)
        assigned = None
        if settings.storage.bits:
            assigned, details["mixed_precision"] = choose_bits(
                checkpoint, settings, output.work, progress, processes=output.processes
            )
        single = single_experts(checkpoint)
        source, transforms = apply_transforms(
            single, settings, assigned, output.shared, output.processes, progress
        )
        dtype = stored_precision(checkpoint) if transforms else None
        if transforms:
            details["transforms"] = transforms
        chosen = plan(source, settings.storage, assigned, group_order=ordered, dtype=dtype)
        kept = carried(source, chosen, settings)
        sites, mtp = {**chosen.sites, **kept.sites}, {**chosen.mtp, **kept.mtp}
        chosen = replace(chosen, sites=sites, mtp=mtp)
        if loss := loss_note(checkpoint, chosen, kept):
            progress.log(f"note: {loss}")
        if settings.storage.keep_zeros == "true" and not settings.transform.rotate:
            details.update(stated_zeros(checkpoint, STORED_AS_CODES))
        details["loads_in"] = loads_in(chosen)
        details["group_sizes"] = group_sizes(chosen)
        for warning in warnings(details["loads_in"]):
            progress.log(f"note: {warning}")
        scales = static_scales(source, chosen, settings, output.shared, progress, output.processes)
        rounds = without(chosen, kept)
        task = RoundingTask(source, rounds, settings, output.shared, progress, processes=output.processes)
        if rounds.sites:
            rounded = METHODS[settings.method].walk(task)
            if settings.tuning.tune:
                rounded = tuned(task, rounded)
        else:
            rounded = NOTHING_ROUNDED
        codes = CarriedCodes(source, chosen, kept, rounded)
        write(
            source,
            chosen,
            codes,
            output.folder,
            output.shared / "shards",
            progress,
            processes=output.processes,
            input_scales={**scales.inputs, **rounded.input_scales},
            kv_scales=scales.caches,
            dtype=dtype,
            norms=rounded.norms,
        )
        output.exit_unless_rank0()
        copy_companions(checkpoint.path, output.folder)
        details["layers"] = reports = codes.reports()
        rarest = rarest_expert(reports)
        if rarest is not None:
            details["rarest_expert"] = {"name": rarest[0], "tokens": rarest[1]}
        if isinstance(settings.rounding, SparseGPTQSettings) and settings.rounding.amount is not None:
            details["zeros"] = _chosen_zeros(settings.rounding.amount, chosen, reports)
        if rounded.mtp_reports:
            details["mtp"] = rounded.mtp_reports
        if rounded.tuning:
            details["tuning"] = dict(rounded.tuning)
        if rounded.precision:
            details["precision"] = rounded.precision
        if rounded.curve:
            details["curve"] = rounded.curve
        if settings.storage.kv_cache == "int4":
            batches = batches_of(checkpoint, settings)
            details["kv_cache"] = calibrate_basis(
                open_checkpoint(output.folder), batches, output.folder, progress, settings.storage.kv_bits
            )
        written, texts = open_checkpoint(output.folder), [*texts_of(checkpoint), *output.texts]
        gates = check_result(checkpoint, written, chosen, reports, settings, output.work, texts, progress)
        details["gates"] = gates
        for warning in gates["warnings"]:
            progress.log(f"warning: {warning}")
        measured = {
            "kl_mean": gates.get("kl"),
            "top1_agreement": gates.get("top1"),
            "tokens": gates.get("tokens"),
        }
        output.measurements.update({name: value for name, value in measured.items() if value is not None})
    return open_checkpoint(out)


def _with_zeros(settings: QuantizeSettings, checkpoint: Checkpoint, progress: Progress) -> QuantizeSettings:
    """The settings with what ``keep_zeros`` means for this checkpoint; zeros that are lost are announced."""
    keep = resolve_zeros(checkpoint, settings.storage.keep_zeros)
    if keep == "true" and settings.transform.rotate:
        progress.log("warning: rotating mixes the weights, so that the zeros of this pruned model are lost")
    elif keep != settings.storage.keep_zeros and keep == "true":
        progress.log("pruned weights stay zero, as the lineage has it (--keep-zeros false gives them up)")
    return replace(settings, storage=replace(settings.storage, keep_zeros=keep))


def _stores_order(options: MethodSettings) -> bool:
    """Whether groups follow the order of importance, stored with each column's group."""
    return isinstance(options, AWQSettings | GPTQSettings) and options.act_order == "group"


def _calibrates(settings: QuantizeSettings, chosen: QuantizationPlan) -> bool:
    """Whether calibration text is run through the model."""
    sees_text = METHODS[settings.method].sees_text or settings.smoothing != "none" or settings.storage.bits
    keys = settings.storage.kv_cache == "int4"
    static = any(layer.static for layer in chosen.sites.values())
    return bool(sees_text or keys or settings.tuning.tune or chosen.caches or static)


def _records(
    checkpoint: Checkpoint, settings: QuantizeSettings, chosen: QuantizationPlan
) -> list[dict[str, Any]]:
    """The text that the quantization reads."""
    if not _calibrates(settings, chosen):
        return []
    sizes = settings.calibration
    tokenizer, length = load_tokenizer(checkpoint), row_length(sizes.sequence_length, checkpoint.config)
    *_, tuned = tuning_rows(settings.tuning.tune, length)
    reads = [(COMPRESSION, sizes.samples + tuned)]
    if isinstance(settings.rounding, QATSettings):
        reads.append(("train", settings.rounding.steps * sizes.batch_size))
    return [record("quantize", tokenizer, settings, split, length=length, rows=rows) for split, rows in reads]


def _chosen_zeros(
    sparsity: Sparsity, chosen: QuantizationPlan, reports: list[dict[str, Any]]
) -> dict[str, int | float | str]:
    """What the card says of the zeros that were chosen together with the codes."""
    sizes = {layer.module: layer.shape[0] * layer.shape[1] for layer in chosen.sites.values()}
    zeros = sum(round(row["sparsity"] * sizes[row["name"]]) for row in reports)
    return zeros_statement("gptq", sparsity, zeros, sum(sizes.values()), STORED_AS_CODES)
