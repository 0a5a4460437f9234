"""Texts drawn round by round with the real noise, after all warps: their law is plain decoding's.

The law is enumerated; 1500 texts are fast, 10^5 are slow. Wrong variants are refused by the same test.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache

import numpy as np
import pytest
import torch

from attar.runtime.sampling.params import SamplingParams
from attar.runtime.sampling.penalties import TokenHistory
from attar.runtime.sampling.sample import noise_key, uniforms
from attar.runtime.sampling.warp import SamplingRow, warp
from attar.runtime.speculate.chain import block
from attar.runtime.speculate.draft import Draft, Floats, Verdict
from attar.runtime.speculate.noise import Noise
from attar.runtime.speculate.tree import walk
from attar.runtime.speculate.verify import verify_greedy
from tests.runtime.speculate import wrong
from tests.runtime.speculate.laws import Model, fits, plain_law

V, LENGTH, PROMPT = 6, 3, (1, 4)
PARAMS = SamplingParams(
    temperature=0.8, top_k=4, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={2: 0.5}
)


def warped(seed: int) -> Model:
    """A model of logits, after the warps that its prefix asks for."""

    @cache
    def model(prefix: tuple[int, ...]) -> np.ndarray:
        logits = np.random.default_rng([seed, *prefix[-2:]]).normal(size=V) * 1.5
        row = SamplingRow(PARAMS, TokenHistory(PROMPT, prefix))
        return warp(torch.from_numpy(logits).float()[None], [row])[0].numpy()

    return model


TARGET, SMALL = warped(1), warped(2)


@lru_cache(maxsize=1)
def law() -> np.ndarray:
    return plain_law(TARGET, LENGTH)


Drafter = Callable[[tuple[int, ...], Noise], Draft]
Judge = Callable[[tuple[int, ...], Draft, Noise], Verdict]


def chained(context: tuple[int, ...], noise: Noise) -> Draft:
    """Three tokens, each drawn from SMALL with the round's noise."""
    tokens: tuple[int, ...] = ()
    rows = []
    for depth in range(3):
        rows.append(SMALL((*context, *tokens)))
        tokens += (drawn(rows[-1], noise.drafting(depth))[0],)
    return Draft.chain(tokens, rows)


def forked(rule: str) -> Drafter:
    """Two children, the first of which has two more."""

    def drafter(context: tuple[int, ...], noise: Noise) -> Draft:
        q = SMALL(context)
        one, two = drawn(q, noise.drafting(0))[:2]
        if rule == "iid":
            two = drawn(q, noise.drafting(7))[0]
        deeper = SMALL((*context, one))
        three, four = drawn(deeper, noise.drafting(1))[:2]
        if rule == "iid":
            four = drawn(deeper, noise.drafting(8))[0]
        return Draft((one, two, three, four), (0, 0, 1, 1), [q, q, deeper, deeper], rule)  # type: ignore[arg-type]

    return drafter


def drawn(q: np.ndarray, key: int) -> list[int]:
    """Tokens in the order of the race p / e: the first is a draw, all are draws without putting back."""
    with np.errstate(divide="ignore"):
        race = -np.log(uniforms(key, np.arange(V))) / q
    return np.argsort(race).tolist()


def guessed(context: tuple[int, ...], noise: Noise) -> Draft:
    """The likeliest tokens of SMALL: fixed."""
    first, second = np.argsort(-SMALL(context))[:2].tolist()
    third = int(SMALL((*context, first)).argmax())
    return Draft((first, second, third), (0, 0, 1))


def exactly(rule: Callable[[Draft, Callable[[int], Floats], Noise], Verdict]) -> Judge:
    """Verification by a rule that takes p."""
    return lambda context, draft, noise: rule(
        draft, lambda n: TARGET((*context, *draft.path_tokens(draft.path(n)))), noise
    )


def coupled(context: tuple[int, ...], draft: Draft, noise: Noise) -> Verdict:
    def token(node: int) -> int:
        return noise.token(draft.depths[node], TARGET((*context, *draft.path_tokens(draft.path(node)))))

    return verify_greedy(draft, token)


def speak(seed: int, drafter: Drafter, judge: Judge, sample: int = 0) -> tuple[int, ...]:
    """A text in rounds."""
    context: tuple[int, ...] = ()
    while len(context) < LENGTH:
        noise = Noise(seed, sample, len(PROMPT) + len(context))
        draft = drafter(context, noise)
        context += judge(context, draft, noise).tokens(draft)
    return context[:LENGTH]


RULES: dict[str, tuple[Drafter, Judge]] = {
    "block": (chained, exactly(block)),
    "token-wise": (chained, exactly(walk)),
    "iid": (forked("iid"), exactly(walk)),
    "distinct": (forked("distinct"), exactly(walk)),
    "fixed": (guessed, coupled),
    "coupled": (chained, coupled),
}


def softmax_for_argmax(context: tuple[int, ...], noise: Noise) -> Draft:
    draft = guessed(context, noise)
    return Draft.chain(draft.tokens[::2], [SMALL(context), SMALL((*context, draft.tokens[0]))])


def likeliest_as_drawn(context: tuple[int, ...], noise: Noise) -> Draft:
    return Draft(guessed(context, noise).tokens[:2], (0, 0), [SMALL(context)] * 2, "iid")


WRONG: dict[str, tuple[Drafter, Judge]] = {
    "softmax for argmax": (softmax_for_argmax, exactly(walk)),
    "p/q on the likeliest": (likeliest_as_drawn, exactly(walk)),
    "no residual": (chained, exactly(wrong.no_residual)),
}


def test_the_warps_have_something_to_do() -> None:
    """Some tokens are cut, and what was said changes what follows."""
    assert 20 < np.count_nonzero(law()) < V**LENGTH
    assert any(not np.array_equal(TARGET((a, 2, 3)), TARGET((b, 2, 3))) for a in range(V) for b in range(V))


@pytest.mark.few(1)
@pytest.mark.parametrize("rule", RULES)
def test_completions_have_the_target_s_distribution(rule: str) -> None:
    assert fits([speak(seed, *RULES[rule]) for seed in range(500)], law())


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_a_hundred_thousand_texts_have_the_target_s_law(rule: str) -> None:
    assert fits([speak(seed, *RULES[rule]) for seed in range(100_000)], law())


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_wrong_variants_are_refused(name: str) -> None:
    assert not fits([speak(seed, *WRONG[name]) for seed in range(1000)], law())


@pytest.mark.slow
def test_two_texts_of_a_request_are_independent() -> None:
    """The first tokens of sample 0 and 1, drawn with one seed and side by side."""
    pairs = []
    for seed in range(1500):
        one, two = (speak(seed, *RULES["block"], sample=sample) for sample in (0, 1))
        pairs.append((*one[:2], two[0]))
    assert fits(pairs, np.multiply.outer(plain_law(TARGET, 2), plain_law(TARGET, 1)))


@pytest.mark.parametrize("rule", RULES)
def test_a_verdict_depends_on_its_own_sequence_alone(rule: str) -> None:
    """In any order, among others, and again after a preemption: the same."""
    drafter, judge = RULES[rule]
    rounds = [
        (context, Noise(seed, 0, 2 + len(context))) for seed in range(6) for context in ((), (2,), (3, 2))
    ]
    drafts = [drafter(*item) for item in rounds]
    forward = [judge(context, draft, noise) for (context, noise), draft in zip(rounds, drafts, strict=True)]
    backward = [judge(*rounds[i][:1], drafts[i], rounds[i][1]) for i in reversed(range(len(rounds)))]
    assert forward == backward[::-1]


@pytest.mark.slow
def test_blocks_of_drafts_with_the_target_s_noise_are_refused() -> None:
    """Why ``Drafting`` exists: a block looks at drafts behind the last token that it takes, and the next
    round's drafts must not be made of the noise of those. Two tokens, p and q swapped, 4 tokens of text."""
    p, q = np.array([1, 2]) / 3, np.array([2, 1]) / 3

    def text(seed: int, key: Callable[[Noise, int], int]) -> tuple[int, ...]:
        context: tuple[int, ...] = ()
        while len(context) < 4:
            noise = Noise(seed, 0, len(context))
            race = [-np.log(uniforms(key(noise, depth), np.arange(2))) / q for depth in range(3)]
            draft = Draft.chain([int(item.argmin()) for item in race], [q] * 3)
            context += block(draft, lambda _: p, noise).tokens(draft)
        return context[:4]

    def placed(noise: Noise, depth: int) -> int:
        return noise_key(noise.seed, noise.sample, noise.position + depth)

    four = plain_law(lambda _: p, 4)
    assert fits([text(seed, Noise.drafting) for seed in range(1500)], four)
    assert not fits([text(seed, placed) for seed in range(1500)], four)
