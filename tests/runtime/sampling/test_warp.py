"""Warped distributions against transformers, and their edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from attar.errors import NumericsError, SettingsError
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.sampling.penalties import TokenHistory
from attar.runtime.sampling.sample import sample
from attar.runtime.sampling.warp import SamplingRow, _truncate_anywhere, scale_by_temperature, truncate, warp

V = 64
SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7),
    SamplingParams(top_k=5),
    SamplingParams(top_k=1),
    SamplingParams(top_k=10_000),
    SamplingParams(top_p=0.6),
    SamplingParams(top_p=1e-9),
    SamplingParams(min_p=0.2),
    SamplingParams(temperature=1.7, top_k=20, top_p=0.8, min_p=0.05),
    SamplingParams(temperature=0.4, top_p=0.95, min_p=0.3),
]


def random_logits(rows: int, columns: int = V, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 3


def peers(logits: Tensor, params: SamplingParams) -> Tensor:
    """transformers' warpers, in its order."""
    if params.greedy:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    chain = LogitsProcessorList([TemperatureLogitsWarper(float(params.temperature))])
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        chain.append(MinPLogitsWarper(params.min_p))
    return chain(torch.zeros(len(logits), 1, dtype=torch.long), logits.clone()).softmax(-1)


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_equals_transformers(params: SamplingParams) -> None:
    logits = random_logits(8)
    kept = logits.clone()
    p = warp(logits, [SamplingRow(params)] * 8)
    assert torch.equal(logits, kept), "the input was modified"
    assert p.dtype == torch.float32
    torch.testing.assert_close(p, peers(logits, params), rtol=1e-5, atol=1e-7)
    assert torch.equal(p > 0, peers(logits, params) > 0)


def test_a_row_does_not_depend_on_the_batch() -> None:
    logits = random_logits(len(SETTINGS))
    together = warp(logits, [SamplingRow(params) for params in SETTINGS])
    for number, params in enumerate(SETTINGS):
        alone = warp(logits[number : number + 1], [SamplingRow(params)])
        assert torch.equal(together[number], alone[0]), params


def test_a_wide_vocabulary() -> None:
    logits = random_logits(2, 5000) * 0.01
    params = SamplingParams(top_p=0.9)
    p = warp(logits, [SamplingRow(params), SamplingRow(SamplingParams(top_p=0.05))])
    assert int((p[0] > 0).sum()) > 4000 > int((p[1] > 0).sum()) > 1
    torch.testing.assert_close(p[0], peers(logits, params)[0], rtol=1e-4, atol=1e-9)


def test_ties_at_a_cut_all_stay() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.75)):
        p = warp(logits, [SamplingRow(params)])
        assert (p > 0).tolist() == [[True, True, True, True, False]]
        assert p[0, 1] == p[0, 2] == p[0, 3]


def test_top_p_keeps_until_the_mass_is_reached() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    kept = {
        mass: int((warp(logits, [SamplingRow(SamplingParams(top_p=mass))]) > 0).sum())
        for mass in (0.4, 0.6, 0.8)
    }
    assert kept == {0.4: 1, 0.6: 2, 0.8: 4}  # the last two tie


def test_penalties_bias_and_bans_come_before_the_temperature() -> None:
    logits = random_logits(1)
    params = SamplingParams(temperature=0.5, repetition_penalty=1.5, logit_bias={7: 2.0}, top_k=9)
    row = SamplingRow(params, TokenHistory([1, 2], [3]), banned=(4,))
    x = logits[0].clone()
    for token in (1, 2, 3):
        x[token] = x[token] / 1.5 if x[token] > 0 else x[token] * 1.5
    x[7] += 2.0
    x[4] = -torch.inf
    expected = peers(x.unsqueeze(0), SamplingParams(temperature=0.5, top_k=9))
    torch.testing.assert_close(warp(logits, [row]), expected)


def test_a_mask_allows_only_what_it_says() -> None:
    allowed = torch.zeros(V, dtype=torch.bool)
    allowed[[5, 6]] = True
    p = warp(random_logits(1), [SamplingRow(SamplingParams(), allowed=allowed)])
    assert p[0].nonzero().squeeze(-1).tolist() == [5, 6]


def test_a_tiny_temperature_is_nearly_greedy_and_does_not_overflow() -> None:
    logits = random_logits(3) * 1e4
    p = warp(logits, [SamplingRow(SamplingParams(temperature=1e-6))] * 3)
    assert torch.equal(p, warp(logits, [SamplingRow(SamplingParams(temperature=0.0))] * 3))


TINY = [float(T) for T in np.logspace(-323, -6, 40)] + [5e-324, 1e-300, 7e-46, 1e-45, 1.2e-38]
CUTS: list[dict[str, object]] = [
    {},
    {"top_p": 0.9},
    {"top_k": 3},
    {"min_p": 0.1},
    {"top_p": 1e-300, "min_p": 5e-324, "top_k": 2},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.5},
    {"logit_bias": {3: 5.0, 7: -100.0}},
]


@pytest.mark.few(3)
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_every_tiny_temperature_is_the_greedy_choice(cuts: dict[str, object]) -> None:
    """Also those that float32 does not have: 1e-300 once became 0, and the row NaN."""
    logits = random_logits(2)
    allowed = torch.ones(V, dtype=torch.bool)
    allowed[logits[0].argmax()] = False
    for mask in (None, allowed):
        rows = [
            SamplingRow(SamplingParams(temperature=T, **cuts), TokenHistory([1, 2], [3]), (4,), mask)  # type: ignore[arg-type]
            for T in (0.0, *TINY)
        ]
        greedy, *p = (warp(logits, [row] * 2) for row in rows)
        for T, actual in zip(TINY, p, strict=True):
            assert torch.equal(actual, greedy), T
        for row in rows:
            assert sample(logits, [row] * 2, [5, 6]) == greedy.argmax(-1).tolist()


def test_a_tiny_temperature_in_the_batch_changes_no_other_row() -> None:
    logits = random_logits(3)
    rows = [SamplingRow(SamplingParams(temperature=T)) for T in (1e-300, 0.7, 1e6)]
    for number, row in enumerate(rows):
        assert torch.equal(warp(logits, rows)[number], warp(logits[number : number + 1], [row])[0])


@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 0.3, 1.0, 2.5, 1e3, 1e6])
def test_every_other_temperature_divides_as_float64_does(temperature: float) -> None:
    logits = random_logits(4)
    logits[:, 5] = -torch.inf
    x = logits.double()
    expected = ((x - x.amax(-1, keepdim=True)) / temperature).softmax(-1)
    p = warp(logits, [SamplingRow(SamplingParams(temperature=temperature))] * 4)
    torch.testing.assert_close(p.double(), expected, atol=1e-7, rtol=0)


@pytest.mark.parametrize("temperature", [1e300, 1.1e6, math.inf, math.nan, -1e-300, -0.1, 10**400, True])
def test_temperatures_that_are_none_are_refused(temperature: float) -> None:
    with pytest.raises(SettingsError, match="temperature"):
        SamplingParams(temperature=temperature)


def test_heat_has_no_nan_at_any_float() -> None:
    """Beyond what parameters allow, too: the verifier and others call it."""
    logits = torch.tensor([[0.0, -1.0, -torch.inf, -1e-30]])
    for T in (5e-324, 1e-45, 1e38, 1e39, 1e300, 1.7e308):
        row = SamplingRow(SamplingParams())
        object.__setattr__(row.params, "temperature", T)
        assert not scale_by_temperature(logits, logits.amax(-1, keepdim=True), [row]).isnan().any(), T


def test_half_precision_is_computed_in_float32() -> None:
    logits = random_logits(1).bfloat16()
    assert torch.equal(
        warp(logits, [SamplingRow(SamplingParams())]), warp(logits.float(), [SamplingRow(SamplingParams())])
    )


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_numbers_that_are_none_are_refused(value: float, temperature: float) -> None:
    logits = random_logits(2)
    logits[1, 3] = value
    with pytest.raises(NumericsError):
        warp(logits, [SamplingRow(SamplingParams(temperature=temperature))] * 2)


def test_nothing_left_to_draw_is_refused() -> None:
    row = SamplingRow(SamplingParams(), allowed=torch.zeros(V, dtype=torch.bool))
    with pytest.raises(NumericsError):
        warp(random_logits(1), [row])


def test_the_cuts_are_those_of_other_devices() -> None:
    draws = torch.Generator().manual_seed(1)
    for scale in (0.5, 3.0, 10.0):
        params = [
            SamplingParams(top_k=k, top_p=p, min_p=m)
            for k, p, m in ((0, 0.9, 0.0), (40, 1.0, 0.0), (3, 0.5, 0.1), (0, 0.999, 0.0), (700, 0.99, 0.0))
        ]
        x = torch.randn(5, 800, generator=draws) * scale
        x = (x - x.amax(-1, keepdim=True)).round(decimals=1)  # with ties
        torch.testing.assert_close(truncate(x.clone(), params), _truncate_anywhere(x.clone(), params))
