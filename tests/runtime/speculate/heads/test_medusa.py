"""Medusa's drafts: the ranks of a static tree, against a loop over its paths."""

import pytest
import torch

from attar.models.draft_heads.medusa_module import MedusaConfig, MedusaHeads
from attar.models.draft_heads.static_tree import PUBLISHED
from attar.models.draft_heads.vocabulary import set_vocabulary
from attar.runtime.speculate.draft import kind_of
from attar.runtime.speculate.heads.medusa_proposer import MedusaProposer
from attar.runtime.speculate.proposer import DraftRequest

TREE = ((0,), (0, 0), (1,), (0, 1), (1, 0), (0, 0, 2))
CHOSEN = torch.arange(1, 40, 3)


class Context:
    """The state of a sequence is a function of its number."""

    def last(self, request):
        return torch.randn(1, 8, generator=torch.Generator().manual_seed(request.sequence))

    def forget(self, sequence):
        pass


def heads(tree=TREE, chosen=None, **changes):
    torch.manual_seed(0)
    changes |= {"draft_vocabulary": 0 if chosen is None else len(chosen)}
    module = MedusaHeads(MedusaConfig(hidden=8, vocabulary=40, layers=(2,), drafts=3, tree=tree, **changes))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    set_vocabulary(module, chosen)
    return module


def request(sequence=1, most=99, depth=99):
    return DraftRequest(sequence, [5, 6, 7], most, depth=depth)


@pytest.mark.parametrize("chosen", [None, CHOSEN])
def test_a_tree_has_the_ranks_of_its_paths(chosen):
    module = heads(chosen=chosen)
    proposer = MedusaProposer(module, Context())
    drafts = proposer.propose([request(1), request(2)])
    for sequence, draft in zip((1, 2), drafts, strict=True):
        draft.check()
        h = Context().last(request(sequence))[-1]
        wanted = {}
        for path in TREE:
            logits = module.logits(h, len(path) - 1)
            token = int(logits.argsort(descending=True)[path[-1]])
            wanted[path] = token if chosen is None else int(chosen[token])
        tokens = [draft.path_tokens(draft.path(node)) for node in range(1, len(draft) + 1)]
        assert tokens == [tuple(wanted[path[:n]] for n in range(1, len(path) + 1)) for path in TREE]
        assert draft.kinds == tuple(kind_of(path[-1], len(path)) for path in TREE)
    assert proposer.trees and proposer.most == len(TREE)


@pytest.mark.parametrize(
    ("depth", "most", "kept"), [(1, 99, 2), (2, 99, 5), (3, 99, 6), (3, 2, 2), (0, 9, 0)]
)
def test_a_tree_is_as_deep_and_as_large_as_it_is_asked_for(depth, most, kept):
    draft = MedusaProposer(heads(), Context()).propose([request(1, most, depth)])[0]
    assert (0 if draft is None else len(draft)) == kept


def test_a_tree_without_paths_for_the_last_heads_is_drafted():
    shallow = tuple(path for path in TREE if len(path) < 3)
    draft = MedusaProposer(heads(tree=shallow), Context()).propose([request()])[0]
    draft.check()
    assert len(draft) == len(shallow)


def test_a_tree_deeper_than_there_are_heads_is_drafted_as_far_as_they_go():
    deeper = (*TREE, (*max(TREE, key=len), 0))
    draft = MedusaProposer(heads(tree=deeper), Context()).propose([request()])[0]
    draft.check()
    assert len(draft) == len(TREE)


def test_nothing_follows_an_end():
    whole = MedusaProposer(heads(), Context()).propose([request()])[0]
    first = whole.tokens[0]
    cut = MedusaProposer(heads(), Context(), ends=[first]).propose([request()])[0]
    cut.check()
    ended = [node for node in range(1, len(cut) + 1) if cut.tokens[node - 1] == first]
    assert ended and all(not cut.children(node) for node in ended)
    below = sum(path[0] == 0 and len(path) > 1 for path in TREE)
    assert len(cut) == len(TREE) - below


def test_without_a_tree_the_likeliest_tokens_are_a_chain():
    proposer = MedusaProposer(heads(tree=()), Context())
    draft = proposer.propose([request()])[0]
    assert draft.is_chain and len(draft) == 3 and not proposer.trees
    h = Context().last(request())[-1]
    assert draft.tokens == tuple(int(heads(tree=()).logits(h, k).argmax()) for k in range(3))


def test_a_small_vocabulary_lacks_the_last_ranks():
    few = torch.tensor([3, 4, 9])
    draft = MedusaProposer(heads(tree=tuple(p for p in PUBLISHED["mc_sim_7b_63"] if len(p) < 4), chosen=few),
                           Context()).propose([request()])[0]  # fmt: skip
    draft.check()
    assert set(draft.tokens) == {3, 4, 9} and len(draft.children(0)) == 3
