"""From config.json to a transformers config and the class it names.

Only code that transformers ships is run: a family that it does not know is refused, also one that brings its
own Python files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from attar.errors import CheckpointError, ModelError
from attar.models.library import first_line, quiet

OWN_CODE_HINT = "attar runs no code that comes with a checkpoint; convert it to a transformers architecture"


def load_config(path: Path, config: Mapping[str, Any]) -> Any:
    """The transformers config of a folder; ``config`` is its parsed config.json."""
    _check_known(config, str(path / "config.json"))
    with quiet():
        try:
            return AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        except Exception as error:
            raise CheckpointError(f"{path / 'config.json'}: {first_line(error)}") from error


def parse_config(config: Mapping[str, Any]) -> Any:
    """A transformers config from a parsed config.json."""
    _check_known(config, "config")
    with quiet():
        try:
            return CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
        except Exception as error:
            raise ModelError(f"config of {config['model_type']}: {first_line(error)}") from error


def model_class(config: Any) -> Any:
    """The transformers class that a config names in ``architectures`` (else the family's causal LM)."""
    names = getattr(config, "architectures", None) or []
    if not names and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    name = names[0] if names else ""
    kind = getattr(transformers, name, None) if name else None
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        raise ModelError(
            f"transformers {transformers.__version__} has no architecture {name or '(none named)'!r} "
            f"(model_type {config.model_type})",
            hint=OWN_CODE_HINT if getattr(config, "auto_map", None) else "check config.json's architectures",
        )
    return kind


def _check_known(config: Mapping[str, Any], where: str) -> None:
    kind = config.get("model_type")
    if kind in CONFIG_MAPPING:
        return
    problem = f"{where}: transformers {transformers.__version__} does not know model_type {kind!r}"
    raise ModelError(
        problem, hint=OWN_CODE_HINT if config.get("auto_map") else "a newer transformers may know it"
    )
