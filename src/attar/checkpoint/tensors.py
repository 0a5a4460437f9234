"""Stored tensors: what a header says of one, and its bytes read into fresh memory."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from attar.errors import CheckpointError, NumericsError

if TYPE_CHECKING:
    import torch

TORCH = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
"""The format's dtype names to torch's. Types below one byte are missing: torch has no shape for them."""

_CHUNK = 1 << 24


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor, known from a header.

    Attributes:
        name: its name in the file.
        dtype: the format's name of its type, such as ``"BF16"``.
        shape: its shape as stored.
        nbytes: its size in bytes.
        file: the file that holds it.
        offset: where its bytes begin in that file.
        block: type of the blocks that its bytes are, as ggml names it (``"Q4_K"``); empty for plain numbers.
        logical: shape of the weight that the blocks stand for.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: Path
    offset: int
    block: str = ""
    logical: tuple[int, ...] = ()

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the weight: of what the blocks stand for, of the tensor itself otherwise."""
        return self.logical if self.block else self.shape


def stored_dtype(dtype: torch.dtype) -> str:
    """The format's name of a torch dtype, such as ``"BF16"``."""
    name = str(dtype).removeprefix("torch.")
    return next(stored for stored, known in TORCH.items() if known == name)


def read_tensor(info: TensorInfo) -> torch.Tensor:
    """Read a tensor's bytes straight into a fresh tensor on the CPU; nothing of the file stays mapped.

    Raises:
        CheckpointError: the file ends too soon or cannot be read, or torch has no such dtype.
    """
    import torch

    assert sys.byteorder == "little", "safetensors are little-endian"
    if info.dtype not in TORCH:
        raise CheckpointError(f"{info.file}: tensor {info.name!r} is {info.dtype}, which torch cannot hold")
    tensor = torch.empty(info.shape, dtype=getattr(torch, TORCH[info.dtype]))
    if not info.nbytes:
        return tensor
    buffer = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
    done = 0
    try:
        with info.file.open("rb", buffering=0) as file:
            while done < info.nbytes:
                count = os.preadv(file.fileno(), [buffer[done:]], info.offset + done)
                if count == 0:
                    raise CheckpointError(
                        f"{info.file}: ends inside tensor {info.name!r}: {done} of {info.nbytes} bytes",
                        hint="the file changed while it was read",
                    )
                done += count
    except OSError as error:
        raise CheckpointError(f"{info.file}: cannot be read: {error.strerror}") from error
    return tensor


def check_finite(name: str, tensor: torch.Tensor, file: Path) -> None:
    """Refuse NaN and infinity. Works in pieces, so that it needs little memory beside the tensor.

    Raises:
        NumericsError: names the tensor and its file.
    """
    import torch

    if not tensor.is_floating_point() or not tensor.numel():
        return
    for piece in tensor.detach().reshape(-1).split(_CHUNK):
        # the extremes of numbers among which there is a NaN are NaN; float8 has no such reduction
        extremes = (piece.float() if piece.element_size() == 1 else piece).aminmax()
        if not all(bool(torch.isfinite(extreme)) for extreme in extremes):
            raise NumericsError(
                f"{file}: tensor {name!r} contains NaN or infinity",
                hint="the weights are damaged; get them again",
            )
