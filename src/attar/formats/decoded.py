"""A packed checkpoint that looks like a dense one: every walk over dense tensors runs on it unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attar.errors import CheckpointError
from attar.formats.readers import reader
from attar.formats.uniform import UniformWeight, uniform_weight


@dataclass(frozen=True)
class DecodedInfo:
    """A tensor as the reader gives it.

    Attributes:
        name: of the dense tensor.
        dtype: its type, in safetensors' words.
        shape: its shape.
        stored: name of the stored tensor that it is decoded from.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stored: str


class Decoded:
    """A view of a checkpoint with its weights decoded as they are asked for.

    Attributes:
        decodes: True: tensors have no bytes of their own in a file.
        config: without ``quantization_config``.
        tensors: what there is, by the dense name.
    """

    decodes = True

    def __init__(self, checkpoint: Any) -> None:
        self.checkpoint = checkpoint
        self.path, self.name = checkpoint.path, checkpoint.name
        self.config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
        self._reader = reader(checkpoint)
        self.tensors: dict[str, DecodedInfo] = {}
        for info in checkpoint.tensors.values():
            slot = self._reader.slot(info)
            if slot is not None:
                self.tensors[slot[0]] = DecodedInfo(*slot, info.name)

    def load(self, name: str) -> Tensor:
        """One tensor, decoded.

        Raises:
            CheckpointError: there is no such tensor.
        """
        info = self.tensors.get(name)
        tensor = None if info is None else self._reader.dense(info.stored)
        if tensor is None:
            raise CheckpointError(f"{self.path}: no tensor {name!r}")
        return tensor

    def coded(self, name: str) -> bool:
        """Whether a tensor is stored as codes."""
        return name in self.tensors and self._reader.coded(self.tensors[name].stored)

    def uniform_weight(self, name: str) -> UniformWeight | None:
        """A weight on its even grid, out x in (a Conv1D's too); None where it is stored in another way.

        Raises:
            CheckpointError: there is no such tensor, or its parts do not fit together.
        """
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.path}: no tensor {name!r}")
        return uniform_weight(self._reader, info.stored)
