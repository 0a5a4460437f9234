"""The verb ``export``: a checkpoint in the format of another engine, read back and compared.

    dense                            ordinary safetensors in one number type       (dense.py)
    gguf                             llama.cpp                                      (gguf.py)
    compressed-tensors, gptq, awq,
    bitsandbytes, modelopt           codes of a quantized checkpoint, untouched     (packed.py)
    mxfp4                            experts of gpt-oss, untouched                  (mxfp4.py)
    exl2                             ExLlamaV2, rounded here                        (exl2.py)
    exl3                             ExLlamaV3, rounded here                        (exl3.py)
    mlx                              mlx-lm: codes untouched, or rounded here       (mlx.py)
    speculators, deepspec, eagle,
    medusa                           draft heads                                    (draft_head.py)

Each file has ``refuse``, which raises before any work, and ``write``, which returns the checks that the
written files passed (verify.py).

``-o DIR`` makes a folder with a card; ``-o FILE.gguf`` a single file. Its card, README and Modelfile are
next to it: FILE.attar.json, FILE.md and FILE.Modelfile, so that several models share a folder.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from attar.checkpoint import atomic
from attar.checkpoint.card import FILE, Card
from attar.checkpoint.hashing import sha256_file
from attar.checkpoint.lineage import TEXTS, texts_file
from attar.checkpoint.mtp import LEFT_OUT
from attar.checkpoint.open import Checkpoint, open_checkpoint
from attar.checkpoint.output import StageOutput, produce
from attar.checkpoint.readme import FILE as README
from attar.checkpoint.readme import MODELFILE, write_readme
from attar.data.auto import fit
from attar.data.packing import row_length
from attar.data.seen import note_texts, record
from attar.data.sources import COMPRESSION, fingerprint
from attar.deployment.gguf import IMATRIX
from attar.deployment.settings import GGUF, HEAD_FORMATS, VERSION, ExportSettings
from attar.errors import DataError, ModelError, SettingsError
from attar.models.draft_heads.kind import is_draft_head
from attar.models.loading.fit import admit
from attar.progress import SILENT, Progress

WRITERS = {
    "dense": "dense",
    "gguf": "gguf",
    "compressed-tensors": "packed",
    "gptq": "packed",
    "awq": "packed",
    "bitsandbytes": "packed",
    "modelopt": "packed",
    "mxfp4": "mxfp4",
    "exl2": "exl2",
    "exl3": "exl3",
    "mlx": "mlx",
    **dict.fromkeys(HEAD_FORMATS, "draft_head"),
}


def export(
    model: str | Path | Checkpoint,
    out: Path,
    settings: ExportSettings,
    *,
    progress: Progress = SILENT,
    force: bool = False,
    key: str | None = None,
) -> Checkpoint:
    """Write a checkpoint for another engine.

    Args:
        out: the folder to make, or with format gguf a file ``NAME.gguf``.
        settings: the format, and how weights are rounded or converted.
        force: replace an existing ``out``.
        key: identity of this work, when a recipe knows it.

    Raises:
        ModelError: the checkpoint cannot be written in this format.
        NumericsError: a tensor would not survive the format, or reads back differently.
        OutputError: ``out`` exists or cannot be written.
    """
    source = open_checkpoint(model)
    writer = _writer(settings.format)
    if settings.format not in HEAD_FORMATS:
        _refuse_head(source, settings.format)
        causal, anew = settings.format == "gguf", settings.format in ("exl2", "exl3")
        source = admit(source, progress, causal=causal, dense=anew)
    if WRITERS[settings.format] in ("dense", "packed"):
        source = source.with_mtp  # the multi-token prediction head is converted like the model
    writer.refuse(source, settings)
    if settings.text_rows:
        settings = fit(settings, source, progress)
    if Path(out).suffix != GGUF:
        _write(source, Path(out), settings, writer, progress, force, key)
        return open_checkpoint(out)
    if settings.format != "gguf":
        raise SettingsError("format", settings.format, f"gguf for a file {Path(out).name}, or a folder as -o")
    return _write_file(source, Path(out), settings, writer, progress, force, key)


def _refuse_head(source: Checkpoint, format: str) -> None:
    if is_draft_head(source):
        formats = f"--format {', '.join(HEAD_FORMATS)}"
        converter = "; llama.cpp's convert_hf_to_gguf.py makes a GGUF file of deepspec's and eagle's"
        hint = formats + (converter if format == "gguf" else "")
        raise ModelError(f"{source.name} is a draft head, no model", hint=hint)


def _writer(name: str) -> ModuleType:
    return import_module(f"attar.deployment.{WRITERS[name]}")


def _write(
    source: Checkpoint,
    out: Path,
    settings: ExportSettings,
    writer: ModuleType,
    progress: Progress,
    force: bool,
    key: str | None,
) -> None:
    text = fingerprint(settings.data)
    with produce(out, "export", settings, VERSION, [source], text=text, force=force, key=key) as output:
        if settings.text_rows:
            settings = _recorded(source, settings, output, progress)
        details: dict[str, Any] = output.details
        details["checks"] = writer.write(source, settings, output, progress)
        if source.mtp and settings.format in ("gguf", "mlx") and not writer.keeps_mtp(source):
            why = f"attar writes none to {settings.format}"
            details["notes"] = [*details.get("notes", ()), LEFT_OUT.format(why)]
        for note in (*details.get("notes", ()), *details.get("limits", ())):
            progress.log(note)


def _recorded(
    source: Checkpoint, settings: ExportSettings, output: StageOutput, progress: Progress
) -> ExportSettings:
    """Record the text that will be read. Where there is no text, and the importance matrix was not asked for,
    the settings without it."""
    from attar.models.loading.load import load_tokenizer

    length = row_length(settings.sequence_length, source.config)
    try:
        tokenizer, rows = load_tokenizer(source), replace(settings, sequence_length=length).text_rows
        read = record("export", tokenizer, settings, COMPRESSION, length=length, rows=rows)
    except DataError as error:
        plain = replace(settings, imatrix="none")
        if settings.imatrix != "auto" or plain.text_rows:
            raise
        progress.log(f"no importance matrix, so the file loses more than it need: {error.message}")
        return plain
    note_texts(output, [read], progress)
    return settings


def _write_file(
    source: Checkpoint,
    out: Path,
    settings: ExportSettings,
    writer: ModuleType,
    progress: Progress,
    force: bool,
    key: str | None,
) -> Checkpoint:
    """Export to a folder, then move its files to where a single file has them."""
    final = atomic.target(out)
    if settings.max_file:
        raise SettingsError("max_file", settings.max_file, "unset for a single file; -o a folder")
    atomic.check_file(final, force)
    folder = atomic.hidden(final, "folder")
    atomic.check_own_folder(folder)
    _write(source, folder, settings, writer, progress, True, key)
    with atomic.explain_os_errors(final):
        written = next(path for path in folder.glob(f"*{GGUF}") if path.name != IMATRIX)
        _rename(folder, written, final)
        targets = {FILE: card_beside(final), TEXTS: texts_file(final), final.name: final}
        targets |= {README: final.with_suffix(".md"), MODELFILE: final.with_suffix(f".{MODELFILE}")}
        for name, target in targets.items():
            if (folder / name).is_file():
                (folder / name).replace(target)
        atomic.fsync(final.parent)
        shutil.rmtree(folder)
    return open_checkpoint(final)


def _rename(folder: Path, written: Path, final: Path) -> None:
    """Rename the folder's files after a single file, in card, README and Modelfile too."""
    written.rename(folder / final.name)
    modelfile = folder / MODELFILE
    if modelfile.is_file():
        _, _, other_lines = modelfile.read_text(encoding="utf-8").partition("\n")
        atomic.write_bytes(modelfile, f"FROM ./{final.name}\n{other_lines}".encode())
    card = Card.read(folder)
    assert card is not None
    card = replace(card, name=final.stem, command=card.command.replace(folder.name, final.name))
    write_readme(card, folder, final.name)
    names = {README: f"{final.stem}.md", MODELFILE: f"{final.stem}.{MODELFILE}"}
    names |= {TEXTS: texts_file(final).name, final.name: final.name}
    files = {names[name]: sha256_file(folder / name) for name in sorted(names) if (folder / name).is_file()}
    replace(card, files=files).write(folder)


def card_beside(file: Path) -> Path:
    """Path of the card of a single file: ``NAME.attar.json``."""
    return file.with_suffix(".attar.json")
