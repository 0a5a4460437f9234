"""The run of consecutive layers that the model misses least.

Gromov et al. 2024, "The Unreasonable Ineffectiveness of the Deeper Layers", arXiv 2403.17887, eq. 7: a run of
n layers that starts at l turns the residual stream by

    d(l, n) = 1/pi arccos( h_l . h_l+n / ( ||h_l|| ||h_l+n|| ) )

and the run of the least angle goes. Letters: h_l the hidden state before block l.

Differs from the paper: the angle is the mean over all tokens, not the last token's; the three runs of the
least angle are compared by the KL that the model loses without them, and the best of them goes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from attar.importance.layer_kl import kl_without
from attar.importance.scoring import UnitScoring

VERIFIED = 3  # runs whose KL is measured


def run_scores(scoring: UnitScoring) -> Tensor:
    """Float64 (1, layers): 0 for the layers of the run that goes, 1 for all others. Does not modify the
    model."""
    layers = len(scoring.anatomy.blocks)
    length = layers - scoring.stay

    def measure(batch: Tensor) -> Tensor:
        states = scoring.states(batch)
        pairs = zip(states, states[length:], strict=False)
        return torch.stack([angles(before, after) for before, after in pairs])

    distances = scoring.total("angle", measure)
    starts = sorted(torch.argsort(distances, stable=True)[:VERIFIED].tolist())
    kl = kl_without(scoring, [range(start, start + length) for start in starts], "run-kl")
    start = starts[int(kl.argmin())]
    scores = torch.ones(1, layers, dtype=torch.float64)
    scores[0, start : start + length] = 0.0
    return scores


def angles(before: Tensor, after: Tensor) -> Tensor:
    """Sum over tokens of the angle between hidden states, in half turns, float64 scalar."""
    cosine = F.cosine_similarity(before.double(), after.double(), dim=-1)
    return torch.arccos(cosine.clamp(-1, 1)).sum() / math.pi
