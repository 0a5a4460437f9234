"""What a client may name: paths below the folders of ``attar mcp FOLDER...``, followed through their links.

Relative paths begin at the first folder, which is the working directory of the server and of its processes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attar.checkpoint.paths import FILES
from attar.checkpoint.remote import HUB, is_remote
from attar.data.sources import read_text
from attar.errors import UsageError
from attar.yaml import parse_documents, parse_yaml

ENTRIES = 100_000
"""Files and folders below one that is named; more are refused unread."""

LARGEST = 2**20
"""Bytes of a recipe."""

_EMBEDDED = re.compile(r"attar:[\w-]+")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_SEPARATORS = re.compile(r"[\s,;:|=\"'()\[\]{}<>]+")


@dataclass(frozen=True)
class Folders:
    """Folders, and whether the hub is open too.

    Args:
        roots: real paths; the first is where relative ones begin.
    """

    roots: tuple[Path, ...]
    hub: bool = False

    @classmethod
    def of(cls, names: list[str], *, hub: bool) -> Folders:
        """Of a command line. Raises UsageError."""
        for name in names:
            if not Path(name).is_dir():
                raise UsageError(f"{name}: no such folder", hint="attar mcp FOLDER")
        return cls(tuple(dict.fromkeys(Path(os.path.realpath(name)) for name in names)), hub)

    def inside(self, text: str, base: Path | None = None) -> Path:
        """The path that a client names; it need not exist.

        Args:
            base: where relative ones begin; None: at the first folder.

        Raises:
            UsageError: it, or what it links to, lies outside.
        """
        if not text.strip() or "\0" in text:
            raise UsageError(f"{text!r}: is no path", hint=self._hint())
        path = (base or self.roots[0]) / os.path.expanduser(text)  # noqa: PTH111 (never raises)
        if not self._holds(path):
            raise UsageError(f"{text}: is outside of the folders of this server", hint=self._hint())
        named = Path(os.path.realpath(path.parent), path.name)  # a single file keeps its suffix
        return named if self._holds(named.parent) else Path(os.path.realpath(path))

    def tree(self, text: str) -> Path:
        """The same; no link below it, or beside a single file, leads outside either. Raises UsageError."""
        path = self.inside(text)
        parts = path.parent.glob(f"*{path.suffix}") if path.suffix.lower() in FILES else ()
        for entry in [*_entries(path), *parts]:
            if entry.is_symlink() and not self._holds(entry):
                raise UsageError(
                    f"{entry}: links out of the folders of this server", hint="copy the file there"
                )
        return path

    def model(self, text: str) -> str:
        """A model: a folder or file inside, ``attar:tiny``, or with the hub open ``org/name``.

        Raises:
            UsageError: none of these.
        """
        if _EMBEDDED.fullmatch(text):
            return text
        if is_remote(text):
            if self.hub and text.startswith(HUB):
                return text
            raise UsageError(f"{text}: this server fetches nothing from there", hint=self._hint())
        path = self.tree(text)
        if _HUB_ID.fullmatch(text) and not path.exists() and not path.parent.is_dir():
            if self.hub:
                return text
            hint = "a folder of it, or start the server with --hub"
            raise UsageError(f"{text}: no such folder, and this server asks no hub", hint=hint)
        return str(path)

    def output(self, text: str) -> Path:
        """A folder to write. Raises UsageError."""
        path = self.inside(text)
        if is_remote(text) or path in self.roots:
            raise UsageError(f"{text}: is no new folder", hint=self._hint())
        return path

    def check(self, value: object) -> None:
        """Refuse settings with a word that names a file or folder outside. Raises UsageError."""
        if isinstance(value, Mapping):
            for key, item in value.items():
                self.check(key)
                self.check(item)
        elif isinstance(value, list | tuple):
            for item in value:
                self.check(item)
        elif isinstance(value, str):
            for word in dict.fromkeys([value.strip(), *_SEPARATORS.split(value)]):
                self._check_word(word)

    def recipe(self, text: str) -> Path:
        """A recipe, whose values name nothing outside; nor do those of its merges' configurations.

        Raises:
            UsageError: it does, or there is no such file.
            RecipeError: it is not well-formed.
        """
        path = self.inside(text)
        content = self._values(path)
        stages = content.get("stages") if isinstance(content, dict) else None
        for stage in stages if isinstance(stages, list) else []:
            config = stage.get("config") if isinstance(stage, dict) else None
            if isinstance(config, str) and "\n" in config:
                self.check([root.plain() for root in parse_documents(config, str(path))])
            elif isinstance(config, str):
                for base in (path.parent, self.roots[0]):
                    if os.path.isfile(base / config):  # noqa: PTH113 (Path's raises at long names)
                        self._values(self.inside(config, base), several=True)
        return path

    def _values(self, path: Path, *, several: bool = False) -> Any:
        """The content of a YAML file, checked."""
        if not path.is_file() or path.stat().st_size > LARGEST:
            raise UsageError(f"{path}: no such recipe", hint=f"a YAML file of at most {LARGEST >> 20} MiB")
        text = read_text(path)
        documents = parse_documents(text, str(path)) if several else [parse_yaml(text, str(path))]
        content = [document.plain() for document in documents]
        self.check(content)
        return content[0] if content else None

    def _check_word(self, word: str) -> None:
        if not word or "\n" in word or _EMBEDDED.fullmatch(word):
            return
        if "/" in word or word.startswith(("~", "..")) or os.path.lexists(self.roots[0] / word):
            self.tree(word)

    def _holds(self, path: Path) -> bool:
        real = Path(os.path.realpath(path))
        return any(real.is_relative_to(root) for root in self.roots)

    def _hint(self) -> str:
        return f"paths below {' or '.join(map(str, self.roots))}"


def _entries(path: Path) -> Iterator[Path]:
    """Everything below a folder; links are not followed. Raises UsageError."""
    count = 0
    for folder, names, files in os.walk(path):
        count += len(names) + len(files)
        if count > ENTRIES:
            raise UsageError(f"{path}: holds more than {ENTRIES:,} files", hint="name the model's own folder")
        for name in (*names, *files):
            yield Path(folder, name)
