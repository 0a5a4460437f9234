"""Settings of a merge that are not in mergekit's YAML."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from attar.checkpoint.licence_gate import LicenceSettings
from attar.checkpoint.units import byte_count
from attar.data.settings import bos_field, check_text, data_field
from attar.errors import RecipeError, SettingsError
from attar.options import check_choices, setting
from attar.walks.settings import check_range

VERSION = 2

COMPATS = ("mergekit", "paper")


@dataclass(frozen=True, kw_only=True)
class MergeSettings:
    """Make one model out of several, as a configuration in mergekit's YAML says."""

    config: str = setting("", "mergekit's YAML: a file, or its text; in a recipe also a mapping")
    compat: str = setting(
        "mergekit",
        "mergekit: its numbers; paper: each method as in its paper, computed in float32",
        choices=COMPATS,
    )
    tokens: int = setting(
        -1,
        "held-out tokens on which every parent and the merge are measured afterwards; 0: none; "
        "-1: 2,048 where a tokenizer was built, else none",
    )
    search: int = setting(
        0,
        "merges to try in a search for better weights, densities, t and lambda, starting from "
        "those of the configuration; 0: merge as written",
    )
    samples: int = setting(32, "search and greedy_soup: held-out sequences to score each merge on")
    sequence_length: int = setting(256, "tokens in a held-out sequence, at most the context")
    data: str = data_field()
    bos: str = bos_field()
    shard_size: str = setting("2GB", "weights are written in files of this size at most, such as 5GB")
    device: str = setting("auto", "where models run to be measured: cpu, cuda, cuda:0; auto: a GPU if any")
    seed: int = setting(0, "of random masks (DARE, DELLA), of the search and its text")
    licence: LicenceSettings = field(default_factory=LicenceSettings, metadata={"title": "Licences"})

    def __post_init__(self) -> None:
        check_text(self)
        check_choices(self)
        check_range("tokens", self.tokens, -1, 10**9, "-1 (as needed), 0 (none) or more")
        check_range("search", self.search, 0, 10**6, "0 (off) or more")
        if byte_count("shard_size", self.shard_size) < 1:
            raise SettingsError("shard_size", self.shard_size, "a size such as 5GB or 900MiB")
        for name in ("samples", "sequence_length"):
            check_range(name, getattr(self, name), 1, 10**9, "at least 1")


INLINE = "config"
"""Name of a text without a file in errors."""


def yaml_text(config: str, name: str = INLINE) -> tuple[str, str]:
    """The YAML text of the setting ``config``, and its name in errors.

    Args:
        config: a path, or a YAML text (it has a line break or a colon followed by a space).
        name: name of a text in errors.

    Raises:
        RecipeError: there is no such file, or it is not text.
        SettingsError: the setting is empty.
    """
    if not config.strip():
        raise SettingsError("config", config, "mergekit's YAML: a file, or its text")
    if "\n" in config or ": " in config or config.lstrip().startswith("{"):
        return config, name
    path = Path(config).expanduser()
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not text in UTF-8 (byte {error.start})") from None
    except OSError as error:
        raise RecipeError(
            f"{path}: cannot be read: {error.strerror}", hint="give a file in mergekit's YAML"
        ) from None
