"""Embeddings: what goes into the first block is to be what goes into the teacher's (Jiao et al. 2020,
"TinyBERT", arXiv 1909.10351, eq. 9).

    |e W^T - e'|^2 / H' of each token, as hidden.py has it

Letters: e (H) and e' (H') sums of the embeddings of a token, W (H', H) a projection of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from attar.distillation.features.feature import ComparedModels, Feature, mean_of, project
from attar.distillation.features.hidden import distance
from attar.distillation.outputs import Intermediates, ModelOutputs


def embeddings(models: ComparedModels) -> Feature:
    """The states before the first block."""

    def loss(student: ModelOutputs, teacher: ModelOutputs, projections: Mapping[str, nn.Module]) -> Tensor:
        states = project(projections, "embeddings", student.states[0][student.compared])
        return mean_of(distance(states, teacher.states[0][student.compared]))

    return Feature(
        "embeddings", loss, Intermediates(states=True), projections=models.projection("embeddings")
    )
