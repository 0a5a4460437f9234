"""Suffix trees, compiled and in Python, against counts of all substrings."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest

from attar.kernels import build, suffix_tree
from attar.runtime.speculate.draft import Draft, kind_of
from attar.runtime.speculate.suffix_tree import (
    BOUNDS,
    GROUP,
    GROUPS,
    CompiledSuffixTree,
    PythonSuffixTree,
    kind,
)

compiled = pytest.mark.skipif(build.load("suffix_tree") is None, reason="no C++ compiler")
CLASSES = [PythonSuffixTree, pytest.param(CompiledSuffixTree, marks=compiled)]


class Substrings:
    """How often each string of at most ``depth`` tokens occurs in some texts, and when last."""

    def __init__(self, texts: Sequence[Sequence[int]], depth: int) -> None:
        self.counts: Counter[tuple[int, ...]] = Counter()
        self.last: dict[tuple[int, ...], tuple[int, int]] = {}
        self.after: dict[tuple[int, ...], set[int]] = defaultdict(set)
        for number, text in enumerate(texts):
            for stop in range(1, len(text) + 1):
                for start in range(max(stop - depth, 0), stop):
                    string = tuple(text[start:stop])
                    self.counts[string] += 1
                    self.last[string] = number, stop
                    self.after[string[:-1]].add(string[-1])


def reference(
    texts: Sequence[Sequence[int]], context: Sequence[int], most: int,
    depth: int, factor: float, least: float,
    ends: Sequence[int] = (), group: int = 0, shorter: int = 0,
) -> tuple[float, tuple[list[int], list[int], list[int]]]:  # fmt: skip
    """The score of the best draft with a match of more than ``shorter`` tokens, and its tokens, parents and
    kinds."""
    known, results = Substrings(texts, depth), []
    for m in range(shorter + 1, min(depth - 1, len(context)) + 1):
        match = tuple(context[len(context) - m :])
        nodes: list[tuple[float, tuple[int, ...], int, int]] = []  # p, tokens after the match, parent, kind
        frontier: list[tuple[float, tuple[int, ...], int, int]] = []  # in the order in which they came

        def follow(path: tuple[int, ...], p: float, parent: int, match=match, frontier=frontier) -> None:
            string = (*match, *path)
            children = [(*string, token) for token in known.after[string]] if len(string) < depth else []
            if not known.after[string] and not group and path and len(string) < depth:  # past the end
                reached = next(d for d in range(len(path)) if not known.after[(*match, *path[: d + 1])]) + 1
                again = path[len(path) - reached]
                frontier.append((p, (*path, again), parent, kind(1, 1, len(string), group)))
            total = sum(known.counts[child] for child in children)
            for child in sorted(children, key=known.last.__getitem__, reverse=True):
                count = known.counts[child]
                if p * (count / total) >= least:
                    label = kind(count, total, len(string), group)
                    frontier.append((p * (count / total), (*path, child[-1]), parent, label))

        follow((), 1.0, 0)
        while frontier and len(nodes) < min(most, int(factor * m)):
            best = max(frontier, key=lambda one: one[0])  # the first of equal ones
            frontier.remove(best)
            nodes.append(best)
            if best[1][-1] not in ends:
                follow(best[1], best[0], len(nodes))
        draft = [path[-1] for _, path, _, _ in nodes], [n[2] for n in nodes], [n[3] for n in nodes]
        results.append((sum(p for p, *_ in nodes), m, draft))
    score, _, draft = max(results, key=lambda one: one[:2], default=(0.0, 0, ([], [], [])))
    return (score, draft) if score else (0.0, ([], [], []))


def text_of(rng: random.Random, letters: int, length: int) -> list[int]:
    """Random letters, with copies of earlier parts."""
    text: list[int] = []
    while len(text) < length:
        if text and rng.random() < 0.3:
            start = rng.randrange(len(text))
            text += text[start : start + rng.randrange(1, 12)]
        else:
            text.append(rng.randrange(letters))
    return text[:length]


@pytest.mark.parametrize("make", CLASSES)
@pytest.mark.parametrize(("letters", "depth"), [(2, 5), (3, 8), (9, 24), (1, 6)])
def test_counts_are_those_of_all_substrings(make, letters: int, depth: int) -> None:
    rng = random.Random(letters)
    tree, texts = make(depth, 1.0, 0.1, ()), {}
    for _ in range(12):
        number = tree.begin()
        texts[number] = text_of(rng, letters, rng.randrange(1, 50))
        for start in range(0, len(texts[number]), 7):
            tree.extend(number, texts[number][start : start + 7])
        if len(texts) > 4:
            gone = rng.choice(list(texts))
            tree.remove(gone)
            del texts[gone]
        counts = Substrings(list(texts.values()), depth).counts
        for string, count in counts.items():
            assert tree.count(string) == count, string
        strings = [[rng.randrange(letters) for _ in range(rng.randrange(1, depth + 1))] for _ in range(50)]
        assert all(tree.count(string) == counts[tuple(string)] for string in strings)
        assert len(tree) <= len(counts)
    for number in texts:
        tree.remove(number)
    assert len(tree) == 0 and tree.count([0]) == 0


@compiled
def test_texts_that_grow_in_turn() -> None:
    """Leaves of one text are split by another while both go on."""
    rng = random.Random(5)
    tree, texts = CompiledSuffixTree(7, 1.0, 0.1, ()), {}
    for _ in range(3):
        texts[tree.begin()] = []
    for _ in range(120):
        number, new = rng.choice(list(texts)), text_of(rng, 3, rng.randrange(1, 4))
        tree.extend(number, new)
        texts[number] += new
        for string, count in Substrings(list(texts.values()), 7).counts.items():
            assert tree.count(string) == count


def goes_on(text: Sequence[int], m: int) -> bool:
    """Whether the last m tokens occurred before."""
    return any(text[start : start + m] == text[-m:] for start in range(len(text) - m))


@pytest.mark.few(2)
@pytest.mark.parametrize("make", CLASSES)
@pytest.mark.parametrize(
    ("letters", "depth", "factor", "least"),
    [(2, 6, 1.0, 0.1), (3, 24, 4.0, 0.1), (6, 24, 2.0, 0.1), (4, 9, 1.5, 0.3), (30, 24, 1.0, 0.0)],
)
def test_drafts_are_those_of_the_reference(
    make, letters: int, depth: int, factor: float, least: float
) -> None:
    rng = random.Random(letters)
    others, texts = make(depth, factor, least, (1,)), []
    for _ in range(3):
        texts.append(text_of(rng, letters, 40))
        others.extend(others.begin(), texts[-1])
    own, text = make(depth, factor, least, (1,)), []
    number, from_others = own.begin(), 0
    for turn, most in enumerate([*range(1, 12)] * 3):
        copied = texts[turn % 2][turn : turn + 5]
        new = text_of(rng, letters, rng.randrange(1, 5)) if turn % 3 else copied
        text += new
        score, want = reference([text], text, most, depth, factor, least, (1,))
        longest = max((m for m in range(1, depth) if goes_on(text, m)), default=0)
        higher, other = reference(texts, text, most, depth, factor, least, (1,), 1, longest)
        if higher > score:
            want, from_others = other, from_others + 1
        nodes = own.draft(number, new, others, most)
        assert nodes == want
        if nodes[0]:
            Draft(tuple(nodes[0]), tuple(nodes[1]), kinds=tuple(nodes[2])).check()
    assert from_others


@compiled
def test_a_long_text_needs_few_nodes() -> None:
    """A token of text that hardly repeats takes one or two nodes, not one for each length."""
    rng = random.Random(0)
    text = [rng.randrange(500) for _ in range(3000)]
    small, large = CompiledSuffixTree(24, 1.0, 0.1, ()), PythonSuffixTree(24, 1.0, 0.1, ())
    for tree in (small, large):
        tree.extend(tree.begin(), text)
    assert len(small) < 3 * len(text) and len(large) > 20 * len(text)


def test_kinds_tell_counts_and_lengths_apart() -> None:
    assert kind(1, 1, 1, 0) == kind_of(GROUP, 1) and kind(1, 1, 400, 0) == kind_of(GROUP, len(BOUNDS) + 1)
    groups = [kind(count, total, 3, 1) // 32 for count, total in ((1, 1), (4, 4), (2, 4), (1, 4))]
    assert groups == [GROUP + GROUPS + share for share in range(GROUPS)]
    levels = [kind(3, 3, length, 0) % 32 for length in range(1, 30)]
    assert levels == sorted(levels) and set(levels) == set(range(1, len(BOUNDS) + 2))


@compiled
def test_many_new_tokens_and_many_drafts() -> None:
    """More than the buffers hold."""
    text = list(range(suffix_tree.SHORT + 40)) * 2
    tree, slow = CompiledSuffixTree(24, 1.0, 0.1, ()), PythonSuffixTree(24, 1.0, 0.1, ())
    want = slow.draft(slow.begin(), text, None, 9)
    assert tree.draft(tree.begin(), text, None, 9) == want and want[0] == list(range(9))
    assert len(tree.draft(0, [], None, 10 * suffix_tree.MOST)[0]) == 12


def test_without_a_compiler_the_tree_is_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    from attar.runtime.speculate import suffix_tree as trees

    monkeypatch.setenv("ATTAR_KERNELS", "off")
    tree = trees.suffix_tree()
    assert isinstance(tree, PythonSuffixTree)
    assert tree.draft(tree.begin(), [1, 2, 3, 1, 2], None, 4)[0] == [3, 1, 2, 3]
