"""A layer map whose weights are trained."""

import math

import pytest
import torch

from attar.data.examples import Examples
from attar.distillation.feature_settings import StudentFeatureSettings
from attar.distillation.features.feature import LAYER_WEIGHTS
from attar.distillation.features.learned_map import LearnedMap, hard_map
from attar.distillation.features.probe import make_features
from attar.distillation.layer_map import is_feature_map, layer_pairs
from attar.distillation.outputs import run_model
from tests import tiny_models


def test_it_starts_near_the_uniform_map():
    weights = LearnedMap([(0, 1), (1, 3)], 4)
    sixth = pytest.approx(1 / 6, abs=1e-4)
    assert weights.matrix() == [[sixth, 0.5, sixth, sixth], [sixth, sixth, sixth, 0.5]]
    assert hard_map(weights.matrix()) == "0:1,1:3" and is_feature_map(hard_map(weights.matrix()))
    wanted = -(0.5 * math.log(0.5) + 0.5 * math.log(1 / 6))
    assert weights.entropy().item() == pytest.approx(wanted, rel=1e-5)
    assert LearnedMap([(0, 0)], 1).matrix() == [[1.0]]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["hidden", "attention", "qkv", "relation", "patient"])
def test_the_loss_weighs_all_pairs(name):
    teacher = tiny_models.build("llama3")
    student = tiny_models.build("llama3", seed=1, num_hidden_layers=2)
    settings = StudentFeatureSettings(features=(name,), feature_map="learned")
    feature, entropy = make_features(student, teacher, settings, "causal", 0)
    batch = Examples.of_text(tiny_models.tokens(teacher))
    outputs = [run_model(model, batch, feature.intermediates) for model in (student, teacher)]
    rows = 1 if name == "patient" else 2  # the last layer is left out
    values = {}
    for i, j in layer_pairs("learned", teacher=3, student=2)[: 3 * rows]:
        one = StudentFeatureSettings(features=(name,), feature_map=f"{i}:{j}")
        (alone,) = make_features(student, teacher, one, "causal", 0)
        values[i, j] = alone.loss(*outputs, {}).item()
    weights = feature.projections[LAYER_WEIGHTS].matrix()
    wanted = sum(weights[i][j] * value for (i, j), value in values.items()) / rows
    assert feature.loss(*outputs, feature.projections).item() == pytest.approx(wanted, rel=1e-3)
    assert entropy.loss(*outputs, feature.projections).item() == pytest.approx(1.0397, abs=1e-3)
    assert entropy.weight == 0.1


def test_a_student_of_copied_layers_finds_where_they_come_from():
    """Layers 0 and 1 of the teacher; the uniform map says 1 and 2."""
    teacher = tiny_models.build("llama3")
    student = tiny_models.build("llama3", num_hidden_layers=2)
    student.load_state_dict(teacher.state_dict(), strict=False)
    student.model.norm.weight.data.fill_(1.0)  # the last state is behind it
    teacher.model.norm = torch.nn.Identity()
    student.model.norm = torch.nn.Identity()
    settings = StudentFeatureSettings(features=("hidden-relative",), feature_map="learned")
    features = make_features(student, teacher, settings, "causal", 0)
    projections = features[0].projections
    optimizer = torch.optim.Adam(projections[LAYER_WEIGHTS].parameters(), lr=1e-3)
    batch = Examples.of_text(tiny_models.tokens(teacher))
    with torch.no_grad():
        outputs = [run_model(model, batch, features[0].intermediates) for model in (student, teacher)]
    for _ in range(200):
        optimizer.zero_grad()
        sum(one.weight * one.loss(*outputs, projections) for one in features).backward()
        optimizer.step()
    matrix = projections[LAYER_WEIGHTS].matrix()
    assert hard_map(matrix) == "0:0,1:1" and min(matrix[0][0], matrix[1][1]) > 0.95


def test_the_entropy_brings_equal_layers_down_to_one():
    weights = LearnedMap([(0, 1)], 3)
    optimizer = torch.optim.Adam(weights.parameters(), lr=1e-3)
    for _ in range(200):
        optimizer.zero_grad()
        weights.entropy().backward()
        optimizer.step()
    assert max(weights.matrix()[0]) > 0.99
