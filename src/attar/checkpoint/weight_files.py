"""The weight files of a model folder: which they are, and every tensor in them, by headers and index.

Where files and index contradict each other, the headers are right, as for transformers: what is odd is told.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.names import is_file_name
from attar.checkpoint.oddities import Oddity, oddity
from attar.checkpoint.tensors import TensorInfo, read_header
from attar.errors import CheckpointError

SINGLE = "model.safetensors"
MEDUSA = "medusa_lm_head.safetensors"
INDEX = "model.safetensors.index.json"

_CHUNK = 1 << 24


def read_tensors(folder: Path) -> tuple[dict[str, TensorInfo], list[Oddity]]:
    """Every tensor of a folder by name, shards in the order of their names, and what is odd about them.

    Raises:
        CheckpointError: a file is missing or damaged, or there are none.
    """
    single = next((name for name in (SINGLE, MEDUSA) if (folder / name).is_file()), None)
    if single is not None:
        several = (folder / INDEX).is_file() and any(folder.glob("model-*-of-*.safetensors"))
        tensors, odd = _scan(folder, [single], {})
        return tensors, [*([oddity("two layouts")] if several else []), *odd]
    if not (folder / INDEX).is_file():
        raise _no_weights(folder)
    weight_map = _index(folder)
    names = _shards(weight_map)
    for name in names:
        _check_shard(folder, name, weight_map)
    tensors, odd = _scan(folder, names, weight_map)
    return tensors, [*odd, *_misplaced(tensors, weight_map)]


def same_bytes(first: TensorInfo, second: TensorInfo) -> bool:
    """Whether two stored tensors have one type, one shape and the same bytes; reads to the first difference.

    Raises:
        CheckpointError: a file cannot be read.
    """
    if (first.dtype, first.shape, first.nbytes) != (second.dtype, second.shape, second.nbytes):
        return False
    try:
        with first.file.open("rb") as first_file, second.file.open("rb") as second_file:
            for start in range(0, first.nbytes, _CHUNK):
                size = min(_CHUNK, first.nbytes - start)
                chunks = [
                    os.pread(file.fileno(), size, info.offset + start)
                    for file, info in ((first_file, first), (second_file, second))
                ]
                if chunks[0] != chunks[1]:
                    return False
    except OSError as error:
        raise CheckpointError(f"{first.file}: cannot be read: {error.strerror}") from error
    return True


def _no_weights(folder: Path) -> CheckpointError:
    """The error for a folder without readable weights; names the files that are there instead."""
    if any(folder.glob("model-*-of-*.safetensors")):
        return CheckpointError(f"{folder}: shards without {INDEX}", hint="copy the index file as well")
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if others:
        return CheckpointError(
            f"{folder}: no {SINGLE} and no {INDEX}; {others[0]} is of another layout",
            hint="copy the files that transformers loads, or convert it: save_pretrained",
        )
    pickles = sorted(path.name for suffix in ("bin", "pt", "pth") for path in folder.glob(f"*.{suffix}"))
    if pickles:
        return CheckpointError(
            f"{folder}: its weights are pickled ({pickles[0]}), which may run code when opened",
            hint="where you trust them, convert them first: from_pretrained, then save_pretrained",
        )
    return CheckpointError(
        f"{folder}: no {SINGLE} and no {INDEX}", hint="the weights are missing; copy them too"
    )


def _index(folder: Path) -> dict[str, Any]:
    """Tensor name to file name, from the index."""
    path = folder / INDEX
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: no weight_map", hint="copy or download the file again")
    return weight_map


def _check_shard(folder: Path, name: Any, weight_map: dict[str, Any]) -> None:
    path = folder / INDEX
    if not is_file_name(name):
        tensor = next(tensor for tensor, file in weight_map.items() if file == name)
        raise CheckpointError(f"{path}: {tensor[:80]!r} is in {str(name)[:80]!r}, which is not a file name")
    if not (folder / name).is_file():
        raise CheckpointError(f"{path}: names the shard {name}, which is missing", hint="copy it too")


def _shards(weight_map: dict[str, Any]) -> list[Any]:
    """The distinct file names of the index, sorted; the first value that is no text, if any, before them."""
    others = [name for name in weight_map.values() if not isinstance(name, str)]
    return others[:1] + sorted({name for name in weight_map.values() if isinstance(name, str)})


def _scan(
    folder: Path, names: list[Any], weight_map: dict[str, Any]
) -> tuple[dict[str, TensorInfo], list[Oddity]]:
    """Every tensor of the files; of a tensor in several files, the tensor of the file which the index
    names."""
    tensors: dict[str, TensorInfo] = {}
    odd = []
    for file in [folder / name for name in names]:
        for entry in read_header(file):
            nbytes = entry.end - entry.begin
            info = TensorInfo(entry.name, entry.dtype, entry.shape, nbytes, file, entry.begin)
            known = tensors.get(info.name)
            if known is None:
                tensors[info.name] = info
                continue
            what = "tensor twice" if same_bytes(known, info) else "two versions"
            odd.append(oddity(what, tensor=info.name, file=known.file.name, other=file.name))
            if weight_map.get(info.name) == file.name:
                tensors[info.name] = info
    return tensors, odd


def _misplaced(tensors: dict[str, TensorInfo], weight_map: dict[str, Any]) -> list[Oddity]:
    """Entries of the index that no tensor answers, or one of another shard; and the reverse."""
    odd = []
    absent = [name for name in weight_map if name not in tensors]
    if absent:
        odd.append(oddity("absent tensor", tensor=f"{absent[0][:80]}{more(absent)}"))
    moved = [name for name, file in weight_map.items() if name in tensors and tensors[name].file.name != file]
    if moved:
        files = {"file": tensors[moved[0]].file.name, "stated": weight_map[moved[0]]}
        odd.append(oddity("other shard", tensor=f"{moved[0]}{more(moved)}", **files))
    if any(name not in weight_map for name in tensors):
        odd.append(oddity("unlisted tensor"))
    return odd


def more(names: Any) -> str:
    """``, and 3 more`` behind the first of several names."""
    return f", and {len(names) - 1} more" if len(names) > 1 else ""
