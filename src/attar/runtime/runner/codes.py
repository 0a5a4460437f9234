"""Weights of a quantized checkpoint as the kernels take them: no code is rounded again.

A weight w = s (q - z) on an even grid (formats/coded.py) of 2, 3 or 4 bits takes lanes of 4 bits, one
of 5 to 8 in lanes of 8; q and z are shifted together, so that codes are unsigned: by 8 or 128 where there is
no z. A scale of many inputs, or of a whole row, is repeated over group sizes that the kernels have. Where
inputs name their groups (GPTQ's act-order), the columns are sorted by group, and the caller sorts its inputs
likewise.

Fused weights (q, k and v; gate and up) must be of one kind: codes of 4 bits become codes of 8, groups take
the smallest size, and zeros are made explicit, all of it exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attar.formats.coded import UniformWeight
from attar.kernels.memory import Arena
from attar.kernels.packed import BITS, GROUPS, Kind, PackedWeight, Pays, pack_codes


@dataclass(frozen=True)
class PackedCodes:
    """A weight (N, K) in the words of :func:`attar.kernels.packed.pack_codes`.

    Attributes:
        codes: uint8 (N, K), inputs in the order ``order``.
        scales: float32 (N, K / G).
        zeros: float32 (N, K / G); None: the middle of the codes.
        kind: int4 or int8.
        order: int64 (K,), the input of each column; None: as they are.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    kind: Kind
    order: Tensor | None = None

    @property
    def group(self) -> int:
        """G."""
        return int(self.codes.shape[1] // self.scales.shape[1])

    def rows(self, rows: slice | Tensor) -> PackedCodes:
        """Some rows, or all in another order."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], zeros=zeros)

    def dense(self) -> Tensor:
        """W, float32 (N, K), columns in the order ``order``."""
        points = (
            torch.tensor(float(1 << (BITS[self.kind] - 1))) if self.zeros is None else self.zeros[..., None]
        )
        parts = self.codes.float().unflatten(1, (-1, self.group))
        return ((parts - points) * self.scales[..., None]).flatten(1)

    def pack(
        self, bias: Tensor | None = None, arena: Arena | None = None, pays: Pays | None = None
    ) -> PackedWeight:
        """The bytes that a product reads, columns in the order ``order``."""
        return pack_codes(
            self.codes, self.scales, self.zeros, kind=self.kind, bias=bias, arena=arena, pays=pays
        )


def codes_of(weight: UniformWeight) -> PackedCodes | None:
    """A weight for the kernels; None where they have no such groups or zeros. Does not modify its input."""
    (rows, columns), order = weight.codes.shape, None
    groups = torch.arange(columns) // weight.width if weight.g_idx is None else weight.g_idx.long()
    if weight.g_idx is not None:
        order = torch.argsort(groups, stable=True)
        groups = groups[order]
    size = _group(groups)
    if size is None:
        return None
    kind: Kind = "int4" if weight.bits <= BITS["int4"] else "int8"
    shift = 1 << (BITS[kind] - 1)
    if weight.zero is not None:  # the nearer zeros are to 0, the more of them float16 keeps
        shift = -int(weight.codes.min())
    codes = weight.codes if order is None else weight.codes[:, order]
    first = groups[::size]
    zeros = None if weight.zero is None else _spread(weight.zero, rows, first) + shift
    if zeros is not None and not bool(zeros.isfinite().all()):
        return None
    return PackedCodes(
        (codes + shift).view(torch.uint8), _spread(weight.scale, rows, first), zeros, kind, order
    )


def fused(parts: Sequence[PackedCodes]) -> PackedCodes | None:
    """Rows of several weights of the same inputs, one after the other; None where the inputs are sorted in
    different ways. Does not modify its inputs."""
    order = parts[0].order
    for part in parts[1:]:
        if (part.order is None) != (order is None) or (
            order is not None and not torch.equal(part.order, order)  # type: ignore[arg-type]
        ):
            return None
    if any(part.kind != parts[0].kind for part in parts):
        parts = [_widened(part) for part in parts]
    size = min(part.group for part in parts)
    parts = [_regrouped(part, size) for part in parts]
    zeros = None
    if any(part.zeros is not None for part in parts):
        middle = float(1 << (BITS[parts[0].kind] - 1))
        zeros = torch.cat(
            [torch.full_like(part.scales, middle) if part.zeros is None else part.zeros for part in parts]
        )
    codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
    return PackedCodes(codes, scales, zeros, parts[0].kind, order)


def _group(groups: Tensor) -> int | None:
    """The largest group of a kernel whose inputs all belong to one group of these, neighbours (K,)."""
    borders = [len(groups), *((groups[1:] != groups[:-1]).nonzero().flatten() + 1).tolist()]
    return next((size for size in sorted(GROUPS, reverse=True) if all(x % size == 0 for x in borders)), None)


def _spread(table: Tensor, rows: int, groups: Tensor) -> Tensor:
    """A table (P, G) of tiles as (N, groups)."""
    table = table.float()[:, groups]
    return table.repeat_interleave(-(-rows // len(table)), 0)[:rows].contiguous()


def _widened(part: PackedCodes) -> PackedCodes:
    """Codes of 4 bits as codes of 8."""
    if part.zeros is not None:
        return replace(part, kind="int8")
    return replace(part, codes=part.codes + (120 if part.kind == "int4" else 0), kind="int8")


def _regrouped(part: PackedCodes, size: int) -> PackedCodes:
    """The same in smaller groups."""
    times = part.group // size
    if times == 1:
        return part
    zeros = None if part.zeros is None else part.zeros.repeat_interleave(times, 1)
    return replace(part, scales=part.scales.repeat_interleave(times, 1), zeros=zeros)
