"""The stream walk: tensor by tensor in the order of the file, nothing instantiated.

    for each stored tensor:  read it into memory of its own;  transform;  write the results to their places

Peak memory is the largest tensor with what the transform makes of it, whatever the model's size. What comes
out is declared before anything is read (the layout), so that shards are written in place, a killed walk goes
on at the first unfinished shard, and the same input gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

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
    from attar.checkpoint.shards import ShardWriter

    planned = {info.name: list(layout(info)) for info in checkpoint.tensors.values()}
    slots = [slot for made in planned.values() for slot in made]
    if work is not None:
        work.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(folder, slots, max_shard_bytes=shard_bytes, work=work)
    missing = frozenset(writer.missing())
    todo = [name for name, made in planned.items() if any(slot.name in missing for slot in made)]
    with progress.task(what, total=len(planned), done=len(planned) - len(todo)) as task:
        for name in todo:
            made = transform(name, lambda name=name: checkpoint.load(name))  # type: ignore[misc]
            for slot in planned[name]:
                if slot.name in missing:
                    writer.add(slot.name, made[slot.name])
            task.advance()
    return writer.finish()
