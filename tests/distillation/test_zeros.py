"""Recovery of models with zeros: every way of training keeps them, from folder to folder."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import attar
from attar.checkpoint.hashing import sha256_file
from attar.distillation.masked_adapters import add_masked_adapters, merge_masked_adapters
from attar.distillation.settings import recover_settings
from attar.distillation.stage import linears_of, recover
from attar.errors import NumericsError, UsageError
from attar.models.anatomy.parts import weight_of
from attar.models.loading.load import load_model
from attar.walks import train as module
from attar.walks.masks import Masks
from tests import tiny_models
from tests.cases import mostly_slow
from tests.log_lines import LogLines

DATA = str(Path(json.__file__).parent)
SETTINGS = {
    "steps": 4,
    "batch_size": 2,
    "sequence_length": 16,
    "learning_rate": 3e-3,
    "precision": "fp32",
    "data": DATA,
}


def build(family):
    """A tiny model of one layer."""
    return tiny_models.build(family, **{"n_layer" if family == "gpt2" else "num_hidden_layers": 1})


def prune24(folder, family="llama3", dtype=torch.bfloat16):
    """A tiny model whose Linears keep the two largest of each four consecutive inputs."""
    model = build(family)
    with torch.no_grad():
        for name in linears_of(model):
            weight = weight_of(model.get_submodule(name))
            groups = weight.reshape(weight.shape[0], -1, 4)
            drop = groups.abs().argsort(-1)[..., :2]
            weight.copy_(groups.scatter(-1, drop, 0.0).view(weight.shape))
    return tiny_models.save(model, folder, dtype=dtype)


def zeros_of(folder):
    """By tensor, where the weights of the blocks' Linears are zero (N, K)."""
    model = load_model(folder, dtype=torch.float32)
    return {name: weight_of(model.get_submodule(name)).detach() == 0 for name in linears_of(model)}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    teacher = tiny_models.save(build("llama3"), folder / "teacher", dtype=torch.bfloat16)
    return teacher, prune24(folder / "pruned")


WAYS = {
    "adamw": {},
    "muon": {"optimizer": "muon", "learning_rate": 0.01},
    "accumulate": {"accumulate": 2},
    "text alone": {"alpha": 0.0},
    "cached teacher": {"teacher_top": 16},
    "best state": {"evaluate_every": 2, "patience": 2},
    "bf16": {"precision": "bf16"},
    "adapters": {"adapter_rank": 4},
    "adapters at zero": {"adapter_rank": 4, "adapter_init": "zero", "optimizer": "muon"},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("way", mostly_slow(WAYS, ["adamw", "muon", "cached teacher", "adapters"]))
def test_the_pattern_of_2_4_is_kept_exactly(models, tmp_path, way):
    teacher, pruned = models
    recovered = recover(
        pruned, tmp_path / "out", recover_settings(**{**SETTINGS, **WAYS[way]}), teacher=teacher
    )
    before, after = zeros_of(pruned), zeros_of(recovered.path)
    for name, zeros in before.items():
        assert torch.equal(zeros, after[name]), name
        assert (after[name].view(-1, 4).sum(-1) == 2).all()
    changed = load_model(recovered.path, dtype=torch.float32).get_submodule(name).weight
    assert not torch.equal(changed, load_model(pruned, dtype=torch.float32).get_submodule(name).weight)
    assert recovered.card.details["kept_zeros"] == {"linears": len(before), "sparsity": 0.5}
    assert recovered.card.settings["keep_zeros"] == "auto"  # no lineage: by the amount of zeros


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["gpt2", "phi3", "opt"])
@pytest.mark.parametrize("rank", [0, 2])
def test_other_families_keep_their_zeros(tmp_path, family, rank):
    pruned = prune24(tmp_path / "pruned", family)
    settings = recover_settings(**SETTINGS, alpha=0.0, adapter_rank=rank)
    recovered = recover(pruned, tmp_path / "out", settings)
    before, after = zeros_of(pruned), zeros_of(recovered.path)
    assert all(torch.equal(zeros, after[name]) for name, zeros in before.items())
    assert [parent.role for parent in recovered.card.parents] == ["weights"]
    assert not (recovered.path / "adapter").exists()


@pytest.mark.slow
def test_zeros_can_be_given_up(models, tmp_path):
    teacher, pruned = models
    settings = recover_settings(**SETTINGS, keep_zeros="false")
    recovered = recover(pruned, tmp_path / "out", settings, teacher=teacher)
    assert not any(zeros.any() for zeros in zeros_of(recovered.path).values())
    assert "kept_zeros" not in recovered.card.details


@pytest.mark.slow
def test_lines_say_what_is_kept(models, tmp_path):
    teacher, pruned = models
    progress = LogLines()
    settings = recover_settings(**SETTINGS, adapter_rank=2)
    recover(pruned, tmp_path / "out", settings, teacher=teacher, progress=progress)
    assert any("zeros of all 7 Linears stay, 50.0% of their weights" in line for line in progress.lines)
    assert any("no adapter folder" in line for line in progress.lines)
    progress = LogLines()
    recover(teacher, tmp_path / "dense", recover_settings(**SETTINGS), teacher=teacher, progress=progress)
    assert not any("zeros" in line for line in progress.lines)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 4])
def test_a_killed_run_ends_with_the_same_bytes(models, tmp_path, monkeypatch, rank):
    teacher, pruned = models
    settings = recover_settings(**SETTINGS, checkpoint_every=2, adapter_rank=rank)
    recover(pruned, tmp_path / "whole", settings, teacher=teacher)
    step = module._step

    def deadly(run, loss, batches, number, settings):
        if number == 3:
            raise KeyboardInterrupt
        return step(run, loss, batches, number, settings)

    monkeypatch.setattr(module, "_step", deadly)
    with pytest.raises(KeyboardInterrupt):
        recover(pruned, tmp_path / "cut", settings, teacher=teacher)
    monkeypatch.setattr(module, "_step", step)
    torch.manual_seed(99)
    recover(pruned, tmp_path / "cut", settings, teacher=teacher)
    assert sha256_file(tmp_path / "cut/model.safetensors") == sha256_file(
        tmp_path / "whole/model.safetensors"
    )


def test_a_mask_that_training_broke_is_one_line_and_leaves_no_output(models, tmp_path, monkeypatch):
    teacher, pruned = models
    monkeypatch.setattr(module, "mask_weights", lambda pairs: None)
    monkeypatch.setattr(module, "mask_gradients", lambda pairs: None)
    with pytest.raises(NumericsError, match="pruned weights are no longer zero"):
        recover(pruned, tmp_path / "out", recover_settings(**SETTINGS), teacher=teacher)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_without_a_teacher_alpha_is_zero(models, tmp_path):
    _, pruned = models
    with pytest.raises(UsageError) as raised:
        recover(pruned, tmp_path / "out", recover_settings(**SETTINGS))
    assert "--alpha 0" in raised.value.hint and not (tmp_path / "out").exists()
    recovered = recover(pruned, tmp_path / "out", recover_settings(**{**SETTINGS, "steps": 40}, alpha=0.0))
    curve = [row["loss"] for row in recovered.card.details["curve"] if "loss" in row]
    assert curve[-1] < 0.95 * curve[0]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["W8A16", "W4A16"])
@pytest.mark.parametrize("rank", [0, 4])
def test_a_quantized_sparse_student_keeps_its_zeros(models, tmp_path, scheme, rank):
    teacher, pruned = models
    options = {"scheme": scheme, "group_size": 32, "method": "rtn", "check_tokens": 0, "data": DATA}
    packed = attar.quantize(pruned, tmp_path / "packed", **options).path
    settings = recover_settings(**SETTINGS, adapter_rank=rank, keep_zeros="true")
    recovered = recover(packed, tmp_path / "out", settings, teacher=teacher)
    pattern, before, after = zeros_of(pruned), zeros_of(packed), zeros_of(recovered.path)
    for name, zeros in before.items():
        assert (zeros | ~pattern[name]).all() and torch.equal(zeros, after[name]), name


@pytest.mark.slow
def test_the_zeros_of_a_dense_model_s_codes_are_trained(models, tmp_path):
    teacher, _ = models
    options = {"scheme": "W2A16", "group_size": 16, "method": "rtn", "check_tokens": 0, "data": DATA}
    packed = attar.quantize(teacher, tmp_path / "packed", **options).path
    recovered = recover(packed, tmp_path / "out", recover_settings(**SETTINGS), teacher=teacher)
    assert recovered.card.settings["keep_zeros"] == "false"
    before, after = zeros_of(packed), zeros_of(recovered.path)
    assert all(zeros.any() and not after[name].all() for name, zeros in before.items())
    assert not any(after[name][zeros].all() for name, zeros in before.items())


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_masked_adapters_compute_w_plus_the_masked_product(family):
    student = tiny_models.build(family)
    names = linears_of(student)
    with torch.no_grad():
        for name in names[1:]:
            weight_of(student.get_submodule(name))[:, ::2] = 0.0
    before = {name: weight_of(student.get_submodule(name)).detach().clone() for name in names}
    masks = Masks.of(student, names, lambda w: w != 0 if (w == 0).any() else None)
    assert len(masks.kept) == len(names) - 1
    tokens = tiny_models.tokens(student)
    with torch.no_grad():
        wanted = student(input_ids=tokens).logits
        adapted = add_masked_adapters(student, names, 3, masks)
        assert torch.equal(adapted(input_ids=tokens).logits, wanted), "B starts at zero"
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * len(names)
    adapters = {name: adapted.get_submodule(name).parametrizations["weight"][0] for name in names}
    with torch.no_grad():
        for adapter in adapters.values():
            nn.init.normal_(adapter.B)
    factors = {name: (adapter.A.detach(), adapter.B.detach()) for name, adapter in adapters.items()}
    merged = merge_masked_adapters(adapted, names)
    for name in names:
        A, B = factors[name]
        mask = before[name] != 0
        change = 2.0 * (B.double() @ A.double()) * mask
        got = weight_of(merged.get_submodule(name)).detach()
        assert torch.allclose(got.double(), before[name].double() + change, atol=1e-5)
        assert torch.equal(got != 0, mask)


def test_masked_adapters_start_at_the_best_fit_of_the_error_on_the_mask():
    teacher, student = tiny_models.build("qwen2"), tiny_models.build("qwen2")
    names = linears_of(student)
    with torch.no_grad():
        for name in names:
            weight = weight_of(student.get_submodule(name))
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
            weight[:, 1::2] = 0.0
    masks = Masks.of(student, names, lambda w: w != 0)
    errors = {
        name: weight_of(teacher.get_submodule(name)).detach()
        - weight_of(student.get_submodule(name)).detach()
        for name in names
    }
    before = {name: weight_of(student.get_submodule(name)).detach().clone() for name in names}
    merged = merge_masked_adapters(add_masked_adapters(student, names, 4, masks, teacher), names)
    for name in names:
        mask = before[name] != 0
        wanted = errors[name].double() * mask
        U, S, Vh = torch.linalg.svd(wanted)
        best = (U[:, :4] * S[:4]) @ Vh[:4]
        change = weight_of(merged.get_submodule(name)).detach().double() - before[name].double()
        assert torch.allclose(change, best * mask, atol=1e-4)  # the fourth and fifth singular values are near


def test_where_only_pruned_weights_differ_the_adapters_still_learn(models):
    """Magnitude pruning leaves no error on the mask: with both factors at zero nothing would ever move."""
    teacher, pruned = models
    student, original = (load_model(path, dtype=torch.float32) for path in (pruned, teacher))
    names = linears_of(student)
    masks = Masks.of(student, names, lambda w: w != 0)
    adapted = add_masked_adapters(student, names, 2, masks, original)
    tokens = tiny_models.tokens(adapted)
    adapted(input_ids=tokens).logits.square().sum().backward()
    for name in names:
        adapter = adapted.get_submodule(name).parametrizations["weight"][0]
        assert adapter.A.any() and adapter.B.grad.any(), name


def test_file_formats_hold_the_zeros(models):
    """The helper of this file: 2:4 in every Linear, as safetensors has it."""
    _, pruned = models
    tensors = load_file(pruned / "model.safetensors")
    wide = [t for name, t in tensors.items() if name.endswith("proj.weight")]
    assert wide and all(((t == 0).view(-1, 4).sum(-1) == 2).all() for t in wide)
