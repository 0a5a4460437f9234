"""What a plan of structured pruning costs, exactly: elements of every tensor, bytes of the file.

    elements(plan) = sum_t prod_i (d_ti - sum_s c_tis r_s)
    bytes(plan) = 8 + header + elements * itemsize

Letters: s structure (heads, neurons, hidden); r_s its units that go; t tensor of the checkpoint, d_ti its
sizes before; c_tis what one unit of s takes from size i, known from a cut of a model without weights, so that
no table lists families. Removed layers take their tensors along; the others are renumbered.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


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
        name: in the file of the uncut model.
        block: number of its block, which its name has too; None: outside the blocks.
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
            size - sum(less * count for less, count in zip(by_unit, removed, strict=True))
            for size, by_unit in zip(self.shape, self.shrink, strict=True)
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
        removal: layers in the order in which they go.
    """

    full: PlanSizes
    tensors: tuple[PlannedTensor, ...]
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
                name, old = tensor.name, tensor.block
                if old is not None:
                    name = name.replace(f".{old}.", f".{numbers[old]}.", 1)
                shape = tuple(int(size) for size in tensor.reduced(removed))
                yield name, tensor.dtype, tensor.bits, shape

    def file_bytes(self, sizes: PlanSizes) -> int:
        """Bytes of the cut model's ``model.safetensors`` as transformers writes it."""
        position, fields = 0, {"__metadata__": {"format": "pt"}}
        for name, dtype, bits, shape in sorted(
            self.headers(sizes), key=lambda header: (-header[2], header[0])
        ):
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
        """The summed cost of every plan of a grid, float64 (heads, neurons, hidden, layers); exact to 2^53.

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
