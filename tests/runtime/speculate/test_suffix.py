"""The suffix proposer: tenants, bounds, preemption; completions in the engine are those of plain decoding."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from attar.runtime.speculate.draft import LEVELS, Draft
from attar.runtime.speculate.proposer import DraftFeedback, DraftRequest
from attar.runtime.speculate.suffix import NEAR, FinishedRequests, SuffixProposer
from attar.runtime.speculate.suffix_tree import GROUP, GROUPS
from tests.runtime.fake_runner import FakeRunner
from tests.runtime.speculate.laws import plain_law, random_model, text_law, total_variation
from tests.runtime.speculate.proposing import speculator
from tests.runtime.speculate.test_engine import GREEDY, Looping, asked
from tests.runtime.speculate.test_exact import drawn
from tests.runtime.test_engine import engine, finish, results


def ask(proposer, tokens, most=8, sequence=0, salt="") -> Draft | None:
    (draft,) = proposer.propose([DraftRequest(sequence, tokens, most, salt)])
    if draft is not None:
        draft.check()
        assert len(draft) <= most and draft.rule == "fixed"
    return draft


def test_the_continuation_of_a_match() -> None:
    draft = ask(SuffixProposer(), [1, 2, 3, 4, 9, 8, 1, 2, 3])
    assert draft is not None and draft.tokens == (4, 9, 8, 1, 2, 3, 4, 9) and draft.is_chain
    assert ask(SuffixProposer(), [1, 2, 3]) is None and ask(SuffixProposer(), [1]) is None
    assert ask(SuffixProposer(), [1, 1, 1], most=0) is None
    assert ask(SuffixProposer(ends=[9]), [1, 2, 3, 4, 9, 8, 1, 2, 3]).tokens == (4, 9)  # type: ignore[union-attr]


def test_a_repetition_goes_on_past_the_end() -> None:
    """What was copied once is copied again, with the period of the match."""
    draft = ask(SuffixProposer(), [7, 8, 1, 2, 3, 1, 2, 3, 1], most=12)
    assert draft is not None and draft.tokens == (2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1)
    proposer = SuffixProposer()
    ask(proposer, [7, 1, 2, 3], sequence=1)
    proposer.forget(1)
    draft = ask(proposer, [5, 7, 1])
    assert draft is not None and draft.tokens == (2, 3), "another request's end is its end"


def test_continuations_that_differ_are_branches_the_more_frequent_first() -> None:
    draft = ask(SuffixProposer(), [7, 1, 2, 5, 8, 1, 2, 4, 9, 1, 2, 5, 6, 1, 2])
    assert draft is not None and [draft.tokens[n - 1] for n in draft.children(0)] == [5, 4]
    assert sorted(draft.tokens[n - 1] for n in draft.children(1)) == [6, 8], "5 was followed by both"
    draft = ask(SuffixProposer(), [3, 1, 2, 5, 8, 1, 2, 4, 9, 1, 2])
    assert draft is not None and [draft.tokens[n - 1] for n in draft.children(0)] == [4, 5], "the latest"


def test_a_tree_that_grew_is_as_a_new_one() -> None:
    rng = random.Random(1)
    text = [rng.randrange(4) for _ in range(120)]
    kept = SuffixProposer()
    for end in range(10, 120, 7):
        new, old = ask(SuffixProposer(), text[:end]), ask(kept, text[:end])
        assert new and old and (new.tokens, new.parents, new.kinds) == (old.tokens, old.parents, old.kinds)


def test_a_look_up_says_what_a_proposal_would_have() -> None:
    rng = random.Random(2)
    text = [rng.randrange(150) for _ in range(200)]
    asked, looked = SuffixProposer(), SuffixProposer()
    assert looked.has_draft(0, text[:10], 8), "it was not asked for yet"
    answers = set()
    for proposer in (asked, looked):
        ask(proposer, text[40::-1], sequence=7)
        proposer.forget(7)
        ask(proposer, text[:10])
    for end in range(11, 200, 3):
        draft, proposes = ask(asked, text[:end]), looked.has_draft(0, text[:end], 8)
        assert proposes == (draft is not None)
        again = ask(looked, text[:end]) if proposes else None
        assert again == draft or (again.tokens, again.kinds) == (draft.tokens, draft.kinds)  # type: ignore[union-attr]
        answers.add(proposes)
    assert answers == {True, False}


def test_finished_requests_of_the_tenant_help_and_no_other_s() -> None:
    proposer = SuffixProposer()
    ask(proposer, [1, 2, 3, 4, 5, 6], sequence=0, salt="a")
    assert ask(proposer, [9, 2, 3], sequence=1, salt="a") is None, "it has not finished"
    proposer.forget(0)
    draft = ask(proposer, [9, 2, 3, 8, 2, 3, 4], sequence=1, salt="a")
    assert draft is not None and draft.tokens == (5, 6)
    assert {kind // LEVELS for kind in draft.kinds or ()} == {GROUP + GROUPS}
    assert ask(proposer, [9, 2, 3], sequence=2, salt="b") is None
    for sequence, salt in ((1, "a"), (2, "b")):
        proposer.forget(sequence)
        assert proposer.finished.tree(salt).count([9, 2]) == 1  # type: ignore[union-attr]
    assert proposer.finished.tree("b").count([2, 3, 4]) == 0  # type: ignore[union-attr]
    assert not proposer._running


def test_a_preempted_request_is_counted_once() -> None:
    """It is not among the finished ones while it runs again, with more tokens."""
    proposer = SuffixProposer()
    text = [1, 2, 3, 4]
    for count in range(3):
        ask(proposer, text, sequence=5)
        assert len(proposer.finished) == 0 and proposer.finished.nodes == 0
        proposer.forget(5)
        assert proposer.finished.tree("").count([1, 2, 3]) == 1 + count  # type: ignore[union-attr]
        assert proposer.finished.tree("").count([3, 4]) == 1 + count  # type: ignore[union-attr]
        text = [*text, 1, 2, 3, 4]
    proposer.forget(5)
    assert len(proposer.finished) == 1


@pytest.mark.parametrize("limits", [{"requests": 7}, {"nodes": 400}])
def test_memory_is_bounded(limits) -> None:
    """The oldest request of the least recently used tenant goes first."""
    finished = FinishedRequests(**limits)
    rng = random.Random(0)
    for number in range(300):
        salt = rng.choice("abc")
        finished.add(number, salt, [number, *(rng.randrange(20) for _ in range(30))])
        assert len(finished) <= limits.get("requests", 300) and finished.nodes <= limits.get("nodes", 10**6)
        assert finished.tree(salt).count([number]) >= 1  # type: ignore[union-attr]
        assert finished.nodes == sum(len(finished._trees[one]) for one in finished.salts)
    assert len(finished) >= 3
    finished.add(1000, "d", list(range(5000)) if "nodes" in limits else [1])
    assert len(finished) == (0 if "nodes" in limits else 7), "one that is too large is not kept"


def test_the_oldest_of_the_least_recently_used_tenant_goes() -> None:
    finished = FinishedRequests(requests=3)
    for number, salt in enumerate("aab"):
        finished.add(number, salt, [number, 50])
    finished.tree("a")
    finished.add(3, "c", [3, 50])
    assert finished.salts == ("a", "c") and finished.tree("b") is None
    finished.add(4, "a", [4, 50])
    finished.add(5, "d", [5, 50])
    assert finished.salts == ("a", "d"), "c was used before a"
    finished.add(6, "d", [6, 50])
    assert [finished.tree("a").count([n]) for n in (0, 1, 4)] == [0, 0, 1]  # type: ignore[union-attr]


def test_it_looks_as_far_ahead_as_has_paid() -> None:
    proposer, text = SuffixProposer(), [1, 2, 3, 4] * 12
    assert len(ask(proposer, text, most=40) or ()) == 19, "after a match of 5, for the depth is 24"
    for run, ahead in ((None, NEAR), (1, NEAR + 2), (3, NEAR + 6), (12, 19)):
        draft = Draft.chain([1] * run) if run else None
        proposer.observe([DraftFeedback(0, draft, (), [1]), DraftFeedback(5, None, (), [1])])
        assert len(ask(proposer, text, most=40) or ()) == ahead


@pytest.mark.parametrize("seed", range(4))
def test_trees_keep_the_target_s_law(seed: int) -> None:
    """All draws are enumerated, after a context that the drafts were made from."""
    p, rng = random_model(4, seed), random.Random(seed)
    branched = 0
    for _ in range(12):
        proposer = SuffixProposer()
        ask(proposer, [rng.randrange(4) for _ in range(30)], sequence=1)
        proposer.forget(1)
        draft = ask(proposer, [rng.randrange(4) for _ in range(25)], most=7)
        assert draft is not None
        branched += not draft.is_chain
        assert total_variation(text_law([(draft, 1.0)], p, drawn, 4), plain_law(p, 4)) < 1e-12
    assert branched


def completions(running, requests) -> list[list[tuple[int, ...]]]:
    names = {running.add(*request): request for request in requests}
    got = results(finish(running), names)
    running.check()
    assert running.speculator is None or running.speculator.failure is None
    return [[one.token_ids for one in got[name].samples] for name in names]


@pytest.mark.few(1)
@pytest.mark.parametrize("blocks", [400, 24])
def test_completions_are_those_of_plain_decoding(blocks: int) -> None:
    """Greedy and coupled ones, forks, penalties, and preemption where there are few blocks."""
    requests = [([n, n + 1, n], replace(GREEDY, max_tokens=40, n=1 + n % 2)) for n in range(6)]
    requests += [(p, replace(g, temperature=0.5, seed=n)) for n, (p, g) in enumerate(requests)]
    requests += [(p, replace(g, n=1)) for p, g in asked(4, 7)]
    want = completions(engine(Looping(blocks=400)), requests)
    proposer = SuffixProposer()
    running = engine(Looping(blocks=blocks), speculator=speculator(proposer, most=12, verification="coupled"))
    assert completions(running, requests) == want
    assert running.speculator.counts.accepted > 50  # type: ignore[union-attr]
    assert (running.scheduler.preemptions > 0) == (blocks < 100)
    running.speculator.drop_finished(())  # type: ignore[union-attr]
    samples = sum(params.n for _, params in requests)
    assert samples - 2 <= len(proposer.finished) <= samples, "once each; not those of one token"
    again = running.speculator.counts.accepted  # type: ignore[union-attr]
    assert completions(running, requests) == want
    assert running.speculator.counts.accepted - again > again, "finished requests help"  # type: ignore[union-attr]


def test_salts_in_the_engine() -> None:
    """The same request of another tenant is drafted for as if it were the first."""
    request = ([1, 2, 3], replace(GREEDY, max_tokens=40))
    running = engine(FakeRunner(blocks=200), speculator=speculator(SuffixProposer(), most=12))
    counts = running.speculator.counts  # type: ignore[union-attr]
    accepted = []
    for salt in ("a", "b", "a"):
        before = counts.accepted
        name = running.add(*request, salt=salt)
        results(finish(running), {name: request})
        accepted.append(counts.accepted - before)
    assert accepted[0] == accepted[1] < accepted[2] - 20
