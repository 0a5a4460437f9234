"""gpt-oss's own layout of experts in MXFP4 (``quant_method`` mxfp4), read and written.

The experts' weights of a block are two stacks, ``gate_up_proj`` and ``down_proj``, out x in, and everything
else is dense. A stack is stored as two tensors:

    X_blocks uint8 (E, N, K / 32, 16)    codes of FP4, two inputs in a byte, the even one in the low nibble
    X_scales uint8 (E, N, K / 32)        exponents: a group of 32 inputs is multiplied by 2^(scale - 127)

It decodes to X (E, K, N), in x out, as the model has it. Source: transformers,
``integrations/mxfp4.py`` (``convert_moe_packed_tensors``); OCP Microscaling Formats 1.0.

Letters: E experts, N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attar.checkpoint.tensors import TensorInfo, read_tensor, stored_dtype
from attar.errors import CheckpointError, NumericsError
from attar.formats.coded import Coded, fp4_levels, unpack_nibbles
from attar.formats.packed_reader import FormatReader, weight_dtype
from attar.formats.rules import WeightRule

METHOD = "mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"
GROUP, BIAS = 32, 127
RULE = WeightRule("float", 4, "group", GROUP)
NAN = 255
"""The exponent that stands for no number."""


def layout(name: str, shape: tuple[int, ...]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Names, types and shapes of the two tensors of a stack X (E, K, N)."""
    count, columns, rows = shape
    tiles = (count, rows, columns // GROUP)
    return [(f"{name}{BLOCKS}", "U8", (*tiles, GROUP // 2)), (f"{name}{SCALES}", "U8", tiles)]


def encode(coded: Coded) -> dict[str, Tensor]:
    """Blocks (N, K / 32, 16) and scales (N, K / 32) of one expert, by the ending of their names.

    Args:
        coded: codes 0 to 15 (N, K), scales (N, K / 32) that are powers of two.
    """
    codes = coded.codes.to(torch.uint8).unflatten(1, (-1, GROUP))
    exponents = torch.frexp(coded.scale).exponent.to(torch.int16) - 1 + BIAS
    return {BLOCKS: codes[..., 0::2] | codes[..., 1::2] << 4, SCALES: exponents.to(torch.uint8)}


class ExpertMXFP4Reader(FormatReader):
    """Reads a checkpoint whose experts are stacked in MXFP4; a stack, no matrix, has no codes."""

    def __init__(self, checkpoint: Any) -> None:
        super().__init__(checkpoint)
        self.dtype = weight_dtype(checkpoint)

    def is_coded(self, name: str) -> bool:
        """Whether a stored tensor holds the codes of experts."""
        return name.endswith(BLOCKS)

    def header(self, info: Any) -> tuple[str, str, tuple[int, ...]] | None:
        """Name, type and shape of what a stored tensor decodes to; None for scales.

        Raises:
            CheckpointError: the scales are missing, or the two do not fit together.
        """
        if info.name.endswith(SCALES):
            return None
        if not self.is_coded(info.name):
            return super().header(info)
        blocks, _ = self._pair(info.name)
        count, rows, groups, _ = blocks.shape
        return info.name.removesuffix(BLOCKS), stored_dtype(self.dtype), (count, groups * GROUP, rows)

    def decode(self, name: str) -> Tensor | None:
        """Experts (E, K, N) in the checkpoint's number type for their codes, None for scales, the tensor
        itself otherwise."""
        if name.endswith(SCALES):
            return None
        if not self.is_coded(name):
            return super().decode(name)
        blocks, _ = self._pair(name)
        count, rows, groups, _ = blocks.shape
        decoded = torch.empty(count, groups * GROUP, rows, dtype=self.dtype)
        for expert in range(count):
            decoded[expert] = self.decode_expert(name, expert)
        return decoded

    def decode_expert(self, name: str, expert: int) -> Tensor | None:
        """One expert (K, N) of a stack in the checkpoint's number type; None for a dense stack."""
        if not self.is_coded(name):
            return None
        coded, _ = self.expert_codes(name, expert)
        tiles = fp4_levels()[coded.codes.int()].unflatten(1, (-1, GROUP)) * coded.scale[..., None]
        return tiles.flatten(1).T.to(self.dtype)

    def expert_codes(self, name: str, expert: int) -> tuple[Coded, WeightRule]:
        """Codes (N, K) and scales (N, K / 32) of one expert, and their rule. Reads its bytes alone.

        Args:
            name: of the stored codes.
        """
        blocks, scales = (read_tensor(_slice(info, expert)) for info in self._pair(name))
        codes = unpack_nibbles(blocks.flatten(1))
        scale = torch.ldexp(torch.ones(scales.shape), scales.int() - BIAS)
        return Coded(codes, scale), RULE

    def check(self, name: str) -> None:
        """Raise where a scale is no number.

        Raises:
            NumericsError: names the tensor.
        """
        if self.is_coded(name) and bool((read_tensor(self._pair(name)[1]) == NAN).any()):
            raise NumericsError(f"{name}: a scale is NaN", hint="the weights are damaged; get them again")

    def _pair(self, name: str) -> tuple[TensorInfo, TensorInfo]:
        """Headers of codes and scales that fit together."""
        scales = name.removesuffix(BLOCKS) + SCALES
        pair = self.checkpoint.tensors[name], self.checkpoint.tensors.get(scales)
        if pair[1] is None:
            raise CheckpointError(f"{self.checkpoint.path}: {scales} is missing", hint="get the whole model")
        shapes = tuple(pair[0].shape), tuple(pair[1].shape)
        fits = len(shapes[0]) == 4 and shapes[0] == (*shapes[1], GROUP // 2)
        if not fits or (pair[0].dtype, pair[1].dtype) != ("U8", "U8"):
            raise CheckpointError(
                f"{self.checkpoint.path}: {name} is {list(shapes[0])} and {scales} {list(shapes[1])}, "
                "which are no MXFP4 experts",
                hint="get the whole model",
            )
        return pair


def _slice(info: TensorInfo, index: int) -> TensorInfo:
    """One part of a stored tensor along its first dimension."""
    size = info.nbytes // info.shape[0]
    return replace(info, shape=info.shape[1:], nbytes=size, offset=info.offset + index * size)
