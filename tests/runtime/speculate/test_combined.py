"""A head and suffix trees in one draft: merged where both are fixed, else one, chosen before a draw."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from attar.errors import SettingsError
from attar.measure.speculation.profile import MeteredProposer
from attar.runtime.admission import Limits
from attar.runtime.loading import load
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.sampling.penalties import TokenHistory
from attar.runtime.sampling.warp import SamplingRow, warp
from attar.runtime.speculate.build import make_speculator
from attar.runtime.speculate.chain import block
from attar.runtime.speculate.combined import MERGED, CombinedProposer, combined, drafts_alone, merged
from attar.runtime.speculate.draft import LEVELS, Draft, kind_of, kinds_of
from attar.runtime.speculate.latency import Latency
from attar.runtime.speculate.policy import DraftPolicy
from attar.runtime.speculate.settings import SpeculationSettings
from attar.runtime.speculate.speculator import Speculator
from attar.runtime.speculate.suffix import SuffixProposer
from attar.runtime.speculate.suffix_tree import GROUP
from tests.runtime.fake_runner import VOCABULARY, FakeRunner, logits_after
from tests.runtime.speculate.laws import Shape, fits, plain_law, random_model, text_law, total_variation
from tests.runtime.speculate.proposing import Drawer, Eager, Oracle, speculator
from tests.runtime.speculate.test_engine import GREEDY, Looping
from tests.runtime.speculate.test_exact import drawn
from tests.runtime.test_engine import engine, finish, results

KIND = kind_of(GROUP, 2)


def tree(tokens, parents) -> Draft:
    return Draft(tokens, parents, kinds=(KIND,) * len(tokens))


def test_nodes_of_both_are_the_head_s() -> None:
    head = Draft.chain([5, 6, 7])
    draft = merged(head, tree((5, 8, 6, 9, 3), (0, 1, 1, 3, 0)))
    assert draft.tokens == (5, 6, 7, 8, 9, 3) and draft.parents == (0, 1, 2, 1, 2, 0)
    assert draft.kinds == (*kinds_of(head), *[KIND + MERGED] * 3)
    draft.check()
    assert merged(head, tree((5, 6), (0, 1))).tokens == head.tokens


def test_a_chain_with_siblings_keeps_its_order() -> None:
    """The policy learns siblings by the index of the chain's nodes (``count_siblings``)."""
    head = Draft((5, 6, 1, 2), (0, 1, 0, 1), kinds=(1, 2, LEVELS + 1, LEVELS + 2))
    draft = merged(head, tree((1, 4), (0, 1)))
    assert draft.tokens == (5, 6, 1, 2, 4) and draft.parents == (0, 1, 0, 1, 3)
    assert draft.kinds == (*head.kinds, KIND + MERGED)  # type: ignore[misc]


@pytest.mark.parametrize("seed", range(3))
def test_merged_drafts_keep_the_target_s_law(seed: int) -> None:
    p = random_model(4, seed)
    rng = np.random.default_rng(seed)
    for _ in range(20):
        head = Draft.chain(rng.integers(4, size=3).tolist())
        parents = tuple(int(rng.integers(node + 1)) for node in range(4))
        draft = merged(head, tree(tuple(rng.integers(4, size=4).tolist()), parents))
        assert len(draft) > 3 or set(draft.parents) == {0, 1, 2}
        assert total_variation(text_law([(draft, 1.0)], p, drawn, 3), plain_law(p, 3)) < 1e-12


def test_a_drawn_draft_stays_alone() -> None:
    q = np.full((2, 4), 0.25, dtype=np.float32)
    chain, fixed, found = Draft.chain([1, 2], q), Draft.chain([1, 2]), tree((1, 3), (0, 1))
    drafts = combined(Eager(), [0, 1, 2, 3], [8] * 4, [chain, fixed, None, None], [found, found, found, None])
    assert drafts[0] is chain and drafts[2] is found and drafts[3] is None
    assert drafts[1] is not None and drafts[1].tokens == (1, 2, 3) and drafts[1].rule == "fixed"
    with pytest.raises(AssertionError):
        merged(chain, found)


def test_a_limit_holds_for_both_together() -> None:
    head, found = Draft.chain([1, 2, 3]), tree((4, 5, 6, 7), (0, 1, 2, 3))
    (draft,) = combined(Eager(), [0], [5], [head], [found])
    assert draft is not None and draft.tokens == (1, 2, 3, 4, 5)


def policy(begin: float = 0.4) -> DraftPolicy:
    return DraftPolicy(Latency({1: 1.0, 8: 1.1, 64: 2.0}, {1: begin}), most=8)


def test_the_head_is_not_asked_where_the_trees_promise_more() -> None:
    subject, found = policy(), tree((1, 2, 3, 4), (0, 1, 2, 3))
    assert drafts_alone(subject, 0, 4, found), "equally often accepted, and free"
    assert not drafts_alone(subject, 0, 4, None)
    for _ in range(60):
        subject.acceptance.note(0, KIND, False)
        subject.acceptance.note(0, kind_of(0, 1), True)
    assert not drafts_alone(subject, 0, 4, found)
    assert drafts_alone(subject, 0, 0, found), "a head that may not draft"


def test_a_step_of_the_head_is_divided_over_the_sequences_of_a_pass() -> None:
    """Alone it takes half a pass; for 16 sequences hardly longer, while a pass takes eight times as long."""
    latency = Latency({1: 1.0, 16: 8.0, 128: 9.0}, {1: 0.5, 16: 0.6})
    subject, found = DraftPolicy(latency, 4), tree((1, 2), (0, 1))
    for sequence in range(16):
        for _ in range(60):
            subject.acceptance.note(sequence, KIND, True)
            for depth in range(1, 5):
                subject.acceptance.note(sequence, kind_of(0, depth), True)
    assert drafts_alone(subject, 0, 4, found) and drafts_alone(subject, 0, 4, found, 1)
    assert not drafts_alone(subject, 0, 4, found, 16)
    plain, with_head = 16 / latency.target(16, 16), 16 * 5 / (latency.target(16, 80) + 4 * latency.draft(16))
    assert abs(subject.speedup(0, 4, 16) / (with_head / plain) - 1) < 0.1


class Counting(Drawer):
    """Counts the sequences that it drafts for."""

    asked = 0

    def propose(self, wishes):
        Counting.asked += sum(wish.most > 0 for wish in wishes)
        return super().propose(wishes)


def completions(running, requests) -> list[list[tuple[int, ...]]]:
    names = {running.add(*request): request for request in requests}
    got = results(finish(running), names)
    running.check()
    assert running.speculator is None or running.speculator.failure is None
    return [[one.token_ids for one in got[name].samples] for name in names]


REQUESTS = [([n, n + 1, n], replace(GREEDY, max_tokens=50, n=1 + n % 2)) for n in range(4)]
REQUESTS += [
    (prompt, replace(params, temperature=0.5, seed=n)) for n, (prompt, params) in enumerate(REQUESTS)
]


@pytest.mark.few(1)
@pytest.mark.parametrize("eager", [True, False])
def test_completions_are_those_of_plain_decoding(eager: bool) -> None:
    """With a head that is right at times, and one that draws; merged always, and as the policy decides."""
    want = completions(engine(Looping(blocks=400)), REQUESTS)
    texts = [p + list(text) for (p, _), row in zip(REQUESTS, want, strict=True) for text in row]
    for head in (Oracle(texts, right=0.6, chains=True), Counting([])):
        head.is_free_of_compute = False
        proposer = CombinedProposer(head, SuffixProposer())  # type: ignore[arg-type]
        if eager:
            subject = speculator(proposer, most=8, verification="coupled")
        else:
            subject = Speculator(proposer, policy(), most=8, verification="coupled", clock=lambda: 0.0)
        assert completions(engine(Looping(blocks=400), speculator=subject), REQUESTS) == want
        assert subject.counts.accepted > 50
        merged_kinds = subject.policy.acceptance._all if not eager else {}
        assert eager or any(kind // LEVELS >= GROUP for kind in merged_kinds)
    assert Counting.asked > 0


def test_the_head_s_step_is_not_learnt_from_passes_without_it() -> None:
    """Microseconds of a look-up are no time of a draft model's step."""
    subject = policy(begin=5.0)  # never worth it
    proposer = CombinedProposer(Counting([]), SuffixProposer())  # type: ignore[arg-type]
    running = engine(Looping(blocks=400), speculator=Speculator(proposer, subject, most=8))
    before = Counting.asked
    completions(running, REQUESTS[:1])
    assert Counting.asked == before and running.speculator.counts.accepted > 10  # type: ignore[union-attr]
    assert subject.latency.draft(1) == 5.0


def test_trees_are_asked_where_the_proposer_is_metered_too() -> None:
    """``attar bench`` and the benchmarks measure heads with trees so."""
    proposer = CombinedProposer(Counting([]), SuffixProposer())  # type: ignore[arg-type]
    subject = Speculator(MeteredProposer(proposer), policy(begin=5.0), most=8)
    completions(engine(Looping(blocks=400), speculator=subject), REQUESTS[:1])
    assert any(kind // LEVELS >= GROUP for kind in subject.policy.acceptance._all)


@pytest.mark.parametrize("seed", range(3))
def test_a_choice_after_the_draw_would_change_the_law(seed: int) -> None:
    """Enumerated: chains of two from q, replaced by the tree's in every context, or for what was drawn."""
    p, q = random_model(4, seed), random_model(4, seed + 50)
    found, shape = tree((0, 1, 2), (0, 0, 1)), Shape((0, 1), "iid")

    def law(keeps) -> np.ndarray:
        total = np.zeros((4,) * 3)
        for draft, weight in shape.drafts(q):
            kept = keeps(draft)
            total += weight * text_law([(draft if kept else found, 1.0)], p, block if kept else drawn, 3)
        return total

    want = plain_law(p, 3)
    assert total_variation(law(lambda draft: True), want) < 1e-12
    assert total_variation(law(lambda draft: False), want) < 1e-12
    assert total_variation(law(lambda draft: draft.tokens[0] % 2), want) > 0.01


@pytest.mark.slow
def test_exact_mode_keeps_the_law() -> None:
    """Chains drawn from a strange q, next to trees: completions have the enumerated law."""
    params = SamplingParams(temperature=1.2, top_k=3, repetition_penalty=1.3, max_tokens=3, ignore_eos=True)
    prompt = [1, 2]
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        grown = {}
        for text, mass in law.items():
            row = SamplingRow(params, TokenHistory(prompt, list(text)), ())
            p = warp(logits_after(prompt + list(text))[None], [row])[0].numpy()
            grown |= {(*text, int(token)): mass * float(p[token]) for token in np.flatnonzero(p)}
        law = grown
    order = {text: (index,) for index, text in enumerate(law)}
    proposer = CombinedProposer(Drawer([], vocabulary=VOCABULARY, size=2), SuffixProposer())  # type: ignore[arg-type]
    subject, texts = speculator(proposer, verification="exact"), []
    for turn in range(30):
        running = engine(FakeRunner(blocks=400), limits=Limits(sequences=50), speculator=subject)
        names = [running.add(prompt, replace(params, seed=50 * turn + n)) for n in range(50)]
        rows: dict[str, list[int]] = {name: [] for name in names}
        for event in finish(running):
            rows[event.request] += event.token_ids
        texts += [order[tuple(tokens)] for tokens in rows.values()]
    assert subject.failure is None and subject.counts.accepted > 20
    assert fits(texts, np.array(list(law.values())))


@pytest.mark.slow
def test_suffix_trees_draft_beside_a_model_unless_it_is_to_draft_alone() -> None:
    assert SpeculationSettings(draft="attar:draft").both
    assert SpeculationSettings(speculate="suffix", draft="attar:draft").both
    assert not SpeculationSettings(speculate="draft", draft="attar:draft").both
    assert not SpeculationSettings(speculate="suffix").both
    target = load("attar:tiny", kv_tokens=64)
    for method, name in ((None, "draft+suffix"), ("suffix", "draft+suffix"), ("draft", "draft")):
        speculator = make_speculator(SpeculationSettings(speculate=method, draft="attar:draft"), target)
        assert speculator is not None and speculator.proposer.name.endswith(name)


def test_settings() -> None:
    for method in ("ngram", "lookahead", "self"):
        with pytest.raises(SettingsError, match="suffix, draft or None with a draft model"):
            SpeculationSettings(speculate=method, draft="attar:draft")
    with pytest.raises(SettingsError, match="speculate is 'draft', but must be given with draft"):
        SpeculationSettings(speculate="draft")
