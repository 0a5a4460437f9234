"""config.json to a transformers config and its model class; transformers kept quiet, its errors on one line.

Only code that transformers ships is run: an unknown family is refused, also one that brings its own Python
files.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from attar.errors import CheckpointError, ModelError

OWN_CODE_HINT = "attar runs no code that comes with a checkpoint; convert it to a transformers architecture"


def load_config(path: Path, config: Mapping[str, Any]) -> Any:
    """The transformers config of an open checkpoint.

    Args:
        path: its folder.
        config: its config, which is config.json's but for what the opening has set right.

    Raises:
        ModelError: transformers does not know the family.
        CheckpointError: it refuses the config.
    """
    _check_known(config, str(path / "config.json"))
    try:
        parsed = parse_config(config)
    except ModelError as error:
        raise CheckpointError(f"{path / 'config.json'}: {error.message}", hint=error.hint) from error
    parsed._name_or_path = str(path)
    return parsed


def parse_config(config: Mapping[str, Any]) -> Any:
    """A transformers config from a parsed config.json."""
    _check_known(config, "config")
    plain = _plain_floats(copy.deepcopy(dict(config)))
    if plain["model_type"] == "mistral" and "layer_types" in plain:  # as AutoConfig has it
        plain["model_type"] = "ministral"
    with quiet():
        try:
            return CONFIG_MAPPING[plain["model_type"]].from_dict(plain)
        except Exception as error:
            raise ModelError(f"config of {config['model_type']}: {first_line(error)}") from error


def refusal(kind: Any, config: Any, error: Exception) -> ModelError:
    """The error for a config that a class refuses: by its key where it names an activation or a kind of
    rotary embedding that transformers does not have."""
    content = config.get_text_config().to_dict()
    for key in ("hidden_act", "hidden_activation", "activation_function"):
        if isinstance(content.get(key), str) and content[key] not in ACT2FN:
            return ModelError(
                f"{key} is {content[key]!r}, which transformers {transformers.__version__} lacks"
            )
    rope = content.get("rope_parameters") or {}
    name = rope.get("rope_type", "default")
    if isinstance(name, str) and name not in ("default", *ROPE_INIT_FUNCTIONS):
        known = ", ".join(sorted(("default", *ROPE_INIT_FUNCTIONS)))
        return ModelError(
            f"rope_type is {name!r}", hint=f"transformers {transformers.__version__} has {known}"
        )
    return ModelError(f"{kind.__name__} refuses the config: {first_line(error)}")


def is_known(config: Mapping[str, Any]) -> bool:
    """Whether transformers has the family and the class that a config names."""
    kind = getattr(transformers, config["architectures"][0], None)
    return config["model_type"] in CONFIG_MAPPING and isinstance(kind, type)


def _plain_floats(value: Any) -> Any:
    """The config with infinity as a number; transformers writes ``{"__float__": "Infinity"}``."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _plain_floats(entry) for key, entry in value.items()}
    return [_plain_floats(entry) for entry in value] if isinstance(value, list) else value


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
    family: Any = getattr(kind, "config_class", None)
    if family and not isinstance(config, family) and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # model_type decides, as in transformers
    return kind


def _check_known(config: Mapping[str, Any], where: str) -> None:
    kind = config.get("model_type")
    if kind in CONFIG_MAPPING:
        return
    problem = f"{where}: transformers {transformers.__version__} does not know model_type {kind!r}"
    raise ModelError(
        problem, hint=OWN_CODE_HINT if config.get("auto_map") else "a newer transformers may know it"
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' progress bars and warnings off the terminal; what matters is raised."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """The message of another library's error, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines else type(error).__name__
