"""Recipes, with values set from the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from attar.errors import AttarError
from attar.recipe.schema import parse_recipe

ROOT = Path(__file__).parents[3]


def seeds(folder: Path) -> list[bytes]:
    """The repository's recipes and one that uses every stage."""
    every = b"""model: attar:tiny
data: python-stdlib
seed: 0
evaluate: {tokens: 1024}
stages:
  - {stage: distill, layers: 4, steps: 2}
  - {stage: prune, name: heads, method: heads, ratio: 0.25}
  - stage: recover
    steps: 3
    teacher: original
  - {stage: quantize, name: rtn, from: recover, scheme: W4A16, group_size: 64, ignore: ["re:.*x"]}
  - {stage: export, format: gguf, type: Q4_K_M, from: recover}
  - stage: merge
    config: {merge_method: linear, models: [{model: heads, parameters: {weight: 0.5}}, {model: recover}]}
"""
    return [path.read_bytes() for path in sorted((ROOT / "recipes").glob("*.yaml"))] + [every]


def target(folder: Path) -> Callable[[bytes], bool]:
    """Parses the text."""

    def handle(data: bytes) -> bool:
        try:
            parse_recipe(data.decode("utf-8", "replace"), "recipe.yaml")
            return True
        except AttarError:
            return False

    return handle
