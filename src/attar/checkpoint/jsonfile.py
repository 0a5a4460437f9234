"""JSON objects, read with errors that name file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attar.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that must hold an object.

    Raises:
        CheckpointError: names the file, and the line where the JSON is wrong.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{path}:{error.lineno}: not JSON: {error.msg}", hint="copy or download the file again"
        ) from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text", hint="copy or download the file again") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a JSON object", hint="copy or download the file again")
    return content
