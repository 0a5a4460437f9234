"""vLLM's server as a child process, which listens on a unix socket in a folder of this process alone.

    find_vllm → vllm serve MODEL OPTIONS --uds FOLDER/socket → /health answers → served → SIGTERM

Its lines go where attar's go. It ends with this process: at a signal while it loads, and after the last
answer.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from attar.errors import AttarError, MissingExtraError
from attar.serving.http.vllm.upstream import get

POLL_S = 0.2
END_S = 30.0  # in which it ends after SIGTERM


@dataclass(frozen=True)
class Vllm:
    """The program, and the Python that runs it."""

    program: str
    python: str

    def package(self) -> Path | None:
        """The folder that has the package; None where it is not found. Imports nothing of it."""
        script = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"
        process = subprocess.run([self.python, "-c", script], capture_output=True, text=True)
        return Path(process.stdout.strip()).parent if process.returncode == 0 else None


def find_vllm() -> Vllm:
    """The ``vllm`` of the search path.

    Raises:
        MissingExtraError: there is none.
    """
    program = shutil.which("vllm")
    if program is None:
        raise MissingExtraError("vllm", None)
    with Path(program).open("rb") as file:
        first = file.readline(256)
    words = first[2:].decode("utf-8", "replace").split() if first.startswith(b"#!") else []
    named = words[0] if words and "python" in Path(words[0]).name else sys.executable
    return Vllm(program, named)


@dataclass(frozen=True)
class VllmServer:
    """A running server.

    Attributes:
        socket: path of its unix socket.
    """

    child: subprocess.Popen[bytes]
    socket: str

    @property
    def failure(self) -> AssertionError | None:
        """That it has ended; None while it runs."""
        code = self.child.poll()
        return None if code is None else AssertionError(f"vLLM has ended with code {code}")


@contextmanager
def running(vllm: Vllm, model: str, options: Sequence[str]) -> Iterator[VllmServer]:
    """A server that has loaded its model; it is ended on leaving.

    Raises:
        AttarError: it ended before it answered.
    """
    with tempfile.TemporaryDirectory(prefix="attar-vllm-") as folder:
        socket = str(Path(folder) / "socket")
        command = [vllm.program, "serve", model, *options, "--uds", socket]
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True)
        server = VllmServer(child, socket)
        try:
            with _ended_by(signal.SIGTERM):
                _wait(server)
            yield server
        finally:
            _end(child)


def _wait(server: VllmServer) -> None:
    """Until it answers."""
    while asyncio.run(get(server.socket, "/health")) != 200:
        if server.failure is not None:
            raise AttarError(
                f"{server.failure} before it served the model", hint="its lines above have the reason"
            )
        time.sleep(POLL_S)


def _end(child: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and after a while SIGKILL, for it and all that it has started."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, sign)
        with suppress(subprocess.TimeoutExpired):
            child.wait(END_S)


@contextmanager
def _ended_by(sign: signal.Signals) -> Iterator[None]:
    """A signal raises SystemExit, so that what was begun is ended."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield
        return
    before = signal.signal(sign, end)
    try:
        yield
    finally:
        signal.signal(sign, before)
