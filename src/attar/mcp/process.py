"""Runs a worker's process: its progress goes on, and it ends with the call that wants its result."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from subprocess import PIPE
from typing import Any

import anyio
from anyio.abc import ByteReceiveStream, Process
from anyio.streams.buffered import BufferedByteReceiveStream

from attar.cluster.workers import GRACE_S
from attar.errors import AttarError

WORKER = "attar.mcp.worker"

LONGEST = 2**26
"""Bytes of a line."""

SMALLEST = 1e-6
"""By which progress grows at least."""

Report = Callable[[float, str], Awaitable[None]]
"""Takes how far the work is, a number that grows, and a line about it."""


async def run_worker(
    tool: str, arguments: Mapping[str, Any], report: Report, *, folder: Path, environment: Mapping[str, str]
) -> dict[str, Any]:
    """The result of a tool in a process of its own.

    Where the caller is cancelled the process gets SIGTERM and ``GRACE_S`` seconds: called again with the same
    arguments, the work goes on where it was.

    Args:
        folder: its working directory.
        environment: variables besides this process's.

    Raises:
        AttarError: of the tool; or the process was killed.
    """
    source = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    process = await anyio.open_process(
        [sys.executable, "-P", "-m", WORKER],  # -P: modules of the folder are not imported
        stdin=PIPE,
        stdout=PIPE,
        stderr=None,
        cwd=folder,
        env={**os.environ, **environment, "PYTHONPATH": path},
        start_new_session=True,  # a Ctrl-C is for the server, which ends it
    )
    assert process.stdin is not None and process.stdout is not None
    finished, last = 0, 0.0

    async def say(progress: float, line: str) -> None:
        nonlocal last
        last = max(progress, last + SMALLEST)
        await report(last, line)

    try:
        await process.stdin.send(json.dumps({"tool": tool, "arguments": dict(arguments)}).encode() + b"\n")
        async for record in _records(process.stdout):
            if "result" in record:
                result: dict[str, Any] = record["result"]
                return result
            if "error" in record:
                message, _, hint = str(record["error"]).partition("\nhint: ")
                raise AttarError(message, hint=hint or None)
            if "log" in record:
                await say(finished, record["log"])
                continue
            share = record["done"] / max(record["total"], 1)
            await say(finished + min(share, 1.0), _line(record))
            finished += share >= 1
        code = await process.wait()
        raise AttarError(f"the process of {tool} ended with code {code}", hint="call it again to go on")
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process)


def _line(record: Mapping[str, Any]) -> str:
    numbers = "  ".join(f"{name} {float(value):.4g}" for name, value in record["numbers"].items())
    return f"{record['task']} {record['done']}/{record['total']}  {numbers}".rstrip()


async def _records(stream: ByteReceiveStream) -> AsyncIterator[dict[str, Any]]:
    lines = BufferedByteReceiveStream(stream)
    while True:
        try:
            line = await lines.receive_until(b"\n", LONGEST)
        except (anyio.EndOfStream, anyio.IncompleteRead):
            return
        yield json.loads(line)


async def _end(process: Process) -> None:
    """End it, where it has not ended, and wait for it."""
    if process.returncode is None:
        process.terminate()
        with anyio.move_on_after(GRACE_S):
            await process.wait()
    if process.returncode is None:
        process.kill()
    await process.aclose()
