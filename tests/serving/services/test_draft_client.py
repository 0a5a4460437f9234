"""Draft services over loopback: dead, silent, lying, refused ones are left out, and taken back."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace

import pytest

pytest.importorskip("grpc")

from attar.runtime.sampling.params import SamplingParams
from attar.runtime.speculate.speculator import Speculator
from attar.serving.services import channel
from attar.serving.services.channel import DRAFT, Security, StreamEnded, connect
from attar.serving.services.draft_client import (
    DEAD_S,
    FIRST_BACKOFF_S,
    FIRST_PAUSE_S,
    HANG_S,
    MOST_BACKOFF_S,
    MOST_PAUSE_S,
    PING_S,
)
from attar.serving.services.messages import Offer, Open, Pong
from attar.serving.services.offer_proposer import OfferProposer
from tests.runtime.fake_runner import VOCABULARY
from tests.runtime.speculate.test_engine import asked, same
from tests.runtime.test_engine import engine
from tests.serving.http.test_live import until
from tests.serving.services.local import Waiting
from tests.serving.services.loopback import draft_server, forever, hello, listening, network, replicas_of
from tests.serving.services.test_draft_service import opening
from tests.serving.services.test_offer_proposer import Slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True, seed=0)


class Pools:
    """An engine whose drafts come over loopback."""

    def __init__(self, ports, security=Security()):  # noqa: B008
        self.policy = Waiting()
        self.proposer = OfferProposer(self.policy, VOCABULARY, most=8)
        self.context = replicas_of(ports, self.proposer.offer, security)

    def __enter__(self):
        self.proposer.pool = self.replicas = self.context.__enter__()
        self.speculator = Speculator(self.proposer, self.policy, most=8, verification="coupled")
        self.engine = engine(Slow(), speculator=self.speculator)
        return self

    def __exit__(self, *error):
        self.context.__exit__(*error)
        self.proposer.check()

    @property
    def client(self):
        return self.replicas.clients[0]

    def ready(self):
        until(lambda: all(client.ready for client in self.replicas.clients))

    def run_until(self, true, seconds=60.0):
        """Steps until something is so, with a request that never ends."""
        end = time.monotonic() + seconds
        while not true():
            if self.engine.idle:
                self.engine.add([1, 2, 3], GREEDY)
            self.engine.step()
            assert time.monotonic() < end, (self.client.reason, self.proposer.counts)

    def drafts(self, count=5):
        """Steps until so many further drafts were accepted."""
        counts = self.speculator.counts
        want = counts.accepted + count
        self.run_until(lambda: counts.accepted >= want)

    def plain(self):
        """Steps that have no drafts."""
        counts = self.speculator.counts
        self.run_until(lambda: not self.proposer._sequences)
        before = counts.drafts
        for _ in range(3):
            self.engine.step()
        assert counts.drafts == before

    def finish(self):
        self.engine.cancel("0")
        while not self.engine.idle:
            for name in list(self.engine._requests):
                self.engine.cancel(name)


@pytest.mark.slow
def test_random_requests_over_loopback():
    with draft_server() as (port, service), Pools([port]) as pools:
        pools.ready()
        same(pools.engine, asked(8, seed=5))
        same(pools.engine, [([number], GREEDY) for number in range(3)])
        counts = pools.speculator.counts
        assert counts.drafts > 10 and counts.accepted >= 0.9 * counts.drafted
        assert pools.client.round_trip.mean is not None and pools.client.turnaround.mean is not None
        until(lambda: service.running == 0)


def test_a_service_that_dies_is_left_and_taken_back():
    with draft_server() as (port, _):
        pass
    with Pools([port]) as pools:
        pools.run_until(lambda: pools.client.reason.startswith("UNAVAILABLE"))
        for _ in range(2):
            with draft_server(port=port) as (_, service):
                pools.run_until(lambda: pools.client.ready)
                pools.drafts()
                first = pools.client.link
                assert service.counts.opened > 0
            pools.run_until(lambda: not pools.client.ready)
            pools.plain()
            assert first.closed


def test_no_pause_is_longer_than_two_seconds():
    """Between the return of a service and its first draft; what it takes is in docs/services.md."""
    assert max(MOST_BACKOFF_S, MOST_PAUSE_S) + 2 * PING_S <= 2
    assert FIRST_BACKOFF_S <= MOST_BACKOFF_S and FIRST_PAUSE_S <= MOST_PAUSE_S and HANG_S < DEAD_S


def test_two_replicas_share_the_requests_and_one_takes_over():
    with draft_server() as (first, one), ExitStack() as stack:
        second, two = stack.enter_context(draft_server())
        with Pools([first, second]) as pools:
            pools.ready()
            for number in range(6):
                pools.engine.add([number, 3, 5], GREEDY)
            pools.engine.step()
            pools.engine.step()
            assert [client.link.open_requests for client in pools.replicas.clients] == [3, 3]
            until(lambda: one.counts.opened == two.counts.opened == 3)
            stack.close()
            pools.run_until(lambda: one.counts.opened >= 6)
            pools.finish()
        until(lambda: one.running == two.running == 0)


def test_a_prefix_goes_to_the_replica_that_holds_it():
    with (
        draft_server() as (first, _),
        draft_server() as (second, _),
        replicas_of([first, second], lambda offer: "new") as replicas,
    ):
        until(lambda: all(client.ready for client in replicas.clients))
        prompt = tuple(range(40)) * 4
        chosen = replicas.choose(opening(1, prompt))
        chosen.send(opening(1, prompt))
        others = [replicas.choose(opening(number, [number])) for number in (2, 3)]
        assert all(one is not chosen for one in others)
        longer = opening(4, (*prompt, 7, 7, 7))
        assert replicas.choose(longer) is chosen
        assert replicas.choose(replace(longer, salt="other")) is not chosen
        for number in range(5, 8):
            chosen.send(opening(number, [number]))
        assert replicas.choose(longer) is not chosen  # it has too many others


def test_a_service_that_hangs_is_left_out_until_it_answers():
    answers = True

    async def hanging(stream):
        await stream.handshake(hello(), "target")
        while True:
            for message in await stream.read():
                if message.kind == "ping":
                    while not answers:
                        await asyncio.sleep(0.01)
                    await stream.write([Pong(message.number)])

    with listening({DRAFT: hanging}) as port, Pools([port]) as pools:
        pools.ready()
        pools.run_until(lambda: pools.proposer._sequences)
        answers = False
        until(lambda: not pools.client.ready)
        pools.plain()
        answers = True
        pools.ready()
        pools.run_until(lambda: pools.proposer._sequences)


@pytest.mark.parametrize(
    "lie",
    [
        lambda message: Offer(message.request, len(message.tokens) + 50, (1,)),
        lambda message: Offer(message.request, len(message.tokens), (VOCABULARY,)),
        lambda message: message,
        lambda message: Pong(99),
    ],
    ids=["base ahead", "outside of the vocabulary", "another kind", "pong without ping"],
)
def test_a_service_that_lies_is_cut(lie):
    async def lying(stream):
        await stream.handshake(hello(), "target")
        while True:
            for message in await stream.read():
                if isinstance(message, Open):
                    await stream.write([lie(message)])

    with listening({DRAFT: lying}) as port, Pools([port]) as pools:
        pools.run_until(lambda: pools.client.counts.cut >= 1)
        assert pools.speculator.counts.drafts == 0


def test_a_flood_of_offers_is_cut():
    async def flooding(stream):
        await stream.handshake(hello(), "target")
        while True:
            for message in await stream.read():
                if isinstance(message, Open):
                    for _ in range(100):
                        await stream.write([Offer(message.request, len(message.tokens), (1,))] * 100)

    with listening({DRAFT: flooding}) as port, Pools([port]) as pools:
        pools.run_until(lambda: pools.client.counts.cut >= 1)
        assert sum(pools.proposer.counts.outcomes.values()) < 1000


def test_a_service_whose_drafts_are_never_accepted_is_paused(monkeypatch):
    monkeypatch.setattr("attar.serving.services.waiting.PATIENCE", 10**6)  # it is asked all the time

    async def useless(stream):
        await stream.handshake(hello(), "target")
        while True:
            for message in await stream.read():
                if message.kind == "ping":
                    await stream.write([Pong(message.number)])
                elif message.kind == "commit":
                    base = message.base + len(message.tokens)
                    await stream.write(
                        [Offer(message.request, base, (number % VOCABULARY,)) for number in (base,)]
                    )

    with listening({DRAFT: useless}) as port, Pools([port]) as pools:
        pools.client._pause_s = 1000.0
        pools.run_until(lambda: pools.client.paused_until > 0)
        assert not pools.client.ready and pools.client._pause_s == MOST_PAUSE_S
        pools.client.paused_until = time.monotonic()
        pools.ready()


@pytest.mark.parametrize(
    ("own", "security", "words"),
    [
        (hello(tokenizer="another"), Security(), "different tokenizers"),
        (hello(version=9), Security(), "protocol 9"),
        (hello(role="target"), Security(), "role"),
        (hello(), Security(key="right-key"), "UNAUTHENTICATED"),
    ],
    ids=["tokenizer", "version", "role", "key"],
)
def test_a_service_that_does_not_fit_is_refused_by_name(own, security, words):
    with draft_server(own=own, security=security) as (port, _), Pools([port]) as pools:
        until(lambda: words in pools.client.reason)
        assert not pools.client.ready


def test_a_key_opens_and_a_wrong_one_does_not():
    security = Security(key="the-right-key")
    with draft_server(security=security) as (port, _), Pools([port], security) as pools:
        pools.ready()
        with Pools([port], Security(key="a-wrong-key")) as others:
            until(lambda: "UNAUTHENTICATED" in others.client.reason)


def test_tls(tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    asks = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    made = subprocess.run(["openssl", *asks.split(), *names], capture_output=True)
    if made.returncode:
        pytest.skip("openssl does not make certificates here")
    security = Security(cert=str(cert), cert_key=str(key), ca=str(cert))
    with draft_server(security=security) as (port, _), Pools([port], security) as pools:
        pools.ready()
        pools.drafts()
        pools.finish()
        with Pools([port]) as plain:
            until(lambda: plain.client.reason.startswith("UNAVAILABLE"))
            assert not plain.client.ready


async def hold(port, ended):
    """A stream that greets and then says nothing; leaves why it ended."""
    try:
        async with connect(f"127.0.0.1:{port}", DRAFT, Security()) as stream:
            await stream.handshake(hello("target"), "draft")
            await forever(stream)
    except StreamEnded as error:
        ended.append(str(error))


def test_silent_streams_end_and_leave_their_places(monkeypatch):
    monkeypatch.setattr(channel, "SILENCE_S", 1.0)
    ended = []
    with draft_server() as (port, _):
        for _ in range(channel.STREAMS):
            network().post(lambda: network().loop.create_task(hold(port, ended)))
        until(lambda: any("from this host" in reason for reason in ended))  # half of all
        with Pools([port]) as pools:
            pools.ready()
            until(lambda: len(ended) == channel.STREAMS)
            assert pools.client.ready and pools.client.counts.connections == 1  # it pings
    reasons = Counter("silent" if "no message for 1 s" in reason else "host" for reason in ended)
    assert reasons == {"silent": channel.HOST_STREAMS, "host": channel.STREAMS - channel.HOST_STREAMS}


def test_what_is_no_message_ends_its_stream_alone():
    """Strangers: bytes that are no gRPC, streams without a first message, wrong frames; others are served."""
    with draft_server() as (port, service), Pools([port]) as pools:
        pools.ready()
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        for stranger in strangers[:10]:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        pools.drafts(20)
        for stranger in strangers:
            stranger.close()
        pools.finish()
        until(lambda: service.running == 0)


def test_a_port_in_use_is_one_line():
    from attar.errors import OutputError

    with (
        listening({DRAFT: forever}) as port,
        pytest.raises(OutputError, match=f"cannot listen on 127.0.0.1:{port}"),
        listening({DRAFT: forever}, port=port),
    ):
        pass
