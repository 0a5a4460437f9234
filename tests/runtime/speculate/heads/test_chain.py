"""A head's chain under the engine: where it ends by its own confidence, and the law of what is written."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from attar.runtime.admission import Limits
from attar.runtime.kv.hidden_pool import HiddenPool
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.sampling.penalties import TokenHistory
from attar.runtime.sampling.warp import SamplingRow, warp
from attar.runtime.speculate.draft import kind_of
from attar.runtime.speculate.heads.chain import ChainProposer
from attar.runtime.speculate.heads.context import ContextReader
from attar.runtime.speculate.proposer import DraftRequest
from attar.runtime.speculate.speculator import Speculator
from tests.runtime.fake_runner import VOCABULARY, FakeRunner, logits_after
from tests.runtime.speculate.heads.hashing import HashingHead
from tests.runtime.speculate.laws import fits
from tests.runtime.speculate.proposing import Eager, speculator
from tests.runtime.test_engine import alone, engine, finish, results


@cache
def remembered(tokens: tuple[int, ...]) -> torch.Tensor:
    return logits_after(tokens)


class StatefulRunner(FakeRunner):
    """Keeps a state of two numbers for each token."""

    def _logits(self, slots):
        return remembered(tuple(self.pool[slots].tolist()))

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.hidden = HiddenPool.of((0,), self.capacity * self.block_size, 2)

    def run(self, step):
        logits = super().run(step)
        self.hidden.copy(step.copies, self.block_size)
        places = torch.from_numpy(step.slots(self.block_size))
        tokens = torch.tensor(step.tokens, dtype=torch.float32)
        self.hidden.write(places, 0, torch.stack([tokens, torch.from_numpy(step.positions).float()], 1))
        return logits

    def move(self, pairs):
        super().move(pairs)
        self.hidden.move(pairs)


class NearTarget(HashingHead):
    """Its logits are the target's with noise of the states: drafts are often right, and q is never p."""

    def __init__(self, confidence=None) -> None:
        super().__init__(None, VOCABULARY, drafts=3)
        self.chances, self.asked, self.rows = confidence, [], {}
        if confidence is not None:
            self.confidence = self._confidence

    def _row(self, draft):
        tokens = (*draft.request.tokens, *draft.tokens)
        if tokens not in self.rows:
            self.rows[tokens] = remembered(tokens) + 0.7 * super()._row(draft)
        return self.rows[tokens]

    def _confidence(self, drafts):
        self.asked.append([len(draft.tokens) for draft in drafts])
        return [self.chances[len(draft.tokens)] for draft in drafts]


def proposer_of(runner, head=None, branches=1) -> ChainProposer:
    context = ContextReader(runner.hidden, runner.block_size)
    return ChainProposer(head or NearTarget(), context, name="near", branches=branches)


@pytest.mark.slow
@pytest.mark.parametrize("branches", [1, 3])
def test_coupled_text_of_fifty_seeds(branches) -> None:
    runner = StatefulRunner(blocks=900)
    subject = speculator(proposer_of(runner, branches=branches), verification="coupled")
    running = engine(runner, limits=Limits(sequences=50), speculator=subject)
    params = SamplingParams(temperature=0.8, max_tokens=16, ignore_eos=True)
    asked = {running.add([1, 2, 3], replace(params, seed=seed)): seed for seed in range(50)}
    got = results(finish(running), {name: ([1, 2, 3], params) for name in asked})
    for name, seed in asked.items():
        assert list(got[name].token_ids) == alone([1, 2, 3], replace(params, seed=seed))
    assert subject.failure is None and subject.counts.accepted > 100


def test_a_confident_head_ends_where_it_does_not_pay_before_it_draws() -> None:
    runner = StatefulRunner()
    head = NearTarget(confidence=[0.9, 0.8, 0.5])
    proposer = proposer_of(runner, head)
    assert proposer.confident and not proposer_of(runner).confident
    request = DraftRequest(0, [5, 6, 7], 3, blocks=(0,))
    for least, count in ((0.0, 3), (0.36, 3), (0.37, 2), (0.73, 1)):
        (draft,) = proposer.propose([replace(request, min_chance=least)])
        assert len(draft) == count
    assert proposer.propose([replace(request, min_chance=0.95)]) == [None]
    assert head.asked[-1] == [0], "nothing of the draft was drawn"


class Paying(Eager):
    """Chooses one token, and says what the others must be worth."""

    def choose(self, sequences, limits, prompt_tokens=0, branches=1):
        self.min_chance = 0.5
        return [{kind_of(0, 1)} if limit else set() for limit in limits]


def test_a_confident_chain_may_be_longer_than_its_mean_and_no_other_may() -> None:
    lengths = {}
    for chances in ([0.9, 0.9, 0.9], None):
        runner = StatefulRunner()
        proposer = proposer_of(runner, NearTarget(confidence=chances))
        subject = Speculator(proposer, Paying(), most=8)
        running = engine(runner, speculator=subject)
        running.add([1, 2], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        finish(running)
        assert subject.failure is None
        lengths[bool(chances)] = subject.counts.drafted / subject.counts.drafts
    assert lengths[False] == 1 and lengths[True] > 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [1_500, 25_000])
def test_texts_with_drawn_chains_have_the_targets_law(count) -> None:
    """Three tokens of the whole engine, in batches, against their enumerated law."""
    params = SamplingParams(temperature=1.1, top_k=3, repetition_penalty=1.3, max_tokens=3, ignore_eos=True)
    prompt, law = [1, 2], {(): 1.0}
    for _ in range(3):
        grown = {}
        for text, mass in law.items():
            row = SamplingRow(params, TokenHistory(prompt, list(text)), ())
            p = warp(logits_after(prompt + list(text))[None], [row])[0].numpy()
            grown |= {(*text, int(token)): mass * float(p[token]) for token in np.flatnonzero(p)}
        law = grown
    order = {text: (index,) for index, text in enumerate(law)}
    runner, texts = StatefulRunner(blocks=400), []
    subject = speculator(proposer_of(runner), verification="exact")
    while len(texts) < count:
        running = engine(runner, limits=Limits(sequences=100), speculator=subject)
        names = [running.add(prompt, replace(params, seed=len(texts) + n)) for n in range(100)]
        answers = {name: [] for name in names}
        for event in finish(running):
            answers[event.request] += event.token_ids
        texts += [order[tuple(tokens)] for tokens in answers.values()]
    assert subject.failure is None and subject.counts.accepted > count / 10
    assert fits(texts, np.array(list(law.values())))
