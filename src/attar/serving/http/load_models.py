"""A server's models besides the first: the model of ``--compare``, and models that are loaded on request."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from attar.checkpoint import open_checkpoint
from attar.checkpoint.paths import resolve
from attar.checkpoint.units import byte_count, bytes_text
from attar.errors import AttarError, ModelError, SettingsError
from attar.runtime.admission import Limits
from attar.runtime.encoder import Encoder, is_encoder
from attar.runtime.llm import LLM
from attar.runtime.model_bytes import model_bytes
from attar.runtime.speculate.settings import SpeculationSettings
from attar.serving.http.backend import Backend, EngineBackend
from attar.serving.http.embeddings.embedders import Embedder, EncoderThread, EngineEmbedder
from attar.serving.http.model_defaults import sampling_defaults
from attar.serving.http.model_table import MemoryBudget, NamedModel, ServedModel
from attar.serving.http.settings import EmbeddingSettings, ServeCommand
from attar.serving.http.tokenizer import ServerTokenizer

_LATER_PART = re.compile(r".*-(?!00001-)\d{5}-of-\d{5}", re.IGNORECASE)
_FIRST_PART = re.compile(r"-00001-of-\d{5}$", re.IGNORECASE)


def models_in(folder: str) -> dict[str, str]:
    """Path of each model by its name, sorted: folders with a config.json, and GGUF files without their later
    parts. Hidden ones, such as unfinished outputs, are left out; a folder goes before a file of its name.

    Raises:
        SettingsError: there is no such folder, or it holds no model.
    """
    root = Path(folder)
    try:
        entries = sorted(entry for entry in root.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise SettingsError("model_folder", folder, f"a folder that can be read ({error.strerror})") from None
    models = {entry.name: str(entry) for entry in entries if (entry / "config.json").is_file()}
    for entry in entries:
        if entry.suffix.lower() == ".gguf" and entry.is_file() and not _LATER_PART.fullmatch(entry.stem):
            models.setdefault(_FIRST_PART.sub("", entry.stem), str(entry))
    if not models:
        raise SettingsError("model_folder", folder, "a folder with models: folders or .gguf files")
    return models


def compared_model(command: ServeCommand) -> ServedModel:
    """The model of ``--compare``, with the first one's options and chat template, without speculation.

    Raises:
        SettingsError: it is the first one.
        AttarError: as :class:`attar.runtime.llm.LLM`.
    """
    name, settings = command.settings.compare, command.settings
    if name in (command.model, settings.name):
        raise SettingsError("compare", name, "another model than the first")
    with command.progress.task("load", total=1) as task:
        served = load_model_of(command, name, name)
        task.advance()
    command.show(f"compare     {name}")
    return replace(served, defaults=None)


def named_models(command: ServeCommand) -> tuple[list[NamedModel], MemoryBudget]:
    """The models that are loaded on request, and what they must share. Reads headers, no weights. Models of
    ``--model-folder`` that cannot be served are left out, with a line.

    Raises:
        SettingsError: a name twice, a role that has no models of its own, or a model beyond the budget; names
            it.
        CheckpointError: a folder is missing or damaged.
    """
    paths, folder, kept_names = command.models.paths, command.models.model_folder, [command.model]
    total = byte_count("model_memory", command.models.model_memory) or None
    if not paths and not folder and total is None:
        return [], MemoryBudget()
    if command.services.role is not None:
        option = "model_folder" if folder else "named_model"
        raise SettingsError(option, command.services.role, "a server without --role")
    if command.settings.compare:
        kept_names.append(command.settings.compare)
    first = replace(command, options=first_options(command))
    sizes = [
        estimated_bytes(model_command, name)
        for model_command, name in zip((first, command), kept_names, strict=False)
    ]
    budget = MemoryBudget(total, sum(sizes))
    if budget.excess(0):
        raise SettingsError(
            "model_memory", command.models.model_memory, f"at least {bytes_text(budget.kept)}"
        )
    models = [_named_model(command, name, path, budget) for name, path in paths.items()]
    for name, path in models_in(folder).items() if folder else ():
        if name in paths or resolve(path) == resolve(command.model):
            continue
        try:
            models.append(_named_model(command, name, path, budget))
        except AttarError as error:
            command.show(f"{'left out':<12}{name}: {error.message}")
    return models, budget


def _named_model(command: ServeCommand, name: str, path: str, budget: MemoryBudget) -> NamedModel:
    """A model that is loaded on request, with a line."""
    if name in (command.settings.name or command.model, command.settings.compare):
        raise SettingsError("named_model", f"{name}={path}", "a name that no other model has")
    size = estimated_bytes(command, path)
    if budget.excess(size):
        kept = f" beside the {bytes_text(budget.kept)} of what is always loaded"
        message = f"{name} takes {bytes_text(size)}{kept}, which never fits within {budget}"
        raise ModelError(message, hint="a larger --model-memory, or fewer --kv-tokens")
    command.show(f"{'on request':<12}{name}: {path}, {bytes_text(size)}")
    return NamedModel(name, size, partial(load_model_of, command, name, path), path)


def estimated_bytes(command: ServeCommand, path: str) -> int:
    """What a model takes in memory with the server's options; see :func:`model_bytes`."""
    checkpoint = open_checkpoint(path)
    if is_encoder(checkpoint.config):
        return model_bytes(checkpoint)
    pooling = command.embeddings.of_causal
    sequences = (command.options.get("limits") or Limits()).sequences
    options: dict[str, Any] = {"sequences": sequences, **_runner_options(command)}
    options["prefix_cache"] = command.options.get("prefix_cache")
    return model_bytes(checkpoint, embeddings=pooling is not None, **options)


def load_model_of(command: ServeCommand, name: str, path: str) -> ServedModel:
    """Load a model with the first one's options, without speculation.

    Raises:
        ModelError: it has no tokenizer.
        AttarError: as :class:`attar.runtime.llm.LLM`.
    """
    checkpoint, special = open_checkpoint(path), command.settings.allow_special_tokens
    if is_encoder(checkpoint.config):
        encoder = load_encoder(command, path)
        thread = EncoderThread(encoder)
        words = ServerTokenizer(encoder.tokenizer, special=special)
        return ServedModel(name, thread, words, encoder_facts(encoder), thread, source=path)
    llm = LLM(path, embeddings=command.embeddings.of_causal is not None, **_options(command))
    if llm.tokenizer is None:
        raise ModelError(f"{path} has no tokenizer, so it cannot be served")
    if command.template and name == command.settings.compare:
        llm.tokenizer.chat_template = command.template
    defaults = sampling_defaults(command.answers.generation_config, checkpoint.path)
    backend = EngineBackend(llm.streams())
    embedder = engine_embedder(llm, backend, command.embeddings)
    words = ServerTokenizer(llm.tokenizer, special=special)
    return ServedModel(name, backend, words, llm.describe().to_dict(), embedder, defaults, path)


def first_options(command: ServeCommand) -> dict[str, Any]:
    """The engine's options of the first model."""
    return {**command.options, "adapters": True} if command.lora else command.options


def load_encoder(command: ServeCommand, path: str) -> Encoder:
    """An encoder, pooled as the settings say."""
    device = command.options.get("device") or "cpu"
    return Encoder(path, pooling=command.embeddings.pooling, device=device)


def encoder_facts(encoder: Encoder) -> dict[str, Any]:
    """For /v1/models and /metrics."""
    return {"model": encoder.name, "runner": "encoder", "pooling": encoder.pooling}


def engine_embedder(llm: LLM, backend: Backend, settings: EmbeddingSettings) -> Embedder | None:
    """What makes embeddings of a causal model; None where it makes none."""
    pooling, pooler = settings.of_causal, llm.engine.pooler
    return EngineEmbedder(backend, pooling, pooler.dimensions) if pooling and pooler else None


def _options(command: ServeCommand) -> dict[str, Any]:
    speculation = {field.name for field in fields(SpeculationSettings)}
    return {key: value for key, value in command.options.items() if key not in speculation}


def _runner_options(command: ServeCommand) -> dict[str, Any]:
    """Of ``RunnerSettings``."""
    engine = ("limits", "prefix_cache", "prefix_store")
    return {key: value for key, value in _options(command).items() if key not in engine}
