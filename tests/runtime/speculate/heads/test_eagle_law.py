"""Texts drafted by EAGLE have the target's law: by enumeration of every draw of the drafts, every coin and
every draw of the target; and what is wrong is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from attar.runtime.sampling.params import SamplingParams
from attar.runtime.sampling.warp import SamplingRow
from attar.runtime.speculate import draft_model
from attar.runtime.speculate.draft import Draft
from attar.runtime.speculate.heads.chain import ChainProposer
from attar.runtime.speculate.heads.eagle_proposer import EagleChain
from attar.runtime.speculate.heads.eagle_tree import EagleTreeProposer
from attar.runtime.speculate.noise import DraftRules
from attar.runtime.speculate.proposer import DraftRequest
from attar.runtime.speculate.verify import verify
from tests.runtime.speculate.heads.eagle_cases import context, drafter, random_head
from tests.runtime.speculate.laws import outcomes, plain_law, random_model, total_variation

V, LENGTH = 4, 5


class Context:
    """States that are read already."""

    def unread(self, request):
        return 0, torch.empty(0)


class Rules:
    """Plain sampling at temperature 1."""

    def row(self, drafted=()):
        return SamplingRow(SamplingParams(temperature=1.0))

    def key(self, ahead=0):
        return ahead

    drafting = key


class Target:
    """What ``verify`` asks, from a model of the law; its draws are branches of the enumeration."""

    def __init__(self, draft, p, chances):
        self.draft, self.model, self.chances, self.greedy = draft, p, chances, False

    def p(self, node):
        return self.model(self.draft.path_tokens(self.draft.path(node)))

    def token(self, node):
        return self.chances.token(node, self.p(node))


def proposer_of(kind: str, width: int) -> tuple[EagleTreeProposer | ChainProposer, list[int]]:
    head = random_head(kind, vocabulary=V, drafts=2, seed=4)
    tokens, states = context(head, LENGTH)
    part = drafter(head, spread=3.0)
    part.read(0, tokens, 0, states)
    if width > 1:
        return EagleTreeProposer(part, Context(), name="eagle", width=width), tokens
    return ChainProposer(EagleChain(part), Context(), name="eagle"), tokens


def law_of(kind: str, width: int, monkeypatch, change: Callable[[Draft], Draft] = lambda draft: draft):
    """Of two tokens after the context."""
    proposer, tokens = proposer_of(kind, width)
    p = random_model(V, 11)
    rules = DraftRules(Rules(), Rules()) if width == 1 else None
    request = DraftRequest(0, tokens, 2 if width == 1 else 5, rules=rules)

    def run(chances):
        def drawn(q, key, count):
            return [chances.token(0, q.double().numpy())]

        monkeypatch.setattr(draft_model, "draw_distinct", drawn)
        (draft,) = proposer.propose([request])
        draft = change(draft)
        return verify(draft, Target(draft, p, chances), chances, "exact").tokens(draft)

    law = np.zeros((V, V))
    for text, odds in outcomes(run).items():
        law[text[:2]] += odds * plain_law(p, 2, text[:2])
    return total_variation(law, plain_law(p, 2))


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_two_tokens_have_the_targets_law(kind, width, monkeypatch):
    assert law_of(kind, width, monkeypatch) < 1e-6  # q is in float32


def test_a_tree_that_is_called_drawn_is_refused(monkeypatch):
    def drawn(draft):
        row = np.full(V, 1 / V, dtype=np.float32)
        return replace(draft, q=[row] * len(draft), rule="distinct", kinds=None)

    assert law_of("eagle3", 2, monkeypatch, drawn) > 1e-3


def test_a_q_that_the_draft_was_not_drawn_from_is_refused(monkeypatch):
    def flattened(draft):
        return replace(draft, q=[np.full(V, 1 / V, dtype=np.float32)] * len(draft))

    assert law_of("eagle", 1, monkeypatch, flattened) > 1e-3
