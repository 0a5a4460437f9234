"""Features of whole models: what is compared, in which layers and at which positions; what is refused."""

import pytest
import torch

from attar.data.examples import Examples
from attar.distillation.feature_settings import FEATURE_NAMES, FeatureSettings
from attar.distillation.features import FEATURES
from attar.distillation.features.probe import make_features
from attar.distillation.loss import DistillationLoss
from attar.distillation.objectives import SLOPES
from attar.distillation.outputs import run_model
from attar.distillation.signals.online import OnlineTeacher
from attar.errors import ModelError, SettingsError
from tests import tiny_models

SMALLER = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}


def value(feature, student, teacher, batch):
    """The feature's loss on a batch."""
    outputs = [run_model(model, batch, feature.insides) for model in (student, teacher)]
    return feature.loss(*outputs, feature.projections)


def features_of(student, teacher, *names, task="causal", **options):
    return make_features(student, teacher, FeatureSettings(features=names, **options), task, 0)


def test_the_table_has_the_names_of_the_settings():
    assert tuple(FEATURES) == FEATURE_NAMES


@pytest.mark.parametrize("name", FEATURE_NAMES)
@pytest.mark.parametrize("family", ["llama3", "gpt2", "gemma2", "bert", "distilbert"])
def test_a_model_agrees_with_itself(name, family):
    teacher, student = tiny_models.build(family), tiny_models.build(family, seed=1)
    batch = Examples.of_text(tiny_models.tokens(teacher))
    (feature,) = features_of(teacher, teacher, name)
    assert value(feature, teacher, teacher, batch).item() == pytest.approx(0.0, abs=1e-5)
    (feature,) = features_of(student, teacher, name)
    assert value(feature, student, teacher, batch).item() > 1e-3


@pytest.mark.parametrize("name", FEATURE_NAMES)
def test_padding_and_prompts_change_nothing(name):
    """Rows padded on the right, and prompts at whose positions nothing is predicted."""
    teacher, student = tiny_models.build("llama3"), tiny_models.build("llama3", seed=1, **SMALLER)
    tokens = tiny_models.tokens(teacher, batch=1, length=9)
    batch = Examples.of_text(tokens)
    (feature,) = features_of(student, teacher, name)
    padded = Examples.of_text(torch.cat([tokens, torch.full((1, 5), -100)], dim=1))
    padded.targets[:, 8:] = -100
    wanted = value(feature, student, teacher, batch).item()
    assert value(feature, student, teacher, padded).item() == pytest.approx(wanted, rel=1e-4)
    answer = Examples(batch.tokens, batch.targets.clone())
    answer.targets[:, :4] = -100
    of_answer = value(feature, student, teacher, answer).item()
    assert of_answer != pytest.approx(wanted, rel=1e-3)
    outputs = [run_model(model, batch, feature.insides) for model in (student, teacher)]
    for output in outputs:
        output.compared[:, :4] = False
    if name != "relation":
        assert feature.loss(*outputs, feature.projections).item() == pytest.approx(of_answer, rel=1e-5)


@pytest.mark.parametrize("name", FEATURE_NAMES)
def test_parts_of_a_batch_weighed_by_their_predictions_are_the_batch(name):
    teacher, student = tiny_models.build("llama3"), tiny_models.build("llama3", seed=1, **SMALLER)
    tokens = tiny_models.tokens(teacher, batch=4)
    tokens[0, 5:] = -100
    batch = Examples.of_text(tokens)
    (feature,) = features_of(student, teacher, name)
    parts = [(value(feature, student, teacher, part).item(), part.count()) for part in batch.split(2)]
    whole = sum(loss * count for loss, count in parts) / batch.count()
    assert value(feature, student, teacher, batch).item() == pytest.approx(whole, rel=1e-5)


def test_hidden_states_of_pairs_against_a_loop():
    teacher, student = tiny_models.build("llama3"), tiny_models.build("llama3", seed=1, **SMALLER)
    batch = Examples.of_text(tiny_models.tokens(teacher))
    (feature,) = features_of(student, teacher, "hidden", feature_map="0:1,1:0,1:2")
    W = feature.projections["hidden"].weight
    assert W.shape == (64, 32)
    with torch.no_grad():
        ours = student(batch.tokens, output_hidden_states=True).hidden_states
        theirs = teacher(batch.tokens, output_hidden_states=True).hidden_states
    errors = [
        (((W @ ours[i + 1][row, s]) - theirs[j + 1][row, s]) ** 2).mean().item()
        for i, j in ((0, 1), (1, 0), (1, 2))
        for row in range(2)
        for s in range(11)
    ]
    wanted = sum(errors) / len(errors)
    assert value(feature, student, teacher, batch).item() == pytest.approx(wanted, rel=1e-4)


def test_encoders_compare_all_tokens_or_the_first():
    teacher, student = tiny_models.build("bert"), tiny_models.build("bert", seed=1, num_hidden_layers=2)
    tokens = tiny_models.tokens(teacher)
    tokens[1, 7:] = -100
    nothing = torch.full_like(tokens, -100)
    nothing[0, 3] = 5
    batch = Examples(tokens, nothing)
    (feature,) = features_of(student, teacher, "patient", task="masked")
    assert run_model(student, batch, feature.insides).compared.sum() == 12 + 7
    (feature,) = features_of(student, teacher, "patient", task="masked", feature_tokens="first")
    first = run_model(student, batch, feature.insides).compared
    assert first.nonzero().tolist() == [[0, 0], [1, 0]]
    with pytest.raises(SettingsError, match="classes are not predicted at tokens"):
        features_of(student, teacher, "hidden", task="classification", feature_tokens="predicted")


def test_projections_only_where_widths_differ():
    teacher, student = tiny_models.build("llama3"), tiny_models.build("llama3", seed=1)
    (feature,) = features_of(student, teacher, "hidden")
    assert not feature.projections
    (feature,) = features_of(student, teacher, "hidden", projection="always")
    assert torch.equal(feature.projections["hidden"].weight, torch.eye(64))
    random = torch.random.get_rng_state()
    narrow = tiny_models.build("llama3", **SMALLER)
    torch.random.set_rng_state(random)
    first, second = (features_of(narrow, teacher, "embeddings")[0].projections["embeddings"] for _ in "ab")
    assert torch.equal(first.weight, second.weight)
    assert torch.equal(torch.random.get_rng_state(), random)
    assert torch.allclose(first.weight.T @ first.weight, torch.eye(32), atol=1e-5)


def test_what_is_refused():
    teacher, student = tiny_models.build("llama3"), tiny_models.build("llama3", num_hidden_layers=1)
    with pytest.raises(SettingsError, match="patient leaves the student's last layer out"):
        features_of(student, teacher, "patient")
    with pytest.raises(SettingsError, match="distinct pairs of the student's 1 layers and the teacher's 3"):
        features_of(student, teacher, "hidden", feature_map="0:3")
    with pytest.raises(SettingsError, match="the teacher has 1 layers, not 3"):
        features_of(teacher, student, "hidden", feature_map="last")


@pytest.mark.parametrize("name", ["hidden", "attention"])
def test_a_model_that_reports_nothing_is_refused(name, monkeypatch):
    teacher, student = tiny_models.build("llama3"), tiny_models.build("llama3")
    forward = type(teacher).forward

    def silent(self, **inputs):
        outputs = forward(self, **inputs)
        outputs["attentions" if name == "attention" else "hidden_states"] = None
        return outputs

    monkeypatch.setattr(type(teacher), "forward", silent)
    with pytest.raises(ModelError, match=r"llama (does not report|reports attention maps of 0 of its 3)"):
        features_of(student, teacher, name)


def test_features_add_to_predictions():
    teacher, student = tiny_models.build("llama3"), tiny_models.build("llama3", seed=1)
    batch = Examples.of_text(tiny_models.tokens(teacher))
    signal = OnlineTeacher(teacher, SLOPES["kl"], 1.0)
    features = features_of(student, teacher, "hidden:0.5", "embeddings:2")
    parts = [feature.weight * value(feature, student, teacher, batch).item() for feature in features]
    plain = DistillationLoss(signal, 0.3)(student, batch).item()
    assert plain > 0.01 and min(parts) > 0.01
    together = DistillationLoss(signal, 0.3, features, weight=2.0)(student, batch).item()
    assert together == pytest.approx(2 * plain + sum(parts), rel=1e-5)
    alone = DistillationLoss(signal, 0.3, features, weight=0.0)(student, batch).item()
    assert alone == pytest.approx(sum(parts), rel=1e-5)
