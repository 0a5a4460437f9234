"""A whole step of a Llama-shaped model in one call: weights and a pool of blocks held for the library.

A layer is  x += post(out(attention(norm(x)))),  x += post(down(act(gate(norm(x))) up(norm(x))))  with
root-mean-square norms, grouped heads and rotary positions; the norms `post` are those of Gemma, else nothing.
csrc/decode/step.h goes through it; kernels know nothing of configs or names of tensors (runner/compiled.py
does).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from attar.errors import ModelError, UsageError
from attar.kernels import structures
from attar.kernels.batch import Tokens, structure
from attar.kernels.memory import huge
from attar.kernels.packed import Packed
from attar.kernels.product import default_threads

TILE = 16  # places of a block that a vector of keys holds
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
KV_BYTES = {"int8": 1, "bfloat16": 2, "float16": 2, "float32": 4}
KINDS = {"int8": 1, "bfloat16": 2, "float16": 3, "float32": 4}  # of keys and values, and of the embedding


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """A layer. Norms are float32 (hidden,) or, of queries and keys, (head_dim,); Gemma's 1 is added already.

    Attributes:
        qkv: rows of queries, keys and values, head after head.
        out: of attention.
        gate_up: rows of the gate, then as many.
        down: of the feed-forward part.
        rotary: float32 (context, rotated dimensions), cosines of one half, then sines; None: no positions.
        window: keys that a token sees, itself among them; 0: all.
    """

    before_attention: Tensor
    before_mlp: Tensor
    qkv: Packed
    out: Packed
    gate_up: Packed
    down: Packed
    rotary: Tensor | None = None
    window: int = 0
    after_attention: Tensor | None = None
    after_mlp: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class ModelWeights:
    """A model.

    Attributes:
        embedding: (vocabulary, hidden), float16, bfloat16 or float32.
        norm: float32 (hidden,), before the head.
        head: (vocabulary, hidden).
        layers: of one shape; their weights may be of different kinds.
        heads: of queries.
        kv_heads: of keys and values; divides heads.
        head_dim: of each, even.
        eps: of the norms.
        scale: of queries before the softmax.
        soft_cap: of attention's scores; 0: none.
        final_soft_cap: of logits; 0: none.
        embedding_scale: of the embedding's rows.
        activation: of the gate, a key of ACTIVATIONS.
    """

    embedding: Tensor
    norm: Tensor
    head: Packed
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

    @property
    def hidden(self) -> int:
        """Columns of the residual stream."""
        return len(self.norm)

    @property
    def vocabulary(self) -> int:
        """Columns of the logits."""
        return self.head.rows

    @property
    def intermediate(self) -> int:
        """Columns inside the feed-forward part."""
        return self.layers[0].down.columns

    @property
    def rotary(self) -> int:
        """Dimensions of a head that are turned; 0: none."""
        found = self.layers[0].rotary
        return 0 if found is None else found.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of packed weights that a token reads."""
        products = [getattr(layer, name) for layer in self.layers for name in structures.PRODUCTS]
        return sum(packed.nbytes for packed in (*products, self.head))


class Program:
    """A model ready to run. Use ``close`` when done; it also closes itself.

    Args:
        weights: the model.
        blocks: of the pool.
        block_size: B, a multiple of 16.
        threads: None: as ``default_threads`` says.
        bits: of what products take, 8 or 16: see :meth:`attar.kernels.product.Team.multiply`.
        kv_dtype: of keys and values, a key of KV_BYTES; int8 has a scale for each token and head.

    Raises:
        ModelError: the shapes are not ones that the library runs.
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
    ) -> None:
        _check(weights, block_size)
        self.weights, self.blocks, self.block_size = weights, blocks, block_size
        self.threads, self.bits, self.kv_dtype = threads or default_threads(), bits, kv_dtype
        self.pool = huge(pool_bytes(weights, blocks, block_size, kv_dtype=kv_dtype))
        self._layers = (structures.Layer * len(weights.layers))(*map(_layer, weights.layers))
        self._model = self._structure(bits, kv_dtype)
        self._handle: int | None = None
        self._library = structures.library()
        if self._library is None:
            raise UsageError("there is no compiled kernel", hint="install a C++ compiler")
        self._handle = self._library.attar_runner(ctypes.byref(self._model), self.threads)
        structures.raise_for(int(self._handle is None), "the compiled runner")

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.close()

    def close(self) -> None:
        """End the threads. Nothing can be run afterwards."""
        if self._handle is not None and self._library is not None:
            self._library.attar_runner_free(self._handle)
        self._handle = None

    def run(self, tokens: Tokens) -> Tensor:
        """Copy blocks, write keys and values, attend: logits float32 (len(rows), vocabulary).

        Raises:
            MemoryError: there is no room for what lies between the layers; what the step was to write may be
                written in part, and it may be run again.
        """
        assert self._library is not None and self._handle is not None, "run after close"
        logits = torch.empty(len(tokens.rows), self.weights.vocabulary)
        batch, kept = structure(tokens, logits)
        structures.raise_for(self._library.attar_run(self._handle, ctypes.byref(batch)), "a step")
        del kept
        return logits

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Keys and values of slots go to other slots, (from, to), one after the other, in every layer."""
        assert self._library is not None, "move without a library"
        array = np.asarray(pairs, dtype=np.int64)
        self._library.attar_move(ctypes.byref(self._model), array.ctypes.data, len(array))

    def _structure(self, bits: int, kv_dtype: str) -> structures.Model:
        w = self.weights
        found = structures.Model(
            layers=len(w.layers),
            block_size=self.block_size,
            blocks=self.blocks,
            activation=ACTIVATIONS[w.activation],
            bits=bits,
            pool_kind=KINDS[kv_dtype],
            embedding_kind=KINDS[str(w.embedding.dtype).removeprefix("torch.")],
            embedding=w.embedding.data_ptr(),
            norm=w.norm.data_ptr(),
            head=structures.linear(w.head),
            layer=ctypes.cast(self._layers, ctypes.c_void_p),
            pool=self.pool.data_ptr(),
        )
        for name in (*structures.SIZES, *structures.FLOATS):
            setattr(found, name, getattr(w, name))
        return found


def pool_bytes(weights: ModelWeights, blocks: int, block_size: int, *, kv_dtype: str = "bfloat16") -> int:
    """Bytes of a pool: head_dim rounded up to a multiple of 16, and 4 bytes for each scale of int8."""
    padded = -(-weights.head_dim // TILE) * TILE
    each = padded * KV_BYTES[kv_dtype] + (4 if kv_dtype == "int8" else 0)
    return len(weights.layers) * 2 * blocks * block_size * weights.kv_heads * each


def _layer(weights: LayerWeights) -> structures.Layer:
    found = structures.Layer(window=weights.window)
    for name in (*structures.NORMS, "rotary"):
        setattr(found, name, structures.address(getattr(weights, name)))
    for name in structures.PRODUCTS:
        setattr(found, name, structures.linear(getattr(weights, name)))
    return found


def _check(weights: ModelWeights, block_size: int) -> None:
    """What the library takes for granted."""
    if block_size % TILE or block_size < TILE:
        raise UsageError(f"blocks of {block_size} tokens", hint="the compiled runner takes multiples of 16")
    if weights.head_dim % 2 or weights.heads % weights.kv_heads:
        raise ModelError(f"{weights.heads} / {weights.kv_heads} heads of {weights.head_dim} dimensions")
    tensors = [weights.embedding, weights.norm]
    for layer in weights.layers:
        _check_shapes(weights, layer)
        assert (layer.rotary is None) == (weights.rotary == 0), "some layers have positions, some have none"
        values = [getattr(layer, each.name) for each in fields(layer)]
        tensors += [value for value in values if isinstance(value, Tensor)]
    assert all(tensor.is_contiguous() for tensor in tensors), "a weight is not contiguous"
    assert all(tensor.dtype == torch.float32 for tensor in tensors[1:]), "a norm is not float32"


def _check_shapes(weights: ModelWeights, layer: LayerWeights) -> None:
    """Rows and columns of a layer's products, which the library takes for granted."""
    hidden, wide, heads = weights.hidden, weights.intermediate, weights.heads * weights.head_dim
    expected = {
        "qkv": (heads + 2 * weights.kv_heads * weights.head_dim, hidden),
        "out": (hidden, heads),
        "gate_up": (2 * wide, hidden),
        "down": (hidden, wide),
    }
    for name in structures.PRODUCTS:
        found = getattr(layer, name)
        if (found.rows, found.columns) != expected[name]:
            raise ModelError(f"a layer's {name} is {found.rows} x {found.columns}, not {expected[name]}")
