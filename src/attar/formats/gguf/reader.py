"""Reads a GGUF checkpoint tensor by tensor, under transformers' names and shapes.

Blocks are decoded to float32, in which ggml's definition is exact: half precision would round once more.
Matrices in F32, F16 and BF16 keep their type. Everything else (norms, biases, position embeddings) is float32
in every file; it gets the type of the matrices where that is exact for all of the file's numbers, as in a
file made from a model in that type, and stays float32 otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from attar.checkpoint.tensors import TORCH, TensorInfo, check_finite, stored_dtype
from attar.errors import CheckpointError, ModelError, OutputError
from attar.formats.coded import Coded, UniformWeight
from attar.formats.gguf import blocks
from attar.formats.gguf.codes import from_blocks, rule_of, uniform_of_blocks
from attar.formats.gguf.config import file_placements
from attar.formats.gguf.placement import Placement
from attar.formats.packed_reader import FormatReader
from attar.formats.rules import WeightRule

METHOD = "gguf"
SCALE_ENDS = (".scale", ".input_scale")
"""Ends of the names of the numbers beside a weight in NVFP4, one for each expert: of the weight, and of its
inputs, which are not rounded here."""
_FAULTS = (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, IndexError, RuntimeError)


T = TypeVar("T", Coded, UniformWeight)


def _in_order(weight: T, placement: Placement) -> T:
    """A stored weight with its rows in transformers' order."""
    if placement.rows is None:
        return weight
    order = torch.argsort(placement.rows)
    zero = None if weight.zero is None else weight.zero[order]
    return replace(weight, codes=weight.codes[order], scale=weight.scale[order], zero=zero)


class GGUFReader(FormatReader):
    """Reads an opened GGUF file.

    Attributes:
        placements: of the tensors that a model of transformers has, by the file's name.

    Raises:
        CheckpointError: a tensor is missing, of another shape than the metadata state, or unknown.
    """

    def __init__(self, checkpoint: Any) -> None:
        super().__init__(checkpoint)
        scaled = {
            name.partition(".weight")[0] for name, info in checkpoint.tensors.items() if info.block == "NVFP4"
        }
        shaped = {
            name: replace(info, shape=info.weight_shape)
            for name, info in checkpoint.tensors.items()
            if not (name.endswith(SCALE_ENDS) and name.rpartition(".")[0] in scaled)
        }
        with errors_name_file(checkpoint.source):
            placements = file_placements(checkpoint.config, shaped)
        self.placements: dict[str, Placement] = {placement.piece: placement for placement in placements}
        self._parts: dict[str, list[Placement]] = {}
        for placement in placements:
            if placement.part is not None:
                self._parts.setdefault(str(placement.stored), []).append(placement)

    def is_coded(self, name: str) -> bool:
        """Whether a stored tensor holds the blocks of a weight."""
        return bool(self._info(name).block)

    def header(self, info: Any) -> tuple[str, str, tuple[int, ...]] | None:
        """Name, type and shape of what a stored tensor decodes to; None for tensors of GGUF alone."""
        placement = self.placements.get(info.name)
        if placement is None or placement.stored is None:
            return None
        if placement.part is not None and placement is not self._parts[placement.stored][0]:
            return None
        return placement.stored, self._dtype(info, placement), placement.stored_shape

    def decode(self, name: str) -> Tensor | None:
        """The decoded tensor in transformers' order; None for tensors of GGUF alone.

        Raises:
            CheckpointError: the file has changed since it was opened.
        """
        placement, info = self.placements.get(name), self._info(name)
        if placement is None or (header := self.header(info)) is None:
            return None
        dtype = getattr(torch, TORCH[header[1]])
        if placement.part is None:
            return placement.undo(self._numbers(name), dtype)
        stored = torch.empty(placement.stored_shape, dtype=dtype)
        for part in self._parts[header[0]]:
            part.fill(stored, self._numbers(part.piece))
        return stored

    def _numbers(self, name: str) -> Tensor:
        """A stored tensor with its blocks decoded."""
        tensor, info = self.checkpoint.load(name), self._info(name)
        if not info.block:
            return tensor  # type: ignore[no-any-return]
        rows, columns = _rows(tensor), info.weight_shape[-1]
        weight = blocks.dequantize(info.block, rows, columns).reshape(info.weight_shape)
        return weight if info.block != "NVFP4" else weight.mul_(self.whole_scale(self.placements[name]))

    def check(self, name: str) -> None:
        """Raise where weights or the scales of blocks are not finite.

        Raises:
            NumericsError: names the tensor, the field and its type.
        """
        info, tensor = self._info(name), self.checkpoint.load(name)
        if info.block:
            blocks.check_blocks(info.block, _rows(tensor), name)
        else:
            check_finite(name, tensor, info.file)

    def codes(self, name: str) -> tuple[Coded, WeightRule] | None:
        """The unchanged codes of a stored matrix, rows in transformers' order; None where no integer or MXFP4
        layout holds them exactly. Scales of Q4_0 and Q5_0 may be negative (codes.py).

        Raises:
            CheckpointError: the file has changed since it was opened.
        """
        placement, info = self._matrix(name)
        if placement is None:
            return None
        global_scale = self.whole_scale(placement)
        decoded = from_blocks(info.block, self.checkpoint.load(name), info.weight_shape[1], global_scale)
        return decoded and (_in_order(decoded[0], placement), decoded[1])

    def grid(self, name: str) -> tuple[WeightRule, torch.dtype] | None:
        """The rule of the codes of a stored matrix whose type alone decides it, and the type of its scales;
        None for all other tensors."""
        placement, info = self._matrix(name)
        rule = rule_of(info.block)
        return None if placement is None or rule is None else (rule, torch.float16)

    def blocks(self, name: str) -> tuple[Tensor, dict[str, Tensor]]:
        """Codes (N, K) and other fields of a stored matrix in blocks, in the file's row order: see
        :func:`attar.formats.gguf.blocks.unpack`.

        Raises:
            CheckpointError: the file has changed since it was opened.
        """
        info = self._info(name)
        return blocks.unpack(info.block, _rows(self.checkpoint.load(name)), info.weight_shape[-1])

    def same_blocks(self, placement: Placement) -> str | None:
        """The stored matrix in blocks that a placement may take over as it is; None where the file has none,
        or orders its rows otherwise."""
        mine = self.placements.get(placement.piece)
        if mine is None or self._info(mine.piece).block not in blocks.LAYOUTS or not placement.matrix:
            return None
        same = mine.stored == placement.stored and mine.part == placement.part and not placement.scales
        same = same and mine.stored_rows == placement.stored_rows
        orders = [item.columns for item in (mine, placement) if item.columns is not None]
        same = same and len(orders) != 1 and (not orders or torch.equal(*orders))
        if not same or placement.transposed or (mine.rows is None) != (placement.rows is None):
            return None
        return mine.piece if mine.rows is None or torch.equal(mine.rows, placement.rows) else None

    def uniform(self, name: str) -> UniformWeight | None:
        """A stored matrix in blocks on its uniform grid, rows in transformers' order; None for other tensors.

        Raises:
            CheckpointError: the file has changed since it was opened.
        """
        placement, info = self._matrix(name)
        if placement is None:
            return None
        global_scale = self.whole_scale(placement)
        weight = uniform_of_blocks(info.block, self.checkpoint.load(name), info.weight_shape[1], global_scale)
        return _in_order(weight, placement)

    def whole_scale(self, placement: Placement) -> float:
        """What all weights of a stored matrix in NVFP4 are multiplied with; 1 where the file has no such
        number."""
        name = scale_name(placement.gguf)
        if self._info(placement.piece).block != "NVFP4" or name not in self.checkpoint.tensors:
            return 1.0
        return float(self.checkpoint.load(name).flatten()[placement.expert or 0])

    def _matrix(self, name: str) -> tuple[Placement | None, TensorInfo]:
        """The placement of a stored matrix in blocks; None for other tensors."""
        placement, info = self.placements.get(name), self._info(name)
        if placement is None or not placement.matrix or placement.plus or placement.part is not None:
            return None, info
        if placement.columns is not None or placement.stored_rows:
            return None, info
        return placement if info.block in blocks.LAYOUTS else None, info

    def _info(self, name: str) -> TensorInfo:
        info: TensorInfo = self.checkpoint.tensors[name]
        return info

    def _dtype(self, info: TensorInfo, placement: Placement) -> str:
        if info.block:
            return "F32"
        return info.dtype if placement.matrix else self._vector_dtype or info.dtype

    @cached_property
    def _vector_dtype(self) -> str | None:
        """The config's type, where all tensors but matrices are exact in it. Reads these tensors once."""
        dtype = getattr(torch, str(self.checkpoint.config["dtype"]))
        return stored_dtype(dtype) if all(self._exact_in(dtype)) else None

    def _exact_in(self, dtype: torch.dtype) -> Iterator[bool]:
        """For each tensor but matrices, whether a type holds it exactly."""
        for name, placement in self.placements.items():
            if not placement.matrix:
                tensor = self.checkpoint.load(name)
                yield not self.is_coded(name) and torch.equal(
                    _again(placement, tensor, dtype), tensor.float()
                )


def _again(placement: Placement, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of the file after its way through the checkpoint's type."""
    if placement.part is None:
        return placement.apply(placement.undo(tensor, dtype))
    return placement.undo(tensor, dtype).float() + placement.plus


@contextmanager
def errors_name_file(file: Path) -> Iterator[None]:
    """Errors about the content of a file name the file, and so do exceptions from senseless metadata."""
    try:
        yield
    except OutputError:
        raise
    except (CheckpointError, ModelError) as error:
        raise type(error)(f"{file}: {error.message}", hint=error.hint) from error
    except _FAULTS as error:
        raise CheckpointError(
            f"{file}: its metadata make no sense ({type(error).__name__}: {error})",
            hint="convert the model again",
        ) from error


def scale_name(weight: str) -> str:
    """The tensor with the scale of a whole weight (or of each expert)."""
    return f"{weight.removesuffix('.weight')}.scale"


def _rows(tensor: Tensor) -> Tensor:
    """Blocks as (N, row bytes)."""
    return tensor.reshape(-1, tensor.shape[-1])
