"""What the licences of a checkpoint's ancestors oblige to. Help for a person who decides, not legal advice.

Two questions are asked apart: which models the *weights* come from, and which models gave a *signal* (logits,
hidden states or text count as outputs). The answer for the checkpoint is the union of all duties and the meet
of all permissions; what is unknown stays unknown. The rules are data: ``licences.yaml``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import cache
from importlib import resources
from typing import Any

import yaml

from attar.checkpoint.card import Parent

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
