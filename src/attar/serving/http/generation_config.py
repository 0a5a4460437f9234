"""Sampling parameters of requests without their own: those of the model's generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attar.checkpoint.jsonfile import read_json
from attar.errors import DataError, SettingsError
from attar.runtime.sampling.params import SamplingParams

FILE = "generation_config.json"
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_LEAST_TOP_P = 1e-9  # top_p 0 keeps the likeliest token, as elsewhere


def sampling_defaults(choice: str, folder: Path) -> dict[str, Any]:
    """The defaults by the name of the sampling parameter.

    Args:
        choice: ``auto``: of the model's folder, where it has the file; ``none``; or a file.
        folder: the model's.

    Raises:
        DataError: the file is missing or damaged, or a value is not allowed.
    """
    if choice == "none":
        return {}
    file = folder / FILE if choice == "auto" else Path(choice)
    if not file.is_file():
        if choice == "auto":
            return {}
        raise DataError(f"{file}: no such file", hint="--generation-config takes auto, none or a file")
    return parse_defaults(read_json(file), str(file))


def parse_defaults(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The defaults in the content of a file; what else it has is of no concern here.

    Raises:
        DataError: a value is not allowed.
    """
    given = {name: content[name] for name in NAMES if content.get(name) is not None}
    if given.get("top_p") == 0:
        given["top_p"] = _LEAST_TOP_P
    try:
        SamplingParams(**given)
    except SettingsError as error:
        hint = "--generation-config none ignores the file"
        raise DataError(f"{where}: {error.message}", hint=hint) from error
    return given
