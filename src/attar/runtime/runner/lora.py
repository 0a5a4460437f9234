"""LoRA adapters of a running model: the tokens of a span get the update of their own adapter, or none.

Hu et al. 2021, "LoRA", arXiv 2106.09685, equation 3; Kalajdzievski 2023, "rsLoRA", arXiv 2312.03732:

    y = W x + s (B (A x) + b)        W (N, K), A (r, K), B (N, r), b (N,) or none

The update is computed in float32, whatever W is stored as, and added to the rows of the step that belong to
the adapter: a hook on each Linear that an adapter changes. W itself never changes, so spans of several
adapters and spans without one run in one step. A projection that latent attention absorbs (``latent.py``)
runs on no rows of the step: of it a copy with the update is kept for each adapter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from attar.checkpoint.open import check_finite
from attar.checkpoint.tensors import TensorInfo, read_tensor
from attar.errors import ModelError
from attar.models.loading.adapter_files import (
    CONFIG,
    WEIGHTS,
    rank_and_scale,
    read_adapter_config,
    read_tensors,
)
from attar.runtime.runner.latent import LatentProducts
from attar.runtime.runner.packed_model import DecodedLinear, PackedLinear
from attar.runtime.step import StepInput

LINEARS = (nn.Linear, Conv1D, PackedLinear, DecodedLinear)
_NAMES = {"lora_A", "lora_B", "lora_B.bias"}


@dataclass(frozen=True)
class LoraUpdate:
    """The update of one Linear.

    Attributes:
        A: float32 (r, K).
        B: float32 (N, r), times s.
        bias: float32 (N,), times s, or None.
    """

    A: Tensor
    B: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Of rows of inputs (n, K), float32 (n, N)."""
        y = x.float() @ self.A.T @ self.B.T
        return y if self.bias is None else y + self.bias

    def to(self, device: torch.device) -> LoraUpdate:
        """On another device."""
        return LoraUpdate(
            *(None if tensor is None else tensor.to(device) for tensor in (self.A, self.B, self.bias))
        )  # type: ignore[arg-type]


@dataclass(frozen=True)
class LoraAdapter:
    """An adapter.

    Attributes:
        updates: by the path of the module.
        digest: of its files' content.
        replaced: tensors that it stores whole. peft stores those of a head that it changes as they were.
    """

    name: str
    updates: Mapping[str, LoraUpdate]
    digest: str
    replaced: Mapping[str, TensorInfo] = field(default_factory=dict)


def read_lora(folder: Path) -> LoraAdapter:
    """An adapter that peft wrote.

    Raises:
        CheckpointError: a file is missing or damaged.
        ModelError: it is not LoRA, or holds what cannot be added while a model runs (DoRA, embeddings); names
            it.
        NumericsError: a factor is not finite.
    """
    config = read_adapter_config(folder)
    tensors = read_tensors(folder)
    if config.get("use_dora"):
        raise unsupported(folder, "DoRA's magnitudes (use_dora)")
    updates = {}
    for module, factors in sorted(tensors.factors.items()):
        other = sorted(set(factors) - _NAMES)
        if other:
            raise unsupported(folder, f"{other[0]} of {module!r}")
        updates[module] = _update(folder, config, module, factors)
    if not updates:
        raise ModelError(f"{folder}: the adapter changes nothing")
    content = b"".join(hashlib.sha256((folder / name).read_bytes()).digest() for name in (CONFIG, WEIGHTS))
    return LoraAdapter(folder.name, updates, hashlib.sha256(content).hexdigest(), tensors.replacements)


def unsupported(where: str | Path, what: str) -> ModelError:
    """The error for what only a merge can add."""
    message = f"{where}: the adapter has {what}, which cannot be added while the model runs"
    return ModelError(message, hint="serve the merged model: attar merge, with MODEL+ADAPTER")


def _update(
    folder: Path, config: Mapping[str, Any], module: str, factors: Mapping[str, TensorInfo]
) -> LoraUpdate:
    missing = sorted({"lora_A", "lora_B"} - set(factors))
    if missing:
        raise ModelError(f"{folder}: {module!r} has no {missing[0]}")
    rank, scale = rank_and_scale(config, module)
    A, B = _float(folder, factors["lora_A"]), _float(folder, factors["lora_B"])
    if A.dim() != 2 or B.dim() != 2 or not A.shape[0] == B.shape[1] == rank:
        shapes = f"{tuple(A.shape)} and {tuple(B.shape)}"
        raise ModelError(f"{folder}: {module!r}: factors of shape {shapes}, but rank {rank} by {CONFIG}")
    check_finite(f"lora_B of {module!r} times {scale:g}", B * scale, folder)
    bias = _float(folder, factors["lora_B.bias"]) if "lora_B.bias" in factors else None
    return LoraUpdate(A, B * scale, None if bias is None else bias * scale)


def _float(folder: Path, info: TensorInfo) -> Tensor:
    tensor = read_tensor(info)
    check_finite(info.name, tensor, folder)
    return tensor.float()


class LoraRows:
    """The adapters of a model, and which rows of a step are whose.

    Args:
        model: of transformers; its Linears get hooks where an adapter changes them.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.adapters: dict[str, LoraAdapter] = {}  # by key
        self._updates: dict[str, dict[str, LoraUpdate]] = {}  # by module, then by key
        self._hooks: dict[str, Any] = {}
        self._head = model.get_output_embeddings()
        self._rows: dict[str, Tensor] | None = None  # of the step that runs, by key
        self._wanted: dict[str, Tensor] = {}  # the same among the rows whose logits are wanted
        self._counts = (0, 0)  # tokens, wanted rows
        self._applied: set[tuple[str, str]] = set()

    def prepare(self, adapter: LoraAdapter) -> LoraAdapter:
        """Nothing has to be made before ``add``."""
        return adapter

    def add(self, key: str, adapter: LoraAdapter) -> None:
        """Make an adapter ready.

        Args:
            key: of spans with this adapter; new.

        Raises:
            ModelError: it does not fit the model, or changes whole tensors (``modules_to_save``); names them.
        """
        assert key and key not in self.adapters, f"{key!r} is a new key"
        modules = dict(self._model.named_modules())
        for path, update in adapter.updates.items():
            _check_module(adapter, path, modules.get(path), update)
            if update.bias is not None and _absorbed(modules, path) is not None:
                raise unsupported(adapter.name, f"a bias of {path!r}")
        for name, info in adapter.replaced.items():
            if not _is_equal(self._model, name, info):
                raise unsupported(adapter.name, f"a whole tensor (modules_to_save), {name!r}")
        self.adapters[key] = adapter
        for path, update in adapter.updates.items():
            latent = _absorbed(modules, path)
            if latent is not None:
                latent.adapt(key, (update.B @ update.A).to(self._model.device))
                continue
            self._updates.setdefault(path, {})[key] = update.to(self._model.device)
            if path not in self._hooks:
                self._hooks[path] = modules[path].register_forward_hook(self._hook(path))

    def remove(self, key: str) -> None:
        """Forget an adapter; no span may have its key any more."""
        modules = dict(self._model.named_modules())
        for path in self.adapters.pop(key).updates:
            if (latent := _absorbed(modules, path)) is not None:
                del latent.adapted[key]
                continue
            del self._updates[path][key]
            if not self._updates[path]:
                del self._updates[path]
                self._hooks.pop(path).remove()

    @contextmanager
    def applied(self, step: StepInput) -> Iterator[None]:
        """The model's forward pass in it adds each span's adapter.

        Raises:
            ModelError: the model runs without a module that an adapter changes, or on other rows.
        """
        keys = sorted({span.adapter for span in step.spans} - {""})
        if not keys:
            yield
            return
        unknown = [key for key in keys if key not in self.adapters]
        if unknown:
            raise ModelError(f"no adapter {unknown[0]!r} is loaded")
        device = self._model.device
        rows = {key: torch.from_numpy(step.rows_of(key)).to(device) for key in keys}
        wanted = torch.from_numpy(step.rows).to(device)
        self._wanted = {key: torch.isin(wanted, adapted).nonzero().flatten() for key, adapted in rows.items()}
        self._rows, self._counts, self._applied = rows, (step.count, len(wanted)), set()
        try:
            yield
        finally:
            self._rows = None
        for key in keys:
            hooked = [path for path in self.adapters[key].updates if key in self._updates.get(path, ())]
            missing = [path for path in hooked if (path, key) not in self._applied]
            if missing:
                raise ModelError(f"the model does not run {missing[0]!r}, which the adapter changes")

    @contextmanager
    def within(self, adapters: Sequence[str], count: int) -> Iterator[None]:
        """A layer runs on other rows in it: ``count`` for each of these adapters, in order (empty: none)."""
        rows, counts = self._rows, self._counts
        if rows is None:
            yield
            return
        keys = [key for key in adapters for _ in range(count)]
        self._rows = {
            key: torch.tensor([row for row, of in enumerate(keys) if of == key], device=self._model.device)
            for key in dict.fromkeys(filter(None, adapters))
        }
        self._counts = (len(keys), counts[1])
        try:
            yield
        finally:
            self._rows, self._counts = rows, counts

    def _hook(self, path: str) -> Any:
        def add_updates(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if self._rows is None:
                return output
            head = module is self._head
            x, rows_of = inputs[0].flatten(0, -2), self._wanted if head else self._rows
            if len(x) != self._counts[head]:
                raise ModelError(f"{path} runs on {len(x)} rows of {self._counts[head]}, which LoRA needs")
            flat = output.flatten(0, -2)
            for key, update in self._updates[path].items():
                if (rows := rows_of.get(key)) is not None:
                    self._applied.add((path, key))
                    flat = flat.index_add(0, rows, update(x[rows]).to(flat.dtype))
            return flat.view_as(output)

        return add_updates


def _absorbed(modules: Mapping[str, nn.Module], path: str) -> LatentProducts | None:
    """The attention that has absorbed a Linear."""
    parent, _, leaf = path.rpartition(".")
    return getattr(modules[parent], "latent", None) if leaf == "kv_b_proj" else None


def _check_module(adapter: LoraAdapter, path: str, module: Any, update: LoraUpdate) -> None:
    """Raise ModelError where an update does not fit."""
    if not isinstance(module, LINEARS):
        kind = "the model has no such module" if module is None else f"it is a {type(module).__name__}"
        raise ModelError(f"the adapter {adapter.name} changes {path!r}, and {kind}")
    check_shapes(adapter, path, update, *_shape(module))


def check_shapes(adapter: LoraAdapter, path: str, update: LoraUpdate, inputs: int, outputs: int) -> None:
    """Raise ModelError where an update is not of a Linear's inputs and outputs."""
    sizes = (update.A.shape[1], update.B.shape[0], len(update.B) if update.bias is None else len(update.bias))
    if sizes != (inputs, outputs, outputs):
        message = f"the adapter {adapter.name} has {sizes[0]} inputs and {sizes[1]} outputs for {path!r}"
        raise ModelError(f"{message}, which has {inputs} and {outputs}")


def _is_equal(model: Any, name: str, info: TensorInfo) -> bool:
    """Whether a parameter of the model has the same numbers as an adapter's tensor."""
    path, _, leaf = name.rpartition(".")
    module = dict(model.named_modules()).get(path)
    parameter = getattr(module, leaf, None)
    return isinstance(parameter, Tensor) and torch.equal(
        parameter.detach().cpu(), read_tensor(info).to(parameter.dtype)
    )


def _shape(module: Any) -> tuple[int, int]:
    """Inputs and outputs."""
    if isinstance(module, Conv1D):
        return int(module.weight.shape[0]), int(module.weight.shape[1])
    return int(module.in_features), int(module.out_features)
