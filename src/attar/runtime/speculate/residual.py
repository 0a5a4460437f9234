"""What remains of p after a draft was rejected: arithmetic on single rows, in float64.

A row of the draft may be shorter or longer than the target's (vocabularies padded to different sizes): after
its end there are zeros, and tokens that the target lacks cannot be drawn.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from attar.runtime.speculate.draft import Floats


def mass(p: Floats, token: int) -> float:
    """p of a token; 0 after the row's end."""
    return float(p[token]) if token < len(p) else 0.0


def ratio(p: Floats, q: Floats, token: int) -> float:
    """p / q of a token that was drawn from q."""
    return mass(p, token) / mass(q, token)


def excess(p: Floats, q: Floats, weight: float = 1.0) -> Floats:
    """max(weight p - q, 0): float64, as long as p."""
    left = p * np.float64(weight)
    shared = min(len(p), len(q))
    left[:shared] -= q[:shared]
    return np.maximum(left, 0.0, out=left)


def without(p: Floats, tokens: Iterable[int]) -> Floats:
    """p with no mass on some tokens, not normalised: float64."""
    left = p.astype(np.float64)
    left[[token for token in tokens if token < len(p)]] = 0.0
    return left


def normal(weights: Floats, p: Floats, refused: Iterable[int]) -> Floats:
    """Weights of sum 1.

    Where nothing is left (p and q equal but for rounding): p without the refused tokens; where nothing is
    left of that either: p.
    """
    for some in (weights, without(p, refused)):
        total = some.sum()
        if total > 0:
            weights_of_one: Floats = some / total
            return weights_of_one
    return p
