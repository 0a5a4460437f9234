"""Hidden states of a model, recorded while it runs.

Layer n: the residual stream after block n, from 0 on; the number of blocks: after the final norm, which is
what the head reads. Hooks are on the modules behind which the states are; some families return a tuple, whose
first item they are.

Letters: B rows a batch, S tokens a row, m layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from attar.errors import ModelError
from attar.models.anatomy.discover import discover


def hook_states(
    model: Any, layers: Sequence[int], record: Callable[[int, Tensor], None]
) -> list[RemovableHandle]:
    """From now on call ``record(place in layers, states)`` for each of some layers that runs.

    Raises:
        ModelError: the model has no such layer, or no final norm, and its states are wanted.
    """

    def hook(index: int, module: nn.Module, inputs: Any, output: Any) -> None:
        record(index, output[0] if isinstance(output, tuple) else output)

    modules = _modules(model)
    for layer in layers:
        if not 0 <= layer < len(modules) or modules[layer] is None:
            what = "a final norm" if layer == len(modules) - 1 else f"{len(modules) - 1} layers"
            raise ModelError(f"{model.config.model_type}: states of layer {layer} are wanted of {what}")
    return [
        model.get_submodule(modules[layer]).register_forward_hook(partial(hook, index))
        for index, layer in enumerate(layers)
    ]


@contextmanager
def recording_states(model: Any, layers: Sequence[int]) -> Iterator[list[Tensor]]:
    """Within it, a run of the model fills the list with states (B, S, H), one tensor a layer."""
    states = list[Tensor]()
    handles = hook_states(model, layers, lambda index, tensor: states.append(tensor))
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def _modules(model: Any) -> list[str | None]:
    """Paths of the blocks and of the final norm, None where there is none."""
    anatomy = discover(model)
    return [*(block.name for block in anatomy.blocks), anatomy.final_norm]
