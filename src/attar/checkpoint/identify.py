"""Which licences a model carries, as far as its own files say. What they do not say stays unknown.

Looked at: the card, ``license``, ``license_name`` and ``base_model`` in the front matter of README.md,
``license`` in config.json, and the head of the licence text. A name alone (of the model or its base) can add
a licence with limits; it never makes an unknown licence known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from attar.checkpoint.licences import UNKNOWN, entries
from attar.checkpoint.open import Checkpoint

_HEAD = 4000
"""Characters of a licence text that are looked at; its title stands among them."""


class _Finding(NamedTuple):
    id: str
    evidence: str
    declared: bool


def identify(checkpoint: Checkpoint) -> dict[str, Any]:
    """The licences of a model that attar did not derive from another.

    Returns:
        ``ids``: ids of the data, ``unknown`` first unless a file declares a licence that the data knows;
        ``evidence``: one line for each finding.
    """
    front = _front_matter(checkpoint.path / "README.md")
    names = [checkpoint.name.split("@")[0], *_words(front.get("base_model"))]
    findings = list(_card(checkpoint)) or [
        *_tags("README.md", [*_words(front.get("license")), *_words(front.get("license_name"))], names),
        *_tags("config.json", _words(checkpoint.config.get("license")), names),
        *_texts(checkpoint.path, names),
        *_names(names),
    ]
    ids = [finding.id for finding in findings]
    if not any(finding.declared for finding in findings):
        ids.insert(0, UNKNOWN)
    return {"ids": list(dict.fromkeys(ids)), "evidence": [finding.evidence for finding in findings]}


def _card(checkpoint: Checkpoint) -> Iterator[_Finding]:
    licence = checkpoint.card.licence if checkpoint.card else {}
    for known in licence.get("ids") or _words(licence.get("id")):
        if known in entries():
            yield _Finding(known, f"attar.json: {known}", True)


def _tags(file: str, tags: list[str], names: list[str]) -> Iterator[_Finding]:
    """Licences whose tags a file gives; the words ``other`` and ``unknown`` say nothing."""
    for tag in tags:
        for known, entry in entries().items():
            if tag.lower() in entry.get("tags", []):
                yield _Finding(_refine(known, names), f"{file}: license {tag}", True)


def _texts(folder: Path, names: list[str]) -> Iterator[_Finding]:
    """Licences whose words stand at the head of a licence text in the folder."""
    for path in sorted(folder.glob("[Ll][Ii][Cc][Ee][Nn][CcSs][Ee]*")):
        if not path.is_file():
            continue
        with path.open(encoding="utf-8", errors="replace") as file:
            head = " ".join(re.sub(r"[^\w\s.'-]", " ", file.read(_HEAD)).lower().split())
        for known, entry in entries().items():
            phrases = [
                " ".join(re.sub(r"[^\w\s.'-]", " ", phrase).split()) for phrase in entry.get("phrases", [])
            ]
            if any(phrase in head for phrase in phrases):
                yield _Finding(_refine(known, names), f"{path.name}: text of {entry['title']}", True)


def _names(names: list[str]) -> Iterator[_Finding]:
    """Licences with terms of their own that a model of this name, or its base, is known to carry."""
    for known, entry in entries().items():
        for name in names:
            if "like" not in entry and any(re.search(pattern, name) for pattern in entry.get("names", [])):
                yield _Finding(known, f"by name: {name}", False)


def _refine(known: str, names: list[str]) -> str:
    """The entry of this very family under a general licence, such as ``gpt-oss`` under ``apache-2.0``."""
    for special, entry in entries().items():
        patterns = entry.get("names", [])
        if entry.get("like") == known and re.search("|".join(patterns), names[0]):
            return special
    return known


def _front_matter(path: Path) -> dict[str, Any]:
    """The YAML between the first two ``---`` lines of a README; empty where there is none or it is broken."""
    try:
        parts = re.split(r"(?m)^---\s*$", path.read_text(encoding="utf-8", errors="replace"), maxsplit=2)
        content = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else {}
    except (OSError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def _words(value: Any) -> list[str]:
    """A field that may be missing, one word or a list of words, as a list."""
    if isinstance(value, list):
        return [str(item) for item in value]
    return [str(value)] if value else []
