"""What feedback leaves of an error: against the theorem, and what is kept of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attar.checkpoint import open_checkpoint
from attar.errors import CheckpointError
from attar.planner.costs import layer_groups
from attar.planner.settings import PlanSettings
from attar.progress import SILENT
from attar.quantization.hessian import factorize
from attar.quantization.mixed_precision import feedback, search
from attar.quantization.mixed_precision.feedback import FeedbackGains, feedback_gains, output_errors
from attar.quantization.settings import quantize_settings
from attar.sensitivity.weight_changes import group_name
from tests import tiny_models


def correlated(columns: int, decay: float) -> Tensor:
    """H (K, K) of inputs whose directions have energies that fall with their number."""
    generator = torch.Generator().manual_seed(3)
    mix = torch.randn(columns, columns, generator=generator).double()
    directions, _ = torch.linalg.qr(mix)
    energies = torch.exp(-decay * torch.arange(columns, dtype=torch.float64) / columns)
    return ((directions * energies) @ directions.T).float()


@pytest.mark.parametrize("bits", [3, 4, 6])
@pytest.mark.parametrize("decay", [0.0, 2.0, 6.0])
def test_the_gain_is_that_of_quips_theorem(bits: int, decay: float) -> None:
    """sum_k D_k / sum_k H_kk for errors of one size, D of H = L D L^T in the order of rounding."""
    H, weight = correlated(128, decay), torch.randn(512, 128, generator=torch.Generator().manual_seed(4))
    factor = factorize(H)
    fed, nearest = output_errors(weight, H, factor, bits)
    ordered = H[factor.order][:, factor.order].double().flip(0, 1)
    D = torch.linalg.cholesky(ordered).diagonal().square()
    assert fed / nearest == pytest.approx(float(D.sum() / ordered.trace()), rel=0.12)


def test_two_bits_leave_more_than_four() -> None:
    H, weight = correlated(256, 12.0), torch.randn(256, 256, generator=torch.Generator().manual_seed(4))
    gains = FeedbackGains({"g": [tuple(output_errors(weight, H, factorize(H), bits) for bits in (2, 3, 4))]})
    two, three, four = (gains.of("g", f"W{bits}A16") for bits in (2, 3, 4))
    assert 1.3 * four < two < 1 and four < three < two
    assert (
        gains.of("g", "Q8_0") == four and gains.of("g", "Q1_0") == two and gains.of("other", "W4A16") == 1.0
    )


@pytest.fixture
def settings(tmp_path: Path) -> Any:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    return PlanSettings(size="1MB", data=str(tmp_path / "text.txt"), sequence_length=16, batch_size=4)


def test_gains_are_measured_once(settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_models.save(tiny_models.build("llama3"), tmp_path / "m")
    checkpoint = open_checkpoint(folder)
    groups = {**layer_groups(checkpoint), "lm_head": ["lm_head"]}
    monkeypatch.setattr(feedback, "TOKENS", 64)
    file = tmp_path / "sensitivity-1.json"
    gains = feedback_gains(checkpoint, groups, "gptq", settings, file)
    assert gains.errors.keys() == groups.keys() and gains.of("lm_head", "W4A16") == 1.0  # in no block
    assert all(0 < gains.of(group, "W4A16") < 1 for group in groups if group != "lm_head")
    monkeypatch.setattr(feedback, "sweep_linears", None)
    assert feedback_gains(checkpoint, groups, "gptq", settings, file) == gains
    assert sorted(path.name for path in tmp_path.glob("*sensitivity*")) == ["sensitivity-1-feedback.json"]
    nearest = feedback_gains(checkpoint, groups, "rtn", settings, tmp_path / "other.json")
    assert nearest == FeedbackGains()


@pytest.mark.parametrize(
    "text",
    [
        '{"format": "x"}',
        '{"format": "attar feedback", "version": 1, "errors": 1}',
        '{"format": "attar feedback", "version": 1, "errors": {"a": [[1, 2]]}}',
        '{"format": "attar feedback", "version": 1, "errors": {"a": [[1, 2], [1, 2], [-1, 2]]}}',
    ],
)
def test_a_damaged_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"a\.json"):
        feedback.read_errors(tmp_path / "a.json")


def test_bits_go_where_the_method_leaves_losses(settings: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """The group of which GPTQ leaves nothing gets the fewest bits, whichever it is."""
    monkeypatch.setenv("ATTAR_CACHE", str(tmp_path / "cache"))
    checkpoint = open_checkpoint(tiny_models.save(tiny_models.build("llama3"), tmp_path / "m"))
    asked = quantize_settings(
        method="gptq", bits=4.5, group_size=32, data=settings.data, samples=2, sequence_length=16
    )
    for spared in list(layer_groups(checkpoint).values())[:2]:
        group = group_name(spared)
        gone = FeedbackGains({group: [((1e-9, 1.0),) * 3]})
        monkeypatch.setattr(search, "feedback_gains", lambda *args, gone=gone, **kinds: gone)
        schemes, _ = search.choose_bits(checkpoint, asked, tmp_path / "work", SILENT)
        assert {schemes[module] for module in spared} == {"W2A16"}
