"""The output of a stage: a checkpoint that appears atomically, and a scratch folder that survives a kill.

While a stage works, two hidden folders stand next to the output ``NAME``: ``.NAME.partial``, the checkpoint
being written, and ``.NAME.work``, what a resumed run can use again. ``key.json`` in ``.NAME.work`` identifies
the work. Afterwards:

    success                         NAME exists, both hidden folders are removed
    kill -9, power cut              both stay; the next run deletes .partial, and resumes from .work if the
                                    key is the same
    Ctrl-C, a bug, out of memory    .partial is removed, .work stays if it is not empty
    an AttarError (bad input, ...)  everything is removed, created parent folders too
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attar.checkpoint import atomic, hashing
from attar.checkpoint.card import FILE, Card, Parent, plain, versions
from attar.checkpoint.companions import check_companions
from attar.checkpoint.jsonfile import read_json
from attar.checkpoint.licences import duties
from attar.checkpoint.lineage import as_parent, compact, write_texts
from attar.checkpoint.open import Checkpoint
from attar.checkpoint.processes import (
    KEY,
    SINGLE_PROCESS,
    FinishedOnRank0,
    Processes,
    count,
    own_output,
    wait_for_claim,
    wait_for_first,
)
from attar.checkpoint.readme import write_readme
from attar.errors import AttarError, CheckpointError, OutputError
from attar.options import differing, flatten

_LOCK = "lock"


@dataclass
class StageOutput:
    """The folders a stage writes into, and what it adds to the card.

    Attributes:
        folder: the checkpoint's folder; empty at first.
        work: scratch folder that survives a kill; empty unless ``resumed``. Each process has its own.
        shared: the first process's work folder, which all processes use.
        processes: the processes that do the block together.
        resumed: an earlier run of the same work left files in ``work``.
        command: a command line that makes this checkpoint again.
        texts: the text that the stage read, as records of :mod:`attar.data.seen`.
        details: the card's details, such as ``layers`` and ``curve``.
    """

    folder: Path
    work: Path
    key: str
    resumed: bool
    command: str
    shared: Path
    processes: Processes = SINGLE_PROCESS
    texts: list[dict[str, Any]] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    measurements: dict[str, Any] = field(default_factory=dict)

    def exit_unless_rank0(self) -> None:
        """Of several processes all but the first end the block here (``processes.py``)."""
        if not self.processes.first:
            raise FinishedOnRank0
        self.processes = SINGLE_PROCESS


@contextmanager
def produce(
    out: Path | str,
    stage: str,
    settings: Any,
    version: int,
    weights: Sequence[Checkpoint],
    *,
    signals: Sequence[Checkpoint] = (),
    data: Sequence[Parent] = (),
    text: str = "",
    needed: int | None = None,
    force: bool = False,
    key: str | None = None,
) -> Iterator[StageOutput]:
    """Run a stage: check the output folder, lock and resume; run the block; write the card and rename.

    A wrong output folder is refused before the block runs. Of several processes of a run the first one writes
    the output (``processes.py``). When the block ends well, ``README.md`` and the
    card with the hashes of all files are written, everything is fsynced, and the folder gets its name.

    Args:
        out: the new folder; missing parent folders are created.
        settings: the stage's settings dataclass, or its fields in a dict; ``seed`` is the stage's seed.
        weights: the checkpoints that the result's weights are made of.
        signals: the checkpoints whose outputs it learns from.
        data: records of collected text that it learns from (:mod:`attar.data.provenance`).
        text: fingerprint of the text that the stage reads: another text is other work.
        needed: bytes that the stage will write, if known: a disk with less free space is refused.
        key: identity of the work, from a recipe; None: :func:`stage_key` of the arguments.

    Raises:
        OutputError: ``out`` exists, cannot be written, is being written by another process, or the disk is
        full.
        CheckpointError: a file that would be copied is a link out of its model's folder.
    """
    final = atomic.target(Path(out))
    rank_folder = own_output(final)
    parents = [*((item, "weights") for item in weights), *((item, "signal") for item in signals)]
    _check_apart(final, parents)
    for item in weights:
        check_companions(item.path)
    atomic.check_target(final, force)
    with (
        suppress(FinishedOnRank0),
        atomic.explain_os_errors(final, needed),
        _parent_folder(final),
        _work_folder(rank_folder) as work,
        atomic.folder(rank_folder, force or rank_folder != final) as folder,
    ):
        if needed:
            atomic.check_space(folder, needed)
        changed = settings if isinstance(settings, dict) else differing(settings)
        settings = plain(settings if isinstance(settings, dict) else flatten(settings))
        fingerprints = hashing.in_parallel(lambda parent: parent[0].fingerprint(), parents)
        records = zip(parents, fingerprints, strict=True)
        checkpoints = [as_parent(item, role, fingerprint) for (item, role), fingerprint in records]
        lineage = compact([*checkpoints, *data])
        key = key or stage_key(stage, version, settings, lineage, text)
        resumed = _claim(work, stage, key)
        command = command_line(stage, plain(changed), parents, final)
        shared = atomic.hidden(final, "work")
        if rank_folder != final:
            wait_for_claim(final, key, shared)
        output = StageOutput(folder, work, key, resumed, command, shared, Processes.of_run())
        with _named(folder, final):
            yield output
        write_texts(folder, [*weights, *signals], output.texts)
        card = _card(final.name, stage, settings, lineage, output)
        write_readme(card, folder)
        replace(card, files=_files(folder)).write(folder)
    if rank_folder != final and key is not None:
        for path in (rank_folder, atomic.hidden(rank_folder, "work")):
            shutil.rmtree(path, ignore_errors=True)
        wait_for_first(final, key, atomic.hidden(final, "work") / _LOCK)
    elif rank_folder == final:
        _remove_left(final)


def _remove_left(final: Path) -> None:
    """Remove what processes beyond those of this run left when they were killed."""
    number = count()
    while (left := atomic.hidden(atomic.hidden(final, f"rank-{number}"), "work")).exists():
        shutil.rmtree(left)
        shutil.rmtree(atomic.hidden(atomic.hidden(final, f"rank-{number}"), "partial"), ignore_errors=True)
        number += 1


@contextmanager
def _named(folder: Path, final: Path) -> Iterator[None]:
    """Errors name the output folder, not its hidden partial folder."""
    try:
        yield
    except AttarError as error:
        error.message = error.message.replace(str(folder), str(final))
        if error.hint:
            error.hint = error.hint.replace(str(folder), str(final))
        raise


def stage_key(
    stage: str,
    version: int,
    settings: dict[str, Any],
    lineage: Sequence[Parent],
    text: str = "",
) -> str:
    """Identity of a stage's work: hash of verb, code version, settings, inputs with their roles, and the
    fingerprint of the text it reads."""
    inputs = [f"{parent.role}:{parent.fingerprint}" for parent in lineage]
    inputs += [f"text:{text}"] if text else []
    return hashing.identity(stage, version, plain(settings), inputs)


def finished(out: Path | str, key: str) -> bool:
    """Whether ``out`` is the finished checkpoint of the work ``key``. Removes what a kill after its last
    rename left."""
    final = atomic.target(Path(out))
    try:
        card = Card.read(final)
    except CheckpointError:
        return False
    if card is None or card.key != key:
        return False
    with suppress(OutputError), _work_folder(final):  # unless another process is replacing it
        for suffix in ("partial", "old"):
            shutil.rmtree(atomic.hidden(final, suffix), ignore_errors=True)
    return True


def command_line(
    stage: str, settings: dict[str, Any], parents: Sequence[tuple[Checkpoint, str]], out: Path
) -> str:
    """The shell command that repeats the stage: verb, first parent, and the given settings as options."""
    words = ["attar", stage, *(checkpoint.spelling for checkpoint, _ in parents[:1]), "-o", out.name]
    for checkpoint, role in parents[1:]:
        if checkpoint is parents[0][0]:  # distill has one model for weights and signal
            continue
        words += ["--teacher" if role == "signal" else "--model", checkpoint.spelling]
    for name, value in settings.items():
        words += _option(f"--{name.replace('_', '-')}", value)
    return shlex.join(words)


def _option(flag: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, list):
        return [word for item in value for word in (flag, str(item))]
    return [flag, str(value)]


def _card(
    name: str, stage: str, settings: dict[str, Any], lineage: tuple[Parent, ...], output: StageOutput
) -> Card:
    """The card, its files not hashed yet."""
    return Card(
        name=name,
        stage=stage,
        settings=settings,
        seed=settings.get("seed", 0),
        key=output.key,
        parents=lineage,
        versions=versions(),
        measurements=plain(output.measurements),
        details=plain(output.details),
        licence=duties(lineage, settings).to_dict(),
        command=output.command,
    )


def _files(folder: Path) -> dict[str, str]:
    """SHA-256 of every file under a folder by relative name, except the card."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in paths if path != folder / FILE]
    hashes = hashing.in_parallel(lambda name: hashing.sha256_file(folder / name), names)
    return dict(zip(names, hashes, strict=True))


def _check_apart(final: Path, parents: Sequence[tuple[Checkpoint, str]]) -> None:
    """Refuse an output folder that contains one of its inputs: replacing it would delete the input."""
    for checkpoint, _ in parents:
        if final in checkpoint.source.parents:
            raise OutputError(
                f"{final}: contains the input model {checkpoint.source}", hint="choose another output folder"
            )


@contextmanager
def _parent_folder(final: Path) -> Iterator[None]:
    """Create missing parent folders; remove them again if an error leaves them empty."""
    missing = [parent for parent in final.parents if not parent.exists()]
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for parent in missing:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
        raise


@contextmanager
def _work_folder(final: Path) -> Iterator[Path]:
    """The locked scratch folder; the module's docstring says when it is removed."""
    work = atomic.hidden(final, "work")
    _check_work(work)
    lock = _lock(work, final)
    try:
        try:
            yield work
        except BaseException as error:
            if isinstance(error, AttarError) or not _progress(work):
                _remove_work(work)
            raise
        _remove_work(work)
    finally:
        os.close(lock)


def _check_work(work: Path) -> None:
    """Refuse a link, and a folder that somebody else filled: its files would be removed. Raises
    OutputError."""
    atomic.check_own_folder(work)
    if _progress(work) and not (work / KEY).is_file():
        raise OutputError(
            f"{work}: is no scratch folder of attar's, which would clear it",
            hint="move it away, or choose another output folder",
        )


def _lock(work: Path, final: Path) -> int:
    """Lock the scratch folder. The system releases the lock when the process ends."""
    work.mkdir(exist_ok=True)
    try:
        lock = os.open(work / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError:
        with suppress(OSError):
            work.rmdir()  # fails if another process has files in it
        raise
    try:  # the holder of the lock may have removed the folder in between
        locked = atomic.try_lock(lock) and os.path.samestat(os.fstat(lock), (work / _LOCK).stat())
    except FileNotFoundError:
        locked = False
    if not locked:
        os.close(lock)
        raise OutputError(
            f"{final}: is being written by another process", hint="wait for it, or choose another folder"
        )
    return lock


def _claim(work: Path, stage: str, key: str) -> bool:
    """Clear the scratch folder of other work; True if an earlier run of this work left files there."""
    try:
        same = read_json(work / KEY).get("key") == key
    except CheckpointError:
        same = False
    if same:
        return bool(_progress(work))
    _remove_progress(work)
    atomic.write_json(work / KEY, {"stage": stage, "key": key})
    return False


def _remove_progress(work: Path) -> None:
    for path in _progress(work):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _remove_work(work: Path) -> None:
    """Remove the scratch folder, the key last: it says whose files the others are."""
    with suppress(OSError):
        _remove_progress(work)
        shutil.rmtree(work)


def _progress(work: Path) -> list[Path]:
    """The files that a stage wrote into its scratch folder."""
    bookkeeping = (_LOCK, KEY, atomic.hidden(work / KEY, "partial").name)
    return sorted(path for path in work.iterdir() if path.name not in bookkeeping) if work.is_dir() else []
