"""The models that a merge names, opened once each: folders, hub ids, files, results of earlier documents.

A reference ``path+adapter`` opens to the model with its adapter added, a quantized model to its decoded
weights. What was opened is remembered as plain checkpoints too: the lineage and the licence duties of the
result follow from them, those of an adapter included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attar.checkpoint import hashing, paths
from attar.checkpoint.card import Card
from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.open import Checkpoint, open_checkpoint
from attar.errors import AttarError
from attar.formats.readers import Decoded, quant_method
from attar.merging.adapters.apply import Adapted
from attar.merging.adapters.files import CONFIG, WEIGHTS
from attar.merging.written import read_configs

if TYPE_CHECKING:
    from attar.merging.config.schema import ModelReference


@dataclass
class Parents:
    """Opens the models of a merge.

    Attributes:
        known: models by a name of their own, such as the stages of a recipe. They come before folders and hub
            ids of the same spelling.
        made: results of earlier documents by their name; they come before everything.
        notes: what a person should know of the models that were opened.
    """

    known: Mapping[str, str | Path] = field(default_factory=dict)
    made: dict[str, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _views: dict[str, Any] = field(default_factory=dict)
    _checkpoints: dict[str, Checkpoint] = field(default_factory=dict)

    def view(self, reference: ModelReference) -> Any:
        """A model as the plan wants it: dense, its adapter added.

        Raises:
            CheckpointError: it is missing or damaged; says where the configuration names it.
            ModelError: its quantization or its adapter cannot be read.
        """
        name = str(reference)
        if name not in self._views:
            try:
                self._views[name] = self._open(reference)
            except AttarError as error:
                if not reference.where:
                    raise
                raise type(error)(f"{reference.where}: {error.message}", hint=error.hint) from error
        return self._views[name]

    def checkpoints(self) -> list[Checkpoint]:
        """Every model and adapter that was opened, in that order, results of earlier documents left out."""
        return [opened for name, opened in self._checkpoints.items() if name not in self.made]

    def _open(self, reference: ModelReference) -> Any:
        view: Any = self._checkpoint(reference.model)
        if quant_method(view) is not None:
            self.notes.append(f"{reference.model} is quantized: its decoded weights are merged")
            view = Decoded(view)
        if reference.lora is None:
            return view
        adapter = open_adapter(reference.lora)
        self._checkpoints.setdefault(f"+{reference.lora}", adapter)
        return Adapted(view, adapter.path)

    def in_blocks(self, reference: ModelReference) -> bool:
        """Whether a model is a GGUF file with quantized blocks, which decode to float32."""
        return any(info.block for info in self._checkpoint(reference.model).tensors.values())

    def _checkpoint(self, model: str) -> Checkpoint:
        if model not in self._checkpoints:
            self._checkpoints[model] = open_checkpoint(self.made.get(model) or self.known.get(model, model))
        return self._checkpoints[model]


class Adapter(Checkpoint):
    """An adapter's folder, as far as a lineage needs it: name, card, licence texts and fingerprint."""

    def fingerprint(self) -> str:
        """SHA-256 over the adapter's two files."""
        digests = [hashing.sha256_file(self.path / name) for name in (CONFIG, WEIGHTS)]
        return hashing.sha256_text(hashing.canonical_json(digests))


def open_adapter(adapter: str) -> Adapter:
    """Open an adapter.

    Args:
        adapter: a folder, or a hub id.

    Raises:
        CheckpointError: it is missing, or is no adapter.
    """
    folder = paths.resolve(adapter)
    return Adapter(
        folder, paths.model_name(adapter, folder), read_json(folder / CONFIG), Card.read(folder), {}
    )


def outside(config: str, known: Sequence[str]) -> list[str]:
    """Fingerprints of what a configuration names that has no name in ``known``, adapters included."""
    documents, _ = read_configs(config)
    inside = (*known, *(document.name for document in documents))
    prints: dict[str, str] = {}
    for reference in (reference for document in documents for reference in document.models()):
        if reference.model not in inside:
            prints[reference.model] = open_checkpoint(reference.model).fingerprint()
        if reference.lora is not None:
            prints[f"+{reference.lora}"] = open_adapter(reference.lora).fingerprint()
    return list(prints.values())
