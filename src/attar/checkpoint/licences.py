"""The licences of a checkpoint's ancestors and the duties that follow. Help, not legal advice.

Duties depend on whether an ancestor gave its *weights* or a *signal* (logits, hidden states or text). A
checkpoint has the union of all duties and the strictest of all permissions; a licence that is not in the data
(``licences.yaml``) stays unknown.

The licences of an original model are read from its files: the card, ``license``, ``license_name`` and
``base_model`` in the front matter of README.md, ``license`` in config.json, and the first characters of the
licence text. A name alone (of the model or its base) can add a licence with limits, but never makes an
unknown licence known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import yaml

from attar.checkpoint.card import Parent
from attar.checkpoint.open import Checkpoint
from attar.yaml import safe_values

STATUSES = ("allow", "allow_with_duties", "research_only", "unknown", "block")
"""From the most to the least permissive; several licences together have the last of their statuses."""

UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class LicenceSource:
    """A licence that applies, and the ancestor that carries it.

    Attributes:
        id: its id in the data, or ``unknown``.
        role: ``weights`` or ``signal``.
        model: the ancestor.
        status: its permission for this checkpoint.
        clause: the clause that gives the status, paraphrased in ``says``.
        confidence: how the text was checked: primary, quoted or summary.
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
class Acceptance:
    """A licence that forbids the work, or leaves it open, and the reason why its user went on."""

    id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Duties:
    """The duties of a checkpoint.

    Attributes:
        status: one of :data:`STATUSES`.
        duties: sentences, without repetition.
        display: words that must be shown.
        name_prefix: the prefix that a published name must have, or None.
        sources: the licences that they follow from.
        accepted: the acceptances of the stage and of its ancestors. They change no status.
    """

    status: str
    duties: tuple[str, ...] = ()
    display: tuple[str, ...] = ()
    name_prefix: str | None = None
    sources: tuple[LicenceSource, ...] = ()
    accepted: tuple[Acceptance, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON content."""
        return asdict(self)


def duties(
    lineage: Sequence[Parent], settings: Mapping[str, Any] | None = None, *, student: bool = True
) -> Duties:
    """The duties and the permission that follow from a checkpoint's parents and their ancestors.

    Args:
        settings: of the stage, with ``accept_licence`` and ``reason`` if it takes them.
        student: False where the student is not known yet, as for text that is collected: a licence that
            allows only some students leaves it open.
    """
    roots = list(_roots(lineage, "weights"))
    family = [name for role, root in roots if role == "weights" for name in licence_ids(root)]
    sources: list[LicenceSource] = []
    sentences: list[str] = []
    display: list[str] = []
    prefixes: list[str] = []
    for role, root in roots:
        for name in licence_ids(root):
            entry = entries().get(name)
            known = family if student else None
            status, required = _effect(entry, role, known) if entry else (UNKNOWN, [_unknown_duty(root.name)])
            sources.append(_source(name, entry or {}, role, root.name, status))
            sentences += required
            display += _texts(entry, "display", role)
            prefixes += _texts(entry, "name_prefix", role)
    prefix = max(prefixes, key=len, default=None)
    if prefix:
        sentences.append(f"Begin the name of the published model with {prefix!r}.")
    return Duties(
        status=max((source.status for source in sources), key=STATUSES.index, default=UNKNOWN),
        duties=tuple(dict.fromkeys(sentences)),
        display=tuple(dict.fromkeys(display)),
        name_prefix=prefix,
        sources=tuple(dict.fromkeys(sources)),
        accepted=tuple(dict.fromkeys(_acceptances(lineage, settings or {}))),
    )


def _acceptances(lineage: Sequence[Parent], settings: Mapping[str, Any]) -> Iterator[Acceptance]:
    """Those of a stage's settings, and of its ancestors'."""
    listed, reason = settings.get("accept_licence"), settings.get("reason")
    if isinstance(listed, list | tuple) and isinstance(reason, str) and reason:
        yield from (Acceptance(id=str(name), reason=reason) for name in listed)
    for parent in lineage:
        yield from _acceptances(parent.parents, parent.settings)


@cache
def data() -> dict[str, Any]:
    """The content of ``licences.yaml``: ``version``, ``checked_on``, ``licences``."""
    text = resources.files("attar.checkpoint").joinpath("licences.yaml").read_text(encoding="utf-8")
    content = yaml.safe_load(text)
    assert isinstance(content, dict)
    return content


@cache
def entries() -> dict[str, dict[str, Any]]:
    """The licences of :func:`data` by id, with the rules of their ``like``. Not to be changed."""
    by_id = {entry["id"]: entry for entry in data()["licences"]}
    return {name: _with_rules(entry, by_id) for name, entry in by_id.items()}


def age_in_days(today: date) -> int:
    """Days since the data was checked; terms of services change several times a year."""
    return (today - date.fromisoformat(data()["checked_on"])).days


def _with_rules(entry: dict[str, Any], by_id: dict[str, dict[str, Any]]) -> dict[str, Any]:
    general = by_id.get(entry.get("like", ""), {})
    return {**{role: general[role] for role in ("weights", "signal") if role in general}, **entry}


def _roots(lineage: Sequence[Parent], role: str) -> Iterator[tuple[str, Parent]]:
    """Every root with its role: ``weights`` only if all steps to it are."""
    for parent in lineage:
        along = "signal" if "signal" in (role, parent.role) else "weights"
        if parent.parents:
            yield from _roots(parent.parents, along)
        else:
            yield along, parent


def licence_ids(root: Parent) -> list[str]:
    """Licence ids of a root; a card written by hand may hold a single ``id``."""
    ids = root.licence.get("ids") or [root.licence.get("id") or UNKNOWN]
    return [str(name) for name in ids]


def _effect(entry: dict[str, Any], role: str, family: list[str] | None) -> tuple[str, list[str]]:
    """Status and duties of a licence in a role, for a student whose weights come from ``family``; None: from
    weights that are not known yet."""
    effect = entry.get(role)
    if effect is None:
        return UNKNOWN, [f"{entry['title']}: nothing is known for {role}; find out."]
    required = list(effect.get("duties", []))
    students = effect.get("students")
    if students is not None and family is None:
        allowed = " or ".join(students["family"])
        return UNKNOWN, [*required, f"{entry['title']} allows only students made from {allowed} weights."]
    if students is None or family is None or any(name in students["family"] for name in family):
        return effect["status"], required
    if any(name in students.get("review", []) for name in family):
        return UNKNOWN, [
            *required,
            f"{entry['title']} leaves open whether this student may learn from it; have it reviewed.",
        ]
    allowed = " or ".join(students["family"])
    return "block", [
        *required,
        f"{entry['title']} allows only students made from {allowed} weights to learn from it.",
    ]


def _source(name: str, entry: dict[str, Any], role: str, model: str, status: str) -> LicenceSource:
    texts = {key: str(entry.get(key, "")) for key in ("clause", "says", "released", "source", "confidence")}
    checked = str(data()["checked_on"]) if entry else ""
    title = entry.get("title", "licence unknown")
    return LicenceSource(
        id=name, title=title, role=role, model=model, status=status, checked_on=checked, **texts
    )


def _texts(entry: dict[str, Any] | None, key: str, role: str) -> list[str]:
    """The display words or name prefix that a licence requires in a role: none or one."""
    requirement = (entry or {}).get(key)
    return [requirement["text"]] if requirement and role in requirement["for"] else []


def _unknown_duty(model: str) -> str:
    return f"The licence of {model} is unknown; find out before you publish."


_FRONT = 1 << 20  # characters of a README
_HEAD = 4000  # characters of a licence text that are searched; they contain its title


class _LicenceMatch(NamedTuple):
    id: str
    evidence: str
    declared: bool


def identify(checkpoint: Checkpoint) -> dict[str, Any]:
    """The licences of an original model.

    Returns:
        ``ids``: ids of the data, ``unknown`` first unless a file declares a known licence; ``evidence``: one
        line for each match.
    """
    front = _front_matter(checkpoint.path / "README.md")
    bases = [*_words(front.get("base_model")), *_words(checkpoint.config.get("base_model"))]
    names = [checkpoint.name.split("@")[0], *bases]
    matches = list(_card(checkpoint)) or [
        *_tags("README.md", [*_words(front.get("license")), *_words(front.get("license_name"))], names),
        *_tags("config.json", _words(checkpoint.config.get("license")), names),
        *_licence_texts(checkpoint.path, names),
        *_names(names),
    ]
    ids = [match.id for match in matches]
    if not any(match.declared for match in matches):
        ids.insert(0, UNKNOWN)
    return {"ids": list(dict.fromkeys(ids)), "evidence": [match.evidence for match in matches]}


def hub_tags(ids: Sequence[str]) -> list[str]:
    """Tags of licences as a README has them, those of ``unknown`` left out; each once."""
    known = entries()
    tags = ((known[name].get("tags") or [known[name].get("like", name)])[0] for name in ids if name in known)
    return list(dict.fromkeys(tags))


def identify_service(url: str, model: str) -> dict[str, Any]:
    """The terms of a model behind a network interface, as :func:`identify` gives them.

    The terms of a service are known by its host, and by the names under which it offers its models, also
    where another host passes them on. At any other host the terms of the service are unknown, and the
    licence of the model is added if its name says so.

    Args:
        url: where it answers; "": only the model's name is known.
        model: its name at the service.
    """
    host = (urlsplit(url if "//" in url else f"//{url}").hostname or "").lower()
    matches = [
        _LicenceMatch(licence, f"host {host}", True)
        for licence, entry in entries().items()
        if any(re.search(pattern, host) for pattern in entry.get("hosts", []))
    ]
    matches += [
        _LicenceMatch(licence, f"by name: {model}", False)
        for licence, entry in entries().items()
        if any(re.search(pattern, model.lower()) for pattern in entry.get("models", []))
    ]
    matches += _names([model])
    ids = [match.id for match in matches]
    if not any(match.declared for match in matches):
        ids.insert(0, UNKNOWN)
    return {"ids": list(dict.fromkeys(ids)), "evidence": [match.evidence for match in matches]}


def _card(checkpoint: Checkpoint) -> Iterator[_LicenceMatch]:
    licence = checkpoint.card.licence if checkpoint.card else {}
    for name in licence.get("ids") or _words(licence.get("id")):
        if name in entries():
            yield _LicenceMatch(name, f"attar.json: {name}", True)


def _joined(name: str) -> list[str]:
    """The ids of which a ``license_name`` of attar's own (readme.py) is made, joined by hyphens; empty where
    it is of another's."""
    ids: list[str] = []
    remaining, known = f"{name.lower()}-", sorted(entries(), key=len, reverse=True)
    while remaining:
        licence = next((identifier for identifier in known if remaining.startswith(f"{identifier}-")), None)
        if licence is None:
            return []
        ids.append(licence)
        remaining = remaining.removeprefix(f"{licence}-")
    return ids


def _tags(file: str, tags: list[str], names: list[str]) -> Iterator[_LicenceMatch]:
    """Licences by the tags of a file, or by ids joined in one; ``other`` and ``unknown`` are no licences."""
    for tag in tags:
        joined = _joined(tag)
        for licence in joined if len(joined) > 1 else ():
            yield _LicenceMatch(_refine(licence, names), f"{file}: license {tag}", True)
        for licence, entry in entries().items():
            if tag.lower() in entry.get("tags", []):
                yield _LicenceMatch(_refine(licence, names), f"{file}: license {tag}", True)


def _licence_texts(folder: Path, names: list[str]) -> Iterator[_LicenceMatch]:
    """Licences by phrases at the beginning of the licence texts in the folder."""
    for path in sorted(folder.glob("[Ll][Ii][Cc][Ee][Nn][CcSs][Ee]*")):
        if not path.is_file():
            continue
        with path.open(encoding="utf-8", errors="replace") as file:
            head = _normalized(file.read(_HEAD)).lower()
        for licence, entry in entries().items():
            if any(_normalized(phrase) in head for phrase in entry.get("phrases", [])):
                yield _LicenceMatch(_refine(licence, names), f"{path.name}: text of {entry['title']}", True)


def _normalized(text: str) -> str:
    return " ".join(re.sub(r"[^\w\s.'-]", " ", text).split())


def _names(names: list[str]) -> Iterator[_LicenceMatch]:
    """Licences with terms of their own, by the names of models that carry them."""
    for licence, entry in entries().items():
        for name in names:
            if "like" not in entry and any(re.search(pattern, name) for pattern in entry.get("names", [])):
                yield _LicenceMatch(licence, f"by name: {name}", False)


def _refine(licence: str, names: list[str]) -> str:
    """The family's own entry under a general licence, such as ``gpt-oss`` under ``apache-2.0``."""
    for special, entry in entries().items():
        patterns = entry.get("names", [])
        if entry.get("like") == licence and re.search("|".join(patterns), names[0]):
            return special
    return licence


def _front_matter(path: Path) -> dict[str, Any]:
    """The YAML between the first two ``---`` lines of a README; empty where there is none or it is broken."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            parts = re.split(r"(?m)^---\s*$", file.read(_FRONT), maxsplit=2)
        content = safe_values(parts[1]) if len(parts) == 3 and not parts[0].strip() else {}
    except (OSError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def _words(value: Any) -> list[str]:
    """A field that may be missing, one word or a list of words, as a list."""
    if isinstance(value, list):
        return [str(item) for item in value]
    return [str(value)] if value else []
