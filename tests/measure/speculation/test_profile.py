"""The profiler on a runner without a model: what it counts, that it changes nothing, what it reports."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from attar.measure.report.speculation import speculation_picture
from attar.measure.speculation.metrics import Profile, ProfileRow, expected_tokens
from attar.measure.speculation.profile import PLAIN, FixedPolicy, profile, second_engine
from attar.runtime.engine import Engine
from attar.runtime.llm import LLM
from attar.runtime.loading import Loaded
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.speculate.draft import Draft
from attar.runtime.speculate.latency import Latency
from attar.runtime.speculate.policy import DraftPolicy
from attar.runtime.speculate.proposer import DraftFeedback, DraftRequest
from attar.runtime.speculate.speculator import Speculator
from tests.runtime.fake_runner import FakeRunner

PROMPTS = {"a": [[1, 2, 3], [4, 5]], "b": [[6], [7, 8], [9]]}
TOKENS = 24


class Knows:
    """Proposes what plain decoding wrote, right at first and wrong from ``right`` on; a fixed number."""

    name, is_free_of_compute, samples_from_q, needs_full_tree = "knows", False, False, False
    branches, confident, trees = 1, False, False

    def __init__(self, texts: dict[tuple[int, ...], Sequence[int]], right: int) -> None:
        self.texts, self.right = texts, right

    def propose(self, wishes: Sequence[DraftRequest]) -> list[Draft | None]:
        return [self._proposed(wish) for wish in wishes]

    def observe(self, news: Sequence[DraftFeedback]) -> None:
        pass

    def forget(self, sequence: int) -> None:
        pass

    def _proposed(self, wish: DraftRequest) -> Draft | None:
        text = next(all for all in self.texts.values() if list(all[: len(wish.tokens)]) == list(wish.tokens))
        ahead = text[len(wish.tokens) : len(wish.tokens) + wish.most]
        tokens = [(item + (index >= self.right)) % 50 for index, item in enumerate(ahead)]
        return Draft.chain(tokens) if tokens else None


@pytest.fixture(scope="module")
def engine() -> Engine:
    return LLM.of(Loaded(FakeRunner())).engine


@pytest.fixture(scope="module")
def texts(engine: Engine) -> dict[tuple[int, ...], Sequence[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS)
    llm = LLM.of(Loaded(FakeRunner()))
    prompts = [prompt for item in PROMPTS.values() for prompt in item]
    return {
        tuple(prompt): [*prompt, *result.token_ids]
        for prompt, result in zip(prompts, llm.generate(prompts, params), strict=True)
    }


def profile_of(
    engine: Engine, texts: dict[tuple[int, ...], Sequence[int]], batches: Sequence[int]
) -> Profile:
    def knows(right: int, most: int) -> Speculator:
        return Speculator(Knows(texts, right), FixedPolicy(most), most=most)

    methods = {"all": knows(9, 3), "two of three": knows(2, 3), "none": knows(0, 1)}
    return profile(engine, "fake", methods, PROMPTS, batches=batches, tokens=TOKENS, rounds=2)


@pytest.fixture(scope="module")
def measured(engine: Engine, texts: dict[tuple[int, ...], Sequence[int]]) -> Profile:
    return profile_of(engine, texts, (1,))


def row(measured: Profile, kind: str, method: str) -> ProfileRow:
    return next(item for item in measured.rows if (item.set, item.method) == (kind, method))


@pytest.mark.slow
def test_plain_decoding_is_one_token_a_pass(measured: Profile) -> None:
    plain = row(measured, "b", PLAIN)
    assert (plain.texts, plain.same, plain.tokens_per_pass, plain.theory) == (3, 3, 1.0, 1.0)
    assert plain.speedup is plain.acceptance is plain.chance is None and plain.histogram == ()


def test_passes_are_those_that_were_made(measured: Profile) -> None:
    # 23 tokens behind the first: five passes of 4, then 2 drafts and their token
    everything = row(measured, "a", "all")
    assert everything.histogram == (0, 0, 2 * 2, 2 * 2 * 5)
    assert everything.chance == everything.acceptance == 1 and everything.tokens_per_pass == 23 / 6
    assert everything.theory == pytest.approx(23 / 6)
    nothing = row(measured, "b", "none")
    assert nothing.chance == 0 and nothing.tokens_per_pass == 1
    # the last token is decoded without drafts: there is no room for any
    assert nothing.histogram == (2 * 3 * 22,)
    some = row(measured, "b", "two of three")
    assert some.chance is not None and 0.6 < some.chance < 0.8
    assert some.theory != expected_tokens(some.chance, 3)  # the last passes are shorter
    assert all(item.same == item.texts for item in measured.rows)


def test_everything_is_put_back(engine: Engine, measured: Profile) -> None:
    assert engine.speculator is None and engine.idle
    engine.check()
    second_engine(engine, None).check()


@pytest.mark.slow
def test_in_batches_the_same_is_counted(engine: Engine, texts: dict[tuple[int, ...], Sequence[int]]) -> None:
    measured = profile_of(engine, texts, (2,))
    assert row(measured, "a", "all").histogram == (0, 0, 2 * 2, 2 * 2 * 5)
    assert all(item.same == item.texts and item.batch == 2 for item in measured.rows)


def test_a_proposer_that_breaks_is_an_error(engine: Engine, broken_proposers: list[str]) -> None:
    broken = Speculator(Knows({}, 0), FixedPolicy(2), most=2)
    with pytest.raises(StopIteration):
        profile(engine, "fake", {"broken": broken}, PROMPTS, tokens=4, rounds=1)
    assert engine.speculator is None
    assert broken_proposers.pop().startswith("speculation is off: knows failed")


def test_the_picture_is_one_file_with_every_method(measured: Profile) -> None:
    from xml.etree import ElementTree

    drawn = speculation_picture(measured.to_dict())
    root = ElementTree.fromstring(drawn)
    words = [item.text or "" for item in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a", "b", "all", "none"} <= set(words)
    assert words.count("two of three") == 2 + 1, "next to each of its bars, and above its histogram"
    bars = [item for item in root.iter("{http://www.w3.org/2000/svg}title") if "two of three: " in item.text]
    assert len(bars) == 2


def test_passes_that_rest_are_counted_too(
    engine: Engine, texts: dict[tuple[int, ...], Sequence[int]]
) -> None:
    """While the budget is closed no pass is metered; each still counts as one token."""
    policy = DraftPolicy(Latency({1: 1.0, 8: 1.1}))
    policy.budget.note(1e6, 0.0)
    profile_of = Speculator(Knows(texts, 9), policy, most=4)
    measured = row(
        profile(engine, "fake", {"rests": profile_of}, {"a": PROMPTS["a"]}, tokens=TOKENS), "a", "rests"
    )
    assert measured.tokens_per_pass == 1.0 and measured.histogram == () and measured.same == 2
