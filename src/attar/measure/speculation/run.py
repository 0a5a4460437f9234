"""``attar bench --speculate``: from settings to a profile, the target loaded once for all methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from attar.checkpoint.lineage import texts_of
from attar.checkpoint.open import open_checkpoint
from attar.data.seen import seen
from attar.measure.speculation.metrics import Profile
from attar.measure.speculation.profile import FixedPolicy, profile
from attar.measure.speculation.prompts import prompt_sets, question_sets, read_questions
from attar.progress import SILENT, Progress
from attar.runtime.kv.compose import evicting
from attar.runtime.llm import LLM
from attar.runtime.loading import Loaded, load
from attar.runtime.settings import BenchSettings, EngineSettings
from attar.runtime.speculate.build import layers_read, make_speculator
from attar.runtime.speculate.settings import LOSSY, ProfileSettings, SpeculationSettings
from attar.runtime.speculate.speculator import Speculator

ALIKE = ("device",)  # of target and draft; what is drafted is checked, in whatever dtype
DRAFTING = tuple(option.name for option in fields(SpeculationSettings))


def run_profile(
    model: str,
    chosen: ProfileSettings,
    bench: BenchSettings,
    engine: EngineSettings,
    *,
    batches: tuple[int, ...] = (1,),
    progress: Progress = SILENT,
) -> Profile:
    """Measure a model.

    Args:
        chosen: methods and prompts.
        bench: tokens, rounds and the prompts' seed.
        engine: how the target is run.
        batches: sequences that run together.

    Raises:
        as :class:`attar.runtime.llm.LLM`, :func:`read_questions` and :func:`profile`.
    """
    texts = _texts(chosen, bench.seed)
    left_out = (*DRAFTING, "prefix_store")
    options = {name: value for name, value in engine.options().items() if name not in left_out}
    limits, reuse = options.pop("limits"), options.pop("prefix_cache")
    with progress.task("load", total=1) as task:
        read = {
            layer for draft in chosen.draft for layer in layers_read(draft, evicting(options["eviction"]))
        }
        loaded = load(model, **options, hidden_layers=tuple(sorted(read)))
        methods = make_methods(model, loaded, chosen, {name: options[name] for name in ALIKE})
        llm = LLM.of(loaded, limits=limits, prefix_cache=reuse)
        task.advance()
    sets = {name: [_encoded(llm, text, chosen) for text in option] for name, option in texts.items()}
    note = held_out_note(llm.tokenizer, sets, [model, *chosen.draft])
    if note:
        progress.log(f"warning: not measured on held-out text: {note}")
    measured = profile(
        llm.engine,
        llm.name,
        methods,
        sets,
        batches=batches,
        tokens=bench.tokens,
        rounds=bench.rounds,
        temperature=chosen.temperature,
        progress=progress,
    )
    lossy = chosen.verification == LOSSY and chosen.temperature > 0
    return replace(measured, held_out_note=note, lossy=lossy)


def held_out_note(tokenizer: Any, sets: Mapping[str, Sequence[Sequence[int]]], models: Sequence[str]) -> str:
    """Which sets of prompts the models were trained on, by the records of their lineage.

    A draft model that was trained on the prompts is accepted more often than it will be on other text.

    Args:
        sets: prompts as token ids.
        models: the target and the draft models, as they were given.
    """
    notes = []
    for model in models:
        records = texts_of(open_checkpoint(model))
        for name, prompts in sets.items():
            rows = [torch.tensor([prompt]) for prompt in prompts]
            notes += [f"{model}, set {name}: {sentence}" for sentence in seen(tokenizer, rows, records)]
    return "; ".join(notes)


def make_methods(
    model: str, loaded: Loaded, chosen: ProfileSettings, alike: Mapping[str, Any]
) -> dict[str, Speculator]:
    """A speculator for each method and number of drafts, by what people call them."""
    methods = {}
    options = {name: {"speculate": name} for name in chosen.speculate}
    options |= {name: {"draft": name, "speculate": "draft"} for name in chosen.draft}
    options |= {f"{name}+suffix": {"draft": name} for name in chosen.draft}
    for name, option in options.items():
        for most in chosen.drafts or (None,):
            wanted = SpeculationSettings(**option, drafts=most, verification=chosen.verification)
            speculator = make_speculator(wanted, loaded, model, **alike)
            assert speculator is not None, f"{option} gives no speculator"
            if chosen.fixed and most is not None:
                speculator.policy = FixedPolicy(most)
            methods[name if most is None else f"{name}, {most}"] = speculator
    return methods


def _texts(chosen: ProfileSettings, seed: int) -> dict[str, list[str]]:
    if chosen.prompt_file is not None:
        return question_sets(read_questions(chosen.prompt_file), chosen.prompts)
    return prompt_sets(chosen.sets, chosen.prompts, seed)


def _encoded(llm: LLM, text: str, chosen: ProfileSettings) -> list[int]:
    """Questions go through the chat template where the model has one."""
    if chosen.prompt_file is not None and getattr(llm.tokenizer, "chat_template", None):
        return llm.encode_chat([{"role": "user", "content": text}])
    return llm.encode(text)
