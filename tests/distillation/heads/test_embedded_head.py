"""attar:head, the draft head of attar:tiny: completions stay those of attar:tiny, its drafts are accepted."""

from __future__ import annotations

import json
from functools import cache

import pytest

from attar.checkpoint import paths
from attar.measure.speculation.profile import FixedPolicy
from attar.runtime.llm import LLM
from attar.runtime.sampling.params import SamplingParams

PROMPTS = (
    "import os\n\n\ndef main(",
    "class Reader:\n    def __init__(",
    "def test_the_length_of_a_list(self):\n        ",
)
MOST_BYTES = 6_000_000  # of the folder
LEAST = 1.0  # accepted of the drafts of a pass, on average


@cache
def plain(temperature: float) -> list[list[int]]:
    params = SamplingParams(temperature=temperature, max_tokens=64, seed=7, ignore_eos=True)
    return [result.token_ids for result in LLM("attar:tiny", kv_tokens=512).generate(list(PROMPTS), params)]


def test_greedy_completions_are_those_of_plain_decoding_and_drafts_are_accepted() -> None:
    llm = LLM("attar:tiny", draft="attar:head", speculate="draft", kv_tokens=512)
    assert llm.engine.speculator is not None
    llm.engine.speculator.policy = FixedPolicy(7)  # whether that pays or not
    params = SamplingParams(temperature=0.0, max_tokens=64, seed=7, ignore_eos=True)
    assert [result.token_ids for result in llm.generate(list(PROMPTS), params)] == plain(0.0)
    counts = llm.engine.speculator.counts
    assert counts.accepted > LEAST * counts.drafts > 0


@pytest.mark.slow
def test_sampled_completions_with_a_seed_are_those_of_plain_decoding() -> None:
    llm = LLM("attar:tiny", draft="attar:head", kv_tokens=512)
    assert llm.engine.speculator is not None
    llm.engine.speculator.policy = FixedPolicy(7)
    params = SamplingParams(temperature=0.8, max_tokens=64, seed=7, ignore_eos=True)
    assert [result.token_ids for result in llm.generate(list(PROMPTS), params)] == plain(0.8)
    assert llm.engine.speculator.counts.accepted > 0


def test_it_is_small_and_its_confidence_is_calibrated() -> None:
    folder = paths.resolve("attar:head")
    assert sum(file.stat().st_size for file in folder.iterdir()) < MOST_BYTES
    drafting = json.loads((folder / "attar.json").read_text())["details"]["drafting"]
    errors = drafting["calibration_error"]["calibrated"]
    assert len(errors) == 7 and max(errors) < 0.03, "expected calibration error at each position"
