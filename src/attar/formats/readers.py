"""Which reader a checkpoint needs: by the ``quant_method`` in its config, or none for a dense one."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

from torch import Tensor

from attar.errors import ModelError
from attar.formats import awq, bitsandbytes, compressed_tensors, exl2, gptq, modelopt
from attar.formats.coded import Coded
from attar.formats.gguf import reader as gguf
from attar.formats.rules import WeightRule
from attar.formats.stated import stated

METHODS: dict[str, ModuleType] = {
    module.METHOD: module for module in (compressed_tensors, bitsandbytes, gptq, awq, modelopt, exl2, gguf)
}
READERS: dict[str, Callable[[Any], FormatReader]] = {
    compressed_tensors.METHOD: compressed_tensors.CompressedTensorsReader,
    bitsandbytes.METHOD: bitsandbytes.BitsAndBytesReader,
    gptq.METHOD: gptq.GPTQReader,
    awq.METHOD: awq.AWQReader,
    modelopt.METHOD: modelopt.ModelOptReader,
    exl2.METHOD: exl2.EXL2Reader,
    gguf.METHOD: gguf.GGUFReader,
}


class FormatReader(Protocol):
    """Reads a checkpoint tensor by tensor, whatever its layout."""

    def slot(self, info: Any) -> tuple[str, str, tuple[int, ...]] | None:
        """Name, type and shape of what a stored tensor stands for; None for scales and the like."""

    def dense(self, name: str) -> Tensor | None:
        """What a stored tensor stands for; None for scales and the like."""

    def coded(self, name: str) -> bool:
        """Whether a stored tensor holds the codes of a weight."""

    def codes(self, name: str) -> tuple[Coded, WeightRule] | None:
        """The codes of a stored weight as they are, out x in; None for any other tensor."""

    def check(self, name: str) -> None:
        """Raise NumericsError where codes or scales cannot be right."""


class DenseReader:
    """The reader of a checkpoint that is not quantized: everything stands for itself."""

    def __init__(self, checkpoint: Any) -> None:
        self.checkpoint = checkpoint

    def slot(self, info: Any) -> tuple[str, str, tuple[int, ...]] | None:
        """Its own name, type and shape."""
        return info.name, info.dtype, info.shape

    def dense(self, name: str) -> Tensor | None:
        """The tensor itself."""
        tensor: Tensor = self.checkpoint.load(name)
        return tensor

    def coded(self, name: str) -> bool:
        """Nothing is."""
        return False

    def codes(self, name: str) -> None:
        """There are none."""

    def check(self, name: str) -> None:
        """Nothing to check."""


def method(checkpoint: Any) -> str | None:
    """The ``quant_method`` of a checkpoint; None where it is dense.

    Raises:
        ModelError: attar cannot read it.
    """
    said = stated(checkpoint)
    if said is None:
        return None
    name = said.get("quant_method")
    if name not in METHODS:
        raise ModelError(
            f"{checkpoint.path}: quantized with {name!r}, which attar cannot read",
            hint="start from the dense model",
        )
    return str(name)


def reader(checkpoint: Any) -> FormatReader:
    """The reader of a checkpoint.

    Raises:
        ModelError: it is quantized in a way that attar cannot read.
    """
    name = method(checkpoint)
    return READERS[name](checkpoint) if name else DenseReader(checkpoint)
