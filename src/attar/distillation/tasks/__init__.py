"""Tasks: what a model predicts. One file each, and the table of their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attar.data.labelled import has_labels
from attar.distillation.settings import LearnSettings
from attar.distillation.tasks.causal import causal
from attar.distillation.tasks.classification import classification
from attar.distillation.tasks.masked import masked
from attar.distillation.tasks.task import Task
from attar.errors import SettingsError
from attar.models.classifiers import is_classifier
from attar.options import flatten

CAUSAL_ONLY = ("for_drafting", "teacher_generated", "teacher_top", "teacher_samples")
"""Options that need rows of text, predicted from left to right."""

TASKS: dict[str, Task] = {"causal": causal, "masked": masked, "classification": classification}


def task_of(config: Mapping[str, Any], settings: LearnSettings) -> Task:
    """What a model predicts: as the settings say; ``auto``: as its architecture does, and for a model without
    a head its data.

    Args:
        config: the model's config.json.

    Raises:
        SettingsError: a setting is of causal language models alone.
    """
    task = TASKS[natural_task(config, settings.data) if settings.task == "auto" else settings.task]
    if task is not causal:
        _refuse_causal_settings(task, settings)
    return task


def natural_task(config: Mapping[str, Any], data: str) -> str:
    """What a model's architecture predicts; of a model without a head, what its data labels."""
    architecture = str((config.get("architectures") or [""])[0])
    if is_classifier(config):
        return "classification"
    if architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return "causal"
    if has_labels(data):
        return "classification"
    return "masked" if architecture.endswith("ForMaskedLM") else "causal"


def _refuse_causal_settings(task: Task, settings: LearnSettings) -> None:
    options = flatten(settings)
    for name in CAUSAL_ONLY:
        if options.get(name):
            raise SettingsError(name, options[name], f"left out with task {task.name}")
    if settings.student_share:
        raise SettingsError("student_generated", settings.student_share, f"0 with task {task.name}")
