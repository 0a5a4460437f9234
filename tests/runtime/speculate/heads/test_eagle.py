"""EAGLE's chains: what the head makes while it drafts is what it makes in training, whatever came before."""

import copy
from dataclasses import replace

import pytest
import torch

from attar.distillation.heads.unroll import unroll
from attar.models.draft_heads.vocabulary import tokens_of
from attar.runtime.speculate.draft_model import GrowingDraft
from attar.runtime.speculate.heads import eagle_proposer as eagle
from attar.runtime.speculate.heads.eagle_proposer import EagleChain
from attar.runtime.speculate.proposer import DraftRequest
from tests.models.draft_heads.slow_eagle import SlowEagle
from tests.runtime.speculate.heads.eagle_cases import SHAPE, context, drafter, random_head

KINDS = {
    "eagle": ("eagle", {}),
    "eagle3": ("eagle3", {"norm_before_residual": True}),
    "eagle of two layers": ("eagle", {"shape": replace(SHAPE, depth=2)}),
    "eagle3 of three layers": ("eagle3", {"shape": replace(SHAPE, depth=3)}),
    "eagle3.1, reduced": ("eagle3", {"norm_output": True, "fc_norm": True, "draft_vocabulary": 15}),
}
LENGTH = 11
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def head(request):
    kind, options = request.param
    return random_head(kind, **options)


def growing(tokens, drafts=(), sequence=0, most=4):
    request = DraftRequest(sequence, tokens, most)
    draft = GrowingDraft(request, list(tokens), len(tokens), most, frozenset(), 0.0, 1)
    draft.tokens += drafts
    return draft


def drafted(chain, tokens, following, sequence=0):
    """The logits of a round that drafts the given tokens."""
    draft = growing(tokens, sequence=sequence)
    chain.begin([draft])
    rows = [chain.logits([draft])[0]]
    for token in following:
        draft.tokens.append(token)
        rows.append(chain.logits([draft])[0])
    return torch.stack(rows)


@pytest.mark.few(2)
def test_drafts_are_those_of_a_slow_loop(head):
    tokens, states = context(head, LENGTH)
    chain, slow = EagleChain(drafter(head)), SlowEagle(copy.deepcopy(head).double())
    own, following = chain.drafter.target_tensors, [3, 7, 1]
    embedded = own.embed(torch.tensor([*tokens, *following])).double()
    chain.read(0, tokens, 0, states)
    logits = drafted(chain, tokens, following)
    for row, a in zip(logits, slow.chain(embedded, states.double(), LENGTH - 2, 4), strict=True):
        if head.config.kind == "eagle":
            wanted = own.logits(a.float())
        else:
            kept = torch.arange(40) if tokens_of(head) is None else tokens_of(head)
            wanted = torch.full((40,), -torch.inf)
            wanted[kept] = (slow.weight("lm_head") @ slow.read(a)).float()
        torch.testing.assert_close(row, wanted, **CLOSE)


def test_training_is_drafting(head):
    tokens, states = context(head, LENGTH)
    chain, at = EagleChain(drafter(head)), 5  # decided tokens
    embedded = chain.drafter.target_tensors.embed(torch.tensor(tokens))[None]
    steps = list(unroll(head, embedded, head.project(states)[None], 4))
    chain.read(0, tokens[:at], 0, states[: at - 1])
    logits = drafted(chain, tokens[:at], tokens[at : at + 3])
    trained = torch.stack([chain.drafter.logits(step[0, at - 2][None])[0] for step in steps])
    torch.testing.assert_close(logits, trained, **CLOSE)


def test_long_contexts_are_read_in_parts(head, monkeypatch):
    tokens, states = context(head, LENGTH)
    chains = []
    for rows in (256, 3):
        monkeypatch.setattr(eagle, "ROWS", rows)
        chain = EagleChain(drafter(head))
        chain.read(0, tokens, 0, states)
        chains.append(drafted(chain, tokens, [3, 7]))
    torch.testing.assert_close(*chains, **CLOSE)


@pytest.mark.few(2)
def test_drafts_do_not_depend_on_how_the_context_came(head):
    tokens, states = context(head, LENGTH)
    chain = EagleChain(drafter(head))
    chain.read(0, tokens, 0, states)
    wanted = drafted(chain, tokens, [3, 7])
    for start in range(LENGTH - 1):  # token after token, with drafts that are rejected each time
        chain.read(1, tokens[: start + 2], start, states[start : start + 1])
        drafted(chain, tokens[: start + 2], [9, 9, 9], sequence=1)
    torch.testing.assert_close(drafted(chain, tokens, [3, 7], sequence=1), wanted, **CLOSE)
    chain.read(2, tokens, 0, states + 1.0)  # its blocks from position 4 on were exchanged
    chain.read(2, [9] * LENGTH, 0, states[:4])
    chain.read(2, tokens, 0, states[:4])
    chain.read(2, tokens, 4, states[4:])
    torch.testing.assert_close(drafted(chain, tokens, [3, 7], sequence=2), wanted, **CLOSE)


def test_sequences_of_a_batch_do_not_see_each_other(head):
    chain, cases = EagleChain(drafter(head)), [context(head, length, seed=length) for length in (2, 9, 5)]
    alone = []
    for sequence, (tokens, states) in enumerate(cases):
        chain.read(sequence, tokens, 0, states)
        alone.append(drafted(chain, tokens, [sequence, 5], sequence))
    drafts = [growing(tokens, sequence=sequence) for sequence, (tokens, _) in enumerate(cases)]
    chain.begin(drafts)
    torch.testing.assert_close(chain.logits(drafts), torch.stack([rows[0] for rows in alone]), **CLOSE)
    for sequence, draft in enumerate(drafts):
        draft.tokens.append(sequence)
    left = [drafts[2], drafts[0]]  # one ended
    torch.testing.assert_close(chain.logits(left), torch.stack([alone[2][1], alone[0][1]]), **CLOSE)


def test_an_ended_sequence_leaves_nothing(head):
    chain = EagleChain(drafter(head))
    tokens, states = context(head, LENGTH)
    chain.read(0, tokens, 0, states)
    drafted(chain, tokens, [1])
    chain.forget(0)
    chain.forget(0)
    assert chain.drafter.cache.nbytes == 0 and not chain.drafter._last
