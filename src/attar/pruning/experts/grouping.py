"""Which experts of a layer stay, or which become one: pure functions of its statistics.

Removal keeps the experts of the largest scores: REAP's saliency (arXiv 2510.13999), a mean over the tokens
that chose an expert; its sum over them, what the layer's output has of the expert; the number of these
tokens, or the sum of its gates.

Merging is HC-SMoE's (arXiv 2410.08589): agglomerative clustering of the experts' mean outputs, Euclidean
distance, average linkage; a cluster becomes the mean of its experts' weights, weighted by their frequency.
Differs from the paper: there every row of the router stays, and the rows of a cluster lead to one expert. A
checkpoint has one row an expert, so a cluster's row is the mean of its rows with the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attar.pruning.experts.statistics import ExpertStatistics

SCORES: dict[str, Callable[[ExpertStatistics], Tensor]] = {
    "reap": lambda of: of.saliency,
    "output": lambda of: of.saliency * of.frequency,
    "frequency": lambda of: of.frequency,
    "gates": lambda of: of.gates,
}
"""Scores of experts (E,), by criterion: the smallest go."""


@dataclass(frozen=True)
class ExpertGroups:
    """What becomes of a layer's experts.

    Attributes:
        members: for each new expert, the old ones, ascending.
        weights: their shares, each summing to 1.
    """

    members: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[float, ...], ...]

    def removed(self, count: int) -> list[int]:
        """Experts of ``count`` that are in no group."""
        stay = {expert for group in self.members for expert in group}
        return [expert for expert in range(count) if expert not in stay]


def keep_best(scores: Tensor, keep: int) -> ExpertGroups:
    """The ``keep`` experts of the largest scores (E,), in their order; of equal ones the first."""
    best = torch.argsort(scores, descending=True, stable=True)[:keep]
    chosen = tuple(sorted(int(expert) for expert in best))
    return ExpertGroups(tuple((expert,) for expert in chosen), ((1.0,),) * keep)


def firsts(groups: ExpertGroups) -> ExpertGroups:
    """The first expert of each group alone."""
    return ExpertGroups(tuple(members[:1] for members in groups.members), ((1.0,),) * len(groups.members))


def merge_similar(outputs: Tensor, frequency: Tensor, keep: int) -> ExpertGroups:
    """``keep`` clusters of experts by their mean outputs (E, H), ordered by their first expert."""
    clusters = average_linkage(torch.cdist(outputs, outputs), keep)
    weights = []
    for cluster in clusters:
        counts = frequency[list(cluster)].double()
        shares = counts / counts.sum() if counts.sum() > 0 else torch.full_like(counts, 1 / len(counts))
        weights.append(tuple(shares.tolist()))
    return ExpertGroups(tuple(clusters), tuple(weights))


def average_linkage(distances: Tensor, keep: int) -> list[tuple[int, ...]]:
    """Agglomerative clustering: the two clusters with the smallest mean distance between their members join
    until ``keep`` are left. Of equal pairs the first by number.

    Args:
        distances: (E, E), symmetric.
    """
    clusters: list[tuple[int, ...]] = [(number,) for number in range(len(distances))]
    while len(clusters) > keep:
        pairs = [
            (float(distances[list(first)][:, list(second)].mean()), i, j)
            for i, first in enumerate(clusters)
            for j, second in enumerate(clusters)
            if i < j
        ]
        _, i, j = min(pairs)
        joined = tuple(sorted(clusters[i] + clusters[j]))
        clusters = sorted([*(c for k, c in enumerate(clusters) if k not in (i, j)), joined])
    return clusters
