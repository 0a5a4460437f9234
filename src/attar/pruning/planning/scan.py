"""Quality against amount: what cutting each structure costs the model, uniformly and in each layer alone.

A scan is a list of cuts, each measured alone by the KL of the whole model to the cut one on calibration text,
and by the cut model's loss there (causal models). Which units go is decided once, by the criterion; which
layers, by the KL that leaving each of them out costs. The cuts are masks (models/surgery/masking.py), so
nothing is copied, and a cut of one layer runs the model from that layer on (sensitivity/reference.py).

The file is replaced after every measurement, so a killed scan goes on after the last one, and ends with the
same bytes:

    {"format": "attar scan", "version": 1,
     "key": {"model": fingerprint, "data", "tokens", "sequence_length", "seed", "samples",
             "batch_size", "criterion", "precision"},
     "measurements": [{"structure", "layer": number or null (all alike), "kept": units that stay,
                       "of": all units, "kl": nats a token (null: infinite), "loss": or null}, ...]}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from attar.checkpoint.atomic import write_json
from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.units import table
from attar.errors import CheckpointError, ModelError
from attar.models.surgery.plan_costs import STRUCTURES, PlanGrid, PlanSizes
from attar.progress import ProgressTask
from attar.pruning.planning.plans import QualityCurve
from attar.sensitivity.reference import ReferenceModel
from attar.walks.objectives import next_token_loss, token_kl

FORMAT, VERSION = "attar scan", 1
LAYER_AMOUNTS = (0.75, 0.5)  # shares of the units of one layer that stay


@dataclass(frozen=True)
class ScanKey:
    """What a scan belongs to.

    Attributes:
        model: fingerprint of the checkpoint.
        data: name (or fingerprint) of the text; tokens: number of tokens that were run.
        samples: calibration rows on which the units were ranked, batch_size of them in one pass (the sums of
            an unfinished ranking count batches, and ``taylor`` is a mean over them); criterion: by what.
    """

    model: str
    data: str
    tokens: int
    sequence_length: int
    seed: int
    samples: int
    batch_size: int
    criterion: str
    precision: str


@dataclass(frozen=True)
class CutMeasurement:
    """One cut.

    Attributes:
        structure: heads (KV groups), neurons, hidden or layers.
        layer: the layer that is cut alone; None: every layer, alike.
        kept: its units that stay, of ``of``.
        kl: nats a token; infinite where the cut model's output is not finite.
        loss: of the cut model, nats a token; None for encoders.
    """

    structure: str
    layer: int | None
    kept: int
    of: int
    kl: float = 0.0
    loss: float | None = None

    @property
    def identity(self) -> tuple[str, int | None, int, int]:
        """Which cut it is."""
        return self.structure, self.layer, self.kept, self.of


class ScanFile:
    """The measurements of one key, on disk.

    Args:
        path: may not exist yet.

    Raises:
        CheckpointError: it is of another kind, or damaged.
        ModelError: it belongs to another model, text or setting; names which.
    """

    def __init__(self, path: Path, key: ScanKey) -> None:
        self.path, self.key = path, key
        self.known: dict[tuple[str, int | None, int, int], CutMeasurement] = {}
        if path.exists():
            self.known = {measurement.identity: measurement for measurement in _read(path, key)}

    def add(self, measurement: CutMeasurement) -> None:
        """Keep one more measurement; the file has them in one order, whatever the order they come in."""
        self.known[measurement.identity] = measurement
        rows = sorted(self.known.values(), key=_order)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {"format": FORMAT, "version": VERSION, "key": asdict(self.key)}
        write_json(self.path, {**content, "measurements": [to_json(row) for row in rows]})


def _order(measurement: CutMeasurement) -> tuple[int, int, int, int]:
    layer = -1 if measurement.layer is None else measurement.layer
    return layer, STRUCTURES.index(measurement.structure), -measurement.kept, measurement.of


def to_json(measurement: CutMeasurement) -> dict[str, Any]:
    """Its fields; infinite numbers become null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(measurement).items()
    }


def _read(path: Path, key: ScanKey) -> list[CutMeasurement]:
    content = read_json(path)
    hint = "give another file, or delete this one to measure again"
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise CheckpointError(f"{path}: not a scan of attar prune, version {VERSION}", hint=hint)
    try:
        stored = ScanKey(**content["key"])
        rows = [_from_json(row) for row in content["measurements"]]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: a measurement is incomplete: {error}", hint=hint) from error
    wrong = [name for name, value in asdict(key).items() if asdict(stored)[name] != value]
    if wrong:
        raise ModelError(f"{path}: a scan with another {', '.join(wrong).replace('_', ' ')}", hint=hint)
    return rows


def _from_json(row: Mapping[str, Any]) -> CutMeasurement:
    measurement = CutMeasurement(**{**row, "kl": math.inf if row["kl"] is None else float(row["kl"])})
    if measurement.structure not in STRUCTURES or not 0 <= measurement.kept <= measurement.of:
        raise ValueError(f"{measurement.structure} {measurement.kept} of {measurement.of}")
    return measurement


def layer_drops(full: PlanSizes, structures: Sequence[str]) -> Iterator[CutMeasurement]:
    """Each layer left out alone, which says in which order they go."""
    for layer in range(full.layers if "layers" in structures else 0):
        yield CutMeasurement("layers", layer, 0, 1)


def layer_cuts(full: PlanSizes, structures: Sequence[str]) -> Iterator[CutMeasurement]:
    """The cuts of each layer alone, layer by layer: left out, and some of its heads and neurons."""
    left_out = {cut.layer: cut for cut in layer_drops(full, structures)}
    for layer in range(full.layers):
        yield from filter(None, [left_out.get(layer)])
        for structure in ("heads", "neurons"):
            units = getattr(full, structure)
            kept = {max(round(share * units), 1) for share in LAYER_AMOUNTS}
            for count in sorted(kept, reverse=True):
                if count < units and structure in structures:
                    yield CutMeasurement(structure, layer, count, units)


def even_cuts(grid: PlanGrid, full: PlanSizes) -> Iterator[CutMeasurement]:
    """The uniform cuts, structure by structure, the smallest first."""
    for structure in STRUCTURES:
        units = getattr(full, structure)
        for count in sorted(getattr(grid, structure), reverse=True):
            if count < units:
                yield CutMeasurement(structure, None, count, units)


Masking = Callable[[CutMeasurement], Any]
"""A context in which the model computes like the cut model."""


def measure_cuts(
    reference: ReferenceModel,
    cuts: Sequence[CutMeasurement],
    file: ScanFile,
    masking: Masking,
    *,
    causal: bool,
    task: ProgressTask,
) -> list[CutMeasurement]:
    """Measure the cuts that the file does not hold; all of them, in order.

    Args:
        reference: of the uncut model; cuts of a layer are in ascending order of the layers.
    """
    for cut in cuts:
        if cut.identity not in file.known:
            reference.move(cut.layer or 0)
            with masking(cut):
                kl, loss = distance(reference, causal)
            file.add(replace(cut, kl=kl, loss=loss))
            task.advance(kl=kl)
    return [file.known[cut.identity] for cut in cuts]


def distance(reference: ReferenceModel, causal: bool) -> tuple[float, float | None]:
    """Mean KL of the uncut model to the model as it is now, infinite where that is not finite, and the loss
    of the latter (causal models)."""
    kl = loss = 0.0
    for number, tokens in enumerate(reference.batches):
        logits = reference.run(number)
        kl += float(
            token_kl(reference.logits[number].flatten(0, 1).to(logits.device), logits.flatten(0, 1)).sum()
        )
        if causal:
            loss += float(next_token_loss(logits, tokens.to(logits.device))) * len(tokens)
    kl = kl / reference.tokens if math.isfinite(kl) else math.inf
    rows = sum(len(tokens) for tokens in reference.batches)
    return kl, (loss / rows if causal and math.isfinite(loss) else None)


def curves(measurements: Sequence[CutMeasurement], full: PlanSizes) -> dict[str, QualityCurve]:
    """KL against units of each structure, cut uniformly; cuts that break the model are left out. A KL that
    numerical noise made negative is none."""
    points: dict[str, list[tuple[int, float]]] = {}
    for cut in measurements:
        if cut.layer is None and math.isfinite(cut.kl):
            start = [(getattr(full, cut.structure), 0.0)]
            points.setdefault(cut.structure, start).append((cut.kept, max(cut.kl, 0.0)))
    return {structure: QualityCurve(tuple(sorted(pairs))) for structure, pairs in points.items()}


def removal_order(measurements: Sequence[CutMeasurement], layers: int) -> tuple[int, ...]:
    """The layers in the order in which they go: that whose absence costs least first."""
    costs = {cut.layer: cut.kl for cut in measurements if cut.structure == "layers"}
    return tuple(sorted(range(layers), key=lambda layer: (costs.get(layer, math.inf), layer)))


def scan_table(measurements: Sequence[CutMeasurement], shares: Mapping[tuple[str, int], float]) -> str:
    """The scan in text: uniform cuts; then, for each layer, the KL of leaving it out and of its halves.

    Args:
        shares: of the parameters that a cut removes, by structure and kept units.
    """
    rows = [
        (cut.structure, f"{cut.kept} of {cut.of}", f"{shares[cut.structure, cut.kept]:.1%}", f"{cut.kl:.4f}",
         "-" if cut.loss is None else f"{cut.loss:.4f}")
        for cut in measurements if cut.layer is None
    ]  # fmt: skip
    parts = [table(("uniform", "kept", "removes", "KL", "loss"), rows, left=1)]
    alone = [cut for cut in measurements if cut.layer is not None]
    if alone:
        columns = list(dict.fromkeys((cut.structure, cut.kept, cut.of) for cut in alone))
        names = ["left out" if name == "layers" else f"{name} {kept}/{of}" for name, kept, of in columns]
        kls = {(cut.layer, cut.structure, cut.kept): cut.kl for cut in alone}
        layers = sorted({cut.layer for cut in alone if cut.layer is not None})
        cells = [
            (str(layer), *(f"{kls.get((layer, *column[:2]), math.nan):.4f}" for column in columns))
            for layer in layers
        ]
        parts.append(table(("KL, one layer", *names), cells))
    return "\n\n".join(parts)
