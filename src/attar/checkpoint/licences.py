"""What the licences of a checkpoint's ancestors oblige to. Help for a person who decides, not legal advice.

Two questions are asked apart: which models the *weights* come from, and which models gave a *signal* (logits,
hidden states or text count as outputs). The answer for the checkpoint is the union of all duties and the meet
of all permissions; what is unknown stays unknown. The rules are data: ``licences.yaml``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from attar.checkpoint.card import Parent
from attar.checkpoint.open import Checkpoint

STATUSES = ("allow", "allow_with_duties", "research_only", "unknown", "block")
"""From the most to the least that is permitted; the meet of several is the last of them in this order."""

UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class LicenceSource:
    """One licence that applies, and through which ancestor.

    Attributes:
        id: its id in the data, or ``unknown``.
        title: its name.
        role: ``weights`` or ``signal``.
        model: the ancestor that carries it.
        status: what it permits for this checkpoint.
        clause: where its text says so.
        says: what it says there, in our words.
        released: date of the text.
        source: where the text is.
        checked_on: when that was last looked at.
        confidence: primary, quoted or summary: how it was looked at.
    """

    id: str
    title: str
    role: str
    model: str
    status: str
    clause: str = ""
    says: str = ""
    released: str = ""
    source: str = ""
    checked_on: str = ""
    confidence: str = ""


@dataclass(frozen=True, kw_only=True)
class Duties:
    """What a checkpoint obliges to.

    Attributes:
        status: one of :data:`STATUSES`.
        duties: what to do, each once.
        display: words that must be shown.
        name_prefix: how its name must begin when it is published, or None.
        sources: the licences behind it.
    """

    status: str
    duties: tuple[str, ...] = ()
    display: tuple[str, ...] = ()
    name_prefix: str | None = None
    sources: tuple[LicenceSource, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON content."""
        return asdict(self)


def duties(lineage: Sequence[Parent]) -> Duties:
    """The union of duties and the meet of permissions over a lineage.

    Args:
        lineage: the direct parents of a checkpoint, each with its own ancestors.
    """
    roots = list(_roots(lineage, "weights"))
    family = [known for role, root in roots if role == "weights" for known in licence_ids(root)]
    sources: list[LicenceSource] = []
    words: list[str] = []
    display: list[str] = []
    prefixes: list[str] = []
    for role, root in roots:
        for known in licence_ids(root):
            entry = entries().get(known)
            status, asked = _effect(entry, role, family) if entry else (UNKNOWN, [_find_out(root.name)])
            sources.append(_source(known, entry or {}, role, root.name, status))
            words += asked
            display += _texts(entry, "display", role)
            prefixes += _texts(entry, "name_prefix", role)
    prefix = max(prefixes, key=len, default=None)
    if prefix:
        words.append(f"Begin the name of the published model with {prefix!r}.")
    return Duties(
        status=max((source.status for source in sources), key=STATUSES.index, default=UNKNOWN),
        duties=tuple(dict.fromkeys(words)),
        display=tuple(dict.fromkeys(display)),
        name_prefix=prefix,
        sources=tuple(dict.fromkeys(sources)),
    )


@cache
def data() -> dict[str, Any]:
    """The content of ``licences.yaml``: ``version``, ``checked_on``, ``licences``."""
    text = resources.files("attar.checkpoint").joinpath("licences.yaml").read_text(encoding="utf-8")
    content = yaml.safe_load(text)
    assert isinstance(content, dict)
    return content


@cache
def entries() -> dict[str, dict[str, Any]]:
    """The licences of :func:`data` by id, the rules named by ``like`` filled in. Not to be changed."""
    plain = {entry["id"]: entry for entry in data()["licences"]}
    return {name: _with_rules(entry, plain) for name, entry in plain.items()}


def age_in_days(today: date) -> int:
    """Days since the data was last checked. Terms of services change several times a year."""
    return (today - date.fromisoformat(data()["checked_on"])).days


def _with_rules(entry: dict[str, Any], plain: dict[str, dict[str, Any]]) -> dict[str, Any]:
    general = plain.get(entry.get("like", ""), {})
    return {**{role: general[role] for role in ("weights", "signal") if role in general}, **entry}


def _roots(lineage: Sequence[Parent], role: str) -> Iterator[tuple[str, Parent]]:
    """Every root with its role: ``weights`` only when each step on the way to it is."""
    for parent in lineage:
        along = "signal" if "signal" in (role, parent.role) else "weights"
        if parent.parents:
            yield from _roots(parent.parents, along)
        else:
            yield along, parent


def licence_ids(root: Parent) -> list[str]:
    """Licence ids of a root; a card written by hand may hold a single ``id``."""
    ids = root.licence.get("ids") or [root.licence.get("id") or UNKNOWN]
    return [str(known) for known in ids]


def _effect(entry: dict[str, Any], role: str, family: list[str]) -> tuple[str, list[str]]:
    """Status and duties of a licence in a role, for a student whose weights come from ``family``."""
    effect = entry.get(role)
    if effect is None:
        return UNKNOWN, [f"{entry['title']}: nothing is known for {role}; find out."]
    asked = list(effect.get("duties", []))
    students = effect.get("students")
    if students is None or any(known in students["family"] for known in family):
        return effect["status"], asked
    if any(known in students.get("review", []) for known in family):
        return UNKNOWN, [
            *asked,
            f"{entry['title']} leaves open whether this student may learn from it; have it reviewed.",
        ]
    allowed = " or ".join(students["family"])
    return "block", [
        *asked,
        f"{entry['title']} allows only students made from {allowed} weights to learn from it.",
    ]


def _source(known: str, entry: dict[str, Any], role: str, model: str, status: str) -> LicenceSource:
    texts = {key: str(entry.get(key, "")) for key in ("clause", "says", "released", "source", "confidence")}
    checked = str(data()["checked_on"]) if entry else ""
    title = entry.get("title", "licence unknown")
    return LicenceSource(
        id=known, title=title, role=role, model=model, status=status, checked_on=checked, **texts
    )


def _texts(entry: dict[str, Any] | None, key: str, role: str) -> list[str]:
    """The display words or name prefix that a licence asks for in a role: none or one."""
    asked = (entry or {}).get(key)
    return [asked["text"]] if asked and role in asked["for"] else []


def _find_out(model: str) -> str:
    return f"The licence of {model} is unknown; find out before you publish."


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
        *_licence_texts(checkpoint.path, names),
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


def _licence_texts(folder: Path, names: list[str]) -> Iterator[_Finding]:
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
