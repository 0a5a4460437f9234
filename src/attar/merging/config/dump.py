"""A merge's configuration as YAML text, which :mod:`attar.merging.config.parse` reads back unchanged.

Comments and the original's choice among equal spellings are not kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from attar.merging.config.schema import (
    Filtered,
    MergeConfig,
    ModelToken,
    Module,
    Parameters,
    Scalar,
    Setting,
    Slice,
    TokenChoice,
    TokenizerChoice,
)
from attar.yaml import scalar


def config_text(config: MergeConfig) -> str:
    """One document, without a line of dashes."""
    return yaml.dump(_document(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Dumper(yaml.SafeDumper):
    """Quotes what YAML 1.2, which is read, would take for something else than a text."""


def _text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None if scalar(value) == value else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def _document(config: MergeConfig) -> dict[str, Any]:
    known = {
        "name": config.name,
        "merge_method": config.method,
        "base_model": str(config.base) if config.base else None,
        **_modules(config.modules),
        "parameters": _parameters(config.parameters),
        "dtype": config.dtype,
        "out_dtype": config.out_dtype,
        "tokenizer": _tokenizer(config.tokenizer) if config.tokenizer else None,
        "chat_template": config.chat_template,
    }
    return _without_empty(known)


def _modules(modules: tuple[Module, ...]) -> dict[str, Any]:
    if len(modules) == 1 and modules[0].name is None:
        return _slices(modules[0].slices)
    named = {
        str(module.name): {**_slices(module.slices), **_settings(module.parameters)} for module in modules
    }
    return {"modules": named}


def _slices(slices: tuple[Slice, ...]) -> dict[str, Any]:
    """``models`` where the one slice has whole models, else ``slices``."""
    if len(slices) == 1 and all(source.layers is None for source in slices[0].sources):
        sources = slices[0].sources
        return {"models": [{"model": str(each.model), **_settings(each.parameters)} for each in sources]}
    return {"slices": [_slice(each) for each in slices]}


def _slice(each: Slice) -> dict[str, Any]:
    sources = []
    for source in each.sources:
        layers = {"layer_range": list(source.layers)} if source.layers is not None else {}
        sources.append({"model": str(source.model), **layers, **_settings(source.parameters)})
    base = {"base_model": str(each.base)} if each.base else {}
    return {"sources": sources, **base, **_settings(each.parameters)}


def _settings(parameters: Parameters) -> dict[str, Any]:
    return {"parameters": _parameters(parameters)} if parameters else {}


def _parameters(parameters: Parameters) -> dict[str, Any]:
    return {name: _setting(setting) for name, setting in parameters.items()}


def _setting(setting: Setting) -> Any:
    value = setting.value
    if not isinstance(value, tuple):
        return value
    return [_entry(item) if isinstance(item, Filtered) else item for item in value]


def _entry(entry: Filtered) -> dict[str, Any]:
    value: Scalar | list[Scalar] = list(entry.value) if isinstance(entry.value, tuple) else entry.value
    return {"value": value} if entry.filter is None else {"filter": entry.filter, "value": value}


def _tokenizer(choice: TokenizerChoice) -> dict[str, Any]:
    tokens = {text: _token(token) for text, token in choice.tokens.items()}
    return {
        "source": str(choice.source),
        **_without_empty({"tokens": tokens, "pad_to_multiple_of": choice.pad_to_multiple_of}),
    }


def _token(choice: TokenChoice) -> dict[str, Any]:
    source: Any = choice.source
    if isinstance(source, ModelToken):
        number = source.token_id
        place = {"token": source.token} if number is None else {"token_id": number}
        source = {"kind": "model_token", "model": str(source.model), **place}
    elif source is not None:
        source = {"kind": "zero"} if source == "zero" else str(source)
    return {**({} if source is None else {"source": source}), **({"force": True} if choice.force else {})}


def _without_empty(known: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in known.items() if value is not None and value != {}}
