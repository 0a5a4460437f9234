"""TIES: Yadav, Tam, Choshen, Raffel, Bansal 2023, "TIES-Merging: Resolving interference when merging models",
arXiv 2306.01708, algorithm 1.

    trim:   d_i = the largest entries of x_i - base, the rest 0
    elect:  s = the sign with more mass
    merge:  y = base + lambda (mean of the non-zero d_i whose sign is s)

Letters: x_i the models' tensors, d_i their trimmed task vectors. The vote and the sum are in consensus.py.

mergekit's form trims each tensor by itself to int(density n) entries (ties by place), votes with weighted
task vectors, a sum of 0 electing +1, and takes the weighted mean. The paper's form trims the whole model at
one threshold (entries equal to it all stay), votes without weights, a sum of 0 electing the sign that the
vote over the whole model elects more often. Weights then only weigh the mean; equal ones give the paper's.
The two global facts come from :class:`GlobalTrim`, which reads the models beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attar.errors import SettingsError
from attar.merging.consensus import combine, task_vectors
from attar.merging.methods.common.chunked import keep_
from attar.merging.methods.common.selection import Selector
from attar.merging.methods.common.task_vectors import Sparsifier, TaskVector, magnitude


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
    """Trim, elect, merge. Does not modify its inputs.

    Args:
        tensors: x_i, of base's shape.
        base: the common ancestor's tensor.
        weight: of each model.
        density: share of the entries that stays, of each model.
        normalize: a mean; else a sum.
        rescale: bring each trimmed task vector to its former L1 norm.
        int8_mask: no effect.
        lambda_: scale of the merged task vector.
        compat: "mergekit" or "paper".
        thresholds: "paper": of each model, from the scan; None: found in this tensor.
        majority: "paper": the sign that a vote of 0 elects, from the scan.

    Returns:
        Of base's dtype.
    """
    vectors = task_vectors(tensors, base)
    settings: dict[str, Any] = {"weight": weight, "normalize": normalize, "lambda_": lambda_, "vote": True}
    if compat == "mergekit":
        sparsifiers = [magnitude(d, share, rescale) for d, share in zip(vectors, density, strict=True)]
        return combine(vectors, sparsifiers, **settings)
    if thresholds is None:
        found = scan_of(vectors, density)
        thresholds, majority = found["thresholds"], found["majority"]
    return combine(vectors, [trimmed(bound) for bound in thresholds], **settings, majority=majority)


def trimmed(threshold: float) -> Sparsifier:
    """Entries below the threshold become 0; those equal to it stay."""
    return lambda piece: keep_(piece, piece.abs() >= threshold)


class GlobalTrim:
    """Reads all tensors of all models, in three passes: the k-th largest |d| of each model in float32,
    k = int(density n), and the sign that the votes over the trimmed task vectors elect more often.

    Args:
        density: of each model, one for the whole model.
    """

    passes = 3

    def __init__(self, density: Sequence[float]) -> None:
        self.density = list(density)
        self.selectors = [Selector(torch.float32) for _ in density]
        self.thresholds: list[float] = []
        self.balance = 0

    @classmethod
    def of(cls, each: Mapping[str, Sequence[Any]]) -> GlobalTrim:
        """From the parameters of the models; a trim of the whole model cannot vary with the tensor."""
        for value in each["density"]:
            if not isinstance(value, (int, float)):
                raise SettingsError("density", value, "one number for a model, as compat is 'paper'")
        return cls(each["density"])

    def add(self, tensors: Sequence[Tensor], base: Tensor) -> None:
        """Count one output tensor in the present pass. Does not modify its inputs."""
        vectors = task_vectors([x.float() for x in tensors], base.float())
        if not self.thresholds:
            for selector, d in zip(self.selectors, vectors, strict=True):
                for piece in d.pieces():
                    selector.add(piece)
            return
        for pieces in zip(*(d.pieces() for d in vectors), strict=True):
            kept = [trimmed(bound)(p) for bound, p in zip(self.thresholds, pieces, strict=True)]
            self.balance += int(torch.stack(kept).sum(0).sign().sum(dtype=torch.float64))

    def end_pass(self) -> None:
        """To be called after the last tensor of a pass."""
        if self.thresholds:
            return
        for selector, density in zip(self.selectors, self.density, strict=True):
            selector.end_pass([max(int(density * selector.count), 1)])
        if all(selector.done for selector in self.selectors):
            self.thresholds = [selector.cuts[0].value for selector in self.selectors]

    def finish(self) -> dict[str, Any]:
        """``thresholds`` and ``majority`` for :func:`ties`."""
        return {"thresholds": self.thresholds, "majority": 1.0 if self.balance >= 0 else -1.0}


def scan_of(vectors: Sequence[TaskVector], density: Sequence[float]) -> dict[str, Any]:
    """What the scan finds where one tensor is the whole model."""
    scan = GlobalTrim(density)
    for _ in range(scan.passes):
        scan.add([d.tensor for d in vectors], vectors[0].base)
        scan.end_pass()
    return scan.finish()
