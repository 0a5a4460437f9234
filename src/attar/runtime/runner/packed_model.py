"""A model of transformers whose quantized Linears stay quantized: memory near the file's size.

    PackedLinear    codes on an even grid: y = x W^T in the compiled library, rows of x rounded to int16 or
                    int8 with a scale for each group of inputs; in torch, and unrounded, without the library
    DecodedLinear   any other layout (FP8, NF4, EXL2, EXL3): the stored tensors stay in memory, and are
                    decoded for each product, one weight at a time

Both return the dtype of their input. The activations of W8A8 are those of PackedLinear; other rounding of
activations that a scheme asks for is not done (``dtype="float32"`` loads a model that does it).

The module tree is created without weights, and tensors are read one at a time: a coded weight becomes one of
these Linears, everything else an ordinary parameter. Experts are Linears of their own
(models/loading/experts.py). Models whose tensors do not map one to one are refused, and
``models/loading/load.py`` loads them dense.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attar.checkpoint.open import check_finite
from attar.errors import ModelError
from attar.formats.readers import Decoded
from attar.kernels.product import ThreadPool
from attar.models.anatomy.roles import is_linear
from attar.models.loading.configs import load_config
from attar.models.loading.empty import empty_model
from attar.models.loading.stored import stored_buffers, stored_names
from attar.runtime.runner.codes import PackedCodes, codes_of
from attar.runtime.runner.sparse_choice import sparse_pays


class PackedLinear(nn.Module):  # type: ignore[misc]
    """y = x W^T + bias, W as codes.

    Args:
        codes: of W (N, K).
        bias: (N,) or None.
        threads: of the products; shared by all Linears of a model.
        bits: that rows of x are rounded to.
    """

    def __init__(self, codes: PackedCodes, bias: Tensor | None, threads: ThreadPool, bits: int = 16) -> None:
        super().__init__()
        packed = codes.pack(bias, pays=sparse_pays(bits, threads.threads))
        self.packed, self.order, self.bits, self._threads = packed, codes.order, bits, threads
        self.in_features, self.out_features = self.packed.columns, self.packed.rows

    def forward(self, x: Tensor) -> Tensor:
        if not x.numel():  # an expert without tokens
            return x.new_empty(*x.shape[:-1], self.out_features)
        rows = x.reshape(-1, x.shape[-1])
        if self.order is not None:
            rows = rows[:, self.order]
        y = self._threads.multiply(rows, self.packed, bits=self.bits)
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)


class DecodedLinear(nn.Module):  # type: ignore[misc]
    """y = x W^T + bias, W decoded each time.

    Args:
        weight: decodes W (N, K), or (K, N) where ``transposed``.
        bias: (N,) or None.
        shape: of what ``weight`` decodes.
        transposed: W is the weight of a Conv1D.
    """

    def __init__(
        self, weight: Callable[[], Tensor], bias: Tensor | None, shape: Sequence[int], transposed: bool
    ) -> None:
        super().__init__()
        self._weight, self._bias, self._transposed = weight, bias, transposed
        self.out_features, self.in_features = shape[::-1] if transposed else shape

    def forward(self, x: Tensor) -> Tensor:
        weight = self._weight().to(x.dtype)
        bias = None if self._bias is None else self._bias.to(x.dtype)
        return torch.nn.functional.linear(x, weight.T if self._transposed else weight, bias)


class CachedCheckpoint:
    """A checkpoint whose tensors stay in memory, as they are stored, once they were read."""

    def __init__(self, checkpoint: Any) -> None:
        self._checkpoint = checkpoint
        self._tensors: dict[str, Tensor] = {}

    def load(self, name: str) -> Tensor:
        """A stored tensor, not to be modified."""
        if name not in self._tensors:
            self._tensors[name] = self._checkpoint.load(name)
        return self._tensors[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoint, name)


def packed_model(
    checkpoint: Any, dtype: torch.dtype = torch.float32, threads: int | None = None, bits: int = 16
) -> Any:
    """A model in evaluation mode for a runner.

    Args:
        dtype: of everything that is not quantized, and of the activations.
        threads: of the compiled products; None: ``kernels.product.default_threads``.
        bits: of the activations in these products, 8 or 16.

    Raises:
        ModelError: a tensor has no counterpart in the model, or a parameter has no tensor.
        NumericsError: a weight that is not quantized is NaN or infinite.
    """
    config = load_config(checkpoint.path, checkpoint.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = empty_model(config, unstacked=True)
    loader = _WeightLoader(model, checkpoint, dtype, ThreadPool(threads), bits)
    weakref.finalize(model, loader.threads.close)
    for name in loader.decoded.tensors:
        loader.load(name)
    model.tie_weights()
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise ModelError(f"{checkpoint.path}: tensor {missing[0]} is missing")
    model.config.dtype = dtype
    return model.eval()


class _WeightLoader:
    """Loads tensors into an empty model."""

    def __init__(
        self, model: Any, checkpoint: Any, dtype: torch.dtype, threads: ThreadPool, bits: int
    ) -> None:
        self.model, self.dtype, self.threads, self.bits = model, dtype, threads, bits
        self.decoded, self.cached = Decoded(checkpoint), Decoded(CachedCheckpoint(checkpoint))
        self.prefix = f"{getattr(model, 'base_model_prefix', '')}."
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self.shapes = {name: x.shape for name, x in (*parameters.items(), *model.named_buffers())}
        self.tied = model.get_output_embeddings() if model.config.tie_word_embeddings else None
        stored = stored_names(model, self.decoded, strict=False) | stored_buffers(model, self.decoded)
        self.paths = {tensor: name for name, tensor in stored.items()}

    def load(self, name: str) -> None:
        """Load one tensor; a bias is loaded with the weight of its Linear."""
        path = self._path(name)
        parent, _, leaf = path.rpartition(".")
        module, shape = self.model.get_submodule(parent), self.decoded.tensors[name].shape
        if shape != self.shapes[path]:
            raise ModelError(f"tensor {name} is {[*shape]}, but the config asks for {[*self.shapes[path]]}")
        weight = f"{name.rpartition('.')[0]}.weight"
        coded = weight in self.decoded.tensors and self.decoded.is_coded(weight)
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
        """Replace a dense Linear by one that keeps its codes."""
        bias_name = f"{name.removesuffix('weight')}bias"
        bias = self.decoded.load(bias_name) if bias_name in self.decoded.tensors else None
        if (bias is None) != (getattr(module, "bias", None) is None):
            raise ModelError(f"{path}: the file and the model do not agree on a bias")
        grid = self.decoded.uniform(name)
        codes = None if grid is None else codes_of(grid)
        linear = (
            DecodedLinear(
                lambda: self.cached.load(name),
                bias,
                self.decoded.tensors[name].shape,
                not isinstance(module, nn.Linear),
            )
            if codes is None
            else PackedLinear(codes, bias, self.threads, self.bits)
        )
        parent, _, leaf = path.rpartition(".")
        setattr(self.model.get_submodule(parent), leaf, linear)
