"""A model under measurement: loaded once, with its tokenizer and its checkpoint.

It runs in a runner of attar's runtime, as ``generate`` and ``serve`` run it, or in transformers on decoded
weights: for exact arithmetic, as the reference, and for models that the runtime does not support. A model
that is larger than the free memory runs block by block (attar.walks.block_by_block), which gives quality and
no speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attar.checkpoint import Checkpoint
from attar.errors import MemoryNeededError, ModelError, SettingsError
from attar.formats.readers import Decoded, quant_method
from attar.measure.settings import DTYPES
from attar.models.loading.fit import admit
from attar.models.loading.load import load_model, load_tokenizer, round_activations
from attar.runtime.loading import Loaded
from attar.runtime.loading import load as load_runner
from attar.walks.block_by_block import BlockByBlock


@dataclass(frozen=True)
class Subject:
    """A causal language model ready to run.

    Attributes:
        model: a transformers model in evaluation mode, or a BlockByBlock; None where a runner of the runtime
            runs it.
        tokenizer: its tokenizer; None for a model without text.
        checkpoint: its folder; None for a model made in memory.
        name: in messages and reports.
        loaded: the runner; None where transformers runs the model.
        fallback_reason: why it runs otherwise than was asked for; else empty.
    """

    model: Any
    tokenizer: Any = None
    checkpoint: Checkpoint | None = None
    name: str = "model"
    loaded: Loaded | None = None
    fallback_reason: str = ""

    @property
    def in_memory(self) -> bool:
        """Whether all of it is in memory, so that it can decode token by token."""
        return not isinstance(self.model, BlockByBlock)

    @property
    def vocabulary(self) -> int:
        """Columns of the logits that stand for tokens, without the rows that only pad the embedding."""
        if self.loaded is not None:
            columns = self.loaded.runner.vocabulary
        else:
            columns = int(self.model.get_output_embeddings().weight.shape[0])
        return columns if self.tokenizer is None else min(columns, len(self.tokenizer))

    @property
    def context(self) -> int | None:
        """Longest sequence in tokens; None where the config names no limit."""
        if self.loaded is not None:
            return self.loaded.runner.context
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return None if limit is None else int(limit)


@dataclass(frozen=True)
class ServingFormats:
    """The engine of a model and its formats.

    Attributes:
        activations: precision of the inputs of matrix products: float32, bfloat16, int16, int8, or two of
            them.
    """

    runner: str
    activations: str
    kv_dtype: str


def serving_formats(subject: Subject) -> ServingFormats:
    """The engine and formats of a subject."""
    if subject.loaded is None:
        dtype = str(subject.model.dtype).removeprefix("torch.")
        return ServingFormats("transformers" if subject.in_memory else "blocks", dtype, dtype)
    runner: Any = subject.loaded.runner
    return ServingFormats(type(runner).__name__.lower(), runner.activations, runner.facts["kv_dtype"])


def load_subject(
    model: str | Path | Checkpoint | Subject,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    runner: str = "transformers",
    kv_dtype: str = "auto",
    activations: int | str = "auto",
    larger: bool = False,
) -> Subject:
    """Load a model to measure it; a Subject is returned as it is.

    Args:
        dtype: float32, bfloat16, float16, or auto: in transformers float32 on a CPU, the checkpoint's own
            elsewhere; in the runtime the precision it serves with.
        runner: compiled, device, modules, transformers or blocks; auto: the runtime's choice, transformers
            for a model that it does not support.
        activations: bits of the inputs of products: auto, 16 or 8.
        larger: a model larger than the free memory runs block by block.

    Raises:
        ModelError: not a causal language model, or one that the named runner does not support.
        SettingsError: no such dtype, device, or ``kv_dtype``.
        CheckpointError: the folder is missing or damaged.
        MemoryNeededError: the model is larger than the free memory.
    """
    if isinstance(model, Subject):
        return model
    check_device(device)
    checkpoint = admit(model, text=True)
    formats: dict[str, Any] = {"runner": runner, "kv_dtype": kv_dtype, "activations": activations}
    if runner == "blocks":
        return _block_by_block(checkpoint, dtype, device)
    try:
        return _in_memory(checkpoint, dtype, device, formats)
    except MemoryNeededError as problem:
        if not larger:
            raise
        return _block_by_block(checkpoint, dtype, device, problem.message)


def _in_memory(checkpoint: Checkpoint, dtype: str, device: str, formats: dict[str, Any]) -> Subject:
    runner = formats["runner"]
    if runner == "transformers":
        return _in_transformers(checkpoint, dtype, device)
    try:
        loaded = load_runner(checkpoint, dtype=dtype, device=device, **formats)
    except ModelError as problem:
        if runner != "auto":
            raise
        return _in_transformers(checkpoint, dtype, device, problem.message)
    return Subject(None, loaded.tokenizer, checkpoint, checkpoint.name, loaded)


def _in_transformers(checkpoint: Checkpoint, dtype: str, device: str, reason: str = "") -> Subject:
    loaded = load_model(checkpoint, dtype=torch_dtype(dtype, device), device=device)
    if not loaded.can_generate():
        raise ModelError(
            f"{checkpoint.name} is a {type(loaded).__name__}, which does not predict next tokens",
            hint="evaluate takes language models and classifiers, generate causal language models",
        )
    return Subject(loaded, load_tokenizer(checkpoint), checkpoint, checkpoint.name, fallback_reason=reason)


def _block_by_block(checkpoint: Checkpoint, dtype: str, device: str, reason: str = "") -> Subject:
    model = BlockByBlock(
        checkpoint if quant_method(checkpoint) is None else Decoded(checkpoint),
        prepare=partial(round_activations, checkpoint),
        dtype=torch_dtype(dtype, "cpu") or torch.float32,
        device=device,
    )
    return Subject(model, load_tokenizer(checkpoint), checkpoint, checkpoint.name, fallback_reason=reason)


def torch_dtype(dtype: str, device: str) -> torch.dtype | None:
    """The torch dtype of a setting; None means the checkpoint's own."""
    if dtype not in DTYPES:
        raise SettingsError("dtype", dtype, ", ".join(DTYPES[:-1]) + f" or {DTYPES[-1]}")
    if dtype == "auto":
        return torch.float32 if device.startswith("cpu") else None
    named: torch.dtype = getattr(torch, dtype)
    return named


def check_device(device: str) -> None:
    """Raise SettingsError unless torch can put a tensor there."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as problem:  # torch asserts that it was built with CUDA
        raise SettingsError(
            "device", device, "a device that torch sees here: cpu, or cuda with an NVIDIA GPU"
        ) from problem
