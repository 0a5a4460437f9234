"""Choices made on held-out text before the merge is written: a soup's ingredients, a search's coefficients.

Candidates of a small model are merged in memory; of a larger one they are written to the work folder, one at
a time. Losses are cached in the work folder: a resumed stage does not measure them again.
"""

from __future__ import annotations

import math
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from attar.checkpoint import atomic
from attar.checkpoint.output import StageOutput
from attar.data.packing import row_length
from attar.data.seen import note_texts, record
from attar.errors import CheckpointError, RecipeError, UsageError
from attar.merging.adapters.apply import copy_companions_of, tokenizer_folder
from attar.merging.config.dump import config_text
from attar.merging.config.schema import SEARCHED, MergeConfig, MergeSource, ParameterSetting
from attar.merging.parents import ParentModels
from attar.merging.planning.prepare import PreparedMerge, prepare
from attar.merging.quality import HeldOutText
from attar.merging.search.coefficients import SearchSpace, search
from attar.merging.search.loss_cache import LossCache
from attar.merging.search.soup import greedy_soup
from attar.merging.settings import MergeSettings
from attar.models.loading.load import load_tokenizer
from attar.progress import Progress

FILE = "found.yml"
"""The chosen merge as a configuration that needs no search."""

IN_MEMORY = 2_000_000_000
"""Bytes of a model, in float32, whose candidates are merged in memory."""


def choose(
    prepared: PreparedMerge,
    parents: ParentModels,
    settings: MergeSettings,
    output: StageOutput,
    progress: Progress,
) -> PreparedMerge:
    """The merge with the ingredients or coefficients chosen on held-out text.

    All trials go to the card's details, the chosen configuration to ``found.yml``.

    Raises:
        UsageError: there is nothing to choose between.
        DataError: the held-out text is missing or too short.
        NumericsError: no candidate has a finite loss.
    """
    is_soup = prepared.document.method in SEARCHED
    if is_soup and settings.search:
        raise UsageError("greedy_soup chooses by itself", hint="leave out --search, or use linear")
    plan = prepared.merge.plan
    length = row_length(settings.sequence_length, dict(plan.config))
    tokenizer = load_tokenizer(tokenizer_folder(plan.models[plan.donor]))
    read = record("merge", tokenizer, settings, "calibration", length=length, rows=settings.samples)
    note_texts(output, [read], progress)
    scorer = _CandidateScorer(prepared, parents, settings, output.work / "candidate", progress)
    chosen = _choose_ingredients(scorer, output) if is_soup else _search_coefficients(scorer, output)
    (output.folder / FILE).write_text(config_text(chosen), encoding="utf-8")
    return prepare(chosen, parents, settings)


@dataclass(frozen=True)
class _CandidateScorer:
    """Losses of merges."""

    prepared: PreparedMerge
    parents: ParentModels
    settings: MergeSettings
    folder: Path
    progress: Progress

    def text(self) -> HeldOutText:
        """The held-out text, in the tokenizer of the merge's donor."""
        plan = self.prepared.merge.plan
        return HeldOutText.of(tokenizer_folder(plan.models[plan.donor]), plan.config, self.settings)

    def loss(self, document: MergeConfig, text: HeldOutText) -> float:
        """Held-out loss of a document's merge."""
        merge = prepare(document, self.parents, self.settings).merge.scanned()
        size = sum(4 * math.prod(output.shape) for output in merge.plan.outputs)
        if size <= IN_MEMORY and merge.vocabulary is None:
            with suppress(CheckpointError):  # a family whose names transformers converts as it loads
                return text.loss_of(merge.plan.config, merge.state())
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        atomic.write_json(self.folder / "config.json", merge.plan.config)
        copy_companions_of(merge.plan.models[merge.plan.donor], self.folder)
        merge.write(self.folder)
        loss = text.loss(self.folder)
        shutil.rmtree(self.folder)
        return loss


def _search_coefficients(scorer: _CandidateScorer, output: StageOutput) -> MergeConfig:
    """The configuration with the numbers that a search gave."""
    if scorer.prepared.merge.vocabulary is not None:
        raise UsageError(
            "a search and a merged tokenizer do not go together",
            hint="search with models of one tokenizer, or merge first with the coefficients as they are",
        )
    text, space = scorer.text(), SearchSpace.of(scorer.prepared.document)
    result = search(
        space,
        lambda values: scorer.loss(space.config_with(values), text),
        budget=scorer.settings.search,
        seed=scorer.settings.seed,
        cache=LossCache(output.shared / "search.jsonl"),
        progress=scorer.progress,
    )
    output.details["search"] = result.report(space)
    return space.config_with(result.best.values)


def _choose_ingredients(scorer: _CandidateScorer, output: StageOutput) -> MergeConfig:
    """The mean of the models that a greedy soup keeps."""
    text, document = scorer.text(), scorer.prepared.document
    cache = LossCache(output.shared / "soup.jsonl")
    labels = [str(source.model) for source in _ingredients(document)]

    with scorer.progress.task("soup", total=2 * len(labels) - 1) as task:

        def loss(indices: tuple[int, ...]) -> float:
            measured = cache.loss(indices, lambda: scorer.loss(_mean(document, indices), text))
            task.advance(loss=measured)
            return measured

        alone = [loss((index,)) for index in range(len(labels))]
        soup = greedy_soup(alone, loss, strict=scorer.settings.compat == "mergekit")
    output.details["soup"] = soup.report(labels)
    kept = ", ".join(labels[index] for index in soup.kept)
    scorer.progress.log(f"soup of {kept}: {soup.loss:.4f} nats a token")
    return _mean(document, soup.kept)


def _ingredients(document: MergeConfig) -> tuple[MergeSource, ...]:
    """The ingredients of a soup.

    Raises:
        RecipeError: they are not whole models.
    """
    slices = document.slices()
    if len(slices) != 1 or any(source.layers is not None for source in slices[0].sources):
        raise RecipeError(
            f"{document.where}: greedy_soup takes whole models",
            hint="list them under 'models', without slices",
        )
    return slices[0].sources


def _mean(document: MergeConfig, indices: tuple[int, ...]) -> MergeConfig:
    """The uniform mean of some of a document's models."""
    ingredients, weight = _ingredients(document), {"weight": ParameterSetting(1.0)}
    sources = tuple(replace(ingredients[index], parameters=weight) for index in indices)
    module = document.modules[0]
    part = replace(module.slices[0], sources=sources, parameters={})
    module = replace(module, slices=(part,), parameters={})
    return replace(document, method="linear", modules=(module,), parameters={})
