"""Transforms of whole checkpoints: same function, better rounding, resumable."""

import json

import pytest
import torch
import transformers

from attar.checkpoint import open_checkpoint
from attar.checkpoint.jsonfile import read_json
from attar.errors import ModelError, SettingsError
from attar.models.anatomy.discover import discover
from attar.models.loading.load import load_model
from attar.quantization.grids import IntGrid
from attar.quantization.hessian import Hessian, output_error
from attar.quantization.methods.rtn import rtn
from attar.quantization.transforms import apply
from attar.quantization.transforms.apply import transform
from tests import tiny_models as tiny
from tests.cases import mostly_slow

ROTATING = ("llama2", "llama3", "smollm", "mistral", "qwen2", "qwen3", "phi3", "gpt2", "opt", "gpt_neox")


def report_of(folder):
    return read_json(folder / apply.REPORT)


def grids(model, group_size=16):
    return {name: IntGrid(4, group_size) for block in discover(model).blocks for name in block.linears}


def batches(model):
    return [tiny.tokens(model, seed=seed) for seed in (1, 2)]


def run(model, tmp_path, kind, name="out", **changes):
    """Save, transform; returns the source and the result."""
    source = tmp_path / "model"
    if not source.exists():
        tiny.save(model, source)
    arguments = {
        "batches": batches(model),
        "grids": grids(model),
        "activations": IntGrid(8, 0),
        "untie": True,
    }
    result = transform(
        open_checkpoint(source),
        kind,
        folder=tmp_path / name,
        work=tmp_path / "work" / name,
        **arguments | changes,
    )
    return open_checkpoint(source), result


def assert_same_function(model, changed, tolerance=1e-4):
    rows = tiny.tokens(model)
    wanted = tiny.logits(model, rows)
    got = tiny.logits(load_model(changed, dtype=torch.float32), rows)
    assert (got - wanted).abs().max() < tolerance * wanted.abs().max()


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", ["smoothquant", "awq"])
@pytest.mark.parametrize(
    "family",
    mostly_slow(
        ["llama3", "qwen2", "gemma2", "phi3", "gpt2", "opt", "gpt_neox", "bert"],
        ["llama3", "gemma2", "gpt2", "bert"],
    ),
)
def test_smoothing_leaves_the_function(tmp_path, family, kind):
    model = tiny.build(family)
    source, result = run(model, tmp_path, kind)
    assert_same_function(model, result)
    assert all(fold["error"] <= fold["rtn_error"] for fold in report_of(result.path)["folds"])
    assert any(fold["error"] < 0.95 * fold["rtn_error"] for fold in report_of(result.path)["folds"])
    assert result.config["dtype"] == "float32" and list(result.tensors) == list(source.tensors)
    assert (result.path / "tokenizer.json").exists()


@pytest.mark.few(4)
@pytest.mark.parametrize("family", ROTATING)
def test_rotation_leaves_the_function(tmp_path, family):
    model = tiny.build(family)
    source, result = run(model, tmp_path, "rotate")
    assert_same_function(model, result)
    name = f"{discover(model).blocks[1].mlp.down.name}.weight"
    assert (source.load(name) - result.load(name)).abs().max() > 0.1


@pytest.mark.few(1)
@pytest.mark.parametrize("hidden", [80, 96, 112])
def test_rotation_of_widths_that_are_no_power_of_two(tmp_path, hidden):
    model = tiny.build("qwen2", hidden_size=hidden, num_attention_heads=4, num_key_value_heads=2)
    _, result = run(model, tmp_path, "rotate")
    assert_same_function(model, result)


def test_gemmas_norms_rotate(tmp_path):
    """(1 + w), scaled embeddings, tied."""
    config = transformers.GemmaConfig(**tiny.WIDE)
    config.architectures = ["GemmaForCausalLM"]
    model = tiny.randomize(transformers.GemmaForCausalLM(config)).eval()
    _, result = run(model, tmp_path, "rotate")
    assert_same_function(model, result)
    assert result.load("model.norm.weight").abs().max() == 0


@pytest.mark.slow
def test_parallel_blocks_share_a_scale(tmp_path):
    """Phi: one norm feeds q, k, v and fc1, which run in two groups."""
    config = transformers.PhiConfig(**tiny.GQA)
    config.architectures = ["PhiForCausalLM"]
    model = tiny.randomize(transformers.PhiForCausalLM(config)).eval()
    for kind in apply.KINDS:
        _, result = run(model, tmp_path, kind, kind)
        assert_same_function(model, result)
    folds = report_of(tmp_path / "awq")["folds"]
    assert len(folds[0]["consumers"]) == 4
    assert all(fold["error"] < fold["rtn_error"] for fold in folds)


def test_rotated_vectors_have_no_weight_left_in_norms(tmp_path):
    _, result = run(tiny.build("llama3", num_hidden_layers=2), tmp_path, "rotate")
    assert all((result.load(name) == 1).all() for name in result.tensors if "norm" in name)
    _, result = run(tiny.build("gpt2"), tmp_path / "gpt2", "rotate")
    assert all((result.load(n) == 0).all() for n in result.tensors if n.endswith(("ln_1.bias", "ln_2.bias")))


def test_a_tied_head_is_refused_or_untied_and_counted(tmp_path):
    model = tiny.build("smollm")
    with pytest.raises(ModelError, match="tied"):
        run(model, tmp_path, "rotate", untie=False)
    source, result = run(model, tmp_path, "rotate")
    assert result.config["tie_word_embeddings"] is False
    assert report_of(result.path)["added_bytes"] == 320 * 64 * 4 == result.nbytes - source.nbytes


def test_refusals(tmp_path):
    with pytest.raises(ModelError, match="cannot be rotated"):
        run(tiny.build("gemma2"), tmp_path, "rotate")
    with pytest.raises(SettingsError, match="kind"):
        run(tiny.build("gemma2"), tmp_path, "spin")
    with pytest.raises(SettingsError, match="folds"):
        run(tiny.build("gemma2"), tmp_path, "awq", folds=("q",))
    with pytest.raises(SettingsError, match="grids"):
        run(tiny.build("gemma2"), tmp_path, "awq", grids=None)
    with pytest.raises(SettingsError, match="batches"):
        run(tiny.build("gemma2"), tmp_path, "awq", batches=[])
    with pytest.raises(ModelError, match="no scale can be folded"):
        run(tiny.build("bert"), tmp_path / "bert", "smoothquant", folds=("norm",))
    assert not (tmp_path / "out").exists()


def test_the_papers_smoothquant_scales_behind_norms_alone(tmp_path):
    source, result = run(
        tiny.build("llama3", num_hidden_layers=2), tmp_path, "smoothquant", alpha=0.5, grids=None
    )
    report = report_of(result.path)
    assert {fold["kind"] for fold in report["folds"]} == {"norm"}
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(source.load(name), result.load(name))


def test_only_linears_with_a_grid_count(tmp_path):
    model = tiny.build("llama3", num_hidden_layers=2)
    some = {name: grid for name, grid in grids(model).items() if "layers.1.mlp" in name}
    _, result = run(model, tmp_path, "awq", grids=some)
    assert [fold["kind"] for fold in report_of(result.path)["folds"]] == ["norm", "up"]
    assert_same_function(model, result)


def hessians(model, names):
    actual = {}
    hooks = []
    for name in names:
        module = model.get_submodule(name)
        actual[name] = Hessian(module.weight.shape[1])
        hooks.append(module.register_forward_pre_hook(lambda _, args, h=actual[name]: h.add(args[0])))
    for batch in batches(model):
        tiny.logits(model, batch)
    for hook in hooks:
        hook.remove()
    return {name: h.value() for name, h in actual.items()}


def test_layers_round_better_after_awq(tmp_path):
    """End to end: round the smoothed model's Linears, measure with its own inputs, against the plain model's.

    Each fold's error is what the search said it would be, although v and up were scaled by another fold too.
    """
    model = tiny.build("llama3", num_hidden_layers=2)
    _, result = run(model, tmp_path, "awq")
    smoothed = load_model(result, dtype=torch.float32)
    names = list(grids(model))
    errors = {}
    for which, item in (("plain", model), ("smoothed", smoothed)):
        seen = hessians(item, names)
        for name in names:
            W = item.get_submodule(name).weight.detach()
            whole = torch.einsum("nk,kl,nl->", W.double(), seen[name].double(), W.double())
            error = output_error(W, rtn(W, IntGrid(4, 16)).dequantize(), seen[name])
            errors[which, name] = (error * float(whole), float(whole))
    for fold in report_of(result.path)["folds"]:
        if fold["kind"] in ("up", "v"):  # o and down are scaled by one fold only: absolute errors compare
            (name,) = fold["consumers"]
            assert errors["plain", name][0] / errors["plain", name][1] == pytest.approx(
                fold["rtn_error"], rel=1e-2
            )
            assert errors["smoothed", name][0] / errors["smoothed", name][1] == pytest.approx(
                fold["error"], rel=1e-2
            )


def test_transforms_compose(tmp_path):
    model = tiny.build("qwen2", num_hidden_layers=2)
    _, rotated = run(model, tmp_path, "rotate", "rotated")
    smoothed = transform(
        rotated,
        "awq",
        folder=tmp_path / "both",
        work=tmp_path / "w",
        batches=batches(model),
        grids=grids(model),
    )
    assert_same_function(model, smoothed)


def test_dtype_is_kept_or_cast(tmp_path):
    model = tiny.build("llama2").bfloat16()
    _, result = run(model, tmp_path, "rotate", "kept", dtype=None)
    assert {info.dtype for info in result.tensors.values()} == {"BF16"}
    source, result = run(model, tmp_path, "rotate", "wide")
    assert {info.dtype for info in result.tensors.values()} == {"F32"}
    assert_same_function(load_model(source, dtype=torch.float32), result)


def test_same_seed_same_bytes_and_other_seed_other_bytes(tmp_path):
    model = tiny.build("llama3", num_hidden_layers=2)
    files = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(model, tmp_path, "rotate", name, seed=seed)
        files[name] = (tmp_path / name / "model.safetensors").read_bytes()
    assert files["a"] == files["b"] != files["c"]


@pytest.mark.slow
def test_a_finished_folder_is_reused(tmp_path, monkeypatch):
    model = tiny.build("llama3", num_hidden_layers=2)
    run(model, tmp_path, "awq")
    monkeypatch.setattr(apply, "sweep_linears", None)
    monkeypatch.setattr(apply, "stream", None)
    _, result = run(model, tmp_path, "awq")
    assert_same_function(model, result)


def test_resumes_after_the_sweep(tmp_path, monkeypatch):
    """Killed while it writes: the scales are not searched again, and the bytes are the same."""
    model = tiny.build("llama3", num_hidden_layers=2)
    run(model, tmp_path, "awq", "whole")

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(apply, "stream", killed)
        run(model, tmp_path, "awq", "cut")
    monkeypatch.setattr("attar.quantization.transforms.awq.search_scale", killed)
    run(model, tmp_path, "awq", "cut")
    for name in ("model.safetensors", "config.json", apply.REPORT):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert json.loads((tmp_path / "cut" / apply.REPORT).read_text())["kind"] == "awq"
