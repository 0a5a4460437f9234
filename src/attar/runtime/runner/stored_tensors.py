"""A checkpoint's tensors as ``compiled_weights.py`` reads them: dense, or as the codes that are stored."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attar.checkpoint import Checkpoint
from attar.checkpoint.open import check_finite
from attar.formats.readers import Decoded
from attar.runtime.runner.codes import PackedCodes, codes_of


class StoredTensors:
    """The tensors of a checkpoint, read one at a time.

    Attributes:
        tensors: their headers by name.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._view, self._path = Decoded(checkpoint), checkpoint.path
        self.tensors = self._view.tensors

    def load(self, name: str) -> Tensor:
        """A tensor, dense.

        Raises:
            CheckpointError: a number is not finite.
        """
        value = self._view.load(name)
        check_finite(name, value, self._path)
        return value

    def is_coded(self, name: str) -> bool:
        """Whether a tensor is there, and stored as codes."""
        return name in self.tensors and self._view.is_coded(name)

    @property
    def readers(self) -> dict[str, Any]:
        """The arguments ``coded`` and ``coded_experts`` of ``model_weights``."""
        return {"coded": self._coded, "coded_experts": self._coded_experts}

    def _coded(self, name: str) -> PackedCodes | None:
        grid = self._view.uniform(name) if self._view.is_coded(name) else None
        return None if grid is None else codes_of(grid)

    def _coded_experts(self, name: str) -> list[PackedCodes] | None:
        experts = [codes_of(grid) for grid in self._view.uniform_experts(name) or ()]
        codes = [expert for expert in experts if expert is not None]
        return codes if codes and len(codes) == len(experts) else None
