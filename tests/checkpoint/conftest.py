"""Tiny checkpoints, made on the spot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.checkpoint_files import CONFIG, llama_tensors


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep attar's cache out of the home folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.delenv("ATTAR_CACHE", raising=False)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """``make(name, config=..., tensors=..., files=...)``: a model folder; a file is text or a JSON object."""

    def make(
        name: str = "model",
        config: dict[str, Any] | None = None,
        tensors: dict[str, torch.Tensor] | None = None,
        files: dict[str, Any] | None = None,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
        save_file(llama_tensors() if tensors is None else tensors, folder / "model.safetensors")
        for file, content in (files or {"tokenizer.json": {"model": "made up"}}).items():
            (folder / file).write_text(content if isinstance(content, str) else json.dumps(content))
        return folder

    return make
