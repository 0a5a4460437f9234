"""Target, drafters and coordinator over loopback: the answers of one process, whatever happens to the
others."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import contextmanager
from dataclasses import fields, replace

import pytest

pytest.importorskip("grpc")

from attar.errors import AttarError, DataError, SettingsError
from attar.runtime.admission import Limits
from attar.runtime.async_engine import AsyncEngine
from attar.runtime.results import Event
from attar.runtime.sampling.params import SamplingParams
from attar.runtime.speculate.speculator import Speculator
from attar.serving.http.remote_backend import RemoteBackend
from attar.serving.services.channel import TARGET, FrameStream, StreamEnded, connect
from attar.serving.services.coordinator import Coordinator
from attar.serving.services.messages import (
    Commit,
    DraftSampling,
    EventMessage,
    Offer,
    Open,
    Ping,
    Pong,
    ProtocolError,
    Refusal,
    Submit,
    TargetLoad,
    UnavailableError,
    decode,
)
from attar.serving.services.offer_proposer import OfferProposer
from attar.serving.services.target_service import CoordinatorStream, TargetService
from attar.serving.services.trace import RequestTracer
from tests.runtime.fake_runner import VOCABULARY
from tests.runtime.speculate.test_engine import asked
from tests.runtime.test_engine import alone, engine
from tests.serving.http.test_live import until
from tests.serving.services.local import Waiting
from tests.serving.services.loopback import OPEN, draft_server, hello, listening, network
from tests.serving.services.test_offer_proposer import Slow

SAMPLING = DraftSampling(seed=0, sample=0, prompt=1)
LONG = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True, seed=0)


class Target:
    """An engine behind a port."""

    def __init__(self):
        policy, self.service = Waiting(), TargetService()
        self.proposer = OfferProposer(policy, VOCABULARY, most=8)
        self.proposer.pool = self.service.pool(hello("target"), self.proposer.offer)
        self.speculator = Speculator(
            self.proposer, policy, most=8, verification="coupled", prefilling=self.proposer.prefilling
        )
        runner = Slow(blocks=400)
        self.engine = engine(runner, limits=Limits(sequences=32), speculator=self.speculator)
        self.service.streams = AsyncEngine(self.engine)
        self.service.load = lambda: TargetLoad(1, 0, 9, 0.0, {}, 0, 0, 0, self.speculator.counts.copy())

    @contextmanager
    def open(self, port=0):
        with listening({TARGET: self.service.serve}, port) as port:
            yield port

    def idle(self):
        """Nothing is left over."""
        until(lambda: self.engine.idle and not self.service.owners)
        self.engine.check()
        until(lambda: not self.proposer._sequences)
        self.proposer.check()
        assert self.speculator.failure is None

    def close(self):
        asyncio.run(self.service.streams.close())


@contextmanager
def target_server():
    target = Target()
    try:
        with target.open() as port:
            yield port, target
    finally:
        target.close()


@contextmanager
def coordinating(target, *drafts):
    """A coordinator that has reached all."""
    endpoints = [f"127.0.0.1:{port}" for port in drafts]
    coordinator = Coordinator(f"127.0.0.1:{target}", endpoints, hello("coordinator"), network(), OPEN)
    try:
        until(lambda: coordinator.target.connected)
        until(lambda: coordinator._ready == len(drafts))  # and the target has been told
        yield coordinator
    finally:
        coordinator.close()


async def tokens(coordinator, prompt, params, id):
    """Ids of each completion."""
    completions = [[] for _ in range(params.n)]
    async for event in coordinator.target.submit(prompt, params, id=id):
        completions[event.sample] += event.token_ids
    return completions


def same(coordinator, requests, during=lambda: None):
    """All at once; every answer is that of plain decoding."""

    async def run():
        work = [
            asyncio.create_task(tokens(coordinator, prompt, params, f"r{number}"))
            for number, (prompt, params) in enumerate(requests)
        ]
        await asyncio.sleep(0.05)
        await asyncio.to_thread(during)
        return await asyncio.gather(*work)

    for (prompt, params), completions in zip(requests, asyncio.run(run()), strict=True):
        for index, ids in enumerate(completions):
            assert ids == alone(prompt, params, index), (prompt, params)


def test_sixteen_streams_greedy_and_seeded():
    with (
        target_server() as (port, target),
        draft_server() as (draft, service),
        coordinating(port, draft) as coordinator,
    ):
        requests = [*asked(12, seed=4), *(([number], LONG) for number in range(4))]
        same(coordinator, requests)
        target.idle()
        counts = target.speculator.counts
        assert counts.drafts > 10 and counts.accepted >= 0.9 * counts.drafted
        until(lambda: service.running == 0 and not coordinator.links)
        [client] = coordinator.replicas.clients
        assert client.counts.accepted > 0 and client.turnaround.mean > 0
        assert len(coordinator.offers) == 0 and coordinator.target.open_requests == 0
        assert not next(iter(target.service.coordinators)).remote


def test_target_and_drafter_are_in_the_trace_of_the_request():
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    sdk, export = pytest.importorskip("opentelemetry.sdk.trace"), memory.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(
        pytest.importorskip("opentelemetry.sdk.trace.export").SimpleSpanProcessor(export)
    )
    tracer = RequestTracer(provider)
    with (
        target_server() as (port, target),
        draft_server() as (draft, service),
        coordinating(port, draft) as coordinator,
    ):
        target.service.tracer = service.tracer = tracer
        backend = RemoteBackend(coordinator, VOCABULARY, tracer)
        span = tracer.begin("chat", "fake", id="r")

        async def run():
            return [event async for event in backend.submit([1], LONG, id="r-0")]

        assert asyncio.run(run())[-1].finish_reason == "length"
        until(lambda: service.running == 0 and not target.service.owners)
        span.end()
    spans = {span.name: span for span in export.get_finished_spans()}
    request = spans["chat fake"].context
    of_target = spans["text_completion fake"]
    [of_draft] = [span for name, span in spans.items() if name.startswith("draft ")]
    for inner in (of_target, of_draft):
        assert (inner.context.trace_id, inner.parent.span_id) == (request.trace_id, request.span_id)
    assert of_target.attributes["gen_ai.usage.output_tokens"] == 120
    assert of_target.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert of_draft.attributes["attar.offers"] > 0 and tracer._open == {}


def test_a_drafter_that_is_lost_is_replaced_by_the_other():
    requests = [([number, 3], replace(LONG, max_tokens=100)) for number in range(8)]
    with (
        target_server() as (port, target),
        draft_server() as (first, one),
        draft_server() as (second, two),
        coordinating(port, first, second) as coordinator,
    ):

        def cut():
            until(lambda: one.running and two.running)
            network().run(_cut(coordinator))
            target.engine.runner.go.set()

        target.engine.runner.go.clear()  # none may end before
        same(coordinator, requests, cut)
        until(lambda: coordinator.replicas.clients[0].counts.connections == 2)
        target.idle()


async def _cut(coordinator):
    """The stream to the first drafter breaks."""
    link = coordinator.replicas.clients[0].link
    link._cut = lambda reason: None
    link._outbox.append(Submit("x", (1,), LONG))  # what a drafter does not read
    link._wake.set()


def test_a_target_that_dies_ends_its_requests_with_one_error_and_is_found_again():
    with target_server() as (port, target), coordinating(port) as coordinator:
        ends = []

        async def run():
            async for _ in coordinator.target.submit([1, 2], replace(LONG, max_tokens=150), id="r1"):
                if not ends:
                    ends.append("begun")
                    target.engine.runner.go.clear()  # it may not end before
                    network().loop.call_soon_threadsafe(_break, target)

        with pytest.raises(UnavailableError, match="was lost"):
            asyncio.run(run())
        assert ends
        target.engine.runner.go.set()
        until(lambda: coordinator.target.connected)
        same(coordinator, [([5, 6], LONG)])
        target.idle()
        assert coordinator.target.connections == 2


def _break(target):
    for coordinator in list(target.service.coordinators):
        coordinator._outbox.append(Submit("x", (1,), LONG))  # what a coordinator does not read
        coordinator._wake.set()


def test_without_a_target_requests_are_refused_at_once():
    coordinator = Coordinator("127.0.0.1:1", [], hello("coordinator"), network(), OPEN)
    until(lambda: "UNAVAILABLE" in coordinator.target.reason)
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1 cannot be reached"):
        asyncio.run(tokens(coordinator, [1], LONG, "r"))
    coordinator.close()


@pytest.mark.slow
def test_clients_that_vanish_leave_nothing():
    draws = random.Random(2)

    async def one(coordinator, number):
        stream = coordinator.target.submit([number % 50, 1], LONG, id=f"r{number}")
        left = draws.randint(0, 20) if number % 2 else 10**6
        async for event in stream:
            left -= len(event.token_ids)
            if left <= 0:
                break
        await stream.aclose()

    async def run(coordinator):
        await asyncio.gather(*(one(coordinator, number) for number in range(24)))

    with (
        target_server() as (port, target),
        draft_server() as (draft, service),
        coordinating(port, draft) as coordinator,
    ):
        asyncio.run(run(coordinator))
        target.idle()
        until(lambda: service.running == 0 and not coordinator.links)
        assert coordinator.target.open_requests == 0


def test_errors_are_those_of_the_engine():
    with target_server() as (port, target), coordinating(port) as coordinator:
        for prompt, params, kind, words in [
            ([], LONG, DataError, "no tokens|empty"),
            ([VOCABULARY + 5], LONG, DataError, "outside"),
            ([1] * 300, LONG, SettingsError, "200|prompt"),
            ([1], replace(LONG, regex="a+"), Exception, "."),
        ]:
            with pytest.raises(kind, match=words) as remote:
                asyncio.run(tokens(coordinator, prompt, params, "r"))
            with pytest.raises(kind) as local:
                engine(Slow(blocks=400)).add(prompt, params, id="r")
            assert str(remote.value) == str(local.value).split("\nhint")[0]
        target.idle()


def test_a_coordinator_that_does_not_read_stops_no_other():
    """It submits, reads nothing, and goes; one that sends what it may not is cut."""
    with target_server() as (port, target), coordinating(port) as coordinator:

        async def silent(ready, done):
            async with connect(f"127.0.0.1:{port}", TARGET, OPEN) as stream:
                await stream.handshake(hello("coordinator"), "target")
                await stream.write([Submit(f"s{number}", (number,), LONG) for number in range(10)])
                await stream.write([Offer(77, 1, (2,))])
                ready.set()
                await done.wait()

        async def rude():
            async with connect(f"127.0.0.1:{port}", TARGET, OPEN) as stream:
                await stream.handshake(hello("coordinator"), "target")
                await stream.write([EventMessage("r", 0)])
                while True:
                    await stream.read()

        loop = network().loop
        ready, done = asyncio.Event(), asyncio.Event()
        task = asyncio.run_coroutine_threadsafe(silent(ready, done), loop)
        until(ready.is_set)
        same(coordinator, [([4, 2], LONG)])
        with pytest.raises((StreamEnded, ProtocolError), match="does not send event"):
            network().run(rude())
        loop.call_soon_threadsafe(done.set)
        task.result(60)
        target.idle()


@pytest.mark.parametrize(
    "lie, words",
    [
        (lambda submit: [EventMessage(submit.id, 1, token_ids=(1,))], "sample 1 of 1"),
        (lambda submit: [Open(7, (1, 2), SAMPLING, 4)] * 2, "opens request 7 twice"),
        (lambda submit: [submit], "does not send submit"),
        (lambda submit: [Open(7, (VOCABULARY + 900,), SAMPLING, 4), Commit(7, 1, (2**31 - 1,), 4)], ""),
    ],
    ids=["sample", "open twice", "another kind", "token ids"],
)
def test_a_target_that_lies_costs_its_own_requests_alone(lie, words):
    async def lying(stream):
        await stream.handshake(hello("target"), "coordinator")
        while True:
            for message in await stream.read():
                if isinstance(message, Submit):
                    await stream.write([*lie(message), Refusal(message.id, "failed", "the end")])
                elif isinstance(message, Ping):
                    await stream.write([Pong(message.number)])

    with (
        draft_server() as (draft, service),
        listening({TARGET: lying}) as port,
        coordinating(port, draft) as coordinator,
    ):
        with pytest.raises(AttarError, match="was lost" if words else "the end"):
            asyncio.run(tokens(coordinator, [3, 1], LONG, "r"))
        until(lambda: words in coordinator.target.reason or coordinator.target.connections > 1)
        until(lambda: coordinator.target.connected)
        until(lambda: service.counts.refused == (not words) and service.failure is None)


def test_every_message_of_a_request_carries_its_tenant():
    """From the coordinator's client to the model that drafts."""
    asked, engine_salts = [], []
    with (
        target_server() as (port, target),
        draft_server() as (draft, service),
        coordinating(port, draft) as coordinator,
    ):
        propose, add = service.proposer.propose, target.engine.add
        service.proposer.propose = lambda requests: (asked.extend(requests), propose(requests))[1]
        target.engine.add = lambda *args, **more: (engine_salts.append(more["salt"]), add(*args, **more))[1]

        async def run():
            for tenant, first in (("one", 3), ("two", 5)):
                async for _ in coordinator.target.submit([first, 1], LONG, id=tenant, salt=tenant):
                    pass

        asyncio.run(run())
        target.idle()
    assert engine_salts == ["one", "two"]
    assert {(request.tokens[0], request.salt) for request in asked} == {(3, "one"), (5, "two")}


@pytest.mark.slow
def test_what_is_too_large_for_a_frame_ends_its_own_request_alone(monkeypatch):
    """An answer with scores of a long prompt, and a long prompt; many short ones need several frames."""
    with target_server() as (port, target), coordinating(port) as coordinator:
        monkeypatch.setattr(FrameStream, "most", 1500)
        scored = replace(LONG, prompt_logprobs=5, max_tokens=2)

        async def run():
            others = [asyncio.create_task(tokens(coordinator, [n, 2], LONG, f"o{n}")) for n in range(12)]
            for prompt, params, words in [
                ([5] * 60, scored, "the answer is larger"),
                ([1000] * 400, LONG, "request is"),
            ]:
                with pytest.raises(DataError, match=words):
                    await tokens(coordinator, prompt, params, f"large {len(prompt)}")
            return await asyncio.gather(*others)

        answers = asyncio.run(run())
        assert answers == [[alone([number, 2], LONG)] for number in range(12)]
        assert coordinator.target.connections == 1
        target.idle()


def test_an_answer_that_is_too_large_is_an_error_before_its_end():
    """Its last event waits already: the error must come first, or the client has a text with a hole."""
    frames = []

    async def written(frame):
        frames.append(frame)

    async def run():
        coordinator = CoordinatorStream(TargetService())
        coordinator.send(EventMessage("r", 0, "x" * 3000, (1,)))
        coordinator.send(EventMessage("r", 0, "", (), finish_reason="length"))
        stream = FrameStream(None, written, None)
        stream.most = 1500
        writing = asyncio.create_task(coordinator.write(stream))
        while not frames:
            await asyncio.sleep(0.01)
        writing.cancel()

    asyncio.run(run())
    assert [one.kind for frame in frames for one in decode(frame)] == ["refusal", "event"]


def test_one_trace_id_through_target_and_drafter(caplog):
    caplog.set_level("INFO", logger="attar.server")
    with (
        target_server() as (port, target),
        draft_server() as (draft, _),
        coordinating(port, draft) as coordinator,
    ):
        assert asyncio.run(tokens(coordinator, [3, 1], LONG, "cmpl-17-0")) == [alone([3, 1], LONG)]
        target.idle()

        def lines():
            return [json.loads(record.message) for record in caplog.records if record.name == "attar.server"]

        until(lambda: len(lines()) == 2)
    lines = lines()
    assert {line["role"] for line in lines if line["trace"] == "cmpl-17-0"} == {"target", "draft"}
    assert next(line for line in lines if line["role"] == "target")["tokens"] == LONG.max_tokens


def test_every_field_of_an_event_travels():
    names = {field.name for field in fields(Event)} - {"failure"}
    assert names <= {field.name for field in fields(EventMessage)}
    assert Ping(1).kind == "ping"
