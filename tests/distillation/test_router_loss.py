"""The routers' losses against plain versions and transformers', and what they do to a student."""

import math

import pytest
import torch
import transformers
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import attar
from attar.distillation.router_loss import load_balance, router_loss, z_loss
from attar.errors import ModelError, SettingsError
from attar.models.loading.load import load_model
from tests import tiny_models

SIZE = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZE |= {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64}
SIZE |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1, "num_experts_per_tok": 2}
SMALL = {"batch_size": 2, "sequence_length": 32, "data": "python-stdlib", "optimizer": "adamw"}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    config = transformers.Qwen3MoeConfig(**SIZE, num_experts=6, moe_intermediate_size=16)
    model = tiny_models.randomize(transformers.Qwen3MoeForCausalLM(config))
    return tiny_models.save(model, tmp_path_factory.mktemp("mixture") / "model")


def test_losses_are_those_of_a_plain_version_and_of_transformers():
    logits = torch.randn(50, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    choices, mass, z = [0] * 6, [0.0] * 6, 0.0
    for row in logits.tolist():
        for expert in sorted(range(6), key=lambda e, row=row: -row[e])[:2]:
            choices[expert] += 1
        total = sum(math.exp(value) for value in row)
        for expert in range(6):
            mass[expert] += math.exp(row[expert]) / total
        z += math.log(total) ** 2
    balance = 6 * sum(c / 100 * m / 50 for c, m in zip(choices, mass, strict=True))
    assert math.isclose(float(load_balance(logits, 2)), balance, rel_tol=1e-9)
    assert math.isclose(float(z_loss(logits)), z / 50, rel_tol=1e-9)
    theirs = load_balancing_loss_func((logits.float(),), 6, 2)  # counts every choice: k at balance
    torch.testing.assert_close(2 * load_balance(logits.float(), 2), theirs)


def test_balance_is_one_where_experts_are_used_alike_and_e_where_one_is():
    alike = 20 * torch.eye(4).repeat(3, 1)
    torch.testing.assert_close(load_balance(alike, 1), torch.tensor(1.0))
    torch.testing.assert_close(load_balance(20 * torch.eye(4)[:1].repeat(5, 1), 1), torch.tensor(4.0))


def test_recorded_logits_are_the_routers_own(mixture):
    model = load_model(mixture)
    rows = tiny_models.tokens(model, batch=2, length=7)
    loss = router_loss(model, 1.0, 0.0)
    with loss.recording() as logits:
        wanted = model(rows, output_router_logits=True).router_logits
    assert len(logits) == len(wanted) == 2
    for ours, theirs in zip(logits, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
    before = len(logits)
    model(rows)
    assert len(logits) == before  # no hook is left
    mask = torch.zeros(14, dtype=torch.bool)
    mask[3:9] = True
    parts = [load_balance(one[mask], 2) for one in logits]
    torch.testing.assert_close(loss.loss(logits, mask), sum(parts) / 2)


@pytest.mark.slow
def test_a_student_trained_with_balance_uses_its_experts_more_alike(mixture, tmp_path):
    def skewed():
        model = load_model(mixture)
        model.model.embed_tokens.weight.data += 2 * torch.randn(32)  # all tokens share a direction
        for layer in model.model.layers:
            inputs = []
            hook = layer.mlp.gate.register_forward_pre_hook(lambda _, args, to=inputs: to.append(args[0]))
            model(tiny_models.tokens(model, batch=4, length=16))
            hook.remove()
            mean = inputs[0].flatten(0, -2).mean(0)
            layer.mlp.gate.weight.data[:2] += 4 * mean / mean.square().sum()  # and two experts like it
        return tiny_models.save(model, tmp_path / "skewed")

    def imbalance(folder):
        model = load_model(folder)
        loss = router_loss(model, 1.0, 0.0)
        rows = tiny_models.tokens(model, batch=8, length=32, seed=5)
        with torch.no_grad(), loss.recording() as logits:
            model(rows)
        return float(loss.loss(logits, torch.ones(256, dtype=torch.bool)))

    torch.manual_seed(0)
    student, results = skewed(), {}
    assert imbalance(student) > 1.8
    for balance in (0.0, 5.0):
        out = attar.distill(
            mixture,
            tmp_path / f"out{balance}",
            student=str(student),
            steps=30,
            learning_rate=3e-3,
            router_loss=(f"balance:{balance}", "z:0.001") if balance else (),
            **SMALL,
        )
        results[balance] = imbalance(out.path)
    assert results[5.0] < 1.3 < results[0.0] - 0.2


@pytest.mark.slow
def test_a_dense_student_has_no_routers(mixture, tmp_path):
    dense = tiny_models.save(tiny_models.build("smollm"), tmp_path / "dense")
    with pytest.raises(ModelError, match="the student has no routers"):
        attar.distill(
            mixture, tmp_path / "out", student=str(dense), steps=1, router_loss=("balance:0.1",), **SMALL
        )
    with pytest.raises(
        SettingsError, match="router_loss is 'z:-1', but must be a name, a colon and a positive weight"
    ):
        attar.distill(mixture, tmp_path / "out", steps=1, router_loss=("z:-1",), **SMALL)
