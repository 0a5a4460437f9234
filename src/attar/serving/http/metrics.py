"""Prometheus metrics, under vLLM's names with the prefix ``attar:``.

Times are measured at the server, from a request's arrival; the engine's ``Stats`` are read at each scrape.
Every model has its own registry, and a scrape joins the registries.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from attar.runtime.results import Event
from attar.runtime.speculate.speculative_pass import SpeculationCounts
from attar.serving.http.backend import Backend, MetricSample, Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)  # seconds
_LONG = (*_SHORT, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """The metrics of one model of a server.

    Args:
        model: the label ``model_name``.
        facts: the labels of ``attar:info``.
    """

    def __init__(self, backend: Backend, model: str, facts: Mapping[str, Any]) -> None:
        self.backend, self.model = backend, model
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(backend, model))
        labels = {name: str(value) for name, value in facts.items() if name != "model"}
        info = Gauge(
            "attar:info", "A description of the engine.", ["model_name", *labels], registry=self._registry
        )
        info.labels(model_name=model, **labels).set(1)
        self._labels = {"model_name": model}
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests.")
        self.generation_tokens = self._counter("generation_tokens", "Generated tokens.")
        self.first_token = self._histogram("time_to_first_token_seconds", "Until the first token.", _LONG)
        self.inter_token = self._histogram("inter_token_latency_seconds", "Between two tokens.", _SHORT)
        self.latency = self._histogram("e2e_request_latency_seconds", "Until a request's end.", _LONG)
        self.queued = self._histogram("request_queue_time_seconds", "Until a request's first step.", _LONG)
        self._success = Counter(
            "attar:request_success",
            "Finished completions.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._refused = Counter(
            "attar:request_refused",
            "Error responses.",
            ["model_name", "status"],
            registry=self._registry,
        )

    def of_prompt(self, n: int, start: float) -> PromptMetrics:
        """Metrics of a prompt's n completions; ``start``: time of arrival, ``time.monotonic``."""
        return PromptMetrics(self, n, start)

    def finished(self, reason: str) -> None:
        self._success.labels(finished_reason=reason, **self._labels).inc()

    def refused(self, status: int) -> None:
        self._refused.labels(status=str(status), **self._labels).inc()

    def collect(self) -> Iterator[Metric]:
        """The families of a scrape."""
        yield from self._registry.collect()

    def tokens(self) -> tuple[float, float]:
        """Tokens of finished requests' prompts and generated tokens, since the start."""
        prompt, generated = (
            self._registry.get_sample_value(f"attar:{name}_tokens_total", self._labels)
            for name in ("prompt", "generation")
        )
        return prompt or 0.0, generated or 0.0

    def _counter(self, name: str, help: str) -> Counter:
        counter = Counter(f"attar:{name}", help, ["model_name"], registry=self._registry)
        return counter.labels(**self._labels)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"attar:{name}", help, ["model_name"], registry=self._registry, buckets=buckets)
        return histogram.labels(**self._labels)


def metrics_text(models: Sequence[Metrics], samples: Sequence[MetricSample] = ()) -> bytes:
    """The text of a scrape: each family once, with the values of all models.

    Args:
        samples: of the server.
    """
    families: dict[str, Metric] = {}
    for family in (*chain.from_iterable(model.collect() for model in models), *sample_families(samples)):
        if (known := families.setdefault(family.name, family)) is not family:
            known.samples += family.samples
    registry = CollectorRegistry()
    registry.register(_Families(tuple(families.values())))
    return generate_latest(registry)


@dataclass(frozen=True, eq=False)
class _Families:
    """A collector of families that have been read."""

    families: tuple[Metric, ...]

    def collect(self) -> tuple[Metric, ...]:
        return self.families


class PromptMetrics:
    """Counts and times the completions of one prompt."""

    def __init__(self, metrics: Metrics, n: int, start: float) -> None:
        self._metrics, self._start, self._open = metrics, start, n
        self._last: dict[int, float] = {}  # by sample: time of its last token

    def observe(self, event: Event, now: float) -> None:
        """Count an event."""
        if event.token_ids:
            self._tokens(event, now)
        if event.finish_reason is not None:
            self._open -= 1
            self._metrics.finished(event.finish_reason)
        if event.usage is not None:
            self._metrics.prompt_tokens.inc(event.usage.prompt_tokens)
            self._metrics.latency.observe(now - self._start)
            if event.usage.queue_s is not None:
                self._metrics.queued.observe(event.usage.queue_s)

    def discard(self) -> None:
        """Do not count unfinished completions."""
        self._open = 0

    def close(self) -> None:
        """Count unfinished completions as cancelled."""
        while self._open > 0:
            self._open -= 1
            self._metrics.finished("cancelled")

    def _tokens(self, event: Event, now: float) -> None:
        count = len(event.token_ids)
        self._metrics.generation_tokens.inc(count)
        if not self._last:
            self._metrics.first_token.observe(now - self._start)
        elif event.sample in self._last:
            for _ in range(count):
                self._metrics.inter_token.observe((now - self._last[event.sample]) / count)
        self._last[event.sample] = now


class EngineCollector:
    """The engine's numbers, read at each scrape."""

    def __init__(self, backend: Backend, model: str) -> None:
        self._backend, self._model, self._created = backend, model, time.time()

    def collect(self) -> Iterator[Metric]:
        stats = self._backend.stats()
        for name, help, value in _gauges(stats):
            gauge = GaugeMetricFamily(f"attar:{name}", help, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        yield self._blocks(stats)
        for name, help, value in _counts(stats):
            counter = CounterMetricFamily(f"attar:{name}", help, labels=["model_name"])
            counter.add_metric([self._model], value, created=self._created)
            yield counter
        if stats.speculation is not None:
            yield self._positions(stats.speculation)
        label = {"model_name": self._model}
        yield from sample_families(
            [replace(sample, labels=label | dict(sample.labels)) for sample in stats.samples]
        )

    def _blocks(self, stats: Stats) -> Metric:
        gauge = GaugeMetricFamily(
            "attar:kv_cache_blocks", "Blocks of the key-value pool.", labels=["model_name", "state"]
        )
        for state, count in stats.blocks.items():
            gauge.add_metric([self._model, state], count)
        return gauge

    def _positions(self, speculation: SpeculationCounts) -> Metric:
        counter = CounterMetricFamily(
            "attar:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens at each position of a draft.",
            labels=["model_name", "position"],
        )
        for position, count in enumerate(speculation.accepted_at):
            counter.add_metric([self._model, str(position)], count, created=self._created)
        return counter


def sample_families(samples: Sequence[MetricSample]) -> Iterator[Metric]:
    """Samples, those of one name together; the labels of a name are the same."""
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for sample in samples:
        family = families.get(sample.name)
        if family is None:
            kind = CounterMetricFamily if sample.counts else GaugeMetricFamily
            family = families[sample.name] = kind(
                f"attar:{sample.name}", sample.help, labels=list(sample.labels)
            )
        family.add_metric(list(sample.labels.values()), sample.value)
    yield from families.values()


def _gauges(stats: Stats) -> list[tuple[str, str, float]]:
    return [
        ("num_requests_running", "Requests that run.", stats.running),
        ("num_requests_waiting", "Requests that wait.", stats.waiting),
        ("kv_cache_usage_perc", "Share of the key-value blocks in use, 1 is all.", stats.cache_usage),
    ]


def _counts(stats: Stats) -> list[tuple[str, str, float]]:
    counts: list[tuple[str, str, float]] = [
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
        ("prefix_cache_hits", "Of these, found.", stats.prefix_hits),
        ("num_preemptions", "Sequences that lost their blocks to others.", stats.preemptions),
    ]
    if (speculation := stats.speculation) is not None:
        counts += [
            ("spec_decode_num_drafts", "Drafts that were verified.", speculation.drafts),
            ("spec_decode_num_draft_tokens", "Tokens in them.", speculation.drafted),
            ("spec_decode_num_accepted_tokens", "Of these, accepted.", speculation.accepted),
        ]
        if speculation.lossy:
            counts.append(
                ("spec_decode_num_lossy_tokens", "Of these, by typical acceptance.", speculation.lossy)
            )
    return counts
