"""A checkpoint: a model folder, opened by its headers, read one tensor at a time.

Opening reads ``config.json`` and the headers of the weight files. A tensor is read on demand, into memory of
its own: no page of the file stays mapped, so a pass over a large model needs memory for one
tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attar.checkpoint import hashing, paths
from attar.checkpoint.card import Card
from attar.checkpoint.companions import tokenizer_files
from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.names import is_file_name
from attar.checkpoint.tensors import TensorInfo, check_finite, read_header, read_tensor
from attar.checkpoint.units import bytes_text
from attar.errors import CheckpointError, nearest

if TYPE_CHECKING:
    import torch

SINGLE = "model.safetensors"
MEDUSA = "medusa_lm_head.safetensors"
INDEX = "model.safetensors.index.json"

OPENERS = {".gguf": "attar.formats.gguf.open:open_gguf"}
"""``module:function`` that opens models of another format, by file suffix; formats/ is above."""

__all__ = ["INDEX", "SINGLE", "Checkpoint", "TensorInfo", "check_finite", "open_checkpoint", "read_config"]


@dataclass(frozen=True, repr=False)
class Checkpoint:
    """An opened model folder. Make one with :func:`open_checkpoint`.

    Attributes:
        path: the folder; for a single-file model, a cached folder with its config and tokenizer.
        name: ``attar:tiny``, ``org/name@revision`` or the folder's name.
        config: the content of ``config.json``.
        card: the content of ``attar.json``, or None for a model that attar did not make.
        tensors: every stored tensor by name: shards in the order of their names, tensors in the order of
            their bytes.
    """

    path: Path
    name: str
    config: dict[str, Any]
    card: Card | None
    tensors: dict[str, TensorInfo]

    def __repr__(self) -> str:
        architecture = next(iter(self.config.get("architectures") or ()), "")
        return f"Checkpoint({self.name!r}: {architecture}, {bytes_text(self.nbytes)} in {str(self.path)!r})"

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    @cached_property
    def weight_files(self) -> list[Path]:
        """The files that hold the tensors, sorted by name."""
        return sorted({info.file for info in self.tensors.values()})

    @property
    def source(self) -> Path:
        """The path that opens it again: the folder, or the first weight file where they are elsewhere."""
        elsewhere = [file for file in self.weight_files if file.parent != self.path]
        return elsewhere[0] if elsewhere else self.path

    def load(self, name: str) -> torch.Tensor:
        """Read one tensor into memory of its own, on the CPU, in its stored dtype and shape.

        Raises:
            CheckpointError: there is no such tensor, or its bytes cannot be read.
        """
        info = self.tensors.get(name)
        if info is None:
            close = nearest(name, self.tensors)
            raise CheckpointError(
                f"{self.path}: no tensor {name!r}", hint=f"did you mean {close!r}?" if close else None
            )
        return read_tensor(info)

    @property
    def spelling(self) -> str:
        """The model on a command line: ``attar:...`` and hub ids by name, folders and files by path."""
        if self.name.startswith("attar:"):
            return self.name
        by_path = self.source != self.path or self.name == self.path.name
        return str(self.source) if by_path else self.name

    def fingerprint(self) -> str:
        """SHA-256 over the names and bytes of config, weights and tokenizer. The card does not count."""
        files = {name: self.path / name for name in ("config.json", *tokenizer_files(self.path))}
        files |= {file.name: file for file in self.weight_files}
        digests = [[name, hashing.sha256_file(files[name])] for name in sorted(files)]
        return hashing.sha256_text(hashing.canonical_json(digests))


def open_checkpoint(model: str | Path | Checkpoint) -> Checkpoint:
    """Open a model by its headers. Reads no weights.

    Args:
        model: a folder, a file ``NAME.gguf``, a hub id, ``attar:tiny``, or a checkpoint that is open already.

    Raises:
        CheckpointError: the model is missing, incomplete or damaged; names the file.
        ModelError: a single-file model of an unknown family.
    """
    if isinstance(model, Checkpoint):
        return model
    folder = paths.resolve(model)
    opener = _opener(folder)
    if opener:
        module, function = opener.split(":")
        opened: Checkpoint = getattr(import_module(module), function)(folder)
        return replace(opened, name=str(model)) if str(model).startswith("attar:") else opened
    config = read_config(folder)
    tensors = _scan(folder, _weight_map(folder))
    return Checkpoint(folder, paths.model_name(model, folder), config, Card.read(folder), tensors)


def _opener(path: Path) -> str | None:
    """The opener of a file, or of a folder with such files and no config.json."""
    if path.is_file():
        return OPENERS[path.suffix.lower()]
    if (path / "config.json").is_file():
        return None
    return next((OPENERS[suffix] for suffix in OPENERS if any(path.glob(f"*{suffix}"))), None)


def read_config(folder: Path) -> dict[str, Any]:
    """The content of ``config.json``, which must name a model type and an architecture.

    Raises:
        CheckpointError: the file is missing, not a JSON object, or lacks one of them.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: no config.json", hint="a model folder in Hugging Face layout is needed"
        )
    config = _complete(read_json(path))
    if not isinstance(config.get("model_type"), str) or not config["model_type"]:
        raise CheckpointError(
            f"{path}: no model_type", hint="config.json must say which family the model is of"
        )
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise CheckpointError(
            f"{path}: no architectures", hint='config.json must name the class, such as ["LlamaForCausalLM"]'
        )
    return config


def _complete(config: dict[str, Any]) -> dict[str, Any]:
    """A config with the model type and architecture that published draft heads leave out."""
    if "speculators_model_type" in config:
        return {**config, "model_type": "speculators"}
    if "medusa_num_heads" in config:
        return {"model_type": "medusa", "architectures": ["MedusaModel"], **config}
    return config


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Tensor name to file name; None for a single file."""
    if (folder / SINGLE).is_file() or (folder / MEDUSA).is_file():
        return None
    if (folder / INDEX).is_file():
        return _index(folder)
    raise _no_weights(folder)


def _no_weights(folder: Path) -> CheckpointError:
    """The error for a folder without readable weights; names the files that are there instead."""
    if any(folder.glob("model-*-of-*.safetensors")):
        return CheckpointError(f"{folder}: shards without {INDEX}", hint="copy the index file as well")
    pickles = sorted(path.name for suffix in ("bin", "pt", "pth") for path in folder.glob(f"*.{suffix}"))
    if pickles:
        return CheckpointError(
            f"{folder}: its weights are pickled ({pickles[0]}), which may run code when opened",
            hint="where you trust them, convert them first: from_pretrained, then save_pretrained",
        )
    return CheckpointError(
        f"{folder}: no {SINGLE} and no {INDEX}", hint="the weights are missing; copy them too"
    )


def _index(folder: Path) -> dict[str, str]:
    """Tensor name to file name, from the index; every file named must exist."""
    path = folder / INDEX
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: no weight_map", hint="copy or download the file again")
    for name in _shards(weight_map):
        if not is_file_name(name):
            tensor = next(tensor for tensor, file in weight_map.items() if file == name)
            raise CheckpointError(
                f"{path}: {tensor[:80]!r} is in {str(name)[:80]!r}, which is not a file name"
            )
        if not (folder / name).is_file():
            raise CheckpointError(f"{path}: names the shard {name}, which is missing", hint="copy it too")
    return weight_map


def _shards(weight_map: dict[str, Any]) -> list[Any]:
    """The distinct file names of the index, sorted; the first value that is no text, if any, before them."""
    others = [name for name in weight_map.values() if not isinstance(name, str)]
    return others[:1] + sorted({name for name in weight_map.values() if isinstance(name, str)})


def _scan(folder: Path, weight_map: dict[str, str] | None) -> dict[str, TensorInfo]:
    """Every tensor of the files; refuses a repeated name, and a tensor of the index that is missing."""
    tensors: dict[str, TensorInfo] = {}
    single = SINGLE if (folder / SINGLE).is_file() else MEDUSA
    for file in [folder / name for name in ([single] if weight_map is None else _shards(weight_map))]:
        for entry in read_header(file):
            if entry.name in tensors:
                raise CheckpointError(
                    f"{file}: tensor {entry.name!r} is also in {tensors[entry.name].file.name}"
                )
            nbytes = entry.end - entry.begin
            tensors[entry.name] = TensorInfo(entry.name, entry.dtype, entry.shape, nbytes, file, entry.begin)
    for name, shard in (weight_map or {}).items():
        if name not in tensors or tensors[name].file.name != shard:
            raise CheckpointError(
                f"{folder / shard}: lacks tensor {name!r}, which {INDEX} places there",
                hint="index and shards are of different versions; copy them again",
            )
    return tensors
