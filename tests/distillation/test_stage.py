"""The verbs distill and recover on tiny models: they learn, they save what loads, they refuse what cannot be
compared."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from attar.distillation.adapters import add_adapters
from attar.distillation.settings import distill_settings, recover_settings
from attar.distillation.stage import distill, recover
from attar.errors import ModelError, SettingsError
from attar.models.anatomy.discover import discover
from tests import tiny_models
from tests.log_lines import LogLines

SMALL = {
    "steps": 12,
    "batch_size": 4,
    "sequence_length": 32,
    "learning_rate": 3e-3,
    "precision": "fp32",
    "data": str(Path(json.__file__).parent),  # a few files: the whole library takes seconds to read
}


def save(family, tmp_path, name=None, **changes):
    return tiny_models.save(tiny_models.build(family, **changes), tmp_path / (name or family))


def test_student_has_the_layers_and_comes_closer_to_its_teacher(tmp_path):
    folder = save("llama3", tmp_path)
    student = distill(folder, tmp_path / "out", distill_settings(layers=2, **{**SMALL, "steps": 40}))
    assert student.config["num_hidden_layers"] == 2
    AutoModelForCausalLM.from_pretrained(student.path)
    curve = [row["loss"] for row in student.card.details["curve"] if "loss" in row]
    assert curve[-1] < 0.8 * curve[0]
    assert student.card.details["layer_map"] == [0, 2]
    assert {parent.role for parent in student.card.parents} == {"weights", "signal"}


def test_recover_keeps_the_shape_and_comes_closer(tmp_path):
    teacher = save("smollm", tmp_path, "teacher")
    pruned = save("smollm", tmp_path, "pruned", intermediate_size=64)
    recovered = recover(pruned, tmp_path / "out", recover_settings(**{**SMALL, "steps": 40}), teacher=teacher)
    assert recovered.config["intermediate_size"] == 64
    curve = [row["loss"] for row in recovered.card.details["curve"] if "loss" in row]
    assert curve[-1] < 0.8 * curve[0]


def test_too_many_layers_and_a_task_that_does_not_suit_are_refused(tmp_path):
    with pytest.raises(SettingsError, match="between 1 and the teacher's 3"):
        distill(save("llama3", tmp_path), tmp_path / "out", distill_settings(layers=9, **SMALL))
    with pytest.raises(ModelError, match="does not predict next tokens"):
        distill(save("bert", tmp_path), tmp_path / "out", distill_settings(task="causal", **SMALL))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bert", "llama3"]


@pytest.mark.slow
def test_documents_can_be_kept_apart(tmp_path):
    text = tmp_path / "lines.jsonl"
    text.write_text("".join(json.dumps({"text": f"line number {i} of the text"}) + "\n" for i in range(50)))
    settings = recover_settings(**{**SMALL, "steps": 4, "data": str(text)}, packing="separate")
    recovered = recover(save("smollm", tmp_path), tmp_path / "out", settings, teacher=tmp_path / "smollm")
    assert recovered.card.details["steps"] == 4


@pytest.mark.slow
def test_a_given_student_keeps_its_weights_in_the_lineage(tmp_path):
    """Its own shape; the teacher is a signal; a step at no rate leaves its weights as they are."""
    teacher, own = save("smollm", tmp_path, "teacher"), save("smollm", tmp_path, "own", intermediate_size=64)
    settings = distill_settings(student=str(own), **{**SMALL, "steps": 1, "learning_rate": 1e-12})
    student = distill(teacher, tmp_path / "out", settings)
    parents = {parent.role: parent.name for parent in student.card.parents}
    assert Path(parents["weights"]).name == "own" and Path(parents["signal"]).name == "teacher"
    assert student.config["intermediate_size"] == 64
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (own, student.path))
    assert before.keys() == after.keys()
    assert all(torch.allclose(after[name], before[name], atol=1e-6) for name in before)
    details = student.card.details["student"]
    assert Path(details["given"]).name == "own" and "layer_map" not in student.card.details


@pytest.mark.slow
def test_a_student_by_importance_is_the_same_again_and_says_how(tmp_path):
    folder = save("llama3", tmp_path)
    options = {"layer_map": "influence", "layers": 2, "neurons": 24, **SMALL, "steps": 2}
    students = [distill(folder, tmp_path / out, distill_settings(**options)) for out in ("one", "two")]
    details = students[0].card.details
    assert details["student"]["layers_by"] == "influence" and details["student"]["init"] == "copy"
    assert details["student"]["cut"] == "24 of 96 neurons, 2 of 3 layers"
    assert details["layer_map"] == details["student"]["layers"] and len(details["layer_map"]) == 2
    assert students[0].config["intermediate_size"] == 24
    files = [(student.path / "model.safetensors").read_bytes() for student in students]
    assert files[0] == files[1]
    texts = json.loads((students[0].path / "attar-text.json").read_text())["texts"]
    assert len(texts) == 3  # learned from, held out, scored on


def test_a_size_is_printed_and_recorded(tmp_path):
    folder = save("llama3", tmp_path, num_hidden_layers=6)
    count = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters())
    log = LogLines()
    settings = distill_settings(size=f"{0.8 * count / 1000:.0f}K", **{**SMALL, "steps": 2})
    student = distill(folder, tmp_path / "out", settings, progress=log)
    details = student.card.details["student"]
    loaded = AutoModelForCausalLM.from_pretrained(student.path)
    assert details["parameters"] == sum(p.numel() for p in loaded.parameters()) <= 0.8 * count
    assert details["considered"][0].startswith(details["cut"])
    assert any(line == f"student: {details['cut']}" for line in log.lines)
    assert sum(line.startswith("  within the size: ") for line in log.lines) == len(details["considered"])


@pytest.mark.slow
def test_adapters_of_a_given_student_are_the_difference(tmp_path):
    """``out`` is the student with the adapters added; ``out/adapter`` over the student is the same model."""
    from peft import PeftModel

    teacher, model = save("smollm", tmp_path, "teacher"), tiny_models.build("smollm")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-2)
    own = tiny_models.save(model, tmp_path / "own")
    settings = distill_settings(student=str(own), adapter_rank=4, **{**SMALL, "learning_rate": 1e-2})
    student = distill(teacher, tmp_path / "out", settings)
    merged = AutoModelForCausalLM.from_pretrained(student.path)
    base = AutoModelForCausalLM.from_pretrained(own)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    changed = [name for name, tensor in merged.state_dict().items() if not torch.equal(tensor, before[name])]
    assert changed and all("_proj" in name for name in changed)
    name = "model.layers.0.mlp.up_proj.weight"
    difference = merged.state_dict()[name].double() - before[name].double()
    assert int(torch.linalg.matrix_rank(difference, tol=1e-5)) <= 4
    adapted = PeftModel.from_pretrained(base, str(student.path / "adapter"))
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(
        adapted(input_ids=tokens).logits, merged(input_ids=tokens).logits, rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
def test_adapters_of_a_cut_student_learn_and_are_merged(tmp_path):
    folder = save("smollm", tmp_path)
    settings = distill_settings(layers=2, adapter_rank=8, **{**SMALL, "steps": 60, "learning_rate": 1e-2})
    student = distill(folder, tmp_path / "out", settings)
    curve = [row["loss"] for row in student.card.details["curve"] if "loss" in row]
    assert curve[-1] < 0.95 * curve[0]
    assert not (student.path / "adapter").exists()  # there is no checkpoint to put it over
    embeddings = [
        AutoModelForCausalLM.from_pretrained(path).get_input_embeddings().weight
        for path in (folder, student.path)
    ]
    assert torch.equal(*embeddings)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 4])
def test_gradient_checkpointing_changes_nothing_but_memory(rank, tmp_path):
    folder = save("smollm", tmp_path)
    options = {"layers": 2, "adapter_rank": rank, **SMALL, "steps": 4}
    weights = []
    for name in ("plain", "checkpointed"):
        settings = distill_settings(gradient_checkpointing=name == "checkpointed", **options)
        student = distill(folder, tmp_path / name, settings)
        weights.append(AutoModelForCausalLM.from_pretrained(student.path).state_dict())
        curve = student.card.details["curve"]
        weights[-1]["curve"] = torch.tensor([row["loss"] for row in curve if "loss" in row])
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_gradient_checkpointing_keeps_fewer_bytes():
    """Bytes kept for the backward pass, with adapters too."""
    for adapted in (False, True):
        kept = []
        for enabled in (False, True):
            model = tiny_models.build("smollm", num_hidden_layers=6)
            if adapted:
                names = [name for block in discover(model).blocks for name in block.linears]
                model = add_adapters(model, names, 4)
            if enabled:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()
            total = 0

            def pack(tensor):
                nonlocal total
                total += tensor.numel() * tensor.element_size()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                model(input_ids=torch.arange(64)[None]).logits.sum()
            kept.append(total)
        assert kept[1] < 0.5 * kept[0]
