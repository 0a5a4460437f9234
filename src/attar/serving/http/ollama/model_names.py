"""Names as Ollama writes them, ``family:tag``: without a tag it is ``latest``, and case does not count."""

from __future__ import annotations

from collections.abc import Iterable

LATEST = ":latest"


def tagged(name: str) -> str:
    """The name with a tag: ``small`` is ``small:latest``; ``attar:tiny`` has one."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def find_model(name: str, names: Iterable[str]) -> str | None:
    """The model that a client means by a name; None: there is none. The same spelling goes first."""
    candidates = list(names)
    if name in candidates:
        return name
    wanted = tagged(name).casefold()
    return next((candidate for candidate in candidates if tagged(candidate).casefold() == wanted), None)
