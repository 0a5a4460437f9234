"""A finished model beside its original: what is not fit is named, the hub gets the figures."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from attar import verbs
from attar.checkpoint import open_checkpoint, remote
from attar.checkpoint.card import Card
from attar.cli.main import call
from attar.deployment.settings import ExportSettings
from attar.deployment.stage import export
from attar.errors import CheckpointError, NumericsError
from attar.measure.settings import VerifySettings
from attar.measure.verification import _absent_tokens, _half_head, _misstated, verify
from attar.models.loading.fit import admit
from attar.quantization.settings import quantize_settings
from attar.quantization.stage import quantize
from tests import tiny_models, tiny_mtp

SETTINGS = VerifySettings(tokens=128)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A dense model with a chat template and its quantized copy."""
    folder = tmp_path_factory.mktemp("verify")
    base = tiny_models.save(
        tiny_models.build("llama3", num_hidden_layers=1), folder / "base", dtype=torch.bfloat16
    )
    (base / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    settings = quantize_settings(method="rtn", scheme="W8A16", group_size=32, check_tokens=0)
    quantize(str(base), folder / "w8", settings)
    return base, folder / "w8"


@pytest.fixture
def copy(pair, tmp_path):
    """The quantized copy without its card, to be spoilt."""
    target = tmp_path / "copy"
    target.mkdir()
    for file in pair[1].iterdir():
        if file.is_file() and file.name != "attar.json":
            (target / file.name).write_bytes(file.read_bytes())
    return target


def change(file, **fields):
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_a_sound_model_is_fit(pair):
    verified = verify(pair[1], pair[0], SETTINGS)
    measured = verified.measurements
    assert verified.faults == () and verified.to_dict()["fit"]
    assert 0 < measured.kl_mean < 0.05 and measured.kl_noise_floor > 0
    assert verified.verdict.startswith("fit: KL 0.0") and " won, answers of " in verified.verdict


def test_what_engines_and_users_would_meet_is_named(pair, copy):
    quantization = json.loads((copy / "config.json").read_text())["quantization_config"]
    change(copy / "config.json", quantization_config={**quantization, "ignore": []})
    (copy / "chat_template.jinja").write_text("{{ messages[0].content }}")
    change(copy / "generation_config.json", eos_token_id=7)
    verified = verify(copy, pair[0], VerifySettings(tokens=128, max_kl=1e-9))
    assert verified.faults[:3] == (
        "config.json: ignore lacks lm_head, which is stored dense (1 in all)",
        "its chat template is another one",
        "generation_config.json: eos_token_id is 7, the original's 0",
    )
    assert "is above 1e-09 (--max-kl)" in verified.faults[3]
    assert verified.verdict.startswith("not fit: config.json: ignore lacks lm_head")


DENSE = {  # format, scheme, and how its config names the dense projection
    "gptq": ("W4A16", "dynamic", {}),
    "modelopt": ("NVFP4A16", "ignore", []),
}


@pytest.mark.parametrize("layout", DENSE)
def test_dense_matrices_that_other_engines_take_as_quantized_are_named(layout, tmp_path):
    scheme, field, none = DENSE[layout]
    dense = tiny_mtp.save("qwen2", tmp_path / "dense", dtype=torch.bfloat16, intermediate_size=128)
    options = {"ignore": ("re:down_proj", "re:mtp"), "method": "rtn", "check_tokens": 0}
    group_size = 32 if scheme == "W4A16" else -1
    quantize(dense, tmp_path / "w4", quantize_settings(scheme=scheme, group_size=group_size, **options))
    folder = export(tmp_path / "w4", tmp_path / layout, ExportSettings(format=layout)).path
    assert list(_misstated(admit(folder))) == []
    quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
    head = [name for name in quantization[field] if "mtp" in name]
    kept = type(none)(head) if layout == "modelopt" else {name: {} for name in head}
    change(folder / "config.json", quantization_config={**quantization, field: kept})
    first = "model.layers.0.mlp.down_proj"
    count = admit(folder).config["num_hidden_layers"]
    assert list(_misstated(admit(folder))) == [
        f"config.json: {field} lacks {first}, which is stored dense ({count} in all)"
    ]
    change(folder / "config.json", quantization_config={**quantization, field: none})
    (line,) = _misstated(admit(folder))
    assert int(line.rpartition("(")[2].split()[0]) > count


def test_zero_scales_are_named(pair, copy):
    file = next(copy.glob("*.safetensors"))
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight_scale"
    tensors[name][0] = 0
    save_file(tensors, file, {"format": "pt"})
    assert any(name in fault for fault in verify(copy, pair[0], SETTINGS).faults)


def test_the_command_ends_with_the_verdict(pair, copy, capsys):
    words = ["--against", str(pair[0]), "--tokens", "128", "-q"]
    assert call(["verify", str(pair[1]), *words]) == 0
    assert capsys.readouterr().out.startswith("fit: KL ")
    assert call(["verify", str(copy), *words, "--max-kl", "1e-9", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert not answer["fit"] and "--max-kl" in answer["faults"][0]
    assert call(["verify", str(copy)]) == 2


def test_upload_verifies_first_and_the_hub_gets_the_figures(pair, monkeypatch):
    sent = []
    monkeypatch.setattr(remote, "upload", lambda folder, address: sent.append(address))
    verdict = verbs.upload(pair[1], "hf://me/small", against=pair[0], progress=False)
    assert verdict.startswith("fit: ") and sent == ["hf://me/small"]
    text = (pair[1] / "README.md").read_text()
    front = yaml.safe_load(text.split("---\n")[1])
    (result,) = front["model-index"][0]["results"]
    figures = {metric["type"]: metric["value"] for metric in result["metrics"]}
    assert figures["kl_mean"] == Card.read(pair[1]).measurements["kl_mean"]
    assert {"kl_noise_floor", "tokens_lost", "tokens_won", "answers_length"} <= figures.keys()
    assert "## Measurements" in text and front["library_name"]
    open_checkpoint(pair[1])  # the card knows the new README


def test_what_is_not_fit_is_not_uploaded(pair, copy, monkeypatch):
    monkeypatch.setattr(remote, "upload", lambda folder, address: pytest.fail("it was uploaded"))
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(NumericsError, match="not fit: its chat template is missing"):
        verbs.upload(copy, "hf://me/small", against=pair[0], progress=False)


def spoilt(folder, target, change_tensors):
    """A copy of a model with other tensors."""
    target.mkdir()
    for file in folder.iterdir():
        if file.is_file() and file.name != "attar.json":
            (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(target / "model.safetensors")
    save_file(change_tensors(tensors), target / "model.safetensors", {"format": "pt"})
    return target


def test_what_other_verbs_leave_out_is_a_fault(tmp_path):
    base = tiny_mtp.save("qwen2", tmp_path / "base")
    half = spoilt(
        base, tmp_path / "half", lambda t: {name: t[name] for name in t if "input_proj" not in name}
    )
    change(half / "config.json", pad_token_id=999)
    first, second = verify(half, base, SETTINGS).faults
    assert "half a multi-token prediction head, without input_proj" in first + second
    assert "pad_token_id is 999" in first + second


@pytest.mark.parametrize("part", ["final_layernorm", "mlp.down_proj", "self_attn"])
def test_half_a_head_is_named(tmp_path, part):
    """Of the original's modules, and without an original that has one by its form."""
    base = tiny_mtp.save("qwen2", tmp_path / "base")
    half = spoilt(base, tmp_path / "half", lambda t: {name: t[name] for name in t if f"0.{part}" not in name
                                                      or "mtp_" not in name})  # fmt: skip
    (line,) = _half_head(admit(half), admit(base))
    assert line.startswith(f"its multi-token prediction head lacks model.mtp_layers.0.{part}")
    without = spoilt(base, tmp_path / "none", lambda t: {name: t[name] for name in t if "mtp_" not in name})
    assert not [*_half_head(admit(without), admit(base))] and not [*_half_head(admit(base), admit(base))]
    lines = [*_half_head(admit(half), admit(without))]
    assert all("cannot be run" in line for line in lines) and len(lines) == (part != "final_layernorm")


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("generation_config.json", {"eos_token_id": 5000}, "eos_token_id is 5000, but the model has 320"),
        ("generation_config.json", {"eos_token_id": [2, "x"]}, 'eos_token_id is "x"'),
        ("generation_config.json", {"bos_token_id": -3}, "bos_token_id is -3"),
        ("generation_config.json", {"suppress_tokens": [1, 320]}, "suppress_tokens is 320"),
    ],
)
def test_tokens_that_are_absent_are_named(pair, copy, file, content, words):
    target = copy / file
    target.write_text(json.dumps({**(json.loads(target.read_text()) if target.exists() else {}), **content}))
    (line,) = _absent_tokens(admit(copy))
    assert words in line and not [*_absent_tokens(admit(pair[1]))]


def test_what_is_damaged_is_named_where_nothing_can_be_measured(pair, tmp_path):
    name = "model.layers.0.mlp.up_proj.weight_scale"
    model = spoilt(pair[1], tmp_path / "nan", lambda t: {**t, name: t[name] * float("nan")})
    with pytest.raises(NumericsError, match=f"{name} holds zero, negative or infinite scales"):
        verify(model, pair[0], SETTINGS)


def test_a_shape_that_is_none_is_refused(tmp_path):
    base = tiny_models.save(tiny_models.build("llama3", num_hidden_layers=1), tmp_path / "base")
    settings = quantize_settings(method="rtn", scheme="W4A16", group_size=32, check_tokens=0)
    quantize(str(base), tmp_path / "w4", settings)
    name = "model.layers.0.mlp.up_proj.weight_shape"
    model = spoilt(tmp_path / "w4", tmp_path / "copy", lambda t: {**t, name: t[name][:1].clone()})
    with pytest.raises(CheckpointError, match=rf"{name} is \[1\], but must be two numbers"):
        admit(model)


@pytest.mark.parametrize(
    ("part", "changed", "words"),
    [
        (
            "input_proj",
            lambda t: t[:, :5].clone(),
            r"input_proj.weight is \[64, 5\], but must be \[64, 128\]",
        ),
        ("final_layernorm", lambda t: t[:5].clone(), r"final_layernorm.weight is \[5\], but must be \[64\]"),
        ("self_attn.q_proj", lambda t: t[:5].clone(), "cannot be run: "),
    ],
)
def test_a_head_that_does_not_fit_is_named(tmp_path, part, changed, words):
    base = tiny_mtp.save("qwen2", tmp_path / "base")
    name = f"model.mtp_layers.0.{part}.weight"
    other = spoilt(base, tmp_path / "other", lambda t: {**t, name: changed(t[name])})
    (line,) = _half_head(admit(other), admit(base))
    assert re.search(words, line) and "\n" not in line


def test_scales_of_another_shape_or_without_one_of_the_inputs_are_named(tmp_path):
    base = tiny_mtp.save("qwen2", tmp_path / "base", num_hidden_layers=1)
    text = {"data": str(Path(json.__file__).parent), "samples": 2, "sequence_length": 32}
    quantize(
        str(base), tmp_path / "nvfp4", quantize_settings(method="rtn", scheme="NVFP4", check_tokens=0, **text)
    )
    scale = "model.layers.0.mlp.up_proj.weight_global_scale"
    two = spoilt(tmp_path / "nvfp4", tmp_path / "two", lambda t: {**t, scale: t[scale].repeat(2)})
    with pytest.raises(CheckpointError, match=r"up_proj do not fit config.json's quantization_config"):
        admit(two)
    inputs = "model.layers.0.mlp.up_proj.input_global_scale"
    none = spoilt(
        tmp_path / "nvfp4", tmp_path / "none", lambda t: {name: t[name] for name in t if name != inputs}
    )
    assert "model.layers.0.mlp.up_proj has no scale of its inputs" in verify(none, base, SETTINGS).faults
    nan = "model.mtp_layers.0.mlp.up_proj.weight"
    head = spoilt(base, tmp_path / "head", lambda t: {**t, nan: t[nan] * float("nan")})
    assert any(nan in fault for fault in verify(head, base, SETTINGS).faults)
