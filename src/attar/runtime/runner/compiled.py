"""Runs Llama-shaped models in the compiled library: one call for each step, whatever sequences are in it.

The library owns the pool of keys and values; this module prepares its arguments. Models that it does not
support are refused by name, and ``modules.py`` runs them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attar.errors import UsageError
from attar.kernels.decode import KV_BITS, ModelWeights, Program
from attar.kernels.draft_block import DrafterWeights, DraftProgram
from attar.kernels.kv_int4 import rotated
from attar.kernels.packed import Kind
from attar.kernels.product import default_threads
from attar.kernels.structures import StepTokens
from attar.runtime.kv.compose import FeatureRequests
from attar.runtime.kv.hidden_pool import HiddenPool
from attar.runtime.kv.state_store import StateStore
from attar.runtime.kv.store.rotated import CacheBasis, formats_label
from attar.runtime.runner.compiled_states import CarriedStates, CarriedStep
from attar.runtime.runner.compiled_weights import model_weights
from attar.runtime.runner.key_means import calibration_step, key_centers
from attar.runtime.runner.sparse_choice import sparse_pays
from attar.runtime.step import StepInput, TokenSpan, ancestors

if TYPE_CHECKING:
    from attar.runtime.runner.compiled_lora import BuildWeights, CompiledLora, LoadTensor

KV_DTYPES = tuple(KV_BITS)


class Compiled:
    """A ``Runner`` (see ``step.py``) of packed weights and a pool.

    Args:
        weights: made by :func:`compiled_weights.model_weights`.
        block_size: tokens of a block, a multiple of 16.
        kv_dtype: float16, bfloat16, float32, int8 with a scale for each token and head, or int4: as
            ``kv/store/rotated.py``.
        threads: None: ``OMP_NUM_THREADS``, or all processors.
        bits: of the activations that products take. 16: integers of 16 bits where weights are codes, float32
            where they are bfloat16; 8: int8 and bfloat16. The same for every step, whatever is in it.
        basis: of int4, calibrated, with the formats of layers; None: mean keys of fixed tokens.

    Attributes:
        activations: what products round their inputs to: int16 or int8 (a scale for every group), float32 or
            bfloat16, or two of them where weights differ.

    Raises:
        UsageError: a setting is not one of these, or there is no compiler.
        ModelError: the shapes are not ones that the library runs.
    """

    def __init__(
        self,
        weights: ModelWeights,
        *,
        blocks: int,
        block_size: int = 16,
        kv_dtype: str = "float16",
        threads: int | None = None,
        bits: int = 16,
        basis: CacheBasis | None = None,
    ) -> None:
        if kv_dtype not in KV_DTYPES:
            raise UsageError(
                f"kv_dtype {kv_dtype!r}", hint=f"the compiled runner keeps {', '.join(KV_DTYPES)}"
            )
        if kv_dtype == "int4" and weights.latent is not None:
            raise UsageError("kv_dtype 'int4'", hint="the compiled runner keeps no latents (MLA) in it")
        windows = [layer.window for layer in weights.layers]
        self._windowed, self.window = any(windows), max(windows) if all(windows) else None
        settings: dict[str, Any] = {"threads": threads, "bits": bits, "kv_dtype": kv_dtype}
        if kv_dtype == "int4":
            rotation = rotated(torch.eye(weights.head_dim))
            basis = basis or CacheBasis.of_centers(_key_centers(weights, block_size, threads, bits))
            settings |= {"rotation": (rotation, basis.rows()), "formats": basis.formats}
        self._program = Program(weights, blocks, block_size, **settings)
        self.kv_dtype, self.bits, self.activations = kv_dtype, bits, _activations(weights, bits)
        self.vocabulary, self.context = weights.vocabulary, weights.context
        self._carried = CarriedStates(weights, block_size)
        self._hidden: HiddenPool | None = None
        self.lora: CompiledLora[Program] | None = None  # where weights are dense

    repeats = True
    """A failed step may be run again: states change after a step only."""

    @property
    def block_size(self) -> int:
        """B."""
        return self._program.block_size

    @property
    def capacity(self) -> int:
        """Blocks of the pool."""
        return self._program.blocks

    @property
    def facts(self) -> dict[str, Any]:
        """For ``describe.py``."""
        program, layers = self._program, self.weights.layers
        kinds = {packed.label: None for layer in layers for packed in layer.products}
        return {
            "weights": " and ".join(kinds),
            "activations": self.activations,
            "threads": program.threads,
            "kv_dtype": formats_label(program.kv_dtype, program.formats),
            "kv_bytes": len(program.pool),
            "hidden_bytes": 0 if self._hidden is None else self._hidden.nbytes,
            "state_bytes": self.state_bytes,
        }

    @property
    def features(self) -> FeatureRequests:
        """Rows of ``kv/compose.py`` that exclude others."""
        return {"states": None} if self.state_bytes else {}

    @property
    def states(self) -> StateStore:
        """Of the sequences that run, where layers carry states."""
        return self._carried.store

    @property
    def state_bytes(self) -> int:
        """Of a sequence's states."""
        return self._carried.nbytes

    @property
    def weights(self) -> ModelWeights:
        """The model; another runner may share a part of it."""
        return self._program.weights

    def run(self, step: StepInput) -> Tensor:
        """Copies blocks, writes keys and values; returns logits float32 (W, vocabulary), spans in order."""
        for span in step.spans:
            self._check(span)
        carried: list[CarriedStep] = []
        if not any(span.adapter for span in step.spans):
            logits = self._run(step, self._program, carried)
        else:
            assert self.lora is not None, "spans with an adapter, and a runner without"
            logits = torch.empty(step.wants, self.vocabulary)
            for number, (program, spans) in enumerate(self.lora.groups(step)):
                part = step.part(spans)
                part_logits = self._run(replace(part, copies=()) if number else part, program, carried)
                logits[torch.from_numpy(step.wanted_of(spans))] = part_logits
        self._carried.update(carried)
        return logits

    def _run(self, step: StepInput, program: Program, carried: list[CarriedStep]) -> Tensor:
        tokens = _step_tokens(step, self.block_size)
        if self.state_bytes:
            carried.append(self._carried.step(step))
            kept = carried[-1]
            tokens = replace(tokens, keep=kept.keep, carried=kept.carried, inputs=kept.inputs)
        return program.run(tokens)

    def keep_hidden(self, layers: Sequence[int]) -> HiddenPool:
        """Keep hidden states of the tokens that are run from now on, with the kept states; see
        ``kv/hidden_pool.py``."""
        if self._hidden is None:
            self._hidden = HiddenPool.of(layers, self.capacity * self.block_size, self.weights.hidden)
        elif not set(layers) <= set(self._hidden.layers):
            self._hidden.add(layers)
        self._program.keep_hidden(self._hidden.layers, self._hidden.states)
        for program in () if self.lora is None else self.lora.adapters.values():
            program.share_hidden(self._program)
        return self._hidden

    @property
    def adapters(self) -> Collection[str]:
        """Keys of the LoRA adapters that spans may have."""
        return () if self.lora is None else self.lora.adapters

    def with_adapters(
        self,
        build: BuildWeights,
        infos: Mapping[str, Any],
        load: LoadTensor,
    ) -> None:
        """From now on it may have adapters; see :class:`CompiledLora`."""
        from attar.runtime.runner.compiled_lora import CompiledLora  # takes transformers with it

        self.lora = CompiledLora(self._program, build, infos, load)

    def drafting(self, weights: DrafterWeights) -> DraftProgram:
        """A drafter for this model, which the same threads run, with a pool for as many tokens."""
        spare = -(-weights.block // self.block_size)  # of each sequence, for its block
        program = self._program
        blocks = self.capacity * (1 + spare)
        shared: dict[str, Any] = {"threads_of": program, "bits": program.bits}
        kv_dtype = "int8" if program.kv_dtype == "int4" else program.kv_dtype  # a drafter has no mean keys
        return DraftProgram(weights, blocks, self.block_size, kv_dtype=kv_dtype, **shared)

    def fork(self, sequence: int, child: int) -> None:
        """A second sequence continues from the states of the first."""
        self.states.fork(sequence, child)

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Move the content of slots, (from, to), one pair after the other."""
        self._program.move(pairs)

    def forget(self, sequence: int) -> None:
        """A sequence ended or was preempted: its states are deleted."""
        self.states.forget(sequence)

    def read_block(self, block: int) -> bytes:
        """The content of a block, all layers."""
        return b"".join(layer.numpy().tobytes() for layer in self._program.block(block))

    def write_block(self, block: int, content: bytes) -> None:
        """Put the content of a block back."""
        layers = self._program.block(block)
        stored = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        for layer, part in zip(layers, stored.split([len(layer) for layer in layers]), strict=True):
            layer.copy_(part)

    def close(self) -> None:
        """End the library's threads."""
        self._program.close()

    def _check(self, span: TokenSpan) -> None:
        assert self.context is None or span.stop <= self.context, f"token {span.stop} of {self.context}"
        assert span.offset == span.start or not self._windowed, "an evicted cache and a sliding window"


def _key_centers(weights: ModelWeights, block_size: int, threads: int | None, bits: int) -> Tensor:
    """The mean keys of each layer and head, float32 (2, layers, kv_heads, head_dim), of fixed tokens."""
    windowed = any(layer.window for layer in weights.layers)
    step = calibration_step(weights.vocabulary, weights.context, block_size, windowed=windowed)
    blocks = step.spans[-1].blocks[-1] + 1
    program = Program(weights, blocks, block_size, threads=threads, bits=bits, kv_dtype="float32")
    program.run(_step_tokens(step, block_size))
    keys = program.keys(step.slots(block_size)).split([span.count for span in step.spans], dim=1)
    program.close()
    return key_centers(keys)


def _step_tokens(step: StepInput, block_size: int) -> StepTokens:
    return StepTokens(
        ids=np.asarray(step.tokens, dtype=np.int64),
        positions=step.positions,
        slots=step.slots(block_size),
        counts=[span.count for span in step.spans],
        past=[span.offset for span in step.spans],
        blocks=[span.blocks for span in step.spans],
        rows=step.rows,
        copies=step.copies,
        trees=[None if tree is None else ancestors(tree) for _, tree in step.trees()],
    )


def _activations(weights: ModelWeights, bits: int) -> str:
    """What the products of these weights round their inputs to; see :class:`Compiled`."""
    parts = [part for layer in weights.layers for part in layer.products]
    dense = {8: "bfloat16", 16: "float32"}[bits]
    kinds = {dense if part.kind == "bf16" else f"int{bits}" for part in (*parts, weights.head)}
    return " and ".join(sorted(kinds, reverse=True))


def compiled(
    config: Any,
    tensors: Any,
    *,
    weights: Kind = "bf16",
    head: Kind | None = None,
    group: int = 32,
    context: int | None = None,
    **settings: Any,
) -> Compiled:
    """A runner of a checkpoint.

    Args:
        config: of transformers (``attar.models.loading.configs.load_config``).
        tensors: a dict of tensors (a ``state_dict``), or a checkpoint: what has ``tensors`` and ``load``.
        weights: bf16, int8 or int4.
        head: the head's; None: as ``weights``.
        group: inputs that share a scale.
        context: most positions; None: the config's.
        settings: of :class:`Compiled`.

    Raises:
        ModelError: the compiled step does not support the model.
    """
    names, load = (
        (tensors, tensors.__getitem__) if isinstance(tensors, dict) else (tensors.tensors, tensors.load)
    )
    pays = sparse_pays(settings.get("bits", 16), settings.get("threads") or default_threads())
    model = model_weights(
        config, names, load, weights=weights, head=head, group=group, context=context, pays=pays
    )
    return Compiled(model, **settings)
