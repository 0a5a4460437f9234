"""What a server takes from a model's files, or from files in their place: the sampling parameters of requests
without their own (``--generation-config``), and the chat template (``--chat-template``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from attar.chat_template import PLAIN, check_template
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


def read_template(file: str) -> str:
    """The template of a file; ``plain``: the messages' texts alone.

    Raises:
        DataError: the file cannot be read, or is no template.
    """
    if file == "plain":
        return PLAIN
    if not Path(file).is_file():
        hint = "--chat-template takes a file with a Jinja template, or plain"
        raise DataError(f"{file}: no such file", hint=hint)
    try:
        template = Path(file).read_text(encoding="utf-8")
        check_template(template)
    except jinja2.TemplateSyntaxError as error:
        raise DataError(f"{file}: line {error.lineno}: {error.message}") from error
    except jinja2.TemplateError as error:
        raise DataError(f"{file}: the chat template cannot be read: {error}") from error
    except (OSError, UnicodeError) as error:
        raise DataError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return template
