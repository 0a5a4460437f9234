"""Students by depth."""

from __future__ import annotations

import pytest
import torch

from attar.errors import ModelError
from attar.models.student import spread, student_by_depth
from tests import tiny_models


def test_student_has_the_teachers_layers():
    teacher = tiny_models.build("llama3")
    student = student_by_depth(teacher, [0, 2])
    for mine, theirs in ((0, 0), (1, 2)):
        ours, original = student.model.layers[mine].state_dict(), teacher.model.layers[theirs].state_dict()
        assert all(torch.equal(ours[name], original[name]) for name in original)
    assert torch.equal(student.lm_head.weight, teacher.lm_head.weight)
    assert student.model.layers[1].self_attn.layer_idx == 1 and student.config.num_hidden_layers == 2
    with torch.no_grad():
        student.model.layers[0].mlp.up_proj.weight.zero_()
    assert teacher.model.layers[0].mlp.up_proj.weight.abs().sum() > 0


def test_spread():
    assert spread(8, 4) == [0, 2, 5, 7]
    assert spread(12, 6) == [0, 2, 4, 7, 9, 11]
    assert spread(5, 1) == [0] and spread(3, 3) == [0, 1, 2]
    for total in range(1, 20):
        for count in range(1, total + 1):
            layers = spread(total, count)
            assert len(set(layers)) == count and layers == sorted(layers) and layers[0] == 0
            assert count == 1 or layers[-1] == total - 1
    for count in (0, 4):
        with pytest.raises(ModelError, match="asked of a teacher with 3"):
            spread(3, count)
