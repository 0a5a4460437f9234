"""Models cut in depth and width, as choices of a plan.

    KL(cut, then coded) ~ c + sum_g loss[g, o_g]          c the KL of the cut model

The cut of a share is that of ``attar prune --method mixed --ratio SHARE``, whose scan is kept in the user's
cache; with ``recover_tokens`` the cut model learns from the original. Both are stages of the recipe. The
models stand in the cache until the plan is done. Losses are not measured again: a group of the cut model
costs what it costs in the whole one (losses.py), and wholes correct the sum (additivity.py).

Letters: g a group; o its option.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attar.checkpoint import open_checkpoint
from attar.checkpoint.atomic import explain_os_errors, open_own, try_lock
from attar.checkpoint.card import Card
from attar.checkpoint.hashing import canonical_json, sha256_text
from attar.data.sources import fingerprint
from attar.distillation.settings import recover_settings
from attar.distillation.stage import recover
from attar.errors import OutputError
from attar.models.anatomy.discover import discover
from attar.models.loading.experts import unstack
from attar.models.loading.load import load_model
from attar.planner.gguf_costs import PlanCosts
from attar.planner.losses import CutLosses, Losses
from attar.planner.settings import PlanSettings
from attar.progress import Progress
from attar.pruning.settings import prune_settings
from attar.pruning.stage import prune
from attar.quantization.mixed_precision.sensitivity import CandidateGrid
from attar.sensitivity.weight_changes import cache_folder
from attar.version import __version__

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint

ROWS, LENGTH = 8, 512  # sequences of a step of recovery, and their tokens


@dataclass(frozen=True)
class CutModel:
    """A model that was cut, and recovered where that was asked for.

    Attributes:
        checkpoint: dense.
        stages: of the recipe that make it.
        text: what was cut.
        layers: the original's layer of each of its layers.
    """

    checkpoint: Checkpoint
    stages: tuple[dict[str, Any], ...]
    text: str
    layers: tuple[int, ...]

    def losses(self, uncut: Losses, costs: PlanCosts, grids: Mapping[str, CandidateGrid]) -> CutLosses:
        """Losses of its groups, by those of the whole model."""
        inputs = uncut.inputs
        device = next(inputs.model.parameters()).device
        model = unstack(load_model(self.checkpoint, dtype=torch.float32, device=device))
        anatomy = discover(model)
        names = [block.name for block in inputs.anatomy.blocks]
        sources = {}
        for group in costs.groups:
            for number, block in enumerate(anatomy.blocks):
                if group.startswith(f"{block.name}."):
                    sources[group] = names[self.layers[number]] + group.removeprefix(block.name)
        return CutLosses(
            replace(inputs, model=model, anatomy=anatomy),
            costs.groups,
            anatomy.embedding,
            uncut.storage,
            grids,
            uncut.progress,
            uncut=uncut,
            sources=sources,
            cut=str(self.checkpoint.fingerprint()),
        )


def cut_model_of(
    checkpoint: Checkpoint, share: float, settings: PlanSettings, folder: Path, progress: Progress
) -> CutModel:
    """The model without a share of its parameters, made in a folder unless it is there.

    Args:
        folder: of :func:`cuts_folder`.

    Raises:
        AttarError: the model cannot be cut so.
    """
    data = {"data": settings.data, "seed": settings.seed}
    options = {"method": "mixed", "ratio": share}
    scan = str(folder / "scan.json")
    cut = _existing(
        folder / f"{share:g}",
        lambda out: prune(
            checkpoint, out, prune_settings(**options, **data, scan=scan, device=settings.device),
            progress=progress,
        ),
    )  # fmt: skip
    card = Card.read(cut)
    assert card is not None, "prune writes a card"
    details = card.details["plan"]
    stages: list[dict[str, Any]] = [{"stage": "prune", **options}]
    steps = settings.recover_tokens // (ROWS * LENGTH)
    if steps:
        learning = {"steps": steps, "batch_size": ROWS, "sequence_length": LENGTH}
        stages.append({"stage": "recover", **learning})
        pruned, learned = cut, recover_settings(**learning, **data, device=settings.device)
        cut = _existing(
            folder / f"{share:g}-{steps}",
            lambda out: recover(pruned, out, learned, teacher=checkpoint, progress=progress),
        )
    return CutModel(open_checkpoint(cut), tuple(stages), details["plan"], tuple(details["layers_kept"]))


def _existing(out: Path, make: Callable[[Path], Any]) -> Path:
    """The folder of a checkpoint, which is made where it is missing; it appears by rename."""
    if not out.exists():
        make(out)
    return out


@contextmanager
def cuts_folder(checkpoint: Checkpoint, settings: PlanSettings) -> Iterator[Path]:
    """The folder of a model's cuts in the user's cache, by model, text and version, for this process alone.
    A plan that ends well removes the models; the scan stays.

    Raises:
        OutputError: another process plans with it, or it cannot be written.
    """
    key = [checkpoint.fingerprint(), fingerprint(settings.data), settings.seed, __version__]
    folder = cache_folder().parent / "cuts" / sha256_text(canonical_json(key))[:16]
    with explain_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with open_own(folder / "lock") as lock:
        if not try_lock(lock.fileno()):
            raise OutputError(f"{folder}: another plan tries cuts of this model", hint="run one at a time")
        yield folder
        for path in [*folder.iterdir()]:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
