"""A model under measurement: loaded once, with its tokenizer and the checkpoint it came from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attar.checkpoint import Checkpoint, open_checkpoint
from attar.errors import ModelError, SettingsError
from attar.measure.settings import DTYPES
from attar.models.load import load_model, load_tokenizer


@dataclass(frozen=True)
class Subject:
    """A causal language model ready to run.

    Attributes:
        model: a transformers model in evaluation mode.
        tokenizer: its tokenizer; None for bare models, which then have no text.
        checkpoint: the folder it came from; None for a model made in memory.
        name: what messages and reports call it.
    """

    model: Any
    tokenizer: Any = None
    checkpoint: Checkpoint | None = None
    name: str = "model"

    @property
    def vocabulary(self) -> int:
        """Columns of the logits that stand for a token: without the rows that only pad the embedding."""
        columns = int(self.model.get_output_embeddings().weight.shape[0])
        return columns if self.tokenizer is None else min(columns, len(self.tokenizer))

    @property
    def context(self) -> int | None:
        """How many tokens it can hold, or None where its configuration names no limit."""
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return None if limit is None else int(limit)


def load_subject(
    model: str | Path | Checkpoint | Subject, *, dtype: str = "auto", device: str = "cpu"
) -> Subject:
    """Load a model to measure it; one that is loaded already is returned as it is.

    Args:
        dtype: float32, bfloat16, float16, or auto: float32 on a CPU, the checkpoint's own elsewhere.

    Raises:
        ModelError: not a causal language model.
        SettingsError: no such dtype or device.
        CheckpointError: the folder is missing or damaged.
    """
    if isinstance(model, Subject):
        return model
    check_device(device)
    checkpoint = open_checkpoint(model)
    loaded = load_model(checkpoint, dtype=torch_dtype(dtype, device), device=device)
    if not loaded.can_generate():
        raise ModelError(
            f"{checkpoint.name} is a {type(loaded).__name__}, which does not predict next tokens",
            hint="evaluate and generate take causal language models",
        )
    return Subject(loaded, load_tokenizer(checkpoint), checkpoint, checkpoint.name)


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
