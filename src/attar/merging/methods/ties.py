"""TIES: Yadav, Tam, Choshen, Raffel, Bansal 2023, "TIES-Merging: Resolving interference when merging models",
arXiv 2306.01708, algorithm 1.

    trim:   d_i = the largest entries of x_i - base, the rest 0
    elect:  s = the sign with more mass
    merge:  y = base + lambda (mean of the non-zero d_i whose sign is s)

Letters: x_i the models' tensors, d_i their trimmed task vectors. Election and sum are in
common/task_vectors.py.

mergekit's form trims each tensor separately to int(density n) entries (of equal ones the first), elects by
the weighted sum, +1 for a sum of 0, and takes the weighted mean. The paper's form trims the whole model at
one threshold (entries equal to it are kept), elects by the unweighted sum, for a sum of 0 the sign that is
elected more often in the whole model. Weights then only weigh the mean; equal ones give the paper's. The
threshold and the majority sign come from :class:`GlobalTrim`, which reads all models first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attar.errors import SettingsError
from attar.merging.methods.common.chunked import keep_
from attar.merging.methods.common.selection import MagnitudeSelector
from attar.merging.methods.common.task_vectors import (
    Sparsifier,
    TaskVector,
    combine,
    magnitude,
    task_vectors,
)


def ties(
    tensors: Sequence[Tensor],
    base: Tensor,
    *,
    weight: Sequence[float],
    density: Sequence[float],
    normalize: bool = True,
    rescale: bool = False,
    int8_mask: bool = False,
    lambda_: float = 1.0,
    compat: str = "mergekit",
    thresholds: Sequence[float] | None = None,
    majority: float = 1.0,
) -> Tensor:
    """Trim, elect, merge.

    Args:
        normalize: a mean; else a sum.
        thresholds: "paper": of each model, from the scan; None: computed from this tensor.
        majority: "paper": the sign that a sum of 0 elects, from the scan.
    """
    vectors = task_vectors(tensors, base)
    settings: dict[str, Any] = {"weight": weight, "normalize": normalize, "lambda_": lambda_, "elect": True}
    if compat == "mergekit":
        sparsifiers = [magnitude(d, share, rescale) for d, share in zip(vectors, density, strict=True)]
        return combine(vectors, sparsifiers, **settings)
    if thresholds is None:
        scan = scan_one(vectors, density)
        thresholds, majority = scan["thresholds"], scan["majority"]
    return combine(vectors, [trimmed(bound) for bound in thresholds], **settings, majority=majority)


def trimmed(threshold: float) -> Sparsifier:
    """Entries below the threshold become 0; entries equal to the threshold are kept."""
    return lambda chunk: keep_(chunk, chunk.abs() >= threshold)


class GlobalTrim:
    """Reads all tensors of all models, in three passes: the k-th largest |d| of each model in float32,
    k = int(density n), and the sign that is elected more often over the trimmed task vectors.

    Args:
        density: of each model, one for the whole model.
    """

    passes = 3

    def __init__(self, density: Sequence[float]) -> None:
        self.density = list(density)
        self.selectors = [MagnitudeSelector(torch.float32) for _ in density]
        self.thresholds: list[float] = []
        self.balance = 0

    @classmethod
    def of(cls, per_model: Mapping[str, Sequence[Any]]) -> GlobalTrim:
        """From the parameters of the models; the density of a global trim cannot vary with the tensor."""
        for value in per_model["density"]:
            if not isinstance(value, (int, float)):
                raise SettingsError("density", value, "one number for a model, as compat is 'paper'")
        return cls(per_model["density"])

    def add(self, tensors: Sequence[Tensor], base: Tensor) -> None:
        """Count one output tensor in the current pass. Does not modify its inputs."""
        vectors = task_vectors([x.float() for x in tensors], base.float())
        if not self.thresholds:
            for selector, d in zip(self.selectors, vectors, strict=True):
                for chunk in d.chunks():
                    selector.add(chunk)
            return
        for chunks in zip(*(d.chunks() for d in vectors), strict=True):
            kept = [trimmed(bound)(chunk) for bound, chunk in zip(self.thresholds, chunks, strict=True)]
            self.balance += int(torch.stack(kept).sum(0).sign().sum(dtype=torch.float64))

    def end_pass(self) -> None:
        """Call after the last tensor of a pass."""
        if self.thresholds:
            return
        for selector, density in zip(self.selectors, self.density, strict=True):
            selector.end_pass([max(int(density * selector.count), 1)])
        if all(selector.done for selector in self.selectors):
            self.thresholds = [selector.thresholds[0].value for selector in self.selectors]

    def finish(self) -> dict[str, Any]:
        """``thresholds`` and ``majority`` for :func:`ties`."""
        return {"thresholds": self.thresholds, "majority": 1.0 if self.balance >= 0 else -1.0}


def scan_one(vectors: Sequence[TaskVector], density: Sequence[float]) -> dict[str, Any]:
    """The scan's result for one tensor as the whole model."""
    scan = GlobalTrim(density)
    for _ in range(scan.passes):
        scan.add([d.tensor for d in vectors], vectors[0].base)
        scan.end_pass()
    return scan.finish()
