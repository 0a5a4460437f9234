"""A model of transformers whose quantized Linears stay quantized: memory near the file's size.

The module tree is made without weights, and tensors are read one at a time: a coded weight becomes a Linear
of linear.py, everything else an ordinary parameter. What cannot be placed one to one (experts that
transformers stacks while loading) is said, and ``models/load.py`` loads such a model dense.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from attar.checkpoint.open import check_finite
from attar.errors import ModelError
from attar.formats.decoded import Decoded
from attar.kernels.product import ThreadPool
from attar.models.anatomy import is_linear
from attar.models.configs import load_config
from attar.models.load import empty_model
from attar.models.stored import stored_names
from attar.runtime.runner.codes import codes_of
from attar.runtime.runner.linear import DecodedLinear, PackedLinear


class CachedCheckpoint:
    """A checkpoint of which everything that was read once stays in memory, as it is stored."""

    def __init__(self, checkpoint: Any) -> None:
        self._checkpoint = checkpoint
        self._kept: dict[str, Tensor] = {}

    def load(self, name: str) -> Tensor:
        """A stored tensor; nobody may change it."""
        if name not in self._kept:
            self._kept[name] = self._checkpoint.load(name)
        return self._kept[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoint, name)


def packed_model(
    checkpoint: Any, dtype: torch.dtype = torch.float32, threads: int | None = None, bits: int = 16
) -> Any:
    """A model in evaluation mode that a runner may take over.

    Args:
        checkpoint: quantized.
        dtype: of everything that is not quantized, and of what flows.
        threads: of the compiled products; None: as ``kernels.product.default_threads`` says.
        bits: of the activations that they take, 8 or 16.

    Raises:
        ModelError: a tensor has no place of its own in the model, or a place has no tensor.
        NumericsError: a weight that is not quantized is NaN or infinite.
    """
    config = load_config(checkpoint.path, checkpoint.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = empty_model(config)
    filling = _Filling(model, checkpoint, dtype, ThreadPool(threads), bits)
    weakref.finalize(model, filling.team.close)
    for name in filling.decoded.tensors:
        filling.place(name)
    model.tie_weights()
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise ModelError(f"{checkpoint.path}: tensor {missing[0]} is missing")
    model.config.dtype = dtype
    return model.eval()


class _Filling:
    """Puts tensors into an empty model."""

    def __init__(self, model: Any, checkpoint: Any, dtype: torch.dtype, team: ThreadPool, bits: int) -> None:
        self.model, self.dtype, self.team, self.bits = model, dtype, team, bits
        self.decoded, self.held = Decoded(checkpoint), Decoded(CachedCheckpoint(checkpoint))
        self.prefix = f"{getattr(model, 'base_model_prefix', '')}."
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self.shapes = {name: each.shape for name, each in (*parameters.items(), *model.named_buffers())}
        self.tied = model.get_output_embeddings() if model.config.tie_word_embeddings else None
        self.paths = {
            stored: name for name, stored in stored_names(model, self.decoded, strict=False).items()
        }

    def place(self, name: str) -> None:
        """Read a tensor and put it where it belongs; a bias goes with the weight of its Linear."""
        path = self._path(name)
        parent, _, leaf = path.rpartition(".")
        module, shape = self.model.get_submodule(parent), self.decoded.tensors[name].shape
        if shape != self.shapes[path]:
            raise ModelError(f"tensor {name} is {[*shape]}, but the config asks for {[*self.shapes[path]]}")
        weight = f"{name.rpartition('.')[0]}.weight"
        coded = weight in self.decoded.tensors and self.decoded.coded(weight)
        if module is self.tied:
            return
        if coded and (is_linear(module) or isinstance(module, PackedLinear | DecodedLinear)):
            if leaf == "weight":
                self._replace(name, parent, module)
            return
        value = self.decoded.load(name)
        check_finite(name, value, self.decoded.path)
        if leaf in module._buffers:
            module._buffers[leaf] = value
        else:
            module._parameters[leaf] = nn.Parameter(value.to(self.dtype), requires_grad=False)

    def _path(self, name: str) -> str:
        """The model's name of a tensor."""
        for path in (self.paths.get(name), name, self.prefix + name, name.removeprefix(self.prefix)):
            if path is not None and path in self.shapes:
                return path
        raise ModelError(f"tensor {name} has no place of its own in {type(self.model).__name__}")

    def _replace(self, name: str, path: str, module: nn.Module) -> None:
        """A Linear that keeps its codes, instead of a dense one."""
        beside = f"{name.removesuffix('weight')}bias"
        bias = self.decoded.load(beside) if beside in self.decoded.tensors else None
        if (bias is None) != (getattr(module, "bias", None) is None):
            raise ModelError(f"{path}: the file and the model do not agree on a bias")
        grid = self.decoded.uniform(name)
        codes = None if grid is None else codes_of(grid)
        turned = not isinstance(module, nn.Linear)
        made = (
            DecodedLinear(lambda: self.held.load(name), bias, turned)
            if codes is None
            else PackedLinear(codes, bias, self.team, self.bits)
        )
        parent, _, leaf = path.rpartition(".")
        setattr(self.model.get_submodule(parent), leaf, made)
