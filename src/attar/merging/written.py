"""The setting ``config``: the path of a YAML file, or the YAML itself."""

from __future__ import annotations

from attar.merging.config.parse import parse_configs
from attar.merging.config.schema import MergeConfig
from attar.merging.settings import INLINE, yaml_text


def read_configs(config: str, name: str = INLINE) -> tuple[tuple[MergeConfig, ...], str]:
    """The documents and their text.

    Args:
        config: a path, or a YAML text (it has a line break or a colon followed by a space).
        name: what to call a text in errors.

    Raises:
        RecipeError: there is no such file, or the configuration is wrong; names file and line.
        SettingsError: nothing was given.
    """
    text, where = yaml_text(config, name)
    return parse_configs(text, where), text
