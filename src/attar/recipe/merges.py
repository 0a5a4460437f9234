"""A merge inside a recipe: its configuration in place or in a file, its models named by stage.

- stage: merge
  config:
    merge_method: ties
    base_model: original
    models:
      - {model: code, parameters: {weight: 0.5, density: 0.4}}     # the stage named code
      - {model: org/other, parameters: {weight: 0.5}}              # any other model
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attar.errors import RecipeError
from attar.recipe.stages import load
from attar.yaml import Located, YamlEntry


@dataclass(frozen=True)
class MergeEntry:
    """What a recipe's merge reads.

    Args:
        config: the configuration's text, in place of what the recipe said.
        stages: the earlier stages that it names, in its order, "original" included.
    """

    config: YamlEntry
    stages: tuple[str, ...]


def read_merge(entry: YamlEntry, recipe: str, known: Sequence[str]) -> MergeEntry:
    """Read the configuration of a merge.

    Args:
        entry: the recipe's key ``config``: a mapping, a path beside the recipe, or a text.
        recipe: the recipe's file.
        known: names of earlier stages.

    Raises:
        RecipeError: the configuration is wrong; names file and line.
    """
    value = entry.value
    if isinstance(value.value, dict):
        documents: Any = load("attar.merging.config.parse:read_located")(value)
        text = _dump(value.plain())
    elif not isinstance(value.value, str):
        raise RecipeError(f"{value.where}: config is neither a mapping nor a path nor a text")
    else:
        sibling = str(Path(recipe).parent / value.value)
        path = sibling if os.path.isfile(sibling) else value.value  # noqa: PTH113 (Path's raises at long names)
        documents, text = load("attar.merging.written:read_configs")(path, value.where)
    names = [reference.model for document in documents for reference in document.models()]
    stages = tuple(dict.fromkeys(name for name in names if name in known))
    return MergeEntry(YamlEntry(entry.where, Located(text, value.where)), stages)


def _dump(content: Any) -> str:
    import yaml

    return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=1000))
