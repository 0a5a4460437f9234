"""The multi-token prediction head of a model that was saved as a whole: a shard of its own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attar.checkpoint.atomic import explain_os_errors, write_config, write_json
from attar.checkpoint.geometry import geometry
from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.mtp import LEFT_OUT, renumbered, without_mtp
from attar.checkpoint.open import Checkpoint
from attar.checkpoint.shards import reserve, write_at
from attar.checkpoint.tensors import read_header, write_header
from attar.checkpoint.weight_files import INDEX, SINGLE
from attar.formats.readers import Decoded
from attar.progress import Progress

FILE = "model-mtp.safetensors"
NARROWER = "the model has other widths now"


def keep_mtp(source: Checkpoint, folder: Path, progress: Progress, why_not: str = "") -> None:
    """Write the head of ``source`` beside a model that was made of it; codes are decoded.

    Args:
        folder: the saved model with its config.json; its layers may be fewer than the source's.
        why_not: the head does not go with the model: it is left out, and a line says why.

    Raises:
        CheckpointError: the head's bytes cannot be read.
        OutputError: no space.
    """
    if not source.mtp:
        return
    config = read_json(folder / "config.json")
    if why_not:
        write_config(folder / "config.json", without_mtp(config))
        progress.log(f"note: {LEFT_OUT.format(why_not)}")
        return
    before, after = (geometry(part, "float32").layers or 0 for part in (source.config, config))
    view: Any = source if isinstance(source, Decoded) else Decoded(source)
    path, infos = folder / FILE, {renumbered(name, before, after): info for name, info in view.mtp.items()}
    header, entries = write_header([(name, info.dtype, info.shape) for name, info in infos.items()])
    with explain_os_errors(folder, entries[-1].end):
        reserve(path, header, entries[-1].end)
        for entry in entries:
            write_at(path, view.load(infos[entry.name].name), entry.begin)
    _name_in_index(folder, infos)


def _name_in_index(folder: Path, names: Iterable[str]) -> None:
    """Add the head's file to the index; a model of one file gets an index."""
    single, first = folder / SINGLE, folder / "model-00001-of-00001.safetensors"
    if single.exists():
        single.rename(first)
        weight_map = {entry.name: first.name for entry in read_header(first)}
    else:
        weight_map = read_json(folder / INDEX)["weight_map"]
    weight_map |= dict.fromkeys(names, FILE)
    total = sum(
        entry.end - entry.begin
        for name in sorted(set(weight_map.values()))
        for entry in read_header(folder / name)
    )
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / INDEX, index)
