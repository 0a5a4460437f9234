"""Trees of a draft model have the target's law: by enumeration of all drafts, coins and draws, and counted.

verify() takes them through its front door, cut to what is wanted, and ended where chance ends them. In the
engine: ``test_law.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from attar.runtime.completion import Completion
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.sampling.penalties import TokenHistory
from attar.runtime.sampling.warp import SamplingRow, warp
from attar.runtime.speculate import draft_model
from attar.runtime.speculate.chain import block
from attar.runtime.speculate.draft import Draft, Verdict, kind_of
from attar.runtime.speculate.draft_model import GrowingDraft
from attar.runtime.speculate.noise import DraftRules, Noise
from attar.runtime.speculate.proposer import DraftRequest
from attar.runtime.speculate.siblings import cut_siblings
from attar.runtime.speculate.target import TargetLogits
from attar.runtime.speculate.tree import walk
from attar.runtime.speculate.verify import verify
from tests.runtime.speculate.laws import Shape, fits, plain_law, random_model, text_law, total_variation

SECOND, THIRD = ((kind_of(rank, 1), kind_of(rank, 2)) for rank in (1, 2))
ENDS = (0, 3)  # the chain stops behind one


class Known:
    """The target of a text's law."""

    greedy = False

    def __init__(self, draft: Draft, p: Any) -> None:
        self.draft, self.p = draft, p

    def token(self, node: int) -> int:
        raise AssertionError("exact drafts are not looked up")


def judged(draft: Draft, p: Any, noise: Any) -> Verdict:
    return verify(draft, Known(draft, p), noise, "exact")


def drafts(q: Any, K: int, kinds: set[int], ranks: int = 2) -> Iterator[tuple[Draft, float]]:
    """Every tree that a draft model may draw from q, ended behind ENDS, and cut to what is wanted."""
    parents = (*range(K), *(depth for depth in range(K) for _ in range(1, ranks)))
    every = [kind_of(0, depth + 1) for depth in range(K)]
    every += [kind_of(rank, depth + 1) for depth in range(K) for rank in range(1, ranks)]
    for draft, odds in Shape(parents, "distinct").drafts(q):
        last = next((d for d in range(K) if draft.tokens[d] in ENDS), K - 1)
        nodes = [node for node, parent in enumerate(parents) if parent <= last and not last < node < K]
        positions = {0: 0, **{node + 1: index for index, node in enumerate(nodes, 1)}}
        whole = Draft(
            tuple(draft.tokens[node] for node in nodes),
            tuple(positions[parents[node]] for node in nodes),
            [draft.q[node] for node in nodes],  # type: ignore[index]
            "distinct",
            tuple(every[node] for node in nodes),
        )
        yield cut_siblings(whole, kinds), odds


EVERY = [set(), {SECOND[0]}, {SECOND[1]}, {*SECOND}, {kind_of(1, 3)}]


def models(V: int, seed: int) -> tuple[Any, Any]:
    """p, and a q with at least three tokens everywhere, as many as a row has siblings and one."""
    return random_model(V, seed), random_model(V, seed + 100, spread=3.0)


@pytest.mark.few(4)
@pytest.mark.parametrize("kinds", EVERY)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_completion_has_the_target_s_distribution(kinds: set[int], seed: int) -> None:
    p, q = models(4, seed)
    law = text_law(drafts(q, 2, kinds), p, judged, 3)
    assert total_variation(law, plain_law(p, 3)) < 1e-12


def test_three_of_a_row() -> None:
    p, q = models(5, 3)
    law = text_law(drafts(q, 1, {SECOND[0], THIRD[0]}, ranks=3), p, judged, 2)
    assert total_variation(law, plain_law(p, 2)) < 1e-12


def by_shape(draft: Draft, p: Any, noise: Any) -> Verdict:
    """Wrong: a chain is a block, even where only chance made it a chain."""
    return block(draft, p, noise) if draft.is_chain else walk(draft, p, noise)


def without_doubtful(found: Iterator[tuple[Draft, float]]) -> Iterator[tuple[Draft, float]]:
    """Wrong: the last sibling is dropped for the token that it is."""
    for draft, odds in found:
        doubtful = not draft.is_chain and draft.tokens[-1] in ENDS
        yield (draft.cut(len(draft) - 1) if doubtful else draft), odds  # type: ignore[misc]


def as_iid(draft: Draft, p: Any, noise: Any) -> Verdict:
    """Wrong: siblings drawn without putting back, said to be drawn each by itself."""
    return walk(Draft(draft.tokens, draft.parents, draft.q, "iid"), p, noise)


@pytest.mark.slow
def test_wrong_variants_are_refused() -> None:
    p, q = models(4, 2)
    deep = {kind_of(1, 3)}
    wanted_everywhere = {*SECOND}
    right = {
        "deep": text_law(drafts(q, 3, deep), p, judged, 3),
        "everywhere": text_law(drafts(q, 2, wanted_everywhere), p, judged, 3),
    }
    wrong = {
        "blocks by shape": text_law(drafts(q, 3, deep), p, by_shape, 3),
        "as iid": text_law(drafts(q, 2, wanted_everywhere), p, as_iid, 3),
        "doubtful dropped": text_law(without_doubtful(drafts(q, 2, wanted_everywhere)), p, judged, 3),
    }
    for name, law in right.items():
        assert total_variation(law, plain_law(p, 3)) < 1e-12, name
    for name, law in wrong.items():
        assert total_variation(law, plain_law(p, 3)) > 1e-3, (name, total_variation(law, plain_law(p, 3)))


# counted, with the real noise and after all warps; the draft model is of another mind

V, LENGTH, PROMPT = 6, 3, [1, 4]
PARAMS = SamplingParams(temperature=0.9, top_k=5, repetition_penalty=1.2, max_tokens=8, ignore_eos=True)


def after(seed: int, tokens: Sequence[int]) -> torch.Tensor:
    """A model of six tokens: logits from the last two."""
    draws = np.random.default_rng([seed, *tokens[-2:]])
    return torch.from_numpy(draws.normal(size=V) * 1.5).float()


def law() -> np.ndarray:
    def model(context: tuple[int, ...]) -> np.ndarray:
        row = SamplingRow(PARAMS, TokenHistory(PROMPT, list(context)))
        return warp(after(1, [*PROMPT, *context])[None], [row])[0].numpy()

    return plain_law(model, LENGTH)


def spoken(seed: int) -> tuple[int, ...]:
    """A text in rounds of a chain of two and siblings, without an engine."""
    context: list[int] = []
    while len(context) < LENGTH:
        rules = Completion("r", 0, [*PROMPT, *context], PARAMS, seed=seed, limit=99)
        noise = Noise(seed, 0, len(PROMPT) + len(context))
        growing = GrowingDraft(
            DraftRequest(0, [], 2, rules=DraftRules(rules, noise)), [], 0, 2, frozenset(), 0.0, 3
        )
        for _ in range(2):
            growing.extend(after(2, [*PROMPT, *context, *growing.tokens])[None])
        whole = growing.draft()
        assert whole is not None
        draft = cut_siblings(whole, {kind_of(1, 1), kind_of(2, 1), kind_of(1, 2)})
        paths = [draft.path_tokens(draft.path(node)) for node in range(len(draft) + 1)]
        logits = torch.stack([after(1, [*PROMPT, *context, *path]) for path in paths])
        context += verify(draft, TargetLogits(logits, rules, draft), noise, "exact").tokens(draft)
    return tuple(context[:LENGTH])


@pytest.mark.slow
@pytest.mark.parametrize("count", [1_500, pytest.param(20_000, marks=pytest.mark.slow)])
def test_exact_texts_have_the_target_s_law(count: int) -> None:
    assert fits([spoken(seed) for seed in range(count)], law())


@pytest.mark.slow
def test_likeliest_tokens_declared_as_drawn_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def likeliest(p: torch.Tensor, key: int, count: int) -> list[int]:
        return p.argsort(descending=True, stable=True)[: min(count, int(p.count_nonzero()))].tolist()

    monkeypatch.setattr(draft_model, "draw_distinct", likeliest)
    assert not fits([spoken(seed) for seed in range(1_500)], law())
