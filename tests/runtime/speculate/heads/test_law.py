"""What every trained proposer drafts keeps the target's law: by enumeration of every draw of the drafts, of
every coin, and of every draw of the target, round after round.

Target and heads are real modules with three tokens; a round's drafts are made of the text so far, of the
target's states of it, and of the proposer's own earlier drafts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

from attar.models.hidden_states import recording_states
from attar.runtime.runner.modules import Modules
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.sampling.warp import SamplingRow
from attar.runtime.speculate import draft_model
from attar.runtime.speculate.combined import combined
from attar.runtime.speculate.draft import Draft
from attar.runtime.speculate.noise import DraftRules, Noise
from attar.runtime.speculate.proposer import DraftRequest
from attar.runtime.speculate.verify import verify
from tests import tiny_models
from tests.cases import mostly_slow
from tests.runtime.speculate.heads.kinds import EVERY, OTHER_MARKOV, KindCase, head_of_kind, proposer_of
from tests.runtime.speculate.laws import outcomes, plain_law, total_variation
from tests.runtime.speculate.proposing import Eager

V, LENGTH, DRAFTS, PROMPT = 3, 3, 2, (2, 1, 2, 0, 2, 1)
CASES = {**EVERY, **OTHER_MARKOV}
FAST = ("medusa tree", "eagle3 tree", "dflash", "dspark", "suffix", "medusa tree and suffix")


@cache
def target() -> Any:
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    return tiny_models.build("smollm", vocab_size=V, num_attention_heads=2, num_key_value_heads=1, **size)


@cache
@torch.no_grad()
def passed(tokens: tuple[int, ...], layers: tuple[int, ...]) -> tuple[np.ndarray, torch.Tensor]:
    """p after some tokens, and the states (n, m, H) of all of them."""
    with recording_states(target(), layers) as states:
        logits = target()(input_ids=torch.tensor([tokens])).logits
    return logits[0, -1].double().softmax(-1).numpy(), torch.stack([one[0] for one in states], 1)


def p(text: tuple[int, ...]) -> np.ndarray:
    """The target at temperature 1, after the prompt and a text."""
    return passed((*PROMPT, *text), (0,))[0]


class TextStates:
    """A context reader of the states of a text."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers, self.count = layers, 0

    def unread(self, request: DraftRequest) -> tuple[int, torch.Tensor]:
        start, self.count = self.count, len(request.tokens) - 1
        return start, self._states(request)[start:]

    def last(self, request: DraftRequest) -> torch.Tensor:
        return self._states(request)[-1]

    def forget(self, sequence: int) -> None:
        self.count = 0

    def _states(self, request: DraftRequest) -> torch.Tensor:
        return passed(tuple(request.tokens[:-1]), self.layers)[1]


class PlainRules:
    """Temperature 1, and nothing else."""

    def row(self, drafted=()):
        return SamplingRow(SamplingParams(temperature=1.0))

    def key(self, ahead=0):
        raise AssertionError("drafts have noise of their own")


class Target:
    """What ``verify`` asks; the draws of the target are branches of the enumeration."""

    greedy = False

    def __init__(self, draft: Draft, text: tuple[int, ...], chances: Any) -> None:
        self.draft, self.text, self.chances = draft, text, chances

    def p(self, node: int) -> np.ndarray:
        return p((*self.text, *self.draft.path_tokens(self.draft.path(node))))

    def token(self, node: int) -> int:
        return self.chances.token(node, self.p(node))


def drafted(proposer: Any, case: KindCase, text: tuple[int, ...], least: float) -> Draft | None:
    """A round's draft, as the speculator asks for it."""
    tokens = [*PROMPT, *text]
    rules = DraftRules(PlainRules(), Noise(0, 0, len(tokens)))
    request = DraftRequest(
        0, tokens, 5, rules=rules if proposer.samples_from_q else None, depth=DRAFTS, min_chance=least
    )
    if not (case.kind and case.suffix):
        (draft,) = proposer.propose([request])
        return draft
    (found,) = proposer.suffixes.propose([DraftRequest(0, tokens, 3)])
    alone = found is not None and len(text) == 1  # decided from the text so far
    (draft,) = proposer.propose([replace(request, most=0 if alone else 5)])
    (both,) = combined(Eager(), [0], [5], [draft], [found])
    return both


def unchanged(draft: Draft) -> Draft:
    return draft


def law_of(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Draft], Draft] = unchanged,
    chosen: Any = None,
    least: float = 0.0,
) -> tuple[float, set[int]]:
    """Total variation between drafted texts and the target's, and the sizes of drafts; 0: there was none."""
    case, sizes = CASES[name], set[int]()
    runner = Modules(copy.deepcopy(target()), blocks=2)
    head = head_of_kind(case, target(), drafts=DRAFTS, chosen=chosen) if case.kind else None

    def round_after(text: tuple[int, ...], chances: Any) -> tuple[int, ...]:
        def drawn(q: torch.Tensor, key: int, count: int) -> list[int]:
            return [chances.token(0, q.double().numpy())]

        monkeypatch.setattr(draft_model, "draw_distinct", drawn)
        draft = drafted(proposer_of(case, head, runner, TextStates), case, text, least)
        sizes.add(0 if draft is None else len(draft))
        if draft is None:
            return (chances.token(0, p(text)),)
        draft = change(draft)
        draft.check()
        return verify(draft, Target(draft, text, chances), chances, "exact").tokens(draft)

    law = np.zeros((V,) * LENGTH)
    mass = {(): 1.0}  # of texts, the shortest first
    for count in range(LENGTH):
        for text in [text for text in mass if len(text) == count]:
            odds = mass.pop(text)
            for tokens, chance in outcomes(partial(round_after, text)).items():
                longer = (*text, *tokens)[:LENGTH]
                mass[longer] = mass.get(longer, 0.0) + odds * chance
    for text, odds in mass.items():
        law[text] += odds
    assert law.sum() == pytest.approx(1.0, abs=1e-6)
    return total_variation(law, plain_law(p, LENGTH)), sizes


@pytest.mark.few(2)
@pytest.mark.parametrize("name", mostly_slow(CASES, FAST))
def test_texts_have_the_targets_law(name, monkeypatch):
    distance, sizes = law_of(name, monkeypatch)
    assert distance < 1e-6, "q is in float32"
    assert max(sizes) >= DRAFTS


def between(name: str, monkeypatch: pytest.MonkeyPatch) -> float:
    """A chance between those of the second draft after different first ones."""
    runner, chances = Modules(copy.deepcopy(target()), blocks=2), set[float]()
    proposer = proposer_of(
        CASES[name], head_of_kind(CASES[name], target(), drafts=DRAFTS), runner, TextStates
    )
    proposer = proposer.head if CASES[name].suffix else proposer
    confidence = proposer.head.confidence

    def recorded(drafts):
        found = confidence(drafts)
        pairs = zip(drafts, found, strict=True)
        chances.update(draft.survival * chance for draft, chance in pairs if draft.tokens)
        return found

    proposer.head.confidence = recorded
    for token in range(V):
        monkeypatch.setattr(draft_model, "draw_distinct", lambda q, key, count, token=token: [token])
        proposer.forget(0)
        drafted(proposer, replace(CASES[name], suffix=False), (), 0.0)
    assert max(chances) > min(chances)
    return (max(chances) + min(chances)) / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(["dspark", *OTHER_MARKOV, "dspark and suffix"], ["dspark"]))
def test_a_chain_that_ends_by_confidence_keeps_the_law(name, monkeypatch):
    distance, sizes = law_of(name, monkeypatch, least=between(name, monkeypatch))
    assert distance < 1e-6 and sizes >= {1, 2}, "the confidence ends some drafts, and others not"


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(["eagle3", "dspark", "medusa tree"], ["dspark"]))
def test_a_head_that_lacks_tokens_keeps_the_law(name, monkeypatch):
    assert law_of(name, monkeypatch, chosen=torch.tensor([0, 2]))[0] < 1e-6


def flattened(draft: Draft) -> Draft:
    """q is not what its tokens were drawn from."""
    return replace(draft, q=[np.full(V, 1 / V, dtype=np.float32)] * len(draft))


def called_drawn(draft: Draft) -> Draft:
    """The likeliest tokens, said to be drawn without replacement."""
    row = np.full(V, 1 / V, dtype=np.float32)
    return replace(draft, q=[row] * len(draft), rule="distinct", kinds=None)


@pytest.mark.parametrize(
    ("name", "change"),
    mostly_slow(
        [
            ("dspark", flattened),
            ("dflash", flattened),
            ("medusa tree", called_drawn),
            ("suffix", called_drawn),
        ],
        [("medusa tree", called_drawn)],
    ),
)
def test_wrong_drafts_are_refused(name, change, monkeypatch):
    assert law_of(name, monkeypatch, change)[0] > 1e-3
