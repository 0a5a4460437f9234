"""What a student learns: its loss against the teacher, and its initial weights."""

import pytest
import torch

from attar.data.examples import Examples
from attar.distillation.loss import DistillationLoss
from attar.distillation.objectives import OBJECTIVES
from attar.distillation.signals.online import OnlineTeacher
from attar.walks.objectives import next_token_loss
from tests import tiny_models


def online_loss(teacher, temperature, alpha):
    loss = DistillationLoss(OnlineTeacher(teacher, OBJECTIVES["kl"], temperature), alpha)
    return lambda model, tokens: loss(model, Examples.of_text(tokens))


def test_alpha_weighs_the_soft_loss():
    teacher, student = tiny_models.build("llama3"), tiny_models.build("llama3", seed=1)
    tokens = tiny_models.tokens(teacher)
    hard = next_token_loss(student(input_ids=tokens).logits, tokens).item()
    soft = online_loss(teacher, 1.0, 1.0)(student, tokens).item()
    mixed = online_loss(teacher, 1.0, 0.3)(student, tokens).item()
    assert online_loss(teacher, 1.0, 0.0)(student, tokens).item() == pytest.approx(hard)
    assert mixed == pytest.approx(0.3 * soft + 0.7 * hard, rel=1e-5)
    assert online_loss(teacher, 1.0, 1.0)(teacher, tokens).item() == pytest.approx(0.0, abs=1e-5)


def test_padded_vocabularies_compare_over_the_common_part():
    teacher, student = tiny_models.build("llama3", vocab_size=384), tiny_models.build("llama3")
    tokens = tiny_models.tokens(student)
    assert torch.isfinite(online_loss(teacher, 1.0, 1.0)(student, tokens))


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_padding_changes_nothing(alpha):
    """A row padded on the right has the loss of the row without its padding."""
    teacher, student = tiny_models.build("llama3"), tiny_models.build("llama3", seed=1)
    tokens = tiny_models.tokens(teacher, batch=1, length=9)
    padded = torch.cat([tokens, torch.full((1, 5), -100)], dim=1)
    loss = online_loss(teacher, 2.0, alpha)
    assert loss(student, padded).item() == pytest.approx(loss(student, tokens).item(), rel=1e-4)
