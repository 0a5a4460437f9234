"""``--config FILE``: options of a command in YAML, those of the command line and of variables before them.

model: out/w4
port: 8080
speculate: suffix
cors-origin: [https://example.com]
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import typer

from attar.errors import RecipeError, did_you_mean
from attar.yaml import read_yaml


def config_option() -> inspect.Parameter:
    """The option, which is read before all others."""
    help = "file of these options (YAML): port: 8080; those of the command line and of variables come first"
    info = typer.Option(
        None, "--config", help=help, metavar="FILE", show_default=False, is_eager=True, callback=_read
    )
    return inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=info, annotation=str)


def _read(context: typer.Context, path: str | None) -> str | None:
    if path is not None:
        known = {parameter.name or "": parameter for parameter in context.command.params}
        context.default_map = options_of(Path(path), known)
    return path


def options_of(path: Path, known: dict[str, Any]) -> dict[str, Any]:
    """The options of a file by name, as the parser of the command line takes them.

    Args:
        known: the parameters of the command by name.

    Raises:
        RecipeError: the file cannot be read, has an unknown key, or one value where there are several; names
            file and line.
    """
    root = read_yaml(path)
    if not isinstance(root.value, dict):
        raise RecipeError(f"{root.where}: options are a mapping", hint="port: 8080")
    options: dict[str, Any] = {}
    for key, entry in root.value.items():
        name = key.replace("-", "_")
        if name not in known or name == "config":
            spellings = sorted(set(known) - {"config"})
            raise RecipeError(f"{entry.where}: unknown option {key!r}{did_you_mean(name, spellings)}")
        options[name] = _value(entry.value.plain(), known[name], f"{entry.where}: {key}")
    return options


def _value(value: Any, parameter: Any, where: str) -> Any:
    """A value as it would stand on the command line."""
    several = parameter.multiple or parameter.nargs == -1
    if isinstance(value, dict) or (isinstance(value, list) and not several):
        raise RecipeError(f"{where} is {type(value).__name__}, but must be a single value")
    if several:
        return [str(item) for item in (value if isinstance(value, list) else [value])]
    if isinstance(value, bool):
        return value if getattr(parameter, "is_flag", False) else ("on" if value else "off")
    return None if value is None else str(value)
