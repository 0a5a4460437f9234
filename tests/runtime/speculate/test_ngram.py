"""N-grams: the longest match, the latest of equals, against a search through the whole text."""

import random

import pytest

from attar.runtime.speculate.draft import DraftBuilder, kind_of
from attar.runtime.speculate.ngram import (
    NEAR,
    NEXT,
    OTHER,
    OWN,
    SHARED,
    NgramIndex,
    NgramProposer,
    SharedNgrams,
)
from attar.runtime.speculate.proposer import DraftFeedback, DraftRequest


def ask(proposer, tokens, most=8, sequence=0, salt=""):
    (draft,) = proposer.propose([DraftRequest(sequence, tokens, most, salt)])
    if draft is not None:
        draft.check()
        assert len(draft) <= most and len(draft.kinds) == len(draft)
    return draft


def searched(text, longest):
    """By looking at every place: (length, place) of the longest match, the latest of equals."""
    results = []
    for index in range(1, len(text)):
        count = 0
        while count < min(longest, index) and text[index - 1 - count] == text[-1 - count]:
            count += 1
        if count:
            results.append((count, index))
    return max(results, default=None)


@pytest.mark.parametrize("letters", [2, 4, 12])
def test_the_longest_and_latest_match_is_found(letters):
    rng = random.Random(letters)
    right = total = 0
    index = NgramIndex()
    for _ in range(300):
        index.extend([rng.randrange(letters)])
        best, actual = searched(index.tokens, 6), index.matches(6)
        assert bool(best) == bool(actual)
        if best:
            total += 1
            right += actual[0] == best
            assert all(searched_at(index.tokens, position, 6) == count for count, position in actual)
            assert actual == sorted(actual, reverse=True)
    assert right / total > (0.99 if letters > 2 else 0.75), "all but those further back than WALK links"


def searched_at(text, place, longest):
    count = 0
    while count < min(longest, place) and text[place - 1 - count] == text[-1 - count]:
        count += 1
    return count


def test_the_continuation_of_the_latest_match():
    draft = ask(NgramProposer(branches=1, reach=3), [1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 8, 2, 3])
    assert draft.tokens == (5, 9, 8) and draft.is_chain and draft.rule == "fixed"
    assert draft.kinds == tuple(kind_of(OWN, level) for level in (2, 3, 4))


def test_continuations_that_differ_are_branches():
    draft = ask(NgramProposer(reach=2), [1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 8, 2, 3])
    assert (draft.tokens, draft.parents) == ((5, 9, 4, 9), (0, 1, 0, 3)), "the latest first"
    assert draft.kinds == (kind_of(OWN, 2), kind_of(OWN, 3), kind_of(OTHER, 2), kind_of(OTHER, 3))


def test_most_is_a_limit_on_all_branches():
    text = [1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 8, 2, 3]
    assert [len(ask(NgramProposer(), text, most) or ()) for most in (0, 1, 3, 5)] == [0, 1, 3, 5]


def test_a_repetition_goes_on_as_long_as_is_wished():
    assert ask(NgramProposer(reach=8), [7, 1, 2, 1, 2, 1, 2]).tokens[:8] == (1, 2, 1, 2, 1, 2, 1, 2)
    assert ask(NgramProposer(reach=4), [5, 5]).tokens == (5, 5, 5, 5)


def test_nothing_is_proposed_behind_an_end_and_nothing_out_of_the_blue():
    assert ask(NgramProposer(ends=[9], branches=1), [2, 3, 9, 4, 2]).tokens == (3, 9)
    assert ask(NgramProposer(), [1, 2, 3]) is None and ask(NgramProposer(), [1]) is None
    assert ask(NgramProposer(shortest=2), [1, 2, 4, 3, 2]) is None


def test_an_index_that_grew_is_as_a_new_one():
    rng = random.Random(1)
    text = [rng.randrange(5) for _ in range(120)]
    kept = NgramProposer()
    for end in range(10, 120, 7):
        new, old = ask(NgramProposer(), text[:end]), ask(kept, text[:end])
        assert (new.tokens, new.parents, new.kinds) == (old.tokens, old.parents, old.kinds)
    for sequence in (0, 2):
        kept.forget(sequence)
    assert not kept._indices


def test_another_text_of_the_tenant_helps_and_of_no_other():
    shared = SharedNgrams(context=2)
    proposer = NgramProposer(shared=shared, reach=4)
    ask(proposer, [1, 2, 3, 4, 5, 6], sequence=0, salt="a")
    proposer.forget(0)
    draft = ask(proposer, [9, 2, 3], sequence=1, salt="a")
    assert draft.tokens == (4, 5, 6) and draft.kinds == tuple(kind_of(SHARED, depth) for depth in (1, 2, 3))
    assert ask(proposer, [9, 2, 3], sequence=2, salt="b") is None


def test_several_texts_that_differ_are_branches_the_latest_first():
    shared = SharedNgrams(context=2)
    for token in (4, 5, 6, 7, 6):
        shared.add("", [1, 2, token, token + 10])
    assert shared.after("", [1, 2]) == (6, 7, 5)
    assert NEXT == 3
    draft = ask(NgramProposer(shared=shared), [1, 2])
    assert draft.path_tokens(draft.children(0)) == (6, 7, 5) and draft.tokens[:2] == (6, 16)


def test_the_shared_table_is_bounded_and_keeps_what_is_used():
    shared = SharedNgrams(context=1, most=10)
    shared.add("", [100, 101])
    for token in range(50):
        shared.add("", [token, token + 1])
        assert shared.after("", [100]) == (101,)
    assert len(shared) == 10 and shared.after("", [3]) == ()


def test_only_new_tokens_are_learnt():
    shared = SharedNgrams(context=1)
    shared.add("", [1, 2, 1, 3], start=0)
    shared.add("", [1, 2, 1, 3, 1, 4], start=4)
    assert shared.after("", [1]) == (4, 3, 2)


def test_equal_beginnings_are_one_branch_of_a_trie():
    trie = DraftBuilder(frozenset([9]), most=6)
    assert trie.add([1, 2, 3], [1, 1, 1]) == [1, 2, 3]
    assert trie.add([1, 2, 4], [2, 2, 2]) == [1, 2, 4]
    assert trie.add([5, 9, 6], [3, 3, 3]) == [5, 6]
    assert trie.add([7], [4]) == [] and trie.add([1, 2], [4, 4]) == [1, 2]
    draft = trie.draft()
    assert (draft.tokens, draft.parents) == ((1, 2, 3, 4, 5, 9), (0, 1, 2, 2, 0, 5))
    assert draft.kinds == (1, 1, 1, 2, 3, 3) and trie.roots == 2 and 5 in trie and 2 not in trie
    assert DraftBuilder().draft() is None


def test_it_looks_as_far_ahead_as_has_paid():
    proposer, text = NgramProposer(reach=11, branches=1), [1, 2, 3, 4] * 6
    draft = ask(proposer, text, most=40)
    assert len(draft) == 11, "the first time as far as is allowed"
    for run, ahead in ((None, NEAR), (2, 2 * 2 + NEAR), (3, 2 * 3 + NEAR), (9, 11), (1, 2 + NEAR)):
        proposer.observe([DraftFeedback(0, run and draft.cut(run), (), [1]), DraftFeedback(5, None, (), [1])])
        assert len(ask(proposer, text, most=40)) == ahead
    proposer.forget(0)
    assert len(ask(proposer, text, most=40)) == 11
