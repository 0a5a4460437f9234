"""Runs transformers' own modules: any causal language model whose attention goes through the interface.

The path for every architecture that the compiled one (``compiled.py``) does not know, and the reference
that the compiled one is tested against. A step runs as one row of tokens with explicit positions and
``use_cache=False``; attention is :mod:`attar.runtime.runner.attention` on the runner's own pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attar.kernels.structures import library
from attar.runtime.kv.blocks import Packing
from attar.runtime.kv.compose import FeatureRequests, check_together, evicting, store_feature
from attar.runtime.kv.evict import H2O, Eviction, Reread, SnapKV, Streaming
from attar.runtime.kv.pool import KVPool
from attar.runtime.kv.store import PoolGeometry
from attar.runtime.runner.attention import AttentionPass
from attar.runtime.runner.linear import DecodedLinear, PackedLinear
from attar.runtime.runner.probe import ModelShape, probe
from attar.runtime.runner.rotary import Rotary
from attar.runtime.runner.shared_cells import SharedPass, Shares, pack
from attar.runtime.runner.streamed import StreamedPass
from attar.runtime.runner.watching import AttentionSums, LastQueries, ReadKeys, StridedQueries
from attar.runtime.step import StepInput


class Modules:
    """A ``Runner`` (see ``step.py``) that owns a model and a pool.

    Args:
        model: a causal language model in evaluation mode; it is taken over and runs through the runner only.
        blocks: blocks of the pool.
        block_size: tokens of a block.
        kv_dtype: a name of ``kv.store.STORES``; ``auto`` is the model's dtype.
        eviction: how a sequence's places are bounded; None: not at all.

    Attributes:
        features: rows of ``kv/compose.py`` and what asked for them; who schedules checks its own with them.
        kv_dtype: how keys and values are kept.
        activations: what products round their inputs to: int16 or int8 where Linears keep their codes and
            are compiled, else the model's dtype; both where some are.

    Raises:
        ModelError: the model's attention is not what the runtime does, by name.
        SettingsError: ``kv_dtype`` is unknown or does not suit the model, or does not go with ``eviction``.
    """

    def __init__(
        self,
        model: Any,
        *,
        blocks: int,
        block_size: int = 16,
        kv_dtype: str = "auto",
        eviction: Eviction | None = None,
    ) -> None:
        assert not model.training, "a model that runs is in evaluation mode"
        self.model, self.eviction = model, eviction
        found = probe(model)
        kept = str(model.dtype).removeprefix("torch.") if kv_dtype == "auto" else kv_dtype
        self.kv_dtype, self.activations = kept, _activations(model)
        self.features = _features(kept, eviction, found)
        check_together(self.features)
        geometry = PoolGeometry(found.layers, blocks, block_size, found.kv_heads, found.head_dim)
        self.pool = KVPool(geometry, kept, dtype=model.dtype, device=model.device)
        self.vocabulary, self.window = found.vocabulary, found.window
        self.context = None if isinstance(eviction, Streaming) else found.context
        turns = isinstance(eviction, Streaming | Reread)
        self._rotary = Rotary(model, found.layers) if turns else None
        self._watch = _watch(eviction, self._rotary)
        self._shares: dict[int, Shares] = {}  # of packed sequences, where heads keep different numbers

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
        """What ``describe.py`` tells of it."""
        dtype = str(self.model.dtype).removeprefix("torch.")
        packed = [each for each in self.model.modules() if isinstance(each, PackedLinear)]
        rounded = [f"int{packed[0].bits}"] if packed and library() is not None else []
        return {
            "weights": " and ".join(dict.fromkeys(each.packed.kind for each in packed)) or dtype,
            "activations": " and ".join([*rounded, dtype]),
            "threads": torch.get_num_threads() if self.pool.device.type == "cpu" else 0,
            "kv_dtype": self.pool.kv_dtype,
            "kv_bytes": self.pool.nbytes,
        }

    @property
    def repeats(self) -> bool:
        """Whether a step that broke off may be run again: only the pool is kept, and nothing is rounded."""
        return self.eviction is None and "kivi" not in self.features

    @property
    def lookback(self) -> tuple[int | None, int]:
        """``window`` and ``sinks`` for ``kv/block_manager.py``: places behind are given back."""
        if isinstance(self.eviction, Streaming):
            return self.eviction.window, self.eviction.sinks
        return self.window, 0

    def most(self, chunk: int) -> int | None:
        """``most`` for ``kv/block_manager.py``, when a step runs at most ``chunk`` tokens of a sequence."""
        return None if self.eviction is None else self.eviction.most(chunk, self.block_size)

    def run(self, step: StepInput) -> Tensor:
        """Copies blocks, writes keys and values; returns logits float32 (W, vocabulary), spans in order."""
        passing, device = self._pass(step), self.pool.device
        with torch.no_grad():
            logits = self.model(
                input_ids=torch.as_tensor(step.tokens, dtype=torch.int64, device=device)[None],
                position_ids=torch.from_numpy(step.positions).to(device)[None],
                logits_to_keep=torch.from_numpy(step.rows).to(device),
                use_cache=False,
                paged=passing,
            ).logits[0]
        assert passing.layers == list(range(self.pool.geometry.layers)), f"layers attended: {passing.layers}"
        self.pool.end(step)
        return logits.float()

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """What slots hold goes to other slots, (from, to), one after the other."""
        self.pool.move(pairs)

    def pack(self, packing: Packing) -> None:
        """Choose which places of a sequence stay, for each layer and head, and move them together."""
        watch = self._watch
        assert watch is not None, "packing without a method that chooses"
        if isinstance(watch, StridedQueries):
            scores = [watch.scores(packing, layer, self._keys(packing, layer)) for layer in self._layers]
            self._shares[packing.sequence] = pack(self.pool, packing, watch.method.choose(np.stack(scores)))
            return
        for layer in self._layers:
            keep = watch.choose(packing, layer, self._keys(packing, layer))
            assert keep.shape[1] == packing.kept, f"{keep.shape[1]} places chosen, not {packing.kept}"
            self.pool.pack(layer, packing.old, packing.new, torch.from_numpy(keep))

    @property
    def _layers(self) -> range:
        return range(self.pool.geometry.layers)

    def _keys(self, packing: Packing, layer: int) -> ReadKeys:
        """Keys of a layer's first places, before the sequence is packed."""
        return lambda places: self.pool.gather(layer, packing.old, places)[0]

    def fork(self, sequence: int, child: int) -> None:
        """A second sequence goes on from the places of the first."""
        if self._watch is not None:
            self._watch.fork(sequence, child)
        if sequence in self._shares:
            self._shares[child] = self._shares[sequence]

    def forget(self, sequence: int) -> None:
        """A sequence ended or was preempted: what eviction knew of it goes."""
        if self._watch is not None:
            self._watch.forget(sequence)
        self._shares.pop(sequence, None)

    def _pass(self, step: StepInput) -> AttentionPass:
        if isinstance(self.eviction, Streaming):
            assert self._rotary is not None
            return StreamedPass(step, self.pool, self.eviction, self._rotary)
        if self._shares:
            return SharedPass(step, self.pool, self._watch, self._shares)
        return AttentionPass(step, self.pool, self._watch)


def _activations(model: Any) -> str:
    """What the products of a model round their inputs to; see :class:`Modules`."""
    dense = str(model.dtype).removeprefix("torch.")
    linears = [module for module in model.modules() if isinstance(module, PackedLinear)]
    if library() is None or not linears:
        return dense
    others = any(isinstance(module, nn.Linear | DecodedLinear) for module in model.modules())
    integers = f"int{linears[0].bits}"
    return f"{integers} and {dense}" if others else integers


def _watch(
    eviction: Eviction | None, rotary: Rotary | None
) -> AttentionSums | LastQueries | StridedQueries | None:
    if isinstance(eviction, H2O):
        return AttentionSums(eviction)
    if isinstance(eviction, Reread):
        assert rotary is not None, "queries are turned"
        return StridedQueries(eviction, rotary)
    return LastQueries(eviction) if isinstance(eviction, SnapKV) else None


def _features(kv_dtype: str, eviction: Eviction | None, found: ModelShape) -> FeatureRequests:
    """Rows of ``kv/compose.py`` that the runner knows of."""
    windows = any(window is not None for window in found.windows)
    asked = {store_feature(kv_dtype): ("kv_dtype", kv_dtype), **evicting(eviction)}
    return {**asked, "sliding_window": None} if windows else asked
