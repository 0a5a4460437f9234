"""A merge's configuration as YAML text, which :mod:`attar.merging.config.parse` reads back unchanged.

Comments, and which of several equal spellings was used, are not kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from attar.merging.config.schema import (
    FilteredValue,
    LayerSlice,
    MergeConfig,
    MergeModule,
    MergeSource,
    ModelToken,
    ParameterSetting,
    ParameterSettings,
    TokenChoice,
    TokenizerChoice,
)
from attar.yaml import scalar


def config_text(config: MergeConfig) -> str:
    """One document, without a separator line."""
    return yaml.dump(_document(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Dumper(yaml.SafeDumper):
    """Quotes texts that YAML 1.2 would read as another type."""


def _represent_text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None if scalar(value) == value else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _represent_text)


def _document(config: MergeConfig) -> dict[str, Any]:
    return _without_empty(
        {
            "name": config.name,
            "merge_method": config.method,
            "base_model": str(config.base) if config.base else None,
            **_modules(config.modules),
            **_parameters(config.parameters),
            "dtype": config.dtype,
            "out_dtype": config.out_dtype,
            "tokenizer": _tokenizer(config.tokenizer) if config.tokenizer else None,
            "chat_template": config.chat_template,
        }
    )


def _modules(modules: tuple[MergeModule, ...]) -> dict[str, Any]:
    if len(modules) == 1 and modules[0].name is None:
        return _slices(modules[0].slices)
    named = {
        str(module.name): {**_slices(module.slices), **_parameters(module.parameters)} for module in modules
    }
    return {"modules": named}


def _slices(slices: tuple[LayerSlice, ...]) -> dict[str, Any]:
    """``models`` for a single slice of whole models, else ``slices``."""
    if len(slices) == 1 and all(source.layers is None for source in slices[0].sources):
        return {"models": [_source(source) for source in slices[0].sources]}
    return {"slices": [_slice(part) for part in slices]}


def _slice(part: LayerSlice) -> dict[str, Any]:
    base = {"base_model": str(part.base)} if part.base else {}
    return {"sources": [_source(source) for source in part.sources], **base, **_parameters(part.parameters)}


def _source(source: MergeSource) -> dict[str, Any]:
    layers = {"layer_range": list(source.layers)} if source.layers is not None else {}
    return {"model": str(source.model), **layers, **_parameters(source.parameters)}


def _parameters(parameters: ParameterSettings) -> dict[str, Any]:
    """The key ``parameters``, where there are any."""
    if not parameters:
        return {}
    return {"parameters": {name: _setting(setting) for name, setting in parameters.items()}}


def _setting(setting: ParameterSetting) -> Any:
    if not isinstance(setting.value, tuple):
        return setting.value
    return [_filtered(entry) for entry in setting.filters()] or list(setting.points())


def _filtered(entry: FilteredValue) -> dict[str, Any]:
    value = list(entry.value) if isinstance(entry.value, tuple) else entry.value
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
        token = {"token": source.token} if source.token_id is None else {"token_id": source.token_id}
        source = {"kind": "model_token", "model": str(source.model), **token}
    elif source is not None:
        source = {"kind": "zero"} if source == "zero" else str(source)
    return {**({} if source is None else {"source": source}), **({"force": True} if choice.force else {})}


def _without_empty(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None and value != {}}
