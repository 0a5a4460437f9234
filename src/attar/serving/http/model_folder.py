"""``--model-folder``: the models in a folder, by the names of their folders and files."""

from __future__ import annotations

import re
from pathlib import Path

from attar.errors import SettingsError

_LATER_PART = re.compile(r".*-(?!00001-)\d{5}-of-\d{5}", re.IGNORECASE)
_FIRST_PART = re.compile(r"-00001-of-\d{5}$", re.IGNORECASE)


def models_in(folder: str) -> dict[str, str]:
    """Path of each model by its name, sorted: folders with a config.json, and GGUF files without their later
    parts. Hidden ones, such as unfinished outputs, are left out; a folder goes before a file of its name.

    Raises:
        SettingsError: there is no such folder, or it holds no model.
    """
    root = Path(folder)
    try:
        entries = sorted(entry for entry in root.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise SettingsError("model_folder", folder, f"a folder that can be read ({error.strerror})") from None
    models = {entry.name: str(entry) for entry in entries if (entry / "config.json").is_file()}
    for entry in entries:
        if entry.suffix.lower() == ".gguf" and entry.is_file() and not _LATER_PART.fullmatch(entry.stem):
            models.setdefault(_FIRST_PART.sub("", entry.stem), str(entry))
    if not models:
        raise SettingsError("model_folder", folder, "a folder with models: folders or .gguf files")
    return models
