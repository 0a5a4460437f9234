"""Embeddings of a causal model: the final hidden states of a prompt, pooled.

    mean    the mean over all tokens of the prompt
    last    the state of its last token, which has seen all others

The states are where the keys and values are (``kv/hidden_pool.py``), so prompts are run like any others:
batched, in chunks, from the prefix cache. They are kept as bfloat16, and pooled in float32.

Letters: H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from attar.errors import ModelError
from attar.runtime.kv.hidden_pool import HiddenPool
from attar.runtime.step import slots

if TYPE_CHECKING:
    from attar.runtime.loading import Loaded

FINAL = -1
"""Stands for the layer behind the final norm, before the model is loaded."""
_CHUNK = 512  # tokens whose states are read at a time


class PromptPooler:
    """Reads the states of prompts.

    Args:
        pool: of a runner.
        layer: the one behind the final norm.
        block_size: tokens of a block.
    """

    def __init__(self, pool: HiddenPool, layer: int, block_size: int) -> None:
        self._pool, self._layer, self._block_size = pool, layer, block_size

    @property
    def dimensions(self) -> int:
        """H."""
        return int(self._pool.states.shape[-1])

    def pool(self, blocks: Sequence[int], count: int, pooling: str) -> NDArray[np.float32]:
        """float32 (H,) of the first ``count`` tokens of a block table, all of which have been run."""
        first = 0 if pooling == "mean" else count - 1
        total = torch.zeros(self.dimensions)
        for start in range(first, count, _CHUNK):
            stop = min(start + _CHUNK, count)
            states = self._pool.read(slots(blocks, start, stop, self._block_size), (self._layer,))
            total += states[:, 0].sum(0).cpu()
        pooled: NDArray[np.float32] = (total / (count - first)).numpy()
        return pooled


def pooler_of(loaded: Loaded) -> PromptPooler:
    """The pooler of a model, whose runner keeps the states from now on.

    Raises:
        ModelError: blocks are released before the end of a prompt, or the runner keeps no states.
    """
    runner: Any = loaded.runner
    keep = getattr(runner, "keep_hidden", None)
    if keep is None:
        raise ModelError(f"{loaded.name}: its runner keeps no hidden states, which embeddings are made of")
    if loaded.lookback[0] is not None:
        hint = "serve it without --pooling"
        raise ModelError(f"{loaded.name} has sliding windows alone: early states are gone", hint=hint)
    layer = _final_layer(runner)
    return PromptPooler(keep((layer,)), layer, runner.block_size)


def _final_layer(runner: Any) -> int:
    if hasattr(runner, "weights"):
        return len(runner.weights.layers)
    from attar.models.anatomy.discover import discover

    return len(discover(runner.model).blocks)
