"""The verb ``prune``: the least important parts of a model removed, by any method."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from attar.checkpoint.companions import copy_companions
from attar.checkpoint.open import Checkpoint, open_checkpoint
from attar.checkpoint.output import produce
from attar.data.auto import fit
from attar.data.sources import fingerprint
from attar.models.loading.fit import admit
from attar.progress import SILENT, Progress
from attar.pruning.experts.prune import prune_experts
from attar.pruning.linears import pruned_linears
from attar.pruning.mixed import prune_mixed
from attar.pruning.settings import VERSION, PruneSettings, ZerosSettings
from attar.pruning.structures import STRUCTURES
from attar.pruning.task import PruneTask
from attar.pruning.units import prune_units
from attar.pruning.zeros import ZEROS, prune_zeros, sees_text


def prune(
    model: str | Path | Checkpoint,
    out: Path,
    settings: PruneSettings,
    *,
    progress: Progress = SILENT,
    force: bool = False,
    key: str | None = None,
) -> Checkpoint:
    """Remove the least important parts of a model.

    Args:
        out: the folder to make.

    Raises:
        AttarError: see errors.py; no output is left.
    """
    text = not isinstance(settings.options, ZerosSettings) or sees_text(settings)
    source = admit(model, progress, text=text, dense=True)
    if isinstance(settings.options, ZerosSettings):
        pruned_linears(source, settings.options)  # refused before any work
    if text:
        settings = fit(settings, source, progress)
    read = fingerprint(settings.data)
    with produce(out, "prune", settings, VERSION, [source], text=read, force=force, key=key) as output:
        METHODS[settings.method](PruneTask(source, settings, output, progress))
        copy_companions(source.path, output.folder)
    return open_checkpoint(out)


METHODS: dict[str, Callable[[PruneTask], None]] = {
    **dict.fromkeys(ZEROS, prune_zeros),
    **dict.fromkeys(STRUCTURES, prune_units),
    "experts": prune_experts,
    "mixed": prune_mixed,
}
"""What each method does; its options are in settings.METHOD_SETTINGS."""
