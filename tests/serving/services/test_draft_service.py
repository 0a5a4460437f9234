"""The service's side: guesses go on while they agree, one long prompt delays nobody, everything is
bounded."""

from __future__ import annotations

import threading

import pytest

from attar.runtime.sampling.params import SamplingParams
from attar.runtime.speculate.draft import Draft
from attar.runtime.speculate.suffix import SuffixProposer
from attar.serving.services.draft_service import READ, longest_chain
from attar.serving.services.draft_session import DraftSession
from attar.serving.services.messages import Close, Commit, DraftSampling, Open, Ping
from tests.runtime.fake_runner import VOCABULARY, FakeRunner
from tests.runtime.test_engine import alone
from tests.serving.http.test_live import until
from tests.serving.services.local import drafting

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, seed=0)


class Inbox:
    """A stream that keeps what it gets."""

    def __init__(self):
        self.offers, self.pongs = [], []

    def offer(self, offer):
        self.offers.append(offer)

    def pong(self, pong):
        self.pongs.append(pong)


def opening(request, tokens, ahead=8, **sampling):
    return Open(
        request, tuple(tokens), DraftSampling(seed=0, sample=0, prompt=len(tokens), **sampling), ahead
    )


@pytest.fixture
def service():
    service = drafting()
    yield service
    service.close()
    service.proposer.check()
    assert service.failure is None


def test_it_guesses_what_the_target_says_and_goes_on_from_commits(service):
    inbox, prompt = Inbox(), [3, 1, 4]
    want = alone(prompt, GREEDY)
    service.receive(inbox, [opening(1, prompt)])
    until(lambda: inbox.offers and len(inbox.offers[-1].tokens) == 8)
    assert list(inbox.offers[-1].tokens) == want[:8] and inbox.offers[-1].base == 3
    assert [len(one.tokens) for one in inbox.offers] == [4, 8]  # in rounds
    drafted = service.counts.drafted
    service.receive(inbox, [Commit(1, 3, tuple(want[:5]), 8)])
    until(lambda: inbox.offers[-1].base == 8 and len(inbox.offers[-1].tokens) == 8)
    assert list(inbox.offers[-1].tokens) == want[5:13] and service.counts.drafted == drafted + 5
    other = [want[5] ^ 1]
    service.receive(inbox, [Commit(1, 8, tuple(other), 4)])
    until(lambda: inbox.offers[-1].base == 9)
    assert list(inbox.offers[-1].tokens) == alone([*prompt, *want[:5], *other], GREEDY)[:4]


def test_commits_on_other_lengths_are_ignored(service):
    inbox = Inbox()
    service.receive(inbox, [opening(1, [3, 1, 4]), Commit(1, 9, (5,), 8), Commit(2, 3, (5,), 8)])
    until(lambda: service.counts.stale == 2)
    service.receive(inbox, [Close(1), Close(1), Close(5)])
    until(lambda: service.running == 0)


def test_a_stream_that_leaves_takes_its_requests_along(service):
    first, second = Inbox(), Inbox()
    service.receive(first, [opening(number, [number, 2]) for number in range(1, 6)])
    service.receive(second, [opening(1, [7, 7]), Ping(3)])
    until(lambda: service.running == 6 and second.pongs)
    service.leave(first)
    until(lambda: service.running == 1)
    service.leave(second)
    until(lambda: service.running == 0)


def test_requests_and_tokens_are_bounded():
    service = drafting(sessions=2, tokens=30)
    inbox = Inbox()
    service.receive(inbox, [opening(1, [1] * 20), opening(2, [1] * 20), opening(3, [2]), opening(4, [2])])
    service.receive(inbox, [opening(3, [5]), opening(6, []), Ping(1)])
    until(lambda: inbox.pongs)
    assert service.running == 2 and service.counts.opened == 2 and service.counts.refused == 4
    service.close()


@pytest.mark.parametrize("id", [VOCABULARY, 4000, 2**31 - 1])
@pytest.mark.parametrize("place", ["open", "commit", "bias", "end"])
def test_requests_with_token_ids_of_no_vocabulary_are_not_drafted_for(id, place):
    class Strict(FakeRunner):
        def run(self, step):
            assert max(step.tokens) < VOCABULARY, "a token id reached the model"
            return super().run(step)

    service, inbox = drafting(Strict(blocks=256)), Inbox()
    sampling = {"logit_bias": ((id, 1.0),)} if place == "bias" else {"ends": (id,)} if place == "end" else {}
    service.receive(
        inbox, [opening(1, [3, id if place == "open" else 1], **sampling), Commit(1, 2, (id,), 8)]
    )
    service.receive(inbox, [Ping(1), opening(2, [3, 1, 4])])
    until(lambda: inbox.pongs and any(offer.request == 2 for offer in inbox.offers))
    assert service.counts.refused == 1 and service.running == 1
    assert all(offer.request == 2 for offer in inbox.offers) and service.failure is None
    service.close()
    service.proposer.check()


def test_commits_do_not_grow_beyond_the_tokens_of_the_service():
    service, inbox = drafting(tokens=30), Inbox()
    service.receive(inbox, [opening(1, [1] * 10), Commit(1, 10, (1,) * 21, 8), Ping(1)])
    until(lambda: inbox.pongs)
    assert service.counts.refused == 1 and service.running == 0
    service.close()


def test_a_long_prompt_is_read_in_parts_between_the_rounds_of_others():
    spans: list[int] = []

    class Seen(FakeRunner):
        def run(self, step):
            spans.append(step.count)
            return super().run(step)

    service = drafting(Seen(blocks=1000, context=4000))
    inbox = Inbox()
    prompt = [number % 50 for number in range(5 * READ)]
    service.receive(inbox, [opening(1, prompt), opening(2, [4, 2], ahead=40)])
    until(lambda: inbox.offers and any(one.request == 1 for one in inbox.offers))
    service.close()
    assert max(spans) <= READ + 8
    assert list(next(one for one in inbox.offers if one.request == 1).tokens) == alone(prompt, GREEDY)[:4]
    firsts = [one.request for one in inbox.offers]
    assert firsts.index(1) > 2  # the short one had its offers meanwhile


def test_a_round_that_fails_costs_offers_and_three_of_them_the_service():
    runner = FakeRunner(blocks=64)
    service, inbox = drafting(runner), Inbox()
    runner.fails = RuntimeError("broken")
    service.receive(inbox, [opening(1, [3, 1, 4])])
    until(lambda: service._failed == 1)
    runner.fails = None
    service.receive(inbox, [Commit(1, 3, (7,), 8)])
    until(lambda: inbox.offers and len(inbox.offers[-1].tokens) == 8)
    assert service._failed == 0 and service.failure is None
    runner.fails = RuntimeError("broken")
    for failures in range(1, 4):  # each in a round of its own
        service.receive(inbox, [opening(failures + 1, [failures])])
        until(lambda: service._failed == failures)  # noqa: B023
    until(lambda: service.failure is not None)
    service.close()


def test_suffix_trees_draft_after_what_is_committed():
    from attar.serving.services.draft_service import DraftService

    before = threading.active_count()
    service, inbox = DraftService(SuffixProposer(), vocabulary=VOCABULARY), Inbox()
    service.receive(inbox, [opening(1, [1, 2, 3, 4, 5, 6] * 4)])
    until(lambda: inbox.offers)
    assert inbox.offers[-1].tokens[:3] == (1, 2, 3)
    service.receive(inbox, [Commit(1, 24, (1, 2), 8)])
    until(lambda: inbox.offers[-1].base == 26)
    assert inbox.offers[-1].tokens[:3] == (3, 4, 5)
    service.close()
    until(lambda: threading.active_count() <= before)


def test_what_was_read_of_a_guess_that_was_wrong_is_read_again():
    session = DraftSession(opening(1, [3, 1, 4]), 1)
    session.extend([5, 9])
    session.read = 5
    session.commit(Commit(1, 3, (5,), 8))
    assert (session.text, session.length, session.read) == ([3, 1, 4, 5, 9], 4, 5)
    session.commit(Commit(1, 4, (7, 2), 8))
    assert (session.text, session.length, session.read) == ([3, 1, 4, 5, 7, 2], 6, 4)


def test_rules_are_those_of_the_completion():
    """Penalties, biases, minimum and noise: the drafter's rows and keys are the target's."""
    from attar.runtime.completion import Completion
    from attar.serving.services.offer_proposer import sampling_of

    params = SamplingParams(
        temperature=0.9,
        top_k=9,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        logit_bias={3: 1.0},
        min_tokens=6,
        seed=11,
    )
    completion = Completion("r", 2, [5, 6, 7], params, seed=11, ends=(1,), limit=100)
    completion.append([8, 9])
    sampling = sampling_of(completion, 5)
    rules = DraftSession(Open(1, (5, 6, 7, 8, 9), sampling, 8), 1).rules()
    for drafted in ((), (4,), (4, 4, 2), (1, 2, 3, 4)):
        own, want = rules.row(drafted), completion.row(drafted)
        assert own.history.counts == want.history.counts and own.banned == want.banned
        assert own.history.prompt.tolist() == want.history.prompt.tolist()
        assert rules.key(len(drafted)) == completion.key(len(drafted))
        names = ("temperature", "top_k", "repetition_penalty", "presence_penalty", "biases")
        assert all(getattr(own.params, name) == getattr(want.params, name) for name in names)


def test_the_longest_chain_of_a_tree():
    tree = Draft((1, 2, 3, 4, 5), (0, 0, 2, 1, 3))
    assert longest_chain(tree) == (2, 3, 5) and longest_chain(None) == ()
