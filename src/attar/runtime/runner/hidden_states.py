"""Hidden states of transformers' modules, written to a pool while a step runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from attar.models.anatomy.discover import discover
from attar.models.hidden_states import hook_states
from attar.runtime.kv.hidden_pool import HiddenPool
from attar.runtime.step import StepInput


class HiddenWriter:
    """Fills a pool with the states of every step that its model runs.

    Args:
        model: a causal language model; hooks stay on its modules.
        slots: of the pool.

    Raises:
        ModelError: see :func:`attar.models.hidden_states.hook_states`.
    """

    def __init__(self, model: Any, layers: Sequence[int], slots: int) -> None:
        self.pool = HiddenPool.of(layers, slots, discover(model).hidden_size, model.device)
        self._slots: Tensor | None = None  # of the tokens that run
        self._model, self._hooks = model, hook_states(model, layers, self._write)

    def add(self, layers: Sequence[int]) -> None:
        """See :meth:`HiddenPool.add`."""
        hooks = hook_states(self._model, sorted({*self.pool.layers, *layers}), self._write)
        for hook in self._hooks:
            hook.remove()
        self._hooks = hooks
        self.pool.add(layers)

    @contextmanager
    def writing(self, step: StepInput, block_size: int) -> Iterator[None]:
        """Within it the step is run: its copies are made first. What else the model runs is not written."""
        self.pool.copy(step.copies, block_size)
        self._slots = torch.from_numpy(step.slots(block_size)).to(self.pool.states.device)
        try:
            yield
        finally:
            self._slots = None

    def _write(self, index: int, states: Tensor) -> None:
        if self._slots is not None:
            self.pool.write(self._slots, index, states.reshape(-1, states.shape[-1]))
