"""Settings of every verb that reads text: the source, BOS, the seed. Free of torch."""

from __future__ import annotations

from typing import Any

from attar.errors import SettingsError
from attar.options import setting

BOS = ("auto", "always", "never")
LARGEST_SEED = 2**63 - 1

SOURCES = (
    "auto (what fits the model), python-docs, python-docs-chat, python-stdlib, FILE, FOLDER, "
    "JSONL[:field], a hub data set, or a mixture: SOURCE + SOURCE"
)


def data_field() -> Any:
    """The dataclass field ``data``."""
    return setting("auto", SOURCES)


def bos_field() -> Any:
    """The dataclass field ``bos``."""
    return setting(
        "auto",
        "the tokenizer's BOS in front of every row; auto: where the tokenizer itself puts one",
        choices=BOS,
    )


def check_text(settings: Any) -> None:
    """Check ``data``, ``bos`` and ``seed`` of a settings dataclass that has them.

    Raises:
        SettingsError: names the wrong one.
    """
    names = [part.strip().removeprefix("whole:").partition(":")[0] for part in settings.data.split(" + ")]
    if not all(map(str.strip, names)) or ("auto" in names and names != ["auto"]) or "\0" in settings.data:
        raise SettingsError("data", settings.data, SOURCES)
    if settings.bos not in BOS:
        raise SettingsError("bos", settings.bos, "auto, always or never")
    if not 0 <= settings.seed <= LARGEST_SEED:
        raise SettingsError("seed", settings.seed, "a whole number from 0 to 2^63 - 1")
