"""MinHash against exact Jaccard similarities."""

import random
import time

import numpy as np
import pytest

from attar.collection.filters.near_duplicates import (
    SHINGLE,
    SIGNATURE,
    jaccard,
    near_duplicates,
    repeated,
    rows_of_band,
    shingles,
    signature,
)
from attar.collection.filters.settings import FilterSettings
from attar.data.words import words


def exact(left: str, right: str) -> float:
    """Jaccard similarity of sets of tuples of words, without a hash."""
    sets = []
    for text in (left, right):
        sequence = words(text)
        run = min(SHINGLE, len(sequence))
        sets.append({tuple(sequence[n : n + run]) for n in range(len(sequence) - run + 1)})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def corpus(count: int, seed: int) -> list[str]:
    """Texts of 30 to 120 words, most of them an earlier one with some words exchanged."""
    rng = random.Random(seed)
    texts: list[str] = []
    for _ in range(count):
        if texts and rng.random() < 0.7:
            sequence = rng.choice(texts).split()
            for _ in range(rng.choice((0, 1, 1, 2, 3, 8))):
                sequence[rng.randrange(len(sequence))] = f"w{rng.randrange(10**6)}"
        else:
            sequence = [f"w{rng.randrange(3000)}" for _ in range(rng.randrange(30, 120))]
        texts.append(" ".join(sequence))
    return texts


def test_the_same_jaccard_as_sets_of_words():
    texts = corpus(40, 1)
    for left, right in zip(texts, texts[::-1], strict=True):
        assert jaccard(shingles(left), shingles(right)) == exact(left, right)


def test_the_share_of_equal_minima_estimates_jaccard():
    rng = np.random.default_rng(0)
    for common, own in ((900, 50), (500, 250), (200, 400), (0, 500)):
        estimates = []
        for _ in range(60):
            values = rng.integers(0, 2**64, common + 2 * own, np.uint64)
            left, right = values[: common + own], np.r_[values[:common], values[common + own :]]
            estimates.append((signature(left) == signature(right)).mean())
        J = common / (common + 2 * own)
        error = (J * (1 - J) / (SIGNATURE * 60)) ** 0.5
        assert abs(np.mean(estimates) - J) <= 4 * error + 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("similarity", [0.5, 0.8, 0.95])
def test_every_repetition_is_one_and_nearly_all_are_seen(similarity):
    texts = corpus(250, 2)
    originals = repeated([shingles(text) for text in texts], similarity)
    kept = [number for number, original in enumerate(originals) if original < 0]
    missed = 0
    for number, original in enumerate(originals):
        if original >= 0:
            assert original < number
            assert originals[original] < 0
            assert exact(texts[number], texts[original]) >= similarity
        else:
            missed += any(exact(texts[number], texts[o]) >= similarity for o in kept if o < number)
    assert len(kept) < 230
    assert missed <= 3


def test_bands_propose_a_pair_at_the_limit():
    for similarity in (0.1, 0.5, 0.8, 0.95, 1.0):
        rows = rows_of_band(similarity)
        assert 1 - (1 - similarity**rows) ** (SIGNATURE // rows) >= 0.99 or rows == 1
    assert rows_of_band(0.8) > rows_of_band(0.5) > 1


@pytest.mark.parametrize("own", [60, 100])
def test_a_template_around_every_prompt_costs_little(own, monkeypatch):
    """The bands propose most pairs; few of them are computed, and a repetition is still seen."""
    rng, template = random.Random(0), [f"t{n}" for n in range(200)]
    texts = [" ".join([*template, *(f"w{rng.randrange(3000)}" for _ in range(own))]) for _ in range(120)]
    computed = []

    def counting(left, right):
        computed.append(1)
        return jaccard(left, right)

    monkeypatch.setattr("attar.collection.filters.near_duplicates.jaccard", counting)
    originals = repeated([shingles(text) for text in [*texts, texts[7]]], 0.8)
    assert originals == [-1] * 120 + [7]
    assert len(computed) < 0.02 * 120 * 119 / 2


def test_one_answer_to_two_prompts_is_no_repetition():
    answer = "it is a good idea to read the whole text before you answer any question about it"
    prompts = [
        f"question {n} of the {n + 7} that somebody asked about a text on page {n * 3}" for n in range(3)
    ]
    rows = [
        {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}
        for prompt in [*prompts, prompts[0]]
    ]
    reasons = near_duplicates(rows, FilterSettings())
    assert [bool(reason) for reason in reasons] == [False, False, False, True]
    assert near_duplicates([{"text": ""}, {"text": ""}], FilterSettings()) == ["", ""]


@pytest.mark.slow
def test_a_hundred_thousand_rows_in_minutes():
    rng = random.Random(0)
    vocabulary = [f"w{n}" for n in range(5000)]
    rows = [{"text": " ".join(rng.choices(vocabulary, k=150))} for _ in range(50_000)]
    start = time.process_time()
    reasons = near_duplicates([*rows, *rows], FilterSettings())
    assert time.process_time() - start < 240
    assert sum(map(bool, reasons)) == 50_000
