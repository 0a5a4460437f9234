"""Verifiers and drafters that are wrong on purpose: the tests must refuse them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from attar.runtime.speculate.draft import Draft, Verdict
from attar.runtime.speculate.residual import excess, normal, ratio
from tests.runtime.speculate.laws import Model

Rows = Callable[[int], np.ndarray]


def softmax_for_argmax(q: Model, K: int) -> Iterator[tuple[Draft, float]]:
    """A chain of q's likeliest tokens, said to be drawn from q (jaymody/speculative-sampling, issue 3)."""
    tokens: tuple[int, ...] = ()
    for _ in range(K):
        tokens += (int(q(tokens).argmax()),)
    yield Draft.chain(tokens, np.array([q(tokens[:i]) for i in range(K)])), 1.0


def likeliest_as_drawn(q: Model, k: int, rule: str) -> Iterator[tuple[Draft, float]]:
    """The k likeliest children, said to be drawn from q."""
    tokens = tuple(np.argsort(-q(()))[:k].tolist())
    yield Draft(tokens, (0,) * k, np.array([q(())] * k), rule), 1.0  # type: ignore[arg-type]


def doubtful_dropped(drafts: Iterator[tuple[Draft, float]]) -> Iterator[tuple[Draft, float]]:
    """A drafter that looks at the token it drew, and drops it where q is small."""
    for draft, weight in drafts:
        sure = [float(draft.q[i][token]) > 0.3 for i, token in enumerate(draft.tokens)]  # type: ignore[index]
        yield draft.cut(max(sure.index(False), 1) if False in sure else len(draft)), weight  # type: ignore[misc]


def no_residual(draft: Draft, p: Rows, noise: Any) -> Verdict:
    """Token by token, but what follows a refused draft is drawn from p."""
    for node, token in enumerate(draft.tokens):
        if not noise.accepts(node + 1, ratio(p(node), draft.q[node], token)):  # type: ignore[index]
            return Verdict(tuple(range(1, node + 1)), noise.resample(node, p(node)))
    return Verdict(tuple(range(1, len(draft) + 1)), noise.resample(len(draft), p(len(draft))))


def unweighted_block(draft: Draft, p: Rows, noise: Any) -> Verdict:
    """Block verification whose last draw forgets w."""
    K, w = len(draft), [1.0]
    for node, token in enumerate(draft.tokens):
        w.append(min(1.0, w[-1] * ratio(p(node), draft.q[node], token)))  # type: ignore[index]
    for n in range(K, -1, -1):
        if n == K:
            chance, left = w[K], p(K)
        else:
            S = excess(p(n), draft.q[n], w[n]).sum()  # type: ignore[index]
            chance = 1.0 if w[n] == 1 else S / (S + 1 - w[n])
            left = normal(excess(p(n), draft.q[n]), p(n), [draft.tokens[n]])  # type: ignore[index]
        if n == 0 or noise.accepts(n, chance):
            return Verdict(tuple(range(1, n + 1)), noise.resample(n, left))
    raise AssertionError


def distinct_as_iid(draft: Draft, p: Rows, noise: Any) -> Verdict:
    """Children drawn without putting back, verified as if they were put back."""
    from attar.runtime.speculate.tree import walk

    return walk(Draft(draft.tokens, draft.parents, draft.q, "iid"), p, noise)
