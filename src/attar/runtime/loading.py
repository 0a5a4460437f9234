"""From the name of a model to what an engine needs: a runner with its pool, a tokenizer, the end tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attar.checkpoint import Checkpoint, open_checkpoint
from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.open import check_finite
from attar.errors import ModelError, SettingsError
from attar.formats import readers
from attar.formats.readers import Decoded
from attar.kernels.build import warn_slower
from attar.kernels.decode import pool_bytes
from attar.models.device import pick_device
from attar.models.plain_config import end_tokens
from attar.models.plain_tokenizer import TOKENIZER_FILES, plain_tokenizer
from attar.runtime.admission import Limits
from attar.runtime.kv.block_manager import BlockManager
from attar.runtime.kv.compose import check_together, evicting
from attar.runtime.kv.evict import H2O, Eviction, Reread, SnapKV
from attar.runtime.runner.choice import RunnerSettings, obstacle
from attar.runtime.runner.codes import PackedCodes, codes_of
from attar.runtime.runner.compiled import Compiled
from attar.runtime.runner.compiled_weights import EMBEDDING, model_weights
from attar.runtime.runner.step_config import step_config
from attar.runtime.step import Runner

if TYPE_CHECKING:
    from attar.runtime.runner.modules import Modules

POOL_BYTES = 1 << 30  # of keys and values at most, where nobody says how many tokens
CONTEXTS = 16  # texts of full length that the pool holds at most, where nobody says

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A model ready to run.

    Attributes:
        runner: the model and its pool of blocks.
        tokenizer: of transformers, or a PlainTokenizer; None: prompts are ids, and results have no text.
        ends: end tokens.
        name: what messages call it.
        eviction: how the runner bounds the places of a sequence.
        lookback: (window, sinks) behind which places are given back; no window: never.
        most: places that a sequence holds at once when a step runs so many of its tokens; None: no bound.
        why: why the compiled runner does not run it, in a sentence; empty where it does.
    """

    runner: Runner
    tokenizer: Any = None
    ends: tuple[int, ...] = ()
    name: str = "model"
    eviction: Eviction | None = None
    lookback: tuple[int | None, int] = (None, 0)
    most: Callable[[int], int | None] = lambda chunk: None
    why: str = ""

    def manager(self, limits: Limits, prefix_cache: bool | None = None) -> BlockManager:
        """The memory of its sequences.

        Args:
            limits: how many tokens of a sequence run in a step.
            prefix_cache: whether prefixes are shared; None: unless the eviction chooses by attention, for
                then a text could depend on what ran before it.

        Raises:
            SettingsError: it is asked for and does not go with the eviction.
        """
        if prefix_cache:
            check_together({**evicting(self.eviction), "prefix_reuse": ("prefix_cache", True)})
        reuse = not isinstance(self.eviction, H2O | SnapKV | Reread) if prefix_cache is None else prefix_cache
        window, sinks = self.lookback
        most = self.most(limits.chunk or limits.step_tokens)
        size = self.runner.block_size
        return BlockManager(self.runner.capacity, size, reuse=reuse, window=window, sinks=sinks, most=most)


def load(
    model: str | Path | Checkpoint,
    *,
    kv_tokens: int | None = None,
    **settings: Any,
) -> Loaded:
    """Load a model; the arguments and errors are those of :class:`attar.runtime.llm.LLM`, ``settings`` those
    of :class:`attar.runtime.runner.choice.RunnerSettings`."""
    if kv_tokens is not None and kv_tokens < 1:
        raise SettingsError("kv_tokens", kv_tokens, "at least 1")
    asked = RunnerSettings(**settings)
    checkpoint = open_checkpoint(model)
    why = obstacle(checkpoint, asked)
    runner: Compiled | Modules | None = None
    if not why:
        try:
            runner = _compiled(checkpoint, asked, kv_tokens)
        except ModelError as problem:
            why = problem.message
    if runner is None and (asked.runner == "compiled" or asked.weights):
        raise ModelError(f"{checkpoint.name}: the compiled runner cannot run it: {why}")
    if runner is None:
        runner = _modules(checkpoint, asked, kv_tokens)
    logger.debug("%s runs through %s%s", checkpoint.name, type(runner).__name__, f": {why}" if why else "")
    if why and asked.runner == "auto" and pick_device(asked.device).type == "cpu":
        warn_slower(
            f"{checkpoint.name} runs through transformers' modules, slower than the compiled step: {why}"
        )
    tokenizer = _tokenizer(checkpoint)
    stored = checkpoint.path / "generation_config.json"
    ends = end_tokens(read_json(stored) if stored.is_file() else None, checkpoint.config, tokenizer)
    most = _unbounded if isinstance(runner, Compiled) else runner.most
    return Loaded(runner, tokenizer, ends, checkpoint.name, asked.eviction, _lookback(runner), most, why)


def _compiled(checkpoint: Checkpoint, asked: RunnerSettings, kv_tokens: int | None) -> Compiled:
    """The compiled runner, weights read one at a time."""
    config = step_config(checkpoint)
    packed = readers.quant_method(checkpoint)
    view = Decoded(checkpoint)

    def load(name: str) -> Tensor:
        value = view.load(name)
        check_finite(name, value, checkpoint.path)
        return value

    def coded(name: str) -> PackedCodes | None:
        grid = view.uniform(name) if view.is_coded(name) else None
        return None if grid is None else codes_of(grid)

    kind: Any = asked.weights or "bf16"
    whole = torch.bfloat16 if packed or asked.dtype == "bfloat16" else None
    if EMBEDDING in view.tensors and view.is_coded(EMBEDDING):
        whole = torch.float16  # nearer to codes times a scale
    made = model_weights(config, view.tensors, load, coded, weights=kind, embedding=whole)
    kept = {8: "bfloat16", 16: "float16"}[asked.bits] if asked.kv_dtype == "auto" else asked.kv_dtype
    token_bytes = pool_bytes(made, 1, 1, kv_dtype=kept)
    table = made.layers[0].rotary
    tokens = kv_tokens or pool_tokens(token_bytes, None if table is None else len(table))
    blocks = -(-tokens // asked.block_size)
    return Compiled(made, blocks=blocks, block_size=asked.block_size, kv_dtype=kept, bits=asked.bits)


def _modules(checkpoint: Checkpoint, asked: RunnerSettings, kv_tokens: int | None) -> Modules:
    """transformers' modules; Linears keep their codes where the checkpoint has codes and the CPU runs it."""
    from attar.models.load import load_model
    from attar.runtime.runner.modules import Modules
    from attar.runtime.runner.packed_model import packed_model
    from attar.runtime.runner.probe import probe

    loaded = None
    if asked.dtype == "auto" and readers.quant_method(checkpoint) and pick_device(asked.device).type == "cpu":
        try:
            loaded = packed_model(checkpoint, bits=asked.bits)
        except ModelError as problem:
            warn_slower(f"{checkpoint.name} is loaded dense, and takes more memory: {problem.message}")
    if loaded is None:
        loaded = load_model(checkpoint, dtype=torch_dtype(asked.dtype, asked.device), device=asked.device)
    if not loaded.can_generate():
        kind = type(loaded).__name__
        raise ModelError(f"{checkpoint.name} is a {kind}, which does not predict next tokens")
    found = probe(loaded)
    token_bytes = 2 * found.layers * found.kv_heads * found.head_dim * loaded.dtype.itemsize
    blocks = -(-(kv_tokens or pool_tokens(token_bytes, found.context)) // asked.block_size)
    return Modules(
        loaded,
        blocks=blocks,
        block_size=asked.block_size,
        kv_dtype=asked.kv_dtype,
        eviction=asked.eviction,
    )


def _tokenizer(checkpoint: Checkpoint) -> Any:
    """The model's tokenizer; None where it has none."""
    if not any((checkpoint.path / name).is_file() for name in TOKENIZER_FILES):
        return None
    plain = plain_tokenizer(checkpoint.path, checkpoint.config)
    if plain is not None:
        return plain
    from attar.models.load import load_tokenizer

    return load_tokenizer(checkpoint)


def _lookback(runner: Compiled | Modules) -> tuple[int | None, int]:
    return (runner.window, 0) if isinstance(runner, Compiled) else runner.lookback


def _unbounded(chunk: int) -> int | None:
    return None


def pool_tokens(token_bytes: int, context: int | None) -> int:
    """Tokens that a pool holds where nobody says: POOL_BYTES, and no more than CONTEXTS full texts."""
    most = POOL_BYTES // token_bytes
    return max(min(most, CONTEXTS * context) if context else most, 1)


def torch_dtype(name: str, device: str) -> torch.dtype | None:
    """The torch dtype of a setting; None means the checkpoint's own."""
    if name == "auto":
        return torch.float32 if pick_device(device).type == "cpu" else None
    named: torch.dtype = getattr(torch, name)
    return named
