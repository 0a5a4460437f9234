"""A child process that answers requests one at a time, within bounds of processor time and memory.

For work on what others wrote (chat templates, grammars) whose cost nobody knows before: a thread that
computes without end cannot be stopped, a process can. The kernel ends it where it exceeds its time, also
inside of a library, and the next request starts another.

    a line of JSON  →  function  →  {"result": ...} or {"error": [class, message, line]}
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any

_STARTED = "ready"


class CostError(Exception):
    """A request needs more than its process may use."""


class RequestError(Exception):
    """The function raised an exception.

    Attributes:
        kind: the name of its class.
        line: of the input, where the exception has one.
    """

    def __init__(self, kind: str, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.kind, self.line = kind, line


class LimitedProcess:
    """Calls of one function in a child process, which is started with the first; threads may share it.

    Args:
        function: module:name; it takes and returns JSON. Its module is imported in the child.
        seconds: of the processor, for one request.
        memory: bytes of address space.
    """

    def __init__(self, function: str, seconds: float, memory: int) -> None:
        self._arguments = [function, str(seconds), str(memory)]
        self._seconds, self._memory = seconds, memory
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = Lock()

    def __call__(self, request: Any) -> Any:
        """The function's result.

        Raises:
            CostError: it needs more than it may.
            RequestError: it raised an exception.
        """
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            answer = self._ask(line)
        if answer is None or answer.get("error", [""])[0] == "MemoryError":
            bounds = f"{self._seconds:g} s or {self._memory >> 20:,} MiB"
            raise CostError(f"it needs more than {bounds}")
        if "error" in answer:
            raise RequestError(*answer["error"])
        return answer["result"]

    def _ask(self, line: bytes) -> dict[str, Any] | None:
        """The child's answer; None: it has ended."""
        if self._child is None or self._child.poll() is not None:
            self._child = self._start()
        assert self._child.stdin is not None and self._child.stdout is not None
        try:
            self._child.stdin.write(line)
            self._child.stdin.flush()
            answer = self._child.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer.endswith(b"\n"):
            _end(self._child)
            self._child = None
            return None
        decoded: dict[str, Any] = json.loads(answer)
        return decoded

    def _start(self) -> subprocess.Popen[bytes]:
        source = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # a Ctrl-C is not for it; it ends when its input does
        )
        weakref.finalize(self, _end, child)
        assert child.stdout is not None
        if child.stdout.readline().strip() != _STARTED.encode():
            raise RuntimeError(f"the process of {self._arguments[0]} does not start")
        return child


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()


def _answer(function: Callable[[Any], Any], line: bytes) -> bytes:
    try:
        answer: dict[str, Any] = {"result": function(json.loads(line))}
        return json.dumps(answer).encode()
    except Exception as error:
        message, number = str(error)[:2000], getattr(error, "lineno", None)
        return json.dumps({"error": [type(error).__name__, message, number]}).encode()


def main(name: str, seconds: float, memory: int) -> None:
    """The child: answers each line of its input."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    module, _, function = name.partition(":")
    call = getattr(import_module(module), function)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (memory if hard < 0 else min(memory, hard), hard))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the kernel ends the process
    output.write(_STARTED.encode() + b"\n")
    output.flush()
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = _answer(call, line)
        signal.setitimer(signal.ITIMER_PROF, 0)
        output.write(answer + b"\n")
        output.flush()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
