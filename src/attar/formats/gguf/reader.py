"""Reads a GGUF checkpoint tensor by tensor, under transformers' names and shapes.

What stands in blocks is decoded to float32, in which ggml's definition gives it exactly: half precision would
round once more. Matrices of F32, F16 and BF16 stay as they are. Everything else (norms, biases, position
embeddings) is float32 in a file whatever it was before; it gets the type of the matrices where not one number
of the whole file loses a bit by it, as in a file made from a model in that type, and stays float32 otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoint.tensors import TORCH, TensorInfo, check_finite, stored_dtype
from attar.errors import CheckpointError, ModelError, OutputError
from attar.formats.coded import Coded
from attar.formats.gguf import blocks
from attar.formats.gguf.coded import coded
from attar.formats.gguf.hf_config import sources
from attar.formats.gguf.placement import Placement
from attar.formats.gguf.uniform import of_blocks
from attar.formats.rules import WeightRule
from attar.formats.uniform import Uniform

METHOD = "gguf"
_FAULTS = (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, IndexError, RuntimeError)


class GGUFReader:
    """Reads an opened GGUF file.

    Attributes:
        checkpoint: what is read.
        placements: by the file's name, those of the tensors that a model of transformers has.

    Raises:
        CheckpointError: a tensor is missing, of another shape than the metadata say, or of no use.
    """

    def __init__(self, checkpoint: Any) -> None:
        self.checkpoint = checkpoint
        shaped = {name: replace(info, shape=info.weight_shape) for name, info in checkpoint.tensors.items()}
        with explained(checkpoint.source):
            placed = sources(checkpoint.config, shaped)
        self.placements: dict[str, Placement] = {placement.gguf: placement for placement in placed}

    def coded(self, name: str) -> bool:
        """Whether a stored tensor holds the blocks of a weight."""
        return bool(self._info(name).block)

    def slot(self, info: Any) -> tuple[str, str, tuple[int, ...]] | None:
        """Name, type and shape of what a stored tensor stands for; None for what only GGUF has."""
        placement = self.placements.get(info.name)
        if placement is None or placement.stored is None:
            return None
        return placement.stored, self._dtype(info, placement), placement.stored_shape

    def dense(self, name: str) -> Tensor | None:
        """What a stored tensor stands for, in transformers' order; None for what only GGUF has.

        Raises:
            CheckpointError: the file has changed since it was opened.
        """
        placement, info = self.placements.get(name), self._info(name)
        if placement is None:
            return None
        tensor = self.checkpoint.load(name)
        if info.block:
            rows, columns = _rows(tensor), info.weight_shape[-1]
            tensor = blocks.dequantize(info.block, rows, columns).reshape(info.weight_shape)
        return placement.undo(tensor, getattr(torch, TORCH[self._dtype(info, placement)]))

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
        """The codes of a stored matrix as they are, rows in transformers' order; None where no integer or
        MXFP4 layout holds them exactly. Scales of Q4_0 and Q5_0 may be negative (coded.py).

        Raises:
            CheckpointError: the file has changed since it was opened.
        """
        placement, info = self._matrix(name)
        if placement is None:
            return None
        found = coded(info.block, self.checkpoint.load(name), info.weight_shape[1])
        if found is None or placement.rows is None:
            return found
        order, (weight, rule) = torch.argsort(placement.rows), found
        zero = None if weight.zero is None else weight.zero[order]
        return replace(weight, codes=weight.codes[order], scale=weight.scale[order], zero=zero), rule

    def blocks(self, name: str) -> tuple[Tensor, dict[str, Tensor]]:
        """Codes (N, K) of a stored matrix in blocks and what is stored beside them, in the order of the file:
        see :func:`attar.formats.gguf.blocks.unpack`.

        Raises:
            CheckpointError: the file has changed since it was opened.
        """
        info = self._info(name)
        return blocks.unpack(info.block, self.checkpoint.load(name), info.weight_shape[1])

    def same_place(self, name: str, placement: Placement) -> bool:
        """Whether another file would have the rows of a stored matrix in blocks as this one has them."""
        mine, _ = self._matrix(name)
        if mine is None or placement.transposed or (mine.rows is None) != (placement.rows is None):
            return False
        return mine.rows is None or torch.equal(mine.rows, placement.rows)

    def uniform(self, name: str) -> Uniform | None:
        """A stored matrix in blocks on its even grid, rows in transformers' order; None for any other tensor.

        Raises:
            CheckpointError: the file has changed since it was opened.
        """
        placement, info = self._matrix(name)
        if placement is None:
            return None
        found = of_blocks(info.block, self.checkpoint.load(name), info.weight_shape[1])
        if placement.rows is None:
            return found
        order = torch.argsort(placement.rows)
        zero = None if found.zero is None else found.zero[order]
        return replace(found, codes=found.codes[order], scale=found.scale[order], zero=zero)

    def _matrix(self, name: str) -> tuple[Placement | None, TensorInfo]:
        """Where a stored matrix in blocks stands; None for any other tensor."""
        placement, info = self.placements.get(name), self._info(name)
        if placement is None or not placement.matrix or placement.plus or len(info.weight_shape) != 2:
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
        """The config's type, where all that is no matrix is exact in it. Reads these tensors once."""
        dtype = getattr(torch, str(self.checkpoint.config["dtype"]))
        return stored_dtype(dtype) if all(self._survives(dtype)) else None

    def _survives(self, dtype: torch.dtype) -> Iterator[bool]:
        """For each tensor that is no matrix, whether it comes through a type unharmed."""
        for name, placement in self.placements.items():
            if not placement.matrix:
                tensor = self.checkpoint.load(name)
                yield not self.coded(name) and torch.equal(
                    placement.apply(placement.undo(tensor, dtype)), tensor.float()
                )


def dequantize_state(checkpoint: Any) -> dict[str, Tensor]:
    """Every tensor of a GGUF file, decoded, under transformers' names.

    Raises:
        CheckpointError: a tensor is missing, or of another shape than the metadata say.
    """
    reader = GGUFReader(checkpoint)
    state: dict[str, Tensor] = {}
    for name, placement in reader.placements.items():
        tensor = reader.dense(name)
        assert tensor is not None and placement.stored is not None, "every placement has a source"
        state[placement.stored] = tensor
    return state


@contextmanager
def explained(file: Path) -> Iterator[None]:
    """Errors about what a file says name the file; metadata that make no sense are such an error."""
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


def _rows(tensor: Tensor) -> Tensor:
    """Blocks as (N, row bytes)."""
    return tensor.reshape(-1, tensor.shape[-1])
