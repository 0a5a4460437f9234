"""File names from outside (a card, an index, a receipt, a store's listing), and links in a model's folder.

A name becomes a path only if it names a file below its folder. A file that a link leads out of the
folder to is not the model's: what attar copies or uploads would be any file of the user. Only the hub's cache
has such links, from a snapshot to its blobs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from attar.errors import CheckpointError

LONGEST = 240
"""Bytes of a name: file systems allow 255 for ``.NAME.partial``."""

_OURS = re.compile(r"\..*\.(partial|received|work|old|lock|verified|folder|whole|rank-\d+)")


def is_file_name(name: object) -> bool:
    """Whether it is the name of a file in a folder: no path, no control characters, none of the hidden names
    that attar itself writes to (``atomic.hidden``)."""
    if not isinstance(name, str) or name in ("", ".", "..") or not name.isprintable():
        return False
    return not re.search(r"[/\\]", name) and len(name.encode()) <= LONGEST and not _OURS.fullmatch(name)


def is_relative_name(name: object) -> bool:
    """Whether it is the name of a file in a folder or in one of its subfolders, as ``head/config.json``."""
    return isinstance(name, str) and all(is_file_name(part) for part in name.split("/"))


def check_links(folder: Path, names: Iterable[str]) -> None:
    """Refuse files of a model that are links to elsewhere.

    Raises:
        CheckpointError: names the first of them.
    """
    root = Path(os.path.realpath(folder))
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else None
    for name in names:
        real = Path(os.path.realpath(folder / name))
        if not real.is_relative_to(root) and real.parent != blobs:
            raise CheckpointError(
                f"{folder / name}: is a link to {real}, outside the model's folder",
                hint="if it belongs to the model, put a copy of the file in place of the link",
            )
