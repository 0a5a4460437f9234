"""What is done to the float model before it is rounded: rotation, smoothing, one after the other, each a
dense checkpoint of the same function in the work folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attar.data.calibration import calibration_batches
from attar.data.packing import row_length
from attar.formats.rules import ActivationRule
from attar.models.device import pick_device
from attar.models.load import load_tokenizer
from attar.models.precision import stored_precision
from attar.progress import Progress
from attar.quantization.grids import Grid, IntGrid
from attar.quantization.grids.float8 import Float8Grid
from attar.quantization.plan import plan
from attar.quantization.settings import QuantizeSettings
from attar.quantization.transforms.apply import report_of, transform

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint


def prepare(
    checkpoint: Checkpoint,
    settings: QuantizeSettings,
    assigned: Mapping[str, str] | None,
    work: Path,
    progress: Progress,
) -> tuple[Checkpoint, list[dict[str, Any]]]:
    """The checkpoint that will be rounded, and what each transform did; the checkpoint itself where none is
    asked for."""
    done = []
    source, device = checkpoint, pick_device(settings.device)
    if settings.rotate:
        folder = work / "rotated"
        source = transform(
            source,
            "rotate",
            folder=folder,
            work=work / "rotate",
            untie=settings.untie,
            seed=settings.seed,
            device=device,
            progress=progress,
        )
        done.append(report_of(folder))
    if settings.smoothing != "none":
        folder = work / "smoothed"
        storage = stored_precision(checkpoint)
        sites = plan(source, settings, assigned, storage=storage).sites.values()
        rules = [site.scheme.activations for site in sites]
        source = transform(
            source,
            settings.smoothing,
            folder=folder,
            work=work / "smooth",
            batches=calibration(source, settings),
            grids={site.module: site.grid for site in sites},
            activations=activation_grid(rules[0]) if settings.smoothing == "smoothquant" else None,
            alpha=None if settings.alpha < 0 else settings.alpha,
            device=device,
            progress=progress,
        )
        done.append(report_of(folder))
    return source, done


def calibration(checkpoint: Checkpoint, settings: QuantizeSettings) -> list[Tensor]:
    """The calibration batches, int64 (B, S)."""
    return calibration_batches(
        load_tokenizer(checkpoint),
        settings.data,
        samples=settings.samples,
        sequence_length=row_length(settings.sequence_length, checkpoint.config),
        batch_size=settings.batch_size,
        seed=settings.seed,
        bos=settings.bos,
    )


def activation_grid(rule: ActivationRule | None) -> Grid | None:
    """How inputs are rounded, one row a token, as a grid; None: they are not."""
    if rule is None:
        return None
    rows = 0 if rule.strategy == "tensor" else 1
    if rule.kind == "int":
        return IntGrid(rule.bits, rule.group_size, rule.symmetric, rows=rows)
    return Float8Grid("e4m3fn", group_size=rule.group_size, rows=rows)
