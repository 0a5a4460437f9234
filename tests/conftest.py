"""What every test is held to."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from attar.kernels import build
from tests.cpu_seconds import (  # noqa: F401  (hooks)
    pytest_runtest_makereport,
    pytest_terminal_summary,
    start_counting,
)

gc.disable()  # until all tests are collected: scans of what is all kept were half of that time


def pytest_configure() -> None:
    """Shells start what runs in the background with SIGINT ignored; tests send it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.enable()
    start_counting(session)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``@pytest.mark.few(n)``: n cases of a test, spread evenly, run always, the others when slow; of those
    that are not marked slow."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") is not None and item.get_closest_marker("slow") is None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same in cases.values():
        marker = same[0].get_closest_marker("few")
        assert marker is not None, "it was looked for above"
        n = min(marker.args[0], len(same))
        always = {(2 * k + 1) * len(same) // (2 * n) for k in range(n)}
        for number, item in enumerate(same):
            if number not in always:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def broken_proposers() -> Iterator[list[str]]:
    """No proposer may break unseen: the engine goes on without drafts, and every text would still be right.

    Yields:
        what was logged of those that broke; a test that breaks one on purpose looks at it and clears it.
    """
    seen: list[str] = []

    class Seen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(self.format(record))

    logger, handler = logging.getLogger("attar.runtime.speculate.speculator"), Seen(logging.ERROR)
    logger.addHandler(handler)
    yield seen
    logger.removeHandler(handler)
    assert not seen, seen[0]


@pytest.fixture(autouse=True)
def checked_whenever_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine looks at its books whenever nothing is left, and not only every few seconds."""
    engine = sys.modules.get("attar.runtime.engine")
    if engine is not None:
        monkeypatch.setattr(engine, "CHECK_S", 0.0)


@pytest.fixture(autouse=True)
def without_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power cut during a test: a flush looks at its descriptor and leaves the disk alone. Those that look
    at flushes bring their own."""
    monkeypatch.setattr(os, "fsync", os.fstat)


KERNELS = build.cache_folder()


@pytest.fixture(autouse=True)
def kernels_are_compiled_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test with a cache of its own has the kernels of all others, but for those of how they are built."""
    if request.path.name != "test_build.py":
        monkeypatch.setattr(build, "cache_folder", lambda: KERNELS)


@pytest.fixture(autouse=True, scope="module")
def threads_stay() -> Iterator[None]:
    """The tests behind have as many threads of torch as those before: more than there are cores take their
    time, and change the last bits of sums."""
    torch = sys.modules.get("torch")
    before = None if torch is None else torch.get_num_threads()
    yield
    if torch is not None and before is not None:
        left = torch.get_num_threads()
        torch.set_num_threads(before)
        assert left == before, f"a test left torch with {left} threads"


@pytest.fixture(autouse=True, scope="module")
def clients_are_patient() -> None:
    """httpx waits for an answer for 5 s where nothing else is said: a busy machine takes longer."""
    httpx = sys.modules.get("httpx")
    if httpx is not None:
        default = inspect.signature(httpx.get).parameters["timeout"].default
        default.connect = default.read = default.write = default.pool = 60.0


@pytest.fixture(autouse=True, scope="session")
def certificates_are_read_once() -> None:
    """Every call of httpx.get and httpx.post makes a client, and every client reads the certificates of the
    world: 30 ms each, of hundreds of requests to servers without TLS."""
    default = sys.modules.get("httpx._transports.default")
    if default is not None:
        default.create_ssl_context = functools.cache(default.create_ssl_context)


@pytest.fixture(autouse=True, scope="session")
def the_api_is_described_once() -> None:
    """Every server describes its paths when it starts, in 0.15 s; those of the same paths say the same."""
    fastapi = sys.modules.get("fastapi.applications")
    if fastapi is not None:
        describe, flat = fastapi.get_openapi, getattr(fastapi.routing, "iter_route_contexts", list)
        made: dict[tuple[str, ...], dict[str, Any]] = {}

        def described(*, routes: Any, **more: Any) -> dict[str, Any]:
            paths = tuple(getattr(route, "path", "") for route in flat(routes))
            if paths not in made:
                made[paths] = describe(routes=routes, **more)
            return made[paths]

        fastapi.get_openapi = described


@pytest.fixture(autouse=True, scope="module")
def loggers_of_torch_hand_on() -> None:
    """To each that does not, sixty, pytest adds its handlers before every phase of a test: 0.5 ms a test."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(autouse=True, scope="module")
def imported_stays() -> None:
    """What the files before have loaded is not scanned for garbage again: half a second of every scan."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def rows_are_chosen_from_less() -> None:
    """The rows of a compression are the seed's choice of half a million tokens: 0.2 s of every stage."""
    packing = sys.modules.get("attar.data.packing")
    if packing is not None:
        packing.CHOSEN_FROM = 1 << 15
