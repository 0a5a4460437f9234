"""Rows that nearly repeat an earlier one: MinHash signatures and banding.

Broder 1997, "On the resemblance and containment of documents"; Leskovec, Rajaraman, Ullman, "Mining of
Massive Datasets", chapter 3.

    J(A, B) = |A intersect B| / |A union B| ,   P(min h(A) = min h(B)) = J     for a random order h
    P(a band of r of the k values agrees) = J^r ,   P(one of b bands does) = 1 - (1 - J^r)^b

Letters: A, B sets of shingles (runs of ``SHINGLE`` words); k values of a signature; b bands of r rows of it.

A row's text is the user's and the teacher's; one answer to two prompts is no repetition. Rows are taken in
order; a row is dropped if it has J of at least ``similarity`` with a row that is kept. The bands only propose
pairs, whose J is then computed exactly, so no row is dropped by chance; r is the largest for which a pair at
the limit is proposed with :data:`RECALL`. A pair that agrees in too few of its k values is not computed:
where every prompt has one long template around it, the bands propose nearly all pairs.

Differs from Broder: the orders are h_i(x) = a_i x + b_i modulo 2^64 over hashes that are well mixed already
(multiply-shift, Dietzfelbinger et al. 1997), not permutations drawn at random. Beside ``datasketch``: no
scipy, less time, and bands for :data:`RECALL` in place of a balance of both errors.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from attar.collection.filters.row import CollectedRow, answer_of, prompt_of
from attar.collection.filters.settings import FilterSettings
from attar.data.words import Hashes, run_hashes, words

SHINGLE = 5  # words
SIGNATURE = 128  # k
RECALL = 0.99
SURE = 3.0
_SEED = 0x5EED  # of the orders: the same on every machine


def near_duplicates(rows: Sequence[CollectedRow], settings: FilterSettings) -> list[str]:
    """Reasons against rows; "" keeps one."""
    sets = [shingles(f"{prompt_of(row)}\n{answer_of(row)}") for row in rows]
    originals = repeated(sets, settings.similarity)
    return ["" if original < 0 else "near-duplicate of an earlier row" for original in originals]


def shingles(text: str) -> Hashes:
    """The distinct hashes of a text's runs of :data:`SHINGLE` words, ascending."""
    return np.unique(run_hashes(words(text), SHINGLE))


def repeated(sets: Sequence[Hashes], similarity: float) -> list[int]:
    """For each set the number of an earlier one, itself not repeated, with at least this J; -1: none.

    An empty set repeats nothing.
    """
    rows = rows_of_band(similarity)
    buckets: list[dict[bytes, list[int]]] = [defaultdict(list) for _ in range(SIGNATURE // rows)]
    minima = np.zeros((len(sets), SIGNATURE), np.uint32)  # the low halves of the signatures
    originals = []
    for number, values in enumerate(sets):
        minhash = signature(values) if len(values) else np.zeros(0, np.uint64)
        bands = _bands(minhash, rows) if len(values) else []
        proposed = [bucket.get(band, []) for bucket, band in zip(buckets, bands, strict=False)]
        candidates = np.array(sorted(set().union(*proposed)), np.int64)
        minima[number, : len(minhash)] = minhash.astype(np.uint32)
        near = candidates[(minima[candidates] == minima[number]).sum(1) >= least_equal(similarity)]
        original = next((int(other) for other in near if jaccard(values, sets[other]) >= similarity), -1)
        originals.append(original)
        if original < 0:
            for bucket, band in zip(buckets, bands, strict=False):
                bucket[band].append(number)
    return originals


def signature(values: Hashes) -> Hashes:
    """The k smallest values of a set (m > 0 hashes) in k orders."""
    smallest: Hashes = (values[:, None] * _FACTORS + _OFFSETS).min(0)
    return smallest


def jaccard(left: Hashes, right: Hashes) -> float:
    """J of two sets of distinct, ascending hashes, not both empty."""
    if min(len(left), len(right)) == 0:
        return 0.0
    common = len(np.intersect1d(left, right, assume_unique=True))
    return common / (len(left) + len(right) - common)


def least_equal(similarity: float) -> float:
    """How many of the k values agree at least, but for chance: SURE standard deviations below k J."""
    return SIGNATURE * similarity - SURE * math.sqrt(SIGNATURE * similarity * (1 - similarity))


def rows_of_band(similarity: float) -> int:
    """r, the most rows of a band at which a pair of this J is proposed with :data:`RECALL`."""
    for rows in range(SIGNATURE, 1, -1):
        if 1 - (1 - similarity**rows) ** (SIGNATURE // rows) >= RECALL:
            return rows
    return 1


def _bands(values: Hashes, rows: int) -> list[bytes]:
    return [values[start : start + rows].tobytes() for start in range(0, SIGNATURE - rows + 1, rows)]


def _draws() -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    draws = np.random.Generator(np.random.PCG64(_SEED)).integers(0, 2**64, (2, SIGNATURE), np.uint64)
    return draws[0] | np.uint64(1), draws[1]


_FACTORS, _OFFSETS = _draws()
