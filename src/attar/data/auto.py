"""``data: auto``: the text that fits a model, for a user who names none.

a model of code        python-stdlib       by its name or an ancestor's, or made from an embedded model
a chat template        python-docs-chat
else                   python-docs
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

from attar.checkpoint import paths
from attar.checkpoint.card import Parent
from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.open import Checkpoint
from attar.data.python_text import CHAT, PROSE
from attar.errors import CheckpointError
from attar.progress import SILENT, Progress

T = TypeVar("T")

EMBEDDED = tuple(f"attar:{name}" for name in paths.EMBEDDED)

AUTO, CODE = "auto", "python-stdlib"
_CODE = re.compile(r"(?<!en)(?<!de)(?<!trans)cod(?:e(?!c)|ing|estral)", re.IGNORECASE)  # no encoder, no codec


def fit(settings: T, checkpoint: Checkpoint, progress: Progress = SILENT) -> T:
    """Replace ``auto`` in a settings dataclass with the text that fits the model, and log the choice.

    Also warns of Python source as the text of a model of something else.
    """
    original: Any = settings
    name, reason = fitting(checkpoint)
    if original.data == AUTO:
        advice = "; attar collect magpie writes the model's own" if name == CHAT else ""
        progress.log(f"text: {name}, because {reason} (--data names another{advice})")
        fitted: T = replace(original, data=name)
        return fitted
    if original.data == CODE and name != CODE:
        progress.log(
            f"warning: {CODE} is Python source, but {reason}; {name} fits better, or text of your own"
        )
    return settings


def fitting(checkpoint: Checkpoint) -> tuple[str, str]:
    """The text that fits a model, and the reason."""
    for name in _names(checkpoint):
        if name in EMBEDDED:
            return CODE, f"{name} was trained on it"
        if _CODE.search(name.partition("@")[0].rpartition("/")[2]):
            return CODE, f"{name} is a model of code by its name"
    if _has_chat_template(checkpoint):
        return CHAT, f"{checkpoint.name} has a chat template"
    return PROSE, f"nothing says that {checkpoint.name} is a model of code or of conversations"


def made_from_embedded(checkpoint: Checkpoint) -> bool:
    """Whether the model, or one of its ancestors, comes with attar."""
    return any(name in EMBEDDED for name in _names(checkpoint))


def _names(checkpoint: Checkpoint) -> Iterator[str]:
    """Names of the model and of its ancestors."""
    yield checkpoint.name
    origin = checkpoint.config.get("_name_or_path")
    if isinstance(origin, str):
        yield origin.rstrip("/")
    if checkpoint.card is not None:
        yield from _ancestors(checkpoint.card.parents)


def _ancestors(parents: tuple[Parent, ...]) -> Iterator[str]:
    for parent in parents:
        yield parent.name
        yield from _ancestors(parent.parents)


def _has_chat_template(checkpoint: Checkpoint) -> bool:
    folder = checkpoint.path
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    try:
        return bool(read_json(folder / "tokenizer_config.json").get("chat_template"))
    except CheckpointError:
        return False
