"""Eviction's choices by brute force, and what each method says it needs."""

import numpy as np
import pytest

from attar.errors import SettingsError
from attar.runtime.kv.block_manager import BlockManager
from attar.runtime.kv.evict import EVICTIONS, H2O, Reread, SnapKV, Streaming
from attar.runtime.kv.evict.snapkv import smoothed


def test_h2o_by_hand():
    scores = np.array([[5, 1, 4, 2, 0, 0], [0, 3, 3, 3, 9, 9]], dtype=np.float32)
    assert H2O(heavy=2, recent=2).choose(scores).tolist() == [[0, 2, 4, 5], [1, 2, 4, 5]]


def test_h2o_against_brute_force():
    draw = np.random.default_rng(0)
    for n, heavy, recent in ((20, 5, 3), (9, 0, 8), (9, 7, 1), (40, 10, 10)):
        scores = draw.random((3, n)).astype(np.float32)
        for head, keep in enumerate(H2O(heavy=heavy, recent=recent).choose(scores)):
            old = sorted(range(n - recent), key=lambda j: -scores[head, j])[:heavy]
            assert keep.tolist() == sorted(old) + list(range(n - recent, n))


def test_h2o_is_due_when_the_budget_is_full():
    method = H2O(heavy=6, recent=4, slack=3)
    assert [method.due(positions, True) for positions in (9, 13, 14)] == [None, None, 10]
    assert (method.budget, method.most(5, 16)) == (10, 18)


def test_snapkv_by_hand():
    """A lone peak loses to a plateau once neighbours are averaged; the window stays."""
    votes = np.array([[0, 0, 4, 0, 0, 3, 3, 3, 0, 0]], dtype=np.float32)
    assert SnapKV(capacity=5, window=2, kernel=3).choose(votes).tolist() == [[5, 6, 7, 10, 11]]
    assert SnapKV(capacity=3, window=2, kernel=1).choose(votes).tolist() == [[2, 10, 11]]
    assert SnapKV(capacity=3, window=2, kernel=1).choose(votes, 1).tolist() == [[2, 5, 10]]


def test_smoothing_against_a_loop():
    scores = np.random.default_rng(0).random((2, 12)).astype(np.float32)
    for kernel in (1, 3, 5):
        edge = kernel // 2
        want = [[sum(row[max(0, j - edge) : j + edge + 1]) / kernel for j in range(12)] for row in scores]
        np.testing.assert_allclose(smoothed(scores, kernel), want, rtol=1e-5)


def test_snapkv_is_due_once_the_prompt_is_done():
    method = SnapKV(capacity=50, window=10)
    assert [method.due(*case) for case in ((60, False), (50, True), (51, True))] == [None, None, 50]


def test_reread_has_one_budget_for_all_heads():
    """Layer 1's head takes what layer 0's does not need; the first and the newest place stay everywhere."""
    scores = np.array([[[0, 1, 2, 1, 0, 0]], [[0, 7, 5, 6, 9, 0]]], dtype=np.float32)
    keep = Reread(capacity=3, recent=1, sinks=1).choose(scores)
    assert [np.flatnonzero(head).tolist() for head in keep[:, 0]] == [[0, 5], [0, 1, 4, 5]]
    assert scores[0, 0, 0] == 0  # what was given is as it was


def test_reread_against_brute_force():
    draw = np.random.default_rng(0)
    for n, capacity, recent, sinks in ((20, 9, 3, 2), (12, 6, 6, 0), (40, 20, 4, 4)):
        scores = draw.random((3, 2, n)).astype(np.float32)
        keep = Reread(capacity=capacity, recent=recent, sinks=sinks).choose(scores)
        always = [j < sinks or j >= n - recent for j in range(n)]
        others = [
            (layer, head, j) for layer in range(3) for head in range(2) for j in range(n) if not always[j]
        ]
        others.sort(key=lambda cell: -scores[cell])
        want = np.broadcast_to(always, keep.shape).copy()
        for cell in others[: capacity * 6 - int(want.sum())]:
            want[cell] = True
        assert np.array_equal(keep, want) and keep.sum() == capacity * 6


def test_reread_is_due_once_the_prompt_is_done():
    method = Reread(capacity=200)
    assert [method.due(*case) for case in ((300, False), (200, True), (201, True))] == [None, None, 200]


def streaming_blocks(method, positions_held, block_size):
    """Blocks that a sequence with that many positions holds after a step."""
    first = max(0, positions_held - method.window)  # the manager releases entries [S, first), in whole blocks
    freed = max(0, first // block_size - -(-method.sinks // block_size))
    return -(-positions_held // block_size) - freed


@pytest.mark.parametrize(("sinks", "window"), [(4, 6), (0, 5), (3, 1), (9, 8)])
def test_streaming_holds_the_blocks_it_says(sinks, window):
    method, size = Streaming(sinks=sinks, window=window), 4
    manager = BlockManager(40, size, window=method.window, sinks=method.sinks)
    manager.admit(0, [1])
    for positions in range(1, 80):
        assert manager.reserve(0, 1)
        manager.commit(0, 1, list(range(positions)))
        held = {block for block in manager.table(0).blocks if block >= 0}
        assert len(held) == streaming_blocks(method, positions, size)
        seen = [
            *range(min(sinks, positions)),
            *range(max(0, positions - window + 1), positions),
        ]  # by the next token
        assert all(manager.table(0).blocks[index // size] >= 0 for index in seen)
        assert len(held) * size <= method.most(1, size)


@pytest.mark.parametrize(("sinks", "window", "chunk"), [(4, 6, 1), (0, 5, 9), (3, 1, 4), (9, 8, 5)])
def test_streaming_bounds_what_is_held(sinks, window, chunk):
    """Also in the middle of a step, when a chunk has its places and nothing was given back yet."""
    method, size = Streaming(sinks=sinks, window=window), 4
    manager = BlockManager(40, size, window=method.window, sinks=method.sinks)
    manager.admit(0, [1])
    most = 0
    for stop in range(chunk, 90, chunk):
        assert manager.reserve(0, chunk)
        most = max(most, sum(block >= 0 for block in manager.table(0).blocks))
        manager.commit(0, chunk, list(range(stop)))
    assert most * size <= method.most(chunk, size) <= (most + 2) * size


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("streaming", {"sinks": -1}),
        ("streaming", {"window": 0}),
        ("h2o", {"heavy": -1}),
        ("h2o", {"recent": 0}),
        ("h2o", {"slack": -1}),
        ("snapkv", {"window": 0}),
        ("snapkv", {"capacity": 8}),
        ("snapkv", {"kernel": 4}),
        ("reread", {"recent": 0}),
        ("reread", {"sinks": -1}),
        ("reread", {"stride": 0}),
        ("reread", {"capacity": 131}),
    ],
)
def test_wrong_settings_are_named(name, wrong):
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        EVICTIONS[name](**wrong)
