"""Texts of attar:tiny that keep to a grammar: in mixed batches, several of a prompt, preempted, cut short."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

pytest.importorskip("llguidance")

from attar.errors import SettingsError
from attar.runtime import engine as engine_module
from attar.runtime.admission import Limits
from attar.runtime.llm import LLM
from attar.runtime.loading import Loaded
from attar.runtime.results import Sample
from attar.runtime.sampling import grammar
from attar.runtime.sampling.grammar import Matcher
from attar.runtime.sampling.mask_budget import SLOW_S, STEP_S
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.speculate.suffix import SuffixProposer
from tests.runtime.fake_runner import FakeRunner
from tests.runtime.schemas import SCHEMAS, follows
from tests.runtime.speculate.proposing import speculator

PATTERN = r"[a-z]{2,6}(, [a-z]{2,6}){1,3}\."
BASE = SamplingParams(temperature=1.0, max_tokens=60, seed=5)


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return LLM("attar:tiny", kv_tokens=4096)


def prefix_of(llm: LLM, params: SamplingParams, tokens: Sequence[int]) -> None:
    """Every token was one that the grammar allowed."""
    assert llm.engine.grammars is not None
    matcher = llm.engine.grammars.matcher(params)
    assert matcher is not None
    for token in tokens:
        assert bool(matcher.allowed()[token])
        matcher.consume(token)


def obeys(llm: LLM, params: SamplingParams, text: Sample) -> None:
    words = [token for token in text.token_ids if token not in llm.engine.ends]
    prefix_of(llm, params, words)
    if text.finish_reason == "length":
        return
    assert text.finish_reason == "stop"
    if params.json_schema is not None:
        schema = json.loads(str(params.json_schema))
        follows(json.loads(text.text), schema, schema)
    else:
        assert re.fullmatch(PATTERN, text.text)


@pytest.mark.slow
def test_in_mixed_batches_every_text_keeps_to_its_own(tiny: LLM) -> None:
    params = [replace(BASE, json_schema=schema, n=2) for schema in SCHEMAS.values()]
    params += [replace(BASE, regex=PATTERN, temperature=t) for t in (0.0, 2.0)]
    free = replace(BASE, temperature=0.0)
    results = tiny.generate(["x = "] * (len(params) + 1), [*params, free])
    for item, result in zip(params, results, strict=False):
        for text in result.samples:
            obeys(tiny, item, text)
    whole = [text for result in results[:-1] for text in result.samples if text.finish_reason == "stop"]
    assert len(whole) >= 6
    assert results[-1].samples == tiny.generate("x = ", free)[0].samples
    one = tiny.generate("x = ", params[1])[0]
    assert one.samples == results[1].samples and one.samples[0] != one.samples[1]


def test_a_preempted_text_goes_on_where_it_was(tiny: LLM) -> None:
    params = replace(BASE, json_schema=SCHEMAS["person"], max_tokens=80, n=8)
    expected = tiny.generate("x = ", params)[0].samples
    narrow = LLM("attar:tiny", kv_tokens=96, limits=Limits(step_tokens=32, sequences=8))
    assert narrow.generate("x = ", params)[0].samples == expected
    assert narrow.engine.scheduler.preemptions > 0


def test_nothing_can_follow_so_it_ends_by_itself(tiny: LLM) -> None:
    params = replace(BASE, regex="(abc|abd)", min_tokens=50, ignore_eos=True)
    (text,) = tiny.generate("x = ", params)[0].samples
    assert text.text in ("abc", "abd") and (text.finish_reason, text.stop_reason) == ("stop", None)
    tiny.engine.check()


def test_end_tokens_wait_for_the_grammar_and_stop_ids_do_not(tiny: LLM) -> None:
    (end,) = tiny.engine.ends
    (comma,) = tiny.encode(",")
    eager = replace(BASE, regex=PATTERN, logit_bias={end: 50.0})
    assert re.fullmatch(PATTERN, tiny.generate("x = ", eager)[0].text)
    cut = tiny.generate("x = ", replace(eager, stop_ids=(comma,)))[0].samples[0]
    assert re.fullmatch("[a-z]{2,6}", cut.text) and cut.stop_reason == comma
    early = replace(BASE, regex="[a-z ]+", logit_bias={end: 50.0}, temperature=0.0)
    assert tiny.generate("x = ", early)[0].samples[0].stop_reason == end
    late = tiny.generate("x = ", replace(early, min_tokens=5))[0].samples[0]
    assert len(late.token_ids) == 6 and re.fullmatch("[a-z ]+", late.text)


def test_a_stop_string_cuts_it_all_the_same(tiny: LLM) -> None:
    text = tiny.generate("x = ", replace(BASE, regex=PATTERN, stop=", "))[0].samples[0]
    assert (text.finish_reason, text.stop_reason) == ("stop", ", ") and re.fullmatch("[a-z]{2,6}", text.text)


def test_a_wrong_one_leaves_nothing_behind(tiny: LLM) -> None:
    with pytest.raises(SettingsError, match="regex is '\\(', but must be one"):
        tiny.generate(["a", "b"], [BASE, replace(BASE, regex="(")])
    assert tiny.engine.idle
    tiny.engine.check()
    with pytest.raises(SettingsError, match="the model has no tokenizer"):
        LLM.of(Loaded(FakeRunner())).generate([1], replace(BASE, regex="a"))


@pytest.fixture()
def slow_masks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each mask takes 15 ms by the clock that is charged; how many were computed."""
    seconds, count = itertools.count(step=0.015), [0]
    compute = Matcher._compute_mask

    def counting(matcher: Matcher) -> object:
        count[0] += 1
        return compute(matcher)

    monkeypatch.setattr(grammar, "thread_time", lambda: next(seconds))
    monkeypatch.setattr(Matcher, "_compute_mask", counting)
    return count


AMBIGUOUS = 'start: e\ne: e e e e | "a" | "b" | "\\n"'


def test_costly_grammars_delay_nobody_else(
    tiny: LLM, slow_masks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 16 completions a step computes one mask now and then; the others' tokens come with every step."""
    engine = tiny.engine
    monkeypatch.setattr(engine_module.time, "thread_time", lambda: 0.0)  # of passes
    endless = replace(BASE, max_tokens=200, ignore_eos=True, temperature=0.0)
    engine.add([5, 6, 7], endless, id="other", salt="b")
    engine.add([5, 6, 7], replace(BASE, grammar=AMBIGUOUS, n=16, max_tokens=8), id="costly", salt="a")
    engine.step()  # the prompts, and the first tokens, whose mask was known
    before, steps = slow_masks[0], 60
    for _ in range(steps):
        (new,) = [event for event in engine.step() if event.request == "other"]
        assert len(new.token_ids) == 1
    share = steps * STEP_S / 2 / 0.015
    assert share - 2 <= slow_masks[0] - before <= share + 2
    engine.cancel("other")
    events = []
    while not engine.idle:
        events += engine.step()
    engine.check()
    assert sorted(event.sample for event in events if event.finished) == list(range(16))


@pytest.mark.parametrize("seconds", [0.015, 0.0001])
def test_a_completion_with_slow_masks_drafts_nothing(
    tiny: LLM, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Each draft would need the masks of all its prefixes."""
    ticks, asked = itertools.count(), []
    monkeypatch.setattr(grammar, "thread_time", lambda: seconds * next(ticks))

    class Asked(SuffixProposer):
        def propose(self, requests):  # type: ignore[no-untyped-def]
            asked.extend(request.most for request in requests)
            return super().propose(requests)

    proposer = Asked()
    monkeypatch.setattr(tiny.engine, "speculator", speculator(proposer))
    tiny.generate(["x = "], replace(BASE, grammar=AMBIGUOUS, max_tokens=12))
    assert any(asked) == (seconds < SLOW_S)


def test_what_waited_for_its_masks_is_the_same(tiny: LLM, slow_masks: list[int]) -> None:
    params = [replace(BASE, regex=PATTERN, n=4), replace(BASE, grammar=AMBIGUOUS, n=3, max_tokens=3)]
    waited = tiny.generate(["x = "] * 2, params)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar, "thread_time", lambda: 0.0)
        plain = tiny.generate(["x = "] * 2, params)
    for one, other in zip(waited, plain, strict=True):
        for sample, same in zip(one.samples, other.samples, strict=True):
            assert (sample.text, sample.finish_reason) == (same.text, same.finish_reason)
    assert {sample.finish_reason for sample in waited[0].samples} == {"stop"}
    assert {sample.finish_reason for sample in waited[1].samples} == {"length"}
