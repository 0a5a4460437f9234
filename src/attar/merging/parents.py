"""The models that a merge names, each opened once: folders, hub ids, files, results of earlier documents.

A reference ``path+adapter`` opens the model with its adapter added, a quantized model as its decoded weights.
The plain checkpoints are kept as well, adapters included: lineage and licence duties of the result follow
from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attar.checkpoint import hashing, paths
from attar.checkpoint.card import Card
from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.open import Checkpoint, open_checkpoint
from attar.errors import AttarError
from attar.formats.readers import quant_method
from attar.merging.adapters.apply import AdaptedCheckpoint
from attar.merging.config.documents import MergeDocument, read_configs
from attar.merging.config.schema import ModelReference
from attar.merging.planning.model import ModelView
from attar.models.loading.adapter_files import CONFIG, WEIGHTS
from attar.models.loading.fit import fitting
from attar.models.loading.single_experts import decoded_view


@dataclass
class ParentModels:
    """Opens the models of a merge.

    Attributes:
        named: models by a name of their own, such as the stages of a recipe; they take precedence over
            folders and hub ids of the same spelling.
        results: results of earlier documents by name; they take precedence over everything.
        notes: about the opened models, for the user.
    """

    named: Mapping[str, str | Path] = field(default_factory=dict)
    results: dict[str, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _views: dict[str, ModelView] = field(default_factory=dict)
    _checkpoints: dict[str, Checkpoint] = field(default_factory=dict)

    def view(self, reference: ModelReference) -> ModelView:
        """A model with dense weights and its adapter added.

        Raises:
            CheckpointError: it is missing or damaged; names the configuration's line.
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
        """Every opened model and adapter in order, without the results of earlier documents."""
        return [opened for name, opened in self._checkpoints.items() if name not in self.results]

    def in_blocks(self, reference: ModelReference) -> bool:
        """Whether a model is a GGUF file with quantized blocks, which decode to float32."""
        return any(info.block for info in self._checkpoint(reference.model).tensors.values())

    def _open(self, reference: ModelReference) -> ModelView:
        view: ModelView = self._checkpoint(reference.model)
        if quant_method(view) is not None:
            self.notes.append(f"{reference.model} is quantized: its decoded weights are merged")
            view = decoded_view(view, exact=True)
        if reference.lora is None:
            return view
        adapter = open_adapter(reference.lora)
        self._checkpoints.setdefault(f"+{reference.lora}", adapter)
        adapted = AdaptedCheckpoint(view, adapter.path)
        self.notes += adapted.notes
        return adapted

    def _checkpoint(self, model: str) -> Checkpoint:
        if model not in self._checkpoints:
            path = self.results.get(model) or self.named.get(model, model)
            checkpoint = fitting(open_checkpoint(path))
            self.notes.extend(f"{model}: {note}" for note in checkpoint.notes)
            self._checkpoints[model] = checkpoint
        return self._checkpoints[model]


def open_parents(documents: Sequence[MergeDocument], models: Mapping[str, str | Path]) -> ParentModels:
    """Open every model that is not the result of one of the documents."""
    parents = ParentModels(dict(models))
    results = [document.name for document in documents]
    for reference in (reference for document in documents for reference in document.models()):
        if reference.model not in results:
            parents.view(reference)
    return parents


def stored_checkpoint(view: Any) -> Checkpoint:
    """The checkpoint itself of a view that decodes it or adds an adapter."""
    while not isinstance(view, Checkpoint):
        view = view.checkpoint
    return view


class AdapterFolder(Checkpoint):
    """An adapter's folder, as far as a lineage needs it: name, card, licence texts and fingerprint."""

    def fingerprint(self) -> str:
        """SHA-256 over the adapter's two files."""
        digests = [hashing.sha256_file(self.path / name) for name in (CONFIG, WEIGHTS)]
        return hashing.sha256_text(hashing.canonical_json(digests))


def open_adapter(adapter: str) -> AdapterFolder:
    """Open an adapter: a folder, or a hub id.

    Raises:
        CheckpointError: it is missing, or is no adapter.
    """
    folder = paths.resolve(adapter)
    name, config = paths.model_name(adapter, folder), read_json(folder / CONFIG)
    return AdapterFolder(folder, name, config, Card.read(folder), {})


def unnamed_fingerprints(config: str, named: Sequence[str]) -> list[str]:
    """Fingerprints of a configuration's models that have no name in ``named``, adapters included."""
    documents, _ = read_configs(config)
    inside = (*named, *(document.name for document in documents))
    fingerprints: dict[str, str] = {}
    for reference in (reference for document in documents for reference in document.models()):
        if reference.model not in inside:
            fingerprints[reference.model] = open_checkpoint(reference.model).fingerprint()
        if reference.lora is not None:
            fingerprints[f"+{reference.lora}"] = open_adapter(reference.lora).fingerprint()
    return list(fingerprints.values())
