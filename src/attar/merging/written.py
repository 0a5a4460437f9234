"""The setting ``config``: the path of a YAML file, or the YAML itself."""

from __future__ import annotations

from pathlib import Path

from attar.errors import RecipeError, SettingsError
from attar.merging.config import MergeConfig
from attar.merging.reading import parse_configs

INLINE = "config"
"""What an error calls a text that came from no file."""


def read_configs(config: str, name: str = INLINE) -> tuple[tuple[MergeConfig, ...], str]:
    """The documents and their text.

    Args:
        config: a path, or a YAML text (it has a line break or a colon followed by a space).
        name: what to call a text in errors.

    Raises:
        RecipeError: there is no such file, or the configuration is wrong; names file and line.
        SettingsError: nothing was given.
    """
    if not config.strip():
        raise SettingsError("config", config, "mergekit's YAML: a file, or its text")
    if "\n" in config or ": " in config or config.lstrip().startswith("{"):
        return parse_configs(config, name), config
    path = Path(config).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not text in UTF-8 (byte {error.start})") from None
    except OSError as error:
        raise RecipeError(
            f"{path}: cannot be read: {error.strerror}", hint="give a file in mergekit's YAML"
        ) from None
    return parse_configs(text, str(path)), text
