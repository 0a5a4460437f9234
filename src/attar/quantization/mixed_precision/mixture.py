"""Mixed precision: bits for each layer, chosen by what each costs the model when it alone is rounded.

The measurements stay in a file of their own in the user's cache, named after the checkpoint, the text and the
candidates; later runs with other budgets measure nothing again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from attar.checkpoint.hashing import sha256_text
from attar.data.packing import calibration_batches, row_length
from attar.data.sources import fingerprint
from attar.models.anatomy import discover
from attar.models.device import pick_device
from attar.models.load import load_model, load_tokenizer
from attar.models.parts import Anatomy
from attar.models.stored import stored_precision
from attar.progress import Progress
from attar.quantization.grids import Grid
from attar.quantization.mixed_precision.sensitivity import (
    CandidateGrid,
    SensitivityKey,
    integer_candidates,
    interaction,
    measure,
    mix,
    shared_groups,
)
from attar.quantization.plan import group_size, plan
from attar.quantization.settings import QuantizeSettings

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint

ROWS = 32  # calibration sequences that sensitivities are measured on


class CalibrationSource(Protocol):
    """Settings that say which text is run, and where."""

    @property
    def data(self) -> str:
        """Name of the text."""

    @property
    def bos(self) -> str:
        """What stands in front of each sequence."""

    @property
    def samples(self) -> int:
        """Sequences; at most :data:`ROWS` are run."""

    @property
    def sequence_length(self) -> int:
        """Tokens of a sequence."""

    @property
    def batch_size(self) -> int:
        """Sequences at once."""

    @property
    def seed(self) -> int:
        """Of the choice of text."""

    @property
    def device(self) -> str:
        """Where the model runs."""


@dataclass(frozen=True)
class SensitivityInputs:
    """What sensitivities are measured on.

    Attributes:
        model: loaded dense, float32.
        anatomy: its parts.
        batches: int64 (B, S).
        key: what is measured, for the file.
        file: where the measurements live.
    """

    model: Any
    anatomy: Anatomy
    batches: list[Tensor]
    key: SensitivityKey
    file: Path

    @property
    def blocks(self) -> list[str]:
        """Names of the blocks."""
        return [block.name for block in self.anatomy.blocks]


def ground(checkpoint: Checkpoint, settings: CalibrationSource) -> SensitivityInputs:
    """Load the model and the text that the settings name.

    Raises:
        DataError: there is not enough text.
    """
    model = load_model(checkpoint, dtype=torch.float32, device=torch.device(pick_device(settings.device)))
    batches = calibration_batches(
        load_tokenizer(checkpoint),
        settings.data,
        samples=min(settings.samples, ROWS),
        sequence_length=row_length(settings.sequence_length, checkpoint.config),
        batch_size=settings.batch_size,
        seed=settings.seed,
        bos=settings.bos,
    )
    key = SensitivityKey(
        model=checkpoint.fingerprint(),
        data=sha256_text(f"{fingerprint(settings.data)} {settings.bos}"),
        tokens=sum(batch.numel() for batch in batches),
        sequence_length=batches[0].shape[1],
        seed=settings.seed,
    )
    return SensitivityInputs(model, discover(model), batches, key, cache_folder() / key.file_name())


def mixture(
    checkpoint: Checkpoint,
    settings: QuantizeSettings,
    work: Path,
    progress: Progress,
    candidates: Mapping[str, CandidateGrid] | None = None,
) -> tuple[dict[str, str], dict[str, Any]]:
    """The scheme of each Linear under the average that the settings ask for.

    Args:
        candidates: grids by scheme; None: integers of 2 to 8 bits.

    Returns:
        scheme by module name, and for the card: the mix, its predicted and measured KL, the trade-off curve.

    Raises:
        SettingsError: not even the smallest candidates fit the budget.
    """
    sites = {site.module: site for site in plan(checkpoint, settings).sites.values()}
    shapes = {name: site.shape for name, site in sites.items()}
    storage = stored_precision(checkpoint)
    candidates = candidates or integer_candidates(group_size(shapes, settings.group_size))
    on = ground(checkpoint, settings)
    found = measure(
        on.model,
        shared_groups(on.anatomy.blocks, list(sites)),
        candidates,
        on.batches,
        on.file,
        key=on.key,
        blocks=on.blocks,
        storage=storage,
        fits=_fits,
        progress=progress,
    )
    chosen = mix(found, shapes, settings.bits)
    whole = interaction(on.model, chosen, candidates, on.batches, work / "interaction", storage=storage)
    report = {
        "bits_per_weight": chosen.bits_per_weight,
        "gap": chosen.gap,
        **asdict(whole),
        "curve": [list(point) for point in chosen.curve],
        "schemes": chosen.schemes,
        "measurements": on.file.name,
    }
    return chosen.schemes, report


def _fits(grid: Grid, shape: tuple[int, int]) -> bool:
    return not grid.group_size or shape[1] % grid.group_size == 0


def cache_folder() -> Path:
    """Where measurements live that outlast a run: ``$ATTAR_CACHE``, or ``attar`` in the user's cache."""
    said = os.environ.get("ATTAR_CACHE")
    base = Path(said) if said else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attar"
    folder = base / "sensitivity"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
