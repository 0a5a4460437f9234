"""From the name of a model to what an engine needs: a runner with its KV cache, a tokenizer, the end
tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attar.chat_template import PLAIN
from attar.checkpoint import Checkpoint
from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.parts import count
from attar.data.auto import made_from_embedded
from attar.errors import ModelError, SettingsError
from attar.formats import readers
from attar.kernels.build import warn_slower
from attar.kernels.decode import ModelWeights, pool_bytes
from attar.kernels.product import default_threads
from attar.memory import check_memory
from attar.models.loading.device import free_memory, pick_device
from attar.models.loading.fit import admit
from attar.models.loading.plain_config import end_tokens
from attar.models.loading.plain_tokenizer import TOKENIZER_FILES, plain_tokenizer
from attar.runtime.admission import Limits
from attar.runtime.kv.basis_file import read_basis
from attar.runtime.kv.block_manager import BlockManager
from attar.runtime.kv.compose import check_together, evicting
from attar.runtime.kv.evict import H2O, Eviction, Reread, SnapKV
from attar.runtime.kv.hidden_pool import HiddenPool
from attar.runtime.kv.memory import block_bytes, with_formats
from attar.runtime.runner.choice import RunnerSettings, why_not_compiled, why_not_device
from attar.runtime.runner.compiled import Compiled
from attar.runtime.runner.compiled_weights import EMBEDDING, model_weights
from attar.runtime.runner.device.memory import planned_tokens
from attar.runtime.runner.device.packer import DevicePacker
from attar.runtime.runner.device.runner import Device, device_dtype, pool_token_bytes
from attar.runtime.runner.kept_shapes import kept_shapes, may_carry_states, states_in_memory
from attar.runtime.runner.sparse_choice import sparse_pays
from attar.runtime.runner.step_config import step_config
from attar.runtime.runner.stored_tensors import StoredTensors
from attar.runtime.step import Runner

if TYPE_CHECKING:
    from attar.runtime.runner.modules import Modules

POOL_BYTES = 1 << 30  # most bytes of keys and values, without ``kv_tokens``
STATE_TOKENS = 1 << 20  # of a model whose layers all carry states: its blocks only count tokens
CONTEXTS = 16  # most sequences of full length that the pool holds, without ``kv_tokens``

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A model ready to run.

    Attributes:
        tokenizer: of transformers, or a PlainTokenizer; None: prompts are ids, and results have no text.
        eviction: how the runner bounds the cache entries of a sequence.
        lookback: (window, sinks): older blocks are released; no window: never.
        most: most entries of a sequence, from its tokens in a step; None: no bound.
        why: why the compiled runner does not run it, in a sentence; empty where it does.
        fingerprint: of the checkpoint; reads all its bytes.
    """

    runner: Runner
    tokenizer: Any = None
    ends: tuple[int, ...] = ()
    name: str = "model"
    eviction: Eviction | None = None
    lookback: tuple[int | None, int] = (None, 0)
    most: Callable[[int], int | None] = lambda chunk: None
    why: str = ""
    fingerprint: Callable[[], str] = str

    def manager(self, limits: Limits, prefix_cache: bool | None = None) -> BlockManager:
        """The block manager of its sequences.

        Args:
            limits: tokens of a sequence in a step.
            prefix_cache: whether prefixes are shared; None: unless the eviction chooses by attention, because
                then a completion could depend on what ran before it. A model with states larger than the
                bytes of all snapshots shares none.

        Raises:
            SettingsError: ``prefix_cache`` does not work with the eviction.
        """
        if prefix_cache:
            check_together({**evicting(self.eviction), "prefix_reuse": ("prefix_cache", True)})
        reuse = not isinstance(self.eviction, H2O | SnapKV | Reread) if prefix_cache is None else prefix_cache
        snapshots = getattr(getattr(self.runner, "states", None), "snapshots", None)
        if snapshots is None and "states" in getattr(self.runner, "features", ()):  # too large to keep one
            reuse = False
        window, sinks = self.lookback
        most = self.most(limits.chunk or limits.step_tokens)
        size = self.runner.block_size
        bounds: dict[str, Any] = {"window": window, "sinks": sinks, "most": most}
        return BlockManager(self.runner.capacity, size, reuse=reuse, snapshots=snapshots, **bounds)


def load(
    model: str | Path | Checkpoint, *, sequences: int = 1, prefix_cache: bool | None = None, **options: Any
) -> Loaded:
    """Load a model.

    Args:
        sequences: that run together; their states must fit into memory.
        prefix_cache: of :class:`attar.runtime.llm.LLM`: where it is False, no snapshot takes memory.
        options: fields of :class:`attar.runtime.runner.choice.RunnerSettings`.

    Raises:
        as :class:`attar.runtime.llm.LLM`.
    """
    settings = RunnerSettings(**options)
    checkpoint = admit(model, causal=True)
    _check_room(checkpoint, settings, sequences, prefix_cache)
    kind = "device" if settings.on_device else "compiled"
    why = (why_not_device if settings.on_device else why_not_compiled)(checkpoint, settings)
    runner: Compiled | Device | Modules | None = None
    if not why:
        try:
            runner = (_device if settings.on_device else _compiled)(checkpoint, settings)
        except ModelError as problem:
            why = problem.message
    if runner is None and (settings.runner == kind or settings.weights):
        raise ModelError(f"{checkpoint.name}: the {kind} runner cannot run it: {why}")
    if runner is None:
        runner = _modules(checkpoint, settings)
    logger.debug("%s runs through %s%s", checkpoint.name, type(runner).__name__, f": {why}" if why else "")
    if why and settings.runner == "auto":
        step = "device runner" if settings.on_device else "compiled step"
        warn_slower(f"{checkpoint.name} runs through transformers' modules, slower than the {step}: {why}")
    tokenizer = tokenizer_of(checkpoint)
    stored = checkpoint.path / "generation_config.json"
    ends = end_tokens(read_json(stored) if stored.is_file() else None, checkpoint.config, tokenizer)
    if isinstance(runner, Compiled | Device):
        most, lookback = _unbounded, (runner.window, 0)
    else:
        most, lookback = runner.most, runner.lookback
    parts = (runner, tokenizer, ends, checkpoint.name, settings.eviction, lookback, most, why)
    return Loaded(*parts, checkpoint.fingerprint)


def _check_room(
    checkpoint: Checkpoint, settings: RunnerSettings, sequences: int, prefix_cache: bool | None
) -> None:
    """Raise MemoryNeededError where the weights alone do not fit into the device's memory: packed ones as
    they are stored, dense ones in 16 bits or as they will be rounded; or with the states of the sequences, or
    with the pool that was asked for."""
    device = pick_device(settings.device)
    if device.type not in ("cpu", "cuda"):
        return
    bits = {None: 16, "int8": 8, "int4": 4}[settings.weights]
    packed = readers.quant_method(checkpoint) is not None
    size = checkpoint.nbytes if packed else count(checkpoint).parameters * bits // 8
    free = None if device.type == "cpu" else free_memory(device)
    check_memory(checkpoint.name, size, hint="quantize it: quantize works block by block", free=free)
    cached = settings.kv_tokens is not None and device.type == "cpu"
    if not cached and not may_carry_states(checkpoint.config):
        return
    with suppress(ModelError, SettingsError):  # refused where the runner is made
        layers, state_bytes = kept_shapes(checkpoint.config, torch_dtype(settings.dtype, settings.device))
        if state_bytes:
            size += states_in_memory(state_bytes, sequences, prefix_cache=prefix_cache)
            snapshots = "" if prefix_cache is False else " and of snapshots"
            name = f"{checkpoint.name} with the states of {sequences:,} sequences{snapshots}"
            check_memory(name, size, hint="fewer --sequences", free=free)
        if settings.kv_tokens is None or not cached:
            return
        kv_dtype = "bfloat16" if settings.kv_dtype == "auto" else settings.kv_dtype
        block = block_bytes(with_formats(layers, checkpoint.path), kv_dtype, settings.block_size)
        pool = settings.kv_tokens * block // settings.block_size
        name = f"{checkpoint.name} with a KV cache of {settings.kv_tokens:,} tokens"
        check_memory(name, size + pool, hint="choose a smaller --kv-tokens; attar plan-kv shows what fits")


def _compiled(checkpoint: Checkpoint, settings: RunnerSettings) -> Compiled:
    """The compiled runner, weights read one at a time."""
    stored = StoredTensors(checkpoint)
    config, coded = step_config(checkpoint), stored.is_coded(EMBEDDING)
    packed = readers.quant_method(checkpoint) or settings.dtype == "bfloat16"
    embedding = torch.float16 if coded else torch.bfloat16 if packed else None
    options: dict[str, Any] = {"weights": settings.weights or "bf16", "embedding": embedding}
    options["pays"] = sparse_pays(settings.bits, default_threads())

    def build(names: Collection[str], load: Callable[[str], Tensor]) -> ModelWeights:
        return model_weights(config, names, load, **stored.readers, **options)

    model = build(stored.tensors, stored.load)
    kv_dtype = (
        {8: "bfloat16", 16: "float16"}[settings.bits] if settings.kv_dtype == "auto" else settings.kv_dtype
    )
    sizes = model.cached, model.kv_heads, model.head_dim
    basis = read_basis(checkpoint.path, *sizes) if kv_dtype == "int4" else None
    formats = () if basis is None else basis.formats
    token_bytes = pool_bytes(model, 1, 1, kv_dtype=kv_dtype, formats=formats)
    token_bytes += HiddenPool.token_bytes(len(settings.hidden_layers), model.hidden)
    tokens = settings.kv_tokens or pool_tokens(token_bytes, model.context)
    blocks = -(-tokens // settings.block_size)
    size, bits = settings.block_size, settings.bits
    runner = Compiled(model, blocks=blocks, block_size=size, kv_dtype=kv_dtype, bits=bits, basis=basis)
    if settings.adapters:
        runner.with_adapters(build, stored.tensors, stored.load)
    return runner


def _device(checkpoint: Checkpoint, settings: RunnerSettings) -> Device:
    """Operators on a device, weights moved there one at a time."""
    stored, config, device = StoredTensors(checkpoint), step_config(checkpoint), pick_device(settings.device)
    dtype = device_dtype(settings.dtype, device)
    kind: Any = settings.weights
    packer = DevicePacker(device, dtype, kind)

    def build(names: Collection[str], load: Callable[[str], Tensor]) -> ModelWeights:
        return model_weights(config, names, load, **stored.readers, embedding=dtype, packer=packer)

    model = build(stored.tensors, stored.load)
    kv_dtype = str(dtype).removeprefix("torch.") if settings.kv_dtype == "auto" else settings.kv_dtype
    sizes = model.cached, model.kv_heads, model.head_dim
    basis = read_basis(checkpoint.path, *sizes) if kv_dtype == "int4" else None
    token_bytes = pool_token_bytes(model, kv_dtype, () if basis is None else basis.formats)
    token_bytes += HiddenPool.token_bytes(len(settings.hidden_layers), model.hidden)
    if device.type == "cpu":
        tokens = settings.kv_tokens or pool_tokens(token_bytes, model.context)
    else:
        most = None if model.context is None else CONTEXTS * model.context
        free = free_memory(device)
        tokens = planned_tokens(checkpoint.name, token_bytes, free, most=most, wanted=settings.kv_tokens)
    blocks, size = -(-tokens // settings.block_size), settings.block_size
    options: dict[str, Any] = {"kv_dtype": kv_dtype, "dtype": dtype, "device": device, "basis": basis}
    runner = Device(model, blocks=blocks, block_size=size, **options)
    if settings.adapters:
        runner.with_adapters(build, stored.tensors, stored.load)
    return runner


def _modules(checkpoint: Checkpoint, settings: RunnerSettings) -> Modules:
    """transformers' modules; Linears keep their codes where the checkpoint is quantized and the device a
    CPU."""
    from attar.models.anatomy.discover import discover
    from attar.models.loading.load import load_model
    from attar.runtime.runner.modules import Modules
    from attar.runtime.runner.packed_model import packed_model
    from attar.runtime.runner.probe import probe

    loaded = None
    if (
        settings.dtype == "auto"
        and readers.quant_method(checkpoint)
        and pick_device(settings.device).type == "cpu"
    ):
        try:
            loaded = packed_model(checkpoint, bits=settings.bits)
        except ModelError as problem:
            warn_slower(f"{checkpoint.name} is loaded dense, and takes more memory: {problem.message}")
    if loaded is None:
        loaded = load_model(
            checkpoint, dtype=torch_dtype(settings.dtype, settings.device), device=settings.device
        )
    shape = probe(loaded)
    token_bytes = shape.token_numbers * loaded.dtype.itemsize
    if settings.hidden_layers:
        token_bytes += HiddenPool.token_bytes(len(settings.hidden_layers), discover(loaded).hidden_size)
    blocks = -(-(settings.kv_tokens or pool_tokens(token_bytes, shape.context)) // settings.block_size)
    sizes = shape.layers, shape.kv_heads, shape.head_dim
    return Modules(
        loaded,
        blocks=blocks,
        block_size=settings.block_size,
        kv_dtype=settings.kv_dtype,
        eviction=settings.eviction,
        basis=read_basis(checkpoint.path, *sizes) if settings.kv_dtype == "int4" else None,
    )


def tokenizer_of(checkpoint: Checkpoint) -> Any:
    """The model's tokenizer; None where it has none. An embedded model, and what is made from one, has no
    chat template in its files and gets the plain one, so that it answers conversations."""
    if not any((checkpoint.path / name).is_file() for name in TOKENIZER_FILES):
        return None
    tokenizer = plain_tokenizer(checkpoint.path, checkpoint.config)
    if tokenizer is None:
        from attar.models.loading.load import load_tokenizer

        tokenizer = load_tokenizer(checkpoint)
    if not getattr(tokenizer, "chat_template", None) and made_from_embedded(checkpoint):
        tokenizer.chat_template = PLAIN
    return tokenizer


def _unbounded(chunk: int) -> int | None:
    return None


def pool_tokens(token_bytes: int, context: int | None) -> int:
    """Tokens of a pool without ``kv_tokens``: POOL_BYTES, and at most CONTEXTS full contexts; STATE_TOKENS
    where a token takes no bytes."""
    most = POOL_BYTES // token_bytes if token_bytes else STATE_TOKENS
    return max(min(most, CONTEXTS * context) if context else most, 1)


def torch_dtype(name: str, device: str) -> torch.dtype | None:
    """The torch dtype of a setting; None means the checkpoint's own."""
    if name == "auto":
        return torch.float32 if pick_device(device).type == "cpu" else None
    named: torch.dtype = getattr(torch, name)
    return named
