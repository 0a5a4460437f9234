"""One tensor of a GGUF file, or one of the experts that it stacks, and its place in the checkpoint.

A tensor changes in six steps, in this order, which :meth:`Placement.undo` reverses:

1. Where the checkpoint stores several tensors of the file in one (experts stacked, gate and up side by side,
   keys and values of MLA), its part is taken: :class:`StoredPart`.
2. A Conv1D weight (in, out) is transposed to (out, in).
3. Rows are reordered: new[i] = old[rows[i]], and so are inputs behind reordered heads. Three orders exist.
   *Paired* (where rotary embedding rotates neighbours, as in llama): within a head of width d the halves
   (x_0 .. x_{d/2-1}, y_0 .. y_{d/2-1}) become pairs (x_0, y_0, x_1, y_1, ...).
   *Sorted* (GPT-NeoX): the fused rows q, k, v of each KV group become all q, all k, all v.
   *Tiled* (Qwen3.5): the heads of values, which lie beside their head of keys, go round all heads of keys.
4. Anything but matrices (norms, biases, routers, position embeddings) becomes float32.
5. Gemma's norms gain 1, because llama.cpp multiplies by the weight where transformers multiplies by 1 +
   weight.
6. Where the file has the numbers in another shape (convolutions, heads of a state space), they get it; A_log
   of Mamba becomes -exp(A_log). Numbers by which Falcon-H1's config multiplies are multiplied in.

Steps 1 to 4 lose nothing. Step 5 rounds to float32: a bfloat16 weight above 2^-15 or a float16 one above
2^-12 is restored bit for bit when ``undo`` is given its type, a float32 one within the rounding of the sum.

A file stacks the experts of a block: ``ffn_up_exps.weight`` (E, N, K). They are placed one by one, as
:attr:`Placement.piece` names them, so that whatever treats matrices treats an expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attar.checkpoint.tensors import TensorInfo
from attar.formats.stored_part import StoredPart

EXPERTS = "_exps."
"""Part of the names of a file's stacked experts."""
STACKED = (EXPERTS, "altup_proj.", "altup_unembd_proj.")
"""Parts of the names of matrices that a file stacks."""


@dataclass(frozen=True, eq=False)
class Placement:
    """One tensor of a GGUF file, or one expert of one.

    Attributes:
        gguf: its name in the file.
        stored: its name in the checkpoint; None where it is computed from the config (``value``).
        shape: its shape in the GGUF file, rows first; of an expert without the experts.
        transposed: the checkpoint has it as (in, out).
        rows: int64 (N,): new[i] = old[rows[i]]; None: in order.
        columns: int64 (K,), the same of a matrix's inputs.
        stored_rows: rows of the checkpoint's tensor, where the file has zeros behind them; 0: as many.
        plus: added to every value.
        matrix: a weight that may be quantized; anything else is kept in float32.
        value: float32, where ``stored`` is None.
        form: the stored shape, where the file has the same numbers in another one.
        negative_exp: the file has -exp of the stored numbers.
        scales: what the file's numbers are multiplied with, one after the other: a number, or float32 (N, 1).
        part: the part of the stored tensor; None: all.
        expert: its number; None: it is a whole tensor of the file.
        experts: how many the file's tensor stacks; 0: it is no stack.
        unused: llama.cpp loads it and does not use it: zeros where it is not stored, and it is not read.
        single: the expert's name in a model whose experts are modules, where the checkpoint stacks them.
    """

    gguf: str
    stored: str | None
    shape: tuple[int, ...]
    transposed: bool = False
    rows: Tensor | None = None
    columns: Tensor | None = None
    stored_rows: int = 0
    plus: float = 0.0
    matrix: bool = True
    value: Tensor | None = None
    form: tuple[int, ...] = ()
    negative_exp: bool = False
    scales: tuple[float | Tensor, ...] = ()
    part: StoredPart | None = None
    expert: int | None = None
    experts: int = 0
    single: str = ""
    unused: bool = False

    @property
    def piece(self) -> str:
        """A unique name: the name in the file, for an expert with its number."""
        return self.gguf if self.expert is None else piece_name(self.gguf, self.expert)

    @property
    def file_shape(self) -> tuple[int, ...]:
        """The shape of the file's tensor."""
        return self.shape if self.expert is None else (self.experts, *self.shape)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape that the checkpoint's tensor must have."""
        if self.part is not None:
            return self.part.shape
        if self.form:
            return self.form
        if self.stored_rows:
            return (self.stored_rows, *self.shape[1:])
        return tuple(reversed(self.shape)) if self.transposed else self.shape

    def apply(self, tensor: Tensor) -> Tensor:
        """The file's tensor from the checkpoint's; matrices keep their dtype, where nothing is multiplied in.
        Does not modify the input."""
        placed = tensor if self.part is None else self.part.view(tensor)
        placed = placed.flatten(0, 1) if placed.dim() > max(len(self.shape), len(self.form)) else placed
        placed = placed.T if self.transposed else placed
        if self.rows is not None:
            placed = placed.index_select(0, self.rows)
        if self.columns is not None:
            placed = placed.index_select(1, self.columns)
        if self.stored_rows:
            placed = torch.cat([placed, placed.new_zeros(self.shape[0] - self.stored_rows, *self.shape[1:])])
        if not self.matrix or self.scales:
            placed = placed.float()
        for scale in self.scales:
            placed = placed * scale
        placed = -placed.exp() if self.negative_exp else placed
        placed = placed.reshape(self.shape) if self.form else placed
        return (placed + self.plus if self.plus else placed).contiguous()

    def undo(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The checkpoint's tensor from the file's; of a part, the part alone.

        Args:
            tensor: as :meth:`apply` returned it; a single row may lack its first dimension.
            dtype: of the result; None: as ``tensor``.
        """
        restored = tensor.reshape(self.shape)
        restored = restored - self.plus if self.plus else restored
        restored = restored.reshape(self.form) if self.form else restored
        restored = (-restored).log() if self.negative_exp else restored
        for scale in reversed(self.scales):
            restored = restored / scale
        if self.stored_rows:
            restored = restored[: self.stored_rows]
        if self.columns is not None:
            restored = restored.index_select(1, torch.argsort(self.columns))
        if self.rows is not None:
            restored = restored.index_select(0, torch.argsort(self.rows))
        if self.transposed:
            restored = restored.T
        return restored.to(dtype or tensor.dtype).contiguous()

    def fill(self, stored: Tensor, tensor: Tensor) -> None:
        """Write the file's tensor into its place in the checkpoint's, which is changed."""
        target = stored if self.part is None else self.part.view(stored)
        target.copy_(self.undo(tensor, stored.dtype).reshape(target.shape))


def piece_name(gguf: str, expert: int) -> str:
    """The name of one expert of a file's stacked tensor."""
    return f"{gguf}[{expert}]"


def pieces(infos: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Stored tensors with every expert by itself, as :attr:`Placement.piece` names it; its bytes lie next to
    each other in the file."""
    single: dict[str, TensorInfo] = {}
    for name, info in infos.items():
        if not any(part in name for part in STACKED) or len(info.shape) < 2:
            single[name] = info
            continue
        count = info.shape[0]
        size = info.nbytes // count
        for expert in range(count):
            piece = piece_name(name, expert)
            single[piece] = replace(
                info,
                name=piece,
                shape=info.shape[1:],
                logical=info.logical[1:],
                nbytes=size,
                offset=info.offset + expert * size,
            )
    return single
