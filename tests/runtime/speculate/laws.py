"""Laws of verified text: exactly, by taking every branch of chance, and by counting real draws.

A language model here is a function from the tokens so far, a tuple, to a distribution over V tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, TypeVar

import numpy as np

from attar.runtime.speculate.draft import Draft, Verdict

Model = Callable[[tuple[int, ...]], np.ndarray]
T = TypeVar("T", bound=Hashable)
Judge = Callable[[Draft, Callable[[int], np.ndarray], Any], Verdict]


def random_model(V: int, seed: int, spread: float = 1.0) -> Model:
    """A distribution for every prefix, drawn from a Dirichlet; in half of them a token is impossible."""

    @cache
    def model(prefix: tuple[int, ...]) -> np.ndarray:
        generator = np.random.default_rng([seed, len(prefix), *prefix])
        p = generator.dirichlet(np.full(V, spread))
        if generator.random() < 0.5:
            p[generator.integers(V)] = 0.0
        return p / p.sum()

    return model


class Chances:
    """Stands for ``Noise``: takes the branches that a tape says, then the first possible ones."""

    def __init__(self, tape: tuple[int, ...]) -> None:
        self.tape, self.taken, self.others, self.probability = tape, [], [], 1.0
        self.tossed: list[int] = []

    def accepts(self, node: int, chance: float) -> bool:
        assert chance >= 0 and node not in self.tossed, "a coin is looked at once"
        self.tossed.append(node)
        return self._pick([min(chance, 1.0), 1 - min(chance, 1.0)]) == 0

    def token(self, depth: int, p: np.ndarray) -> int:
        return self._pick((p / p.sum()).tolist())

    resample = token

    def _pick(self, odds: list[float]) -> int:
        number = len(self.taken)
        if number < len(self.tape):
            result = self.tape[number]
        else:
            result, *others = [index for index, odd in enumerate(odds) if odd > 0]
            self.others += [(*self.taken, other) for other in others]
        self.taken.append(result)
        self.probability *= odds[result]
        return result


def outcomes(run: Callable[[Chances], T]) -> dict[T, float]:
    """What comes out, with its probability."""
    actual: dict[T, float] = defaultdict(float)
    tapes: list[tuple[int, ...]] = [()]
    while tapes:
        chances = Chances(tapes.pop())
        actual[run(chances)] += chances.probability
        tapes += chances.others
    return actual


@dataclass(frozen=True)
class Shape:
    """A tree to be filled: parents as in a draft, and how its tokens come about."""

    parents: tuple[int, ...]
    rule: str

    @property
    def depth(self) -> int:
        return max(Draft((0,) * len(self.parents), self.parents).depths)

    def drafts(self, q: Model) -> Iterator[tuple[Draft, float]]:
        """Every way to fill it, with its probability."""
        yield from self._filled(q, (), 1.0)

    def _filled(self, q: Model, tokens: tuple[int, ...], weight: float) -> Iterator[tuple[Draft, float]]:
        if len(tokens) == len(self.parents):
            rows = [q(self.prefix(tokens, node)) for node in self.parents]
            yield Draft(tokens, self.parents, np.array(rows), self.rule), weight
            return
        for token, odd in enumerate(self.row(q, tokens)):
            if odd > 0:
                yield from self._filled(q, (*tokens, token), weight * odd)

    def row(self, q: Model, tokens: tuple[int, ...]) -> np.ndarray:
        """What the next token is drawn from; without what its siblings have where they are distinct."""
        parent = self.parents[len(tokens)]
        row = q(self.prefix(tokens, parent)).copy()
        if self.rule == "distinct":
            row[[tokens[i] for i in range(len(tokens)) if self.parents[i] == parent]] = 0.0
            row /= row.sum()
        return row

    def prefix(self, tokens: Sequence[int], node: int) -> tuple[int, ...]:
        actual: tuple[int, ...] = ()
        while node:
            actual = (tokens[node - 1], *actual)
            node = self.parents[node - 1]
        return actual


def rows(model: Model, draft: Draft) -> Callable[[int], np.ndarray]:
    """p behind a node."""
    return lambda node: model(draft.path_tokens(draft.path(node)))


def text_law(drafts: Iterable[tuple[Draft, float]], p: Model, judge: Judge, length: int) -> np.ndarray:
    """Law of the first ``length`` tokens: verified ones, then the model's own; (V,) * length."""
    law = np.zeros((len(p(())),) * length)
    for draft, weight in drafts:
        for tokens, odd in outcomes(lambda c, d=draft: judge(d, rows(p, d), c).tokens(d)).items():
            law[tokens[:length]] += weight * odd * plain_law(p, length, tokens[:length])
    return law


def plain_law(p: Model, length: int, prefix: tuple[int, ...] = ()) -> np.ndarray:
    """Law of the tokens behind a prefix up to ``length`` in all: (V,) * (length - len(prefix))."""
    known = _LAWS.setdefault(id(p), (p, {}))[1]
    if (length, prefix) not in known:
        if len(prefix) == length:
            known[length, prefix] = np.array(1.0)
        else:
            behind = [plain_law(p, length, (*prefix, token)) for token in range(len(p(prefix)))]
            known[length, prefix] = np.array([odd * law for odd, law in zip(p(prefix), behind, strict=True)])
    return known[length, prefix]


_LAWS: dict[int, tuple[Model, dict[tuple[int, tuple[int, ...]], np.ndarray]]] = {}


def total_variation(a: np.ndarray, b: np.ndarray) -> float:
    return 0.5 * float(np.abs(a - b).sum())


def mean_accepted(drafts: Iterable[tuple[Draft, float]], p: Model, judge: Judge) -> float:
    """Drafts accepted in the mean."""
    total = 0.0
    for draft, weight in drafts:
        actual = outcomes(lambda c, d=draft: len(judge(d, rows(p, d), c).path))
        total += weight * sum(count * odd for count, odd in actual.items())
    return total


def fits(texts: Sequence[Sequence[int]], law: np.ndarray) -> bool:
    """Whether texts drawn independently may have the law: chi-square (1 in 10^5 is wrongly refused) and
    total variation. Cells of less than 5 expected texts are put together."""
    counts = np.zeros(law.shape)
    np.add.at(counts, tuple(np.array(texts).T), 1)
    N, p, counts = len(texts), law.ravel(), counts.ravel()
    if counts[p == 0].any():
        return False
    small = N * p < 5
    observed, expected = (
        np.append(counts[~small], counts[small].sum()),
        N * np.append(p[~small], p[small].sum()),
    )
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic, k = float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1
    normal = ((statistic / k) ** (1 / 3) - (1 - 2 / (9 * k))) / np.sqrt(2 / (9 * k))  # Wilson and Hilferty
    usual = np.sqrt(p * (1 - p) / (2 * np.pi * N)).sum()  # mean total variation of N draws
    return normal < 4.27 and total_variation(counts / N, p) < 1.6 * usual


def every_text(V: int, length: int) -> list[tuple[int, ...]]:
    return list(product(range(V), repeat=length))
