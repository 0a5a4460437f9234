"""The verb quantize with every method, scheme and step, from folder to folder."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from attar.checkpoint import open_checkpoint
from attar.checkpoint.card import Card
from attar.errors import NumericsError, SettingsError
from attar.formats.readers import Decoded
from attar.measure.evaluate import evaluate
from attar.measure.settings import EvaluateSettings
from attar.models.loading import device
from attar.models.loading.load import load_model
from attar.quantization.schemes import SCHEMES
from attar.quantization.settings import GROUP_ORDERED, METHOD_SETTINGS, quantize_settings
from attar.quantization.stage import quantize
from attar.sparsity import parse_sparsity
from tests import tiny_models
from tests.cases import mostly_slow
from tests.log_lines import LogLines
from tests.quantization.packing import settings_for

SMALL = {
    "samples": 32,
    "sequence_length": 64,
    "batch_size": 8,
    "group_size": 32,
    "iterations": 3,
    "steps": 2,
    "check_tokens": 0,
    "data": str(Path(json.__file__).parent),  # a few files: the whole library takes seconds to read
}
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = tiny_models.build("llama3", **WIDE)
    return tiny_models.save(model, tmp_path_factory.mktemp("verb") / "llama3", dtype=torch.bfloat16)


@torch.no_grad()
def logits(model):
    tokens = torch.randint(3, 300, (2, 16), generator=torch.Generator().manual_seed(5))
    return model.eval()(input_ids=tokens).logits.float()


def distance(folder_a, folder):
    p, q = (logits(load_model(item, dtype=torch.float32)).log_softmax(-1) for item in (folder, folder_a))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("method", mostly_slow(METHOD_SETTINGS, ["awq"]))
def test_every_method_makes_a_checkpoint_that_transformers_loads(folder, tmp_path, method):
    settings = settings_for(method=method, **{**SMALL, "samples": 8, "check_tokens": 64})
    quantized = quantize(folder, tmp_path / "out", settings)
    theirs = AutoModelForCausalLM.from_pretrained(quantized.path, dtype=torch.bfloat16)
    assert torch.equal(logits(theirs), logits(load_model(quantized)))
    assert len(quantized.card.details["layers"]) == 14
    assert 0 < quantized.card.details["gates"]["kl"] < quantized.card.details["gates"]["blind"]
    assert distance(quantized, folder) < 0.1


@pytest.mark.parametrize("update", ["adam", "sign"])
def test_autoround_steps_as_it_is_asked(folder, tmp_path, monkeypatch, update):
    def solver(grids, **options):
        raise LookupError(options["update"])

    monkeypatch.setattr("attar.quantization.rounding.AutoRoundSolver", solver)
    with pytest.raises(LookupError, match=update):
        quantize(folder, tmp_path / "out", settings_for(**{**SMALL, "method": "autoround", "update": update}))


@pytest.mark.few(2)
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("method", ["gptq", "autoround", "qat"])
def test_arithmetic_follows_the_processor_and_the_card_says_which(
    folder, tmp_path, monkeypatch, method, native
):
    """Products of the calibration and of the training: seen in the hidden states that the first MLP gets."""
    monkeypatch.setattr(device, "has_bfloat16", lambda device: native)
    seen = []

    def spy(module, args, output):
        if torch.is_autocast_enabled("cpu") or not native:
            seen.append(output.dtype)

    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: spy(module, args, output) if type(module) is torch.nn.Linear else None
    )
    try:
        settings = settings_for(method=method, **SMALL)
        quantized = quantize(folder, tmp_path / "out", settings)
    finally:
        hook.remove()
    assert quantized.card.details["precision"] == ("bf16" if native else "fp32")
    assert set(seen) == {torch.bfloat16 if native else torch.float32}


@pytest.mark.few(3)
@pytest.mark.parametrize("act_order", ["off", "group"])
@pytest.mark.parametrize("method", mostly_slow(METHOD_SETTINGS, ["rtn", "gptq", "awq", "yaqa"]))
def test_every_order_of_columns_decodes_alike_or_is_refused_at_once(folder, tmp_path, method, act_order):
    if act_order == "group" and method not in GROUP_ORDERED:
        refused = rf"(off or static with {method}; group goes|left out with method {method}: it belongs)"
        with pytest.raises(SettingsError, match=rf"{refused} (with|to) .*gptq"):
            quantize_settings(method=method, act_order=act_order)
        return
    few = {**SMALL, "samples": 8, "scheme": "W4A16_ASYM"}
    quantized = quantize(folder, tmp_path / "out", settings_for(method=method, act_order=act_order, **few))
    name = "model.layers.1.self_attn.q_proj"
    ours = load_model(quantized)
    assert torch.equal(ours.get_submodule(name).weight, decoded_by_hand(quantized, name))
    assert distance(quantized, folder) < 0.1
    stored = [tensor for tensor in quantized.tensors if tensor.endswith("weight_g_idx")]
    assert len(stored) == (14 if act_order == "group" else 0)


def decoded_by_hand(folder_a, name):
    """(q - z) s of 4-bit codes, each input in the group that it names, or in the 32 neighbours' own."""
    actual = {leaf: folder_a.load(f"{name}.weight_{leaf}") for leaf in ("packed", "zero_point", "scale")}

    def nibbles(words):
        return torch.stack([words >> 4 * index & 15 for index in range(8)], -1).flatten(-2)

    q, z = nibbles(actual["packed"]), nibbles(actual["zero_point"].T).T
    order = f"{name}.weight_g_idx"
    group = folder_a.load(order).long() if order in folder_a.tensors else torch.arange(q.shape[1]) // 32
    return ((q - z[:, group]) * actual["scale"][:, group].float()).bfloat16()


@pytest.mark.parametrize("changes", [{"scheme": "W8A8"}, {"scheme": "NVFP4A16"}, {"group_size": 0}])
def test_group_order_wants_a_layout_with_groups(folder, tmp_path, changes):
    settings = settings_for(**{**SMALL, "method": "gptq", "act_order": "group", **changes})
    with pytest.raises(SettingsError, match="act_order is 'group', but must be off or static with"):
        quantize(folder, tmp_path / "out", settings)
    assert not list(tmp_path.iterdir())


@pytest.mark.few(1)
@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "INT8"])
def test_every_scheme_goes_through_save_load_and_evaluate(folder, tmp_path, scheme):
    settings = settings_for(scheme=scheme, method="gptq", **SMALL)
    quantized = quantize(folder, tmp_path / "out", settings)
    if scheme != "NF4":  # transformers needs bitsandbytes for it: tests/peers
        theirs = AutoModelForCausalLM.from_pretrained(quantized.path, dtype=torch.bfloat16)
        assert torch.allclose(logits(theirs), logits(load_model(quantized)), atol=1e-2)
    text = EvaluateSettings(
        tokens=64, sequence_length=32, batch_size=2, speed=False, sample="", data=SMALL["data"]
    )
    record = evaluate(quantized, text, reference=folder)
    bits = SCHEMES[scheme].weights.bits
    assert 0 < record.kl_mean < {2: 0.5, 3: 0.1}.get(bits, 0.05)
    assert quantized.nbytes < open_checkpoint(folder).nbytes


def test_subnormal_scales_survive_the_file_and_transformers_decodes_them(folder, tmp_path):
    model = tiny_models.build("llama3", **WIDE)
    for block in model.model.layers:
        block.mlp.down_proj.weight.data.mul_(1e-3)
    small = tiny_models.save(model, tmp_path / "small", dtype=torch.float16)
    settings = settings_for(scheme="W8A16", method="rtn", **SMALL)
    quantized = quantize(small, tmp_path / "out", settings)
    name = "model.layers.1.mlp.down_proj"
    assert quantized.load(f"{name}.weight_scale").max() < torch.finfo(torch.float16).tiny
    theirs = AutoModelForCausalLM.from_pretrained(quantized.path, dtype=torch.float16)
    ours = load_model(quantized)
    assert torch.equal(logits(theirs), logits(ours))
    kept, got = (m.get_submodule(name).weight.float() for m in (model.half(), ours))
    assert (
        float(((got - kept).norm() / kept.norm()).detach()) < 0.012
    )  # 0.08 with scales of float16's smallest normal


def test_fp8_with_an_fp8_cache_equals_transformers_in_the_stored_type(tmp_path):
    """In float32 they differ by some per cent: transformers multiplies codes by scales in float32, attar
    rounds a decoded weight to the stored type, and rounded activations turn small steps into large ones."""
    model = tiny_models.build("gemma3", num_hidden_layers=2)
    dense = tiny_models.save(model, tmp_path / "dense", dtype=torch.bfloat16)
    settings = settings_for(scheme="FP8", kv_cache="fp8", method="rtn", **SMALL)
    quantized = quantize(dense, tmp_path / "out", settings)
    theirs, ours = (
        AutoModelForCausalLM.from_pretrained(quantized.path, dtype=torch.bfloat16),
        load_model(quantized),
    )
    assert torch.equal(logits(theirs), logits(ours))
    theirs = AutoModelForCausalLM.from_pretrained(quantized.path, dtype=torch.float32)
    ours = load_model(quantized, dtype=torch.float32)
    wanted = logits(ours)
    assert (logits(theirs) - wanted).norm() > 0.01 * wanted.norm()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            theirs.get_parameter(name).copy_(parameter)
    assert (logits(theirs) - wanted).norm() < 1e-3 * wanted.norm()


@pytest.mark.slow
def test_better_methods_are_closer_in_the_whole_model(folder, tmp_path):
    settings = {**SMALL, "samples": 64, "check_tokens": 512}
    kl = {}
    for method in ("rtn", "gptq", "qronos"):
        chosen = settings_for(scheme="W3A16", method=method, **settings)
        kl[method] = quantize(folder, tmp_path / method, chosen).card.details["gates"]["kl"]
    assert kl["gptq"] < 0.7 * kl["rtn"] and kl["qronos"] < 0.7 * kl["rtn"], kl


def sparse(folder, out):
    """The model with every second column of its Linears at zero."""
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("proj.weight"):
            tensors[name][:, ::2] = 0.0
    shutil.copytree(folder, out)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.few(2)
@pytest.mark.parametrize("scheme", mostly_slow(["W4A16", "W4A16_ASYM"], ["W4A16_ASYM"]))
@pytest.mark.parametrize("method", ["rtn", "gptq", "awq", "qronos", "autoround", "qat"])
def test_pruned_weights_stay_zero(folder, tmp_path, method, scheme):
    """By default: the default sees that half of each weight is zero."""
    pruned = sparse(folder, tmp_path / "pruned")
    quantized = quantize(pruned, tmp_path / "out", settings_for(method=method, scheme=scheme, **SMALL))
    decoded = Decoded(quantized)
    for name in decoded.tensors:
        if name.endswith("proj.weight"):
            weight = decoded.load(name)
            assert (weight[:, ::2] == 0).all() and weight.any(), name


@pytest.mark.slow
def test_the_weights_of_qat_stay_zero_while_they_are_trained(folder, tmp_path, monkeypatch):
    """Not by a mask at the end, for which training could not make up."""
    from attar.walks import train as module

    seen = []
    step = module._step

    def spy(run, *args):
        value = step(run, *args)
        weights = dict(run.model.named_parameters())
        seen.append([w.detach()[:, ::2] for name, w in weights.items() if name.endswith("weight.original")])
        return value

    monkeypatch.setattr(module, "_step", spy)
    options = {**SMALL, "steps": 3, "learning_rate": 1e-2}
    quantize(sparse(folder, tmp_path / "pruned"), tmp_path / "out", settings_for(method="qat", **options))
    assert len(seen) == 3 and len(seen[0]) == 14
    assert not any(weight.any() for weights in seen for weight in weights)


@pytest.mark.slow
def test_zeros_are_given_up_where_they_are_not_wanted(folder, tmp_path):
    pruned = sparse(folder, tmp_path / "pruned")
    settings = settings_for(scheme="W4A16_ASYM", keep_zeros="false", **SMALL)
    decoded = Decoded(quantize(pruned, tmp_path / "out", settings))
    names = [name for name in decoded.tensors if name.endswith("proj.weight")]
    assert any(decoded.load(name)[:, ::2].any() for name in names)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("scheme", "sparsity", "act_order"),
    [
        ("W4A16", "2:4", "static"),
        ("W4A16_ASYM", "2:4", "group"),
        ("W8A8", "4:8", "static"),
        ("W8A16", 0.3, "off"),
        ("FP8_DYNAMIC", "2:4", "static"),
    ],
)
def test_mask_and_codes_of_one_pass(folder, tmp_path, scheme, sparsity, act_order):
    size = {} if scheme in ("W8A8", "FP8_DYNAMIC") else {"group_size": 32}
    options = {
        **SMALL,
        **size,
        "check_tokens": 64,
        "scheme": scheme,
        "sparsity": sparsity,
        "act_order": act_order,
    }
    quantized = quantize(folder, tmp_path / "out", settings_for(method="gptq", **options))
    amount, decoded = parse_sparsity(sparsity), Decoded(quantized)
    rows = {row["name"]: row["sparsity"] for row in quantized.card.details["layers"]}
    assert len(rows) == 14
    for name, reported in rows.items():
        zeros = decoded.load(f"{name}.weight") == 0
        assert float(zeros.float().mean()) == pytest.approx(reported, abs=1e-6)
        assert reported >= amount.zeros - 1e-3
        if amount.of:
            assert (zeros.unflatten(1, (-1, amount.of)).sum(-1) >= amount.of - amount.kept).all()
    assert 0 < quantized.card.details["gates"]["kl"] < quantized.card.details["gates"]["blind"]
    stated = quantized.card.details["zeros"]
    assert stated["asked"] == str(sparsity) and stated["fraction"] >= amount.zeros - 0.01
    assert "as codes" in stated["stored"] and ("fewer bytes" in stated["speed"]) is (sparsity == "2:4")
    assert "sparsity_config" not in (quantized.path / "config.json").read_text()


@pytest.mark.slow
def test_new_zeros_include_those_of_a_pruned_model(folder, tmp_path):
    pruned = sparse(folder, tmp_path / "pruned")  # every second input
    Card(name="pruned", stage="prune", settings={"sparsity": "0.5"}).write(pruned)
    settings = settings_for(scheme="W8A16", sparsity="1:4", **SMALL)
    decoded = Decoded(quantize(pruned, tmp_path / "out", settings))
    weights = [decoded.load(name) for name in decoded.tensors if name.endswith("proj.weight")]
    assert weights and not any(weight[:, ::2].any() for weight in weights)
    assert all((weight.unflatten(1, (-1, 4)) != 0).sum(-1).max() == 1 for weight in weights)


def test_a_pattern_that_does_not_divide_some_inputs_is_refused_before_any_work(folder, tmp_path):
    settings = settings_for(sparsity="2:3", **SMALL)
    with pytest.raises(SettingsError, match=r"sparsity is '2:3', but must be .*_proj has \d+"):
        quantize(folder, tmp_path / "out", settings)
    assert not list(tmp_path.iterdir())


def test_a_rotation_says_that_it_loses_zeros(tmp_path):
    progress = LogLines()
    model = tiny_models.build("llama3", tie_word_embeddings=False, **WIDE)
    source = tiny_models.save(model, tmp_path / "untied", dtype=torch.bfloat16)
    pruned = sparse(source, tmp_path / "pruned")
    Card(name="pruned", stage="prune", settings={"sparsity": "0.5"}).write(pruned)
    quantize(pruned, tmp_path / "kept", settings_for(method="rtn", **SMALL), progress=progress)
    assert any("pruned weights stay zero" in line for line in progress.lines)
    settings = settings_for(method="rtn", rotate=True, **SMALL)
    quantize(pruned, tmp_path / "rotated", settings, progress=progress)
    assert sum("zeros of this pruned model are lost" in line for line in progress.lines) == 1


@pytest.mark.slow
def test_bits_are_spent_where_they_matter(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTAR_CACHE", str(tmp_path / "cache"))
    settings = settings_for(bits=4.5, method="gptq", **SMALL)
    quantized = quantize(folder, tmp_path / "out", settings)
    mixture = quantized.card.details["mixed_precision"]
    assert mixture["bits_per_weight"] <= 4.5 and mixture["gap"] == 0
    assert len(set(mixture["schemes"].values())) > 1
    for block in (0, 1):
        schemes = [mixture["schemes"][f"model.layers.{block}.self_attn.{leaf}_proj"] for leaf in "qkv"]
        assert len(set(schemes)) == 1
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained(quantized.path, dtype=torch.bfloat16)),
        logits(load_model(quantized)),
    )

    def kept():
        """Losses and codes, by inode; finished.json is written when codes are used."""
        files = [file for file in (tmp_path / "cache/sensitivity").rglob("*") if file.is_file()]
        return {file.name: file.stat().st_ino for file in files if file.name != "finished.json"}

    before = kept()
    quantize(folder, tmp_path / "again", settings_for(bits=5.0, method="gptq", **SMALL))
    assert before == kept(), "another budget measures nothing again"
    with pytest.raises(SettingsError, match=r"bits is 1\.5"):
        quantize(folder, tmp_path / "less", settings_for(bits=1.5, **SMALL))


@pytest.mark.slow
@pytest.mark.parametrize("steps", [{"rotate": True}, {"rotate": True, "smooth": "awq"}])
def test_transforms_compose_and_leave_an_ordinary_checkpoint(tmp_path, steps):
    model = tiny_models.build("llama3", tie_word_embeddings=False, **WIDE)
    source = tiny_models.save(model, tmp_path / "untied", dtype=torch.bfloat16)
    quantized = quantize(source, tmp_path / "out", settings_for(method="gptq", **steps, **SMALL))
    assert len(quantized.card.details["transforms"]) == len(steps)
    assert {info.dtype for info in quantized.tensors.values()} <= {"I32", "I64", "BF16"}
    assert quantized.config["dtype"] == "bfloat16"
    theirs = AutoModelForCausalLM.from_pretrained(quantized.path, dtype=torch.bfloat16)
    assert torch.equal(logits(theirs), logits(load_model(quantized)))
    assert distance(quantized, source) < 0.1


def test_garbage_is_an_error_that_names_the_layer(folder, tmp_path):
    """One weight of 10,000 in every group takes the scale for itself: all others become zero."""
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.gate_proj.weight"][:, ::32] = 1e4
    broken = tmp_path / "broken"
    tiny_models.save(tiny_models.build("llama3", **WIDE), broken, dtype=torch.bfloat16)
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NumericsError, match=r"layers\.1\.mlp\.gate_proj.*collapsed") as raised:
        quantize(broken, tmp_path / "out", settings_for(method="rtn", **SMALL))
    assert raised.value.exit_code == 1 and raised.value.hint
    assert not (tmp_path / "out").exists()


def test_a_model_that_says_nothing_any_more_is_an_error(folder, tmp_path, monkeypatch):
    """The files decode to something else than what was rounded: only the comparison at the end can tell."""
    monkeypatch.setattr("attar.quantization.check.Decoded", _Wrong)
    with pytest.raises(NumericsError, match=r"unusable.*KL"):
        quantize(folder, tmp_path / "out", settings_for(method="rtn", **{**SMALL, "check_tokens": 64}))
    assert not (tmp_path / "out").exists()


class _Wrong(Decoded):
    """A view in which one layer's weight is 300 times too large."""

    def load(self, name):
        tensor = super().load(name)
        return tensor * 300 if "layers.1.self_attn.o_proj" in name or "norm" in name else tensor


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "shape", "samples", "kills"),
    [
        ("llama3", {**WIDE, "num_hidden_layers": 12}, "64", (1, 7)),
        ("qwen3_moe", {"num_hidden_layers": 4}, "8", (1,)),
        ("gpt_oss", {"num_hidden_layers": 4}, "8", (2,)),  # stores its experts stacked
    ],
)
def test_killed_in_the_middle_of_a_sweep_it_goes_on_with_the_same_bytes(
    tmp_path, family, shape, samples, kills
):
    model = tiny_models.build(family, **shape)
    source = tiny_models.save(model, tmp_path / "model", dtype=torch.bfloat16)
    line = [sys.executable, "-m", "attar", "quantize", str(source), "--method", "qronos", "--quiet"]
    line += ["--samples", samples, "--sequence-length", "128", "--group-size", "32", "-o"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*line, str(tmp_path / "whole")], check=True, env=env)
    for killed_at in kills:
        out = tmp_path / f"cut-{killed_at}"
        run = subprocess.Popen([*line, str(out)], env=env)
        blocks = tmp_path / f".{out.name}.work/blocks"
        while not (blocks / f"block-{killed_at:05d}.safetensors").exists():
            assert run.poll() is None, "it ended before it could be killed"
            time.sleep(0.01)
        run.send_signal(signal.SIGKILL)
        run.wait()
        assert not out.exists() and blocks.is_dir()
        subprocess.run([*line, str(out)], check=True, env=env)
        name = "model.safetensors"
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
