"""Lookahead against a model that is a function of the whole text so far."""

import random

import pytest

from attar.runtime.speculate.draft import DraftBuilder
from attar.runtime.speculate.lookahead import LookaheadProposer, LookaheadWindow, NgramPool
from attar.runtime.speculate.proposer import DraftFeedback, DraftRequest


def cycle(text):
    """The next token depends on the last one alone: Jacobi finds it at once."""
    return (text[-1] * 3 + 1) % 11


def hashed(text):
    """The next token depends on the last three."""
    return sum(token * weight for token, weight in zip(text[-3:], (5, 3, 7), strict=False)) % 7


def decode(model, proposer, text, count, sequence=0, most=200, skip=lambda turn: False):
    """Greedy speculation: the text and the passes it took."""
    text, passes = list(text), 0
    goal = len(text) + count
    while len(text) < goal:
        (draft,) = proposer.propose([DraftRequest(sequence, tuple(text), most)])
        passes += 1
        if draft is not None:
            draft.check()
        if skip(passes):
            draft = None
        nodes = range(len(draft) + 1) if draft else [0]
        choices = [model([*text, *(draft.path_tokens(draft.path(node)) if draft else ())]) for node in nodes]
        path, node = [], 0
        while draft:
            match = [child for child in draft.children(node) if draft.tokens[child - 1] == choices[node]]
            if not match:
                break
            assert len(match) == 1, "equal siblings are one node"
            path += (node := match[0],)
        new = [*(draft.path_tokens(path) if draft else ()), choices[node]]
        proposer.observe([DraftFeedback(sequence, draft, tuple(path), new, choices)])
        text += new
    return text, passes


def plain(model, text, count):
    text = list(text)
    for _ in range(count):
        text.append(model(text))
    return text


@pytest.mark.parametrize("model", [cycle, hashed])
@pytest.mark.parametrize(("columns", "size", "guesses"), [(1, 2, 1), (5, 4, 5), (7, 3, 2), (2, 5, 1)])
def test_the_text_is_the_plain_one_and_takes_fewer_passes(model, columns, size, guesses):
    proposer = LookaheadProposer(columns, size, guesses)
    text, passes = decode(model, proposer, [1, 2, 4], 200)
    assert text[:203] == plain(model, [1, 2, 4], 200)
    assert passes < (130 if model is cycle else 190)


def test_a_whole_match_yields_n_tokens():
    proposer = LookaheadProposer(2, 5, 3)
    text = plain(cycle, [1], 30)  # the pool has every 5-gram of the cycle
    new, passes = decode(cycle, proposer, text, 50)
    assert passes == pytest.approx(50 / 5, abs=1)
    assert new[:81] == plain(cycle, [1], 80)


def test_the_window_is_a_jacobi_iteration():
    """Row by row by hand: new[c] is the choice behind the last token, row 0 up to c, and column c."""
    rng = random.Random(0)
    window = LookaheadWindow(4, 4, NgramPool(4), seed=1)
    text = [3, 1, 4]
    window.extend(text)
    for turn in range(12):
        trie = DraftBuilder()
        window.add_to(trie)
        draft = trie.draft()
        rows = [list(row) for row in window.rows]
        newest = []
        for column in range(4):
            newest.append(hashed([*text, *rows[0][: column + 1], *(row[column] for row in rows[1:])]))
        choices = [hashed([*text, *draft.path_tokens(draft.path(node))]) for node in range(len(draft) + 1)]
        assert [choices[node] for node in window.cells] == newest
        warm, accepted = len(rows) == 3, rng.randrange(3)
        window.advance(accepted, choices)
        if warm:
            for column in range(4):
                grams = (rows[0][column], rows[1][column], rows[2][column], newest[column])
                assert grams[1:] in window.pool.after(grams[0])
        left = rows[1:] if warm else rows
        gone = accepted if warm else accepted + 1
        for row, before in zip(window.rows, [*left, newest], strict=True):
            assert len(row) == 4 and row[: 4 - gone] == before[gone:], turn
        text += [rng.randrange(7) for _ in range(accepted + 1)]
        window.extend(text)


def test_cells_of_equal_context_share_a_node():
    window = LookaheadWindow(3, 3, NgramPool(2))
    window.tokens, window.rows = [1], [[5, 6, 7], [6, 8, 7]]
    trie = DraftBuilder()
    window.add_to(trie)
    draft = trie.draft()
    assert draft.tokens == (5, 6, 7, 8, 7) and draft.parents == (0, 1, 2, 2, 3)
    assert window.cells == [2, 4, 5], "cell (1, 0) is (0, 1)"


def test_only_guesses_are_proposed_where_the_window_does_not_fit():
    proposer = LookaheadProposer(4, 3, 2)
    text = [1, 2, 3, 1, 2, 3, 1]
    (draft,) = proposer.propose([DraftRequest(0, text, 2)])
    assert draft.tokens == (2, 3) and not proposer._windows[0].cells
    again, _ = decode(cycle, LookaheadProposer(4, 3, 2), [1], 60, most=4)
    assert again[:61] == plain(cycle, [1], 60)


def test_passes_without_the_tree_do_not_disturb():
    proposer = LookaheadProposer()
    text, _ = decode(hashed, proposer, [1, 2, 4], 150, skip=lambda turn: turn % 3 == 0)
    assert text[:153] == plain(hashed, [1, 2, 4], 150)


def test_the_number_of_drafts_is_bounded():
    proposer = LookaheadProposer(5, 4, 5)
    rng = random.Random(0)
    text = [rng.randrange(40) for _ in range(300)]
    for end in range(200, 300):
        (draft,) = proposer.propose([DraftRequest(0, text[:end], 1000)])
        assert len(draft) <= proposer.drafts == 30
        proposer.observe(
            [DraftFeedback(0, draft, (), text[end : end + 1], [rng.randrange(40)] * (len(draft) + 1))]
        )


def test_sequences_have_windows_of_their_own_and_nothing_is_left():
    proposer = LookaheadProposer()
    text, _ = decode(hashed, proposer, [1, 2, 4], 40)
    fresh, _ = decode(cycle, proposer, text, 40, sequence=1)
    assert proposer._windows[0].pool is not proposer._windows[1].pool
    rest, _ = decode(hashed, proposer, text, 40, sequence=0)
    assert fresh[: len(text) + 40] == plain(cycle, text, 40)
    assert rest[: len(text) + 40] == plain(hashed, text, 40)
    for sequence in (0, 1, 2):
        proposer.forget(sequence)
    assert not proposer._windows


def test_the_pool_keeps_the_latest():
    pool = NgramPool(2, most=3)
    for guess in ([1, 1], [2, 2], [1, 1], [3, 3]):
        pool.add(9, guess)
    assert pool.after(9) == ((3, 3), (1, 1))
    for key in range(5):
        pool.add(key, [0])
        pool.after(9)
    assert len(pool) == 3 and pool.after(9) and not pool.after(0)
