"""The reader that a checkpoint needs, by its ``quant_method``, and a view that makes a packed checkpoint look
dense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from attar.errors import CheckpointError, ModelError
from attar.formats import awq, bitsandbytes, compressed_tensors, exl2, gptq, modelopt, mxfp4
from attar.formats.coded import Coded, UniformWeight, uniform_of_codes, uniform_weight
from attar.formats.gguf import reader as gguf
from attar.formats.rules import WeightRule


class FormatReader(Protocol):
    """Reads a checkpoint tensor by tensor, whatever its layout (see PackedReader)."""

    def header(self, info: Any) -> tuple[str, str, tuple[int, ...]] | None:
        """Name, type and shape of what a stored tensor decodes to; None for scales and the like."""

    def decode(self, name: str) -> Tensor | None:
        """What a stored tensor decodes to; None for scales and the like."""

    def is_coded(self, name: str) -> bool:
        """Whether a stored tensor holds the codes of a weight."""

    def codes(self, name: str) -> tuple[Coded, WeightRule] | None:
        """The unchanged codes of a stored weight, out x in, and their rule; None for any other tensor."""

    def check(self, name: str) -> None:
        """Raise NumericsError where codes or scales cannot be right."""


class DenseReader:
    """The reader of a checkpoint that is not quantized: every tensor is itself."""

    def __init__(self, checkpoint: Any) -> None:
        self.checkpoint = checkpoint

    def header(self, info: Any) -> tuple[str, str, tuple[int, ...]] | None:
        """Its own name, type and shape."""
        return info.name, info.dtype, info.shape

    def decode(self, name: str) -> Tensor | None:
        """The tensor itself."""
        tensor: Tensor = self.checkpoint.load(name)
        return tensor

    def is_coded(self, name: str) -> bool:
        """False."""
        return False

    def codes(self, name: str) -> None:
        """None."""

    def check(self, name: str) -> None:
        """Nothing to check."""


READERS: dict[str, Callable[[Any], FormatReader]] = {
    compressed_tensors.METHOD: compressed_tensors.CompressedTensorsReader,
    bitsandbytes.METHOD: bitsandbytes.BitsAndBytesReader,
    gptq.METHOD: gptq.GPTQReader,
    awq.METHOD: awq.AWQReader,
    modelopt.METHOD: modelopt.ModelOptReader,
    exl2.METHOD: exl2.EXL2Reader,
    mxfp4.METHOD: mxfp4.ExpertMXFP4Reader,
    gguf.METHOD: gguf.GGUFReader,
}
"""Readers by ``quant_method``."""


def quant_method(checkpoint: Any) -> str | None:
    """The ``quant_method`` of a checkpoint; None where it is dense.

    Raises:
        ModelError: attar cannot read it.
    """
    config = checkpoint.config.get("quantization_config")
    if not config:
        return None
    name = config.get("quant_method")
    if name not in READERS:
        raise ModelError(
            f"{checkpoint.path}: quantized with {name!r} (quant_method), which attar cannot read",
            hint=f"attar reads {', '.join(READERS)}; else start from the dense model",
        )
    return str(name)


def refuse_packed(checkpoint: Any) -> None:
    """Raise where a checkpoint is quantized: rounding a second time would add one error to another.

    Raises:
        ModelError: names the file or folder, and how to go on.
    """
    method = quant_method(checkpoint)
    if method is not None:
        name = checkpoint.spelling
        raise ModelError(
            f"{name} is quantized already ({method})",
            hint="start from the dense model it was made from; or decode it first: "
            f"attar export {name} -o DENSE --format dense",
        )


def reader(checkpoint: Any) -> FormatReader:
    """The reader of a checkpoint.

    Raises:
        ModelError: it is quantized in a way that attar cannot read.
    """
    name = quant_method(checkpoint)
    return READERS[name](checkpoint) if name else DenseReader(checkpoint)


@dataclass(frozen=True)
class DecodedInfo:
    """A decoded tensor.

    Attributes:
        stored: name of the stored tensor that it is decoded from.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stored: str


class Decoded:
    """A view of a packed checkpoint that looks dense: weights are decoded when they are loaded.

    Attributes:
        decodes: True: tensors have no bytes of their own in a file.
        config: without ``quantization_config``.
        tensors: headers by dense name.
    """

    decodes = True

    def __init__(self, checkpoint: Any) -> None:
        self.checkpoint = checkpoint
        self.path, self.name = checkpoint.path, checkpoint.name
        self.config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
        self._reader = reader(checkpoint)
        self.tensors: dict[str, DecodedInfo] = {}
        for info in checkpoint.tensors.values():
            header = self._reader.header(info)
            if header is not None:
                self.tensors[header[0]] = DecodedInfo(*header, info.name)

    def load(self, name: str) -> Tensor:
        """One tensor, decoded.

        Raises:
            CheckpointError: there is no such tensor, or its parts do not fit together.
        """
        tensor = self._reader.decode(self._stored(name))
        assert tensor is not None, "a tensor with a header decodes"
        return tensor

    def is_coded(self, name: str) -> bool:
        """Whether a tensor is stored as codes."""
        return name in self.tensors and self._reader.is_coded(self.tensors[name].stored)

    def uniform(self, name: str) -> UniformWeight | None:
        """A weight on its uniform grid, out x in (a Conv1D's too); None for other tensors and other grids.

        Raises:
            CheckpointError: there is no such tensor, or its parts do not fit together.
        """
        return uniform_weight(self._reader, self._stored(name))

    def uniform_experts(self, name: str) -> list[UniformWeight] | None:
        """The experts of a stack (E, in, out) on a uniform grid, each out x in; None for other tensors.

        Raises:
            CheckpointError: there is no such tensor, or its parts do not fit together.
        """
        stored = self._stored(name)
        if not isinstance(self._reader, mxfp4.ExpertMXFP4Reader) or not self._reader.is_coded(stored):
            return None
        coded = [self._reader.expert_codes(stored, e) for e in range(self.tensors[name].shape[0])]
        experts = [uniform_of_codes(*coded_expert) for coded_expert in coded]
        return [expert for expert in experts if expert is not None]

    def _stored(self, name: str) -> str:
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: no tensor {name!r}")
        return self.tensors[name].stored
