"""The residual distribution after a rejected draft: arithmetic on single rows, in float64.

A row of q may be shorter or longer than p (vocabularies padded to different sizes): beyond its end q is 0,
tokens beyond the end of p cannot be drawn.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from attar.runtime.speculate.draft import Floats


def mass(p: Floats, token: int) -> float:
    """p of a token; 0 beyond the row's end."""
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


def normal(weights: Floats, p: Floats, rejected: Iterable[int]) -> Floats:
    """Weights normalised to sum 1.

    If all are 0 (p and q equal up to rounding): p without the rejected tokens; if that is 0 too: p.
    """
    for row in (weights, without(p, rejected)):
        total = row.sum()
        if total > 0:
            normalised: Floats = row / total
            return normalised
    return p
