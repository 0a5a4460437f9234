"""Static trees of heads that do not see each other's tokens: which ranks of each head are drafted together.

A path (r_1, ..., r_d) drafts the token of rank r_k, from 0, of head k, after those of the path without its
end. The tree is the same in every pass (Cai et al. 2024, arXiv 2401.10774, section 2.3.3). Searched:

    value of a path = a_1(r_1) ... a_d(r_d)      the chance that it is accepted to its end
    expected tokens = 1 + sum of the values of all paths
    greedily the path of the highest value is added whose beginning is there

a_k(r) is measured: how often the target's token is the token of rank r of head k. A path is never above its
beginning, so the greedy tree of n paths has the highest sum of all trees of n paths.

Letters: K heads, R ranks, n paths.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Paths = tuple[tuple[int, ...], ...]

_MC_SIM_7B_63 = (
    "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 "
    "004 005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 "
    "16 070"
)

PUBLISHED: dict[str, Paths] = {"mc_sim_7b_63": tuple(tuple(map(int, path)) for path in _MC_SIM_7B_63.split())}
"""Trees of Medusa's authors, by their names: a path for each word, a rank for each digit."""


def search_tree(accuracies: Sequence[Sequence[float]], count: int) -> Paths:
    """The best tree, best path first.

    Args:
        accuracies: a_k(r) of K heads, as many ranks of each as may be drafted.
        count: n at most; paths without a chance are left out.
    """
    chosen: list[tuple[int, ...]] = []
    # minus the value, and the path; the empty one is the decided token
    candidates: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    while candidates and len(chosen) <= count:
        value, path = heapq.heappop(candidates)
        chosen.append(path)
        if len(path) < len(accuracies):
            for rank, accuracy in enumerate(accuracies[len(path)]):
                if value * accuracy < 0.0:
                    heapq.heappush(candidates, (value * accuracy, (*path, rank)))
    return tuple(chosen[1:])


def expected_tokens(tree: Paths, accuracies: Sequence[Sequence[float]]) -> float:
    """1 + the sum of the values of all paths."""
    total = 1.0
    for path in tree:
        value = 1.0
        for k, rank in enumerate(path):
            value *= accuracies[k][rank]
        total += value
    return total


def to_depth(tree: Paths, depth: int) -> Paths:
    """The paths of a tree that are at most so long."""
    return tuple(path for path in tree if len(path) <= depth)


def check_tree(tree: Paths) -> None:
    """Raises ValueError where a path comes before its beginning, or twice."""
    known: set[tuple[int, ...]] = {()}
    for path in tree:
        if not path or path in known or path[:-1] not in known:
            raise ValueError(f"the path {list(path)} of the tree is twice in it, or before its beginning")
        known.add(path)
