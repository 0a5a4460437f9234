"""Metrics of the services that take part: offers, waiting, and each replica."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, get_args

from attar.serving.http.backend import MetricSample
from attar.serving.services.offers import Outcome

if TYPE_CHECKING:
    from attar.serving.services.draft_client import DraftClient
    from attar.serving.services.offer_proposer import OfferCounts
    from attar.serving.services.replicas import Replicas

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


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
