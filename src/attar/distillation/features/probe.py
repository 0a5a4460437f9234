"""The features that the settings name, made for two models: both run over a few tokens first, so that what a
family does not report is refused before any work."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from attar.data.examples import Examples
from attar.distillation.feature_settings import FeatureSettings
from attar.distillation.features import FEATURES
from attar.distillation.features.feature import LAYER_WEIGHTS, ComparedModels, Feature
from attar.distillation.features.learned_map import LearnedMap
from attar.distillation.layer_map import layer_pairs
from attar.distillation.outputs import NOTHING, Intermediates, ModelOutputs, run_model
from attar.errors import ModelError
from attar.models.head import evaluating

PROBE = 4  # tokens
MAP_ENTROPY = 0.1  # weight of the entropy of a learned map; larger values sharpen the map to one-hot


def make_features(
    student: Any, teacher: Any, settings: FeatureSettings, task: str, seed: int
) -> list[Feature]:
    """The features of the settings.

    Args:
        student: its attention becomes eager where attention maps are compared; so does the teacher's.
        task: its name.

    Raises:
        ModelError: a model reports no hidden states or no attention maps.
        SettingsError: the layer map does not suit the models.
    """
    weights = settings.weights()
    if not weights:
        return []
    tokens = _tokens(weights, task)
    intermediates = Intermediates(
        states=True, attentions=any(name.startswith("attention") for name in weights), qkv="qkv" in weights
    )
    ours, theirs = (probe(model, intermediates, task) for model in (student, teacher))
    pairs = layer_pairs(settings.feature_map, teacher=theirs.depth, student=ours.depth)
    learned = None
    if settings.feature_map == "learned":
        start = layer_pairs("uniform", teacher=theirs.depth, student=ours.depth)
        learned = LearnedMap(start, theirs.depth).to(ours.mask.device)
    models = ComparedModels(ours, theirs, settings, pairs, seed, learned)
    features = [
        dataclasses.replace(FEATURES[name](models), weight=weight) for name, weight in weights.items()
    ]
    if learned is not None:
        features.append(map_entropy(MAP_ENTROPY))
    return [
        dataclasses.replace(feature, intermediates=dataclasses.replace(feature.intermediates, tokens=tokens))
        for feature in features
    ]


def map_entropy(weight: float) -> Feature:
    """The entropy of the learned map, as a part of the loss."""
    return Feature(
        "map_entropy", lambda _, __, projections: projections[LAYER_WEIGHTS].entropy(), NOTHING, weight
    )


def _tokens(names: Iterable[str], task: str) -> str:
    """Which positions are compared: those of next tokens; of an encoder with ``patient`` [CLS], else all."""
    if task == "causal":
        return "predicted"
    return "first" if "patient" in names else "all"


def probe(model: Any, intermediates: Intermediates, task: str = "causal") -> ModelOutputs:
    """A model's outputs for a few tokens, in evaluation mode, without gradients.

    Raises:
        ModelError: its family does not report what is asked for.
    """
    if intermediates.attentions:
        _make_eager(model)
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    row = torch.arange(3, 3 + PROBE, device=next(model.parameters()).device)[None] % vocabulary
    batch = Examples(row, row[:, 0] * 0) if task == "classification" else Examples.of_text(row)
    with torch.no_grad(), evaluating(model):
        outputs = run_model(model, batch, intermediates)
    states, attentions = outputs.states, outputs.attentions
    hint = "--features of another kind, or none"
    if len(states) < 2 or any(s is None or s.shape != states[0].shape or s.dim() != 3 for s in states):
        raise ModelError(f"{_family(model)} does not report its hidden states", hint=hint)
    maps = [a for a in attentions if a is not None and a.dim() == 4 and a.shape[2:] == (PROBE, PROBE)]
    if intermediates.attentions and (len(maps) != len(attentions) or len(maps) != len(states) - 1):
        problem = f"{_family(model)} reports attention maps of {len(maps)} of its {len(states) - 1} layers"
        raise ModelError(problem, hint=hint)
    return outputs


def _make_eager(model: Any) -> None:
    """Have a model compute its attention maps; the fast kernels never hold them.

    Raises:
        ModelError: its family has no such attention.
    """
    try:
        model.set_attn_implementation("eager")
    except (ValueError, AttributeError, NotImplementedError) as error:
        raise ModelError(
            f"{_family(model)} has no eager attention, which alone gives attention maps",
            hint="--features of another kind, or none",
        ) from error


def _family(model: Any) -> str:
    return str(model.config.model_type)
