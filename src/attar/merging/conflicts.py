"""Where the parents of a merge disagree: their task vectors compared pair by pair, tensor by tensor.

    d_i = x_i - b                                   the task vector of model i
    cosine_ij     = <d_i, d_j> / (|d_i| |d_j|)      1 the same change, 0 unrelated, -1 opposite
    agreement_ij  = share of the entries that both changed in which the signs agree; 1/2 is chance
    norm_i        = |d_i| / |b|                     how far the model moved from the base
    overruled_i   = share of the entries it changed whose sign differs from the sign of sum_j d_j

The last is the part that the vote of TIES would remove before any trimming (Yadav et al. 2023, arXiv
2306.01708, section 3, "elect sign"); as there, a sum of exactly zero elects +1. The merge's weights are not
used.

All values are kept as sums, so that tensors add up to a layer and layers to the model with each entry counted
once. Of a large tensor every s-th entry is sampled, s coprime to the last dimension (else only a few columns
would be seen), and its sums are scaled to the tensor's size. Sums are float64 by numpy, whose order of
addition does not depend on the number of threads.

Letters: m models, n entries sampled, P = m (m - 1) / 2 pairs in the order (0, 1), (0, 2), ..., (1, 2), ...
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import combinations
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attar.checkpoint.atomic import write_bytes
from attar.checkpoint.parts import part_of
from attar.errors import ModelError
from attar.merging.planning.plan import MergePlan, OutputTensor

SAMPLE = 65_536  # entries of a tensor
ALL_TENSORS = "all"  # name of the whole model's row
DIGITS = 4


@dataclass(frozen=True)
class ConflictSums:
    """Sums over the entries of one tensor, or of several.

    Attributes:
        base: sum of b^2.
        squares: sum of d_i^2, one a model.
        changed: entries with d_i other than 0, one a model.
        overruled: of these, entries whose sign the vote overrules, one a model.
        dots: sum of d_i d_j, one a pair.
        shared: entries that both changed, one a pair.
        agreeing: of these, entries in which the signs agree, one a pair.
    """

    size: float
    base: float
    squares: tuple[float, ...]
    changed: tuple[float, ...]
    overruled: tuple[float, ...]
    dots: tuple[float, ...]
    shared: tuple[float, ...]
    agreeing: tuple[float, ...]

    def __add__(self, other: ConflictSums) -> ConflictSums:
        """The sums over both sets of entries, of the same models."""
        sums: list[Any] = [_plus(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        return ConflictSums(*sums)

    def row(self) -> dict[str, list[float | None]]:
        """``cosine`` and ``agreement`` by pair, ``norm`` and ``overruled`` by model; None where the quotient
        is undefined (nothing changed, or the base is zero)."""
        lengths = [math.sqrt(square) for square in self.squares]
        products = [a * b for a, b in combinations(lengths, 2)]
        return {
            "cosine": _quotients(self.dots, products),
            "agreement": _quotients(self.agreeing, self.shared),
            "norm": _quotients(lengths, [math.sqrt(self.base)] * len(lengths)),
            "overruled": _quotients(self.overruled, self.changed),
        }

    def plain(self) -> list[Any]:
        """The sums as a list that JSON keeps exactly."""
        values = (getattr(self, f.name) for f in fields(self))
        return [list(value) if isinstance(value, tuple) else value for value in values]

    @classmethod
    def from_plain(cls, values: Sequence[Any]) -> ConflictSums:
        """The inverse of :meth:`plain`."""
        sums: list[Any] = [tuple(value) if isinstance(value, list) else value for value in values]
        return cls(*sums)


def measure_conflicts(tensors: Sequence[Tensor], base: Tensor, sample: int = SAMPLE) -> ConflictSums:
    """Compare the task vectors of one tensor. Does not modify its inputs.

    Args:
        tensors: one a model, of the base's shape, any float dtypes; differences are taken in float32.
        base: any shape.

    Raises:
        ModelError: a tensor's shape is not the base's.
    """
    for number, tensor in enumerate(tensors):
        if tensor.shape != base.shape:
            raise ModelError(
                f"the tensor of model {number} is {list(tensor.shape)}, the base's is {list(base.shape)}"
            )
    step = stride(tuple(base.shape), sample)
    b = _sampled(base, step)
    deltas = [_sampled(tensor, step) - b for tensor in tensors]
    scale = base.numel() / max(b.size, 1)
    signs = [np.sign(d).astype(np.int8) for d in deltas]
    vote = np.where(sum(d.astype(np.float64) for d in deltas) >= 0, 1, -1).astype(np.int8)
    pairs = list(combinations(range(len(deltas)), 2))
    return ConflictSums(
        float(base.numel()),
        scale * _dot(b, b),
        tuple(scale * _dot(d, d) for d in deltas),
        tuple(scale * _count(s != 0) for s in signs),
        tuple(scale * _count((s != 0) & (s != vote)) for s in signs),
        tuple(scale * _dot(deltas[i], deltas[j]) for i, j in pairs),
        tuple(scale * _count(signs[i] * signs[j] != 0) for i, j in pairs),
        tuple(scale * _count(signs[i] * signs[j] > 0) for i, j in pairs),
    )


def stride(shape: tuple[int, ...], sample: int = SAMPLE) -> int:
    """The sample's step: at least entries / sample, coprime to the last dimension."""
    step = max(-(-math.prod(shape) // sample), 1)
    while shape and math.gcd(step, shape[-1]) > 1:
        step += 1
    return step


def summary(tensors: Iterable[tuple[str, int | None, ConflictSums]]) -> list[dict[str, Any]]:
    """Rows for the card: the whole model, each part (attention, mlp, norm, ...) of each layer, each part
    outside the layers.

    Args:
        tensors: name of the output tensor, its layer or None, and its sums; of the same models, in any order
            (sums are added in the order of the names).

    Returns:
        plain dicts: ``layer`` (None outside the layers), ``part``, ``stack`` (the name before the layer's
        number, only where the model has several stacks), ``size`` and the values of
        :meth:`ConflictSums.row`, rounded to four significant digits. Empty where nothing was measured or
        there is a single model.
    """
    ordered = sorted(tensors, key=lambda entry: entry[0])
    if not ordered or len(ordered[0][2].squares) < 2:
        return []
    stacks = {_stack(name, layer) for name, layer, _ in ordered if layer is not None}
    sums: dict[tuple[str, int, str], ConflictSums] = {}
    total: ConflictSums | None = None
    for name, layer, tensor_sums in ordered:
        key = (_stack(name, layer), -1 if layer is None else layer, part_of(name))
        sums[key] = sums[key] + tensor_sums if key in sums else tensor_sums
        total = tensor_sums if total is None else total + tensor_sums
    assert total is not None
    rows = [{"layer": None, "part": ALL_TENSORS, **_values(total)}]
    for (stack, layer, part), part_sums in sorted(sums.items(), key=lambda item: (item[0][1] < 0, item[0])):
        row: dict[str, Any] = {"layer": None if layer < 0 else layer, "part": part}
        if len(stacks) > 1 and layer >= 0:
            row["stack"] = stack
        rows.append({**row, **_values(part_sums)})
    return rows


@dataclass
class ConflictRecorder:
    """Measures conflicts while a merge runs; a resumed merge does not measure a tensor again.

    Attributes:
        folder: of the files, one for each process, with one line for every tensor that it compared.
        rank: of this process.
    """

    folder: Path
    rank: int = 0
    _sums: dict[str, ConflictSums] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        lines = self.file.read_bytes().splitlines(keepends=True) if self.file.is_file() else []
        if lines and not lines[-1].endswith(
            b"\n"
        ):  # cut short by a kill; drop it before the next is appended
            write_bytes(self.file, b"".join(lines[:-1]))
        self._read()

    @property
    def file(self) -> Path:
        """Of this process."""
        return self.folder / f"conflicts-{self.rank}.jsonl"

    def _read(self) -> None:
        """What is in the files of all processes."""
        for file in sorted(self.folder.glob("conflicts-*.jsonl")):
            for line in file.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    row = json.loads(line)
                    self._sums[row["name"]] = ConflictSums.from_plain(row["sums"])

    def record(self, output: OutputTensor, tensors: list[Tensor], base: Tensor) -> None:
        """Compare the inputs of one output; may be called from several threads."""
        if len(tensors) < 2 or output.name in self._sums:
            return
        sums = measure_conflicts(tensors, base)
        with self._lock, self.file.open("a") as file:
            self._sums[output.name] = sums
            file.write(json.dumps({"name": output.name, "sums": sums.plain()}) + "\n")

    def details(self, plan: MergePlan) -> dict[str, Any]:
        """For the card: ``conflicts``, rows by layer and part, and ``conflict_models``, the models' names."""
        self._read()
        outputs = [output for output in plan.outputs if output.name in self._sums]
        models = {tuple(item.model for item in output.inputs) for output in outputs}
        if len(models) != 1:  # slices of different models cannot be compared
            return {}
        rows = summary((output.name, output.layer, self._sums[output.name]) for output in outputs)
        labels = [Path(plan.labels[model]).name for model in models.pop()]
        return {"conflicts": rows, "conflict_models": labels} if rows else {}


def _values(sums: ConflictSums) -> dict[str, Any]:
    return {"size": int(sums.size), **sums.row()}


def _stack(name: str, layer: int | None) -> str:
    """The name before a layer's number: ``encoder.block`` of ``encoder.block.3.layer.0.weight``."""
    return "" if layer is None else name.partition(f".{layer}.")[0]


def _sampled(tensor: Tensor, step: int) -> Any:
    """Every ``step``-th entry, float32 (n,)."""
    return tensor.detach().reshape(-1)[::step].to("cpu", torch.float32).numpy()


def _dot(a: Any, b: Any) -> float:
    return float(np.add.reduce(np.multiply(a, b, dtype=np.float64)))


def _count(mask: Any) -> int:
    return int(np.count_nonzero(mask))


def _plus(a: Any, b: Any) -> Any:
    return tuple(x + y for x, y in zip(a, b, strict=True)) if isinstance(a, tuple) else a + b


def _quotients(numerators: Iterable[float], denominators: Iterable[float]) -> list[float | None]:
    return [_quotient(a, b) for a, b in zip(numerators, denominators, strict=True)]


def _quotient(a: float, b: float) -> float | None:
    """a / b to four significant digits; None where it is undefined."""
    if not (b > 0 and math.isfinite(a) and math.isfinite(b)):
        return None
    return float(f"{a / b:.{DIGITS}g}")
