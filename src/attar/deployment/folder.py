"""The JSON files of exported folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_config(folder: Path, config: dict[str, Any], name: str = "config.json") -> None:
    """Write a JSON file of a model folder."""
    (folder / name).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
