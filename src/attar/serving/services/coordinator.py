"""Joins a target with draft services: its commits go to a drafter, their offers to the target.

    open      the replica is chosen here; without one the target gets a close, and decodes plainly
    commit    to the replica; where that has gone, the target gets a close, and opens the request again
    offer     checked here as the target checks it, so that what is stale does not travel, and who lies is cut

Everything happens in the network's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from attar.serving.services.channel import Network, Security
from attar.serving.services.draft_client import DraftLink
from attar.serving.services.messages import (
    Close,
    Commit,
    Drafters,
    DraftVerdict,
    Hello,
    Offer,
    Open,
    ProtocolError,
)
from attar.serving.services.offers import Offers, Outcome
from attar.serving.services.replicas import Replicas
from attar.serving.services.target_client import TargetClient

MOST_OPEN = 1 << 16  # requests of a target that are drafted for at a time
COUNT_S = 0.1  # seconds between two looks at the replicas


class Coordinator:
    """One target, and its draft services.

    Args:
        hello: the own first message.
    """

    def __init__(
        self,
        target: str,
        drafters: Sequence[str],
        hello: Hello,
        network: Network,
        security: Security | None = None,
    ) -> None:
        self.network, self.offers = network, Offers(hello.vocabulary)
        self.links: dict[int, DraftLink] = {}
        self._unanswered: dict[int, tuple[int, float]] = {}  # length and time of a commit, by request
        self.outcomes: dict[Outcome, int] = dict.fromkeys(("new", "stale", "unknown", "wrong"), 0)  # type: ignore[arg-type]
        verifier = Hello(hello.version, "target", hello.name, hello.tokenizer, hello.vocabulary)
        self.replicas = Replicas(drafters, verifier, network, self.offer, security)
        self.target = TargetClient(target, hello, network, self.drafting, security)
        self._ready = -1
        self._task = network.run(self._start())

    def close(self) -> None:
        """End all streams."""
        self.target.close()
        self.replicas.close()
        self.network.post(self._task.cancel)

    def offer(self, offer: Offer) -> Outcome:
        """An offer of a replica."""
        outcome = self.offers.put(offer)
        self.outcomes[outcome] += 1
        length, sent = self._unanswered.get(offer.request, (0, 0.0))
        if sent and offer.base >= length and outcome != "wrong":
            self.links[offer.request].turnaround.note(time.monotonic() - sent)
            del self._unanswered[offer.request]
        if outcome == "new":
            self.target.send(offer)
        return outcome

    def drafting(self, message: Open | Commit | Close | DraftVerdict | None) -> None:
        """What the target says about drafts; None: it is lost.

        Raises:
            ProtocolError: it opens a request twice.
        """
        if message is None:
            self._ready = -1
            for request in list(self.links):
                self._drop(request)
        elif isinstance(message, Open):
            self._open(message)
        elif message.request not in self.links:
            return
        elif isinstance(message, DraftVerdict):
            self.links[message.request].record_verdict(message.drafted, message.accepted)
        elif isinstance(message, Close):
            self._drop(message.request)
        elif self.links[message.request].ready:
            length = message.base + len(message.tokens)
            self.offers.commit(message.request, length)
            self._unanswered.setdefault(message.request, (length, time.monotonic()))
            self.links[message.request].send(message)
        else:
            self._drop(message.request)
            self.target.send(Close(message.request))

    def _open(self, message: Open) -> None:
        if message.request in self.links:
            raise ProtocolError(f"the target opens request {message.request} twice")
        link = self.replicas.choose(message) if len(self.links) < MOST_OPEN else None
        if link is None:
            self.target.send(Close(message.request))
            return
        self.links[message.request] = link
        self.offers.open(message.request, len(message.tokens))
        link.send(message)

    def _drop(self, request: int) -> None:
        link = self.links.pop(request)
        self._unanswered.pop(request, None)
        self.offers.close(request)
        link.send(Close(request))

    async def _start(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._count())

    async def _count(self) -> None:
        """Tell the target how many draft services are ready, for ever."""
        while True:
            ready = sum(client.ready for client in self.replicas.clients)
            if ready != self._ready and self.target.connected:
                self._ready = ready
                self.target.send(Drafters(ready))
            await asyncio.sleep(COUNT_S)
