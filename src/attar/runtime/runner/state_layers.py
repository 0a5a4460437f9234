"""Layers of transformers' modules that carry a state, found in a model and run sequence by sequence.

A step is one row of the tokens of many sequences. Attention, norms and products treat each token alone, but a
layer that carries a state would take the row for one sequence. Its ``forward`` is replaced: while a step
runs, the step's :class:`StatePass` calls it for the tokens of each span, with the state of the span's
sequence where transformers' layer expects its cache (:class:`LayerState`).

A layer is known by its code: its class calls the methods of transformers' cache that read or write states. A
probe of one token then tells the shape of its states; a layer that the probe does not reach, or one that
keeps a state elsewhere, is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from attar.errors import ModelError

_METHODS = {"get_conv_state", "update_conv_state", "get_recurrent_state", "update_recurrent_state"}
_CACHES = ("cache_params", "past_key_values")  # names under which layers are given a cache

LayerCall = Callable[[Tensor, "LayerState"], Tensor | tuple[Tensor, ...]]
"""Runs a layer on inputs (n, t, hidden) of n sequences, and moves their stacked states over them."""


class LayerState:
    """One layer's states of n sequences, in the place of transformers' cache (``LinearAttentionLayer``).

    Args:
        tensors: by name, each (n, ...), which the layer may overwrite; empty at the start of the sequences.

    Attributes:
        layer: index that the layer gives itself; None before it has run.
    """

    def __init__(self, tensors: dict[str, Tensor] | None = None) -> None:
        self.tensors = tensors or {}
        self.layer: int | None = None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Inputs of the convolution that the next token sees, (n, channels, width)."""
        self.layer = layer_idx
        return self.tensors.get(f"conv {state_idx}")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The recurrent state (n, ...)."""
        self.layer = layer_idx
        return self.tensors.get(f"recurrent {state_idx}")

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **others: Any,
    ) -> Tensor:
        """Adds inputs (n, channels, t); returns them behind those that were kept, and keeps the last."""
        name, self.layer = f"conv {state_idx}", layer_idx
        kept = self.tensors.get(name)
        width = conv_kernel_size or (conv_states if kept is None else kept).shape[-1]
        if kept is None:
            full = pad(conv_states, (max(width - conv_states.shape[-1], 0), 0))
        else:
            full = torch.cat([kept, conv_states], dim=-1)
        self.tensors[name] = full[..., -width:].clone()
        return full

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **others: Any
    ) -> Tensor:
        """Keeps a recurrent state, and returns it."""
        self.layer = layer_idx
        self.tensors[f"recurrent {state_idx}"] = recurrent_states
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether the sequences have begun."""
        return bool(self.tensors)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether the inputs of tokens that may be rejected are kept here: ``StatePass`` does that."""
        return False


class LayerRunner(Protocol):
    """Runs a layer on the row of a step."""

    def run(self, name: str, call: LayerCall, hidden: Tensor) -> Tensor | tuple[Tensor, ...]:
        """hidden (1, T, hidden); returns what the layer returns for (1, T, hidden)."""
        ...


class StateProbe:
    """Takes the place of a StatePass: records each layer's states after one token.

    Attributes:
        stepwise: layers whose code for several tokens begins from no state (Mamba 1 in transformers). Once
            they have one, they are run token by token.
    """

    def __init__(self) -> None:
        self.states: dict[str, LayerState] = {}
        self.stepwise: set[str] = set()

    def run(self, name: str, call: LayerCall, hidden: Tensor) -> Tensor | tuple[Tensor, ...]:
        state = self.states[name] = LayerState()
        output = call(hidden, state)
        if not hidden.is_meta and not _reads_state(call, hidden, state.tensors):
            self.stepwise.add(name)
        return output

    @property
    def sequence_bytes(self) -> int:
        """Of a sequence's states in all layers."""
        return sum(tensor.nbytes for state in self.states.values() for tensor in state.tensors.values())


class StateLayers:
    """The layers of a model that carry a state; their ``forward`` is replaced.

    Args:
        model: of transformers; afterwards its layers run as before, unless within :meth:`running`.
    """

    def __init__(self, model: Any) -> None:
        self._model = type(model).__name__
        self._runner: LayerRunner | None = None
        self.names = [name for name, module in model.named_modules() if _carries_state(module)]
        for name in self.names:
            module = model.get_submodule(name)
            if isinstance(module.__dict__.get("forward"), _Forward):  # of an earlier runner
                del module.forward
            module.forward = _Forward(self, name, module)

    def __bool__(self) -> bool:
        """Whether the model has any."""
        return bool(self.names)

    @contextmanager
    def running(self, runner: LayerRunner | None) -> Iterator[None]:
        """Within it the layers run through ``runner``."""
        self._runner = runner
        try:
            yield
        finally:
            self._runner = None

    def run(self, forward: _Forward, *args: Any, **kwargs: Any) -> Any:
        """What a layer's forward does.

        Raises:
            ModelError: the layer has inputs that cannot be divided among sequences.
        """
        if self._runner is None:
            return forward.original(*args, **kwargs)
        hidden, *others = forward.inputs(*args, **kwargs)
        if others:
            raise ModelError(f"{self._model}: {forward.name} has inputs besides hidden states: {others[0]}")
        return self._runner.run(forward.name, forward.call, hidden)


class _Forward:
    """The forward of one layer."""

    def __init__(self, layers: StateLayers, name: str, module: Any) -> None:
        self.layers, self.name, self.original = layers, name, module.forward
        self._signature = inspect.signature(module.forward)
        self._cache = next((name for name in _CACHES if name in self._signature.parameters), _CACHES[0])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.layers.run(self, *args, **kwargs)

    def call(self, hidden: Tensor, state: LayerState) -> Any:
        return self.original(hidden, **{self._cache: state})

    def inputs(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The hidden states, and the names of other tensors that the layer is given."""
        given = self._signature.bind(*args, **kwargs).arguments
        first, *names = given
        return [given[first], *(name for name in names if isinstance(given[name], Tensor))]


def _reads_state(call: LayerCall, hidden: Tensor, tensors: dict[str, Tensor]) -> bool:
    """Whether the outputs of two tokens depend on the recurrent state before them."""
    recurrent = [name for name in tensors if name.startswith("recurrent")]
    outputs = []
    for value in (0.0, 1.0):
        filled = {name: torch.full_like(tensors[name], value) for name in recurrent}
        before = {name: tensor.clone() for name, tensor in tensors.items()} | filled
        output = call(hidden.expand(-1, 2, -1), LayerState(before))
        outputs.append(output if isinstance(output, tuple) else (output,))
    return not recurrent or not all(map(torch.equal, *outputs))


def _carries_state(module: Any) -> bool:
    """Whether the class of a module calls a cache's methods for states."""
    methods = inspect.getmembers(type(module), inspect.isfunction)
    return any(_METHODS & set(_code(method).co_names) for _, method in methods)


def _code(method: Any) -> CodeType:
    code: CodeType = inspect.unwrap(method).__code__
    return code
