"""Plans of structured pruning: how much of every structure stays, what the smaller model costs, exactly, and
the loss of quality that is predicted for it.

    elements(plan) = sum_t prod_i (d_ti - sum_s c_tis r_s)        bytes(plan) = 8 + header + elements * itemsize
    KL(plan)       ~ sum_s KL_s(n_s)

Letters: s structure; n_s its units that stay, r_s those removed; t tensor of the checkpoint, d_ti its sizes
before, c_tis what one unit of s takes from size i (from a cut of a model without weights: no table of
families). KL_s: the model's KL with s alone cut (scan.py), measured at some n_s; between two of them sqrt(KL)
is interpolated, because a small change costs the square of its size.

The sum is an approximation, as in mixed precision: cuts act on each other. So the few plans of the smallest
sums are measured before one is chosen (mixed.py), and plans that cut a single structure are among them.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

SHARD = 50_000_000_000  # bytes of a file of save_pretrained; a larger model has several, and an index
DISTINCT = 8  # plans differ if some structure differs by a unit and by an eighth of the model's units


class PlanSizes(NamedTuple):
    """Units that stay: KV groups and neurons of a layer, channels of the residual stream, layers."""

    heads: int
    neurons: int
    hidden: int
    layers: int

    def cut_structures(self, full: PlanSizes) -> tuple[str, ...]:
        """Names of the structures that lose units."""
        return tuple(name for name in self._fields if getattr(self, name) < getattr(full, name))

    def text(self, full: PlanSizes) -> str:
        """``2 of 4 head groups, 6 of 8 layers``: what is cut."""
        nouns = {"heads": "head groups", "neurons": "neurons", "hidden": "channels", "layers": "layers"}
        cut = self.cut_structures(full)
        parts = [f"{getattr(self, name)} of {getattr(full, name)} {nouns[name]}" for name in cut]
        return ", ".join(parts) or "nothing cut"


STRUCTURES = PlanSizes._fields
WIDTHS = ("heads", "neurons", "hidden")


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the checkpoint.

    Attributes:
        name: below its block, or below the model.
        block: number of its block; None: outside the blocks.
        dtype: the format's name, ``BF16``; bits: of an element.
        shrink: for each size, what a removed unit of heads, neurons and hidden takes from it.
        looked_up: read one row a token (an embedding that is not the head, too).
    """

    name: str
    block: int | None
    dtype: str
    bits: int
    shape: tuple[int, ...]
    shrink: tuple[tuple[int, ...], ...]
    looked_up: bool = False

    def reduced(self, removed: Sequence[int | Tensor]) -> list[int | Tensor]:
        """Its sizes without these units of heads, neurons and hidden: numbers, or tensors that broadcast."""
        return [
            size - sum(taken * count for taken, count in zip(taking, removed, strict=True))
            for size, taking in zip(self.shape, self.shrink, strict=True)
        ]


class PlanGrid(NamedTuple):
    """Numbers of units among which a plan chooses, for each structure."""

    heads: tuple[int, ...]
    neurons: tuple[int, ...]
    hidden: tuple[int, ...]
    layers: tuple[int, ...]

    def plan(self, flat: int) -> PlanSizes:
        """The plan of a flat index into a table over the grid."""
        picked = []
        for values in reversed(self):
            flat, number = divmod(flat, len(values))
            picked.append(values[number])
        return PlanSizes(*reversed(picked))


@dataclass(frozen=True)
class PlannedModel:
    """All tensors of the uncut model, and how cuts shrink them.

    Attributes:
        blocks_name: path of the blocks; the number of a block and the tensor's name follow.
        removal: layers in the order in which they go.
    """

    full: PlanSizes
    tensors: tuple[PlannedTensor, ...]
    blocks_name: str
    removal: tuple[int, ...]

    def kept_layers(self, count: int) -> list[int]:
        """The layers of a plan with ``count`` layers, ascending."""
        return sorted(self.removal[self.full.layers - count :])

    def headers(self, sizes: PlanSizes) -> Iterator[tuple[str, str, int, tuple[int, ...]]]:
        """Name, dtype, bits of an element and shape of every tensor of the cut model."""
        removed = [getattr(self.full, name) - getattr(sizes, name) for name in WIDTHS]
        numbers = {old: new for new, old in enumerate(self.kept_layers(sizes.layers))}
        for tensor in self.tensors:
            if tensor.block is None or tensor.block in numbers:
                prefix = "" if tensor.block is None else f"{self.blocks_name}.{numbers[tensor.block]}."
                shape = tuple(int(size) for size in tensor.reduced(removed))
                yield prefix + tensor.name, tensor.dtype, tensor.bits, shape

    def file_bytes(self, sizes: PlanSizes) -> int:
        """Bytes of the cut model's ``model.safetensors`` as transformers writes it."""
        position, fields = 0, {"__metadata__": {"format": "pt"}}
        for name, dtype, bits, shape in sorted(self.headers(sizes), key=lambda one: (-one[2], one[0])):
            end = position + math.prod(shape) * bits // 8
            fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}  # type: ignore[dict-item]
            position = end
        header = len(json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode())
        return 8 + header + -header % 8 + position

    def parameters(self, sizes: PlanSizes) -> int:
        """Parameters of the cut model, tied ones once."""
        headers = self.headers(sizes)
        return sum(math.prod(shape) for _, dtype, _, shape in headers if _is_float(dtype))

    def read_bytes(self, sizes: PlanSizes) -> int:
        """Bytes of weights that a step of decoding reads at batch 1."""
        return int(self.over(PlanGrid(*((size,) for size in sizes)), read_cost).item())

    def over(self, grid: PlanGrid, cost: Callable[[PlannedTensor], float]) -> Tensor:
        """The summed cost of every plan of a grid, float64 (heads, neurons, hidden, layers): exact up to 2^53.

        Args:
            cost: of one element of a tensor.
        """
        removed = [
            (getattr(self.full, name) - torch.tensor(getattr(grid, name))).reshape(
                [-1 if axis == other else 1 for other in range(3)]
            )
            for axis, name in enumerate(WIDTHS)
        ]
        shape = [len(getattr(grid, name)) for name in WIDTHS]
        sums = torch.zeros(self.full.layers + 1, *shape, dtype=torch.float64)  # the last: outside the blocks
        for tensor in self.tensors:
            elements = math.prod(tensor.reduced(removed))  # type: ignore[type-var]
            sums[-1 if tensor.block is None else tensor.block] += cost(tensor) * elements
        totals = [sums[-1] + sums[self.kept_layers(count)].sum(0) for count in grid.layers]
        return torch.stack(totals, -1)


def byte_cost(tensor: PlannedTensor) -> float:
    """Stored bytes of an element."""
    return tensor.bits / 8


def read_cost(tensor: PlannedTensor) -> float:
    """Bytes of an element that a step of decoding reads."""
    return 0.0 if tensor.looked_up else tensor.bits / 8


def parameter_cost(tensor: PlannedTensor) -> float:
    """1 for an element of a parameter."""
    return float(_is_float(tensor.dtype))


def _is_float(dtype: str) -> bool:
    return "F" in dtype


@dataclass(frozen=True)
class QualityCurve:
    """KL against the units of one structure that stay, nats a token.

    Attributes:
        points: (units, KL) in ascending units; the last has all of them and no KL.
    """

    points: tuple[tuple[int, float], ...]

    def __call__(self, units: int) -> float:
        """The KL at a number of units within the points."""
        counts = [count for count, _ in self.points]
        right = bisect.bisect_left(counts, units)
        if counts[right] == units:
            return self.points[right][1]
        (low, high_kl), (high, low_kl) = self.points[right - 1], self.points[right]
        share = (units - low) / (high - low)
        return float(((1 - share) * math.sqrt(high_kl) + share * math.sqrt(low_kl)) ** 2)


def predicted_kl(curves: Mapping[str, QualityCurve], grid: PlanGrid) -> Tensor:
    """The sum of the structures' KLs for every plan of a grid, float64 (heads, neurons, hidden, layers)."""
    total = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    for axis, name in enumerate(STRUCTURES):
        values = [curves[name](units) if name in curves else 0.0 for units in getattr(grid, name)]
        total = total + torch.tensor(values, dtype=torch.float64).reshape(
            [-1 if axis == other else 1 for other in range(4)]
        )
    return total


def plans_within(predicted: Tensor, cost: Tensor, budget: float, grid: PlanGrid) -> Iterator[PlanSizes]:
    """The plans of a grid whose cost is at most the budget, of the smallest predicted KL first; equal ones by
    cost."""
    cost, predicted = cost.flatten(), predicted.expand_as(cost).flatten()
    inside = (cost <= budget).nonzero().flatten()
    inside = inside[torch.argsort(cost[inside], stable=True)]
    inside = inside[torch.argsort(predicted[inside], stable=True)]
    return (grid.plan(int(flat)) for flat in inside)


def are_distinct(a: PlanSizes, b: PlanSizes, full: PlanSizes) -> bool:
    """Whether two plans differ by more than a nuance."""
    return any(abs(x - y) >= max(1, size / DISTINCT) for x, y, size in zip(a, b, full, strict=True))


def shortlist(
    candidates: Callable[[PlanGrid], Iterator[PlanSizes]], grid: PlanGrid, full: PlanSizes, count: int
) -> list[PlanSizes]:
    """The best ``count`` distinct plans; then the best of every structure alone, and of all widths without
    layers: rankings may turn when plans are measured, or after recovery.

    Args:
        candidates: the plans of a grid within the budget, the best first.
    """
    best: list[PlanSizes] = []
    for plan in candidates(grid):
        if len(best) == count:
            break
        if all(are_distinct(plan, other, full) for other in best):
            best.append(plan)
    for free in (*((name,) for name in STRUCTURES), WIDTHS):
        fixed = {name: (getattr(full, name),) for name in STRUCTURES if name not in free}
        best += list(islice(candidates(grid._replace(**fixed)), 1))
    return list(dict.fromkeys(best))


def steps(full: int, multiple: int, least: int, most: int) -> tuple[int, ...]:
    """At most ``most`` numbers of units from ``least`` to ``full``, evenly spread, as multiples where they are
    not ``full``; ascending."""
    if full <= least:
        return (full,)
    wanted = [least + (full - least) * number / (most - 1) for number in range(most)]
    snapped = {max(multiple, round(value / multiple) * multiple) for value in wanted}
    return tuple(sorted({value for value in snapped if least <= value < full} | {full}))
