"""Streams: many readers of one engine, readers that leave, errors, and the end."""

from __future__ import annotations

import asyncio
import random
import sys
from dataclasses import replace
from threading import Event, current_thread

import pytest

from attar.errors import AttarError, DataError, GrammarError
from attar.runtime.async_engine import AsyncEngine
from attar.runtime.results import gather
from attar.runtime.sampling.params import SamplingParams
from tests.runtime.fake_runner import FakeRunner
from tests.runtime.faults import Fault, FaultError, Faults
from tests.runtime.test_engine import alone, engine
from tests.runtime.test_request_faults import Even, EvenGrammars

PARAMS = SamplingParams(seed=1, max_tokens=15, ignore_eos=True)


async def read(streams: AsyncEngine, prompt: list[int], params: SamplingParams = PARAMS) -> list[int]:
    events = [event async for event in streams.stream(prompt, params)]
    return list(gather(events).token_ids)


def test_many_readers_get_their_own_texts() -> None:
    async def main() -> None:
        async with AsyncEngine(engine(FakeRunner(40))) as streams:
            prompts = [[number, number + 1] for number in range(20)]
            got = await asyncio.gather(*(read(streams, prompt) for prompt in prompts))
            assert got == [alone(prompt, PARAMS) for prompt in prompts]
            await streams.call(streams.engine.check)

    asyncio.run(main())


def test_readers_that_leave_cancel_their_requests() -> None:
    async def leave(streams: AsyncEngine, after: int) -> None:
        events = streams.stream([after], SamplingParams(max_tokens=190, n=2, ignore_eos=True))
        async for _ in events:
            after -= 1
            if after < 0:
                break
        await events.aclose()

    async def main() -> None:
        draws = random.Random(0)
        async with AsyncEngine(engine(FakeRunner(100))) as streams:
            stay = [read(streams, [number]) for number in range(10)]
            go = [leave(streams, draws.randint(0, 10)) for _ in range(10)]
            texts = await asyncio.gather(*stay, *go)
            assert texts[:10] == [alone([number], PARAMS) for number in range(10)]
            while not await streams.call(lambda: streams.engine.idle):
                await asyncio.sleep(0.001)
            await streams.call(streams.engine.check)
            manager = streams.engine.scheduler.manager
            assert manager.free + manager.cached == 100
            assert not streams._readers

    asyncio.run(main())


def test_a_reader_that_is_cancelled_before_its_request_has_a_name() -> None:
    async def main() -> None:
        async with AsyncEngine(engine()) as streams:
            task = asyncio.create_task(read(streams, [1], SamplingParams(max_tokens=150, ignore_eos=True)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while not await streams.call(lambda: streams.engine.idle):
                await asyncio.sleep(0.001)
            assert not streams._readers

    asyncio.run(main())


def test_a_wrong_request_raises_where_it_was_made() -> None:
    async def main() -> None:
        async with AsyncEngine(engine()) as streams:
            with pytest.raises(DataError, match="empty"):
                await read(streams, [])
            assert await read(streams, [2]) == alone([2], PARAMS)

    asyncio.run(main())


def test_a_runner_that_breaks_ends_the_step_and_not_the_thread() -> None:
    async def main() -> None:
        runner = FakeRunner()
        async with AsyncEngine(engine(runner)) as streams:
            runner.fails = MemoryError("no room")
            events = [event async for event in streams.stream([1], PARAMS)]
            assert [(event.finish_reason, event.error) for event in events] == [
                ("error", "MemoryError: no room")
            ]
            runner.fails = None
            assert await read(streams, [2]) == alone([2], PARAMS)

    asyncio.run(main())


def test_a_bug_ends_the_thread_and_every_reader_hears_of_it() -> None:
    async def main() -> None:
        async with AsyncEngine(engine()) as streams:
            wrong = AssertionError("a block leaked")

            def breaks() -> list[object]:
                raise wrong

            streams.engine.step = breaks  # type: ignore[method-assign,assignment]
            with pytest.raises(AssertionError, match="leaked"):
                await read(streams, [1])
            with pytest.raises(AttarError, match="closed"):
                await read(streams, [1])
            assert streams.failure is wrong

    asyncio.run(main())


def test_no_request_waits_for_a_thread_that_ended() -> None:
    """SystemExit is no Exception, and ends a thread without a word."""

    async def main() -> None:
        async with AsyncEngine(engine()) as streams:
            streams.engine.step = lambda: sys.exit(3)  # type: ignore[method-assign]
            with pytest.raises(RuntimeError, match="SystemExit"):
                await asyncio.wait_for(read(streams, [1]), 10)
            assert isinstance(streams.failure, RuntimeError)

    asyncio.run(main())


def test_grammars_are_compiled_outside_the_engine_s_thread() -> None:
    """A slow one delays no other request, not even where it is requested again."""
    threads: list[str] = []

    class Slow(EvenGrammars):
        def matcher(self, params: SamplingParams, tenant: str = "") -> Even | None:
            if params.guide is None:
                return None
            threads.append(current_thread().name)
            begun.set()
            assert go_on.wait(10)
            return Even()

    begun, go_on = Event(), Event()

    async def main() -> None:
        running = engine()
        running.grammars = Slow()  # type: ignore[assignment]
        async with AsyncEngine(running) as streams:
            guided = asyncio.create_task(read(streams, [1], replace(PARAMS, regex="even")))
            await asyncio.to_thread(begun.wait, 10)
            assert await asyncio.wait_for(read(streams, [2]), 10) == alone([2], PARAMS)
            go_on.set()
            assert all(token % 2 == 0 for token in await guided)
        assert len(threads) == 1 and threads[0] != "attar-engine"

    asyncio.run(main())


def test_a_failed_request_is_logged_with_its_place_and_a_clients_fault_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        running = engine()
        faults = Faults(running, monkeypatch)
        errors = [FaultError, lambda component: GrammarError("regex", "a", "simpler")]
        faults.choose = lambda name, params: Fault("sample", 2, errors.pop(0))
        async with AsyncEngine(running) as streams:
            for _ in range(2):
                assert len([event async for event in streams.stream([1], PARAMS)]) == 3

    asyncio.run(main())
    (record,) = caplog.records
    assert record.getMessage() == "request 0 failed" and record.exc_info is not None


def test_the_books_are_looked_at_behind_the_last_event() -> None:
    """With a large pool it takes a while: no text may wait for it, and the last look comes by itself."""

    async def main() -> None:
        running = engine()
        check, go_on, done = running.check, Event(), Event()

        def slow() -> None:
            assert go_on.wait(10)
            check()
            done.set()

        running.check = slow  # type: ignore[method-assign]
        async with AsyncEngine(running) as streams:
            assert await asyncio.wait_for(read(streams, [1]), 10) == alone([1], PARAMS)
            go_on.set()
            assert await asyncio.to_thread(done.wait, 10)

    asyncio.run(main())


def test_a_leak_ends_the_thread() -> None:
    async def main() -> None:
        async with AsyncEngine(engine()) as streams:
            manager = streams.engine.scheduler.manager
            await streams.call(lambda: manager.admit(99, [1, 2, 3]))
            await streams.call(lambda: manager.reserve(99, 3))
            assert await read(streams, [1]) == alone([1], PARAMS)  # its last event goes out first
            with pytest.raises((AssertionError, AttarError), match=r"1 blocks leaked|closed"):
                await read(streams, [1])
            assert isinstance(streams.failure, AssertionError)

    asyncio.run(main())


def test_closing_cancels_what_is_left_and_draining_waits_for_it() -> None:
    async def main(drain_s: float) -> str | None:
        streams = AsyncEngine(engine(FakeRunner(100)))
        reader = streams.stream([1], SamplingParams(seed=0, max_tokens=190, ignore_eos=True))
        await anext(reader)
        await streams.close(drain_s=drain_s)
        reasons = [event.finish_reason async for event in reader]
        streams.engine.check()
        return reasons[-1]

    assert asyncio.run(main(0.0)) == "cancelled"
    assert asyncio.run(main(30.0)) == "length"
