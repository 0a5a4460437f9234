"""From the name of a model to what an engine needs: a runner with its pool, a tokenizer, the end tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attar.checkpoint import Checkpoint, open_checkpoint
from attar.errors import ModelError, SettingsError
from attar.models.device import pick_device
from attar.models.load import TOKENIZER_FILES, load_model, load_tokenizer
from attar.runtime.admission import Limits
from attar.runtime.kv.compose import check_together
from attar.runtime.kv.evict import H2O, Eviction, SnapKV
from attar.runtime.kv.manager import Manager
from attar.runtime.runner.modules import Modules
from attar.runtime.runner.probe import Found, probe
from attar.runtime.step import Runner

POOL_BYTES = 1 << 30  # of keys and values at most, where nobody says how many tokens
CONTEXTS = 16  # texts of full length that the pool holds at most, where nobody says
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Loaded:
    """A model ready to run.

    Attributes:
        runner: the model and its pool of blocks.
        tokenizer: of transformers; None: prompts are token ids, and results have no text.
        ends: end tokens.
        name: what messages call it.
        eviction: how the runner bounds the places of a sequence.
        lookback: (window, sinks) behind which places are given back; no window: never.
        most: places that a sequence holds at once when a step runs so many of its tokens; None: no bound.
    """

    runner: Runner
    tokenizer: Any = None
    ends: tuple[int, ...] = ()
    name: str = "model"
    eviction: Eviction | None = None
    lookback: tuple[int | None, int] = (None, 0)
    most: Callable[[int], int | None] = lambda chunk: None

    def manager(self, limits: Limits, prefix_cache: bool | None = None) -> Manager:
        """The memory of its sequences.

        Args:
            limits: how many tokens of a sequence run in a step.
            prefix_cache: whether prefixes are shared; None: unless the eviction chooses by attention, for
                then a text could depend on what ran before it.

        Raises:
            SettingsError: it is asked for and does not go with the eviction.
        """
        if prefix_cache and isinstance(self.eviction, H2O):
            check_together("h2o", "prefix_reuse")
        reuse = not isinstance(self.eviction, H2O | SnapKV) if prefix_cache is None else prefix_cache
        window, sinks = self.lookback
        most = self.most(limits.chunk or limits.step_tokens)
        size = self.runner.block_size
        return Manager(self.runner.capacity, size, reuse=reuse, window=window, sinks=sinks, most=most)


def load(
    model: str | Path | Checkpoint,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    kv_dtype: str = "auto",
    kv_tokens: int | None = None,
    block_size: int = 16,
    eviction: Eviction | None = None,
) -> Loaded:
    """Load a model; the arguments and errors are those of :class:`attar.runtime.llm.LLM`."""
    for name, value in (("kv_tokens", kv_tokens), ("block_size", block_size)):
        if value is not None and value < 1:
            raise SettingsError(name, value, "at least 1")
    checkpoint = open_checkpoint(model)
    loaded = load_model(checkpoint, dtype=torch_dtype(dtype, device), device=device)
    if not loaded.can_generate():
        kind = type(loaded).__name__
        raise ModelError(f"{checkpoint.name} is a {kind}, which does not predict next tokens")
    blocks = -(-(kv_tokens or pool_tokens(probe(loaded), loaded.dtype.itemsize)) // block_size)
    runner = Modules(loaded, blocks=blocks, block_size=block_size, kv_dtype=kv_dtype, eviction=eviction)
    has_words = any((checkpoint.path / name).is_file() for name in TOKENIZER_FILES)
    tokenizer = load_tokenizer(checkpoint) if has_words else None
    ends = end_tokens(loaded, tokenizer)
    return Loaded(runner, tokenizer, ends, checkpoint.name, eviction, runner.lookback, runner.most)


def pool_tokens(found: Found, itemsize: int) -> int:
    """Tokens that a pool holds where nobody says: POOL_BYTES, and no more than CONTEXTS full texts."""
    token_bytes = 2 * found.layers * found.kv_heads * found.head_dim * itemsize
    most = POOL_BYTES // token_bytes
    return max(min(most, CONTEXTS * found.context) if found.context else most, 1)


def end_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a text: the generation config's, else the config's, else the tokenizer's."""
    for owner in (model.generation_config, model.config, tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)
    return ()


def torch_dtype(name: str, device: str) -> torch.dtype | None:
    """The torch dtype of a setting; None means the checkpoint's own."""
    if name not in DTYPES:
        raise SettingsError("dtype", name, ", ".join(DTYPES[:-1]) + f" or {DTYPES[-1]}")
    if name == "auto":
        return torch.float32 if pick_device(device).type == "cpu" else None
    named: torch.dtype = getattr(torch, name)
    return named
