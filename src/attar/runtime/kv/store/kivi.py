"""KIVI: keys in 4 or 2 bits per channel, values per token, the newest tokens in full precision.

    x ~ q s + m      m = min of the group, s = (max - min) / (2^b - 1), q = round((x - m) / s)

    keys      a group is g = 32 tokens of one channel: outliers of keys sit in channels
    values    a group is g = 32 channels of one token (fewer where head_dim is no multiple of 32)

Source: KIVI (Liu et al. 2024, arXiv 2402.02750), Algorithm 1. Letters: B tokens of a block, a multiple of
g; R the residual.

Differs from the paper: the residual is the block that is being filled, so R = B, for keys and for values
(there R values stay exact at any time). A block is quantized once, when it is full and no draft in it can be
rejected, and is read-only from then on; so blocks can be shared, copied and reused by prefix. s and m are
float16. Blocks in full precision are stored outside the pool, at most ``residuals`` of them in addition to
those of the current step: beyond that the least recently written one is quantized early.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attar.errors import SettingsError
from attar.kernels.kv_codes import packed, unpacked
from attar.runtime.kv.store.planes import PoolGeometry

GROUP = 32  # g
RESIDUALS = 64  # blocks in full precision (float32)


class KIVIStore:
    """Codes and group constants of full blocks, and a dictionary of the blocks that are being filled.

    Args:
        bits: 4 or 2.
        residuals: most blocks in full precision.

    Raises:
        SettingsError: the block is no multiple of 32, or a head's numbers do not fill bytes.
    """

    def __init__(
        self, geometry: PoolGeometry, bits: int, device: torch.device, *, residuals: int = RESIDUALS
    ) -> None:
        name, per_byte = f"kivi{bits}", 8 // bits
        if geometry.block_size % GROUP:
            raise SettingsError("block_size", geometry.block_size, f"a multiple of {GROUP} with {name}")
        if geometry.head_dim % per_byte:
            raise SettingsError(
                "kv_dtype", name, f"another one: {geometry.head_dim} is no multiple of {per_byte}"
            )
        self.geometry, self.bits, self.residuals, self.device = geometry, bits, residuals, device
        layers, _, blocks, block, heads, n = geometry.plane(geometry.head_dim)
        self.channels = math.gcd(n, GROUP)  # of a group of values

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float16, device=device)

        self.codes = torch.zeros(geometry.plane(n // per_byte), dtype=torch.uint8, device=device)
        self.of_keys = zeros(layers, blocks, 2, block // GROUP, 1, heads, n)  # s at 0, m at 1
        self.of_values = zeros(layers, blocks, 2, block, heads, n // self.channels, 1)
        self.rows: dict[int, tuple[Tensor, Tensor]] = {}  # of the step that runs, by block
        self.open: dict[int, Tensor] = {}  # block -> (layers, 2, B, heads, n); least recently written first

    @property
    def nbytes(self) -> int:
        held = (self.codes, self.of_keys, self.of_values, *self.open.values())
        return sum(tensor.nbytes for tensor in held)

    def begin_(self, slots: Sequence[int]) -> None:
        block = self.geometry.block_size
        self.rows = self._rows_by_block(slots)
        first: dict[int, int] = {}
        for slot in slots:
            first.setdefault(slot // block, slot % block)
        for index, row in first.items():
            self.open[index] = self.open.pop(index) if index in self.open else self._open_block(index, row)
        surplus = len(self.open) - self.residuals
        for index in [index for index in self.open if index not in first][: max(surplus, 0)]:
            self._close(index)

    def write_(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        for index, (rows, tokens) in self.rows.items():
            for kind, x in enumerate((k, v)):
                self.open[index][layer, kind].index_copy_(0, rows, x.index_select(0, tokens).float())

    def _rows_by_block(self, slots: Sequence[int]) -> dict[int, tuple[Tensor, Tensor]]:
        """For each block that the step writes to: rows in it, and which of the step's tokens go there."""
        rows: dict[int, tuple[list[int], list[int]]] = {}
        for token, slot in enumerate(slots):
            in_block, of_step = rows.setdefault(slot // self.geometry.block_size, ([], []))
            in_block.append(slot % self.geometry.block_size)
            of_step.append(token)
        parts = {index: torch.tensor(both, device=self.device) for index, both in rows.items()}
        return {index: (part[0], part[1]) for index, part in parts.items()}

    def read(
        self, layer: int, blocks: Tensor, dtype: torch.dtype, numbers: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        k = self._keys(layer, blocks).to(dtype)
        v = self._values(layer, blocks).to(dtype)
        for row, index in enumerate(numbers):
            if index in self.open:
                k[row], v[row] = self.open[index][layer].to(dtype)
        return k.flatten(0, 1), v.flatten(0, 1)

    def settle_(self, blocks: Sequence[int]) -> None:
        for index in blocks:
            if index in self.open:
                self._close(index)

    def copy_(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            residual = self.open.get(source)
            self.open.pop(target, None)
            if residual is not None:
                self.open[target] = residual.clone()
            for plane in (self.of_keys, self.of_values):
                plane[:, target] = plane[:, source]
            self.codes[:, :, target] = self.codes[:, :, source]

    def move_(self, layer: int, sources: Tensor, targets: Tensor) -> None:
        """Inside blocks that are being filled; quantized groups are not taken apart."""
        block = self.geometry.block_size
        heads = torch.arange(len(sources), device=sources.device)
        for source, target in zip(sources.T, targets.tolist(), strict=True):
            residuals = [self.open[index] for index in (source // block).tolist()]
            rows = (source % block).tolist()
            moved = [x[layer, :, row, head] for x, row, head in zip(residuals, rows, heads, strict=True)]
            self.open[target // block][layer, :, target % block] = torch.stack(moved, dim=1)

    def _open_block(self, index: int, row: int) -> Tensor:
        """A block in full precision: zeros, or decoded where it is written from the middle."""
        layers, _, _, block, heads, n = self.geometry.plane(self.geometry.head_dim)
        residual = torch.zeros(layers, 2, block, heads, n, device=self.device)
        if row:
            blocks = torch.tensor([index], device=self.device)
            for layer in range(layers):
                residual[layer, 0] = self._keys(layer, blocks)[0]
                residual[layer, 1] = self._values(layer, blocks)[0]
        return residual

    def _close(self, index: int) -> None:
        k, v = self.open.pop(index).unbind(1)  # (layers, B, heads, n)
        q, s, m = quantize(k.unflatten(1, (-1, GROUP)), 2, self.bits)
        self.codes[:, 0, index] = packed(q.flatten(1, 2), self.bits)
        self.of_keys[:, index, 0], self.of_keys[:, index, 1] = s, m
        q, s, m = quantize(v.unflatten(-1, (-1, self.channels)), -1, self.bits)
        self.codes[:, 1, index] = packed(q.flatten(-2), self.bits)
        self.of_values[:, index, 0], self.of_values[:, index, 1] = s, m

    def _keys(self, layer: int, blocks: Tensor) -> Tensor:
        """float32 (blocks, B, heads, n)."""
        q = unpacked(self.codes[layer, 0].index_select(0, blocks), self.bits).unflatten(1, (-1, GROUP))
        s, m = self.of_keys[layer].index_select(0, blocks).float().unbind(1)
        return torch.addcmul(m, q, s).flatten(1, 2)

    def _values(self, layer: int, blocks: Tensor) -> Tensor:
        """float32 (blocks, B, heads, n)."""
        q = unpacked(self.codes[layer, 1].index_select(0, blocks), self.bits)
        s, m = self.of_values[layer].index_select(0, blocks).float().unbind(1)
        return torch.addcmul(m, q.unflatten(-1, (-1, self.channels)), s).flatten(-2)


def quantize(x: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 of x's shape, and s and m (float16, ``dim`` of size 1) of its groups along ``dim``."""
    low, high = x.aminmax(dim=dim, keepdim=True)
    top = 2**bits - 1
    m = low.half()
    s = ((high - m.float()) / top).half()  # of the rounded m, so that the group's largest is reached
    q = ((x - m.float()) / s.float().clamp(min=torch.finfo(torch.float16).tiny)).round_().clamp_(0, top)
    return q.to(torch.uint8), s, m
