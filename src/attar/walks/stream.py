"""The stream walk: tensor by tensor in the order of the file, nothing instantiated.

    for each stored tensor:  read it into memory of its own;  transform;  write the results to their places

Peak memory is the largest tensor with what the transform makes of it, whatever the model's size. What comes
out is declared before anything is read (the layout), so that shards are written in place, a killed walk goes
on at the first unfinished shard, and the same input gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attar.progress import SILENT, Progress

if TYPE_CHECKING:
    from attar.checkpoint import Checkpoint
    from attar.checkpoint.shards import Slot
    from attar.checkpoint.tensors import TensorInfo

SHARD_BYTES = 2_000_000_000

Layout = Callable[["TensorInfo"], Sequence["Slot"]]
"""What a stored tensor becomes: names, types and shapes. An empty sequence drops it."""

Transform = Callable[[str, Callable[[], Tensor]], Mapping[str, Tensor]]
"""``transform(name, load)``: the tensors of the layout, by name; ``load()`` reads the stored tensor, and need
not be called."""


@dataclass(frozen=True)
class Step:
    """Some tensors of the output, and what makes them.

    Attributes:
        slots: their names, types and shapes.
        read: brings what they are made of into memory; may run in another thread, before its turn.
        make: makes them from what ``read`` gave.
        nbytes: how much ``read`` brings into memory.
    """

    slots: Sequence[Slot]
    read: Callable[[], Any]
    make: Callable[[Any], Mapping[str, Tensor]]
    nbytes: int = 0


def stream(
    checkpoint: Checkpoint,
    layout: Layout,
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
        layout: see :data:`Layout`; asked once for every tensor before any is read.
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
        Step(
            list(layout(info)),
            lambda: None,
            lambda _, name=info.name: transform(name, lambda: checkpoint.load(name)),  # type: ignore[misc]
        )
        for info in checkpoint.tensors.values()
    ]
    return stream_steps(steps, folder, work=work, shard_bytes=shard_bytes, progress=progress, what=what)


def stream_steps(
    steps: Sequence[Step],
    folder: Path,
    *,
    work: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    ahead: int = 0,
    progress: Progress = SILENT,
    what: str = "write",
) -> list[Path]:
    """Make a checkpoint's tensors step by step, from wherever they come.

    Args:
        steps: in the order of the output.
        ahead: bytes that may be read before their turn, or wait to be written, while the step before is at
            work. 0: one thing at a time.
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

    def write(step: Step, made: Mapping[str, Tensor]) -> None:
        for slot in step.slots:
            if slot.name in missing:
                writer.add(slot.name, made[slot.name])

    with (
        progress.task(what, total=len(steps), done=len(steps) - len(todo)) as task,
        ThreadPoolExecutor(1) as hand,
    ):
        written: Future[None] | None = None
        for step, content in _read(todo, ahead):
            made = step.make(content)
            del content
            if written is not None:
                written.result()
            if ahead < step.nbytes or not ahead:
                write(step, made)
                written = None
            else:
                written = hand.submit(write, step, made)
            del made
            task.advance()
        if written is not None:
            written.result()
    return writer.finish()


def _read(steps: Sequence[Step], ahead: int) -> Iterator[tuple[Step, Any]]:
    """Each step with what it read; the next one is read meanwhile where it fits into ``ahead``."""
    with ThreadPoolExecutor(1) as reader:
        coming: Future[Any] | None = None
        for number, step in enumerate(steps):
            content = step.read() if coming is None else coming.result()
            after = steps[number + 1] if number + 1 < len(steps) else None
            early = after is not None and 0 < after.nbytes <= ahead
            coming = reader.submit(after.read) if after is not None and early else None
            yield step, content
            del content
