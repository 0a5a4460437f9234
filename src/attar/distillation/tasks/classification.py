"""The classification task: one class for each text, or pair of texts.

Hinton's loss on classes is the soft loss of the objectives with n = rows and V = classes: Hinton, Vinyals,
Dean 2015, "Distilling the Knowledge in a Neural Network", arXiv 1503.02531, section 2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attar.checkpoint.open import Checkpoint
from attar.data.examples import Examples
from attar.data.labelled import (
    LabelledSplit,
    class_names,
    class_numbers,
    classification_examples,
    labelled_record,
    labelled_split,
    read_labelled,
)
from attar.data.packing import SimilarLengths, row_length
from attar.distillation.settings import RowSettings
from attar.distillation.tasks.task import Task
from attar.errors import ModelError
from attar.models.classifiers import class_names_of, fresh_weights, is_classifier, with_classifier
from attar.models.loading.configs import load_config
from attar.models.loading.device import pick_device
from attar.models.loading.load import load_model, load_tokenizer
from attar.progress import SILENT, Progress


def load_classifier(
    checkpoint: Checkpoint, settings: RowSettings, *, teacher: bool = False, progress: Progress = SILENT
) -> Any:
    """The classifier in float32 on its device; a model without a classifier's head gets a fresh one, with
    the classes of the data.

    Raises:
        DataError: the data holds no labels, or one that the model does not have.
        ModelError: the teacher is no classifier.
    """
    names = classes(checkpoint, settings)
    class_numbers(read_labelled(settings.data), names)  # refused before the weights are read
    has_head = is_classifier(checkpoint.config)
    if teacher and not has_head:
        raise ModelError(
            f"{checkpoint.path}: {checkpoint.config['architectures'][0]} is not a classifier to learn from",
            hint=f"attar recover {checkpoint.name} --task classification --alpha 0 makes one of it",
        )
    model = load_model(checkpoint, dtype=torch.float32, device=pick_device(settings.device))
    if has_head:
        return model
    classifier = with_classifier(model, names, settings.seed)
    fresh = ", ".join(fresh_weights(classifier, model))
    progress.log(f"{checkpoint.name} has no classifier: fresh weights in {fresh} ({', '.join(names)})")
    return classifier


def classes(checkpoint: Checkpoint, settings: RowSettings) -> list[str]:
    """The names of the classes, by number: the model's; where it is no classifier, those of the data."""
    if is_classifier(checkpoint.config):
        return class_names_of(load_config(checkpoint.path, checkpoint.config), checkpoint.name)
    return class_names(read_labelled(settings.data))


def _chosen(settings: RowSettings, split: str, count: int | None) -> LabelledSplit:
    """The first ``count`` texts of a split; those held out are in one order whatever the seed."""
    chosen = labelled_split(settings.data, split, settings.seed if split == "train" else 0)
    return replace(chosen, rows=chosen.rows[:count])


def _examples(checkpoint: Checkpoint, settings: RowSettings, split: str, count: int | None) -> Examples:
    rows = _chosen(settings, split, count).rows
    length = row_length(settings.sequence_length, checkpoint.config)
    return classification_examples(load_tokenizer(checkpoint), rows, classes(checkpoint, settings), length)


def _training(checkpoint: Checkpoint, settings: RowSettings, count: int) -> SimilarLengths:
    examples = _examples(checkpoint, settings, "train", count)
    return SimilarLengths(examples, settings.batch_size, settings.seed)


def _held_out(checkpoint: Checkpoint, settings: RowSettings) -> Examples:
    return _examples(checkpoint, settings, "calibration", None)


def _records(stage: str, checkpoint: Checkpoint, settings: RowSettings, count: int) -> list[dict[str, Any]]:
    return [
        labelled_record(stage, settings.data, split, _chosen(settings, split, limit))
        for split, limit in (("train", count), ("calibration", None))
    ]


def check_same_classes(student: Any, teacher: Any) -> None:
    """Refuse classifiers whose classes differ; numbered ones (``LABEL_0``) are those of any names.

    Raises:
        ModelError: see above.
    """
    ours, theirs = (class_names_of(model.config, type(model).__name__) for model in (student, teacher))
    numbered = ours == [f"LABEL_{number}" for number in range(len(theirs))]
    if ours != theirs and not numbered:
        raise ModelError(
            f"the teacher's classes are {', '.join(theirs)}, the student's {', '.join(ours)}",
            hint="name them alike, in one order: id2label and label2id in config.json",
        )


classification = Task(
    "classification", load_classifier, _training, _held_out, _records, check_pair=check_same_classes
)
