"""What several processes of this machine save: a rounding by one process and by more, in turns.

    OMP_NUM_THREADS=1 python benchmarks/ranks.py [MODEL] [--method gptq] [--scheme W4A16] [--processes 1 2]
        [--samples 64 ...] [--length 256] [--batch-size 8] [--rounds 2]

    seconds    of the whole stage; ``sweep`` its sweep, ``other`` the rest (text, writing, the check)
    cpu        seconds of the sweep on a processor, user and system, of each process: on a machine that other
               work shares they say what the seconds would be with a processor for each

The largest cpu of a run over that of one process is the share of the time that is left: 1 / R at best.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing

import attar


class Clock:
    """A progress that notes the seconds of each task, by the clock and on the processor."""

    def __init__(self) -> None:
        self.seconds: dict[str, tuple[float, float]] = {}

    @contextmanager
    def task(self, what: str, total: int, done: int = 0) -> Iterator[Clock]:
        """Time a task."""
        start = time.monotonic(), time.process_time()
        yield self
        self.seconds[what] = time.monotonic() - start[0], time.process_time() - start[1]

    def advance(self, n: int = 1, **numbers: float) -> None:
        """Nothing."""

    def log(self, line: str) -> None:
        """Nothing."""


def work(rank: int, count: int, port: int, folder: str, model: str, settings: dict[str, Any]) -> None:
    """One process of a run, as torchrun starts it."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    clock = Clock()
    start = time.monotonic()
    attar.quantize(model, f"{folder}/out", progress=clock, **settings)
    seconds = {"whole": time.monotonic() - start, "sweep": clock.seconds[settings["method"]]}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(seconds))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def run(count: int, model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a rounding in ``count`` processes."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        multiprocessing.start_processes(
            work, (count, port, folder, model, settings), count, start_method="spawn"
        )
        rows = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(count)]
    sweep = max(row["sweep"][0] for row in rows)
    return {
        "processes": count,
        "seconds": max(row["whole"] for row in rows),
        "sweep": sweep,
        "cpu": [row["sweep"][1] for row in rows],
    }


def main() -> None:
    """Each number of rows by each number of processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="attar:tiny")
    parser.add_argument("--method", default="gptq")
    parser.add_argument("--scheme", default="W4A16")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--samples", type=int, nargs="+", default=[64])
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    for samples in options.samples:
        settings = {
            "method": options.method,
            "scheme": options.scheme,
            "samples": samples,
            "sequence_length": options.length,
            "batch_size": options.batch_size,
            "check_tokens": 0,
        }
        compare(options.model, settings, options.processes, options.rounds)


def compare(model: str, settings: dict[str, Any], processes: Sequence[int], rounds: int) -> None:
    """Print a row for each run, and the medians with their shares of the first."""
    rows: dict[int, list[dict[str, Any]]] = {count: [] for count in processes}
    for _ in range(rounds):
        for count in processes:
            rows[count].append(run(count, model, settings))
            print(json.dumps(rows[count][-1]), flush=True)
    alone = None
    for count, runs in rows.items():
        sweep = statistics.median(row["sweep"] for row in runs)
        cpu = statistics.median(max(row["cpu"]) for row in runs)
        alone = alone or (sweep, cpu)
        print(
            f"{settings['samples']} rows, {count} processes: sweep {sweep:.1f} s ({sweep / alone[0]:.2f}), "
            f"largest cpu {cpu:.1f} s ({cpu / alone[1]:.2f})"
        )


if __name__ == "__main__":
    main()
