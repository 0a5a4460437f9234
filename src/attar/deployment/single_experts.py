"""A view of a checkpoint in which experts that are stored in one tensor are weights of their own, under the
names that they have in the model's module tree (models/experts.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from attar.formats.gguf.placement import Placement


class SingleExperts:
    """The view; whatever is no tensor is that of the checkpoint.

    Attributes:
        tensors: headers by name, experts by :attr:`Placement.single`.
    """

    def __init__(self, view: Any, placed: Sequence[Placement]) -> None:
        self._view = view
        self._places = {one.single: one for one in placed if one.single}
        stacks = {one.stored for one in self._places.values()}
        self.tensors = {name: info for name, info in view.tensors.items() if name not in stacks}
        for name, one in self._places.items():
            info = view.tensors[one.stored]
            self.tensors[name] = replace(info, name=name, shape=one.shape)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)

    def load(self, name: str) -> Tensor:
        """One tensor, or one expert's weight (N, K) or bias (N,), in memory of its own."""
        one = self._places.get(name)
        stored: Tensor = self._view.load(name if one is None else one.stored)
        if one is None or one.part is None:
            return stored
        return one.part.view(stored).clone().contiguous()


def with_single_experts(view: Any, placed: Sequence[Placement]) -> Any:
    """The view itself where nothing is stacked."""
    return SingleExperts(view, placed) if any(one.single for one in placed) else view
