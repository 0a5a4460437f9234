"""Several draft services for one engine: which of them drafts for a request.

    sticky    the replica that holds the longest prefix of the request, unless it has SLACK more requests than
              the least loaded one: a prefix that is cached there is not read again
    load      else the one with the fewest open requests
    ready     only drafters that answer; without any, requests are decoded plainly

Prefixes are kept as hashes of a request's first 64, 128, 256, ... tokens, with its tenant.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from attar.serving.services.channel import Network, Security
from attar.serving.services.draft_client import DraftClient, DraftLink
from attar.serving.services.messages import Hello, Offer, Open
from attar.serving.services.offers import Outcome
from attar.serving.services.trace import RequestTracer

SHORTEST, PREFIXES = 64, 4096  # tokens of the shortest prefix; prefixes that are remembered
SLACK = 2


class Replicas:
    """The draft services of an engine.

    Args:
        receive: called with each offer, as by :class:`DraftClient`.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        hello: Hello,
        network: Network,
        receive: Callable[[Offer], Outcome],
        security: Security | None = None,
    ) -> None:
        self.clients = [DraftClient(endpoint, hello, network, receive, security) for endpoint in endpoints]
        self._holders: OrderedDict[int, DraftClient] = OrderedDict()  # by the hash of a prefix

    def trace(self, tracer: RequestTracer) -> None:
        """Have drafting be a part of the requests' spans."""
        for client in self.clients:
            client.parent_of = tracer.parent_of

    def ready_for(self, request: str) -> bool:
        """Whether a replica is ready."""
        return any(client.ready for client in self.clients)

    def choose(self, opening: Open) -> DraftLink | None:
        """The replica for a request; None where none is ready."""
        links = [client.link for client in self.clients if client.link is not None and client.link.ready]
        if not links:
            return None
        least = min(links, key=lambda link: link.open_requests)
        prefixes = prefix_hashes(opening.tokens, opening.salt)
        holder = next((self._holders[key] for key in reversed(prefixes) if key in self._holders), None)
        chosen = least
        if holder is not None and holder.link in links:
            chosen = holder.link
            if chosen.open_requests > least.open_requests + SLACK:
                chosen = least
        for key in prefixes:
            self._holders[key] = chosen.client
            self._holders.move_to_end(key)
        while len(self._holders) > PREFIXES:
            self._holders.popitem(last=False)
        return chosen

    def close(self) -> None:
        """End all streams."""
        for client in self.clients:
            client.close()


def prefix_hashes(tokens: Sequence[int], salt: str) -> list[int]:
    """Of the first 64, 128, 256, ... tokens, the shortest first."""
    lengths, length = [], SHORTEST
    while length <= len(tokens):
        lengths.append(length)
        length *= 2
    return [hash((salt, tuple(tokens[:length]))) for length in lengths]
