"""The stream walk: tensor by tensor in the order of the file, nothing instantiated.

    for each stored tensor:  read it into memory of its own;  transform;  write the results to their places

Peak memory is the largest tensor with what the transform makes of it, whatever the model's size. What comes
out is declared before anything is read (the layout), so that shards are written in place, a killed walk goes
on at the first unfinished shard, and the same input gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attar.progress import SILENT, Progress

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint
    from attar.checkpoint.shards import TensorSpec
    from attar.checkpoint.tensors import TensorInfo

SHARD_BYTES = 2_000_000_000

TensorLayout = Callable[["TensorInfo"], Sequence["TensorSpec"]]
"""What a stored tensor becomes: names, types and shapes. An empty sequence drops it."""

Transform = Callable[[str, Callable[[], Tensor]], Mapping[str, Tensor]]
"""``transform(name, load)``: the tensors of the layout, by name; ``load()`` reads the stored tensor, and need
not be called."""


@dataclass(frozen=True)
class WriteStep:
    """Some tensors of the output, and what makes them.

    Attributes:
        slots: their names, types and shapes.
        make: reads what they are made of, and makes them; may be called in any thread.
        nbytes: how much it reads into memory.
    """

    slots: Sequence[TensorSpec]
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
    progress: Progress = SILENT,
    what: str = "write",
) -> list[Path]:
    """Walk over a checkpoint's tensors and write what becomes of them.

    Args:
        checkpoint: read, never changed.
        layout: see :data:`TensorLayout`; asked once for every tensor before any is read.
        transform: see :data:`Transform`.
        folder: where the shards and their index go.
        work: where unfinished shards survive a kill; by default ``folder``.
        shard_bytes: bytes of a shard at most.

    Returns:
        the files written.

    Raises:
        OutputError: no space, or no permission.
    """
    steps = [
        WriteStep(
            list(layout(info)),
            lambda name=info.name: transform(name, lambda: checkpoint.load(name)),  # type: ignore[misc]
        )
        for info in checkpoint.tensors.values()
    ]
    return stream_steps(steps, folder, work=work, shard_bytes=shard_bytes, progress=progress, what=what)


def stream_steps(
    steps: Sequence[WriteStep],
    folder: Path,
    *,
    work: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    together: int = 0,
    progress: Progress = SILENT,
    what: str = "write",
) -> list[Path]:
    """Make a checkpoint's tensors step by step, from wherever they come.

    Args:
        steps: in the order of the output.
        together: bytes that steps may read side by side, one thread each; a step that reads more works alone.
            0: one after the other.
        folder, work, shard_bytes, progress, what: as of :func:`stream`.

    Returns:
        the files written.

    Raises:
        OutputError: no space, or no permission.
    """
    from attar.checkpoint.shards import ShardWriter

    if work is not None:
        work.mkdir(parents=True, exist_ok=True)
    slots = [slot for step in steps for slot in step.slots]
    writer = ShardWriter(folder, slots, max_shard_bytes=shard_bytes, work=work)
    missing = frozenset(writer.missing())
    todo = [step for step in steps if any(slot.name in missing for slot in step.slots)]

    def do(step: WriteStep) -> None:
        made = step.make()
        for slot in step.slots:
            if slot.name in missing:
                writer.add(slot.name, made[slot.name])

    with progress.task(what, total=len(steps), done=len(steps) - len(todo)) as task:
        for _ in _side_by_side(todo, do, together) if together else map(do, todo):
            task.advance()
    return writer.finish()


def _side_by_side(
    steps: Sequence[WriteStep], do: Callable[[WriteStep], None], together: int
) -> Iterator[None]:
    """Do steps in as many threads as torch has, each of one thread itself; yields after each step."""
    threads = torch.get_num_threads()
    held: dict[Future[None], int] = {}

    def wait_for_one() -> Iterator[None]:
        for future in wait(held, return_when=FIRST_COMPLETED).done:
            del held[future]
            yield future.result()

    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    try:
        for step in steps:
            while held and (len(held) == threads or sum(held.values()) + step.nbytes > together):
                yield from wait_for_one()
            held[pool.submit(do, step)] = step.nbytes
        while held:
            yield from wait_for_one()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
