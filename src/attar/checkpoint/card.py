"""The card ``attar.json``: lineage, settings, measurements and licence duties of a checkpoint.

The card holds the whole lineage as nested :class:`Parent` records, so that it can be read without the
parents' folders. A card holds no time and no date: the same work writes the same card.
"""

from __future__ import annotations

import dataclasses
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from attar.checkpoint.atomic import write_json
from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.names import is_relative_name
from attar.errors import CheckpointError
from attar.version import __version__

FILE = "attar.json"
VERSION = 1
ROLES = ("weights", "signal")


@dataclass(frozen=True, kw_only=True)
class Parent:
    """One ancestor of a checkpoint, with its own ancestors.

    Attributes:
        role: ``weights``: the child's weights were made of it; ``signal``: the child learned from its
            outputs.
        name: ``attar:tiny``, ``org/name@revision`` or the folder's name.
        stage: the verb that made it; ``original`` for a model that attar did not make.
        fingerprint: hash of its config, weights and tokenizer.
        licence: of a root: ``ids`` and ``evidence``; empty for a checkpoint that attar made.
        unknown: fields that this version does not know; written again as they are.
    """

    role: str
    name: str
    stage: str
    settings: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    fingerprint: str = ""
    licence: dict[str, Any] = field(default_factory=dict)
    parents: tuple[Parent, ...] = ()
    unknown: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Card:
    """The content of ``attar.json``.

    Attributes:
        stage: the verb that made it.
        settings: the settings of that stage, every one of them.
        key: identity of the work: hash of stage, code version, settings and inputs.
        versions: of attar, python, torch and transformers.
        files: name of a file below the folder to SHA-256, without the card itself.
        measurements: results of ``attar evaluate``.
        details: results of the stage, such as ``layers`` and ``curve``.
        licence: duties that follow from the lineage; for a root, ``ids`` of its own licences.
        command: a command line that makes the checkpoint again.
        unknown: fields that this version does not know; written again as they are.
    """

    name: str
    stage: str
    settings: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    key: str = ""
    parents: tuple[Parent, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    measurements: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    licence: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    unknown: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Card | None:
        """The card of a folder, or None where there is none.

        Raises:
            CheckpointError: ``attar.json`` is damaged, or of a later attar.
        """
        path = folder / FILE
        return cls.from_dict(read_json(path), path) if path.is_file() else None

    @classmethod
    def from_dict(cls, content: dict[str, Any], path: Path = Path(FILE)) -> Card:
        """The inverse of :meth:`to_dict`. Raises as :meth:`read`, naming ``path``."""
        if content.get("attar") != VERSION:
            raise CheckpointError(
                f"{path}: card version {content.get('attar')!r}, this attar reads version {VERSION}",
                hint="upgrade attar, or delete the card: the model loads without it",
            )
        fields = _known(cls, content, path)
        fields["parents"] = tuple(_parent(item, path) for item in fields.get("parents", ()))
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """JSON content; NaN and infinity become null."""
        return {"attar": VERSION, **_with_unknown(plain(dataclasses.asdict(self)))}

    def write(self, folder: Path) -> None:
        """Write ``attar.json`` into a folder. Raises OutputError."""
        write_json(folder / FILE, self.to_dict())

    def with_measurements(self, **measurements: Any) -> Card:
        """A new card with these measurements added; one of the same name is replaced."""
        return dataclasses.replace(self, measurements={**self.measurements, **measurements})

    def as_parent(self, role: str, fingerprint: str = "") -> Parent:
        """The record that a child keeps of this checkpoint."""
        return Parent(
            role=role,
            name=self.name,
            stage=self.stage,
            settings=self.settings,
            seed=self.seed,
            fingerprint=fingerprint,
            licence=self.licence if not self.parents else {},
            parents=self.parents,
        )


def _with_unknown(content: dict[str, Any]) -> dict[str, Any]:
    """A record with its unknown fields among the others, and so its parents."""
    content["parents"] = [_with_unknown(parent) for parent in content["parents"]]
    unknown: dict[str, Any] = content.pop("unknown")
    return content | unknown


def versions(packages: Sequence[str] = ("torch", "transformers")) -> dict[str, str]:
    """Versions of attar, Python and packages. Imports none of them."""
    programs = {"attar": __version__, "python": platform.python_version()}
    return programs | {name: _version(name) for name in packages}


def plain(value: Any) -> Any:
    """A value as JSON: tuples become lists, paths texts, tensors numbers, NaN None."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)


@cache
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _parent(content: Any, path: Path) -> Parent:
    if not isinstance(content, dict) or content.get("role") not in ROLES:
        raise CheckpointError(f"{path}: a parent without a role ({' or '.join(ROLES)})")
    fields = _known(Parent, content, path)
    fields["parents"] = tuple(_parent(item, path) for item in fields.get("parents", ()))
    return Parent(**fields)


def _known(kind: type, content: dict[str, Any], path: Path) -> dict[str, Any]:
    """The checked fields of a record, those of other versions under ``unknown``; ``name`` and ``stage`` are
    required."""
    known = {item.name for item in dataclasses.fields(kind)} - {"unknown"}
    fields = {name: value for name, value in content.items() if name in known}
    for name in ("name", "stage"):
        if name not in fields:
            raise _damaged(path, f"no {name}")
    for name, value in fields.items():
        allowed, fits = _KINDS[name]
        if not fits(value):
            raise _damaged(path, f"{name} is {_shown(value)}, but must be {allowed}")
    unknown = {name: value for name, value in content.items() if name not in known and name != "attar"}
    return {**fields, "unknown": unknown}


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


def _is_text_map(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


def _is_file_map(value: Any) -> bool:
    return _is_text_map(value) and all(is_relative_name(name) for name in value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_licence(value: Any) -> bool:
    """The licence of a root, or the duties of a child; only ids and evidence are read again."""
    if not isinstance(value, dict) or not isinstance(value.get("id", ""), str):
        return False
    lists = [value.get(name, []) for name in ("ids", "evidence")]
    return all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in lists)


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("name", "stage", "role", "key", "fingerprint", "command"), ("a text", _is(str))),
    **dict.fromkeys(("settings", "measurements", "details"), ("an object", _is(dict))),
    "versions": ("an object of texts", _is_text_map),
    "files": ("an object of texts, by names of files below the folder", _is_file_map),
    "seed": ("a whole number", _is_int),
    "parents": ("a list", _is(list)),
    "licence": ("an object whose ids and evidence are lists of texts", _is_licence),
}
"""The allowed value of each field, in words and as a check."""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _damaged(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: {problem}", hint="the card is damaged; delete it: the model loads without it"
    )
