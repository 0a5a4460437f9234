"""A part of a stored tensor: where a checkpoint stores several weights in one (experts stacked, gate and up
side by side, keys and values of MLA)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StoredPart:
    """A part of a stored tensor.

    Attributes:
        shape: of the stored tensor.
        index: along its first dimension; None: all.
        heads: its rows are divided into so many blocks, along a new first dimension; 0: they are not.
        axis: of ``rows``, after the division.
        rows: the taken rows; None: all.
        turned: the last two dimensions are swapped, at the end.
    """

    shape: tuple[int, ...]
    index: int | None = None
    heads: int = 0
    axis: int = 0
    rows: slice | None = None
    turned: bool = False

    def view(self, tensor: Tensor) -> Tensor:
        """The part, in the memory of a contiguous stored tensor."""
        return self.inside(tensor if self.index is None else tensor[self.index])

    def inside(self, part: Tensor) -> Tensor:
        """The part, in the memory of what is at ``index``."""
        if self.heads:
            part = part.unflatten(0, (self.heads, -1))
        if self.rows is not None:
            part = part[(slice(None),) * self.axis + (self.rows,)]
        return part.mT if self.turned else part
