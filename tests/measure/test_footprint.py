"""Size and peak memory: small checks that the numbers are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from attar import memory
from attar.checkpoint import open_checkpoint
from attar.measure import footprint
from attar.measure.footprint import measure_size, peak_device_bytes, reset_peak
from attar.measure.subject import Subject
from attar.memory import peak_rss_bytes
from tests.measure.measure_models import llama


def test_peak_sees_what_came_and_went() -> None:
    if not reset_peak():
        pytest.skip("this system cannot forget a peak")
    before = peak_rss_bytes()
    torch.ones(64 * 2**20).sum()  # 256 MiB, freed at once; what else comes and goes meanwhile is less
    assert peak_rss_bytes() - before > 128 * 2**20
    reset_peak()
    assert peak_rss_bytes() - before < 128 * 2**20


def test_peak_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "STATUS", tmp_path / "none")
    monkeypatch.setattr(footprint, "CLEAR", tmp_path / "none" / "none")
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
    assert size.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert size.parameters < sum(parameter.numel() for parameter in model.state_dict().values())
    assert size.bits_per_weight == 32.0
