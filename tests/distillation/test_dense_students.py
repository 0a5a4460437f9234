"""Dense students of mixtures: against the teacher where both compute the same, and against sums by hand."""

import pytest
import torch
import transformers
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import attar
from attar.distillation.students.dense import ExpertUse, dense_student, expert_use, joined
from attar.errors import ModelError, SettingsError
from attar.models.anatomy.discover import discover
from tests import tiny_models

SIZE = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZE |= {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64}
SIZE |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1, "num_experts_per_tok": 2}
KINDS = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 16, "norm_topk_prob": True, "head_dim": 16},
}


def build(kind, **changes):
    config = getattr(transformers, f"{kind}Config")(**SIZE, **{**KINDS[kind], **changes})
    return tiny_models.randomize(getattr(transformers, f"{kind}ForCausalLM")(config)).eval()


@pytest.mark.few(3)
@pytest.mark.parametrize("way", ["active", "mean", "used"])
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
def test_of_equal_experts_the_student_is_the_teacher(kind, way):
    teacher = build(kind)
    for layer in teacher.model.layers:
        for parameter in layer.mlp.experts.parameters():
            parameter.data[1:] = parameter.data[:1]
    rows = tiny_models.tokens(teacher, batch=2, length=9)
    student = dense_student(teacher, way, [rows])
    assert student.config.model_type == {"Mixtral": "mistral", "Qwen3Moe": "qwen3"}[kind]
    with torch.no_grad():
        torch.testing.assert_close(student(rows).logits, teacher(rows).logits, atol=2e-5, rtol=1e-4)


def test_a_shared_expert_starts_the_student():
    teacher = build("Qwen2Moe", tie_word_embeddings=True)
    for layer in teacher.model.layers:
        layer.mlp.experts.down_proj.data.zero_()
        layer.mlp.shared_expert_gate.weight.data.zero_()  # a half
    student = dense_student(teacher, "shared", [])
    for ours, theirs in zip(student.model.layers, teacher.model.layers, strict=True):
        assert torch.equal(ours.mlp.down_proj.weight, theirs.mlp.shared_expert.down_proj.weight)
        ours.mlp.down_proj.weight.data.mul_(0.5)
    rows = tiny_models.tokens(teacher, batch=1, length=6)
    with torch.no_grad():
        torch.testing.assert_close(student(rows).logits, teacher(rows).logits, atol=2e-5, rtol=1e-4)
    assert student.model.embed_tokens.weight is student.lm_head.weight


def test_use_is_counted_and_experts_are_joined_by_hand():
    teacher = build("Qwen3Moe", norm_topk_prob=False)
    rows = tiny_models.tokens(teacher, batch=2, length=7)
    mixtures = [block.mixture for block in discover(teacher).blocks]
    uses = expert_use(teacher, mixtures, [rows[:1], rows[1:]])
    assert all(use.chosen.sum() == 2 * use.tokens == 28 for use in uses)
    logits = teacher(rows, output_router_logits=True).router_logits[1]
    best, chosen = logits.softmax(-1).topk(2)
    for expert in range(4):
        torch.testing.assert_close(uses[1].gates[expert], best[chosen == expert].sum())
    experts = tuple(torch.randn(shape) for shape in [(3, 5, 4), (3, 5, 4), (3, 4, 5)])
    use = ExpertUse(torch.tensor([4.0, 1.0, 5.0]), torch.tensor([3.0, 0.5, 1.5]), tokens=10)
    gate, up, down = joined(experts, use, "active", 2)
    x = torch.randn(4)
    f = [experts[2][e] @ (F.silu(experts[0][e] @ x) * (experts[1][e] @ x)) for e in range(3)]
    torch.testing.assert_close(down @ (F.silu(gate @ x) * (up @ x)), 0.5 * (3.0 * f[0] + 1.5 * f[2]) / 4.5)
    gate, _, down = joined(experts, use, "used", 2)
    assert torch.equal(gate, experts[0][2])
    torch.testing.assert_close(down, 0.5 * experts[2][2])
    gate, _, _ = joined(experts, use, "mean", 2)
    torch.testing.assert_close(gate, 0.6 * experts[0][0] + 0.1 * experts[0][1] + 0.3 * experts[0][2])


@pytest.mark.slow
def test_a_dense_student_learns_from_its_mixture(tmp_path):
    teacher = tiny_models.save(build("Qwen3Moe"), tmp_path / "teacher")
    common = {"batch_size": 4, "sequence_length": 32, "data": "python-stdlib", "optimizer": "adamw"}
    out = attar.distill(
        teacher, tmp_path / "out", moe_to_dense="active", steps=20, learning_rate=3e-3, **common
    )
    losses = [row["held_out"] for row in out.card.details["curve"] if "held_out" in row]
    model = AutoModelForCausalLM.from_pretrained(out.path)
    assert model.config.model_type == "qwen3" and model.config.intermediate_size == 32
    assert out.card.details["student"]["dense"] == "active"
    start = attar.distill(
        teacher, tmp_path / "start", moe_to_dense="active", steps=1, learning_rate=1e-9, **common
    )
    first = [row["held_out"] for row in start.card.details["curve"] if "held_out" in row]
    assert losses[-1] < first[-1]


def test_what_cannot_be_is_refused_by_name(tmp_path):
    dense = tiny_models.build("smollm")
    with pytest.raises(ModelError, match="llama: the teacher has no experts"):
        dense_student(dense, "mean", [])
    with pytest.raises(ModelError, match="qwen3_moe: has no shared expert"):
        dense_student(build("Qwen3Moe"), "shared", [])
    with pytest.raises(ModelError, match="some of the teacher's layers are dense"):
        dense_student(build("Qwen3Moe", mlp_only_layers=[0]), "mean", [])
    olmoe = transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**SIZE, num_experts=4))
    with pytest.raises(ModelError, match="olmoe: has no dense sibling"):
        dense_student(olmoe, "mean", [])
    with pytest.raises(SettingsError, match="moe_to_dense mean"):
        attar.distill(tmp_path, tmp_path / "out", moe_to_dense="mean", layers=2)
