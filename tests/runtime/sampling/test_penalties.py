"""Penalties against plain arithmetic and against transformers."""

from __future__ import annotations

import torch
from transformers import RepetitionPenaltyLogitsProcessor

from attar.runtime.sampling.params import SamplingParams
from attar.runtime.sampling.penalties import TokenHistory, ban_, bias_, penalise_


def test_known_point() -> None:
    """Token 0 in the prompt, 1 once and 2 twice in the text, 3 in both, 4 nowhere."""
    logits = torch.tensor([2.0, -2.0, 4.0, 1.0, 3.0])
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    penalise_(logits, params, TokenHistory([0, 3, 0], [2, 1, 2, 3]))
    expected = [2 / 2, -2 * 2 - 0.5 - 0.25, 4 / 2 - 2 * 0.5 - 0.25, 1 / 2 - 0.5 - 0.25, 3.0]
    assert logits.tolist() == expected


def test_repetition_is_that_of_transformers() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    ids = [3, 9, 3, 40, 41, 9]
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([ids]), logits.clone())
    for cut in range(len(ids)):  # whatever is prompt and whatever text
        got = logits[0].clone()
        penalise_(got, SamplingParams(repetition_penalty=1.3), TokenHistory(ids[:cut], ids[cut:]))
        assert torch.equal(got, expected[0])


def test_history_grows_and_branches() -> None:
    history = TokenHistory([1], [2])
    history.add(2)
    later = history.after([5, 2])
    assert dict(history.counts) == {2: 2}
    assert dict(later.counts) == {2: 3, 5: 1}
    assert later.prompt.tolist() == [1]


def test_bias_and_ban() -> None:
    logits = torch.zeros(4)
    bias_(logits, SamplingParams(logit_bias={1: 2.5, 3: -1.0}))
    assert logits.tolist() == [0.0, 2.5, 0.0, -1.0]
    ban_(logits, [0], torch.tensor([True, True, False, True]))
    assert logits.tolist() == [-torch.inf, 2.5, -torch.inf, -1.0]
