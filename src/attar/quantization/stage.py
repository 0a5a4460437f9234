"""The verb ``quantize``: a dense checkpoint in, a packed one out.

    allocate   bits for each layer from measured sensitivities               (--bits)
    transform  rotate, smooth: a dense model of the same function            (transform.py)
    round      codes on each layer's grid, whatever the method               (rounding.py)
    write      codes and everything else, as the scheme's format wants it    (write.py)
    judge      each layer, and the model against the original                (judgement.py)

The steps know nothing of each other but checkpoints and codes, so that any rounding follows any transform and
ends in any format. Each leaves what it has done in the work folder; a killed run goes on from there.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from attar.checkpoint.companions import copy_companions
from attar.checkpoint.lineage import texts_of
from attar.checkpoint.open import open_checkpoint
from attar.checkpoint.output import produce
from attar.data.auto import fit
from attar.data.packing import row_length
from attar.data.seen import note_texts, record
from attar.data.sources import fingerprint
from attar.models.fit import check_fit
from attar.models.load import load_tokenizer
from attar.models.precision import stored_precision
from attar.progress import SILENT, Progress
from attar.quantization.check import check_result
from attar.quantization.loads import loads_in, warnings
from attar.quantization.mixed_precision.mixture import mixture
from attar.quantization.plan import QuantizationPlan, group_sizes, plan
from attar.quantization.rounding import round_all
from attar.quantization.settings import VERSION, QuantizeSettings
from attar.quantization.transforms.preparation import prepare
from attar.quantization.write import write

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint


def quantize(
    model: str | Path | Checkpoint,
    out: Path,
    settings: QuantizeSettings,
    *,
    progress: Progress = SILENT,
    force: bool = False,
    key: str | None = None,
) -> Checkpoint:
    """Quantize the Linears of a model's blocks.

    Args:
        model: a dense checkpoint.
        out: the folder to make.
        settings: what to quantize, how far and how.
        force: replace an existing ``out``.
        key: identity of this work, when a recipe knows it.

    Returns:
        the packed checkpoint; its card lists every layer with its error, and what the gates found.

    Raises:
        NumericsError: a layer or the whole result failed its gate; names the layer.
        AttarError: see errors.py; nothing is left behind.
    """
    checkpoint = open_checkpoint(model)
    if not checkpoint.config.get("quantization_config"):
        check_fit(checkpoint, text=settings.check_tokens > 0)
    first = plan(checkpoint, settings)  # what cannot be done is said before anything is
    if _calibrates(settings, first) or settings.check_tokens:
        settings = fit(settings, checkpoint, progress)
    text = fingerprint(settings.data)
    with produce(out, "quantize", settings, VERSION, [checkpoint], text=text, force=force, key=key) as output:
        details: dict[str, Any] = output.details
        note_texts(output, _records(checkpoint, settings, first), progress)
        assigned = None
        if settings.bits:
            assigned, details["mixture"] = mixture(checkpoint, settings, output.work, progress)
        source, transforms = prepare(checkpoint, settings, assigned, output.work, progress)
        if transforms:
            details["transforms"] = transforms
        storage = stored_precision(checkpoint)
        chosen = plan(source, settings, assigned, storage=storage if transforms else None)
        details["loads_in"] = loads_in(chosen)
        details["group_sizes"] = group_sizes(chosen)
        for warning in warnings(details["loads_in"]):
            progress.log(f"note: {warning}")
        rounded = round_all(source, chosen, settings, output.work, progress)
        write(
            source,
            chosen,
            rounded.codes,
            output.folder,
            output.work / "shards",
            progress,
            input_scales=rounded.input_scales,
            kv_scales=rounded.kv_scales,
            dtype=storage if transforms else None,
        )
        copy_companions(checkpoint.path, output.folder)
        details["layers"] = rounded.reports()
        if rounded.precision:
            details["precision"] = rounded.precision
        if rounded.curve:
            details["curve"] = rounded.curve
        written, texts = open_checkpoint(output.folder), [*texts_of(checkpoint), *output.texts]
        reports = rounded.reports()
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


def _calibrates(settings: QuantizeSettings, chosen: QuantizationPlan) -> bool:
    """Whether calibration text is run through the model."""
    nearest = settings.rounding == "rtn" and settings.smoothing == "none" and not settings.bits
    return not nearest or bool(chosen.caches) or any(site.static for site in chosen.sites.values())


def _records(
    checkpoint: Checkpoint, settings: QuantizeSettings, chosen: QuantizationPlan
) -> list[dict[str, Any]]:
    """The text that the quantization reads."""
    if not _calibrates(settings, chosen):
        return []
    reads = [("calibration", settings.samples)]
    if settings.rounding == "qat":
        reads.append(("train", settings.steps * settings.batch_size))
    tokenizer, length = load_tokenizer(checkpoint), row_length(settings.sequence_length, checkpoint.config)
    return [record("quantize", tokenizer, settings, split, length=length, rows=rows) for split, rows in reads]
