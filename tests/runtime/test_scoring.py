"""Logits of whole prompts: those of the model, however the pool and the limits divide them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from attar.errors import SettingsError
from attar.models.loading.load import load_model
from attar.runtime import scoring
from attar.runtime.loading import load
from attar.runtime.scoring import prompt_logits
from tests import tiny_models

PROMPTS = [[5, 6, 7], list(range(2, 40)), [9], list(range(60, 76)), list(range(100, 117))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return tiny_models.save(tiny_models.build("qwen2"), tmp_path_factory.mktemp("scoring") / "model")


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[torch.Tensor]:
    model = load_model(folder, dtype=torch.float32)
    return [tiny_models.logits(model, torch.tensor([prompt]))[0] for prompt in PROMPTS]


@pytest.mark.few(3)
@pytest.mark.parametrize("kv_tokens", [48, 64, 1024])
@pytest.mark.parametrize("limit", [1, 40 * 320 * 4, 2**28])
def test_logits_are_the_model_s(folder: Path, wanted: list[torch.Tensor], kv_tokens: int, limit: int) -> None:
    runner = load(folder, runner="modules", dtype="float32", kv_tokens=kv_tokens).runner
    for _ in range(2):  # nothing is kept
        actual = list(prompt_logits(runner, PROMPTS, limit=limit))
        assert [len(item) for item in actual] == [len(prompt) for prompt in PROMPTS]
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(actual, wanted, strict=True))


def test_only_the_last_logits(folder: Path, wanted: list[torch.Tensor], monkeypatch: Any) -> None:
    monkeypatch.setattr(scoring, "STEP_TOKENS", 20)  # a longer prompt runs alone
    runner = load(folder, runner="modules", dtype="float32", kv_tokens=64).runner
    actual = list(prompt_logits(runner, PROMPTS, [1, 4, 1, 2, 17]))
    assert [len(item) for item in actual] == [1, 4, 1, 2, 17]
    assert all(torch.allclose(a, b[-len(a) :], atol=1e-4) for a, b in zip(actual, wanted, strict=True))


def test_a_prompt_longer_than_the_pool_is_one_line(folder: Path) -> None:
    runner = load(folder, runner="modules", kv_tokens=32).runner
    with pytest.raises(SettingsError, match="38"):
        list(prompt_logits(runner, PROMPTS))
    assert list(prompt_logits(runner, [])) == []
