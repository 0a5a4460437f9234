"""Words of a text, and hashes of runs of words (n-grams, shingles).

A character of a script that writes no spaces (Chinese, Japanese, Thai and its neighbours) is a word.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")


def words(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation."""
    return _WORD.findall(text.lower())


def run_hashes(sequence: Sequence[str], run: int) -> Hashes:
    """A 64-bit hash of every run of ``run`` words; of fewer words, one hash of all; of none, none."""
    if not sequence:
        return np.zeros(0, np.uint64)
    known = {word: hashlib.blake2b(word.encode(), digest_size=8).digest() for word in set(sequence)}
    single = np.frombuffer(b"".join(known[word] for word in sequence), "<u8").astype(np.uint64)
    run = min(run, len(sequence))
    total = np.zeros(len(sequence) - run + 1, np.uint64)
    for offset in range(run):
        total = total * np.uint64(0x9E3779B97F4A7C15) + single[offset : offset + len(total)]
    return mixed(total)


def mixed(values: Hashes) -> Hashes:
    """Mix the bits of 64-bit values (the finalizer of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
