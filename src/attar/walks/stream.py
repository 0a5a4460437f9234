"""The stream: tensor by tensor in the order of the file, no model instantiated.

    for each stored tensor:  read it;  transform;  write the results to their offsets in the shards

Peak memory is the largest tensor with its results, whatever the model's size. The output's names, types and
shapes are declared before anything is read (the layout), so that shards are written in place, a killed run
continues at the first unfinished shard, and the same input gives the same bytes. Several processes write a
shard each: unfinished shards are dealt out by size, the first process writes the index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from attar.checkpoint.open import Checkpoint
from attar.checkpoint.processes import SINGLE_PROCESS, Processes
from attar.checkpoint.shards import TensorSpec
from attar.checkpoint.tensors import TensorInfo
from attar.progress import SILENT, Progress

SHARD_BYTES = 2_000_000_000

TensorLayout = Callable[["TensorInfo"], Sequence["TensorSpec"]]
"""What a stored tensor becomes: names, types and shapes. An empty sequence drops it."""

Transform = Callable[[str, Callable[[], Tensor]], Mapping[str, Tensor]]
"""``transform(name, load)``: the tensors of the layout, by name; ``load()`` reads the stored tensor."""


@dataclass(frozen=True)
class WriteStep:
    """Some tensors of the output, and the function that computes them.

    Attributes:
        specs: their names, types and shapes.
        make: reads the inputs and returns the tensors by name; may be called in any thread.
        nbytes: bytes that it reads into memory.
    """

    specs: Sequence[TensorSpec]
    make: Callable[[], Mapping[str, Tensor]]
    nbytes: int = 0


def stream(
    checkpoint: Checkpoint,
    layout: TensorLayout,
    transform: Transform,
    folder: Path,
    *,
    work: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    processes: Processes = SINGLE_PROCESS,
    progress: Progress = SILENT,
    what: str = "write",
) -> list[Path]:
    """Transform a checkpoint's tensors one by one and write the results. Returns the files written.

    Args:
        checkpoint: read, never changed; its multi-token prediction head is streamed behind the model.
        layout: see :data:`TensorLayout`; called once for every tensor before any is read.
        transform: see :data:`Transform`.
        folder: for the shards and their index.
        work: for unfinished shards, which a resumed run completes; by default ``folder``.
        shard_bytes: bytes of a shard at most.
        processes: they share the shards, in the folders of the first one, and return when all are written.

    Raises:
        OutputError: no space, or no permission.
    """
    steps = [
        WriteStep(
            list(layout(info)),
            lambda name=info.name: transform(name, lambda: checkpoint.load(name)),  # type: ignore[misc]
        )
        for info in (*checkpoint.tensors.values(), *checkpoint.mtp.values())
    ]
    return stream_steps(
        steps, folder, work=work, shard_bytes=shard_bytes, processes=processes, progress=progress, what=what
    )


def stream_steps(
    steps: Sequence[WriteStep],
    folder: Path,
    *,
    work: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    together: int = 0,
    processes: Processes = SINGLE_PROCESS,
    progress: Progress = SILENT,
    what: str = "write",
) -> list[Path]:
    """Write a checkpoint's tensors step by step, from any source. Returns the files written.

    Args:
        steps: in the order of the output.
        together: bytes that concurrent steps may read, one thread each; a step that reads more runs alone.
            0: one after the other.
        folder, work, shard_bytes, processes, progress, what: as in :func:`stream`.

    Raises:
        OutputError: no space, or no permission.
    """
    from attar.checkpoint.shards import ShardWriter

    folder, work = processes.of_first((folder, work))
    specs = [spec for step in steps for spec in step.specs]

    def opened() -> ShardWriter:
        return ShardWriter(folder, specs, max_shard_bytes=shard_bytes, work=work)

    if work is not None and processes.first:
        work.mkdir(parents=True, exist_ok=True)
    writer = opened() if processes.first else None
    processes.wait()  # the first one has deleted what it does not resume
    writer = writer or opened()
    unfinished = writer.unfinished()
    owners = processes.partition_by_size(list(unfinished.values()))
    assigned = {name for name, owner in zip(unfinished, owners, strict=True) if owner == processes.rank}
    missing, waiting = frozenset(writer.missing(assigned)), frozenset(writer.missing())
    processes.wait()  # all have seen what is finished
    todo = [step for step in steps if any(spec.name in missing for spec in step.specs)]
    finished = [step for step in steps if all(spec.name not in waiting for spec in step.specs)]

    def run(step: WriteStep) -> None:
        tensors = step.make()
        for spec in step.specs:
            if spec.name in missing:
                writer.add(spec.name, tensors[spec.name])

    with progress.task(what, total=len(finished) + len(todo), done=len(finished)) as task:
        for _ in _concurrently(todo, run, together) if together else map(run, todo):
            task.advance()
    processes.wait()
    if processes.first:
        opened().finish()  # all shards are finished for a writer that opens them now
    processes.wait()
    return writer.files


def _concurrently(
    steps: Sequence[WriteStep], run: Callable[[WriteStep], None], together: int
) -> Iterator[None]:
    """Run steps in as many threads as torch has, torch itself with one in each; yields after each step."""
    threads = torch.get_num_threads()
    running: dict[Future[None], int] = {}

    def wait_for_one() -> Iterator[None]:
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            del running[future]
            yield future.result()

    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    try:
        for step in steps:
            while running and (len(running) == threads or sum(running.values()) + step.nbytes > together):
                yield from wait_for_one()
            running[pool.submit(run, step)] = step.nbytes
        while running:
            yield from wait_for_one()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
