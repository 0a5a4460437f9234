"""Importance of layers from what the model loses without each: exact, by running it.

    KL_l = E_t KL( p_t || p_t^(-l) )

Letters: p_t the model's distribution after token t; p^(-l) the distribution of the model without block l.
Used as a leave-one-out score by Shortened LLaMA (Kim et al. 2024, arXiv 2402.02834, section 3.1, there as
perplexity). Each layer is a pass from its block on; a measured layer is kept in the work folder.

Differs from the paper: KL to the model itself instead of perplexity, which can fall by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from safetensors.torch import load_file
from torch import Tensor

from attar.checkpoint import atomic
from attar.importance.scoring import UnitScoring
from attar.models.surgery.masking import skipped
from attar.sensitivity.reference import MEMORY, reference_of


def layer_kl(scoring: UnitScoring) -> Tensor:
    """KL, float64 (1, layers), of the model as it is to the model without each layer. Does not modify the
    model."""
    layers = [[block.index] for block in scoring.anatomy.blocks]
    return kl_without(scoring, layers, "layer-kl")[None]


def kl_without(scoring: UnitScoring, runs: Sequence[Sequence[int]], name: str) -> Tensor:
    """The KL without each of these runs of layers, float64 (runs,).

    Args:
        name: of the file in the work folder.
    """
    file = scoring.work / f"{name}.safetensors"
    blank = torch.full((len(runs),), torch.nan, dtype=torch.float64)
    values = load_file(file)["kl"].clone() if file.exists() else blank
    todo = [number for number in range(len(runs)) if values[number].isnan()]
    if not todo:
        return values
    blocks = [block.name for block in scoring.anatomy.blocks]
    work = scoring.work / "reference"
    with (
        scoring.progress.task(scoring.what, total=len(runs), done=len(runs) - len(todo)) as task,
        reference_of(scoring.model, blocks, scoring.batches, scoring.precision, MEMORY, work) as reference,
    ):
        for number in sorted(todo, key=lambda number: runs[number][0]):
            reference.move(runs[number][0])
            with ExitStack() as stack:
                for layer in runs[number]:
                    stack.enter_context(skipped(scoring.anatomy.blocks[layer].module))
                values[number] = reference.kl()
            scoring.work.mkdir(parents=True, exist_ok=True)
            atomic.save_tensors(file, {"kl": values})
            task.advance(kl=float(values[number]))
    return values
