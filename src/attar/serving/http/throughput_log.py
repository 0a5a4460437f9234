"""A line of JSON in the log about what each model did in the last ten seconds, while it does anything.

{"time", "model", "prompt_tokens_per_s", "tokens_per_s", "running", "waiting", "cache_used", "prefix_hits"}
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from attar.serving.http.access_log import log_errors
from attar.serving.http.metrics import Metrics
from attar.serving.http.middleware import LOGGER

PERIOD_S = 10.0


@dataclass(frozen=True)
class _ModelCounts:
    """Tokens of a model since its start: of finished prompts, generated, looked up and found in the cache."""

    prompt: float
    generated: float
    queries: int
    hits: int


class ThroughputLog:
    """What models did since the last call."""

    def __init__(self) -> None:
        self._before: dict[Metrics, tuple[float, _ModelCounts]] = {}

    def lines(self, models: Iterable[Metrics], now: float) -> list[dict[str, Any]]:
        """A line for each model that did something since the last call, or has requests; none in the first.

        Args:
            now: in seconds, ``time.monotonic``.
        """
        lines, seen = [], {}
        for model in models:
            stats = model.backend.stats()
            counts = _ModelCounts(*model.tokens(), stats.prefix_queries, stats.prefix_hits)
            seen[model] = (now, counts)
            since, before = self._before.get(model, (now, counts))
            busy = stats.running or stats.waiting or counts != before
            if now > since and busy:
                line: dict[str, Any] = {"model": model.model} | rates(before, counts, now - since)
                line |= {"running": stats.running, "waiting": stats.waiting}
                lines.append(line | {"cache_used": round(stats.cache_usage, 3)})
        self._before = seen  # models that were closed are forgotten
        return lines


def rates(before: _ModelCounts, after: _ModelCounts, seconds: float) -> dict[str, float]:
    """Tokens a second, and the share of the prompts' tokens that the cache had, where any were looked up."""
    measured = {
        "prompt_tokens_per_s": round((after.prompt - before.prompt) / seconds, 1),
        "tokens_per_s": round((after.generated - before.generated) / seconds, 1),
    }
    if queries := after.queries - before.queries:
        measured["prefix_hits"] = round((after.hits - before.hits) / queries, 3)
    return measured


async def log_throughput(models: Callable[[], Iterable[Metrics]]) -> None:
    """Write the lines until cancelled.

    Args:
        models: those that are loaded now.
    """
    log, logger = ThroughputLog(), logging.getLogger(LOGGER)
    while True:
        with log_errors("the log of throughput"):
            for line in log.lines(models(), time.monotonic()):
                at = datetime.now(UTC).isoformat(timespec="milliseconds")
                logger.info(json.dumps({"time": at} | line))
        await asyncio.sleep(PERIOD_S)
