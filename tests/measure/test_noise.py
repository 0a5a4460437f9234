"""The noise floor of a KL: products in bfloat16 against torch's own, and the fields it ends in."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from attar.measure import reference
from attar.measure.evaluate import measure_quality
from attar.measure.metrics import kl
from attar.measure.noise import Bfloat16Products
from attar.measure.reference import make_reference
from attar.measure.settings import EvaluateSettings
from attar.measure.subject import Subject
from tests.measure.measure_models import llama, words

SETTINGS = EvaluateSettings(tokens=96, sequence_length=16, batch_size=2, answers=0)


@pytest.fixture(scope="module")
def batches() -> list[Tensor]:
    return [torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(seed)) for seed in range(6)]


def test_products_round_factors_and_results() -> None:
    x, w = torch.randn(5, 64), torch.randn(7, 64)
    expected = (x.bfloat16().double() @ w.bfloat16().double().T).bfloat16().float()
    with Bfloat16Products():
        products = [functional.linear(x, w), x @ w.T, torch.matmul(x, w.T), torch.einsum("ik,jk->ij", x, w)]
        untouched = x + w[0]
    for product in products:
        assert torch.allclose(product, expected, rtol=2**-7, atol=1e-3)
        assert torch.equal(product, product.bfloat16().float())
    assert torch.equal(untouched, x + w[0]) and not torch.equal(x @ w.T, products[1])


def test_the_floor_is_that_of_torch_s_bfloat16(subject: Subject, batches: list[Tensor]) -> None:
    """Of eight of twelve rows, against autocast on the same ones, which rounds otherwise but as much."""
    result = make_reference(subject, SETTINGS, batches=batches)
    tokens = torch.cat(batches)[::2]
    with torch.no_grad():
        exact = subject.model(tokens).logits[:, :-1]
        with torch.autocast("cpu", torch.bfloat16):
            noisy = subject.model(tokens).logits[:, :-1].float()
    expected = kl(exact.flatten(0, 1), noisy.flatten(0, 1)).mean()
    assert result.noise["kl_noise_floor"] == pytest.approx(float(expected), rel=0.3)
    stderr = result.noise["kl_noise_floor_row_stderr"]
    assert stderr is not None and 0 < stderr < 0.5 * float(expected)


def test_every_evaluation_of_a_reference_has_its_floor(subject: Subject, batches: list[Tensor]) -> None:
    result = make_reference(subject, SETTINGS, batches=batches)
    again = make_reference(subject, SETTINGS, batches=batches, memory_limit=0)
    quality = measure_quality(Subject(llama(1), words(), None, "other"), SETTINGS, again)
    assert quality.kl_noise_floor == pytest.approx(result.noise["kl_noise_floor"], rel=1e-3)
    assert measure_quality(subject, SETTINGS, batches=batches).kl_noise_floor is None


@pytest.mark.parametrize("without", ["the setting", "float32"])
def test_without_float32_there_is_no_floor(
    subject: Subject, batches: list[Tensor], without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "Bfloat16Products", lambda: pytest.fail("the reference runs again"))
    rounded = Subject(llama(0).bfloat16(), words())
    subject, settings = (
        (rounded, SETTINGS) if without == "float32" else (subject, replace(SETTINGS, noise_floor=False))
    )
    assert not make_reference(subject, settings, batches=batches).noise
