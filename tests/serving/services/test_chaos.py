"""Draft services that are killed, stopped, slowed, replaced by liars, with stale messages between: in every
run the tokens are those of plain decoding, no wait is longer than its deadline, and drafts come back.

    python -m pytest tests/serving/services/test_chaos.py -s    105 runs; when drafts were back
"""

from __future__ import annotations

import asyncio
import random
import time
from statistics import median

import pytest

pytest.importorskip("grpc")

from attar.serving.services.channel import DRAFT
from attar.serving.services.draft_stream import serve_drafts
from attar.serving.services.messages import MOST_AHEAD, Offer
from attar.serving.services.offer_proposer import MOST_WAIT
from tests.cases import mostly_slow
from tests.runtime.fake_runner import VOCABULARY
from tests.runtime.speculate.test_engine import asked, same
from tests.serving.http.test_live import until
from tests.serving.services.local import drafting
from tests.serving.services.loopback import hello, listening
from tests.serving.services.test_draft_client import Pools

KINDS = ("killed", "stopped", "slowed", "garbage", "floods", "stale", "wrong base")
RUNS = 15  # of each kind: a hundred in all


class Tampered:
    """A stream whose frames are changed on their way to the verifier."""

    def __init__(self, stream, mode, seed):
        self.stream, self.mode, self.random, self.sent = stream, mode, random.Random(seed), []
        self.handshake, self.read = stream.handshake, stream.read

    async def write(self, messages):
        kind = self.mode["kind"]
        if kind == "killed":
            raise OSError("killed")
        while self.mode["kind"] == "stopped":
            await asyncio.sleep(0.01)
        if kind == "slowed":
            await asyncio.sleep(0.03)
        await self.stream.write([one for message in messages for one in self.changed(message, kind)])

    def changed(self, message, kind):
        if not isinstance(message, Offer):
            return [message]
        self.sent = [*self.sent[-50:], message]
        draws = self.random
        if kind == "garbage":
            count = draws.randint(1, MOST_AHEAD)
            tokens = tuple(draws.randrange(VOCABULARY) for _ in range(count))
            return [Offer(message.request, message.base, tokens)]
        if kind == "wrong base":
            return [Offer(message.request, max(message.base + draws.randint(-5, 5), 0), message.tokens)]
        if kind == "stale":
            return [draws.choice(self.sent), message, draws.choice(self.sent), message]
        return [message] * 500 if kind == "floods" else [message]


@pytest.fixture(autouse=True)
def patient():
    """No longer than a server is."""


@pytest.fixture(scope="module")
def table():
    """Seconds until drafts were accepted again, by kind; printed at the end."""
    seconds: dict[str, list[float]] = {}
    yield seconds
    for kind, times in seconds.items():
        print(
            f"\n{kind:12}{len(times):4} runs, back after {median(times):.2f} s, at most {max(times):.2f} s",
            end="",
        )


def deadlines(proposer):
    """Seconds after which each wait for an offer gives up, as they come."""
    changed, seconds = proposer._changed.wait, []

    def wait(left):
        seconds.append(left)
        return changed(left)

    proposer._changed.wait = wait
    return seconds


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("kind", "seed"),
    mostly_slow([(kind, seed) for kind in KINDS for seed in range(RUNS)], [(kind, 0) for kind in KINDS]),
)
def test_no_wrong_token_and_back_at_speed(kind, seed, table):
    mode, service = {"kind": ""}, drafting()

    async def serve(stream):
        await serve_drafts(Tampered(stream, mode, seed), service, hello())

    with listening({DRAFT: serve}) as port, Pools([port]) as pools:
        waits = deadlines(pools.proposer)
        pools.ready()
        pools.drafts(3)
        pools.finish()
        mode["kind"] = kind
        same(pools.engine, asked(6, seed=100 + seed))
        assert max(waits, default=0.0) <= MOST_WAIT
        mode["kind"], began = "", time.monotonic()
        pools.drafts(3)
        table.setdefault(kind, []).append(time.monotonic() - began)
        pools.finish()
        until(lambda: service.running == 0)
        assert pools.speculator.failure is None
    service.close()
    service.proposer.check()
