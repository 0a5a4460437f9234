"""The law of whole texts: real models draft and verify in the engine, without a seed, in large batches.

A model of six tokens is small enough to enumerate what plain decoding says, after all warps. Its texts are
counted with a draft model and with part of its own layers, as chains and with siblings, and in batches whose
requests come and go. Wrong variants are refused by the same count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from attar.runtime.admission import Limits
from attar.runtime.llm import LLM
from attar.runtime.loading import Loaded
from attar.runtime.runner.modules import Modules
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.sampling.penalties import TokenHistory
from attar.runtime.sampling.warp import SamplingRow, warp
from attar.runtime.speculate import verify
from attar.runtime.speculate.draft import Draft, kind_of
from attar.runtime.speculate.draft_model import DraftModel
from attar.runtime.speculate.proposer import DraftRequest
from attar.runtime.speculate.self_speculation import load_self_draft
from tests import tiny_models
from tests.marks import slow_but
from tests.runtime.speculate import wrong
from tests.runtime.speculate.laws import fits
from tests.runtime.speculate.proposing import Eager, speculator

V, LENGTH, TOGETHER, FEW = 6, 3, 200, 800
PROMPT = [2, 4, 3]
HOT = SamplingParams(temperature=1.3, max_tokens=LENGTH + 1, ignore_eos=True)
WARPED = replace(
    HOT, temperature=0.8, top_k=4, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={2: 0.5}
)
PARAMS = {"plain": replace(HOT, temperature=1.0), "hot": HOT, "warped": WARPED}


def model(seed: int) -> Any:
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    return tiny_models.build(
        "smollm", seed=seed, vocab_size=V, num_attention_heads=2, num_key_value_heads=1, **size
    )


def runner(seed: int) -> Modules:
    return Modules(model(seed), blocks=2 * TOGETHER, block_size=8)


@cache
def law(name: str) -> np.ndarray:
    """Of the first LENGTH tokens, by plain forward passes of transformers: (V,) * LENGTH."""
    target, actual = model(0), np.ones(())
    for count in range(LENGTH):
        texts = list(product(range(V), repeat=count))
        logits = tiny_models.logits(target, torch.tensor([[*PROMPT, *text] for text in texts]))[:, -1]
        rows = [SamplingRow(PARAMS[name], TokenHistory(PROMPT, list(text))) for text in texts]
        p = np.concatenate([warp(one[None], [row]).numpy() for one, row in zip(logits, rows, strict=True)])
        actual = actual[..., None] * p.reshape(*(V,) * count, V)
    return actual


class Every(Eager):
    """Runs chains of two and all their siblings, so that the verifier has trees to walk."""

    def choose(self, sequences, limits, prompt_tokens=0, branches=1):
        return [
            {kind_of(rank, depth) for rank in range(branches) for depth in range(1, min(limit, 2) + 1)}
            for limit in limits
        ]


WAYS = ("draft", "self", "siblings")


def drafting(way: str) -> LLM:
    """The target with an engine that drafts two tokens in every pass, and where wanted their siblings."""
    target = Loaded(runner(0))
    blocks = 2 * TOGETHER * target.runner.block_size
    proposer = (
        DraftModel(runner(1))
        if way != "self"
        else load_self_draft("", target, way="layers", kv_tokens=blocks)
    )
    subject = speculator(proposer, most=6 if way == "siblings" else 2)
    if way == "siblings":
        subject.policy = Every()
    return LLM.of(target, limits=Limits(step_tokens=2048, sequences=TOGETHER), speculator=subject)


def texts(llm: LLM, params: SamplingParams, count: int) -> list[tuple[int, ...]]:
    """The first LENGTH tokens of ``count`` samples, drawn without a seed; requests of one, two and three."""
    engine, samples = llm.engine, {}
    assert params.seed is None
    while len(samples) < count:
        for n in (1, 2, 3):
            name = engine.add(PROMPT, replace(params, n=n))
            samples |= {(name, sample): [] for sample in range(n)}
    while not engine.idle:
        for event in engine.step():
            samples[event.request, event.sample] += event.token_ids
    engine.check()
    assert engine.speculator is not None and engine.speculator.failure is None
    return [tuple(item[:LENGTH]) for item in samples.values()]


def keeps_the_law(way: str, name: str, count: int) -> bool:
    llm = drafting(way)
    actual = texts(llm, PARAMS[name], count)
    counts = llm.engine.speculator.counts  # type: ignore[union-attr]
    assert 0.1 * counts.drafted < counts.accepted < 0.9 * counts.drafted, "some are taken, some are not"
    assert len(counts.accepted_at) == 2, "chains of two"
    return fits(actual, law(name))


@pytest.mark.few(1)
@pytest.mark.parametrize("way", WAYS)
def test_texts_of_the_engine_have_the_target_s_law(way: str) -> None:
    assert keeps_the_law(way, "warped", 300)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hot", "warped"])
@pytest.mark.parametrize("way", WAYS)
def test_a_hundred_thousand_tokens_have_the_target_s_law(way: str, name: str) -> None:
    """Six times 4,200 texts of four tokens."""
    assert keeps_the_law(way, name, 4200)


Spoil = Callable[[Draft], Draft]


def likeliest(draft: Draft) -> Draft:
    """The argmax of each q, said to be drawn from it."""
    return Draft.chain([int(q.argmax()) for q in draft.q], draft.q)  # type: ignore[union-attr]


def flattened(draft: Draft) -> Draft:
    """q without the warps that its tokens were drawn with."""
    return Draft.chain(draft.tokens, [np.sqrt(q) / np.sqrt(q).sum() for q in draft.q])  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("spoil", slow_but([likeliest, flattened], likeliest))
def test_wrong_drafts_are_refused(spoil: Spoil) -> None:
    llm = drafting("draft")
    proposer = llm.engine.speculator.proposer  # type: ignore[union-attr]
    propose = proposer.propose

    def spoiled(requests: Sequence[DraftRequest]) -> list[Draft | None]:
        return [
            draft and spoil(draft)
            for draft in propose([replace(request, siblings=False) for request in requests])
        ]

    proposer.propose = spoiled  # type: ignore[method-assign]
    count = FEW if spoil is likeliest else 6000  # a smaller error takes more samples
    assert not fits(texts(llm, WARPED, count), law("warped"))


@pytest.mark.slow
def test_a_verifier_without_a_residual_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "block", wrong.no_residual)
    assert not fits(texts(drafting("draft"), WARPED, FEW), law("warped"))


@pytest.mark.slow
def test_coins_that_are_shared_by_all_texts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text is right by itself then, but they are not independent."""

    from attar.runtime import completion

    monkeypatch.setattr(completion.secrets, "randbits", lambda bits: 7)
    assert not fits(texts(drafting("draft"), WARPED, FEW), law("warped"))
