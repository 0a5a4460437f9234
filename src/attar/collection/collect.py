"""One collection: requests, what the journal has of them, the teacher for the rest, filters, the data.

OUT.jsonl            a line for each answer that the filters keep, in the order of the prompts
OUT.jsonl.card.json  its card: teacher, settings, counts, cost, licences
OUT.jsonl.journal    every answer, in the order of arrival; stays, so that nothing is asked twice
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from attar.checkpoint import atomic
from attar.checkpoint.card import Card, Parent, versions
from attar.checkpoint.hashing import identity, sha256_file
from attar.checkpoint.licence_gate import check_licences
from attar.checkpoint.licences import duties
from attar.checkpoint.lineage import root_licences
from attar.checkpoint.open import Checkpoint
from attar.cluster.settings import ClusterSettings
from attar.collection.cost import CollectionEstimate, estimate, price, row_tokens
from attar.collection.crew import Crew, RunTally
from attar.collection.event_loop import interrupts, run_to_end
from attar.collection.filters.run import FilterSummary, filter_rows
from attar.collection.journal import SUFFIX, Journal, open_journal
from attar.collection.magpie import MAGPIE, is_magpie, magpie_prompt
from attar.collection.prompts import read_prompts
from attar.collection.requests import TeacherRequest, make_requests
from attar.collection.settings import VERSION, CollectSettings
from attar.collection.systems import read_mixture, with_system
from attar.collection.teachers import Teacher
from attar.collection.teachers.endpoint import EndpointTeacher, is_url
from attar.data.provenance import card_path, provenance, read_card
from attar.data.sources import check_messages, json_rows
from attar.errors import DataError, EndpointError, SettingsError, UsageError
from attar.options import flatten
from attar.progress import SILENT, Progress

EXAMPLES = 3  # of refused requests, in messages


@dataclass(frozen=True)
class CollectionResult:
    """A finished collection.

    Attributes:
        answers: in the journal, of this collection's requests.
        refused: requests that the teacher gave no answer to.
        sent: requests of this run.
        cost: of the answers, by the prices given; None without prices.
        spent: by all runs into this journal.
    """

    path: Path
    requests: int
    answers: int
    refused: int
    sent: int
    prompt_tokens: int
    answer_tokens: int
    cost: float | None
    spent: float
    filters: FilterSummary

    def to_dict(self) -> dict[str, Any]:
        """JSON content."""
        return {**asdict(self), "path": str(self.path), "filters": self.filters.to_dict()}


def collect(
    prompts: Path,
    out: Path,
    teacher: str | Path | Checkpoint,
    settings: CollectSettings,
    *,
    cluster: ClusterSettings | None = None,
    offline: bool = False,
    force: bool = False,
    progress: Progress = SILENT,
) -> CollectionResult:
    """Ask a teacher, and write its answers.

    Args:
        prompts: file of the prompts, as ``settings.prompts.read_as`` says; ``magpie``: a model writes them.
        out: the data, a file that ends with ``.jsonl``.
        teacher: an endpoint's URL, or a model.
        cluster: where a model runs; None: in this process.
        offline: ask nothing: write what the journal has.

    Raises:
        AttarError: see errors.py; the journal keeps what was answered.
        KeyboardInterrupt: after Ctrl-C, when the answers on their way have come.
    """
    _check_out(out, prompts, force)
    source = _teacher(teacher, settings, cluster)
    lineage = (source.lineage(),)
    check_licences(lineage, settings.licence, progress, student=False)
    requests = _requests(prompts, source, settings)
    filter_rows([], settings.filters)  # a file of theirs that cannot be read is refused now
    out.parent.mkdir(parents=True, exist_ok=True)
    with open_journal(_journal_path(out)) as journal:
        before = _estimate(requests, journal, settings)
        progress.log(before.text())
        tally = RunTally()
        if not offline:
            tally = _ask(source, requests, journal, settings, before.spent, progress)
        rows = [journal.row(request.id) for request in requests if request.id in journal]
        if not rows:
            raise DataError(f"{out}: no request has an answer", hint=_first(tally.refused))
        spent = _spent(journal, settings)
    counts = _counts(requests, rows, len(tally.refused), settings)
    summary = _write(out, rows, lineage, settings, {"prompts": prompts.name, **counts}, progress)
    return CollectionResult(path=out, sent=tally.sent, spent=spent, filters=summary, **counts)


def plan_collection(
    prompts: Path, out: Path, teacher: str | Path | Checkpoint, settings: CollectSettings
) -> CollectionEstimate:
    """What a collection would ask and cost at most; nothing is asked, and nothing written.

    Raises:
        AttarError: as :func:`collect`, before its first request.
    """
    source = _teacher(teacher, settings)
    check_licences([source.lineage()], settings.licence, SILENT, student=False)
    requests = _requests(prompts, source, settings)
    filter_rows([], settings.filters)
    return _estimate(requests, Journal(_journal_path(out)), settings)


def filter_collection(
    data: Path, out: Path, settings: CollectSettings, *, force: bool = False, progress: Progress = SILENT
) -> CollectionResult:
    """Filter answers that are there: a collection, its journal, or any JSON lines of ``messages``.

    Raises:
        AttarError: a row is no conversation that ends with an answer; see errors.py.
    """
    _check_out(out, data, force)
    rows = list(_collected_rows(data))
    if not rows:
        raise DataError(f"{data}: no row in it")
    lineage = _lineage_of_data(data)
    check_licences(lineage, settings.licence, progress, student=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    counts = _counts(rows, [row for row in rows if "messages" in row], 0, settings)
    summary = _write(out, rows, lineage, settings, {"data": data.name, **counts}, progress)
    return CollectionResult(path=out, sent=0, spent=0.0, filters=summary, **counts)


def _check_out(out: Path, source: Path, force: bool) -> None:
    """Refuse a bad output before any work."""
    if out.suffix != ".jsonl":
        raise SettingsError("out", str(out), "a name that ends with .jsonl, as --data reads it")
    atomic.check_file(out, force)
    if out.exists() and source.exists() and out.samefile(source):
        raise SettingsError("out", str(out), "another file than the one that is read")


def _teacher(
    teacher: str | Path | Checkpoint, settings: CollectSettings, cluster: ClusterSettings | None = None
) -> Teacher:
    if cluster is not None and cluster.jobs > 1 and not cluster.on:
        raise SettingsError(
            "jobs", cluster.jobs, "1 without --on: one engine answers many requests at a time"
        )
    if isinstance(teacher, str) and is_url(teacher):
        if cluster is not None and cluster.on:
            raise SettingsError("on", cluster.on, "left out: the teacher is an endpoint")
        return EndpointTeacher(teacher, settings)
    if settings.endpoint.model:
        raise SettingsError("model", settings.endpoint.model, "left out: --teacher names a model, not an URL")
    from attar.checkpoint.open import open_checkpoint
    from attar.collection.teachers.local import LocalTeacher

    if cluster is not None and cluster.on:
        from attar.collection.teachers.cluster import ClusterTeacher

        return ClusterTeacher(open_checkpoint(teacher), settings, cluster)
    return LocalTeacher(open_checkpoint(teacher), settings)


def _requests(prompts: Path, teacher: Teacher, settings: CollectSettings) -> list[TeacherRequest]:
    weights = read_mixture(settings.prompts.systems)
    if is_magpie(prompts):
        if isinstance(teacher, EndpointTeacher):
            raise UsageError(
                f"{MAGPIE} needs a model as teacher: an endpoint lets nobody begin the user's words",
                hint="--teacher a folder, a hub id or attar:tiny; or a file of prompts",
            )
        plain = [magpie_prompt()]
    else:
        plain = read_prompts(prompts, settings.prompts, settings.seed)
    chats = [with_system(prompt, weights, settings.seed) for prompt in plain]
    return make_requests(chats, settings, teacher.identity, seeded=teacher.seeded)


def _journal_path(out: Path) -> Path:
    return out.with_name(out.name + SUFFIX)


def _estimate(
    requests: Sequence[TeacherRequest], journal: Journal, settings: CollectSettings
) -> CollectionEstimate:
    return estimate(requests, lambda id: id in journal, settings, _spent(journal, settings))


def _spent(journal: Journal, settings: CollectSettings) -> float:
    return sum(price(settings.cost, *row_tokens(row)) for row in journal.rows())


def _ask(
    teacher: Teacher,
    requests: Sequence[TeacherRequest],
    journal: Journal,
    settings: CollectSettings,
    spent: float,
    progress: Progress,
) -> RunTally:
    """Ask what the journal lacks.

    Raises:
        AttarError: the run ended early, or some requests had no answer.
        KeyboardInterrupt: after Ctrl-C.
    """
    missing = [request for request in requests if request.id not in journal]
    if not missing:
        return RunTally()
    teacher.prepare()
    if isinstance(teacher, EndpointTeacher) and teacher.exposed_key:
        progress.log(f"warning: the key goes to {teacher.host} over http, which encrypts nothing")
    with progress.task("collect", total=len(requests), done=len(requests) - len(missing)) as task:
        crew = Crew(teacher, settings, journal, spent, task)
        run_to_end(_ask_all(crew, missing, teacher, progress))
    if crew.reason is not None:
        raise crew.reason
    if crew.tally.given_up:
        raise EndpointError(
            f"{len(crew.tally.given_up)} of {len(requests)} requests have no answer: "
            f"{_first(crew.tally.given_up)}",
            hint="run the same command again: only they are asked",
        )
    if crew.tally.refused:
        progress.log(f"{len(crew.tally.refused)} requests were refused: {_first(crew.tally.refused)}")
    return crew.tally


async def _ask_all(
    crew: Crew, requests: Sequence[TeacherRequest], teacher: Teacher, progress: Progress
) -> None:
    work = asyncio.ensure_future(crew.run(requests))

    def interrupted() -> None:
        if crew.stop(KeyboardInterrupt()):
            progress.log("stopping when the answers on their way have come; Ctrl-C again drops them")
        else:
            work.cancel()

    with interrupts(interrupted), suppress(asyncio.CancelledError):
        await work
    await teacher.close()


def _first(requests: Sequence[tuple[TeacherRequest, str]]) -> str:
    """The first requests without an answer, and why."""
    return "; ".join(f"{request.where}: {reason}" for request, reason in requests[:EXAMPLES])


def _counts(
    requests: Sequence[Any], rows: Sequence[dict[str, Any]], refused: int, settings: CollectSettings
) -> dict[str, Any]:
    tokens = [row_tokens(row) for row in rows]
    prompt_tokens, answer_tokens = sum(pair[0] for pair in tokens), sum(pair[1] for pair in tokens)
    priced = settings.cost.price_in + settings.cost.price_out
    return {
        "requests": len(requests),
        "answers": len(rows),
        "refused": refused,
        "prompt_tokens": prompt_tokens,
        "answer_tokens": answer_tokens,
        "cost": price(settings.cost, prompt_tokens, answer_tokens) if priced else None,
    }


def _write(
    out: Path,
    rows: Sequence[dict[str, Any]],
    lineage: Sequence[Parent],
    settings: CollectSettings,
    details: dict[str, Any],
    progress: Progress,
) -> FilterSummary:
    """Filter the rows; write data and card."""
    kept, summary = filter_rows(rows, settings.filters, progress)
    if not kept:
        raise DataError(f"{out}: the filters keep no row", hint=summary.table().splitlines()[-1].strip())
    with atomic.file(out) as partial:
        with partial.open("w", encoding="utf-8") as file:
            for row in kept:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        card = _card(out, partial, lineage, settings, {**details, "filters": summary.to_dict()})
        atomic.write_json(card_path(out), card.to_dict())
    return summary


def _card(
    out: Path, written: Path, lineage: Sequence[Parent], settings: CollectSettings, details: dict[str, Any]
) -> Card:
    values = flatten(settings)
    digest = sha256_file(written)
    return Card(
        name=out.name,
        stage="collect",
        settings=values,
        seed=settings.seed,
        key=identity("collect", VERSION, values, [digest]),
        parents=tuple(lineage),
        versions=versions(),
        files={out.name: digest},
        details=details,
        licence=duties(lineage, values, student=False).to_dict() | {"ids": _ids(lineage)},
    )


def _ids(lineage: Sequence[Parent]) -> list[str]:
    """Licences of the roots of a lineage."""
    return list(dict.fromkeys(name for parent in lineage for name in root_licences(parent)))


def _lineage_of_data(data: Path) -> tuple[Parent, ...]:
    """The teachers of answers that are there, by their card, or by the names in the rows."""
    for path in (data, data.with_name(data.name.removesuffix(SUFFIX))):
        if card := read_card(path):
            return (replace(card.as_parent("signal", card.files.get(path.name, "")), name=path.name),)
    return provenance(str(data), signal=True)


def _collected_rows(data: Path) -> Iterator[dict[str, Any]]:
    for where, row in json_rows(data):
        if not isinstance(row, dict) or not {"messages", "completion", "text"} & set(row):
            raise DataError(f"{where}: no answer in it", hint="rows have messages, completion or text")
        messages = row.get("messages")
        if messages is not None:
            check_messages(where, messages if isinstance(messages, list) else [messages])
        if messages is not None and (not messages or messages[-1]["role"] != "assistant"):
            raise DataError(f"{where}: the last message is not an answer", hint="of the role assistant")
        yield row
