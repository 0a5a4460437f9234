"""A span for each request by the ``gen_ai`` conventions; whatever becomes of the spans, requests go on."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("opentelemetry.sdk")
from fastapi.testclient import TestClient
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from attar.serving.http.app import create_app
from attar.serving.http.settings import ServerSettings
from attar.serving.services import trace
from attar.serving.services.trace import RequestTracer, tracer_of_environment
from tests.serving.http.fake import ANSWER, BUSY, FAIL, FakeBackend, FakeTokenizer

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def traced():
    """A client of a server, its tracer, and the spans that have ended."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = RequestTracer(provider)
    app = create_app(FakeBackend(), ServerSettings(), tokenizer=FakeTokenizer(), model="tiny", tracer=tracer)
    client = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)

    def spans():
        assert tracer._open == {}
        ended = exporter.get_finished_spans()
        exporter.clear()
        return ended

    return client, spans


def test_a_chat_is_a_span_of_the_clients_trace(traced):
    client, spans = traced
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=x"}
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, "temperature": 0.5, "seed": 7}
    answer = client.post("/v1/chat/completions", json=body, headers=headers).json()
    [span] = spans()
    assert (span.name, span.kind) == ("chat tiny", SpanKind.SERVER)
    assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == PARENT
    assert span.context.trace_state["vendor"] == "x"
    known = dict(span.attributes)
    assert known.pop("gen_ai.usage.input_tokens") == answer["usage"]["prompt_tokens"]
    assert known == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "attar",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.seed": 7,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 3,
    }
    [event] = span.events
    assert event.name == "gen_ai.first_token" and 0 < event.attributes["attar.seconds"] < 60
    assert span.start_time <= event.timestamp <= span.end_time
    assert span.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [
        ("/v1/completions", {"prompt": "hi", "n": 2, "stream": True}, "text_completion"),
        ("/v1/responses", {"input": "hi"}, "chat"),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 40}, "chat"),
        ("/api/chat", {"messages": MESSAGES}, "chat"),
    ],
)
def test_every_api_makes_spans(traced, path, body, operation):
    client, spans = traced
    assert client.post(path, json={"model": "tiny", **body}).status_code == 200
    [span] = spans()
    assert span.attributes["gen_ai.operation.name"] == operation
    count = body.get("n", 1)
    assert span.attributes["gen_ai.response.finish_reasons"] == ("stop",) * count
    assert span.attributes["gen_ai.usage.output_tokens"] == len(ANSWER) * count
    assert len(span.events) == 1 and span.parent is None


@pytest.mark.parametrize(
    "header", ["", "00-x", f"00-{'0' * 32}-{PARENT}-01", "é" * 300, f"00-{TRACE}-{PARENT}"]
)
def test_what_names_no_trace_begins_another(traced, header):
    client, spans = traced
    headers = {"traceparent": header.encode("latin-1"), "tracestate": b"=,=,\xff"}
    body = {"model": "tiny", "prompt": "hi"}
    assert client.post("/v1/completions", json=body, headers=headers).status_code == 200
    [span] = spans()
    assert span.parent is None


@pytest.mark.parametrize(("first", "status", "error"), [(FAIL, 500, "error"), (BUSY, 429, "BusyError")])
def test_a_request_that_fails_is_an_error(traced, first, status, error):
    client, spans = traced
    body = {"model": "tiny", "prompt": [first, 5]}
    assert client.post("/v1/completions", json=body).status_code == status
    [span] = spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == error


def test_a_request_that_is_refused_before_it_runs_has_no_span(traced):
    client, spans = traced
    assert client.post("/v1/completions", json={"model": "tiny"}).status_code == 400
    assert spans() == ()


class Stuck(SpanExporter):
    """Never comes back from its first export."""

    def __init__(self):
        self.go = threading.Event()

    def export(self, spans):
        self.go.wait(60)
        raise OSError("no collector")


def test_an_exporter_that_hangs_holds_nobody(monkeypatch):
    monkeypatch.setattr(trace, "CLOSE_S", 0.1)
    exporter, provider = Stuck(), TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=64, max_export_batch_size=8))
    tracer = RequestTracer(provider)
    app = create_app(FakeBackend(), ServerSettings(), tokenizer=FakeTokenizer(), model="tiny", tracer=tracer)
    client = TestClient(app, base_url="http://localhost")
    start = time.monotonic()
    for number in range(2000):
        tracer.begin("chat", "tiny", id=f"r{number}").end()
    assert client.post("/v1/completions", json={"model": "tiny", "prompt": "hi"}).status_code == 200
    tracer.close()
    assert time.monotonic() - start < 20 and tracer._open == {}
    exporter.go.set()


def test_without_the_variable_nothing_is_imported():
    code = (
        "import sys; from attar.serving.services.trace import tracer_of_environment as make;"
        "make({}, print).begin('chat', 'm', id='r').end(); make({}, print).close();"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_variable_without_the_package_is_a_warning(monkeypatch):
    lines = []
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    tracer_of_environment(environment, lines.append).begin("chat", "m").end()
    [line] = lines
    assert line.startswith("warning: OTEL_EXPORTER_OTLP_ENDPOINT is set, but no traces are sent: pip install")
    assert tracer_of_environment({**environment, "OTEL_SDK_DISABLED": "true"}, lines.append)._tracer is None
