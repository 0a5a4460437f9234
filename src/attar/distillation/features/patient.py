"""Patient distillation: directions of the states of several layers, the last one left out, because the loss
on predictions teaches that.

    | h W^T / |h W^T|  -  h' / |h'| |^2  =  2 - 2 cos(h W^T, h')

of each token and pair of layers. Sun, Cheng, Gan, Liu 2019, "Patient Knowledge Distillation for BERT Model
Compression", arXiv 1908.09355, eq. 7: PKD-skip is the uniform map, PKD-last the map ``last``.

Of an encoder [CLS] alone is compared.

Differs from the paper: the mean over pairs, not the sum. Teachers of another width pass through a projection.

Letters: h (H) a state of the student, h' (H') of the teacher; W (H', H) the projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, nn
from torch.nn import functional as F

from attar.distillation.features.feature import ComparedModels, Feature, project
from attar.distillation.outputs import Intermediates, ModelOutputs
from attar.errors import SettingsError


def direction_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Of each token, float32 (m,); projected states (m, H') of the student, and states (m, H')."""
    difference = F.normalize(student.float(), dim=-1) - F.normalize(teacher.float(), dim=-1)
    return difference.square().sum(-1)


def patient(models: ComparedModels) -> Feature:
    """The states behind the blocks of all pairs but the student's last block.

    Raises:
        SettingsError: nothing is left.
    """
    last = models.student.depth - 1
    pairs = [(i, j) for i, j in models.pairs if i < last]
    if not pairs:
        allowed = f"pairs of other layers than {last}: patient leaves the student's last layer out"
        raise SettingsError("feature_map", models.settings.feature_map, allowed)

    chosen = replace(models, pairs=pairs)

    def loss(student: ModelOutputs, teacher: ModelOutputs, projections: Mapping[str, nn.Module]) -> Tensor:
        compared = student.compared

        def of_pair(i: int, j: int) -> Tensor:
            states = project(projections, "patient", student.states[i + 1][compared])
            return direction_distance(states, teacher.states[j + 1][compared])

        return chosen.mean(of_pair, projections)

    return Feature("patient", loss, Intermediates(states=True), projections=models.projection("patient"))
