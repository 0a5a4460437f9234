"""Drafts of a Markov head that end by confidence keep the target's law, exactly; a scheduler that looks at
the whole block does not (Cheng et al. 2026, arXiv 2607.05147, appendix A)."""

import numpy as np
import pytest
import torch

from attar.models.draft_heads.block_module import BlockDrafter, DSparkConfig
from attar.models.draft_heads.decoder_layer import DraftLayerShape
from attar.runtime.speculate import draft_model
from attar.runtime.speculate.chain import block
from attar.runtime.speculate.draft import Draft
from attar.runtime.speculate.heads.block_proposer import block_head
from attar.runtime.speculate.heads.chain import ChainProposer
from attar.runtime.speculate.heads.own_tensors import OwnTensors
from attar.runtime.speculate.noise import DraftRules, Noise
from attar.runtime.speculate.proposer import DraftRequest
from attar.runtime.speculate.tree import walk
from tests.runtime.speculate.heads.test_law import PlainRules
from tests.runtime.speculate.laws import outcomes, plain_law, random_model, rows, total_variation

V, H, TOKENS = 4, 8, [1, 3, 0]


class States:
    """A context reader with fixed states of two positions."""

    def forget(self, sequence):
        pass

    def unread(self, request):
        return 0, torch.randn(2, 1, H, generator=torch.Generator().manual_seed(1))


def drafter(markov):
    torch.manual_seed(0)
    shape = DraftLayerShape(depth=1, heads=2, kv_heads=1, head_dim=4, intermediate=8)
    config = DSparkConfig(
        hidden=H,
        vocabulary=V,
        layers=(0,),
        drafts=3,
        shape=shape,
        markov_rank=4,
        markov=markov,
        confidence=True,
    )
    made = BlockDrafter(config).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    torch.nn.init.normal_(made.confidence_head.proj.weight, std=3.0)
    return made


def law_of(proposer, p, judge, length, least, monkeypatch):
    """Law of the first tokens, over all drafts, coins and draws; and the numbers of drafts that came."""
    lengths = set()

    def run(chances):
        def drawn(q, key, count):
            return [chances.token(0, q.double().numpy())]

        monkeypatch.setattr(draft_model, "draw_distinct", drawn)
        request = DraftRequest(0, TOKENS, 3, rules=DraftRules(PlainRules(), Noise(0, 0, 3)), min_chance=least)
        (draft,) = proposer.propose([request])
        proposer.forget(0)
        lengths.add(0 if draft is None else len(draft))
        if draft is None:
            return (chances.token(0, p(())),)
        draft.check()
        wide = Draft(
            draft.tokens, draft.parents, [np.float64(row) / np.float64(row).sum() for row in draft.q], "iid"
        )
        return judge(wide, rows(p, wide), chances).tokens(wide)

    law = np.zeros((V,) * length)
    for tokens, odd in outcomes(run).items():
        law[tokens[:length]] += odd * plain_law(p, length, tokens[:length])
    return law, lengths


@pytest.mark.slow
@pytest.mark.parametrize("judge", [block, walk])
@pytest.mark.parametrize("markov", ["plain", "rnn"])
def test_drawn_chains_that_end_by_confidence_have_the_targets_law(markov, judge, monkeypatch):
    own = OwnTensors(torch.randn(V, H, generator=torch.Generator().manual_seed(2)), lambda h: h[:, :V])
    head = block_head(drafter(markov), own)
    proposer = ChainProposer(head, States(), name="dspark")
    p = random_model(V, 5)
    counts = []
    for least in (0.2, 0.5, 0.9, 0.99):
        law, lengths = law_of(proposer, p, judge, 4, least, monkeypatch)
        assert total_variation(law, plain_law(p, 4)) < 1e-6  # q is float32
        counts.append(len(lengths))
    assert max(counts) > 1, "the confidence ends some drafts and not others"


P, Q, SPEEDS = np.array([0.7, 0.3]), np.array([0.5, 0.5]), (1.0, 0.5, 0.45)
CHANCES = {(): 0.8, (0,): 0.9, (1,): 0.0}


class TwoTokens:
    """The paper's example: q does not see the tokens before, the confidence does."""

    drafts = 2

    def read(self, sequence, tokens, start, states):
        pass

    def begin(self, drafts):
        pass

    def confidence(self, drafts):
        return [CHANCES[tuple(draft.tokens)] for draft in drafts]

    def logits(self, drafts):
        return torch.tensor(Q, dtype=torch.float32).log().expand(len(drafts), -1)

    def forget(self, sequence):
        pass


def whole_block(draft, chances):
    """A wrong scheduler: how much of a drawn block is verified depends on all its confidences."""
    survival = [1.0, CHANCES[()], CHANCES[()] * CHANCES[draft.tokens[:1]]]
    speeds = [sum(survival[: count + 1]) * SPEEDS[count] for count in range(3)]
    return draft.cut(int(np.argmax(speeds)))


@pytest.mark.parametrize("judge", [block, walk])
def test_a_scheduler_of_the_whole_block_is_refused_and_ours_is_not(judge, monkeypatch):
    def p(prefix):
        return P

    def first(schedule):
        law = np.zeros(2)
        for tokens in ((a, b) for a in (0, 1) for b in (0, 1)):
            draft = schedule(Draft.chain(tokens, [Q, Q]), None)
            if draft is None:
                law += P / 4
                continue
            for verdict, odd in outcomes(lambda c, d=draft: judge(d, rows(p, d), c)).items():
                law[verdict.tokens(draft)[0]] += odd / 4
        return law

    np.testing.assert_allclose(first(whole_block), [0.85, 0.15])
    monkeypatch.setattr("tests.runtime.speculate.heads.test_block_law.V", 2)
    proposer = ChainProposer(TwoTokens(), States(), name="two")
    law, lengths = law_of(proposer, p, judge, 3, 0.5, monkeypatch)
    assert lengths == {1, 2}
    assert total_variation(law, plain_law(p, 3)) < 1e-12
    np.testing.assert_allclose(law.sum((1, 2)), P)
