"""Hidden states: what each block puts out is to be what the teacher's block of its pair puts out.

    mse        |h W^T - h'|^2 / H'                          (FitNets, Romero et al. 2015, arXiv 1412.6550,
        eq. 3; TinyBERT, Jiao et al. 2020, arXiv 1909.10351, eq. 8)
    relative   |h W^T - h'|^2 / |h'|^2
    cosine     1 - cos(h W^T, h')                           (DistilBERT, Sanh et al. 2019, arXiv 1910.01108)

of each token. The last block's output is taken behind the final norm, as transformers reports it.

In language models a few tokens have states a thousand times as large as all others (Sun et al. 2024,
"Massive Activations", arXiv 2402.17762): mse is about these alone, relative and cosine are not.

Differs from FitNets: no convolution, and all pairs of layers rather than one hint.

Letters: h (H) a state of the student, h' (H') of the teacher; W (H', H) the projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from attar.distillation.features.feature import ComparedModels, Feature, project
from attar.distillation.outputs import Intermediates, ModelOutputs


def distance(student: Tensor, teacher: Tensor, kind: str = "mse") -> Tensor:
    """Of each token, float32 (m,).

    Args:
        student: projected states (m, H').
        teacher: states (m, H').
        kind: mse, relative or cosine.
    """
    h, target = student.float(), teacher.float()
    if kind == "cosine":
        return 1.0 - F.cosine_similarity(h, target, dim=-1)
    squares = (h - target).square()
    if kind == "mse":
        return squares.mean(-1)
    return squares.sum(-1) / target.square().sum(-1).clamp(min=1e-12)


def _hidden(kind: str, models: ComparedModels) -> Feature:
    """The states behind the blocks of all pairs."""

    def loss(student: ModelOutputs, teacher: ModelOutputs, projections: Mapping[str, nn.Module]) -> Tensor:
        compared = student.compared

        def of_pair(i: int, j: int) -> Tensor:
            states = project(projections, "hidden", student.states[i + 1][compared])
            return distance(states, teacher.states[j + 1][compared], kind)

        return models.mean(of_pair, projections)

    return Feature("hidden", loss, Intermediates(states=True), projections=models.projection("hidden"))


hidden, hidden_relative, hidden_cosine = (partial(_hidden, kind) for kind in ("mse", "relative", "cosine"))
