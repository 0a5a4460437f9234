"""Runs transformers' own modules: any causal language model whose attention goes through the interface.

It runs every architecture that the compiled runner (``compiled.py``) does not, and is the reference for the
compiled runner's tests. A step runs as one row of tokens with explicit positions and ``use_cache=False``;
attention is :mod:`attar.runtime.runner.attention` on the runner's own pool.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attar.kernels.structures import library
from attar.runtime.kv.blocks import Packing
from attar.runtime.kv.compose import FeatureRequests, check_together, evicting, store_feature
from attar.runtime.kv.evict import H2O, Eviction, Reread, SnapKV, Streaming
from attar.runtime.kv.hidden_pool import HiddenPool
from attar.runtime.kv.pool import KVPool
from attar.runtime.kv.state_snapshots import BYTES, StateSnapshots
from attar.runtime.kv.state_store import StateStore
from attar.runtime.kv.store import PoolGeometry
from attar.runtime.kv.store.mixed import MixedStore
from attar.runtime.kv.store.planes import PlaneStore
from attar.runtime.kv.store.rotated import CacheBasis, RotatedStore, formats_label
from attar.runtime.runner.attention import AttentionPass
from attar.runtime.runner.evicted_attention import HeadShares, SharedPass, StreamingPass, pack_heads
from attar.runtime.runner.hidden_states import HiddenWriter
from attar.runtime.runner.key_means import calibration_step, key_centers
from attar.runtime.runner.lora import LoraRows
from attar.runtime.runner.observers import AttentionSums, LastQueries, ReadKeys, StridedQueries
from attar.runtime.runner.packed_model import DecodedLinear, PackedLinear
from attar.runtime.runner.probe import ModelShape, Rotary, probe
from attar.runtime.runner.state_layers import StateLayers
from attar.runtime.runner.state_pass import StatePass
from attar.runtime.step import StepInput


class Modules:
    """A ``Runner`` (see ``step.py``) that owns a model and a pool.

    Args:
        model: a causal language model in evaluation mode; afterwards it runs through the runner only.
        kv_dtype: a name of ``kv.store.STORES``; ``auto`` is the model's dtype.
        eviction: how a sequence's cache entries are bounded; None: not at all.
        basis: of int4, calibrated, with the formats of layers; None: mean keys of fixed tokens.

    Attributes:
        features: rows of ``kv/compose.py`` with the settings that ask for them.
        activations: what products round their inputs to: int16 or int8 where Linears keep their codes and
            are compiled, else the model's dtype; both where some are.

    Raises:
        ModelError: the model's attention is not supported, with its name.
        SettingsError: ``kv_dtype`` is unknown, or does not work with the model or with ``eviction``.
    """

    def __init__(
        self,
        model: Any,
        *,
        blocks: int,
        block_size: int = 16,
        kv_dtype: str = "auto",
        eviction: Eviction | None = None,
        basis: CacheBasis | None = None,
    ) -> None:
        assert not model.training, "a model that runs is in evaluation mode"
        self.model, self.eviction = model, eviction
        shape = probe(model)
        self.kv_dtype = _dtype_name(model) if kv_dtype == "auto" else kv_dtype
        self.activations = _activations(model)
        self.formats = () if basis is None else basis.formats
        self.features = _features(self.kv_dtype, self.formats, eviction, shape)
        check_together(self.features)
        sizes = shape.kv_heads, shape.head_dim, shape.latent
        geometry = PoolGeometry(shape.layers, blocks, block_size, *sizes)
        kinds: dict[str, Any] = {"dtype": model.dtype, "device": model.device}
        self.pool = KVPool(geometry, self.kv_dtype, formats=self.formats, **kinds)
        self.vocabulary, self.window = shape.vocabulary, shape.window
        self.context = None if isinstance(eviction, Streaming) else shape.context
        turns = isinstance(eviction, Streaming | Reread)
        self._rotary = Rotary(model, shape.attending) if turns else None
        self._observer = _observer(eviction, self._rotary)
        self._shares: dict[int, HeadShares] = {}  # of packed sequences, where heads keep different numbers
        self._hidden: HiddenWriter | None = None
        self._indices = {layer: index for index, layer in enumerate(shape.attending)}
        self._state_layers, self.state_bytes = StateLayers(model), shape.state_bytes
        kept = BYTES // shape.state_bytes if shape.state_bytes else 0
        self.states = StateStore(StateSnapshots(block_size, kept) if kept else None)
        self._stepwise = shape.stepwise
        self.lora = LoraRows(model)
        if isinstance(self.pool.store, RotatedStore | MixedStore):
            self.pool.store.basis = self._basis(basis, shape)

    @property
    def block_size(self) -> int:
        """B."""
        return self.pool.geometry.block_size

    @property
    def capacity(self) -> int:
        """Blocks of the pool."""
        return self.pool.geometry.blocks

    @property
    def facts(self) -> dict[str, Any]:
        """For ``describe.py``."""
        dtype = _dtype_name(self.model)
        packed = [module for module in self.model.modules() if isinstance(module, PackedLinear)]
        rounded = [f"int{packed[0].bits}"] if packed and library() is not None else []
        return {
            "weights": " and ".join(dict.fromkeys(linear.packed.label for linear in packed)) or dtype,
            "activations": " and ".join([*rounded, dtype]),
            "threads": torch.get_num_threads() if self.pool.device.type == "cpu" else 0,
            "kv_dtype": formats_label(self.pool.kv_dtype, self.formats),
            "kv_bytes": self.pool.nbytes,
            "hidden_bytes": 0 if self._hidden is None else self._hidden.pool.nbytes,
            "state_bytes": self.state_bytes,
        }

    @property
    def adapters(self) -> Collection[str]:
        """Keys of the LoRA adapters that spans may have."""
        return self.lora.adapters

    @property
    def repeats(self) -> bool:
        """Whether a failed step may be run again: what it wrote is written again, and nothing is rounded
        from what it wrote. States change after a step only."""
        return self.eviction is None and "kivi" not in self.features

    @property
    def lookback(self) -> tuple[int | None, int]:
        """``window`` and ``sinks`` of the block manager: entries before them are released."""
        if isinstance(self.eviction, Streaming):
            return self.eviction.window, self.eviction.sinks
        return self.window, 0

    def most(self, chunk: int) -> int | None:
        """``most`` of the block manager, when a step runs at most ``chunk`` tokens of a sequence."""
        return None if self.eviction is None else self.eviction.most(chunk, self.block_size)

    def run(self, step: StepInput) -> Tensor:
        """Copies blocks, writes keys and values; returns logits float32 (W, vocabulary), spans in order.

        Raises:
            IndexError: a token id is outside the vocabulary, before a GPU asserts it.
        """
        if step.tokens and not 0 <= min(step.tokens) <= max(step.tokens) < self.vocabulary:
            raise IndexError(f"a step: token ids outside [0, {self.vocabulary:,})")
        paged, device = self._attention_pass(step), self.pool.device
        keeping = nullcontext() if self._hidden is None else self._hidden.writing(step, self.block_size)
        stateful = (
            StatePass(step, self.states, self.lora.within, self._stepwise) if self._state_layers else None
        )
        with torch.no_grad(), keeping, self.lora.applied(step), self._state_layers.running(stateful):
            logits = self.model(
                input_ids=torch.as_tensor(step.tokens, dtype=torch.int64, device=device)[None],
                position_ids=torch.from_numpy(step.positions).to(device)[None],
                logits_to_keep=torch.from_numpy(step.rows).to(device),
                use_cache=False,
                paged=paged,
            ).logits[0]
        assert paged.layers == list(self._layers), f"layers attended: {paged.layers}"
        self.pool.end(step)
        if stateful is not None:
            self.states.update(stateful.states(), stateful.snapshots())
        return logits.float()

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Move the content of slots, (from, to), one pair after the other."""
        self.pool.move(pairs)
        if self._hidden is not None:
            self._hidden.pool.move(pairs)

    @property
    def planes(self) -> PlaneStore:
        """The store, where its tokens are independent: whose blocks a prefix store reads and writes."""
        assert isinstance(self.pool.store, PlaneStore), f"single blocks of {self.kv_dtype}"
        return self.pool.store

    def keep_hidden(self, layers: Sequence[int]) -> HiddenPool:
        """Keep hidden states of the tokens that are run from now on, with the kept states; see
        ``kv/hidden_pool.py``."""
        assert self.eviction is None, "hidden states of an evicted cache"
        if self._hidden is None:
            self._hidden = HiddenWriter(self.model, layers, self.capacity * self.block_size)
        elif not set(layers) <= set(self._hidden.pool.layers):
            self._hidden.add(layers)
        return self._hidden.pool

    def pack(self, packing: Packing) -> None:
        """Choose which entries of a sequence are kept, for each layer and head, and move them together."""
        observer = self._observer
        assert observer is not None, "packing without a method that chooses"
        if isinstance(observer, StridedQueries):
            scores = [observer.scores(packing, layer, self._keys(packing, layer)) for layer in self._layers]
            keep = observer.method.choose(np.stack(scores))
            self._shares[packing.sequence] = pack_heads(self.pool, packing, keep)
            return
        for layer in self._layers:
            chosen = observer.choose(packing, layer, self._keys(packing, layer))
            assert chosen.shape[1] == packing.kept, f"{chosen.shape[1]} entries chosen, not {packing.kept}"
            self.pool.pack(layer, packing.old, packing.new, torch.from_numpy(chosen))

    @property
    def _layers(self) -> range:
        return range(self.pool.geometry.layers)

    def _keys(self, packing: Packing, layer: int) -> ReadKeys:
        """Keys of a layer's first entries, before the sequence is packed."""
        return lambda n: self.pool.gather(layer, packing.old, n)[0]

    def fork(self, sequence: int, child: int) -> None:
        """A second sequence continues from the entries and states of the first."""
        self.states.fork(sequence, child)
        if self._observer is not None:
            self._observer.fork(sequence, child)
        if sequence in self._shares:
            self._shares[child] = self._shares[sequence]

    def forget(self, sequence: int) -> None:
        """A sequence ended or was preempted: its states and eviction's records of it are deleted."""
        self.states.forget(sequence)
        if self._observer is not None:
            self._observer.forget(sequence)
        self._shares.pop(sequence, None)

    def _basis(self, basis: CacheBasis | None, shape: ModelShape) -> CacheBasis:
        if basis is None:
            return CacheBasis.of_centers(self._key_centers(shape))
        return basis.to(self.pool.device)

    def _key_centers(self, shape: ModelShape) -> Tensor:
        """The mean keys of each layer and head, float32 (2, layers, kv_heads, head_dim), of fixed tokens."""
        plain = copy(self)  # the same model, and no eviction
        plain.eviction = plain._observer = None
        plain.states = StateStore()
        step = calibration_step(self.vocabulary, shape.context, self.block_size, windowed=any(shape.windows))
        geometry = replace(self.pool.geometry, blocks=step.spans[-1].blocks[-1] + 1)
        plain.pool = KVPool(geometry, "float32", dtype=self.pool.dtype, device=self.pool.device)
        plain.run(step)
        return key_centers(
            [
                torch.stack([plain.pool.gather(layer, span.blocks, span.count)[0] for layer in self._layers])
                for span in step.spans
            ]
        )

    def _attention_pass(self, step: StepInput) -> AttentionPass:
        if isinstance(self.eviction, Streaming):
            assert self._rotary is not None
            paged: AttentionPass = StreamingPass(step, self.pool, self.eviction, self._rotary)
        elif self._shares:
            paged = SharedPass(step, self.pool, self._observer, self._shares)
        else:
            paged = AttentionPass(step, self.pool, self._observer)
        paged.indices = self._indices
        return paged


def _dtype_name(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")


def _activations(model: Any) -> str:
    """What the products of a model round their inputs to; see :class:`Modules`."""
    dense = _dtype_name(model)
    linears = [module for module in model.modules() if isinstance(module, PackedLinear)]
    if library() is None or not linears:
        return dense
    others = any(isinstance(module, nn.Linear | DecodedLinear) for module in model.modules())
    integers = f"int{linears[0].bits}"
    return f"{integers} and {dense}" if others else integers


def _observer(
    eviction: Eviction | None, rotary: Rotary | None
) -> AttentionSums | LastQueries | StridedQueries | None:
    if isinstance(eviction, H2O):
        return AttentionSums(eviction)
    if isinstance(eviction, Reread):
        assert rotary is not None, "Reread turns queries"
        return StridedQueries(eviction, rotary)
    return LastQueries(eviction) if isinstance(eviction, SnapKV) else None


def _features(
    kv_dtype: str, formats: Sequence[str], eviction: Eviction | None, shape: ModelShape
) -> FeatureRequests:
    """Rows of ``kv/compose.py`` that the runner has."""
    windows = any(window is not None for window in shape.windows)
    store = "mixed" if formats else store_feature(kv_dtype)
    features = {store: ("kv_dtype", kv_dtype), **evicting(eviction)}
    of_shape = {"sliding_window": windows, "latents": shape.latent > 0, "states": shape.state_bytes > 0}
    return {**features, **{name: None for name, has in of_shape.items() if has}}
