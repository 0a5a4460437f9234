"""One model studied for its cuts: loaded, its units ranked, what every cut costs measured into a file."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from attar.checkpoint.hashing import canonical_json, sha256_text
from attar.checkpoint.open import Checkpoint
from attar.data.sources import fingerprint
from attar.importance.ranking import RankedUnits, rank_units
from attar.models.anatomy.discover import discover
from attar.models.loading.device import pick_device, resolve
from attar.models.loading.load import load_model, load_tokenizer
from attar.models.surgery.masking import masked_units
from attar.models.surgery.plan_costs import WIDTHS, PlannedModel, PlanSizes
from attar.models.surgery.plan_space import PlanSpace, UnitRanking
from attar.progress import Progress
from attar.pruning.planning.scan import (
    CutMeasurement,
    ScanFile,
    ScanKey,
    even_cuts,
    layer_cuts,
    layer_drops,
    measure_cuts,
    removal_order,
)
from attar.pruning.settings import MixedSettings, PruneSettings
from attar.pruning.structures import STRUCTURES
from attar.pruning.units import training_loss
from attar.sensitivity.reference import MEMORY, ReferenceModel, reference_of

ROWS = 16  # calibration sequences that cuts are measured on


@dataclass(frozen=True)
class CutStudy:
    """A model, what may be cut from it, and the text it is measured on.

    Attributes:
        model: dense, float32, on its device.
        batches: int64 (B, S), of at most :data:`ROWS` rows.
        precision: of the passes.
        file: of the scan.
    """

    model: Any
    space: PlanSpace
    ranking: UnitRanking
    batches: list[Tensor]
    precision: str
    file: ScanFile

    def masked(self, sizes: PlanSizes, layers: Sequence[int], alone: int | None = None) -> Any:
        """A context in which the model computes what the cut one does."""
        return masked_units(self.model, self.space.cut_plan(sizes, self.ranking, layers, alone))

    def reference(self, work: Path) -> AbstractContextManager[ReferenceModel]:
        """The uncut model, for the length of the context."""
        blocks = [block.name for block in self.space.anatomy.blocks]
        return reference_of(self.model, blocks, self.batches, self.precision, MEMORY, work)


@dataclass(frozen=True)
class CutScan:
    """A finished scan.

    Attributes:
        rows: every cut of it.
        planned: costs of plans, with the order in which layers go.
    """

    rows: list[CutMeasurement]
    planned: PlannedModel

    def shares(self) -> dict[tuple[str, int], float]:
        """The share of the parameters that each even cut removes, by structure and kept units."""
        full = self.planned.full
        full_count = self.planned.parameters(full)
        return {
            (row.structure, row.kept): 1
            - self.planned.parameters(full._replace(**{row.structure: row.kept})) / full_count
            for row in self.rows
            if row.layer is None
        }


def cut_study(
    source: Checkpoint,
    space: PlanSpace,
    settings: PruneSettings,
    batches: Sequence[Tensor],
    path: Path,
    work: Path,
    progress: Progress,
) -> CutStudy:
    """Load the model, and rank its units on all batches.

    Args:
        path: file of the scan.
        work: folder of the units' scores, which survive a kill.

    Raises:
        ModelError: the model has no head, or the file belongs to another scan.
    """
    model = load_model(source, dtype=torch.float32, device=pick_device(settings.device))
    anatomy, options = discover(model), cast(MixedSettings, settings.options)
    loss = training_loss(anatomy, load_tokenizer(source))
    precision = resolve(settings.precision, model.device)
    rows = torch.cat(list(batches))
    key = ScanKey(
        model=source.fingerprint(),
        data=sha256_text(f"{fingerprint(settings.data)} {settings.bos}"),
        tokens=rows[:ROWS].numel(),
        sequence_length=rows.shape[1],
        seed=settings.seed,
        samples=len(rows),
        batch_size=settings.batch_size,
        criterion=options.criterion,
        precision=precision,
    )
    file = ScanFile(path, key)
    ranking = rank_units(
        model,
        anatomy,
        ranked_structures(space.structures, options.criterion),
        batches,
        loss,
        work / sha256_text(canonical_json(asdict(key)))[:16],
        precision=precision,
        progress=progress,
    )
    measured = list(rows[:ROWS].split(settings.batch_size))
    return CutStudy(model, space, ranking, measured, precision, file)


def ranked_structures(names: Sequence[str], criterion: str) -> dict[str, RankedUnits]:
    """How the heads, neurons and channels among these structures are ranked.

    Args:
        criterion: of heads and neurons; ``auto`` is the first of each structure.
    """
    ranked = {}
    for name in (name for name in WIDTHS if name in names):
        structure = STRUCTURES[name]
        chosen = criterion if criterion in structure.criteria else next(iter(structure.criteria))
        ranked[name] = RankedUnits(structure.noun, structure.weights, structure.criteria[chosen])
    return ranked


def scan_cuts(study: CutStudy, work: Path, progress: Progress, *, complete: bool = True) -> CutScan:
    """Measure the cuts that the file does not hold yet.

    Args:
        complete: of single layers, all of :func:`layer_cuts`, and not only that they are left out, which is
            what plans need.
    """
    space, file = study.space, study.file
    alone = list((layer_cuts if complete else layer_drops)(space.full, space.structures))
    even = list(even_cuts(space.measured, space.full))
    missing = [cut for cut in (*alone, *even) if cut.identity not in file.known]
    if missing:
        total = len(alone) + len(even)
        with (
            progress.task("scan", total=total, done=total - len(missing)) as task,
            study.reference(work) as reference,
        ):
            measure = partial(measure_cuts, reference, file=file, causal=space.anatomy.causal, task=task)
            measure(alone, masking=partial(_mask_layer, study))
            reference.restart()
            removal = removal_order(list(file.known.values()), space.full.layers)
            measure(even, masking=partial(_mask_evenly, study, removal))
    removal = removal_order(list(file.known.values()), space.full.layers)
    known = layer_cuts(space.full, space.structures)
    rows = [file.known[cut.identity] for cut in (*even, *known) if cut.identity in file.known]
    return CutScan(rows, replace(space.planned, removal=removal))


def _mask_layer(study: CutStudy, cut: CutMeasurement) -> Any:
    """One layer cut alone."""
    full = study.space.full
    if cut.structure == "layers":
        return study.masked(full, [layer for layer in range(full.layers) if layer != cut.layer])
    return study.masked(full._replace(**{cut.structure: cut.kept}), range(full.layers), cut.layer)


def _mask_evenly(study: CutStudy, removal: tuple[int, ...], cut: CutMeasurement) -> Any:
    """All layers cut alike, or some of them left out."""
    sizes = study.space.full._replace(**{cut.structure: cut.kept})
    return study.masked(sizes, replace(study.space.planned, removal=removal).kept_layers(sizes.layers))
