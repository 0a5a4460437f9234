"""Features of whole models: what is compared, in which layers and at which positions; what is refused."""

import math

import pytest
import torch

from attar.data.examples import Examples
from attar.distillation.feature_settings import FEATURE_NAMES, StudentFeatureSettings
from attar.distillation.features import FEATURES
from attar.distillation.features.feature import drawn_tokens
from attar.distillation.features.probe import make_features
from attar.distillation.features.qkv import relation_heads
from attar.distillation.loss import DistillationLoss
from attar.distillation.objectives import OBJECTIVES
from attar.distillation.outputs import Intermediates, run_model
from attar.distillation.signals.online import OnlineTeacher
from attar.errors import ModelError, SettingsError
from attar.models.anatomy.discover import discover
from tests import tiny_models

SMALLER = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}


def value(feature, student, teacher, batch):
    """The feature's loss on a batch."""
    outputs = [run_model(model, batch, feature.intermediates) for model in (student, teacher)]
    return feature.loss(*outputs, feature.projections)


def features_of(student, teacher, *names, task="causal", **options):
    return make_features(student, teacher, StudentFeatureSettings(features=names, **options), task, 0)


def test_the_table_has_the_names_of_the_settings():
    assert tuple(FEATURES) == FEATURE_NAMES


@pytest.mark.few(5)
@pytest.mark.parametrize("name", FEATURE_NAMES)
@pytest.mark.parametrize("family", ["llama3", "gpt2", "gemma2", "bert", "distilbert"])
def test_a_model_agrees_with_itself(name, family):
    teacher, student = tiny_models.build(family), tiny_models.build(family, seed=1)
    batch = Examples.of_text(tiny_models.tokens(teacher))
    (feature,) = features_of(teacher, teacher, name)
    assert value(feature, teacher, teacher, batch).item() == pytest.approx(0.0, abs=1e-5)
    (feature,) = features_of(student, teacher, name)
    assert value(feature, student, teacher, batch).item() > 1e-3


@pytest.mark.few(4)
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
    outputs = [run_model(model, batch, feature.intermediates) for model in (student, teacher)]
    for output in outputs:
        output.compared[:, :4] = False
    assert feature.loss(*outputs, feature.projections).item() == pytest.approx(of_answer, rel=1e-5)


@pytest.mark.parametrize("name", ["hidden", "patient", "embeddings", "attention", "qkv"])
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
    (feature,) = features_of(student, teacher, "hidden", task="masked")
    assert run_model(student, batch, feature.intermediates).compared.sum() == 12 + 7
    (feature,) = features_of(student, teacher, "patient", task="masked")
    first = run_model(student, batch, feature.intermediates).compared
    assert first.nonzero().tolist() == [[0, 0], [1, 0]]


def test_projections_only_where_widths_differ():
    teacher, student = tiny_models.build("llama3"), tiny_models.build("llama3", seed=1)
    (feature,) = features_of(student, teacher, "hidden")
    assert not feature.projections
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
    signal = OnlineTeacher(teacher, OBJECTIVES["kl"], 1.0)
    features = features_of(student, teacher, "hidden:0.5", "embeddings:2")
    parts = [feature.weight * value(feature, student, teacher, batch).item() for feature in features]
    plain = DistillationLoss(signal, 0.3)(student, batch).item()
    assert plain > 0.01 and min(parts) > 0.01
    together = DistillationLoss(signal, 0.3, features, weight=2.0)(student, batch).item()
    assert together == pytest.approx(2 * plain + sum(parts), rel=1e-5)
    alone = DistillationLoss(signal, 0.3, features, weight=0.0)(student, batch).item()
    assert alone == pytest.approx(sum(parts), rel=1e-5)


def test_qkv_against_a_loop():
    """Of a fused Conv1D and of projections of their own, with other widths and heads."""
    teacher = tiny_models.build("gpt2")
    student = tiny_models.build("llama3", seed=1, **SMALLER | {"num_key_value_heads": 4})
    tokens = tiny_models.tokens(teacher)
    tokens[1, 9:] = -100
    batch = Examples.of_text(tokens)
    (feature,) = features_of(student, teacher, "qkv", feature_map="1:2")
    inputs = {"input_ids": batch.inputs, "attention_mask": batch.mask.long(), "output_hidden_states": True}
    with torch.no_grad():
        theirs, ours = (model(**inputs).hidden_states for model in (teacher, student))
        block, layer = teacher.transformer.h[2], student.model.layers[1]
        fused = block.attn.c_attn(block.ln_1(theirs[2]))
        ours = layer.input_layernorm(ours[1])
        attention = layer.self_attn
        mine = [part(ours) for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
    errors = []
    for x, target in zip(mine, fused.split(64, -1), strict=True):
        for row, s in batch.predicted.nonzero().tolist():
            length = int(batch.mask[row].sum())
            for head in range(2):
                a, b = (
                    y[row, :length].double().chunk(2, -1)[head] / (y.shape[-1] / 2) ** 0.25
                    for y in (x, target)
                )
                log_a, log_b = (
                    torch.stack([z[s] @ z[k] for k in range(length)]).log_softmax(0) for z in (a, b)
                )
                errors.append(
                    sum(math.exp(q) * (q - p) for p, q in zip(log_a.tolist(), log_b.tolist(), strict=True))
                )
    wanted = sum(errors) / len(errors)
    assert wanted > 0.01
    assert value(feature, student, teacher, batch).item() == pytest.approx(wanted, rel=1e-4)


@pytest.mark.few(5)
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_queries_keys_and_values_of_every_family(family):
    """Each has a gradient by the weights of its own module, and as many columns as its heads."""
    model = tiny_models.build(family)
    batch = Examples.of_text(tiny_models.tokens(model))
    outputs = run_model(model, batch, Intermediates(qkv=True))
    widths = [
        [part.out_features for part in (block.attention.q, block.attention.k, block.attention.v)]
        for block in discover(model).blocks
    ]
    assert [[x.shape[-1] for x in layer] for layer in outputs.qkv] == widths
    assert all(x.shape[:2] == batch.tokens.shape and x.requires_grad for layer in outputs.qkv for x in layer)
    assert not any(module._forward_hooks for module in model.modules())


def test_relation_heads_divide_all_widths():
    assert [relation_heads({576, 192}), relation_heads({768}), relation_heads({96, 64})] == [12, 48, 4]


def test_drawn_tokens_are_those_of_the_batch():
    """Compared ones, the same for both models and again; others for another batch."""
    model = tiny_models.build("llama3")
    draws = []
    for seed in (0, 0, 1):
        tokens = tiny_models.tokens(model, batch=4, seed=seed)
        tokens[0, 6:] = -100
        outputs = run_model(model, Examples.of_text(tokens), Intermediates(states=True, tokens="predicted"))
        rows, positions = drawn_tokens(outputs, 10)
        assert bool(outputs.compared[rows, positions].all())
        draws.append(sorted(zip(rows.tolist(), positions.tolist(), strict=True)))
    assert draws[0] == draws[1] != draws[2] and len(set(draws[0])) == 10
    assert len(drawn_tokens(outputs, 500)[0]) == 5 + 3 * 11
