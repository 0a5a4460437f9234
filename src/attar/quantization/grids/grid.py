"""The interface of a grid: a code book on the unit scale, and parameters for tiles of the weight.

    w = s * (level(q) - z) - m           q = nearest((w + m) / s + z)

Letters: W (N, K) weight, N outputs, K inputs; q code; s scale, z zero, m minimum of a tile of r rows by c
columns; P = ceil(N / r), G = ceil(K / c): the tiles form a (P, G) table.

Grid and rounding are independent. A rounding calls ``choose`` for the parameters, then ``encode`` and
``decode`` on values of any shape against which the parameters broadcast: a whole weight for round to nearest,
one column for GPTQ, one diagonal for the two-sided roundings. A new number format is one class with
``nearest``, ``level`` and ``choose``, and every rounding runs on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from attar.kernels.columns import CodeBook

CHUNK = 1 << 20  # weights coded at a time


@dataclass(frozen=True)
class TileParameters:
    """What decodes the codes of each tile.

    Attributes:
        scale: s, float32 (P, G), exactly as a reader of the stored form computes it.
        zero: z, float32 (P, G), in units of codes; None: 0.
        minimum: m, float32 (P, G), in units of weights; None: 0.
        stored: grids with two levels of scales keep here what the file holds (sub-scale codes, the scales of
            scales), by name; ``scale`` and ``minimum`` are computed from it.
        top: largest code of each tile, float32 (P, G), where tiles differ in it; None: the grid's own.
    """

    scale: Tensor
    zero: Tensor | None = None
    minimum: Tensor | None = None
    stored: Mapping[str, Tensor] = field(default_factory=dict)
    top: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> TileParameters:
        """The same parameters indexed, broadcast or moved; without ``stored``."""
        zero = None if self.zero is None else change(self.zero)
        minimum = None if self.minimum is None else change(self.minimum)
        top = None if self.top is None else change(self.top)
        return TileParameters(change(self.scale), zero, minimum, top=top)

    def column(self, group: int | Tensor) -> TileParameters:
        """The parameters of one column of tiles (P,), or of several: (P, columns) for a tensor of numbers."""
        return self.map(lambda value: value[:, group])


class Grid(ABC):
    """A number format for weights. Subclasses are frozen dataclasses.

    Attributes:
        storage: the type in which a reader gets the decoded weight; a stored floating-point scale has it too,
            unless the grid says otherwise.
        group_size: c, columns of a tile; 0: all.
        rows: r, rows of a tile; 0: all. (1, g) is a group of g inputs, (1, 0) a channel, (0, 0) the tensor.
        searches: its own ``choose`` looks for the parameters of least error and takes ``importance``.
        reach: largest ``shrink`` that a search tries.
    """

    searches: ClassVar[bool] = False
    reach: ClassVar[float] = 1.0

    @property
    def signed(self) -> bool:
        """Whether a search tries negative scales: codes reach farther on one side of 0."""
        return False

    storage: torch.dtype
    group_size: int
    rows: int

    @property
    def code_dtype(self) -> torch.dtype:
        """Type in which codes are kept."""
        return torch.int8

    @abstractmethod
    def nearest(self, values: Tensor) -> Tensor:
        """Codes, as float32, of values on the unit scale (of any shape)."""

    @abstractmethod
    def level(self, codes: Tensor) -> Tensor:
        """Values on the unit scale, float32, of codes of any type."""

    @abstractmethod
    def choose(
        self, weight: Tensor, shrink: float | Tensor = 1.0, importance: Tensor | None = None
    ) -> TileParameters:
        """Parameters of each tile of a weight. Does not modify its inputs.

        Args:
            weight: (N, K), any float type.
            shrink: factor on the range of each tile, a number or (P, G); what scale searches vary. Without
                it the grid's own.
            importance: (K,) weight of each input's squared error (the diagonal of H), for grids whose own
                rule searches; the others ignore it.
        """

    def own_shrink(self, weight: Tensor, importance: Tensor | None = None) -> float | Tensor:
        """The ``shrink`` of :meth:`choose` where none is given: 1, or (P, G) where the grid's rule has a
        choice."""
        return 1.0

    def rescaled(self, parameters: TileParameters, scale: Tensor) -> TileParameters | None:
        """The parameters with other scales (P, G), rounded as they are stored; None where a tile's scale
        cannot be chosen freely (scales of scales, powers of two)."""
        return None

    @property
    def magnitude(self) -> float:
        """The largest magnitude of a tile whose scale is stored exactly, among those with the same where
        scales are few."""
        return 1.0

    def shared_with(self, parameters: TileParameters) -> Grid:
        """The grid whose parameters share with given ones what several weights share: a global scale."""
        return self

    def code_book(self) -> CodeBook | None:
        """What a compiled loop needs to encode and decode; None where it cannot, and torch does it."""
        return None

    @abstractmethod
    def bits_per_weight(self, shape: tuple[int, int]) -> float:
        """Stored bits for each weight of an (N, K) matrix: codes and everything that decodes them."""

    def encode(self, values: Tensor, parameters: TileParameters) -> Tensor:
        """Nearest codes, as float32, of ``values``; the parameters broadcast against them."""
        if parameters.minimum is not None:
            values = values + parameters.minimum
        scaled = values / parameters.scale
        if parameters.zero is not None:
            scaled = scaled + parameters.zero
        return self.nearest(scaled)

    def decode(self, codes: Tensor, parameters: TileParameters) -> Tensor:
        """Values of codes, float32; the parameters broadcast against the codes."""
        values = self.level(codes)
        if parameters.zero is not None:
            values = values - parameters.zero
        values = values * parameters.scale
        return values if parameters.minimum is None else values - parameters.minimum

    def groups(self, columns: int) -> int:
        """G, the tiles in a row of K columns."""
        return -(-columns // self.group_size) if self.group_size else 1

    def tiles(self, shape: tuple[int, int]) -> tuple[int, int]:
        """(P, G), the shape of scale and zero for an (N, K) weight."""
        return -(-shape[0] // self.rows) if self.rows else 1, self.groups(shape[1])

    def tile(self, weight: Tensor) -> Tensor:
        """The weight (N, K) in tiles: float32 (P, r, G, c), ragged ends padded with zeros."""
        rows, columns = weight.shape
        height, width = self.rows or rows, self.group_size or columns
        padded = weight.float()
        if rows % height or columns % width:
            padded = torch.nn.functional.pad(padded, (0, -columns % width, 0, -rows % height))
        return padded.reshape(-(-rows // height), height, -(-columns // width), width)

    def untile(self, tiled: Tensor, shape: tuple[int, int]) -> Tensor:
        """The inverse of :meth:`tile`."""
        padded = tiled.reshape(tiled.shape[0] * tiled.shape[1], -1)
        return padded[: shape[0], : shape[1]]

    def by_row(self, parameters: TileParameters, rows: int) -> TileParameters:
        """Parameters (N, G), one row for each row of the weight."""
        if self.rows == 1:
            return parameters.map(lambda value: value)
        return parameters.map(lambda value: value.repeat_interleave(self.rows or rows, 0)[:rows])

    def quantize(self, weight: Tensor, parameters: TileParameters) -> QuantizedTensor:
        """The nearest codes of a weight (N, K) under given parameters."""
        if self.rows == 1 and weight.numel() > CHUNK and len(weight) > 1:
            return self._quantize_rows(weight, parameters)
        spread = parameters.map(lambda value: value[:, None, :, None])
        codes = self.untile(self.encode(self.tile(weight), spread), (weight.shape[0], weight.shape[1]))
        return QuantizedTensor(self, codes.to(self.code_dtype), parameters)

    def _quantize_rows(self, weight: Tensor, parameters: TileParameters) -> QuantizedTensor:
        """The same a few rows at a time: temporaries stay in the cache."""
        codes = torch.empty(weight.shape, dtype=self.code_dtype, device=weight.device)
        step = max(CHUNK // weight.shape[1], 1)
        for start in range(0, len(weight), step):
            part = parameters.map(lambda value, at=slice(start, start + step): value[at])  # type: ignore[misc]
            codes[start : start + step] = self.quantize(weight[start : start + step], part).codes
        return QuantizedTensor(self, codes, parameters)


@dataclass(frozen=True)
class QuantizedTensor:
    """A weight as codes on a grid.

    Attributes:
        codes: (N, K) in the grid's code type, in the original column order.
        parameters: what decodes them.
        g_idx: int64 (K,), the column of tiles that decodes each column, where groups do not follow the column
            order (act-order "group"); None: they do.
    """

    grid: Grid
    codes: Tensor
    parameters: TileParameters
    g_idx: Tensor | None = None

    def dequantize(self) -> Tensor:
        """The weight that a reader of the codes gets: float32 (N, K), each value rounded once to the storage
        type."""
        if self.g_idx is not None:
            rows = self.grid.by_row(self.parameters, len(self.codes))
            return self.grid.decode(self.codes, rows.column(self.g_idx)).to(self.grid.storage).float()
        if self.grid.rows == 1 and self.codes.numel() > CHUNK and len(self.codes) > 1:
            return self._dequantize_rows()
        spread = self.parameters.map(lambda value: value[:, None, :, None])
        tiled = self.grid.tile(self.codes)
        shape = (self.codes.shape[0], self.codes.shape[1])
        values = self.grid.decode(tiled, spread).to(self.grid.storage).float()
        return self.grid.untile(values, shape)

    def _dequantize_rows(self) -> Tensor:
        """The same a few rows at a time."""
        values = torch.empty(self.codes.shape, dtype=torch.float32, device=self.codes.device)
        step = max(CHUNK // self.codes.shape[1], 1)
        for start in range(0, len(values), step):
            part = self.parameters.map(lambda value, at=slice(start, start + step): value[at])  # type: ignore[misc]
            values[start : start + step] = QuantizedTensor(
                self.grid, self.codes[start : start + step], part
            ).dequantize()
        return values

    def restored(self, order: Tensor) -> QuantizedTensor:
        """Codes of sorted columns in the weight's column order, with the group of each column as ``g_idx``.

        Args:
            order: int64 (K,), the original number of each column.
        """
        codes, g_idx = torch.empty_like(self.codes), torch.empty_like(order)
        codes[:, order] = self.codes
        g_idx[order] = torch.arange(len(order), device=order.device) // (self.grid.group_size or len(order))
        return QuantizedTensor(self.grid, codes, self.parameters, g_idx)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by short name, for a file; :meth:`from_tensors` is the inverse."""
        named = {"codes": self.codes, "scale": self.parameters.scale}
        for name in ("zero", "minimum", "top"):
            value = getattr(self.parameters, name)
            if value is not None:
                named[name] = value
        if self.g_idx is not None:
            named["g_idx"] = self.g_idx
        stored = {f"stored.{name}": value for name, value in self.parameters.stored.items()}
        return {name: value.cpu().contiguous() for name, value in {**named, **stored}.items()}

    @classmethod
    def from_tensors(cls, grid: Grid, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """The inverse of :meth:`tensors`."""
        stored = {
            name.removeprefix("stored."): value
            for name, value in tensors.items()
            if name.startswith("stored.")
        }
        parameters = TileParameters(
            tensors["scale"], tensors.get("zero"), tensors.get("minimum"), stored, tensors.get("top")
        )
        return cls(grid, tensors["codes"], parameters, tensors.get("g_idx"))


def stored_scale(scale: Tensor, storage: torch.dtype) -> Tensor:
    """The scale as it is read back, float32. A scale of 0 becomes 1; tiny ones become the smallest number of
    the storage type that is not subnormal in float32. The sign is kept."""
    magnitude = torch.where(scale.abs() > 0, scale.abs(), torch.ones_like(scale))
    number = torch.finfo(storage)
    least = max(number.tiny * number.eps, torch.finfo(torch.float32).tiny)
    return magnitude.clamp(min=least).to(storage).float().copysign(scale)
