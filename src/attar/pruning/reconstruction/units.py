"""Reconstruction of a model whose units are removed, before the cut: in the whole model, whose columns of
removed units are zero.

    heads, neurons   least squares for the projections that lose columns, on their own inputs
    layers           least squares for the Linears after the first gap, towards the original model's outputs
    block            all Linears that least squares could change the inputs of, block by block
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attar.models.anatomy.parts import Anatomy, weight_of
from attar.models.loading.stored import stored_precision
from attar.models.surgery.cut_plan import CutPlan
from attar.pruning.reconstruction.walk import ReconstructionPlan, reconstruct
from attar.pruning.task import PruneTask

Columns = dict[str, list[int]]


def reconstruct_units(
    task: PruneTask, model: Any, anatomy: Anatomy, cut: CutPlan, kind: str, batches: Sequence[Tensor]
) -> None:
    """Change the weights of a whole model in place so that its cut is closer to it as it was.

    Args:
        model: the original, float32.
        cut: not of hidden channels.
        kind: "linear", or "block".

    Raises:
        NumericsError: an output or a loss is not finite.
    """
    kept, dtype = kept_columns(anatomy, cut), stored_precision(task.source)

    def pruned(name: str) -> Tensor:
        weight = weight_of(model.get_submodule(name)).detach().to(dtype, copy=True)
        if name in kept:
            gone = torch.ones(weight.shape[1], dtype=torch.bool)
            gone[kept[name]] = False
            weight[:, gone] = 0.0
        return weight

    removed = sorted(set(range(len(anatomy.blocks))) - set(cut.blocks(anatomy)))
    first = removed[0] if removed else len(anatomy.blocks)
    after = [name for block in anatomy.blocks[first:] for name in block.linears if block.index not in removed]
    trained = [name for block in anatomy.blocks for name in block.linears] if kept else after
    plan = ReconstructionPlan(
        kind, pruned, sorted({*kept, *after}), trained, originals=bool(removed), removed=removed
    )
    solved = reconstruct(task, plan, batches)
    with torch.no_grad():
        for name in solved.names:
            module: Any = model.get_submodule(name)
            weight_of(module).copy_(solved.weight(name))
            bias = solved.bias(name)
            if bias is not None:
                module.bias.copy_(bias)


def kept_columns(anatomy: Anatomy, cut: CutPlan) -> Columns:
    """The input columns that stay, of the projections that lose some."""
    columns: Columns = {}
    for number in cut.blocks(anatomy):
        block = anatomy.blocks[number]
        if cut.heads is not None:
            attention = block.attention
            columns[attention.o.name] = [
                column for head in cut.heads[number] for column in attention.query_columns(head)
            ]
        if cut.neurons is not None:
            columns[block.mlp.down.name] = list(cut.neurons[number])
    return columns
