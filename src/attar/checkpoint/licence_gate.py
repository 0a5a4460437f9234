"""Refuse work that the licence of a teacher or of a parent forbids, before it begins.

A lineage whose status is ``block`` (see licences.py) stops with the clause, its date and its source, unless
the settings accept the licence and give a reason, or an ancestor's did. Acceptance and reason are settings of
the stage, so they are in its card and go on into the cards of what is made from it. What is research only or
unknown is a warning, duties are printed. The data of the licences ages: it warns of that too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date

from attar.checkpoint.card import Parent
from attar.checkpoint.licences import UNKNOWN, Duties, LicenceSource, age_in_days, duties, entries
from attar.errors import LicenceError, SettingsError, did_you_mean
from attar.options import flatten, setting
from attar.progress import Progress

STALE_DAYS = 180
"""Age of the data from which on it is pointed out: terms of services change several times a year."""


@dataclass(frozen=True, kw_only=True)
class LicenceSettings:
    """The acceptance of licences that forbid the work."""

    accept_licence: tuple[str, ...] = setting(
        (), "id of a licence that forbids this, where you have a right of your own; --reason too"
    )
    reason: str = setting("", "why its licence is accepted: the card and every later card keep it")

    def __post_init__(self) -> None:
        if self.accept_licence and not self.reason.strip():
            raise SettingsError("reason", self.reason, f"given, to accept {', '.join(self.accept_licence)}")
        if self.reason and not self.accept_licence:
            raise SettingsError("accept_licence", (), "the id of the licence that the reason is for")
        for name in self.accept_licence:
            if name not in (*entries(), UNKNOWN):
                raise SettingsError(
                    "accept_licence", name, f"the id of a licence{did_you_mean(name, list(entries()))}"
                )


def check_licences(
    lineage: Sequence[Parent],
    settings: LicenceSettings,
    progress: Progress,
    *,
    student: bool = True,
    today: date | None = None,
) -> Duties:
    """Refuse a stage that a licence of its lineage forbids; print warnings and duties.

    Args:
        lineage: the parents of what will be made, with their roles.
        student: False where the student is not known yet (see :func:`attar.checkpoint.licences.duties`).
        today: the day of the check; None: today.

    Returns:
        the duties of what will be made.

    Raises:
        LicenceError: a licence forbids the work, and none of the settings accepts it; names the clause.
    """
    outcome = duties(lineage, flatten(settings), student=student)
    accepted = {acceptance.id for acceptance in outcome.accepted}
    blocking = [source for source in outcome.sources if source.status == "block"]
    for source in blocking:
        if source.id not in accepted:
            raise refusal(source)
    for line in dict.fromkeys(_lines(outcome, today or date.today())):
        progress.log(line)
    return outcome


def refusal(source: LicenceSource) -> LicenceError:
    """The error for a licence that forbids the work."""
    entry = entries()[source.id]
    dates = " to ".join(dict.fromkeys(str(entry[key]) for key in ("released", "revised") if key in entry))
    what = "a model to learn from its outputs" if source.role == "signal" else "this use of its weights"
    clause = f"{source.clause}; {dates}" if dates else source.clause
    return LicenceError(
        f"{source.model}: {source.title} ({clause}) does not allow {what}: {source.says.rstrip('.')}",
        hint=f"another teacher or parent, or, with a right of your own, --accept-licence {source.id} "
        f"--reason TEXT (source: {source.source}, looked at on {source.checked_on})",
    )


def _lines(outcome: Duties, today: date) -> Iterator[str]:
    for acceptance in outcome.accepted:
        yield f"licence {acceptance.id} is accepted: {acceptance.reason}"
    for source in outcome.sources:
        if source.status == "research_only":
            yield f"warning: {source.model}: {source.title} ({source.clause}): for research only"
        if source.status == UNKNOWN:
            clause = f" ({source.clause})" if source.clause else ""
            yield f"warning: {source.model}: {source.title}{clause}: nothing says that this is allowed"
    yield from (f"duty: {duty}" for duty in outcome.duties)
    yield from (f"duty: Show the words {text!r}." for text in outcome.display)
    if (days := age_in_days(today)) > STALE_DAYS:
        yield f"warning: attar's data of licences is {days} days old: look at the terms again"
