"""2:4 weights: of each aligned four inputs of a row at most two are not zero ("semi-structured" sparsity).

Letters: W (N, K) weight; P (N, K / 4, 2) the positions, 0 to 3, of the two values of each four that are kept,
the smaller first. A four with fewer than two non-zeros keeps zeros besides. A kept value of b bits and its
position take b + 2 bits, so a weight takes b / 2 + 1: 3 bits of int4, 5 of int8, 9 of bf16.

csrc/decode/linear.h describes the bytes of a panel of 32 rows: 64 bytes of positions for 16 inputs, then the
values.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEP = 16  # inputs
SAMPLE = 64  # rows that are looked at before all others
POSITION_BYTES = 64  # of a panel and a step
_SHIFTS = torch.tensor([[0, 2], [4, 6]], dtype=torch.uint8)  # of a position in its byte: half of the panel, c
# Of each set of non-zeros of a four, a bit each: its members, or others where it has fewer than two.
_MEMBERS = [[i for i in range(4) if s >> i & 1] + [i for i in range(4) if not s >> i & 1] for s in range(16)]
_POSITIONS = torch.tensor([sorted(members[:2]) for members in _MEMBERS], dtype=torch.uint8)


def holds(nonzero: Tensor) -> bool:
    """Whether non-zeros (N, K), bool, are 2:4, and 16 divides K."""
    if nonzero.shape[1] % STEP:
        return False
    parts = (nonzero[:SAMPLE], nonzero[SAMPLE:])
    return all(int(_fours(part).sum(2, dtype=torch.uint8).max()) <= 2 for part in parts if len(part))


def encode(values: Tensor, nonzero: Tensor, bits: int) -> Tensor:
    """Bytes of whole panels.

    Args:
        values: (N, K): codes uint8 of 4 or 8 bits, or bfloat16.
        nonzero: bool (N, K), 2:4.
        bits: 4, 8 or 16.

    Returns:
        uint8 (panels, K / 16, bytes).
    """
    powers = torch.tensor([1, 2, 4, 8], dtype=torch.uint8)
    positions = _POSITIONS[(_fours(nonzero) * powers).sum(2, dtype=torch.uint8).long()]
    kept = values.unflatten(1, (-1, 4)).gather(2, positions.long())
    return torch.cat([_position_bytes(positions), _value_bytes(kept, bits)], dim=2)


def decode(data: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Values (N, K), where none is kept zero, and bool (N, K), where one is; from :func:`encode`."""
    positions = _positions(data[..., :POSITION_BYTES]).long()
    kept = _values(data[..., POSITION_BYTES:], bits)
    empty = kept.new_zeros(*kept.shape[:2], 4)
    values = empty.scatter(2, positions, kept).flatten(1)
    return values, empty.bool().scatter(2, positions, torch.ones_like(positions, dtype=torch.bool)).flatten(1)


def _fours(nonzero: Tensor) -> Tensor:
    return nonzero.unflatten(1, (-1, 4)).to(torch.uint8)


def _position_bytes(positions: Tensor) -> Tensor:
    """(panels, K / 16, 64) of P."""
    words = positions.reshape(-1, 2, 16, positions.shape[1] // 4, 2, 4).permute(0, 3, 2, 5, 1, 4)
    return (words << _SHIFTS).sum((4, 5), dtype=torch.uint8).flatten(2)


def _positions(data: Tensor) -> Tensor:
    """P of :func:`_position_bytes`."""
    words = (data.reshape(*data.shape[:2], 16, 4, 1, 1) >> _SHIFTS) & 3  # panel, step, lane, byte, half, c
    return words.permute(0, 4, 2, 1, 5, 3).reshape(len(data) * 32, -1, 2)


def _value_bytes(kept: Tensor, bits: int) -> Tensor:
    """(panels, K / 16, bytes) of kept values (N, K / 4, 2)."""
    steps = kept.shape[1] // 4
    if bits == 16:
        pairs = kept.reshape(-1, 2, 16, steps, 4, 2).permute(
            0, 3, 4, 1, 2, 5
        )  # panel, step, four, half, lane
        return pairs.contiguous().view(torch.uint8).flatten(2)
    lanes = kept.reshape(-1, 2, 16, steps, 2, 4).permute(0, 3, 4, 1, 2, 5)  # panel, step, c, half, lane, byte
    return (lanes if bits == 8 else lanes[:, :, 0] | (lanes[:, :, 1] << 4)).flatten(2)


def _values(data: Tensor, bits: int) -> Tensor:
    """Kept values of :func:`_value_bytes`."""
    panels, steps = data.shape[:2]
    if bits == 16:
        pairs = data.contiguous().view(torch.bfloat16).view(panels, steps, 4, 2, 16, 2)
        return pairs.permute(0, 3, 4, 1, 2, 5).reshape(panels * 32, -1, 2)
    if bits == 4:
        data = torch.stack([data & 15, data >> 4], dim=2)
    lanes = data.reshape(panels, steps, 2, 2, 16, 4)
    return lanes.permute(0, 3, 4, 1, 2, 5).reshape(panels * 32, -1, 2)
