"""The reader that a checkpoint needs, by its ``quant_method``, and a view that makes a packed checkpoint look
dense."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoint.normal_form import holds_codes
from attar.checkpoint.tensors import stored_dtype, tensor_bytes
from attar.errors import CheckpointError, ModelError
from attar.formats import awq, bitsandbytes, compressed_tensors, exl2, exl3, fp8, gptq, mlx, modelopt, mxfp4
from attar.formats.coded import Coded, UniformWeight, uniform_of_codes, uniform_weight
from attar.formats.gguf import reader as gguf
from attar.formats.packed_reader import FLOATS, FormatReader
from attar.formats.rules import WeightRule

READERS: dict[str, Callable[[Any], FormatReader]] = {
    compressed_tensors.METHOD: compressed_tensors.CompressedTensorsReader,
    bitsandbytes.METHOD: bitsandbytes.BitsAndBytesReader,
    gptq.METHOD: gptq.GPTQReader,
    awq.METHOD: awq.AWQReader,
    modelopt.METHOD: modelopt.ModelOptReader,
    fp8.METHOD: fp8.FP8Reader,
    fp8.FBGEMM: fp8.FBGEMMReader,
    exl2.METHOD: exl2.EXL2Reader,
    exl3.METHOD: exl3.EXL3Reader,
    mxfp4.METHOD: mxfp4.ExpertMXFP4Reader,
    mlx.METHOD: mlx.MLXReader,
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


def as_stored(checkpoint: Any) -> Any:
    """The checkpoint behind a view that decodes it; any other one itself."""
    return checkpoint.checkpoint if isinstance(checkpoint, Decoded) else checkpoint


def reader(checkpoint: Any) -> FormatReader:
    """The reader of a checkpoint.

    Raises:
        ModelError: it is quantized in a way that attar cannot read.
    """
    name = quant_method(checkpoint)
    return READERS[name](checkpoint) if name else FormatReader(checkpoint)


@dataclass(frozen=True)
class DecodedInfo:
    """A decoded tensor.

    Attributes:
        stored: name of the stored tensor that it is decoded from.
        file: that of the stored tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stored: str
    file: Path
    block: str = ""

    @property
    def nbytes(self) -> int:
        """Its size once it is decoded."""
        return tensor_bytes(self.dtype, self.shape)


class Decoded:
    """A view of a packed checkpoint that looks dense: weights are decoded when they are loaded. Attributes
    that are not named here are the checkpoint's.

    Attributes:
        decodes: True: tensors have no bytes of their own in a file.
        config: without ``quantization_config``.
        tensors: headers by dense name.
        mtp: those of the multi-token prediction head.
        dtype: of floating-point tensors; None: as each one decodes.

    Args:
        read: the checkpoint's reader, where it is not :func:`reader`'s.
    """

    decodes = True

    def __init__(self, checkpoint: Any, *, read: Any = None, dtype: torch.dtype | None = None) -> None:
        self.checkpoint, self.dtype = checkpoint, dtype
        self.path, self.name = checkpoint.path, checkpoint.name
        self.config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
        if dtype is not None:
            self.config["dtype"] = str(dtype).removeprefix("torch.")
            self.config.pop("torch_dtype", None)
        complete = getattr(checkpoint, "with_mtp", checkpoint)
        self._reader = reader(complete) if read is None else read
        self.tensors: dict[str, DecodedInfo] = {}
        self.mtp: dict[str, DecodedInfo] = {}
        for info in complete.tensors.values():
            header = self._reader.header(info)
            if header is None:
                continue
            name, kind, shape = header
            kind = stored_dtype(dtype) if dtype is not None and kind in FLOATS else kind
            infos = self.tensors if info.name in checkpoint.tensors else self.mtp
            infos[name] = DecodedInfo(name, kind, shape, info.name, info.file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.checkpoint, name)

    @property
    def stored(self) -> dict[str, DecodedInfo]:
        """Every tensor, the head's behind the model's."""
        return {**self.tensors, **self.mtp}

    def renamed(self, config: dict[str, Any], tensors: dict[str, DecodedInfo]) -> Decoded:
        """The same weights as those of another config, under other names and without a head.

        Args:
            tensors: of this view, by their new names.
        """
        view = Decoded.__new__(Decoded)
        view.__dict__.update(self.__dict__, config=config, tensors=tensors, mtp={}, as_stored=False)
        return view

    def load(self, name: str) -> Tensor:
        """One tensor, decoded.

        Raises:
            CheckpointError: there is no such tensor, or its parts do not fit together.
        """
        tensor = self._reader.decode(self._stored(name))
        assert tensor is not None, "a tensor with a header decodes"
        return self._cast(tensor)

    def load_expert(self, name: str, index: int) -> Tensor | None:
        """One expert of a stack, decoded without the others; None where the layout decodes whole stacks."""
        decode = getattr(self._reader, "decode_expert", None)
        tensor = decode(self._stored(name), index) if decode else None
        return None if tensor is None else self._cast(tensor)

    def grid(self, name: str) -> tuple[WeightRule, torch.dtype] | None:
        """The rule of a weight's codes and a type that holds their scales; None where it is dense. Experts
        that a stack has taken in have their own names here."""
        read, stored = self._coded(name)
        return None if stored is None else read.grid(stored)

    def codes(self, name: str) -> Coded:
        """The unchanged codes (N, K) of a weight that has a :meth:`grid`."""
        read, stored = self._coded(name)
        coded: tuple[Coded, WeightRule] | None = None if stored is None else read.codes(stored)
        assert coded is not None, "a weight with a grid has codes"
        return coded[0]

    def has_expert_codes(self, name: str) -> bool:
        """Whether a tensor is a stack of experts in MXFP4."""
        return isinstance(self._reader, mxfp4.ExpertMXFP4Reader) and self._reader.is_coded(self._stored(name))

    def expert_codes(self, name: str, index: int) -> tuple[Coded, WeightRule]:
        """The codes (N, K) of one expert of such a stack, and their rule."""
        assert isinstance(self._reader, mxfp4.ExpertMXFP4Reader), "has_expert_codes was asked"
        return self._reader.expert_codes(self._stored(name), index)

    def check_one_layout(self) -> None:
        """Raise where a tensor that looks dense belongs to another quantization than the config's.

        Raises:
            CheckpointError: names the tensor.
        """
        odd = next((info for info in self.stored.values() if holds_codes(info)), None)
        if odd is not None:
            raise CheckpointError(
                f"{self.path}: tensor {odd.stored} ({odd.dtype}) is of another quantization than "
                f"{quant_method(self.checkpoint)}, which config.json names",
                hint="attar reads one layout a checkpoint; get the whole model again",
            )

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if self.dtype is not None and tensor.is_floating_point() else tensor

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
        if not self.has_expert_codes(name):
            return None
        count = self.tensors[name].shape[0]
        experts = [uniform_of_codes(*self.expert_codes(name, expert)) for expert in range(count)]
        return [expert for expert in experts if expert is not None]

    def _coded(self, name: str) -> tuple[Any, str | None]:
        """The reader and the stored tensor of a weight, or of an expert that a stack has taken in; None for
        another part of a tensor."""
        read: Any = self._reader
        singles: Mapping[str, str] = getattr(read, "singles", {})
        if name in singles:
            return read.read, singles[name]
        info = self._info(name)
        return read, None if info is None else info.stored

    def _stored(self, name: str) -> str:
        info = self._info(name)
        if info is None:
            raise CheckpointError(f"{self.path}: no tensor {name!r}")
        return info.stored

    def _info(self, name: str) -> DecodedInfo | None:
        return self.tensors.get(name) or self.mtp.get(name)
