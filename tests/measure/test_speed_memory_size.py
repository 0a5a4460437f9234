"""Speed, memory and size: small checks that the numbers mean what they say."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from attar.checkpoint import open_checkpoint
from attar.measure import footprint as memory
from attar.measure.footprint import measure_size, peak_device_bytes, peak_rss_bytes, reset_peak
from attar.measure.generation import measure_speed
from attar.measure.subject import Subject, load_subject
from tests import tiny_models
from tests.measure.measure_models import llama, words


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return tiny_models.save(tiny_models.build("llama3"), tmp_path_factory.mktemp("speed") / "model")


@pytest.mark.parametrize("runner", ["auto", "transformers"])
def test_speed_counts_tokens_and_rounds(folder: Path, runner: str) -> None:
    subject = load_subject(folder, runner=runner)
    start = time.perf_counter()
    speed = measure_speed(subject, prompt_tokens=16, decode_tokens=4, rounds=3, budget=60.0)
    seconds = time.perf_counter() - start
    assert (speed.prompt_tokens, speed.decode_tokens, speed.rounds) == (16, 4, 3)
    assert speed.prefill_tokens_per_s > 16 / seconds
    assert speed.decode_tokens_per_s > 4 / seconds
    assert speed.prefill_spread is not None and speed.decode_spread is not None


def test_speed_of_a_known_delay(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose every pass takes 2 ms decodes at most 500 tokens/s, and one round has no spread."""
    model = llama(0)
    forward = model.forward

    def slow(*inputs: Any, **options: Any) -> Any:
        time.sleep(0.002)
        return forward(*inputs, **options)

    monkeypatch.setattr(model, "forward", slow)
    speed = measure_speed(Subject(model, words()), prompt_tokens=10, decode_tokens=5, budget=0.0)
    assert 0 < speed.decode_tokens_per_s <= 500
    assert 0 < speed.prefill_tokens_per_s <= 5000
    assert (speed.rounds, speed.prefill_spread, speed.decode_spread) == (1, None, None)


def test_speed_fits_the_context(tiny_model: Any) -> None:
    speed = measure_speed(Subject(tiny_model, words()), prompt_tokens=500, decode_tokens=500, rounds=1)
    assert (speed.prompt_tokens, speed.decode_tokens) == (31, 32)


def test_peak_sees_what_came_and_went() -> None:
    if not reset_peak():
        pytest.skip("this system cannot forget a peak")
    before = peak_rss_bytes()
    torch.ones(16 * 2**20).sum()  # 64 MiB, freed at once
    assert peak_rss_bytes() - before > 40 * 2**20
    reset_peak()
    assert peak_rss_bytes() - before < 40 * 2**20


def test_peak_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "STATUS", tmp_path / "none")
    monkeypatch.setattr(memory, "CLEAR", tmp_path / "none" / "none")
    assert not reset_peak()
    assert peak_rss_bytes() > 10**7
    assert peak_device_bytes("cpu") is None


def checkpoint(folder: Path, tensors: dict[str, torch.Tensor]) -> Any:
    folder.mkdir()
    groups = {"a": {"weights": {"num_bits": 4}}}
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups},
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(folder)


def test_size_of_a_packed_checkpoint(tmp_path: Path) -> None:
    """A 4-bit weight 8 x 70 (its rows padded to 9 words), an int8 embedding with scales, and a norm."""
    opened = checkpoint(
        tmp_path / "packed",
        {
            "a.weight_packed": torch.zeros(8, 9, dtype=torch.int32),
            "a.weight_scale": torch.zeros(8, 2, dtype=torch.bfloat16),
            "a.weight_shape": torch.tensor([8, 70]),
            "e.weight": torch.zeros(10, 4, dtype=torch.int8),
            "e.weight_scale": torch.zeros(10, 1, dtype=torch.bfloat16),
            "n.weight": torch.zeros(4, dtype=torch.bfloat16),
        },
    )
    size = measure_size(opened)
    assert size.parameters == 8 * 70 + 40 + 4
    assert size.bytes == 8 * 9 * 4 + 8 * 2 * 2 + 16 + 40 + 20 + 8
    assert size.bits_per_weight == pytest.approx(8 * size.bytes / size.parameters)


def test_size_in_memory_counts_tied_weights_once() -> None:
    model = llama(0, tie_word_embeddings=True)
    size = measure_size(Subject(model))
    assert size.parameters == sum(each.numel() for each in model.parameters())
    assert size.parameters < sum(each.numel() for each in model.state_dict().values())
    assert size.bits_per_weight == 32.0
