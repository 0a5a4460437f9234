"""``attar generate --out FILE``: many prompts on several workers, each with a model loaded once.

OUT.jsonl           a line for each prompt, in their order: the completion, or an error
OUT.jsonl.journal   every completion under its hash, in the order of arrival; stays, so none is made twice
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from attar.checkpoint import atomic
from attar.checkpoint.hashing import canonical_json, identity
from attar.checkpoint.open import open_checkpoint
from attar.cluster.rows import run_rows
from attar.cluster.settings import ClusterSettings
from attar.cluster.tasks import ClusterTask
from attar.cluster.workers import actors_of
from attar.errors import AttarError, OutputError, SettingsError
from attar.progress import SILENT, Progress
from attar.runtime.settings import EngineSettings, TextSettings

FUNCTION = "attar.serving.batch:generate_batch"
VERSION = 1


@dataclass(frozen=True)
class BatchResult:
    """What became of the prompts."""

    path: Path
    prompts: int
    errors: int

    def to_dict(self) -> dict[str, Any]:
        """JSON content."""
        return asdict(self) | {"path": str(self.path)}


def generate_to_file(
    model: str,
    prompts: Sequence[str],
    out: Path,
    text: TextSettings,
    engine: EngineSettings,
    cluster: ClusterSettings,
    *,
    chat: bool = False,
    batch: int = 32,
    force: bool = False,
    progress: Progress = SILENT,
) -> BatchResult:
    """Complete prompts on workers and write a line for each, in their order.

    Equal prompts are drawn anew only where the settings have no seed.

    Raises:
        AttarError: the model cannot be opened, or the file cannot be written; the journal stays.
    """
    if batch < 1:
        raise SettingsError("batch_rows", batch, "1 or more")
    text.params()
    atomic.check_file(out, force)
    checkpoint = open_checkpoint(model)
    common = {
        "model": model,
        "fingerprint": checkpoint.fingerprint(),
        "engine": asdict(engine),
        "text": asdict(text),
        "chat": chat,
    }
    occurrences: Counter[str] = Counter()
    ids = []
    for prompt in prompts:
        number = occurrences[prompt] if text.seed is None else 0
        occurrences[prompt] += 1
        settings = {name: common[name] for name in ("engine", "text", "chat")}
        ids.append(identity("generate", VERSION, settings, [checkpoint.fingerprint(), prompt, str(number)]))

    def task_of(name: str, rows: list[dict[str, Any]]) -> ClusterTask:
        arguments = {**common, "rows": rows, "folder": str(Path.cwd())}
        return ClusterTask(name, FUNCTION, arguments, resources=cluster.resources)

    out.parent.mkdir(parents=True, exist_ok=True)
    journal = out.with_name(out.name + ".journal")
    rows = dict(zip(ids, prompts, strict=True))
    actors = partial(actors_of, cluster)
    results = run_rows(rows, task_of, actors, journal, batch=batch, progress=progress)
    lines = [_line(prompt, results[id]) for prompt, id in zip(prompts, ids, strict=True)]
    atomic.write_bytes(out, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())
    return BatchResult(out, len(lines), sum("error" in line for line in lines))


def _line(prompt: str, record: dict[str, Any]) -> dict[str, Any]:
    known = record.get("result") or {"error": record["error"]}
    return {"prompt": prompt} | {name: known[name] for name in known if name != "prompt"}


def generate_batch(
    *,
    model: str,
    fingerprint: str,
    engine: dict[str, Any],
    text: dict[str, Any],
    chat: bool,
    rows: list[dict[str, Any]],
    folder: str,
) -> list[dict[str, Any]]:
    """Complete the rows of a batch on a worker; a row that cannot be completed has an ``error``.

    Raises:
        OutputError: this machine has another model under that name.
        AttarError: the model cannot be loaded.
    """
    if Path(folder).is_dir():
        os.chdir(folder)
    llm = _llm(model, fingerprint, canonical_json(engine))
    params = TextSettings(**_tuples(text)).params()

    def complete(chosen: list[dict[str, Any]]) -> list[dict[str, Any]]:
        encoded = [_encode(llm, record["row"], chat) for record in chosen]
        results = llm.generate(encoded, params)
        return [
            {"id": record["id"], "result": result.to_dict()}
            for record, result in zip(chosen, results, strict=True)
        ]

    try:
        return complete(rows)
    except Exception:  # of one row; each is completed alone, and an error that is no refusal is raised again
        records = []
        for record in rows:
            try:
                records += complete([record])
            except AttarError as error:
                records.append({"id": record["id"], "error": error.message})
            except Exception as error:
                records.append({"id": record["id"], "error": f"{type(error).__name__}: {error}"})
        return records


def _encode(llm: Any, prompt: str, chat: bool) -> list[int]:
    tokens: list[int] = llm.encode_chat([{"role": "user", "content": prompt}]) if chat else llm.encode(prompt)
    return tokens


@lru_cache(maxsize=1)
def _llm(model: str, fingerprint: str, engine: str) -> Any:
    """The loaded model of a worker."""
    from attar.runtime.llm import LLM

    checkpoint = open_checkpoint(model)
    if checkpoint.fingerprint() != fingerprint:
        hint = "the same model on all machines, or one in a store"
        raise OutputError(f"{model}: {os.uname().nodename} has another model of this name", hint=hint)
    return LLM(model, **EngineSettings(**_tuples(json.loads(engine))).options())


def _tuples(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
