"""The verb ``merge``: one model out of several, by mergekit's YAML.

    read       the documents, each after those it names                        (reading.py)
    open       every model by its headers, adapters added                      (parents.py)
    prepare    the merged vocabulary; every tensor of the result               (vocabulary.py, plan.py)
    choose     a soup's ingredients, a search's coefficients                   (chosen.py)
    merge      tensor by tensor                                                (weights.py)
    measure    where the parents disagree; how well they and the merge predict (disagreement.py, quality.py)

Everything that can be refused is refused before anything is written. Models are run, and the libraries for it
imported, only where a setting asks for that. Results of earlier documents are
checkpoints in the work folder, and gone when the last one is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from attar.checkpoint import atomic
from attar.checkpoint.companions import copy_companions
from attar.checkpoint.hashing import sha256_text
from attar.checkpoint.lineage import texts_of
from attar.checkpoint.open import Checkpoint, open_checkpoint
from attar.checkpoint.output import StageOutput, command_line, finished, produce
from attar.checkpoint.tensors import tensor_bytes
from attar.checkpoint.units import byte_count
from attar.data.auto import fit
from attar.data.sources import fingerprint
from attar.merging.config.schema import SEARCHED, MergeConfig
from attar.merging.disagreement import Disagreement
from attar.merging.parents import Parents
from attar.merging.planning.prepare import Prepared, asked_tokens, prepare
from attar.merging.settings import VERSION, MergeSettings
from attar.merging.tokenizer.chat_template import choose_chat_template, write_chat_template
from attar.merging.written import read_configs
from attar.progress import SILENT, Progress

FILE = "merge.yml"
"""The configuration, beside the merged weights."""

PICTURE = "conflicts.svg"

Draw = Callable[[list[dict[str, Any]], list[str]], str]
"""Draws the rows of :func:`attar.merging.conflicts.summary` with the models' names as SVG."""


def merge(
    out: Path,
    settings: MergeSettings,
    *,
    models: Mapping[str, str | Path] | None = None,
    draw: Draw | None = None,
    progress: Progress = SILENT,
    force: bool = False,
    key: str | None = None,
) -> Checkpoint:
    """Merge models.

    Args:
        out: the folder to make.
        settings: the configuration and how it is read.
        models: models by names that the configuration may use, such as the stages of a recipe.
        draw: draws where the parents disagree, into ``conflicts.svg``; None: no picture.
        force: replace an existing ``out``.
        key: identity of this work, when a recipe knows it.

    Raises:
        RecipeError: the configuration is wrong; names file and line.
        CheckpointError: a model is missing or damaged.
        ModelError: the models do not fit together.
        NumericsError: a parent, or the merge, has NaN or infinity.
        OutputError: ``out`` exists or cannot be written.
    """
    documents, text = read_configs(settings.config)
    parents = open_parents(documents, models or {})
    searched = any(each.method in SEARCHED or each.tokenizer is not None for each in documents)
    reads = settings.search or settings.tokens > 0 or searched
    settings = fit(settings, parents.checkpoints()[0], progress if reads else SILENT)
    run = _Run(parents, replace(settings, config=text), progress, draw)
    run.make(documents, Path(out), force, key)
    return open_checkpoint(out)


def open_parents(documents: tuple[MergeConfig, ...], models: Mapping[str, str | Path]) -> Parents:
    """Open every model of the documents that is not the result of one of them."""
    parents = Parents(dict(models))
    results = [document.name for document in documents]
    for document in documents:
        for reference in document.models():
            if reference.model not in results:
                parents.view(reference)
    return parents


@dataclass(frozen=True)
class _Run:
    """One call of :func:`merge`."""

    parents: Parents
    settings: MergeSettings
    progress: Progress
    draw: Draw | None

    def make(self, documents: tuple[MergeConfig, ...], out: Path, force: bool, key: str | None) -> None:
        """Make the last document's model, the others in its work folder."""
        last = documents[-1]
        early = prepare(last, self.parents, self.settings) if len(documents) == 1 else None
        with self._produce(out, force, key, early) as output:
            for document in documents[:-1]:
                assert document.name is not None, "only the last document may have no name"
                folder = output.work / "models" / document.name
                mark = sha256_text(f"{output.key}\n{document.name}")
                if not finished(folder, mark):
                    with self._produce(folder, True, mark, None) as inner:
                        self._fill(prepare(document, self.parents, self.settings), inner)
                self.parents.made[document.name] = folder
            self._fill(early or prepare(last, self.parents, self.settings), output)
            output.command = self._command(out)

    def _command(self, out: Path) -> str:
        """The command that does this again, from the configuration beside the weights."""
        rest = {name: value for name, value in asdict(self.settings).items() if name != "config"}
        line = command_line("merge", rest, (), out)
        return line.replace("attar merge", f"attar merge {FILE}", 1)

    def _produce(self, out: Path, force: bool, key: str | None, early: Prepared | None) -> Any:
        needed = None
        if early is not None:
            slots = [early.merge.slot(output) for output in early.merge.plan.outputs]
            needed = sum(tensor_bytes(slot.dtype, slot.shape) for slot in slots)
        text, models = fingerprint(self.settings.data), self.parents.checkpoints()
        return produce(
            out, "merge", self.settings, VERSION, models, text=text, needed=needed, force=force, key=key
        )

    def _fill(self, prepared: Prepared, output: StageOutput) -> None:
        """Write one document's model into its folder."""
        notes = [*self.parents.notes, *prepared.notes]
        for note in notes:
            self.progress.log(note)
        prepared = self._chosen(prepared, output)
        texts = None
        if asked_tokens(self.settings, prepared):
            from attar.merging.quality import measure_quality, texts_of_parents

            texts = texts_of_parents(prepared, self.settings)
        disagreement = Disagreement(output.work / "conflicts.jsonl")
        merge = replace(prepared.merge.scanned(self.progress), look=disagreement.look)
        atomic.write_json(output.folder / "config.json", merge.plan.config)
        _write_companions(prepared, output.folder)
        (output.folder / FILE).write_text(self.settings.config, encoding="utf-8")
        merge.write(
            output.folder,
            work=output.work / "shards",
            shard_bytes=byte_count("shard_size", self.settings.shard_size),
            progress=self.progress,
        )
        output.details |= {"method": merge.plan.method.name, "models": list(merge.plan.labels)}
        output.details |= {"notes": notes} if notes else {}
        output.details |= self._disagreement(disagreement.details(merge.plan), output.folder)
        if merge.vocabulary is not None:
            output.details["vocabulary"] = merge.vocabulary.report()
        if texts is not None:
            known = [record for parent in self.parents.checkpoints() for record in texts_of(parent)]
            output.details |= measure_quality(
                prepared, output.folder, self.settings, texts, self.progress, [*known, *output.texts]
            )

    def _chosen(self, prepared: Prepared, output: StageOutput) -> Prepared:
        """What is to be merged: as written, or with what a soup or a search chose."""
        if not self.settings.search and prepared.document.method not in SEARCHED:
            return prepared
        from attar.merging.search.choose import choose

        return choose(prepared, self.parents, self.settings, output, self.progress)

    def _disagreement(self, details: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Draw where the parents disagree, if anything is known and wanted."""
        if details and self.draw is not None:
            drawn = self.draw(details["conflicts"], details["conflict_models"])
            (folder / PICTURE).write_text(drawn, encoding="utf-8")
        return details


def _write_companions(prepared: Prepared, folder: Path) -> None:
    """Tokenizer, generation settings, licence texts, chat template."""
    plan, vocabulary = prepared.merge.plan, prepared.merge.vocabulary
    copy_companions(plan.models[plan.donor].path, folder)
    if vocabulary is not None:
        vocabulary.write(folder)
    template = choose_chat_template(
        prepared.document.chat_template, [view.path for view in plan.models], plan.donor
    )
    if template is not None:
        write_chat_template(folder, template)
