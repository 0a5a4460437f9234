"""``--launch N``: start N processes of a command on this machine, and end them together.

torch's elastic agent starts them with the environment of ``torchrun`` (RANK, WORLD_SIZE, MASTER_ADDR, ...)
and a rendezvous on loopback; a process that ends badly ends the others. The first process shows progress and
prints the answer, output of the others goes to files that nobody keeps. Errors come back as files, and the
first of them is printed: one line, not N.

    ATTAR_LAUNCH     folder of the error files; set in a launched process
    ACCELERATE_USE_FSDP, FSDP_VERSION=2      with ``--shard``, as ``accelerate launch --use_fsdp`` sets them
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from attar.checkpoint.processes import SHARD, rank
from attar.errors import AttarError, UsageError
from attar.printable import printable

FOLDER = "ATTAR_LAUNCH"
POLL = 1.0  # seconds between looks at the process that launched this one


class LaunchError(AttarError):
    """A launched process ended without saying why."""


def launch_if_asked(values: Mapping[str, Any]) -> None:
    """Run this command line in as many processes as ``--launch`` says, and exit as they do; return where it
    does not ask, or this is one of them.

    Raises:
        UsageError: the number is none, or a launcher has started this process.
        LaunchError: a process was killed.
        KeyboardInterrupt: they were interrupted.
    """
    count = _count(values.get("launch"))
    if values.get("shard") and count < 2:
        raise UsageError("--shard needs several processes", hint="--launch 2, or more")
    if count < 2:
        return
    if "RANK" in os.environ:
        raise UsageError("--launch in a process that a launcher started", hint="leave out one of them")
    words = without_launch(sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="attar-launch-") as folder:
        _set_environment(count, folder, shard=bool(values.get("shard")))
        code = _run(words, count, Path(folder))
    raise typer.Exit(code)


def without_launch(words: Sequence[str]) -> list[str]:
    """A command line without ``--launch N`` and ``--shard``."""
    kept: list[str] = []
    remaining = iter(words)
    for word in remaining:
        if word == "--launch":
            next(remaining, None)
        elif word != "--shard" and not word.startswith("--launch="):
            kept.append(word)
    return kept


def launched() -> bool:
    """Whether :func:`launch_if_asked` of another process started this one."""
    return FOLDER in os.environ and "RANK" in os.environ


def end_with_launcher() -> None:
    """Have a launched process end when its launcher has gone (kill -9): the elastic agent is then no more."""
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(POLL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def report(lines: Sequence[str], code: int) -> None:
    """Leave an error to the launcher."""
    folder = Path(os.environ[FOLDER])
    partial = folder / f"error-{rank()}.partial"
    partial.write_text(json.dumps({"time": time.time(), "lines": list(lines), "code": code}))
    partial.replace(partial.with_suffix(".json"))


def _count(text: str | None) -> int:
    if text is None:
        return 1
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise UsageError(f"--launch {text}: no number of processes", hint="from 1 to 1024")
    return int(text)


def _set_environment(count: int, folder: str, *, shard: bool) -> None:
    """What the processes inherit."""
    os.environ[FOLDER] = folder
    # N processes share the cores; torch's agent would leave each with all of them
    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // count, 1)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if shard:
        os.environ.update({SHARD: "true", "FSDP_VERSION": "2"})


def _run(words: Sequence[str], count: int, folder: Path) -> int:
    """Start the processes and wait; the exit code of the command."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL + 1)
    quiet = dict.fromkeys(range(1, count), Std.ALL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder), redirects=quiet),
    )
    # torch would hand a SIGINT on as it is; the processes ignore it, since a terminal sends it to them too.
    # Left to Python it is a KeyboardInterrupt, at which torch sends them SIGTERM.
    config.signals_to_handle = "SIGTERM,SIGHUP,SIGQUIT"
    try:
        elastic_launch(config, sys.executable)("-m", "attar", *words)
    except ChildFailedError as error:
        return _failed(error.failures, count, folder)
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _failed(failures: Mapping[int, Any], count: int, folder: Path) -> int:
    """Print why the processes ended: the process that was killed, else the first with an error."""
    for number, failure in sorted(failures.items()):
        if failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM:
            name = signal.Signals(-failure.exitcode).name
            message = f"process {number} of {count} was killed ({name}), so the others ended too"
            raise LaunchError(message, hint="the same command goes on where they were")
    errors = [json.loads(path.read_text()) for path in folder.glob("error-*.json")]
    if not errors:
        number, failure = min(failures.items())
        raise LaunchError(f"process {number} of {count} ended with code {failure.exitcode} and no word")
    first = min(errors, key=lambda error: float(error["time"]))
    if first["lines"]:
        print(printable("\n".join(first["lines"])), file=sys.stderr, flush=True)
    return int(first["code"])
