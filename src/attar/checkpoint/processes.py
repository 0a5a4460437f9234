"""Several processes of one run (``--launch N``, ``torchrun -m attar``, ``accelerate launch -m attar``): all
do the same work in step with each other, and the first one writes the output.

    RANK     of a process, from 0; the launcher sets it
    NAME             the output, the first process's
    .NAME.work       its work folder: what the processes share for a resumed run
    .NAME.rank-1     what process 1 makes of it in the same way, with its own work folder; removed at the end

Once the shared work is done, a process leaves the rest to the first one, and waits for it. A function that
several processes call together is given them as :class:`Processes`; without, it works alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from attar.checkpoint import atomic
from attar.checkpoint.card import Card
from attar.checkpoint.jsonfile import read_json
from attar.errors import AttarError, OutputError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

POLL = 0.2  # seconds
KEY = "key.json"
SHARD = "ACCELERATE_USE_FSDP"  # "true": what is trained is divided, as accelerate launch has it


class FinishedOnRank0(Exception):  # noqa: N818 (it is no error)
    """The rest of the work is the first process's."""


def rank() -> int:
    """Of this process; 0: the first, or the only one."""
    value = os.environ.get("RANK", "")
    return int(value) if value.isdigit() and int(os.environ.get("WORLD_SIZE") or 1) > 1 else 0


def count() -> int:
    """Processes of the run."""
    return int(os.environ.get("WORLD_SIZE") or 1) if os.environ.get("RANK", "").isdigit() else 1


def connect() -> None:
    """Let the processes reach each other: gloo for tensors on CPUs, NCCL for those on GPUs. Who dies is seen
    at once; waiting for who works is no error."""
    import torch
    from torch import distributed

    if distributed.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    distributed.init_process_group(backend, timeout=timedelta(days=7))


@dataclass(frozen=True)
class Processes:
    """The processes that share a piece of work. All of them call each method, in the same order.

    Attributes:
        rank: of this one, from 0.
        count: of all.
    """

    rank: int = 0
    count: int = 1

    @classmethod
    def of_run(cls) -> Processes:
        """All that the launcher started."""
        return cls(rank(), count())

    @property
    def first(self) -> bool:
        """Whether this is the first one."""
        return not self.rank

    def total(self, part: Tensor) -> Tensor:
        """The sum of a tensor over the processes, in place."""
        if self.count > 1:
            from torch import distributed

            connect()
            distributed.all_reduce(part)
        return part

    def of_first(self, value: T) -> T:
        """The first process's value, on every process."""
        values = [value]
        if self.count > 1:
            from torch import distributed

            connect()
            distributed.broadcast_object_list(values, src=0)
        return values[0]

    def of_all(self, value: T) -> list[T]:
        """Every process's value, by rank, on every process."""
        values: list[Any] = [value]
        if self.count > 1:
            from torch import distributed

            connect()
            values *= self.count
            distributed.all_gather_object(values, value)
        return values

    def agreed(self, done: bool) -> bool:
        """Whether something is so on every process."""
        return all(self.of_all(done))

    def wait(self) -> None:
        """Until every process is here."""
        self.agreed(True)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The block by the first process; then by the others, which find what the first process has
        written."""
        if not self.first:
            self.wait()
        yield
        if self.first:
            self.wait()

    def partition_by_size(self, sizes: Sequence[int]) -> list[int]:
        """The rank for each piece of work, given their sizes: the largest first, to the process with the
        least so far."""
        loads, owners = [0] * self.count, [0] * len(sizes)
        for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
            owners[number] = loads.index(min(loads))
            loads[owners[number]] += sizes[number]
        return owners


SINGLE_PROCESS = Processes()


def own_output(final: Path) -> Path:
    """Where this process writes an output."""
    return final if not rank() else atomic.hidden(final, f"rank-{rank()}")


def wait_for_first(final: Path, key: str, lock: Path) -> None:
    """Wait until the first process has written the output.

    Args:
        lock: the file that it holds while it works.

    Raises:
        OutputError: it ended without.
    """
    while not _written(final, key):
        if not _held(lock) and not _written(final, key):
            raise OutputError(f"{final}: the first process did not finish it", hint="its error says why")
        time.sleep(POLL)


def wait_for_claim(final: Path, key: str, work: Path) -> None:
    """Wait until the first process has cleared its work folder of other work: from then on they share it.

    Args:
        work: the folder; its ``key.json`` is what the first process writes.
    """
    while not _claimed(work / KEY, key) and not _written(final, key):
        time.sleep(POLL)


def _claimed(file: Path, key: str) -> bool:
    try:
        return bool(read_json(file).get("key") == key)
    except AttarError:
        return False


def _written(final: Path, key: str) -> bool:
    try:
        card = Card.read(final)
    except AttarError:
        return False
    return card is not None and card.key == key


def _held(lock: Path) -> bool:
    """Whether a process holds a lock."""
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except OSError:
        return False
    try:
        return not atomic.try_lock(descriptor)
    finally:
        os.close(descriptor)
