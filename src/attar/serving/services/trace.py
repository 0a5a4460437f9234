"""What is recorded of a request in each service: a line on the server's log, and a span of OpenTelemetry.

Log, the same ``trace`` in all of them:

    coordinator   the access log of the server: "request" is the trace, or its beginning
    target        trace, tokens, seconds
    draft         trace, offers, tokens at the end

Spans, where the extra ``otel`` is installed and OTEL_EXPORTER_OTLP_ENDPOINT is set: one for each request of
the API with the attributes of the ``gen_ai`` conventions, in the trace that its ``traceparent`` names (W3C);
and below it one of the target and one of each draft service, which get a ``traceparent`` with their messages.
Spans wait in a bounded queue for a thread that sends them; what does not fit is dropped.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from threading import Thread
from typing import Any

from attar.extras import install_command
from attar.version import __version__

LOGGER = "attar.server"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
CLOSE_S = 3.0
"""Seconds that the end of a server waits for the spans that are left."""


def log_request(role: str, trace: str, **numbers: float) -> None:
    """A request has ended at a service."""
    line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "role": role, "trace": trace}
    logging.getLogger(LOGGER).info(json.dumps(line | numbers))


class RequestSpan:
    """A request's span.

    Args:
        span: of OpenTelemetry; None: nothing is recorded.
        ended: called once, at the end.
    """

    def __init__(self, span: Any = None, ended: Callable[[], None] = lambda: None) -> None:
        self._span, self._ended = span, ended

    def event(self, name: str, **attributes: float) -> None:
        """Something happens now."""
        if self._span is not None:
            self._span.add_event(name, _of_otel(attributes))

    def end(self, error: str = "", attributes: Mapping[str, Any] | None = None) -> None:
        """The request has ended, with an error perhaps; the first end counts."""
        span, self._span = self._span, None
        if span is None:
            return
        from opentelemetry.trace import Status, StatusCode

        span.set_attributes(_of_otel(attributes or {}))
        if error:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR, error))
        span.end()
        self._ended()


class RequestTracer:
    """Begins spans, and knows those that are open.

    Args:
        provider: of OpenTelemetry's SDK; None: nothing is recorded.
    """

    def __init__(self, provider: Any = None) -> None:
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer("attar", __version__)
        self._open: dict[str, str] = {}  # traceparent by request

    def begin(
        self,
        operation: str,
        model: str,
        *,
        id: str = "",
        start: float | None = None,
        headers: Mapping[str, str] | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> RequestSpan:
        """A request has begun.

        Args:
            operation: of the ``gen_ai`` conventions: chat, text_completion, embeddings.
            id: of the request, whose parts in the engine are ``ID-0``, ``ID-1``, ...
            start: when, by ``time.monotonic``; None: now.
            headers: ``traceparent`` and ``tracestate`` of the caller; what is none begins another trace.
        """
        if self._tracer is None:
            return RequestSpan()
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        propagator, carrier = TraceContextTextMapPropagator(), dict[str, str]()
        passed = 0.0 if start is None else time.monotonic() - start
        names = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "attar",
            "gen_ai.request.model": model,
        }
        span = self._tracer.start_span(
            f"{operation} {model}",
            context=propagator.extract(dict(headers or {})),
            kind=SpanKind.SERVER,
            attributes=_of_otel({**names, **(attributes or {})}),
            start_time=time.time_ns() - int(passed * 1e9),
        )
        if not id:
            return RequestSpan(span)
        propagator.inject(carrier, set_span_in_context(span))
        self._open[id] = carrier.get("traceparent", "")
        return RequestSpan(span, lambda: self._ended(id))

    def parent_of(self, request: str) -> str:
        """The ``traceparent`` of what works on a part of an open request; "": it has no span."""
        return self._open.get(request.rpartition("-")[0], "")

    def _ended(self, id: str) -> None:
        del self._open[id]

    def close(self) -> None:
        """Send what is left, ``CLOSE_S`` seconds at most."""
        if self._provider is not None:
            sender = Thread(target=self._provider.shutdown, name="attar-traces", daemon=True)
            sender.start()
            sender.join(CLOSE_S)


def tracer_of_environment(environment: Mapping[str, str], show: Callable[[str], None]) -> RequestTracer:
    """A tracer that sends spans where OpenTelemetry's variables say.

    Args:
        show: takes a line where they say so, and the packages are not there.
    """
    variable = next((name for name in ENDPOINTS if environment.get(name)), None)
    if variable is None or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return RequestTracer()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        show(f"warning: {variable} is set, but no traces are sent: {install_command('otel')}")
        return RequestTracer()
    name = {} if environment.get("OTEL_SERVICE_NAME") else {"service.name": "attar"}
    provider = TracerProvider(resource=Resource.create({**name, "service.version": __version__}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    show(f"{'traces':<12}to {environment[variable]}")
    return RequestTracer(provider)


def usage_attributes(usage: Mapping[str, int], reasons: Sequence[str]) -> dict[str, Any]:
    """Tokens of a request (``input_tokens``, ...) and the ends of its completions, by their conventions."""
    named = {f"gen_ai.usage.{name}": count for name, count in usage.items()}
    return {**named, "gen_ai.response.finish_reasons": tuple(reasons)}


def _of_otel(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes with a value."""
    return {name: value for name, value in attributes.items() if value is not None}
