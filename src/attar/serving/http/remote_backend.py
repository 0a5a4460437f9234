"""A target service as the server's engine, and the metrics of the services that take part."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import fields
from typing import Any, get_args

from attar.runtime.results import Event
from attar.runtime.sampling.params import SamplingParams
from attar.serving.http.backend import Backend, MetricSample, Stats
from attar.serving.services.coordinator import Coordinator
from attar.serving.services.draft_client import DraftClient
from attar.serving.services.messages import TargetLoad
from attar.serving.services.offer_proposer import OfferCounts
from attar.serving.services.offers import Outcome
from attar.serving.services.replicas import Replicas
from attar.serving.services.trace import RequestTracer

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
SHARED = (
    "running",
    "waiting",
    "free",
    "cache_usage",
    "blocks",
    "prefix_queries",
    "prefix_hits",
    "preemptions",
)


class RemoteBackend(Backend):
    """The target of a coordinator. It is alive as long as this process is: a target that is lost comes back.

    Args:
        vocabulary: of the tokenizer, while the target was never reached.
        tracer: of the requests' spans.
    """

    def __init__(
        self, coordinator: Coordinator, vocabulary: int, tracer: RequestTracer | None = None
    ) -> None:
        super().__init__(None, vocabulary)
        self._tracer = tracer or RequestTracer()
        coordinator.replicas.trace(self._tracer)
        self._coordinator, self._client = coordinator, coordinator.target

    @property
    def context(self) -> int | None:
        return None if self._client.target is None else self._client.target.context

    @property
    def vocabulary(self) -> int:
        return self._vocabulary if self._client.target is None else self._client.target.vocabulary

    def submit(self, prompt: Sequence[int], params: SamplingParams, **options: Any) -> AsyncIterator[Event]:
        parent = self._tracer.parent_of(options["id"])
        return self._client.submit(prompt, params, traceparent=parent, **options)

    def cancel(self, id: str) -> None:
        self._client.cancel(id)

    def stats(self) -> Stats:
        """The target's load as last reported; requests that are on their way wait."""
        client, load = self._client, self._client.load
        samples = [*self._samples(), *replica_samples(self._coordinator.replicas)]
        if load is None:
            return Stats(waiting=client.open_requests, free=1, samples=samples, ready=False)
        numbers = {name: getattr(load, name) for name in SHARED}
        numbers["waiting"] = max(client.open_requests - load.running, load.waiting, 0)
        return Stats(**numbers, speculation=load.speculation, samples=samples, ready=client.connected)

    async def close(self) -> None:
        """The coordinator is closed by its maker."""

    def _samples(self) -> list[MetricSample]:
        client, outcomes = self._client, self._coordinator.outcomes
        return [
            MetricSample("target_connected", "Whether the target answers.", client.connected, False),
            MetricSample("target_connections", "Connections to the target.", client.connections),
            MetricSample(
                "target_round_trip_seconds", "From a ping to its pong.", client.round_trip.mean or 0.0, False
            ),
            *(
                MetricSample("draft_offers", "Offers that arrived.", count, labels={"outcome": outcome})
                for outcome, count in outcomes.items()
            ),
        ]


def load_of(stats: Stats) -> TargetLoad:
    """The load of an engine as a message."""
    names = {field.name for field in fields(TargetLoad)}
    numbers = {name: getattr(stats, name) for name in SHARED if name in names}
    return TargetLoad(**numbers | {"blocks": dict(stats.blocks)}, speculation=stats.speculation)


def offer_samples(counts: OfferCounts) -> list[MetricSample]:
    """Of the offers that arrived."""
    help = "Offers that arrived."
    samples = [
        MetricSample("draft_offers", help, counts.outcomes[outcome], labels={"outcome": outcome})
        for outcome in OUTCOMES
    ]
    return [
        *samples,
        MetricSample("draft_waits", "Passes that waited for offers.", counts.waits),
        MetricSample("draft_waits_late", "Of these, in vain.", counts.late),
        MetricSample("draft_wait_seconds", "Seconds that passes waited.", counts.waited),
    ]


def replica_samples(replicas: Replicas) -> list[MetricSample]:
    """Of each draft service."""
    rows = [list(_of_replica(client)) for client in replicas.clients]
    return [sample for family in zip(*rows, strict=True) for sample in family]


def _of_replica(client: DraftClient) -> Iterator[MetricSample]:
    labels, counts, link = {"replica": client.endpoint}, client.counts, client.link
    gauges: Sequence[tuple[str, str, float]] = (
        ("replica_ready", "Whether it answers.", client.ready),
        ("replica_requests", "Requests that it drafts for.", 0 if link is None else link.open_requests),
        ("replica_round_trip_seconds", "From a ping to its pong.", client.round_trip.mean or 0.0),
        ("replica_turnaround_seconds", "From a commit to its offer.", client.turnaround.mean or 0.0),
    )
    for name, help, value in gauges:
        yield MetricSample(name, help, value, False, labels)
    counters = (
        ("replica_connections", "Connections that were opened.", counts.connections),
        ("replica_cuts", "Connections that were cut for what it sent.", counts.cut),
        ("replica_drafts", "Of its drafts, verified.", counts.drafts),
        ("replica_draft_tokens", "Tokens in them.", counts.drafted),
        ("replica_accepted_tokens", "Of these, accepted.", counts.accepted),
    )
    for name, help, value in counters:
        yield MetricSample(name, help, value, True, labels)
