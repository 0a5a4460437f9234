"""Runs Llama-shaped models as operators on a device, CPU included: the families of the compiled step.

The pool has one block more than the runner says: what stands for no token is written there.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attar.errors import ModelError, UsageError
from attar.kernels.decode import ModelWeights
from attar.kernels.device import native
from attar.kernels.packed import Kind
from attar.runtime.kv.hidden_pool import HiddenPool
from attar.runtime.kv.store import PoolGeometry, make_store
from attar.runtime.kv.store.planes import PlaneStore
from attar.runtime.kv.store.rotated import CacheBasis, formats_label
from attar.runtime.runner.compiled_weights import model_weights
from attar.runtime.runner.device import graphs
from attar.runtime.runner.device.layout import DeviceWeight
from attar.runtime.runner.device.linears import multiply, product_kernel
from attar.runtime.runner.device.model import on_device, run_model
from attar.runtime.runner.device.packer import DevicePacker
from attar.runtime.runner.device.step import StepShape, shape_of, stage, views
from attar.runtime.runner.key_means import calibration_step, key_centers
from attar.runtime.step import StepInput, TokenSpan

if TYPE_CHECKING:
    from attar.runtime.runner.compiled_lora import BuildWeights, CompiledLora, LoadTensor

KV_DTYPES = ("float32", "bfloat16", "float16", "int8", "fp8", "int4")


@dataclass(eq=False)
class DevicePool:
    """What programs of one runner share: the pool, and hidden states if they are kept.

    Attributes:
        spare: the block that no sequence has.
    """

    store: PlaneStore
    device: torch.device
    hidden: HiddenPool | None = None

    @property
    def block_size(self) -> int:
        return self.store.geometry.block_size

    @property
    def spare(self) -> int:
        return self.store.geometry.blocks - 1


class DeviceProgram:
    """A model's weights on a pool.

    Args:
        weights: of the device; see :func:`attar.runtime.runner.device.model.run_model`.
        dtype: of what products read.
    """

    def __init__(self, weights: ModelWeights, pool: DevicePool, dtype: torch.dtype) -> None:
        self.weights, self.pool, self.dtype = weights, pool, dtype
        self.graphs = graphs.StepGraphs(self.run_numbers, pool.device) if graphs.wanted(pool.device) else None

    def run(self, step: StepInput) -> Tensor:
        """Logits float32 (W, vocabulary); copies are made before."""
        shape = shape_of(step)
        larger = graphs.bucket(shape) if self.graphs else None
        if self.graphs is not None and larger is not None:
            staged = stage(step, self.pool.block_size, larger, self.pool.spare)
            return self.graphs.replay(staged, larger)[: step.wants]
        staged = stage(step, self.pool.block_size, shape, self.pool.spare)
        return self.run_numbers(staged.to(self.pool.device), shape)

    def run_numbers(self, staged: Tensor, shape: StepShape) -> Tensor:
        """The same of numbers on the device: (shape.rows, vocabulary)."""
        tensors = views(staged, shape)
        return run_model(self.weights, tensors, self.pool.store, self.dtype, self.pool.hidden)

    def sharing(self, weights: ModelWeights) -> DeviceProgram:
        """A program of other weights on the same pool."""
        return DeviceProgram(on_device(weights, self.pool.device), self.pool, self.dtype)

    def close(self) -> None:
        """Give up the graphs."""
        self.graphs = None


class Device:
    """A ``Runner`` (see ``step.py``) of operators on a device.

    Args:
        weights: made by :func:`compiled_weights.model_weights` with a :class:`DevicePacker`.
        kv_dtype: float32, bfloat16, float16; int8 or fp8 with a scale for each token and head; int4.
        dtype: of what products read.
        basis: of int4, calibrated, with the formats of layers; None: mean keys of fixed tokens.

    Raises:
        UsageError: ``kv_dtype`` is not one of these.
        ModelError: the model has latents or convolutions.
    """

    def __init__(
        self,
        weights: ModelWeights,
        *,
        blocks: int,
        block_size: int = 16,
        kv_dtype: str = "bfloat16",
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        basis: CacheBasis | None = None,
    ) -> None:
        if kv_dtype not in KV_DTYPES:
            raise UsageError(f"kv_dtype {kv_dtype!r}", hint=f"the device runner keeps {', '.join(KV_DTYPES)}")
        if weights.latent is not None or weights.cached < len(weights.layers):
            raise ModelError("the device runner has no latent attention (MLA) and no short convolutions")
        self.device, self.kv_dtype = torch.device(device), kv_dtype
        if self.device.type == "cuda":
            register_kernels(self.device)
        sizes = weights.kv_heads, weights.head_dim
        geometry = PoolGeometry(len(weights.layers), blocks + 1, block_size, *sizes)
        self.formats = () if basis is None else basis.formats
        store: Any = make_store(kv_dtype, geometry, self.device, self.formats)
        pool = DevicePool(store, self.device)
        self._program = DeviceProgram(on_device(weights, self.device), pool, dtype)
        windows = [layer.window for layer in weights.layers]
        self._windowed, self.window = any(windows), max(windows) if all(windows) else None
        self.vocabulary, self.context = weights.vocabulary, weights.context
        if kv_dtype == "int4":
            store.basis = (basis or CacheBasis.of_centers(self._key_centers())).to(self.device)
        self.activations = str(dtype).removeprefix("torch.")
        self.lora: CompiledLora[DeviceProgram] | None = None  # where weights are dense

    repeats = True
    """A failed step may be run again: the pool is the only state."""

    @property
    def block_size(self) -> int:
        """B."""
        return self._program.pool.block_size

    @property
    def capacity(self) -> int:
        """Blocks of the pool."""
        return self._program.pool.spare

    @property
    def weights(self) -> ModelWeights:
        """The model; another runner may share a part of it."""
        return self._program.weights

    @property
    def dtype(self) -> torch.dtype:
        """Of what products read."""
        return self._program.dtype

    @property
    def facts(self) -> dict[str, Any]:
        """For ``describe.py``; weights with the kernel that multiplies by them."""
        kinds = dict.fromkeys(_named(part, self.device) for part in products(self.weights))
        pool = self._program.pool
        return {
            "weights": " and ".join(kinds),
            "activations": self.activations,
            "threads": torch.get_num_threads() if self.device.type == "cpu" else 0,
            "kv_dtype": formats_label(self.kv_dtype, self.formats),
            "kv_bytes": pool.store.nbytes,
            "hidden_bytes": 0 if pool.hidden is None else pool.hidden.nbytes,
        }

    @property
    def adapters(self) -> Collection[str]:
        """Keys of the LoRA adapters that spans may have."""
        return () if self.lora is None else self.lora.adapters

    def run(self, step: StepInput) -> Tensor:
        """Copies blocks, writes keys and values; returns logits float32 (W, vocabulary), spans in order,
        on the device.

        Raises:
            IndexError: a token id is outside the vocabulary, before a GPU asserts it.
        """
        if step.tokens and not 0 <= min(step.tokens) <= max(step.tokens) < len(self.weights.embedding):
            raise IndexError(f"a step: token ids outside [0, {len(self.weights.embedding):,})")
        for span in step.spans:
            self._check(span)
        pool = self._program.pool
        pool.store.copy_(step.copies)
        if pool.hidden is not None:
            pool.hidden.copy(step.copies, self.block_size)
        with torch.no_grad():
            if not any(span.adapter for span in step.spans):
                return self._program.run(step)
            assert self.lora is not None, "spans with an adapter, and a runner without"
            logits = torch.empty(step.wants, self.vocabulary, device=self.device)
            for program, spans in self.lora.groups(step):
                wanted = torch.from_numpy(step.wanted_of(spans)).to(self.device)
                logits[wanted] = program.run(replace(step.part(spans), copies=()))
            return logits

    @property
    def planes(self) -> PlaneStore:
        """The store, whose blocks a prefix store reads and writes."""
        return self._program.pool.store

    def keep_hidden(self, layers: Sequence[int]) -> HiddenPool:
        """Keep hidden states of the tokens that are run from now on, with the kept states; see
        ``kv/hidden_pool.py``."""
        pool = self._program.pool
        if pool.hidden is None:
            slots = (self.capacity + 1) * self.block_size
            pool.hidden = HiddenPool.of(layers, slots, self.weights.hidden, self.device)
        elif not set(layers) <= set(pool.hidden.layers):
            pool.hidden.add(layers)
        for program in (self._program, *(self.lora.adapters.values() if self.lora else ())):
            if program.graphs is not None:
                program.graphs.forget()
        return pool.hidden

    def head_product(self, states: Tensor) -> Tensor:
        """Logits float32 (n, vocabulary) of states (n, hidden), before the cap."""
        head: Any = self.weights.head
        return multiply(head, states.to(self.dtype), torch.float32)

    def with_adapters(self, build: BuildWeights, infos: Mapping[str, Any], load: LoadTensor) -> None:
        """From now on it may have adapters; see :class:`CompiledLora`."""
        from attar.runtime.runner.compiled_lora import CompiledLora  # takes transformers with it

        self.lora = CompiledLora(self._program, build, infos, load)

    def of(self, weights: ModelWeights, blocks: int) -> Device:
        """Another runner of weights that are on the device, with a pool of its own."""
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device, "kv_dtype": self.kv_dtype}
        return Device(weights, blocks=blocks, block_size=self.block_size, **options)

    def _key_centers(self) -> Tensor:
        """The mean keys of each layer and head, float32 (2, layers, kv_heads, head_dim), of fixed tokens."""
        step = calibration_step(self.vocabulary, self.context, self.block_size, windowed=self._windowed)
        geometry = replace(self.planes.geometry, blocks=step.spans[-1].blocks[-1] + 2)
        store: Any = make_store("float32", geometry, self.device)
        with torch.no_grad():
            DeviceProgram(self.weights, DevicePool(store, self.device), self.dtype).run(step)
        slots = torch.from_numpy(step.slots(self.block_size)).long().to(self.device)
        keys = store.data[:, 0].flatten(1, 2).index_select(1, slots)
        return key_centers(keys.split([span.count for span in step.spans], dim=1))

    def fork(self, sequence: int, child: int) -> None:
        """No state per sequence."""

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Move the content of slots, (from, to), one pair after the other."""
        pool = self._program.pool
        for source, target in pairs:
            for plane in pool.store.planes:
                slots = plane.flatten(2, 3)
                slots[:, :, target] = slots[:, :, source]
        if pool.hidden is not None:
            pool.hidden.move(pairs)

    def forget(self, sequence: int) -> None:
        """No state per sequence."""

    def _check(self, span: TokenSpan) -> None:
        assert self.context is None or span.stop <= self.context, f"token {span.stop} of {self.context}"
        assert span.offset == span.start or not self._windowed, "an evicted cache and a sliding window"


def device_dtype(name: str, device: torch.device) -> torch.dtype:
    """What products read, from a setting; auto: bfloat16, on a CPU float32."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    named: torch.dtype = getattr(torch, name)
    return named


def pool_token_bytes(weights: ModelWeights, kv_dtype: str, formats: Sequence[str] = ()) -> int:
    """Bytes of a token's keys and values in all layers; see :func:`make_store`."""
    geometry = PoolGeometry(len(weights.layers), 1, 1, weights.kv_heads, weights.head_dim)
    return make_store(kv_dtype, geometry, torch.device("meta"), formats).nbytes


def products(weights: Any) -> list[DeviceWeight]:
    """All that the products of a model multiply by."""
    return [*(part for layer in weights.layers for part in layer.products), weights.head]


def _named(weight: DeviceWeight, device: torch.device) -> str:
    """A weight's kind, and what multiplies by it."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    kernel = weight.kernel or product_kernel(weight.bits, capability, triton=has_triton(device))
    return f"{weight.label} by {kernel}"


def has_triton(device: torch.device) -> bool:
    """Whether attar's Triton kernels run on a device."""
    try:
        from attar.kernels import triton  # type: ignore[attr-defined, unused-ignore]
    except ImportError:
        return False
    return bool(triton.available(device))


@functools.cache
def register_kernels(device: torch.device) -> None:
    """Have the operators on CUDA tensors run Triton's kernels, or without it torch's own."""
    if has_triton(device):
        from attar.kernels import triton  # type: ignore[attr-defined, unused-ignore]

        triton.register()
    else:
        native.register()


def device_runner(
    config: Any,
    tensors: Any,
    *,
    weights: Kind = "bf16",
    group: int = 32,
    context: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    **settings: Any,
) -> Device:
    """A runner of a checkpoint.

    Args:
        config: of transformers.
        tensors: a dict of tensors (a ``state_dict``), or a checkpoint: what has ``tensors`` and ``load``.
        weights: bf16 (dense weights stay, in ``dtype``), int8 or int4.
        group: inputs that share a scale.
        context: most positions; None: the config's.
        dtype: of dense weights and of what products read.
        settings: of :class:`Device`.

    Raises:
        ModelError: the step does not support the model.
    """
    names, load = (
        (tensors, tensors.__getitem__) if isinstance(tensors, dict) else (tensors.tensors, tensors.load)
    )
    packer = DevicePacker(torch.device(device), dtype, None if weights == "bf16" else weights, group)
    model = model_weights(config, names, load, context=context, embedding=dtype, packer=packer)
    return Device(model, dtype=dtype, device=device, **settings)
