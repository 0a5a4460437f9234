"""Draws: the right law, and noise that belongs to (seed, sample, position)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attar.runtime.sampling import sample as sampling
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.sampling.sample import ACCEPT, TOKEN, draw, noise_key, sample, uniforms
from attar.runtime.sampling.warp import SamplingRow, warp

SPLITMIX = (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431)


def test_noise_is_splitmix64() -> None:
    """The generator's published first outputs for the seed 1234567."""
    got = uniforms(1234567, np.arange(4))
    expected = [((bits >> 11) + 0.5) * 2.0**-53 for bits in SPLITMIX]
    assert got.tolist() == expected


def test_a_token_s_noise_does_not_depend_on_which_others_are_asked_for() -> None:
    key = noise_key(5, 0, 17)
    some = np.array([3, 900, 31])
    assert np.array_equal(uniforms(key, some), uniforms(key, np.arange(1000))[some])
    assert np.array_equal(uniforms(2**64 - 1, some), uniforms(2**64 - 1, some.reshape(1, 3))[0])


def test_keys_differ_in_every_argument() -> None:
    positions = [
        (0, 0, 0, 0),
        (1, 0, 0, 0),
        (0, 1, 0, 0),
        (0, 0, 1, 0),
        (0, 0, 0, ACCEPT),
        (2**64 - 1, 0, 0, 0),
    ]
    keys = [noise_key(*index) for index in positions]
    assert len(set(keys)) == len(keys)
    assert noise_key(0, 0, 0) == noise_key(0, 0, 0, TOKEN)


def test_known_tokens() -> None:
    """What "equal seeds give equal texts" promises from version to version: this must not change."""
    p = torch.full((12, 10), 0.1)
    tokens = draw(p, [noise_key(42, 0, position) for position in range(12)])
    assert tokens == [4, 9, 1, 7, 5, 5, 7, 2, 4, 8, 0, 2]


def chi_square(counts: torch.Tensor, p: torch.Tensor) -> float:
    expected = p.double() * counts.sum()
    support = p > 0
    return float(((counts - expected)[support] ** 2 / expected[support]).sum())


def test_the_law_is_p_over_positions_seeds_and_samples() -> None:
    p = torch.tensor([0.4, 0.0, 0.3, 0.15, 0.1, 0.05])
    draws = 2000
    for keys in (
        [noise_key(1, 0, index) for index in range(draws)],
        [noise_key(index, 0, 9) for index in range(draws)],
        [noise_key(1, index, 9) for index in range(draws)],
    ):
        counts = torch.bincount(torch.tensor(draw(p.expand(draws, 6), keys)), minlength=6)
        assert counts[1] == 0
        assert chi_square(counts, p) < 23.5  # 4 degrees of freedom: 1e-4


def test_weights_need_not_sum_to_one() -> None:
    p = torch.tensor([[0.2, 0.5, 0.3]])
    for position in range(50):
        key = [noise_key(3, 0, position)]
        assert draw(p, key) == draw(p * 7, key)


def test_near_distributions_mostly_draw_the_same_token() -> None:
    """Gumbel coupling: P(equal) >= (1 - TV) / (1 + TV)."""
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    keys = [noise_key(0, 0, position) for position in range(3000)]
    a, b = draw(p.expand(3000, 3), keys), draw(q.expand(3000, 3), keys)
    equal = sum(x == y for x, y in zip(a, b, strict=True)) / 3000
    assert equal > (1 - 0.1) / (1 + 0.1) - 0.02
    independent = float((p * q).sum())
    assert equal > 2 * independent - 0.05


def test_a_row_s_token_does_not_depend_on_the_batch() -> None:
    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_k=5)] * 2
    rows = [SamplingRow(param) for param in params]
    keys = [noise_key(number, 0, 30) for number in range(6)]
    together = sample(logits, rows, keys)
    alone = [sample(logits[n : n + 1], rows[n : n + 1], keys[n : n + 1])[0] for n in range(6)]
    assert together == alone
    assert together[1] == int(logits[1].argmax())
    assert together[0] == draw(warp(logits[:1], rows[:1]), keys[:1])[0]


def test_only_those_that_can_win_are_looked_at_and_it_changes_nothing() -> None:
    """The race as it is written, over all tokens: flat, peaked, sparse and tied distributions."""
    draws = np.random.default_rng(0)
    for scale in (0.0, 1.0, 4.0, 20.0):
        logits = torch.from_numpy(draws.standard_normal((40, 500)).astype(np.float32) * scale)
        p = logits.softmax(-1)
        p[::2, ::3] = 0.0
        keys = [noise_key(int(scale), 0, position) for position in range(40)]
        every = np.arange(500)
        with np.errstate(divide="ignore"):
            race = [np.log(uniforms(key, every)) / row for key, row in zip(keys, p.numpy(), strict=True)]
        assert draw(p, keys) == [int(item.argmax()) for item in race]


def test_rows_sampled_together_as_on_a_gpu_get_the_tokens_of_single_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)) * 3
    params = [
        SamplingParams(temperature=t, top_k=k) for t, k in ((1.0, 0), (0.0, 0), (0.7, 20), (1.3, 5), (0, 0))
    ]
    rows, keys = [SamplingRow(one) for one in params], [noise_key(index, 0, 7) for index in range(5)]
    single = sample(logits, rows, keys)
    monkeypatch.setattr(sampling, "_parts", lambda indices, device: [indices])
    assert sample(logits, rows, keys) == single
