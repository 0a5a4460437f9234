"""Sequence classifiers: whether a checkpoint is one, and a fresh head on a model that is none."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from attar.errors import ModelError
from attar.models.loading.configs import quiet

SUFFIX = "ForSequenceClassification"


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether a parsed config.json is of a sequence classifier."""
    return any(str(name).endswith(SUFFIX) for name in config.get("architectures") or [])


def class_names_of(config: Any, name: str) -> list[str]:
    """The names of a classifier's classes, by number.

    Args:
        config: transformers' config; name: of the model, for messages.

    Raises:
        ModelError: it predicts one score, or several labels at once.
    """
    if config.num_labels < 2 or config.problem_type not in (None, "single_label_classification"):
        raise ModelError(
            f"{name} predicts no single class (problem_type {config.problem_type}, "
            f"{config.num_labels} labels)",
            hint="attar takes classifiers of two classes and more",
        )
    return [str(config.id2label[number]) for number in range(config.num_labels)]


def with_classifier(model: Any, names: Sequence[str], seed: int = 0) -> Any:
    """A sequence classifier of the same family on the model's backbone, in float32 on its device, in
    evaluation mode. The head, pooling included, is what transformers' class of the family has; weights that
    the model lacks are fresh.

    Args:
        model: a transformers model with any head or none; its weights are copied.
        names: of the classes, by number.
        seed: of the fresh weights.

    Raises:
        ModelError: transformers has no classifier of this family.
    """
    config = copy.deepcopy(model.config)
    kind = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if kind is None:
        raise ModelError(f"{config.model_type}: transformers has no sequence classifier of this family")
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in enumerate(names)}
    config.problem_type = "single_label_classification"
    config.architectures = [kind.__name__]
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)
        classifier = kind._from_config(config, dtype=torch.float32)
        classifier.set_attn_implementation(model.config._attn_implementation)
    weights = {name: tensor.float() for name, tensor in model.base_model.state_dict().items()}
    known = classifier.base_model.state_dict()
    fitting = {name: tensor for name, tensor in weights.items() if name in known}
    classifier.base_model.load_state_dict(fitting, strict=False)
    return classifier.eval().to(next(model.parameters()).device)


def fresh_weights(classifier: Any, model: Any) -> list[str]:
    """Names of the classifier's parameters that the model it was made of lacks."""
    prefix, known = f"{classifier.base_model_prefix}.", model.base_model.state_dict()
    return [name for name, _ in classifier.named_parameters() if name.removeprefix(prefix) not in known]
