"""Drafters in this process, and the streams between them and an engine without a network."""

from __future__ import annotations

import random
import threading

from attar.runtime.speculate.draft_model import DraftModel
from attar.runtime.speculate.latency import Latency
from attar.runtime.speculate.policy import DraftPolicy
from attar.runtime.speculate.speculator import Speculator
from attar.serving.services.draft_service import DraftService
from attar.serving.services.drafter import Turnaround
from attar.serving.services.messages import VERSION, Close, Hello, Offer, Open
from attar.serving.services.offer_proposer import OfferProposer
from tests.runtime.fake_runner import VOCABULARY, FakeRunner
from tests.runtime.speculate.proposing import Eager

HELLO = Hello(version=VERSION, role="target", name="fake", tokenizer="t", vocabulary=VOCABULARY)


class LocalDrafter:
    """A service's drafter without a network between; ``damage`` changes the offers on their way.

    Args:
        damage: an offer → those that arrive in its place.
    """

    name = "local"

    def __init__(self, service: DraftService, receive, damage=lambda offer: [offer]) -> None:
        self.service, self.receive, self.damage = service, receive, damage
        self.turnaround, self.ready, self.verdicts = Turnaround(), True, []
        self.sent = []

    def send(self, message) -> None:
        self.sent.append(message)
        self.service.receive(self, [message])

    def record_verdict(self, drafted: int, accepted: int) -> None:
        self.verdicts.append((drafted, accepted))

    def offer(self, offer: Offer) -> None:
        for one in self.damage(offer):
            self.receive(one)

    def pong(self, pong) -> None:
        """Nothing was asked."""


class LocalPool:
    """One drafter for all."""

    def __init__(self, drafter: LocalDrafter) -> None:
        self.drafter, self.opened = drafter, 0

    def ready_for(self, request):
        return self.drafter.ready

    def choose(self, opening: Open):
        self.opened += 1
        return self.drafter if self.drafter.ready else None


def drafting(runner=None, **options) -> DraftService:
    """A service with a model that is the target itself, or another runner."""
    proposer = DraftModel(runner or FakeRunner(blocks=256), branches=1)
    return DraftService(proposer, vocabulary=VOCABULARY, **options)


def offered(service: DraftService, damage=lambda offer: [offer], policy=None, most=8) -> Speculator:
    """A speculator that takes whatever is offered."""
    policy = policy or Eager()
    proposer = OfferProposer(policy, VOCABULARY, most=most)
    proposer.pool = LocalPool(LocalDrafter(service, proposer.offer, damage))
    return Speculator(proposer, policy, most=most, verification="coupled", prefilling=proposer.prefilling)


class Waiting(DraftPolicy):
    """Takes whatever is offered, with times by which waiting always pays."""

    def __init__(self) -> None:
        super().__init__(Latency({1: 1.0, 64: 1.0}))

    open = True  # type: ignore[assignment]

    def passes_to_skip(self, batch, proposing, is_lookup=True):
        return 0

    def select(self, sequences, drafts, prompt_tokens=0, complete=False):
        return list(drafts)


class Garbled:
    """Offers arrive late, twice, in any order, with other tokens, on other bases, for other requests."""

    def __init__(self, seed: int) -> None:
        self.random, self.held, self.lock = random.Random(seed), [], threading.Lock()

    def __call__(self, offer: Offer) -> list[Offer]:
        with self.lock:
            draws = self.random
            self.held.append(offer)
            if draws.random() < 0.3:
                return []
            draws.shuffle(self.held)
            out = [self.held.pop() for _ in range(min(len(self.held), draws.randint(1, 3)))]
            return [self.changed(one) for one in [*out, *draws.sample(out, 1)]]

    def changed(self, offer: Offer) -> Offer:
        draws = self.random
        tokens = tuple(
            draws.randrange(VOCABULARY) if draws.random() < 0.1 else token for token in offer.tokens
        )
        base = max(offer.base + draws.choice([0, 0, 0, 0, 1, -1, 5]), 0)
        return Offer(offer.request + draws.choice([0, 0, 0, 1]), base, tokens)


__all__ = ["HELLO", "Close", "Garbled", "LocalDrafter", "LocalPool", "Waiting", "drafting", "offered"]
