"""The student before its first step: which units of its teacher it has, its size, its fresh weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from attar.checkpoint import open_checkpoint
from attar.checkpoint.units import size_limit
from attar.distillation.settings import distill_settings
from attar.distillation.student_settings import StudentSettings
from attar.distillation.students import make_student
from attar.distillation.students.plan import plan_student
from attar.distillation.students.text import ScoringText
from attar.errors import ModelError, SettingsError
from attar.models.anatomy.discover import discover
from attar.models.surgery.cut_plan import CutPlan
from attar.models.surgery.masking import masked_units
from attar.models.surgery.plan_space import plan_space
from tests import tiny_models
from tests.cases import mostly_slow


def config_of(model):
    return {**model.config.to_dict(), "architectures": [type(model).__name__]}


def plan_of(model, **options):
    return plan_student(config_of(model), torch.float32, StudentSettings(**options))


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def text_of(model, tmp_path):
    """Scoring text of a saved model, and the same rows in one tensor."""
    source = open_checkpoint(tiny_models.save(model, tmp_path / "teacher"))
    data = str(Path(json.__file__).parent)
    settings = distill_settings(sequence_length=24, batch_size=8, data=data)
    text = ScoringText(source, settings, tmp_path / "work")
    return text, torch.cat(text.batches())


def test_student_has_the_teachers_layers():
    teacher = tiny_models.build("llama3")
    units, student = make_student(teacher, StudentSettings(layer_map="0,2"))
    assert units.layers == (0, 2)
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
    units, student = make_student(teacher, StudentSettings(layers=2))
    theirs, ours = teacher.state_dict(), student.state_dict()
    assert units.layers == (0, 2) and student.config.num_hidden_layers == 2
    for name, value in ours.items():
        wanted = theirs[name.replace("layers.1.", "layers.2.")]
        assert torch.equal(value, wanted) and value.data_ptr() != wanted.data_ptr()
    units, narrow = make_student(teacher, StudentSettings(layers=1, width=32))
    assert units.layers == (2,) and narrow.config.hidden_size == 32


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama3", "gpt2"])
def test_influence_keeps_the_layers_that_turn_the_stream_most(family, tmp_path):
    teacher = tiny_models.build(family, **{"gpt2": {"n_layer": 6}}.get(family, {"num_hidden_layers": 6}))
    anatomy = discover(teacher)
    with torch.no_grad():  # layers of different strength, none in order
        for block, strength in zip(anatomy.blocks, (0.3, 2.0, 0.1, 1.5, 0.2, 1.0), strict=True):
            for part in (block.attention.o, block.mlp.down):
                teacher.get_submodule(part.name).weight.mul_(strength)
    text, rows = text_of(teacher, tmp_path)
    states = []
    hooks = [
        block.module.register_forward_hook(
            lambda module, args, output: states.append(
                (args[0].double(), (output if torch.is_tensor(output) else output[0]).double())
            )
        )
        for block in anatomy.blocks
    ]
    with torch.no_grad():
        teacher(input_ids=rows)
    for hook in hooks:
        hook.remove()
    turned = [float(1 - F.cosine_similarity(x, y, dim=-1).mean()) for x, y in states]
    wanted = tuple(sorted(sorted(range(6), key=lambda layer: -turned[layer])[:3]))
    units, student = make_student(teacher, StudentSettings(layer_map="influence"), text=text)
    assert units.layers == wanted != (0, 2, 5)  # not the uniform map
    with masked_units(teacher, units):
        torch.testing.assert_close(student(input_ids=rows).logits, teacher(input_ids=rows).logits)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["kl", "run"])
def test_layers_by_what_the_teacher_misses(kind, tmp_path):
    teacher = tiny_models.build("llama3", num_hidden_layers=5)
    text, rows = text_of(teacher, tmp_path)
    units, _ = make_student(teacher, StudentSettings(layers=3, layer_map=kind), text=text)
    gone = sorted(set(range(5)) - set(units.layers))
    assert len(gone) == 2
    if kind == "run":
        assert gone[1] == gone[0] + 1
        return
    kls = []
    p = tiny_models.logits(teacher, rows).double().log_softmax(-1)
    for layer in range(5):
        with masked_units(teacher, CutPlan(layers=tuple(sorted(set(range(5)) - {layer})))):
            q = tiny_models.logits(teacher, rows).double().log_softmax(-1)
        kls.append(float((p.exp() * (p - q)).sum(-1).mean()))
    assert gone == sorted(sorted(range(5), key=lambda layer: kls[layer])[:2])


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama3", "smollm", "phi3"])
def test_widths_keep_the_units_that_put_out_most(family, tmp_path):
    """Neurons against Minitron's score in one expression; the student is what the masked teacher is."""
    teacher = tiny_models.build(family)
    anatomy = discover(teacher)
    attention = anatomy.blocks[0].attention
    readers = attention.heads // attention.kv_heads
    text, rows = text_of(teacher, tmp_path)
    options = StudentSettings(neurons=24, heads=readers, layers=2)
    units, student = make_student(teacher, options, text=text)
    inputs = {}
    for block in anatomy.blocks:
        module = teacher.get_submodule(block.mlp.down.name)
        module.register_forward_hook(lambda _, args, y, number=block.index: inputs.update({number: args[0]}))
    with torch.no_grad():
        teacher(input_ids=rows)
    for block in anatomy.blocks:
        score = inputs[block.index].double().abs().mean(1).norm(dim=0)
        assert units.neurons[block.index] == tuple(sorted(score.topk(24).indices.tolist()))
        assert len(units.heads[block.index]) == readers
    with masked_units(teacher, units):
        torch.testing.assert_close(
            student(input_ids=rows).logits, teacher(input_ids=rows).logits, rtol=1e-4, atol=1e-5
        )
    assert discover(student).blocks[0].mlp.neurons == 24 and len(discover(student).blocks) == 2


def test_all_layers_stay_where_the_width_is_cut(tmp_path):
    teacher = tiny_models.build("llama3")
    text, rows = text_of(teacher, tmp_path)
    units, student = make_student(teacher, StudentSettings(hidden=32), text=text)
    assert len(units.hidden) == 32 and student.config.num_hidden_layers == 3
    with masked_units(teacher, units):
        torch.testing.assert_close(
            student(input_ids=rows).logits, teacher(input_ids=rows).logits, rtol=1e-4, atol=1e-5
        )


def test_random_weights_of_the_same_shape():
    teacher = tiny_models.build("llama3")
    options = {"layers": 2, "neurons": 24}
    _, student = make_student(teacher, StudentSettings(init="random", **options), seed=1)
    _, again = make_student(teacher, StudentSettings(init="random", **options), seed=1)
    _, other = make_student(teacher, StudentSettings(init="random", **options), seed=2)
    assert student.model.layers[0].mlp.up_proj.weight.shape[0] == 24
    assert student.config.num_hidden_layers == 2
    weight = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(student.get_parameter(weight), again.get_parameter(weight))
    assert not torch.equal(student.get_parameter(weight), other.get_parameter(weight))
    assert not torch.equal(student.get_input_embeddings().weight, teacher.get_input_embeddings().weight)
    assert all(parameter.requires_grad for parameter in student.parameters())


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama3", "gpt2", "smollm", "gemma3", "bert"])
@pytest.mark.parametrize("share", mostly_slow([0.9, 0.75, 0.5, 0.3], [0.75, 0.3]))
def test_a_size_is_kept_and_nearly_reached(family, share):
    """As many parameters as the plan says, by cutting; depth first, down to half."""
    teacher = tiny_models.build(family, **({"n_layer": 6} if family == "gpt2" else {"num_hidden_layers": 6}))
    limit = int(share * parameters(teacher))
    try:
        plan = plan_of(teacher, size=f"{limit / 1000}K")
    except SettingsError as error:
        assert "at least" in str(error)
        return
    _, student = make_student(teacher, StudentSettings(init="random"), plan=plan)
    count = parameters(student)
    assert count <= limit and plan.considered
    whole, block = parameters(teacher), parameters(discover(teacher).blocks[0].module)
    if whole - 3 * block <= limit:  # half of the layers are enough
        assert not plan.is_narrower and count + block > limit
    else:
        assert plan.is_narrower or plan.sizes.layers < 3
        space = plan_space(config_of(teacher), torch.float32)
        for name in ("neurons", "hidden"):  # no more of them fit
            more = [count for count in getattr(space.grid, name) if count > getattr(plan.sizes, name)]
            wider = plan.sizes._replace(**{name: more[0]}) if more else None
            assert wider is None or space.planned.parameters(wider) > limit or not space.allows(wider)
    later = [line for line in plan.considered if line.startswith(plan.sizes.text(plan.full))]
    assert later == [plan.considered[0]]


@pytest.mark.slow
def test_a_size_in_bytes():
    teacher = tiny_models.build("llama3", num_hidden_layers=6)
    plan = plan_of(teacher, size=f"{4 * parameters(teacher) * 0.8 / 1000:.0f}KB")
    assert plan.sizes.layers < 6 and not plan.is_narrower


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("60M", ("parameters", 60_000_000)),
        ("1.5b", ("parameters", 1_500_000_000)),
        ("120MB", ("bytes", 120_000_000)),
        ("1GiB", ("bytes", 2**30)),
        ("", ("", 0)),
    ],
)
def test_sizes(text, limit):
    assert size_limit("size", text) == limit


@pytest.mark.parametrize("text", ["60", "M", "-1M", "60 apples", "0M"])
def test_no_sizes(text):
    with pytest.raises(SettingsError, match="60M"):
        StudentSettings(size=text)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, "a multiple of 2"),
        ({"heads": 64}, "up to the teacher's"),
        ({"neurons": 10**6}, "at most the teacher's"),
        ({"hidden": 10**6}, "at most the teacher's"),
        ({"layers": 9}, "between 1 and the teacher's 3"),
        ({"size": "1K"}, "at least"),
        ({"size": "1B"}, "below the teacher's"),
    ],
)
def test_what_the_teacher_does_not_have_is_refused(options, message):
    with pytest.raises(SettingsError, match=message):
        plan_of(tiny_models.build("llama3"), **options)


def test_what_a_config_cannot_say_is_refused_before_any_weight():
    with pytest.raises(ModelError, match="gpt2"):
        plan_of(tiny_models.build("gpt2"), heads=2)


@pytest.mark.parametrize(
    "options",
    [
        {"size": "60M", "layers": 2},
        {"student": "x", "hidden": 8},
        {"width": 8, "neurons": 4},
        {"size": "6M", "width": 8},
    ],
)
def test_options_that_exclude_each_other(options):
    with pytest.raises(SettingsError, match="left out with"):
        StudentSettings(**options)


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["llama3", "smollm", "qwen2", "qwen3", "gemma2", "phi3", "gpt2", "opt"])
def test_a_fresh_student_is_narrower_and_seeded(family):
    model, options = tiny_models.build(family), StudentSettings(width=32, layer_map="0,2")
    (_, result), (_, again), (_, other) = (make_student(model, options, seed) for seed in (0, 0, 1))
    assert result.get_input_embeddings().weight.shape == (tiny_models.VOCABULARY, 32)
    assert result.config.num_hidden_layers == 2
    state, same, differing = (item.state_dict() for item in (result, again, other))
    assert all(torch.equal(state[name], same[name]) for name in state)
    assert any(not torch.equal(state[name], differing[name]) for name in state)
    assert torch.isfinite(tiny_models.logits(result, tiny_models.tokens(model))).all()


@pytest.mark.parametrize("width", [64, 40, 100])
def test_a_width_that_cuts_a_head_is_refused(width):
    with pytest.raises(SettingsError, match="a multiple of 16 below the teacher's 64"):
        plan_of(tiny_models.build("llama3"), width=width, layers=1)
