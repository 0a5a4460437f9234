"""Hidden states of transformers' modules, written to a pool while a step runs.

Hooks are on the blocks (what they return is the residual stream after them) and on the final norm. Some
families return a tuple, whose first item it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attar.errors import ModelError
from attar.models.anatomy import discover
from attar.runtime.kv.hidden_pool import HiddenPool
from attar.runtime.step import StepInput


class HiddenWriter:
    """Fills a pool with the states of every step that its model runs.

    Args:
        model: a causal language model; hooks stay on its modules.
        slots: of the pool.

    Raises:
        ModelError: the model has no final norm, and its states are wanted.
    """

    def __init__(self, model: Any, layers: Sequence[int], slots: int) -> None:
        anatomy = discover(model)
        modules = [*(block.name for block in anatomy.blocks), anatomy.final_norm]
        if modules[layers[-1]] is None:
            raise ModelError(f"{anatomy.family}: it has no final norm, whose states are wanted")
        self.pool = HiddenPool.of(layers, slots, anatomy.hidden_size, model.device)
        self._slots: Tensor | None = None  # of the tokens that run
        for index, layer in enumerate(layers):
            model.get_submodule(modules[layer]).register_forward_hook(partial(self._write, index))

    def begin(self, step: StepInput, block_size: int) -> None:
        """Before a step is run: make its copies."""
        self.pool.copy(step.copies, block_size)
        self._slots = torch.from_numpy(step.slots(block_size)).to(self.pool.states.device)

    def _write(self, index: int, module: nn.Module, inputs: Any, output: Any) -> None:
        """The hook of one layer."""
        states = output[0] if isinstance(output, tuple) else output
        assert self._slots is not None, "a step without begin"
        self.pool.write(self._slots, index, states.reshape(-1, states.shape[-1]))
