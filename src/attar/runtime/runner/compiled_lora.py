"""LoRA adapters in the compiled step: for each a second program, of merged weights, on the same pool.

    W' = W + s B A         in float32, then rounded as a merged checkpoint's weights are: the same numbers

A step's spans run adapter by adapter, each group through its own program; block copies are made with the
first. The programs share threads, keys and values, and never run at the same time. Weights that are stored as
codes have no room for an update: such models run through their modules (``lora.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from attar.checkpoint.tensors import read_tensor
from attar.errors import ModelError
from attar.kernels.decode import ModelWeights
from attar.runtime.runner.compiled_weights import EMBEDDING, HEAD
from attar.runtime.runner.lora import LoraAdapter, LoraUpdate, check_shapes, unsupported
from attar.runtime.step import StepInput

LoadTensor = Callable[[str], Tensor]
BuildWeights = Callable[[Collection[str], LoadTensor], ModelWeights]
"""Names of tensors and what loads them, to what the library reads."""


class LoraProgram(Protocol):
    """What runs a model's steps: the compiled program, or the device's."""

    def sharing(self, weights: ModelWeights) -> Any:
        """The same of other weights, on this one's pool."""
        ...

    def close(self) -> None:
        """It is not used any more."""
        ...


AnyProgram = TypeVar("AnyProgram", bound=LoraProgram)


class CompiledLora(Generic[AnyProgram]):
    """The adapters of a compiled runner, or of the device's.

    Args:
        program: the model's.
        build: makes weights for the library.
        infos: headers of the checkpoint's tensors, by name.
        load: reads a tensor.
    """

    def __init__(
        self,
        program: AnyProgram,
        build: BuildWeights,
        infos: Mapping[str, Any],
        load: LoadTensor,
    ) -> None:
        self._program, self._build, self._infos, self._load = program, build, infos, load
        self.adapters: dict[str, AnyProgram] = {}

    def prepare(self, adapter: LoraAdapter) -> ModelWeights:
        """The merged weights; takes as long as loading the model, and may run beside a step.

        Raises:
            ModelError: the adapter does not fit the model, or changes whole tensors; names them.
        """
        for name, info in adapter.replaced.items():
            stored = self._stored(name)
            weight = self._load(stored) if stored in self._infos else None
            if weight is None or not torch.equal(weight, read_tensor(info).to(weight.dtype)):
                raise unsupported(adapter.name, f"a whole tensor (modules_to_save), {name!r}")
        updates: dict[str, tuple[str, LoraUpdate]] = {}  # by the tensor that changes: its source
        for path, update in adapter.updates.items():
            source = self._source(adapter, path, update)
            tied = source == EMBEDDING  # the head gets a tensor of its own
            updates[f"{path}.weight" if tied else source] = source, update
            if update.bias is not None:
                name = self._stored(f"{path}.bias")
                updates[name] = name, update

        def load(name: str) -> Tensor:
            if name not in updates:
                return self._load(name)
            source, update = updates[name]
            change = update.bias if name.endswith(".bias") else update.B @ update.A
            assert change is not None, "a bias that changes"
            return _sum(self._load(source), change) if source in self._infos else change

        return self._build(sorted({*self._infos, *updates}), load)

    def _source(self, adapter: LoraAdapter, path: str, update: LoraUpdate) -> str:
        """The tensor that an update is added to."""
        source = self._stored(f"{path}.weight")
        info = self._infos.get(source)
        if info is None:
            raise ModelError(f"the adapter {adapter.name} changes {path!r}, and the model has no such module")
        outputs, inputs = info.shape
        check_shapes(adapter, path, update, inputs, outputs)
        return source

    def _stored(self, name: str) -> str:
        """The tensor of a parameter; of a tied head, the embedding. Nemotron-H stores another prefix."""
        if name in self._infos:
            return name
        older = f"backbone.{name.removeprefix('model.')}"
        return older if older in self._infos else EMBEDDING if name == HEAD else name

    def add(self, key: str, weights: ModelWeights) -> None:
        """Make prepared weights ready for spans with a key, which is new."""
        assert key and key not in self.adapters, f"{key!r} is a new key"
        self.adapters[key] = self._program.sharing(weights)

    def remove(self, key: str) -> None:
        """Forget an adapter; no span may have its key any more."""
        self.adapters.pop(key).close()

    def groups(self, step: StepInput) -> list[tuple[AnyProgram, list[int]]]:
        """The programs that a step needs, each with the indices of its spans.

        Raises:
            ModelError: no adapter of this key is loaded.
        """
        indices: dict[str, list[int]] = {}
        for index, span in enumerate(step.spans):
            indices.setdefault(span.adapter, []).append(index)
        unknown = [key for key in indices if key and key not in self.adapters]
        if unknown:
            raise ModelError(f"no adapter {unknown[0]!r} is loaded")
        return [(self.adapters[key] if key else self._program, spans) for key, spans in indices.items()]


def _sum(weight: Tensor, update: Tensor) -> Tensor:
    return (weight.float() + update).to(weight.dtype)
