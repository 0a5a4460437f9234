"""Structured pruning, from folder to folder: every structure, rounds, scopes, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from attar.cli.main import call
from attar.errors import ModelError, SettingsError, UsageError
from attar.importance import LAYER_CRITERIA
from attar.models.anatomy.discover import discover
from attar.models.loading.load import load_model
from attar.models.surgery.cut_plan import CutPlan
from attar.models.surgery.masking import masked_units
from attar.pruning import units
from attar.pruning.criteria import HIDDEN_CRITERIA, UNIT_CRITERIA
from attar.pruning.settings import METHOD_SETTINGS, prune_settings
from attar.pruning.stage import prune
from attar.pruning.structures import STRUCTURES
from attar.pruning.units import choose_units, informed_scores
from tests import tiny_models
from tests.log_lines import LogLines
from tests.pruning.scored import scoring
from tests.pruning.test_stage import SMALL, save


def test_the_criteria_of_the_settings_are_those_of_the_structures():
    tables = (UNIT_CRITERIA, HIDDEN_CRITERIA, LAYER_CRITERIA)
    for method, structure in STRUCTURES.items():
        assert METHOD_SETTINGS[method].criteria == tuple(structure.criteria)
        assert structure.criteria in tables


CUTS = [
    ("heads", "wanda", 0.5, {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}),
    ("query-heads", "activation", 0.5, {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}),
    ("neurons", "taylor", 0.5, {"intermediate_size": 48}),
    ("hidden", "activation", 0.25, {"hidden_size": 48, "head_dim": 8, "intermediate_size": 96}),
    ("layers", "influence", 0.34, {"num_hidden_layers": 2}),
    ("layers", "kl", 0.67, {"num_hidden_layers": 1}),
    ("layers", "run", 0.67, {"num_hidden_layers": 1}),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("method", "criterion", "ratio", "sizes"), CUTS)
def test_every_structure_is_really_smaller(tmp_path, method, criterion, ratio, sizes):
    folder = save("llama3", tmp_path)
    settings = prune_settings(method=method, criterion=criterion, ratio=ratio, **SMALL)
    pruned = prune(folder, tmp_path / "out", settings)
    assert {name: pruned.config[name] for name in sizes} == sizes
    model = AutoModelForCausalLM.from_pretrained(pruned.path).eval()
    before = load_model(folder)
    assert model.num_parameters() < before.num_parameters()
    tokens = tiny_models.tokens(before)
    assert torch.equal(tiny_models.logits(model, tokens), tiny_models.logits(load_model(pruned), tokens))
    details = pruned.card.details
    assert details["kept"]["criterion"] == criterion
    assert sum(row["removed"] for row in details["layers"]) > 0


def test_the_card_names_the_layers_that_went(tmp_path):
    settings = prune_settings(method="layers", ratio=0.34, criterion="kl", **SMALL)
    folder = save("llama3", tmp_path)
    pruned = prune(folder, tmp_path / "out", settings)
    (gone,) = pruned.card.details["kept"]["removed_layers"]
    stay = [layer for layer in range(3) if layer != gone]
    first, second = load_model(folder).model.layers[stay[0]], load_model(pruned).model.layers[0]
    assert torch.equal(first.mlp.up_proj.weight, second.mlp.up_proj.weight)


@pytest.mark.few(2)
@pytest.mark.parametrize("method", ["neurons", "heads", "hidden", "layers"])
def test_rounds_end_at_the_same_size_and_score_the_pruned_model_afresh(tmp_path, method):
    model = tiny_models.build("llama3")
    batches = [tiny_models.tokens(model, batch=4)]
    structure = STRUCTURES[method]
    options = prune_settings(method=method, ratio=0.67 if method == "layers" else 0.5, rounds=2).options
    total = structure.total(discover(model))
    count = structure.count(total, options)
    task = scoring(model, method, batches, tmp_path)
    first, keep = choose_units(structure, options, task, count)
    assert {len(kept) for kept in keep} == {count} and first.isfinite().all()
    half = total - round((total - count) / 2)
    order = torch.argsort(first, dim=1, descending=True, stable=True)
    after_one = [sorted(row[:half].tolist()) for row in order]
    with masked_units(model, structure.plan(discover(model), after_one)):
        name = next(iter(structure.criteria))
        fresh = structure.criteria[name](scoring(model, method, batches, tmp_path / "fresh", stay=count))
    for row, (kept, scores) in enumerate(zip(after_one, fresh, strict=True)):
        best = sorted(kept, key=lambda unit: (-float(scores[unit]), unit))[:count]
        assert keep[row] == sorted(best)


def gemma3n(tmp_path):
    config = transformers.Gemma3nTextConfig(
        vocab_size=320, hidden_size=32, num_hidden_layers=3, intermediate_size=[48] * 3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_kv_shared_layers=0, laurel_rank=4,
        vocab_size_per_layer_input=320, hidden_size_per_layer_input=8,
        activation_sparsity_pattern=[0.0] * 3, layer_types=None, max_position_embeddings=128,
        bos_token_id=0, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    config.architectures = ["Gemma3nForCausalLM"]
    model = tiny_models.randomize(transformers.Gemma3nForCausalLM(config)).eval()
    return tiny_models.save(model, tmp_path / "model")


@pytest.mark.slow
def test_a_config_with_a_number_for_each_layer_gets_what_each_layer_needs(tmp_path):
    """Gemma 3n's config lists the widths of its MLPs."""
    folder = gemma3n(tmp_path)
    options = {**SMALL, "method": "neurons", "scope": "global", "reconstruct": "none"}
    settings = prune_settings(ratio=0.5, **options)
    pruned = prune(folder, tmp_path / "out", settings)
    widths = pruned.config["intermediate_size"]
    assert sum(widths) == 72 and len(set(widths)) > 1 and all(width % 8 == 0 for width in widths)
    kept = [row["kept"] for row in pruned.card.details["layers"]]
    assert kept == widths and pruned.card.details["kept"]["criterion"] == "gradient"
    loaded = load_model(pruned)
    assert [layer.mlp.down_proj.in_features for layer in loaded.model.layers] == widths
    with pytest.raises(ModelError, match=f"its layers have {min(widths)} to {max(widths)} neurons"):
        prune(tmp_path / "out", tmp_path / "again", settings)

    settings = prune_settings(ratio=0.6, multiple_of=16, **options)
    pruned = prune(folder, tmp_path / "rounded", settings)
    kept, removed = sum(pruned.config["intermediate_size"]), pruned.card.details["kept"]["removed_ratio"]
    assert removed == pytest.approx(1 - kept / 144) and kept != 3 * 16, "of the units that went in fact"


@pytest.mark.parametrize("method", ["heads", "neurons"])
def test_a_global_scope_is_refused_where_the_config_has_one_number(tmp_path, monkeypatch, method):
    monkeypatch.setattr(units, "load_model", lambda *args, **kwargs: pytest.fail("work before the refusal"))
    settings = prune_settings(method=method, ratio=0.5, scope="global", **SMALL)
    with pytest.raises(ModelError, match="differ from block to block") as caught:
        prune(save("llama3", tmp_path), tmp_path / "out", settings)
    noun = {"heads": "head groups", "neurons": "neurons"}[method]
    count = {"heads": 2, "neurons": 48}[method]
    assert caught.value.hint == f"--scope layer keeps {count} {noun} in each layer"


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "method", "ratio", "problem"),
    [
        ("gpt2", "hidden", 0.25, "the residual stream cannot be 48 wide"),
        ("bert", "hidden", 0.5, "the residual stream cannot be 32 wide"),
        ("gpt2", "query-heads", 0.5, "removes none of the 1 query heads of a KV head"),
        ("llama3", "layers", 0.1, "removes none of the 3 layers of the model"),
        ("llama3", "hidden", 0.001, "removes none of the 64 channels of the residual stream"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_one_line_before_any_work(
    tmp_path, monkeypatch, family, method, ratio, problem
):
    monkeypatch.setattr(units, "load_model", lambda *args, **kwargs: pytest.fail("work before the refusal"))
    settings = prune_settings(method=method, ratio=ratio, **SMALL)
    with pytest.raises((ModelError, UsageError), match=problem) as caught:
        prune(save(family, tmp_path), tmp_path / "out", settings)
    assert caught.value.hint and "\n" not in caught.value.message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"method": "layers", "criterion": "gradient"}, "auto, influence, kl and run"),
        ({"method": "neurons", "criterion": "kl"}, "auto, wanda, gradient, taylor and activation"),
        ({"method": "layers", "criterion": "run", "rounds": 2}, "1 for criterion run"),
        ({"method": "neurons", "rounds": 0}, "between 1 and 1000"),
        ({"method": "layers", "scope": "global"}, "scope"),
    ],
)
def test_wrong_options_are_refused(options, problem):
    with pytest.raises(SettingsError) as caught:
        prune_settings(**options)
    assert problem in str(caught.value)


@pytest.mark.slow
def test_criteria_without_a_loss_need_no_head_and_the_others_say_so(tmp_path):
    folder = tmp_path / "encoder"
    tiny_models.save(transformers.BertModel(tiny_models.config("bert")).eval(), folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["BertModel"]
    settings = prune_settings(method="neurons", criterion="activation", **SMALL)
    assert prune(folder, tmp_path / "out", settings).config["intermediate_size"] < 96
    for method, criterion in (("neurons", "taylor"), ("layers", "kl")):
        with pytest.raises(ModelError, match="no language-model head"):
            settings = prune_settings(method=method, criterion=criterion, ratio=0.4, **SMALL)
            prune(folder, tmp_path / "refused", settings)


@pytest.mark.slow
def test_a_width_that_no_longer_suits_a_format_is_said(tmp_path):
    folder = tiny_models.save(tiny_models.build("llama3", intermediate_size=256), tmp_path / "model")
    lines = LogLines()
    prune(folder, tmp_path / "out", prune_settings(ratio=0.25, **SMALL), progress=lines)
    assert "192 neurons are no multiple of 256" in lines.lines[1] and "k-quants" in lines.lines[1]


def test_a_cut_that_computes_something_else_is_refused(tmp_path, monkeypatch):
    """A family that uses its width in a way that no mask shows."""
    model = tiny_models.build("llama3")
    task = scoring(model, "hidden", [tiny_models.tokens(model)], tmp_path)
    plan = CutPlan(hidden=tuple(range(48)))
    units.checked_cut(task, plan)

    def scaled(model, plan):
        cut = units_cut(model, plan)
        with torch.no_grad():
            cut.model.embed_tokens.weight.mul_(1.1)
        return cut

    units_cut = units.cut_model
    monkeypatch.setattr(units, "cut_model", scaled)
    with pytest.raises(ModelError, match="logits differ from the masked model's"):
        units.checked_cut(task, plan)


def test_the_command_takes_the_options_of_each_structure(tmp_path, capsys):
    folder = save("llama3", tmp_path)
    common = ["--samples", "4", "--sequence-length", "32", "--data", str(Path(json.__file__).parent)]
    arguments = ["prune", str(folder), "-o", str(tmp_path / "out"), "--method", "layers", "--ratio", "0.34"]
    assert call([*arguments, "--criterion", "kl", *common]) in (0, None)
    assert "1 of 3 layers of the model" in capsys.readouterr().err


@pytest.mark.slow
def test_a_family_that_cannot_be_swept_is_refused_with_the_way_out(tmp_path):
    """Gemma 3n computes more than embeddings before its layers."""
    folder = gemma3n(tmp_path)
    with pytest.raises(ModelError, match="gemma3n_text: its layers cannot be run one at a time") as refused:
        prune(folder, tmp_path / "out", prune_settings(method="neurons", ratio=0.5, **SMALL))
    assert "--reconstruct none" in refused.value.hint and not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["neurons", "heads"])
def test_units_that_the_text_never_switched_on_are_usual_ones_and_zero_ones_go_first(method):
    model = tiny_models.build("llama3")
    layers = STRUCTURES[method].weights(model, discover(model))
    count = layers[0].count
    scores = torch.arange(1.0, count + 1).repeat(len(layers), 1).double()
    scores[0, :2] = 0.0
    producer, owners = layers[0].producers[-1]
    with torch.no_grad():
        producer.weight[owners == 1] = 0.0  # this unit computes nothing for any text
    got = informed_scores(scores, layers)
    assert got[0, 0] == scores[0, 2:].median() and got[0, 1] == 0.0
    assert torch.equal(got[:, 2:], scores[:, 2:]) and torch.equal(got[1:], scores[1:])
