"""Who proposed each token: from verification, and only where it is asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attar.runtime.results import TARGET
from attar.runtime.speculate.combined import CombinedProposer, merged, proposers_of
from attar.runtime.speculate.draft import Draft
from attar.runtime.speculate.suffix import SuffixProposer
from tests.runtime.speculate.proposing import Drawer, Oracle, speculator
from tests.runtime.speculate.test_combined import tree
from tests.runtime.speculate.test_engine import GREEDY, Looping
from tests.runtime.test_engine import engine, finish

PARAMS = replace(GREEDY, max_tokens=40, proposers=True)


def events_of(proposer, params, **options):
    subject = None if proposer is None else speculator(proposer, most=6, **options)
    running = engine(Looping(blocks=400), speculator=subject)
    running.add([1, 2, 1], params)
    return finish(running), subject


def test_the_nodes_of_a_merged_draft_have_their_own_names() -> None:
    head = Oracle([], chains=True)
    both = CombinedProposer(head, SuffixProposer())  # type: ignore[arg-type]
    draft = merged(Draft.chain([5, 6]), tree((5, 8), (0, 1)))
    assert proposers_of(both, draft, (1, 2)) == ("oracle", "oracle")
    assert proposers_of(both, draft, (1, 3)) == ("oracle", "suffix")
    assert proposers_of(both, tree((5, 8), (0, 1)), (1, 2)) == ("suffix", "suffix")
    assert proposers_of(SuffixProposer(name="ngram"), tree((5,), (0,)), (1,)) == ("ngram",)
    assert proposers_of(both, draft, ()) == ()


@pytest.mark.parametrize("drawn", [False, True])
def test_accepted_drafts_have_the_proposers_name_and_the_token_after_them_the_targets(drawn: bool) -> None:
    plain, _ = events_of(None, PARAMS)
    assert all(event.proposers == (TARGET,) for event in plain if event.token_ids)
    text = [1, 2, 1, *(token for event in plain for token in event.token_ids)]
    proposer = Drawer([], vocabulary=50) if drawn else Oracle([text], right=0.7)
    params = replace(PARAMS, temperature=1.0) if drawn else PARAMS
    events, subject = events_of(proposer, params)
    for event in events:
        count = len(event.token_ids)
        names = (proposer.name,) * count
        assert event.proposers in ((*names[1:], TARGET), names)
    proposed = [name for event in events for name in event.proposers if name != TARGET]
    cut = sum(event.proposers[-1:] != (TARGET,) for event in events)
    assert subject.counts.accepted >= len(proposed) >= subject.counts.accepted - 6 * cut
    assert len(proposed) > 3 and sum(len(event.proposers) for event in events) == 40


def test_without_the_question_there_is_no_answer() -> None:
    events, subject = events_of(Oracle([[1, 2, 1]], right=0.5), replace(PARAMS, proposers=False))
    assert not any(event.proposers for event in events) and subject.counts.drafted
