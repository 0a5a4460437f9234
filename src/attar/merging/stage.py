"""The verb ``merge``: one model out of several, by mergekit's YAML; or a mixture of experts, by
mergekit-moe's (mixture/).

    read       the documents, each after the documents that it uses            (config/documents.py)
    open       every model by its headers, adapters added                      (parents.py)
    prepare    the merged vocabulary; every tensor of the result               (planning/prepare.py)
    choose     a soup's ingredients, a search's coefficients                   (search/choose.py)
    merge      tensor by tensor                                                (weights.py)
    measure    where the parents disagree; how well they and the merge predict (conflicts.py, quality.py)

All errors in the configuration or the models are raised before anything is written. Models run, and the
libraries for it are imported, only where a setting asks for it. Results of earlier documents are checkpoints
in the work folder, which is removed after the last document.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attar.checkpoint import atomic
from attar.checkpoint.card import plain
from attar.checkpoint.hashing import sha256_text
from attar.checkpoint.licence_gate import check_licences
from attar.checkpoint.lineage import as_parent, texts_of
from attar.checkpoint.open import Checkpoint, open_checkpoint
from attar.checkpoint.output import StageOutput, command_line, finished, produce
from attar.checkpoint.units import byte_count
from attar.data.auto import fit
from attar.data.sources import fingerprint
from attar.merging.adapters.apply import copy_companions_of, tokenizer_folder
from attar.merging.config.documents import MergeDocument, read_configs
from attar.merging.config.schema import SEARCHED, MergeConfig
from attar.merging.conflicts import ConflictRecorder
from attar.merging.mixture.build import PreparedMixture, write_mixture
from attar.merging.parents import ParentModels, open_parents, stored_checkpoint
from attar.merging.planning.prepare import PreparedMerge, prepare_any
from attar.merging.settings import VERSION, MergeSettings
from attar.merging.tokenizer.chat_template import choose_chat_template, write_chat_template
from attar.merging.weights import Merge
from attar.models.loading.kept_mtp import keep_mtp
from attar.options import differing
from attar.progress import SILENT, Progress

FILE = "merge.yml"
"""The configuration, next to the merged weights."""

PICTURE = "conflicts.svg"

Prepared = PreparedMerge | PreparedMixture
"""A document that is ready to be run."""

DrawConflicts = Callable[[list[dict[str, Any]], list[str]], str]
"""Draws the rows of :func:`attar.merging.conflicts.summary` with the models' names as SVG."""


def merge(
    out: Path,
    settings: MergeSettings,
    *,
    models: Mapping[str, str | Path] | None = None,
    draw: DrawConflicts | None = None,
    progress: Progress = SILENT,
    force: bool = False,
    key: str | None = None,
) -> Checkpoint:
    """Merge models.

    Args:
        models: models by names that the configuration may use, such as the stages of a recipe.
        draw: draws where the parents disagree, into ``conflicts.svg``; None: no picture.
        force: replace an existing ``out``.
        key: identity of this work, when a recipe knows it.

    Raises:
        RecipeError: the configuration is wrong; names file and line.
        CheckpointError: a model is missing or damaged.
        ModelError: the models do not fit together.
        NumericsError: a parent, or the merge, has NaN or infinity.
        LicenceError: the licence of a parent, or of its teachers, forbids it.
        OutputError: ``out`` exists or cannot be written.
    """
    documents, text = read_configs(settings.config)
    parents = open_parents(documents, models or {})
    lineage = [as_parent(checkpoint, "weights") for checkpoint in parents.checkpoints()]
    check_licences(lineage, settings.licence, progress)
    reads_text = settings.search > 0 or settings.tokens > 0
    merges = [document for document in documents if isinstance(document, MergeConfig)]
    reads_text |= any(d.method in SEARCHED or d.tokenizer is not None for d in merges)
    settings = fit(settings, parents.checkpoints()[0], progress if reads_text else SILENT)
    run = _MergeRun(parents, replace(settings, config=text), progress, draw)
    *earlier, last = documents
    prepared = None if earlier else prepare_any(last, parents, settings)
    with run.produce(out, force, key, prepared) as output:
        for document in earlier:
            run.merge_earlier(document, output)
        run.write(prepared or prepare_any(last, parents, settings), output)
        output.command = run.command(Path(out))
    return open_checkpoint(out)


@dataclass(frozen=True)
class _MergeRun:
    """State shared by the documents of one merge."""

    parents: ParentModels
    settings: MergeSettings
    progress: Progress
    draw: DrawConflicts | None

    def produce(self, out: Path, force: bool, key: str | None, prepared: Prepared | None) -> Any:
        """The stage's frame around one document."""
        text, models = fingerprint(self.settings.data), self.parents.checkpoints()
        needed = prepared.nbytes() if prepared else None
        return produce(
            out, "merge", self.settings, VERSION, models, text=text, needed=needed, force=force, key=key
        )

    def merge_earlier(self, document: MergeDocument, output: StageOutput) -> None:
        """Merge a document that later ones use into a checkpoint in the work folder."""
        assert document.name is not None, "only the last document may have no name"
        folder = output.shared / "models" / document.name
        key = sha256_text(f"{output.key}\n{document.name}")
        if not finished(folder, key):
            with self.produce(folder, True, key, None) as inner:
                self.write(prepare_any(document, self.parents, self.settings), inner)
        self.parents.results[document.name] = folder

    def write(self, prepared: Prepared, output: StageOutput) -> None:
        """Write one document's model into its folder."""
        notes = [*self.parents.notes, *prepared.notes]
        for note in notes:
            self.progress.log(note)
        (output.folder / FILE).write_text(self.settings.config, encoding="utf-8")
        if isinstance(prepared, PreparedMixture):
            write_mixture(prepared, output, self.settings, self.progress)
            return
        if self.settings.search or prepared.document.method in SEARCHED:
            from attar.merging.search.choose import choose

            with output.processes.main_process_first():  # the others find its losses in the work folder
                prepared = choose(prepared, self.parents, self.settings, output, self.progress)
        texts = None
        if prepared.quality_tokens(self.settings):
            from attar.merging.quality import measure_quality, texts_of_parents

            texts = texts_of_parents(prepared, self.settings)
        conflicts = ConflictRecorder(output.shared, output.processes.rank)
        merge = replace(prepared.merge.scanned(self.progress), observe=conflicts.record)
        atomic.write_json(output.folder / "config.json", merge.plan.config)
        _write_companions(prepared, output.folder)
        merge.write(
            output.folder,
            work=output.shared / "shards",
            processes=output.processes,
            shard_bytes=byte_count("shard_size", self.settings.shard_size),
            progress=self.progress,
        )
        output.exit_unless_rank0()
        self._keep_mtp(merge, output.folder)
        output.details |= {"method": merge.plan.method.name, "models": list(merge.plan.labels)}
        output.details |= {"notes": notes} if notes else {}
        output.details |= self._drawn(conflicts.details(merge.plan), output.folder)
        if merge.vocabulary is not None:
            output.details["vocabulary"] = merge.vocabulary.report()
        if texts is not None:
            records = [record for parent in self.parents.checkpoints() for record in texts_of(parent)]
            output.details |= measure_quality(
                prepared, output.folder, self.settings, texts, self.progress, [*records, *output.texts]
            )

    def _keep_mtp(self, merge: Merge, folder: Path) -> None:
        """The multi-token prediction head of the parent whose config the result has."""
        plan, why_not = merge.plan, "" if merge.vocabulary is None else "the vocabulary is merged"
        parent = stored_checkpoint(plan.models[plan.donor])
        if parent.mtp and not why_not:
            label = plan.labels[plan.donor]
            self.progress.log(f"note: the multi-token prediction head is that of {label}, unmerged")
        keep_mtp(parent, folder, self.progress, why_not)

    def _drawn(self, details: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Draw the conflicts, where there are any and a picture is wanted; returns them."""
        if details and self.draw is not None:
            picture = self.draw(details["conflicts"], details["conflict_models"])
            (folder / PICTURE).write_text(picture, encoding="utf-8")
        return details

    def command(self, out: Path) -> str:
        """The command that repeats the merge, with the configuration in the result's folder."""
        options = {name: value for name, value in plain(differing(self.settings)).items() if name != "config"}
        return command_line("merge", options, (), out).replace("attar merge", f"attar merge {FILE}", 1)


def _write_companions(prepared: PreparedMerge, folder: Path) -> None:
    """Tokenizer, generation settings, licence texts, chat template."""
    plan, vocabulary = prepared.merge.plan, prepared.merge.vocabulary
    copy_companions_of(plan.models[plan.donor], folder)
    if vocabulary is not None:
        vocabulary.write(folder)
    folders = [tokenizer_folder(view) for view in plan.models]
    template = choose_chat_template(prepared.document.chat_template, folders, plan.donor)
    if template is not None:
        write_chat_template(folder, template)
