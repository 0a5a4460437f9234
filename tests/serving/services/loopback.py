"""Services behind real sockets in this process: one network thread for all tests, any number of ports."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from functools import cache

from attar.serving.services.channel import DRAFT, Network, Security, listen
from attar.serving.services.draft_stream import serve_drafts
from attar.serving.services.messages import VERSION, Hello
from attar.serving.services.replicas import Replicas
from tests.runtime.fake_runner import VOCABULARY
from tests.serving.services.local import drafting

OPEN = Security()
network = cache(Network)


def hello(role="draft", **changes):
    values = {"version": VERSION, "name": "fake", "tokenizer": "t", "vocabulary": VOCABULARY}
    return Hello(role=role, **(values | changes))


@contextmanager
def listening(methods, port=0, security=OPEN):
    """The port of a server."""
    server, port = network().run(listen(methods, "127.0.0.1", port, security))
    try:
        yield port
    finally:
        network().run(server.stop(None))


@contextmanager
def draft_server(service=None, port=0, security=OPEN, own=None):
    """A draft service behind a port: the port, and the service."""
    service, own = service or drafting(), own or hello()
    try:
        with listening({DRAFT: lambda stream: serve_drafts(stream, service, own)}, port, security) as port:
            yield port, service
    finally:
        service.close()


@contextmanager
def replicas_of(ports, receive, security=OPEN):
    """The client side of some services; ``receive`` gets the offers."""
    endpoints = [f"127.0.0.1:{port}" for port in ports]
    replicas = Replicas(endpoints, hello("target"), network(), receive, security)
    try:
        yield replicas
    finally:
        replicas.close()


async def forever(stream):
    """Reads what comes and says nothing."""
    while True:
        await stream.read()


async def asleep(stream):
    await asyncio.sleep(60)
