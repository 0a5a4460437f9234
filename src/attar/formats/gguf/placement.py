"""Where a stored tensor of a checkpoint stands in a GGUF file, and how its rows are ordered there.

Four things happen to a tensor on the way, in this order, and :meth:`Placement.undo` takes them back:

1. A Conv1D weight (in, out) is turned into (out, in).
2. Rows are reordered: new[i] = old[rows[i]]. Two orders exist.
   *Paired* (where rotary embedding turns neighbours, as in llama): within a head of width d the halves
   (x_0 .. x_{d/2-1}, y_0 .. y_{d/2-1}) become pairs (x_0, y_0, x_1, y_1, ...).
   *Sorted* (GPT-NeoX): the fused rows q, k, v of one KV group after the other become all q, all k, all v.
3. What is no matrix (norms, biases, position embeddings) becomes float32.
4. Gemma's norms gain 1, for llama.cpp multiplies by the weight where transformers multiplies by 1 + weight.

Steps 1 to 3 lose nothing. Step 4 rounds to float32: a bfloat16 weight above 2^-15 or a float16 one above
2^-12 comes back bit for bit when ``undo`` is told its type, a float32 one within the rounding of the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Placement:
    """One tensor of a GGUF file.

    Attributes:
        gguf: its name there.
        stored: its name in the checkpoint; None where it is made from the config (``value``).
        shape: its shape in the GGUF file, rows first.
        transposed: the checkpoint has it as (in, out).
        rows: int64 (N,): new[i] = old[rows[i]]; None: in order.
        plus: added to every value.
        matrix: a weight that may be quantized; anything else is kept in float32.
        value: float32, where nothing is stored.
    """

    gguf: str
    stored: str | None
    shape: tuple[int, ...]
    transposed: bool = False
    rows: Tensor | None = None
    plus: float = 0.0
    matrix: bool = True
    value: Tensor | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape that the checkpoint's tensor must have."""
        return tuple(reversed(self.shape)) if self.transposed else self.shape

    def apply(self, tensor: Tensor) -> Tensor:
        """The tensor as the file has it; matrices keep their dtype. Does not modify the input."""
        placed = tensor.T if self.transposed else tensor
        if self.rows is not None:
            placed = placed.index_select(0, self.rows)
        if not self.matrix:
            placed = placed.float()
        return (placed + self.plus if self.plus else placed).contiguous()

    def undo(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The checkpoint's tensor from the file's.

        Args:
            tensor: what :meth:`apply` gave.
            dtype: of the result; None: that of ``tensor``.
        """
        restored = tensor - self.plus if self.plus else tensor
        if self.rows is not None:
            restored = restored.index_select(0, torch.argsort(self.rows))
        if self.transposed:
            restored = restored.T
        return restored.to(dtype or tensor.dtype).contiguous()


def paired(heads: int, width: int) -> Tensor:
    """Rows (heads * width,) that turn half-split rotary heads into neighbouring pairs."""
    return torch.arange(heads * width).view(heads, 2, width // 2).transpose(1, 2).reshape(-1)


def sorted_groups(heads: int, kv_heads: int, width: int) -> Tensor:
    """Rows ((heads + 2 kv_heads) * width,) that sort groups of (q.., k, v) into all q, all k, all v."""
    each = heads // kv_heads
    groups = torch.arange((heads + 2 * kv_heads) * width).view(kv_heads, each + 2, width)
    return torch.cat([groups[:, :each].reshape(-1), groups[:, each].reshape(-1), groups[:, -1].reshape(-1)])
