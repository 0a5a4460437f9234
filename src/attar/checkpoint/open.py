"""A checkpoint: a model folder, opened by its headers, read one tensor at a time.

Opening reads ``config.json`` and the headers of the weight files. A tensor is read on demand, into memory of
its own: no page of the file stays mapped, so a pass over a large model needs memory for one
tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attar.checkpoint import hashing, paths
from attar.checkpoint.card import Card
from attar.checkpoint.companions import KV_BASIS, tokenizer_files
from attar.checkpoint.config_numbers import odd_number
from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.normal_form import normal_form
from attar.checkpoint.oddities import NOTE, REFUSED, Oddity
from attar.checkpoint.tensors import TensorInfo, check_finite, read_tensor
from attar.checkpoint.units import bytes_text
from attar.checkpoint.weight_files import INDEX, SINGLE, read_tensors
from attar.errors import CheckpointError, nearest

if TYPE_CHECKING:
    import torch

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
        tensors: every stored tensor of the model by name: shards in the order of their names, tensors in the
            order of their bytes.
        mtp: those of its multi-token prediction head (:mod:`attar.checkpoint.mtp`), in the same order.
        oddities: what is odd about it (:mod:`attar.checkpoint.oddities`); config and tensors are without.
        as_stored: all tensors of the files have their names there.
        fits: :func:`attar.models.loading.fit.admit` has compared it with its family and its tokenizer.
    """

    path: Path
    name: str
    config: dict[str, Any]
    card: Card | None
    tensors: dict[str, TensorInfo]
    oddities: tuple[Oddity, ...] = ()
    as_stored: bool = True
    fits: bool = False
    mtp: dict[str, TensorInfo] = field(default_factory=dict)

    def __repr__(self) -> str:
        architecture = next(iter(self.config.get("architectures") or ()), "")
        return f"Checkpoint({self.name!r}: {architecture}, {bytes_text(self.nbytes)} in {str(self.path)!r})"

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.stored.values())

    @property
    def stored(self) -> dict[str, TensorInfo]:
        """Every stored tensor, the head's behind the model's."""
        return {**self.tensors, **self.mtp}

    @property
    def with_mtp(self) -> Checkpoint:
        """The checkpoint with its head's tensors among the others."""
        return replace(self, tensors=self.stored, mtp={}) if self.mtp else self

    @property
    def notes(self) -> list[str]:
        """What a user should know of it, a line each."""
        return [odd.text for odd in self.oddities if odd.verdict == NOTE]

    @cached_property
    def weight_files(self) -> list[Path]:
        """The files that hold the tensors, sorted by name."""
        return sorted({info.file for info in self.stored.values()})

    @property
    def source(self) -> Path:
        """The path that opens it again: the folder, or the first weight file where they are elsewhere."""
        elsewhere = [file for file in self.weight_files if file.parent != self.path]
        return elsewhere[0] if elsewhere else self.path

    def load(self, name: str) -> torch.Tensor:
        """Read one tensor into separate memory, on the CPU, in its stored dtype and shape.

        Raises:
            CheckpointError: there is no such tensor, or its bytes cannot be read.
        """
        info = self.tensors.get(name) or self.mtp.get(name)
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
        """SHA-256 over the names and bytes of config, weights, tokenizer and the basis of an int4 cache. The
        card does not count."""
        basis = [KV_BASIS] if (self.path / KV_BASIS).is_file() else []
        files = {name: self.path / name for name in ("config.json", *basis, *tokenizer_files(self.path))}
        files |= {file.name: file for file in self.weight_files}
        digests = [[name, hashing.sha256_file(files[name])] for name in sorted(files)]
        return hashing.sha256_text(hashing.canonical_json(digests))


def open_checkpoint(model: str | Path | Checkpoint) -> Checkpoint:
    """Open a model by its headers. Reads no weights.

    Args:
        model: a folder, a file ``NAME.gguf``, a hub id, ``attar:tiny``, or a checkpoint that is open already.

    Raises:
        CheckpointError: the model is missing, incomplete or damaged; names the file. Or headers and
            config.json contradict each other in a way that the table of oddities refuses.
        ModelError: a single-file model of an unknown family.
    """
    checkpoint = open_anyway(model)
    for odd in checkpoint.oddities:
        if odd.verdict == REFUSED:
            raise odd.error(checkpoint.source)
    return checkpoint


def open_anyway(model: str | Path | Checkpoint) -> Checkpoint:
    """Open what the table of oddities refuses as well, to describe it. Arguments and errors as
    :func:`open_checkpoint`."""
    if not isinstance(model, str | Path):
        return model
    folder = paths.resolve(model)
    opener = _opener(folder)
    if opener:
        module, function = opener.split(":")
        opened: Checkpoint = getattr(import_module(module), function)(folder)
        number = odd_number(opened.config)
        name = str(model) if str(model).startswith("attar:") else opened.name
        return replace(opened, name=name, oddities=opened.oddities if number is None else (number,))
    config = read_config(folder)
    tensors, odd = read_tensors(folder)
    form = normal_form(config, tensors, folder)
    name, card = paths.model_name(model, folder), Card.read(folder)
    oddities = (*odd, *form.oddities)
    return Checkpoint(folder, name, form.config, card, form.tensors, oddities, form.as_stored, mtp=form.mtp)


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
