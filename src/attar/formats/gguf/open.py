"""A GGUF file as a checkpoint.

The other files of a model folder, config.json and the tokenizer's, are made from the metadata. They are in
the user's cache, in a folder named after the path, size and time of the file and after the code that makes
them, so that neither an old file nor old code is used. The weights stay in the file. :func:`describe` is for
``attar inspect``.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from attar.checkpoint import atomic, hashing
from attar.checkpoint.card import Card
from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.oddities import oddity
from attar.checkpoint.open import Checkpoint
from attar.checkpoint.weight_files import more
from attar.errors import CheckpointError, OutputError
from attar.formats.gguf.config import hf_config, knows_nextn, nextn_tensors
from attar.formats.gguf.container import GGUF, read_gguf
from attar.formats.gguf.generation import generation_config
from attar.formats.gguf.placement import pieces
from attar.formats.gguf.provenance import provenance_config
from attar.formats.gguf.reader import METHOD, errors_name_file
from attar.formats.gguf.types import FILE_TYPES, TYPES

SUFFIX = ".gguf"
CARD = ".attar.json"
_PART = re.compile(r"-\d{5}-of-\d{5}$")
LONG = 8  # elements of an array that are shown

SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
}
"""Keys of every architecture, and their names in a config."""


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file, or the only model among the GGUF files of a folder. Reads no weights.

    The checkpoint's ``path`` is the folder in the cache; its tensors have the file's names, and block types
    are uint8 (N, row bytes). Every expert is a tensor by itself.

    Args:
        path: the file, any part of a split file, or a folder.

    Raises:
        CheckpointError: the file is missing or damaged, is no model, or is one of several in the folder.
        ModelError: attar does not know the architecture or the tokenizer.
        OutputError: the cache cannot be written.
    """
    opened = read_gguf(model_file(path))
    with errors_name_file(opened.files[0]):
        _check_model(opened.metadata)
        _check_sizes(opened)
        config = _config(opened)
        folder = _companion(opened, config)
    head = nextn_tensors(opened.metadata, opened.tensors)
    read = knows_nextn(opened.metadata)
    odd = (oddity("nextn blocks", tensor=f"{head[0]}{more(head)}"),) if head and not read else ()
    infos = {name: tensor.info for name, tensor in opened.tensors.items()}
    return Checkpoint(
        path=folder,
        name=model_name(opened.files[0]),
        config=config,
        card=card_of(opened.files[0]),
        tensors=pieces({name: info for name, info in infos.items() if name not in head}),
        mtp=pieces({name: infos[name] for name in head}) if read else {},
        oddities=odd,
    )


def model_name(file: Path) -> str:
    """The file's name without its suffix and the number of its part."""
    return _PART.sub("", file.stem)


def model_file(path: Path) -> Path:
    """The file itself, or the only model among the GGUF files of a folder; importance matrices and other
    files are ignored.

    Raises:
        CheckpointError: the folder has several models, or none.
    """
    if not path.is_dir():
        return path
    files = [file for file in sorted(path.glob(f"*{SUFFIX}")) if _is_model(read_gguf(file).metadata)]
    models = {model_name(file): file for file in reversed(files)}
    if len(models) != 1:
        what = f"{len(models)} GGUF models" if models else "no model among its GGUF files"
        raise CheckpointError(f"{path}: {what}", hint="give the path of one file")
    return next(iter(models.values()))


def _is_model(metadata: Mapping[str, Any]) -> bool:
    return bool(metadata.get("general.type", "model") == "model")


def _check_model(metadata: Mapping[str, Any]) -> None:
    if not _is_model(metadata):
        raise CheckpointError(f"is a GGUF file of the type {metadata['general.type']!r}, not a model")
    if "general.architecture" not in metadata:
        raise CheckpointError("has no general.architecture", hint="is it a model? Copy it again")


def _check_sizes(opened: GGUF) -> None:
    """Refuse numbers that the tensors contradict, before anything of that size is allocated."""
    written, tensors = opened.metadata["general.architecture"], opened.tensors

    def stated(key: str) -> list[int]:
        value = opened.metadata.get(f"{written}.{key}", 0)
        return value if isinstance(value, list) else [value]

    latent = f"{written}.attention.key_length_mla" in opened.metadata
    blocks = max(stated("block_count"))
    (width,) = stated("attention.key_length_mla" if latent else "attention.key_length")
    if blocks > len(tensors):
        raise CheckpointError(f"its {written}.block_count is {blocks}, but it has {len(tensors)} tensors")
    widest = max((size for tensor in tensors.values() for size in tensor.shape), default=0)
    needed = {
        "embedding_length": 1,
        "attention.head_count": width or 1,
        "attention.head_count_kv": width or 1,
    }
    for key, factor in needed.items():
        if max(stated(key)) * factor > widest:
            raise CheckpointError(f"{written}.{key} is {max(stated(key))}: no tensor is so wide")


def _config(opened: GGUF) -> dict[str, Any]:
    """Content of config.json. Decoded blocks are float32, so that is what the model computes in."""
    config = hf_config(opened.metadata, opened.tensors, opened.load)
    if any(TYPES[tensor.kind].block > 1 for tensor in opened.tensors.values()):
        config["dtype"] = "float32"
    config |= provenance_config(opened.metadata)
    return {**config, "quantization_config": {"quant_method": METHOD}}


def _companion(opened: GGUF, config: dict[str, Any]) -> Path:
    """The folder in the cache, made where it is not there yet."""
    folder = hashing.computed_folder() / METHOD / _key(opened) / opened.files[0].name
    if folder.is_dir():
        return folder
    partial = folder.parent.with_name(f".{folder.parent.name}.{os.getpid()}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / folder.name).mkdir(parents=True)
        _fill(partial / folder.name, opened.metadata, config)
        try:
            atomic.publish(partial, folder.parent)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    except OSError as error:
        raise OutputError(
            f"{hashing.computed_folder()}: cannot be written: {error.strerror}",
            hint="set ATTAR_CACHE to a folder that you may write to",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _fill(folder: Path, metadata: Mapping[str, Any], config: dict[str, Any]) -> None:
    """config.json, and the tokenizer and generation_config.json where the file has them."""
    if "tokenizer.ggml.model" in metadata:
        from attar.formats.gguf.tokenizer.from_gguf import write_tokenizer

        write_tokenizer(metadata, folder)
    if generation := generation_config(metadata):
        atomic.write_json(folder / "generation_config.json", generation)
    atomic.write_json(folder / "config.json", config)


def _key(opened: GGUF) -> str:
    """A hash of the files' state and of the code that reads them."""
    stats = [(file.resolve(), file.stat()) for file in opened.files]
    state = [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats]
    code = hashlib.sha256()
    for module in sorted(Path(__file__).parent.rglob("*.py")):
        code.update(module.read_bytes())
    return hashing.sha256_text(hashing.canonical_json([state, code.hexdigest()]))[:32]


def card_of(file: Path) -> Card | None:
    """The card next to the file, or the folder's card where that lists the file."""
    path = file.with_name(model_name(file) + CARD)
    if path.is_file():
        return Card.from_dict(read_json(path), path)
    card = Card.read(file.parent)
    return card if card is not None and file.name in card.files else None


def open_unknown(path: Path) -> Checkpoint:
    """Open a file whose architecture or tokenizer attar does not know, for inspection: its config has only
    sizes, and it has no folder in the cache. Arguments and errors as
    :func:`attar.formats.gguf.open.open_gguf`."""
    opened = read_gguf(model_file(path))
    file, written = opened.files[0], str(opened.metadata["general.architecture"])
    with errors_name_file(file):
        sizes = {name: opened.metadata.get(f"{written}.{key}") for key, name in SIZES.items()}
        config = {name: value for name, value in sizes.items() if isinstance(value, int)}
        config["vocab_size"] = config.get("vocab_size", opened.tensors["token_embd.weight"].shape[0])
    return Checkpoint(
        path=file,
        name=model_name(file),
        config={
            "model_type": written,
            "architectures": [f"{written}ForCausalLM"],
            "dtype": "float16",
            **config,
            "tie_word_embeddings": "output.weight" not in opened.tensors,
            "quantization_config": {"quant_method": METHOD},
        },
        card=card_of(file),
        tensors={name: tensor.info for name, tensor in opened.tensors.items()},
    )


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Plain content: ``format``, ``version``, ``files``, ``file_type``, ``types`` and ``metadata``.

    Each entry of ``types`` has ``tensors``, ``parameters``, ``bytes`` and ``bits_per_weight``; an array of
    the metadata with more than a few elements is shown as ``kind`` and ``length``.

    Raises:
        CheckpointError: the file has changed since.
    """
    opened = read_gguf(checkpoint.source)
    types = _type_rows(opened)
    return {
        "format": "GGUF",
        "version": opened.version,
        "files": [str(file) for file in opened.files],
        "file_type": _file_type(opened, types),
        "types": types,
        "metadata": {key: _shown(opened, key) for key in opened.metadata},
    }


def _type_rows(opened: GGUF) -> list[dict[str, Any]]:
    """One entry for each type, that with most bytes first."""
    sums: dict[str, list[int]] = {}
    for tensor in opened.tensors.values():
        total = sums.setdefault(tensor.kind, [0, 0, 0])
        for i, value in enumerate((1, math.prod(tensor.shape), tensor.nbytes)):
            total[i] += value
    return [
        {
            "type": kind,
            "tensors": tensors,
            "parameters": parameters,
            "bytes": nbytes,
            "bits_per_weight": 8 * nbytes / parameters,
        }
        for kind, (tensors, parameters, nbytes) in sorted(sums.items(), key=lambda item: -item[1][2])
    ]


def _file_type(opened: GGUF, types: list[dict[str, Any]]) -> str:
    """The name of the file's mix; without one, the type with most bytes."""
    number = opened.metadata.get("general.file_type")
    if number is None:
        return str(types[0]["type"]) if types else "none"
    names = {value: name for name, value in FILE_TYPES.items()}
    return names.get(number, f"file type {number}")


def _shown(opened: GGUF, key: str) -> Any:
    value = opened.metadata[key]
    if isinstance(value, list | bytes) and len(value) > LONG:
        return {"kind": opened.kinds[key], "length": len(value)}
    if opened.kinds[key] in ("f32", "[f32]"):
        short = [float(str(np.float32(number))) for number in np.atleast_1d(value)]
        return short if isinstance(value, list) else short[0]
    return value
