"""The verb prune, from folder to folder."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from attar.cli.main import call
from attar.deployment.settings import ExportSettings
from attar.deployment.stage import export
from attar.errors import ModelError, SettingsError
from attar.models.loading import device
from attar.models.loading.load import load_model
from attar.pruning import units
from attar.pruning.selection import keep_most_important
from attar.pruning.settings import METHOD_SETTINGS, prune_settings
from attar.pruning.stage import METHODS, prune
from attar.pruning.structures import STRUCTURES
from attar.pruning.units import nothing_removed
from tests import tiny_models
from tests.cuts import keep_neurons
from tests.log_lines import LogLines
from tests.pruning.scored import scored

SMALL = {
    "samples": 4,
    "sequence_length": 32,
    "batch_size": 2,
    "data": str(Path(json.__file__).parent),  # a few files: the whole library takes seconds to read
}


def save(family, tmp_path):
    return tiny_models.save(tiny_models.build(family), tmp_path / family)


def kept_units(total, settings):
    return STRUCTURES[settings.method].count(total, settings.options)


def test_the_table_has_the_methods_of_the_settings():
    assert METHODS.keys() == METHOD_SETTINGS.keys()


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama3", "qwen2", "gemma2", "phi3", "gpt2", "opt"])
def test_neurons_are_gone_and_transformers_loads_the_rest(tmp_path, family):
    folder = save(family, tmp_path)
    pruned = prune(folder, tmp_path / "out", prune_settings(method="neurons", ratio=0.5, **SMALL))
    model = AutoModelForCausalLM.from_pretrained(pruned.path)
    before = load_model(folder)
    assert model.num_parameters() < before.num_parameters()
    ours = load_model(pruned)
    tokens = tiny_models.tokens(before)
    assert torch.equal(tiny_models.logits(model.eval(), tokens), tiny_models.logits(ours, tokens))
    rows = pruned.card.details["layers"]
    assert len(rows) == 3 and all(0 < row["importance_removed"] < 0.5 for row in rows)


def test_heads_are_gone(tmp_path):
    pruned = prune(
        save("llama3", tmp_path), tmp_path / "out", prune_settings(method="heads", ratio=0.25, **SMALL)
    )
    assert pruned.config["num_attention_heads"] == 6 and pruned.config["num_key_value_heads"] == 3
    assert pruned.config["head_dim"] == 8
    AutoModelForCausalLM.from_pretrained(pruned.path)


def test_the_least_important_go(tmp_path):
    """Removing what the criterion calls unimportant hurts less than removing what it calls important."""
    model = load_model(save("llama3", tmp_path))
    tokens = tiny_models.tokens(model, batch=8, length=16)
    scores = scored(model, "neurons", "gradient", [tokens], tmp_path / "work")
    whole = tiny_models.logits(model, tokens)
    far = [
        (
            tiny_models.logits(keep_neurons(model, keep_most_important(sign * scores, 64)), tokens) - whole
        ).norm()
        for sign in (1, -1)
    ]
    assert far[0] < 0.7 * far[1]


@pytest.mark.parametrize(
    ("total", "ratio", "multiple", "kept"),
    [
        (768, 0.25, 0, 576),
        (768, 0.33, 128, 512),
        (768, 0.0, 0, 768),
        (96, 0.9, 0, 10),
        (11008, 0.3, 0, 7680),
        (5, 0.5, 0, 2),
        (1536, 0.02, 0, 1504),  # 64 would remove nothing: 1505 is nearest to all 1536
        (1536, 0.25, 0, 1152),
    ],
)
def test_how_many_neurons_stay(total, ratio, multiple, kept):
    assert kept_units(total, prune_settings(method="neurons", ratio=ratio, multiple_of=multiple)) == kept


@pytest.mark.parametrize(
    ("total", "settings", "ratio"),
    [
        (3, {"method": "heads", "ratio": 0.1}, 0.1667),
        (4, {"method": "heads", "ratio": 0.0}, 0.1251),
        (1536, {"ratio": 0.0002}, 0.0004),
        (1536, {"ratio": 0.01, "multiple_of": 64}, 0.0209),
        (100, {"ratio": 0.01, "multiple_of": 64}, 0.0401),
    ],
)
def test_the_least_ratio_that_removes_something_is_named(total, settings, ratio):
    asked = prune_settings(**settings)
    assert kept_units(total, asked) == total
    problem = nothing_removed(total, asked)
    kept = kept_units(total, prune_settings(**{**settings, "ratio": ratio}))
    assert kept < total == kept_units(total, prune_settings(**{**settings, "ratio": ratio - 1e-4}))
    assert f"--ratio {ratio:g} removes " in problem.hint
    assert f"--ratio {asked.options.ratio:g}" in problem.message


def test_where_nothing_can_be_removed_no_ratio_is_named():
    assert nothing_removed(1, prune_settings(method="heads")).hint == "one must stay"
    assert "--multiple-of" in nothing_removed(96, prune_settings(multiple_of=96)).hint


def test_a_prune_that_removes_nothing_is_refused(tmp_path, capsys):
    folder = save("llama3", tmp_path)
    arguments = ["prune", str(folder), "-o", str(tmp_path / "out"), "--method", "heads", "--ratio", "0.1"]
    assert call(arguments) == 2
    message = capsys.readouterr().err.splitlines()
    assert message[-2:] == [
        "error: --ratio 0.1 removes none of the 4 head groups of a layer",
        "hint: --ratio 0.1251 removes 1 of 4",
    ]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_requested_and_the_removed_ratio_are_reported(tmp_path, capsys):
    folder = save("llama3", tmp_path)
    lines = LogLines()
    settings = prune_settings(method="heads", ratio=0.3, **SMALL)
    pruned = prune(folder, tmp_path / "out", settings, progress=lines)
    assert lines.lines == ["prune heads: asked for 30.0%, removes 25.0%: 1 of 4 head groups of each layer"]
    kept = pruned.card.details["kept"]
    assert (kept["asked_ratio"], kept["removed_ratio"]) == (0.3, 0.25)


@pytest.mark.few(1)
@pytest.mark.parametrize(("asked", "native"), [("auto", True), ("auto", False), ("bf16", False)])
def test_gradients_follow_the_processor_and_the_card_says_which(tmp_path, monkeypatch, asked, native):
    monkeypatch.setattr(device, "has_bfloat16", lambda device: native)
    seen = []
    plain = units.next_token_loss
    monkeypatch.setattr(units, "next_token_loss", lambda z, tokens: seen.append(z.dtype) or plain(z, tokens))
    settings = prune_settings(criterion="gradient", precision=asked, **SMALL)
    pruned = prune(save("llama3", tmp_path), tmp_path / "out", settings)
    fast = native or asked == "bf16"
    assert pruned.card.details["precision"] == ("bf16" if fast else "fp32")
    assert set(seen) == {torch.bfloat16 if fast else torch.float32}


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_a_gguf_file_does_not_become_float32(tmp_path, kind):
    folder = save("llama3", tmp_path)
    file = tmp_path / "m.gguf"
    export(folder, file, ExportSettings(format="gguf", type=kind))
    lines = LogLines()
    settings = prune_settings(ratio=0.5, **SMALL)
    pruned = prune(file, tmp_path / "out", settings, progress=lines)
    stored = {info.dtype for info in pruned.tensors.values()}
    name = {"Q8_0": "bfloat16", "F16": "float16"}[kind]
    assert stored == {{"Q8_0": "BF16", "F16": "F16"}[kind]} and pruned.config["dtype"] == name
    assert lines.lines[-1] == f"m is quantized: its weights are decoded and stored dense, as {name}"


@pytest.mark.parametrize("seed", ["-1", "1" + "0" * 23])
def test_a_seed_is_a_number_from_0(seed, capsys):
    assert call(["prune", "attar:tiny", "-o", "x", "--seed", seed]) == 2
    assert "--seed" in capsys.readouterr().err


def test_one_head_always_stays_and_impossible_settings_are_refused(tmp_path):
    assert kept_units(4, prune_settings(method="heads", ratio=0.99)) == 1
    with pytest.raises(SettingsError, match=r"ratio is 1.5, but must be"):
        prune_settings(ratio=1.5)
    with pytest.raises(SettingsError, match="multiple_of"):
        kept_units(96, prune_settings(multiple_of=128))


def test_families_whose_config_cannot_say_it_are_refused_before_any_work(tmp_path):
    with pytest.raises(ModelError, match="heads"):
        prune(save("gpt2", tmp_path), tmp_path / "out", prune_settings(method="heads", **SMALL))
    assert not (tmp_path / "out").exists()


def test_encoders_are_judged_by_masked_tokens(tmp_path):
    pruned = prune(
        save("bert", tmp_path), tmp_path / "out", prune_settings(method="neurons", ratio=0.5, **SMALL)
    )
    assert pruned.config["intermediate_size"] == 48


@pytest.mark.slow
def test_rigid_families_can_have_their_heads_zeroed(tmp_path):
    from attar.models.anatomy.discover import discover

    settings = prune_settings(method="heads", ratio=0.5, rigid="zero", **SMALL)
    pruned = prune(save("opt", tmp_path), tmp_path / "out", settings)
    assert pruned.config["num_attention_heads"] == 4
    assert pruned.card.details["kept"]["cut"] == "zeroed in place"
    model = load_model(pruned)
    for block in discover(model).blocks:
        weight = model.get_submodule(block.attention.o.name).weight
        silent = [bool((weight[:, list(group.o_columns)] == 0).all()) for group in block.attention.groups()]
        assert sum(silent) == 2
