"""What a student learns: the loss beside its teacher, and what it begins with."""

import pytest
import torch

from attar.distillation.learn import beginner, soft_loss
from attar.distillation.settings import DistillSettings
from attar.walks.objectives import next_token_loss
from tests import tiny_models


def test_alpha_weighs_the_soft_loss():
    teacher, student = tiny_models.build("llama3"), tiny_models.build("llama3", seed=1)
    tokens = tiny_models.tokens(teacher)
    hard = next_token_loss(student(input_ids=tokens).logits, tokens).item()
    soft = soft_loss(teacher, 1.0, 1.0)(student, tokens).item()
    mixed = soft_loss(teacher, 1.0, 0.3)(student, tokens).item()
    assert soft_loss(teacher, 1.0, 0.0)(student, tokens).item() == pytest.approx(hard)
    assert mixed == pytest.approx(0.3 * soft + 0.7 * hard, rel=1e-5)
    assert soft_loss(teacher, 1.0, 1.0)(teacher, tokens).item() == pytest.approx(0.0, abs=1e-5)


def test_padded_vocabularies_compare_over_the_common_part():
    teacher, student = tiny_models.build("llama3", vocab_size=384), tiny_models.build("llama3")
    tokens = tiny_models.tokens(student)
    assert torch.isfinite(soft_loss(teacher, 1.0, 1.0)(student, tokens))


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_padding_changes_nothing(alpha):
    """A row padded on the right has the loss of the row without its padding."""
    teacher, student = tiny_models.build("llama3"), tiny_models.build("llama3", seed=1)
    tokens = tiny_models.tokens(teacher, batch=1, length=9)
    padded = torch.cat([tokens, torch.full((1, 5), -100)], dim=1)
    loss = soft_loss(teacher, 2.0, alpha)
    assert loss(student, padded).item() == pytest.approx(loss(student, tokens).item(), rel=1e-4)


def test_a_student_begins_with_its_teachers_layers():
    """Cut by depth it has the very blocks, embeddings and head, in memory of its own; a narrow one is new."""
    teacher = tiny_models.build("llama3")
    kept, student = beginner(teacher, DistillSettings(layers=2))
    theirs, ours = teacher.state_dict(), student.state_dict()
    assert kept == [0, 2] and student.config.num_hidden_layers == 2
    for name, value in ours.items():
        wanted = theirs[name.replace("layers.1.", "layers.2.")]
        assert torch.equal(value, wanted) and value.data_ptr() != wanted.data_ptr()
    kept, narrow = beginner(teacher, DistillSettings(layers=1, width=32))
    assert kept == [2] and narrow.config.hidden_size == 32
