"""What the readers of quantized safetensors checkpoints share: which tensors are decoded, which are left out,
and the checks of codes and scales.

A quantized weight is stored as its codes and auxiliary tensors (scales, zero points, shapes, group indices).
A reader decodes the weight when it is given the codes' tensor and has nothing to return for an auxiliary one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attar.checkpoint.tensors import TORCH
from attar.errors import CheckpointError, NumericsError
from attar.formats.coded import Coded
from attar.formats.rules import WeightRule

CONSTANT = 0.999  # a layer with a larger share of equal codes is broken
FLOATS = ("F64", "F32", "F16", "BF16")


class FormatReader:
    """Reads a checkpoint tensor by tensor, whatever its layout; itself, one that is not quantized: there
    every tensor is what is stored."""

    def __init__(self, checkpoint: Any) -> None:
        self.checkpoint = checkpoint

    def header(self, info: Any) -> tuple[str, str, tuple[int, ...]] | None:
        """Name, type and shape of what a stored tensor decodes to; None for scales and the like."""
        return info.name, info.dtype, info.shape

    def decode(self, name: str) -> Tensor | None:
        """What a stored tensor decodes to; None for scales and the like."""
        tensor: Tensor = self.checkpoint.load(name)
        return tensor

    def is_coded(self, name: str) -> bool:
        """Whether a stored tensor holds the codes of a weight."""
        return False

    def codes(self, name: str) -> tuple[Coded, WeightRule] | None:
        """The unchanged codes of a stored weight, out x in, and their rule; None for any other tensor."""
        return None

    def grid(self, name: str) -> tuple[WeightRule, torch.dtype] | None:
        """The rule of the codes of a stored weight, from headers, and a type that holds their scales; None
        for any other tensor, and where other layouts cannot hold the codes."""
        return None

    def check(self, name: str) -> None:
        """Raise NumericsError where codes or scales cannot be right."""


class PackedReader(FormatReader, ABC):
    """Reads a quantized checkpoint tensor by tensor."""

    hint = "the packed checkpoint is incomplete"  # of errors about missing and unfit tensors

    @abstractmethod
    def is_coded(self, name: str) -> bool:
        """Whether a stored tensor holds the codes of a weight."""

    @abstractmethod
    def is_auxiliary(self, name: str) -> bool:
        """Whether a stored tensor belongs to a weight or an activation and is no parameter itself."""

    @abstractmethod
    def weight_header(self, name: str) -> tuple[str, str, tuple[int, int]]:
        """Name, type and shape (N, K) of the weight whose codes a tensor holds, from headers.

        Raises:
            CheckpointError: a tensor of the weight is missing or does not fit.
        """

    @abstractmethod
    def weight(self, name: str) -> Tensor:
        """The decoded weight (N, K) whose codes a tensor holds.

        Raises:
            CheckpointError: a tensor of the weight is missing or does not fit.
        """

    @abstractmethod
    def codes(self, name: str) -> tuple[Coded, WeightRule] | None:
        """The unchanged codes of a stored weight and their rule; None for any other tensor.

        Raises:
            CheckpointError: a tensor of the weight is missing or does not fit.
        """

    @abstractmethod
    def check(self, name: str) -> None:
        """Raise where scales cannot be right or all codes are the same.

        Raises:
            NumericsError: names the layer.
        """

    def is_transposed(self, name: str) -> bool:
        """Whether the model keeps a decoded weight as (in, out), as Conv1D does."""
        return False

    def header(self, info: Any) -> tuple[str, str, tuple[int, ...]] | None:
        """Name, type and shape of what a stored tensor decodes to; None for an auxiliary tensor."""
        if self.is_auxiliary(info.name):
            return None
        if not self.is_coded(info.name):
            return super().header(info)
        name, dtype, shape = self.weight_header(info.name)
        return name, dtype, shape[::-1] if self.is_transposed(info.name) else shape

    def decode(self, name: str) -> Tensor | None:
        """A decoded weight for its codes, None for an auxiliary tensor, the tensor itself otherwise.

        Raises:
            CheckpointError: a tensor of the weight is missing or does not fit.
        """
        if self.is_auxiliary(name):
            return None
        if not self.is_coded(name):
            return super().decode(name)
        weight = self.weight(name)
        return weight.T.contiguous() if self.is_transposed(name) else weight

    def stored(self, name: str) -> Any:
        """The header of a tensor that must be there.

        Raises:
            CheckpointError: it is missing.
        """
        info = self.checkpoint.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.checkpoint.path}: {name} is missing", hint=self.hint)
        return info

    def load_present(self, prefix: str, leaves: Sequence[str]) -> dict[str, Tensor]:
        """Those of a weight's tensors that are stored, by the last part of their names."""
        present = [leaf for leaf in leaves if prefix + leaf in self.checkpoint.tensors]
        return {leaf: self.checkpoint.load(prefix + leaf) for leaf in present}

    def unfit(self, name: str, why: object = "") -> CheckpointError:
        """The error of a weight whose tensors do not fit together."""
        reason = f" ({why})" if why else ""
        return CheckpointError(
            f"{self.checkpoint.path}: the tensors of {name} do not fit together{reason}", hint=self.hint
        )


class SingleLayoutReader(PackedReader):
    """Reads a layout whose codes no other layout holds.

    Attributes:
        leaves: last parts of the names of a weight's tensors, that of its codes first.
    """

    leaves: tuple[str, ...]

    @abstractmethod
    def decoded(self, base: str) -> Tensor:
        """A weight (N, K) by its name without the last part; ValueError or RuntimeError where its tensors do
        not fit together."""

    @abstractmethod
    def scales(self, base: str) -> Tensor:
        """The scales of a weight's codes, float32. Raises NumericsError where scales cannot be right."""

    def is_coded(self, name: str) -> bool:
        return name.endswith(f".{self.leaves[0]}")

    def is_auxiliary(self, name: str) -> bool:
        return name.rpartition(".")[2] in self.leaves[1:]

    def weight(self, name: str) -> Tensor:
        base = name.rpartition(".")[0]
        try:
            return self.decoded(base)
        except (ValueError, RuntimeError) as error:
            raise self.unfit(base, error) from error

    def codes(self, name: str) -> None:
        """None."""

    def check(self, name: str) -> None:
        if self.is_coded(name):
            base = name.rpartition(".")[0]
            check_codes(base, self.checkpoint.load(name), self.scales(base))


def weight_dtype(checkpoint: Any) -> torch.dtype:
    """The number type of a checkpoint's dense weights, for layouts that do not state it.

    ``dtype`` of config.json (older files: ``torch_dtype``); else the float type that most stored bytes have;
    else bfloat16.
    """
    for key in ("dtype", "torch_dtype"):
        dtype = getattr(torch, str(checkpoint.config.get(key)).removeprefix("torch."), None)
        if isinstance(dtype, torch.dtype):
            return dtype
    stored = dict.fromkeys(FLOATS, 0)
    for info in checkpoint.tensors.values():
        if info.dtype in stored:
            stored[info.dtype] += info.nbytes
    most = max(stored, key=lambda kind: stored[kind])
    return getattr(torch, TORCH[most]) if stored[most] else torch.bfloat16  # type: ignore[no-any-return]


def check_scales(name: str, scales: Sequence[Tensor]) -> None:
    """Raise where a scale is zero, negative or not finite.

    Raises:
        NumericsError: names the tensor.
    """
    for scale in scales:
        if not (torch.isfinite(scale).all() and (scale > 0).all()):
            raise NumericsError(
                f"{name} holds zero, negative or infinite scales", hint="quantize the model again"
            )


def check_codes(module: str, codes: Tensor, scales: Tensor) -> None:
    """Raise where nearly all codes (or words of codes) are the same under scales of several sizes, or under
    one other than 1: a weight that is all zero has one scale, which a single one says by being 1.

    Raises:
        NumericsError: names the module.
    """
    words = codes.flatten()
    words = words.view(torch.uint8) if words.element_size() == 1 else words
    one_size = bool((scales.abs() == scales.flatten()[0].abs()).all())
    if one_size and (scales.numel() > 1 or float(scales) == 1.0):
        return
    if words.numel() > 64 and float((words == words[0]).float().mean()) > CONSTANT:
        raise NumericsError(
            f"{module}: nearly all codes are the same", hint="the weights were zero or damaged before"
        )
