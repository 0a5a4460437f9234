"""Students by depth."""

from __future__ import annotations

import torch

from attar.models.student import student_by_depth
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
