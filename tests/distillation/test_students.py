"""The student before its first step."""

from __future__ import annotations

import torch

from attar.distillation.settings import StudentSettings
from attar.distillation.students import make_student
from tests import tiny_models


def test_student_has_the_teachers_layers():
    teacher = tiny_models.build("llama3")
    _, student = make_student(teacher, StudentSettings(layer_map="0,2"))
    for mine, theirs in ((0, 0), (1, 2)):
        ours, original = student.model.layers[mine].state_dict(), teacher.model.layers[theirs].state_dict()
        assert all(torch.equal(ours[name], original[name]) for name in original)
    assert torch.equal(student.lm_head.weight, teacher.lm_head.weight)
    assert student.model.layers[1].self_attn.layer_idx == 1 and student.config.num_hidden_layers == 2
    with torch.no_grad():
        student.model.layers[0].mlp.up_proj.weight.zero_()
    assert teacher.model.layers[0].mlp.up_proj.weight.abs().sum() > 0


def test_a_student_begins_with_its_teachers_layers():
    """Cut by depth it has the very blocks, embeddings and head, in memory of its own; a narrow one is new."""
    teacher = tiny_models.build("llama3")
    kept, student = make_student(teacher, StudentSettings(layers=2))
    theirs, ours = teacher.state_dict(), student.state_dict()
    assert kept == [0, 2] and student.config.num_hidden_layers == 2
    for name, value in ours.items():
        wanted = theirs[name.replace("layers.1.", "layers.2.")]
        assert torch.equal(value, wanted) and value.data_ptr() != wanted.data_ptr()
    kept, narrow = make_student(teacher, StudentSettings(layers=1, width=32))
    assert kept == [2] and narrow.config.hidden_size == 32
