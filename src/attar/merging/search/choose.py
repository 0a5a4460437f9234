"""Choosing by held-out text before anything is written: ingredients of a soup, coefficients of a search.

Candidates are merged in memory where the model is small; a larger one is written to the work folder, one
candidate at a time. Losses go to a journal in the work folder: a killed stage does not measure them again.
"""

from __future__ import annotations

import math
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attar.checkpoint import atomic
from attar.checkpoint.companions import copy_companions
from attar.checkpoint.output import StageOutput
from attar.data.packing import row_length
from attar.data.seen import note_texts, record
from attar.errors import CheckpointError, RecipeError, UsageError
from attar.merging.config.dump import config_text
from attar.merging.config.schema import SEARCHED, MergeConfig, Setting
from attar.merging.held_out import HeldOut
from attar.merging.parents import Parents
from attar.merging.planning.prepare import Prepared, prepare
from attar.merging.search.coefficients import search
from attar.merging.search.loss_cache import Journal
from attar.merging.search.soup import greedy
from attar.merging.settings import MergeSettings
from attar.merging.space import Space
from attar.models.load import load_tokenizer
from attar.progress import Progress

FOUND = "found.yml"
"""What was chosen, as a configuration that needs no choosing."""

IN_MEMORY = 2_000_000_000
"""Bytes of a model, in float32, whose candidates are merged in memory."""


def choose(
    prepared: Prepared, parents: Parents, settings: MergeSettings, output: StageOutput, progress: Progress
) -> Prepared:
    """The merge that is to be written: as it came, or with what held-out text chose.

    What was tried goes to the card's details, what was found to ``found.yml``.

    Raises:
        UsageError: there is nothing to choose between.
        DataError: the held-out text is missing or too short.
        NumericsError: no candidate has a finite loss.
    """
    soup = prepared.document.method in SEARCHED
    if not soup and not settings.search:
        return prepared
    if soup and settings.search:
        raise UsageError("greedy_soup chooses by itself", hint="leave out --search, or use linear")
    donor = prepared.merge.plan.models[prepared.merge.plan.donor]
    length = row_length(settings.sequence_length, dict(prepared.merge.plan.config))
    tokenizer = load_tokenizer(donor.path)
    read = record("merge", tokenizer, settings, "calibration", length=length, rows=settings.samples)
    note_texts(output, [read], progress)
    judge = _Judge(prepared, parents, settings, output.work / "candidate", progress)
    chosen = _soup(judge, output) if soup else _search(judge, output)
    (output.folder / FOUND).write_text(config_text(chosen), encoding="utf-8")
    return prepare(chosen, parents, settings)


@dataclass(frozen=True)
class _Judge:
    """Losses of merges."""

    prepared: Prepared
    parents: Parents
    settings: MergeSettings
    folder: Path
    progress: Progress

    def text(self) -> HeldOut:
        """The held-out text, in the tokenizer of the merge's donor."""
        settings, plan = self.settings, self.prepared.merge.plan
        donor = plan.models[plan.donor]
        return HeldOut.of(
            donor.path,
            plan.config,
            data=settings.data,
            samples=settings.samples,
            sequence_length=settings.sequence_length,
            seed=settings.seed,
            bos=settings.bos,
            device=settings.device,
        )

    def loss(self, document: MergeConfig, text: HeldOut) -> float:
        """Held-out loss of what a document merges to."""
        merge = prepare(document, self.parents, self.settings).merge.scanned()
        size = sum(4 * math.prod(output.shape) for output in merge.plan.outputs)
        if size <= IN_MEMORY and merge.vocabulary is None:
            with suppress(CheckpointError):  # a family whose names transformers converts as it loads
                return text.loss_of(merge.plan.config, merge.state())
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        atomic.write_json(self.folder / "config.json", merge.plan.config)
        copy_companions(merge.plan.models[merge.plan.donor].path, self.folder)
        merge.write(self.folder)
        loss = text.loss(self.folder)
        shutil.rmtree(self.folder)
        return loss


def _search(judge: _Judge, output: StageOutput) -> MergeConfig:
    """Search the numbers of the configuration."""
    if judge.prepared.merge.vocabulary is not None:
        raise UsageError(
            "a search and a merged tokenizer do not go together",
            hint="search with models of one tokenizer, or merge first with the coefficients as they are",
        )
    text, space = judge.text(), Space.of(judge.prepared.document)
    found = search(
        space,
        lambda values: judge.loss(space.with_parameters(values), text),
        budget=judge.settings.search,
        seed=judge.settings.seed,
        journal=Journal(output.work / "search.jsonl"),
        progress=judge.progress,
    )
    output.details["search"] = found.report(space)
    return space.with_parameters(found.best.values)


def _soup(judge: _Judge, output: StageOutput) -> MergeConfig:
    """Choose the ingredients of a greedy soup."""
    text, document = judge.text(), judge.prepared.document
    journal = Journal(output.work / "soup.jsonl")
    labels = [str(source.model) for source in _sources(document)]

    with judge.progress.task("soup", total=2 * len(labels) - 1) as task:

        def loss(kept: tuple[int, ...]) -> float:
            measured = journal.recall(kept, lambda: judge.loss(_mean(document, kept), text))
            task.advance(loss=measured)
            return measured

        alone = [loss((number,)) for number in range(len(labels))]
        soup = greedy(alone, loss, strict=judge.settings.compat == "mergekit")
    output.details["soup"] = soup.report(labels)
    judge.progress.log(
        f"soup of {', '.join(labels[number] for number in soup.kept)}: {soup.loss:.4f} nats a token"
    )
    return _mean(document, soup.kept)


def _sources(document: MergeConfig) -> Any:
    """The ingredients of a soup.

    Raises:
        RecipeError: they are not whole models.
    """
    slices = [each for module in document.modules for each in module.slices]
    if len(slices) != 1 or any(source.layers is not None for source in slices[0].sources):
        raise RecipeError(
            f"{document.where}: greedy_soup takes whole models",
            hint="list them under 'models', without slices",
        )
    return slices[0].sources


def _mean(document: MergeConfig, kept: tuple[int, ...]) -> MergeConfig:
    """The uniform mean of some of a document's models."""
    sources = [replace(_sources(document)[number], parameters={"weight": Setting(1.0)}) for number in kept]
    module = document.modules[0]
    one = replace(module.slices[0], sources=tuple(sources), parameters={})
    return replace(
        document, method="linear", modules=(replace(module, slices=(one,), parameters={}),), parameters={}
    )
