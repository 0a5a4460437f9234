"""The tensor types of a GGUF file: their numbers, and the weights and bytes of a block.

ggml, ``ggml.h`` (``enum ggml_type``, ``enum ggml_ftype``) and ``ggml-common.h``; llama.cpp, ``llama.h``
(``enum llama_ftype``).

A row of K weights is K / block consecutive blocks; a type whose block is 1 is a plain little-endian array.
"""

from __future__ import annotations

from dataclasses import dataclass

from attar.errors import CheckpointError, ModelError


@dataclass(frozen=True)
class BlockType:
    """A type of tensors.

    Attributes:
        block: weights of a block; 1 for plain arrays.
        size: bytes of a block.
    """

    name: str
    id: int
    block: int
    size: int

    @property
    def bits(self) -> float:
        """Stored bits of a weight."""
        return self.size * 8 / self.block


_TABLE = (
    BlockType("F32", 0, 1, 4),
    BlockType("F16", 1, 1, 2),
    BlockType("Q4_0", 2, 32, 18),
    BlockType("Q4_1", 3, 32, 20),
    BlockType("Q5_0", 6, 32, 22),
    BlockType("Q5_1", 7, 32, 24),
    BlockType("Q8_0", 8, 32, 34),
    BlockType("Q2_K", 10, 256, 84),
    BlockType("Q3_K", 11, 256, 110),
    BlockType("Q4_K", 12, 256, 144),
    BlockType("Q5_K", 13, 256, 176),
    BlockType("Q6_K", 14, 256, 210),
    BlockType("IQ4_NL", 20, 32, 18),
    BlockType("IQ4_XS", 23, 256, 136),
    BlockType("I8", 24, 1, 1),
    BlockType("I16", 25, 1, 2),
    BlockType("I32", 26, 1, 4),
    BlockType("I64", 27, 1, 8),
    BlockType("F64", 28, 1, 8),
    BlockType("BF16", 30, 1, 2),
    BlockType("MXFP4", 39, 32, 17),
    BlockType("NVFP4", 40, 64, 36),
)

TYPES = {kind.name: kind for kind in _TABLE}
"""Every type that attar reads and writes, by name, in the order of their numbers."""

UNREAD = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    21: "IQ3_S", 22: "IQ2_S", 29: "IQ1_M", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0",
    35: "TQ2_0", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 41: "Q1_0", 42: "Q2_0",
}  # fmt: skip
"""Types of ggml that attar does not read, including retired ones, by number."""

FILE_TYPES = {
    "F32": 0, "F16": 1, "BF16": 32, "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q8_0": 7,
    "Q2_K": 10, "Q2_K_S": 21, "Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K_M": 15,
    "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30, "MXFP4_MOE": 38, "NVFP4": 39,
}  # fmt: skip
"""``general.file_type`` of a file, by the name of its mix."""

QUANTIZATION_VERSION = 2
"""``general.quantization_version`` of the block layouts."""

_BY_ID = {kind.id: kind for kind in _TABLE}


def by_id(number: int) -> BlockType:
    """The type of a number in a file.

    Raises:
        CheckpointError: attar does not read it.
    """
    if number in _BY_ID:
        return _BY_ID[number]
    name = UNREAD.get(number, "unknown")
    raise CheckpointError(
        f"tensors of ggml type {number} ({name}) are not read", hint=f"attar reads {', '.join(TYPES)}"
    )


def row_bytes(name: str, columns: int) -> int:
    """Bytes of a row of K weights.

    Raises:
        ModelError: K is no multiple of the block.
    """
    kind = TYPES[name]
    if columns % kind.block:
        raise ModelError(
            f"rows of {columns} weights cannot be stored as {name}, whose blocks hold {kind.block}",
            hint=f"choose a type whose block divides {columns}",
        )
    return columns // kind.block * kind.size
