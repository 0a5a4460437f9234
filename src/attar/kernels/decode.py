"""A step of a Llama-shaped model in one call: the weights and the KV cache's pool of blocks.

A layer is  x += post(out(attention(norm(x)))),  x += post(down(act(gate(norm(x))) up(norm(x))))  with
RMS norms, grouped-query attention and rotary positions; the norms `post` are Gemma's, absent elsewhere. In
place of the MLP a layer may have a mixture of experts (experts.py), all layers latents (latents.py), and some
a recurrence in the place of attention or beside it (recurrences.py). A layer may be one of these alone.
csrc/decode/step.h computes it. Configs and tensor names belong to runner/compiled.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from attar.errors import ModelError, UsageError
from attar.kernels import structures
from attar.kernels.experts import MixtureWeights, check_mixture, mixture_struct
from attar.kernels.latents import LatentShape, LatentWeights, check_latents, latent_struct
from attar.kernels.memory import huge_pages
from attar.kernels.packed import PackedWeight
from attar.kernels.product import default_threads
from attar.kernels.recurrences import RecurrenceWeights, check_recurrence, recurrence_struct
from attar.kernels.structures import StepTokens, batch_struct

TILE = 16  # keys of a block in one vector
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2, "relu": 3}
UNGATED = ("relu",)  # of up times up itself: the squared relu
KV_BITS = {"int4": 4, "int8": 8, "bfloat16": 16, "float16": 16, "float32": 32}
KINDS = {"int8": 1, "bfloat16": 2, "float16": 3, "float32": 4, "int4": 5}  # of KV cache and embedding


@dataclass(frozen=True)
class ConvolutionWeights:
    """A short causal convolution of each channel, in the place of attention: alone (LFM2), where the channels
    are the hidden ones, or before a recurrence.

    Attributes:
        kernel: float32 (width, channels), what the oldest input is multiplied by first.
        bias: float32 (channels,).
    """

    kernel: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """A layer: attention or what is in its place, and an MLP or a mixture; one of both may be absent.
    Norms are float32 (hidden,) or, of queries and keys, (head_dim,), over all heads together with
    ``wide_norms``, and of latents their rank; Gemma's + 1 is included.

    Attributes:
        qkv: rows of queries, keys and values, head by head; with latents: of queries or of their latents, of
            keys' latents, of the rotated key; of a convolution: B, C and x of csrc/decode/step.h. Behind the
            values there may be gates, which multiply the outputs of heads by their sigmoids (Qwen3-Next).
            None where the layer neither attends nor has a convolution alone.
        out: attention's output projection; None likewise.
        gate_up: rows of the gate, then rows of up; of up alone with an activation of UNGATED.
        down: the MLP's output projection.
        mixture: of experts, instead of the MLP.
        rotary: float32 (context, rotated dimensions), cosines of one half, then sines; None: no positions.
        window: keys that a token sees, its own included; 0: all.
        sinks: float32 (heads,), a score of each head that has no value (gpt-oss).
        latents: of attention with latents (MLA); the model has their shape.
        convolution: in the place of attention, or before the recurrence.
        recurrence: behind the convolution, beside attention where there is ``qkv``.
    """

    before_attention: Tensor | None = None
    qkv: PackedWeight | None = None
    out: PackedWeight | None = None
    before_mlp: Tensor | None = None
    gate_up: PackedWeight | None = None
    down: PackedWeight | None = None
    mixture: MixtureWeights | None = None
    rotary: Tensor | None = None
    window: int = 0
    after_attention: Tensor | None = None
    after_mlp: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    sinks: Tensor | None = None
    latents: LatentWeights | None = None
    convolution: ConvolutionWeights | None = None
    recurrence: RecurrenceWeights | None = None

    @property
    def attends(self) -> bool:
        """Whether it has keys and values."""
        return self.qkv is not None and (self.convolution is None or self.recurrence is not None)

    @property
    def products(self) -> list[PackedWeight]:
        """The layer's packed weights, the experts' included."""
        weights = [getattr(self, name) for name in structures.PRODUCTS]
        parts = [part.products for part in (self.mixture, self.latents, self.recurrence) if part is not None]
        return [*filter(None, weights), *(packed for products in parts for packed in products)]

    @property
    def read_bytes(self) -> int:
        """Bytes of packed weights that a step of one token reads."""
        weights: list[PackedWeight | None] = [self.qkv, self.out, self.gate_up, self.down]
        weights += self.recurrence.products if self.recurrence else []
        parts = [part.read_bytes for part in (self.mixture, self.latents) if part is not None]
        return sum(packed.nbytes for packed in weights if packed is not None) + sum(parts)


@dataclass(frozen=True, kw_only=True)
class ModelWeights:
    """A model.

    Attributes:
        embedding: (vocabulary, hidden), float16, bfloat16 or float32.
        norm: float32 (hidden,), before the head.
        head: (vocabulary, hidden).
        layers: of one shape; the kinds of their weights may differ.
        kv_heads: key and value heads; divides heads.
        head_dim: even.
        scale: multiplies queries.
        soft_cap: of attention scores; 0: none.
        final_soft_cap: of logits; 0: none.
        embedding_scale: multiplies the embedding's rows.
        activation: of the gate, a key of ACTIVATIONS; of UNGATED there is no gate.
        mask: float32 (hidden,), what a token of id -1 begins as; None: there are none.
        wide_norms: queries and keys are normed over all heads together (OLMoE).
        latent: of attention with latents, in every layer; there is one key head.
    """

    embedding: Tensor
    norm: Tensor
    head: PackedWeight
    layers: tuple[LayerWeights, ...]
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float
    soft_cap: float = 0.0
    final_soft_cap: float = 0.0
    embedding_scale: float = 1.0
    activation: str = "silu"
    mask: Tensor | None = None
    wide_norms: bool = False
    latent: LatentShape | None = None

    @property
    def hidden(self) -> int:
        """Columns of the residual stream."""
        return len(self.norm)

    @property
    def vocabulary(self) -> int:
        """Columns of the logits."""
        return self.head.rows

    @property
    def rotary(self) -> int:
        """Dimensions of a head that are rotated; 0: none."""
        return next((layer.rotary.shape[1] for layer in self.layers if layer.rotary is not None), 0)

    @property
    def cached(self) -> int:
        """Layers with keys and values."""
        return sum(layer.attends for layer in self.layers)

    @property
    def window_shape(self) -> tuple[int, int, int]:
        """Inputs of convolutions that a sequence carries: (width - 1, layers, numbers); zeros without."""
        widths = {len(layer.convolution.kernel) for layer in self.layers if layer.convolution is not None}
        assert len(widths) < 2, f"convolutions of {sorted(widths)} inputs"
        shapes = {layer.recurrence.shape for layer in self.layers if layer.recurrence is not None}
        assert len(shapes) < 2, f"recurrences of {len(shapes)} shapes"
        carried = next((shape.carried for shape in shapes), self.hidden)
        count = sum(layer.convolution is not None for layer in self.layers)
        return max(widths, default=1) - 1, count, carried

    @property
    def state_numbers(self) -> int:
        """Of the states of recurrences that a sequence carries."""
        return sum(layer.recurrence.shape.numbers for layer in self.layers if layer.recurrence is not None)

    @property
    def context(self) -> int | None:
        """Positions of the rotary tables; None: no limit."""
        return min((len(layer.rotary) for layer in self.layers if layer.rotary is not None), default=None)

    @property
    def nbytes(self) -> int:
        """Bytes of packed weights."""
        products = [packed for layer in self.layers for packed in layer.products]
        return sum(packed.nbytes for packed in (*products, self.head))

    @property
    def read_bytes(self) -> int:
        """Bytes of packed weights that a step of one token reads: of experts the active ones."""
        return sum(layer.read_bytes for layer in self.layers) + self.head.nbytes


class Program:
    """A model with its KV cache and threads. Close it after use; garbage collection closes it too.

    Args:
        blocks: in the pool.
        block_size: B, a multiple of 16.
        threads: None: ``default_threads()``.
        bits: of activations, 8 or 16: see :meth:`attar.kernels.product.ThreadPool.multiply`.
        kv_dtype: of keys and values, a key of KV_BITS; int8 has a scale per token and head, int4 a scale and
            a minimum.
        formats: of each layer with keys and values, where layers differ: int4 or int8, with kv_dtype int4.
        rotation: of int4, and of no other: H and the basis of csrc/decode/kv_codes.h.
        threads_of: a program whose threads run this one too, never both at a time; None: its own threads.
        pool: of another program of the same shapes, which both use; None: its own.

    Raises:
        ModelError: the library does not support these shapes.
        UsageError: B is not a multiple of 16, or there is no compiled library.
    """

    def __init__(
        self,
        weights: ModelWeights,
        blocks: int,
        block_size: int = TILE,
        *,
        threads: int | None = None,
        bits: int = 16,
        kv_dtype: str = "bfloat16",
        formats: Sequence[str] = (),
        rotation: tuple[Tensor, Tensor] | None = None,
        threads_of: Program | None = None,
        pool: Tensor | None = None,
    ) -> None:
        _check(weights, block_size)
        assert (rotation is not None) == (kv_dtype == "int4"), f"a rotation of {kv_dtype}"
        self.rotation = rotation
        self.weights, self.blocks, self.block_size = weights, blocks, block_size
        self.threads: int = threads or default_threads() if threads_of is None else threads_of.threads
        self.bits, self.kv_dtype = bits, kv_dtype
        self.formats = tuple(formats) or (kv_dtype,) * weights.cached
        assert len(self.formats) == weights.cached, f"{len(formats)} formats of {weights.cached} layers"
        nbytes = pool_bytes(weights, blocks, block_size, kv_dtype=kv_dtype, formats=formats)
        assert pool is None or len(pool) >= nbytes, "a pool of another shape"
        self.pool = huge_pages(max(nbytes, 1)) if pool is None else pool
        self._parts = [_parts(layer) for layer in weights.layers]
        layers = map(_layer, weights.layers, self._parts, *_indices(weights))
        self._layers = (structures.LayerStruct * len(weights.layers))(*layers)
        self._caches = (structures.CacheStruct * weights.cached)(*self._cache_structs())
        self._model = self._structure(bits)
        self._handle: int | None = None
        self._library = structures.library()
        if self._library is None:
            raise UsageError("there is no compiled kernel", hint="install a C++ compiler")
        model = ctypes.byref(self._model)
        if threads_of is None:
            self._handle = self._library.attar_runner(model, self.threads)
        else:
            self._handle = self._library.attar_runner_with(model, threads_of._handle)
        structures.raise_for(int(self._handle is None), "the compiled runner")

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.close()

    def close(self) -> None:
        """End the threads; ``run`` is not possible afterwards."""
        if self._handle is not None and self._library is not None:
            self._library.attar_runner_free(self._handle)
        self._handle = None

    def sharing(self, weights: ModelWeights) -> Program:
        """A program of other weights of the same shapes, on this one's threads, pool and hidden states."""
        options: dict[str, Any] = {"bits": self.bits, "kv_dtype": self.kv_dtype, "pool": self.pool}
        options |= {"rotation": self.rotation, "formats": self.formats}
        program = Program(weights, self.blocks, self.block_size, threads_of=self, **options)
        program.share_hidden(self)
        return program

    def run(self, tokens: StepTokens) -> Tensor:
        """Copy blocks, write keys and values, attend: logits float32 (len(rows), vocabulary). ``tokens`` must
        have states and inputs of the model's shape, or none.

        Raises:
            MemoryError: no memory for intermediate results. The cache may be written in part; the same step
                may be run again.
            IndexError: a token id, position, slot, block or row is out of bounds; nothing is done.
        """
        assert self._library is not None and self._handle is not None, "run after close"
        logits = torch.empty(len(tokens.rows), self.weights.vocabulary)
        self._check_carried(tokens)
        assert tokens.inputs is not None or not len(tokens.keep), "kept inputs without room"
        batch, arrays = batch_struct(tokens, logits)
        structures.raise_for(self._library.attar_run(self._handle, ctypes.byref(batch)), "a step")
        del arrays
        return logits

    def _check_carried(self, tokens: StepTokens) -> None:
        """Shapes of what sequences carry."""
        width, *inputs = self.weights.window_shape
        numbers = (self.weights.state_numbers,)
        tensors = [(tokens.inputs, (len(tokens.keep), *inputs))]
        for part in tokens.carried:
            tensors += [(part.history, (width + part.again, *inputs)), (part.states, numbers)]
            tensors += [(to, numbers) for _, to in part.saves]
        for tensor, shape in tensors:
            assert tensor is None or (tensor.shape == shape and tensor.is_contiguous()), (
                f"{tuple(tensor.shape)} of states, not {shape}"
            )

    def keep_hidden(self, layers: Sequence[int], pool: Tensor) -> None:
        """From now on every step writes hidden states of its tokens to their slots.

        Args:
            layers: ascending; n: the residual stream after layer n; the number of layers: behind the norm.
            pool: bfloat16 (slots, len(layers), hidden), filled by the steps.
        """
        shape = (self.blocks * self.block_size, len(layers), self.weights.hidden)
        assert pool.shape == shape and pool.dtype == torch.bfloat16 and pool.is_contiguous(), "another pool"
        assert list(layers) == sorted(layers) and layers[-1] <= len(self.weights.layers), f"layers {layers}"
        self._hidden = np.asarray(layers, dtype=np.int64), pool
        self._model.hidden_layer, self._model.hidden_pool = self._hidden[0].ctypes.data, pool.data_ptr()
        self._model.hidden_states = len(layers)

    def share_hidden(self, other: Program) -> None:
        """Write hidden states where another program of the same shapes does, if it does."""
        if other._model.hidden_states:
            self.keep_hidden(other._hidden[0].tolist(), other._hidden[1])

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy keys, values and hidden states between slots, (from, to), one after the other.

        Raises:
            IndexError: a slot is none of the pool.
        """
        assert self._library is not None, "move without a library"
        array = np.asarray(pairs, dtype=np.int64).reshape(-1, 2)
        code = self._library.attar_copy_slots(ctypes.byref(self._model), array.ctypes.data, len(array))
        structures.raise_for(code, "a move of slots")

    def block(self, index: int) -> list[Tensor]:
        """A block of the pool: of each layer a view, uint8 (bytes,)."""
        return [layer.view(self.blocks, -1)[index] for layer in self._layer_pools()]

    def _layer_pools(self) -> list[Tensor]:
        """The bytes of each layer in the pool."""
        slots = self.blocks * self.block_size
        sizes = [slots * _token_bytes(self.weights, name) for name in self.formats]
        return list(self.pool[: sum(sizes)].split(sizes)) if sizes else []

    def keys(self, slots: NDArray[np.int64]) -> Tensor:
        """Keys of slots, float32 (layers, len(slots), kv_heads, head_dim), of a float32 pool."""
        assert self.kv_dtype == "float32", f"keys of {self.kv_dtype}"
        w = self.weights
        shape = (w.cached, self.blocks, w.kv_heads, 2, self.block_size // TILE, -1, TILE)
        halves = self.pool[: pool_bytes(w, self.blocks, self.block_size, kv_dtype="float32")].view(
            torch.float32
        )
        tiles = halves.view(shape)[:, :, :, 0].permute(0, 1, 3, 5, 2, 4).flatten(1, 3)
        return tiles[:, torch.from_numpy(slots), :, : w.head_dim]

    def _cache_structs(self) -> Iterator[structures.CacheStruct]:
        """Of each layer with keys and values. Of int4 H (head_dim, head_dim) and the basis (layers, kv_heads,
        4, head_dim), float32, are padded to whole vectors."""
        w, n = self.weights, self.weights.head_dim
        if self.rotation is not None:
            matrix, basis = self.rotation
            assert basis.shape == (w.cached, w.kv_heads, 4, n) and matrix.shape == (n, n), "another basis"
            self._padded = [pad(x, (0, -n % (2 * TILE))).contiguous() for x in (matrix, basis)]
        latent = 0 if w.latent is None else -(-(w.latent.rank + w.rotary) // TILE) * TILE
        sizes = w.kv_heads, n, self.block_size, self.blocks, latent
        for layer, (name, pool) in enumerate(zip(self.formats, self._layer_pools(), strict=True)):
            cache = structures.CacheStruct(*sizes, pool=pool.data_ptr(), kind=KINDS[name])
            if name == "int4":
                cache.rotation, cache.basis = self._padded[0].data_ptr(), self._padded[1][layer].data_ptr()
            yield cache

    def _structure(self, bits: int) -> structures.ModelStruct:
        w = self.weights
        model = structures.ModelStruct(
            layers=len(w.layers),
            block_size=self.block_size,
            blocks=self.blocks,
            embeddings=len(w.embedding),
            context=w.context or 0,
            activation=ACTIVATIONS[w.activation],
            wide_norms=w.wide_norms,
            bits=bits,
            embedding_kind=KINDS[str(w.embedding.dtype).removeprefix("torch.")],
            embedding=w.embedding.data_ptr(),
            mask=structures.address(w.mask),
            norm=w.norm.data_ptr(),
            head=structures.linear_struct(w.head),
            layer=ctypes.cast(self._layers, ctypes.c_void_p),
            cache=ctypes.cast(self._caches, ctypes.c_void_p),
        )
        for name in (*structures.SIZES, *structures.FLOATS):
            setattr(model, name, getattr(w, name))
        width, model.stateful, model.carried = w.window_shape
        model.cached, model.width = w.cached, width + 1
        if w.latent is not None:
            for name in structures.LATENT_SIZES:
                setattr(model, name, getattr(w.latent, name))
            model.latent_eps, model.interleaved = w.latent.eps, w.latent.interleaved
        return model


def pool_bytes(
    weights: ModelWeights,
    blocks: int,
    block_size: int,
    *,
    kv_dtype: str = "bfloat16",
    formats: Sequence[str] = (),
) -> int:
    """Bytes of a pool; arguments as of :class:`Program`."""
    names = formats or (kv_dtype,) * weights.cached
    return blocks * block_size * sum(_token_bytes(weights, name) for name in names)


def _token_bytes(weights: ModelWeights, kv_dtype: str) -> int:
    """Bytes of a token in a layer: head_dim rounded up to a multiple of 16, of int4 32, and 4 bytes for the
    scale of int8 or the scale and minimum of each token and head. Latents are one row for each token."""
    four = kv_dtype == "int4"
    unit = 2 * TILE if four else TILE
    latent = weights.latent
    size, rows = weights.head_dim, 2 * weights.kv_heads
    if latent is not None:
        size, rows = latent.rank + weights.rotary, 1
    per_token = -(-size // unit) * unit * KV_BITS[kv_dtype] // 8 + (4 if four or kv_dtype == "int8" else 0)
    return rows * per_token


def _parts(weights: LayerWeights) -> dict[str, tuple[Any, ...]]:
    """What a layer's structure has by address, with what must outlive it."""
    parts: dict[str, tuple[Any, ...] | None] = {
        "mixture": mixture_struct(weights.mixture),
        "latents": latent_struct(weights.latents),
    }
    parts["recurrence"] = recurrence_struct(weights.recurrence)
    return {name: part for name, part in parts.items() if part is not None}


def _indices(weights: ModelWeights) -> tuple[Iterable[int], Iterable[int]]:
    """Of each layer among those with keys and values, and among those with a convolution."""
    attends = (layer.attends for layer in weights.layers)
    carries = (layer.convolution is not None for layer in weights.layers)
    return accumulate(attends, initial=0), accumulate(carries, initial=0)


def _layer(
    weights: LayerWeights, parts: dict[str, tuple[Any, ...]], index: int, state_index: int
) -> structures.LayerStruct:
    layer = structures.LayerStruct(window=weights.window, index=index, state_index=state_index)
    if weights.convolution is not None:
        layer.kernel = structures.address(weights.convolution.kernel)
        layer.conv_bias = structures.address(weights.convolution.bias)
    for name in (*structures.NORMS, "rotary"):
        setattr(layer, name, structures.address(getattr(weights, name)))
    for name in structures.PRODUCTS:
        if getattr(weights, name) is not None:
            setattr(layer, name, structures.linear_struct(getattr(weights, name)))
    for name, part in parts.items():
        setattr(layer, name, ctypes.addressof(part[0]))
    return layer


def _check(weights: ModelWeights, block_size: int) -> None:
    """What the library does not check.

    Raises:
        ModelError: a tensor has another shape than the model needs.
        UsageError: B is not a multiple of 16.
    """
    if block_size % TILE or block_size < TILE:
        raise UsageError(f"blocks of {block_size} tokens", hint="the compiled runner takes multiples of 16")
    if weights.head_dim % 2 or weights.heads % weights.kv_heads:
        raise ModelError(f"{weights.heads} / {weights.kv_heads} heads of {weights.head_dim} dimensions")
    hidden, turned = weights.hidden, weights.rotary
    if weights.latent is not None and turned + weights.latent.nope != weights.head_dim:
        raise ModelError(
            f"heads of {weights.head_dim} dimensions, {turned} and {weights.latent.nope} of latents"
        )
    if turned % 2 or turned > weights.head_dim or weights.head.columns != hidden:
        raise ModelError(f"{turned} rotated dimensions, and a head of {weights.head.columns} inputs")
    _check_tensor("embedding", weights.embedding, (len(weights.embedding), hidden), weights.embedding.dtype)
    _check_tensor("norm", weights.norm, (hidden,))
    _check_tensor("mask", weights.mask, (hidden,))
    for layer in weights.layers:
        _check_products(weights, layer)
        assert not layer.attends or (layer.rotary is None) == (turned == 0), "some layers have no positions"
        for name, shape in _layer_shapes(weights, layer).items():
            _check_tensor(name, getattr(layer, name), shape)


def _layer_shapes(weights: ModelWeights, layer: LayerWeights) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's tensors, whether it has them or not."""
    wide, dim = weights.wide_norms, weights.head_dim
    context = 0 if layer.rotary is None else len(layer.rotary)
    queries, keys = weights.heads * dim if wide else dim, weights.kv_heads * dim if wide else dim
    if weights.latent is not None:
        queries, keys = _query_rank(weights, layer), weights.latent.rank
    names = ("before_attention", "after_attention", "before_mlp", "after_mlp")
    return dict.fromkeys(names, (weights.hidden,)) | {
        "query_norm": (queries,),
        "key_norm": (keys,),
        "sinks": (weights.heads,),
        "rotary": (context, weights.rotary),
    }


def _query_rank(weights: ModelWeights, layer: LayerWeights) -> int:
    """Rows of the first product that are queries or their latents."""
    assert weights.latent is not None and layer.qkv is not None, "a model without latents"
    return layer.qkv.rows - weights.latent.rank - weights.rotary


def _check_tensor(
    name: str, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> None:
    if tensor is None:
        return
    assert tensor.is_contiguous() and tensor.dtype == dtype, f"{name}: not a contiguous {dtype}"
    if tensor.shape != shape:
        raise ModelError(f"{name} is {tuple(tensor.shape)}, not {shape}")


def _check_products(weights: ModelWeights, layer: LayerWeights) -> None:
    """Rows and columns of a layer's products."""
    hidden, heads = weights.hidden, weights.heads * weights.head_dim
    ungated = weights.activation in UNGATED
    rows = heads + 2 * weights.kv_heads * weights.head_dim
    expected: dict[str, tuple[int, int]] = {}
    if layer.qkv is not None:
        gated = layer.qkv.rows == rows + heads  # by the sigmoids of further rows
        expected = {"qkv": (rows + heads * gated, hidden), "out": (hidden, heads)}
    if layer.convolution is not None:
        channels = hidden
        if layer.recurrence is not None:
            check_recurrence(layer.recurrence, hidden)
            channels = layer.recurrence.shape.channels
        else:
            expected = {"qkv": (3 * hidden, hidden), "out": (hidden, hidden)}
        width, _, _ = weights.window_shape
        _check_tensor("kernel", layer.convolution.kernel, (width + 1, channels))
        _check_tensor("bias of a convolution", layer.convolution.bias, (channels,))
        if layer.latents is not None or layer.after_attention is not None:
            raise ModelError("a convolution with latents, or a norm after it")
    elif layer.attends:
        assert (layer.latents is None) == (weights.latent is None), "some layers have latents, some have none"
    if weights.latent is not None and layer.latents is not None:
        assert layer.qkv is not None, "latents without a product"
        if layer.window or layer.sinks is not None or weights.soft_cap:
            raise ModelError("latents with a window, sinks or a soft cap")
        rank = _query_rank(weights, layer)
        check_latents(
            layer.latents, weights.latent, heads=weights.heads, head_dim=weights.head_dim, query_rank=rank
        )
        expected = {"qkv": (layer.qkv.rows, hidden), "out": (hidden, weights.heads * weights.latent.wide)}
    mixes = layer.qkv is not None or layer.recurrence is not None
    assert mixes == (layer.before_attention is not None), "half of a layer"
    if layer.mixture is None and layer.down is None:
        assert layer.gate_up is None and layer.before_mlp is None, "half of an MLP"
    elif layer.mixture is None:
        assert layer.gate_up is not None and layer.down is not None, "half of an MLP"
        wide = layer.down.columns
        expected |= {"gate_up": (wide if ungated else 2 * wide, hidden), "down": (hidden, wide)}
    else:
        assert layer.gate_up is None and layer.down is None, "an MLP beside a mixture"
        if layer.after_mlp is not None:
            raise ModelError("a norm after a mixture of experts")
        check_mixture(layer.mixture, hidden, ungated=ungated)
    for name, shape in expected.items():
        packed = getattr(layer, name)
        if (packed.rows, packed.columns) != shape:
            raise ModelError(f"a layer's {name} is {packed.rows} x {packed.columns}, not {shape}")
