"""The verb merge as a whole: what stands in the folder, documents, adapters, resuming, the command line."""

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import attar
from attar.checkpoint.card import Card, Parent
from attar.checkpoint.open import open_checkpoint
from attar.cli.main import call
from attar.errors import LicenceError
from attar.merging.config.schema import SEARCHED
from attar.merging.methods import METHODS
from attar.merging.planning.parameters import method_of
from attar.merging.planning.prepare import preview
from attar.merging.settings import MergeSettings
from attar.merging.weights import Merge
from tests import tiny_models
from tests.merging.conftest import tuned

LINEAR = {
    "merge_method": "linear",
    "models": [
        {"model": "one", "parameters": {"weight": 1.0}},
        {"model": "two", "parameters": {"weight": 3.0}},
    ],
}
TIES = {
    "merge_method": "ties",
    "base_model": "base",
    "models": [
        {"model": name, "parameters": {"weight": 0.5, "density": 0.5}} for name in ("one", "two", "three")
    ],
}
DARE = {**TIES, "merge_method": "dare_ties"}


def tensors(folder):
    return load_file(folder / "model.safetensors")


def test_the_merge_is_a_checkpoint_that_transformers_loads(merged, family):
    merge_dir = merged(LINEAR)
    model = AutoModelForCausalLM.from_pretrained(merge_dir.path)
    one, two = tensors(family["one"]), tensors(family["two"])
    for name, value in model.state_dict().items():
        if name in one:
            torch.testing.assert_close(value, 0.25 * one[name] + 0.75 * two[name])
    assert AutoTokenizer.from_pretrained(merge_dir.path).get_vocab() == tiny_models.tokenizer().get_vocab()
    assert yaml.safe_load((merge_dir.path / "merge.yml").read_text()) == LINEAR


def test_the_card_tells_parents_method_and_conflicts(merged, family):
    card = merged(TIES).card
    assert [parent.name for parent in card.parents] == ["one", "two", "three", "base"]
    assert card.details["method"] == "ties"
    assert card.details["conflict_models"] == ["one", "two", "three"]
    whole = card.details["conflicts"][0]
    assert whole["part"] == "all" and len(whole["cosine"]) == 3
    assert all(abs(value) < 0.1 for value in whole["cosine"])  # independent noise
    assert (family["base"] / "attar.json").exists() is False


def test_the_card_s_command_makes_the_same_bytes_again(family, tmp_path, monkeypatch):
    text = json.dumps(TIES)
    for name, path in family.items():
        text = text.replace(f'"{name}"', json.dumps(str(path)))
    merged = attar.merge(text, tmp_path / "out", compat="paper", seed=3)
    before = (merged.path / "model.safetensors").read_bytes()
    monkeypatch.chdir(merged.path)
    assert call([*shlex.split(merged.card.command)[1:], "-q"]) == 0
    assert (merged.path / "out" / "model.safetensors").read_bytes() == before
    assert open_checkpoint(merged.path / "out").card.settings == merged.card.settings


@pytest.mark.slow
def test_the_picture_of_conflicts_is_next_to_the_weights(merged):
    drawn = (merged(TIES).path / "conflicts.svg").read_text()
    assert drawn.startswith("<svg") and "one" in drawn


def test_licences_meet(family, tmp_path):
    for name, licence in (("one", "apache-2.0"), ("two", "cc-by-nc-4.0")):
        copy = tiny_models.save(tiny_models.build("smollm"), tmp_path / name)
        (copy / "README.md").write_text(f"---\nlicense: {licence}\n---\n")
    config = {"merge_method": "linear", "models": [{"model": str(tmp_path / n)} for n in ("one", "two")]}
    config["parameters"] = {"weight": 1.0}
    actual = attar.merge(config, tmp_path / "out").card.licence
    assert any("cc-by-nc" in source["id"] for source in actual["sources"])
    assert "non-commercial" in json.dumps(actual).lower() or "noncommercial" in json.dumps(actual).lower()


def test_a_parent_whose_teacher_forbids_it_stops_before_any_work(tmp_path):
    folders = [tiny_models.save(tiny_models.build("smollm"), tmp_path / name) for name in ("one", "two")]
    roots = [
        Parent(role=role, name=f"org/{licence}", stage="original", licence={"ids": [licence]})
        for role, licence in (("weights", "mit"), ("signal", "llama3"))
    ]
    Card(name="one", stage="distill", parents=tuple(roots)).write(folders[0])
    config = {"merge_method": "linear", "models": [{"model": str(folder)} for folder in folders]}
    config["parameters"] = {"weight": 1.0}
    with pytest.raises(LicenceError, match=r"org/llama3: Meta Llama 3 .*1\.b\.v.*2024-04-18"):
        attar.merge(config, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
    accepted = {"accept_licence": ["llama3"], "reason": "permission by letter"}
    merged = attar.merge(config, tmp_path / "out", **accepted)
    assert merged.card.licence["accepted"] == [{"id": "llama3", "reason": "permission by letter"}]
    assert "`llama3` was accepted: permission by letter" in (merged.path / "README.md").read_text()
    command = shlex.split(merged.card.command)
    assert command[command.index("--accept-licence") + 1] == "llama3"
    again = {"merge_method": "linear", "models": [{"model": str(merged.path)}, {"model": str(folders[1])}]}
    again["parameters"] = {"weight": 1.0}
    assert attar.merge(again, tmp_path / "next").card.licence["accepted"] == merged.card.licence["accepted"]


def test_documents_build_on_each_other(merged, family):
    text = yaml.safe_dump_all(
        [
            {**LINEAR, "name": "both"},
            {
                "merge_method": "task_arithmetic",
                "base_model": "base",
                "models": [{"model": "both", "parameters": {"weight": 0.5}}],
            },
        ]
    )
    merge_dir = merged(text)
    base, one, two = (tensors(family[name]) for name in ("base", "one", "two"))
    name = "model.layers.1.mlp.up_proj.weight"
    both = 0.25 * one[name] + 0.75 * two[name]
    torch.testing.assert_close(tensors(merge_dir.path)[name], base[name] + 0.5 * (both - base[name]))
    assert sorted(parent.name for parent in merge_dir.card.parents) == ["base", "one", "two"]


def test_slices_stack_layers(merged, family):
    sources = [
        {"sources": [{"model": "one", "layer_range": [0, 2]}]},
        {"sources": [{"model": "two", "layer_range": [1, 3]}]},
    ]
    merge_dir = merged({"merge_method": "passthrough", "slices": sources})
    assert merge_dir.config["num_hidden_layers"] == 4
    got, two = tensors(merge_dir.path), tensors(family["two"])
    key = "self_attn.q_proj.weight"
    assert torch.equal(got[f"model.layers.2.{key}"], two[f"model.layers.1.{key}"])
    AutoModelForCausalLM.from_pretrained(merge_dir.path)


@pytest.mark.slow
def test_random_masks_depend_on_the_seed_and_not_on_the_order_of_the_work(merged, tmp_path):
    first, again = merged(DARE, "a"), merged(DARE, "b")
    other = merged(DARE, "c", seed=1)
    assert (first.path / "model.safetensors").read_bytes() == (again.path / "model.safetensors").read_bytes()
    assert (first.path / "model.safetensors").read_bytes() != (other.path / "model.safetensors").read_bytes()


def test_shards_and_threads_do_not_change_the_result(merged, family, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(family["one"])
    model.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    tiny_models.tokenizer().save_pretrained(tmp_path / "sharded")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    whole = merged(DARE, "a")
    config = json.loads(json.dumps(DARE).replace('"one"', json.dumps(str(tmp_path / "sharded"))))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cut = merged(config, "b")
    finally:
        torch.set_num_threads(before)
    assert (whole.path / "model.safetensors").read_bytes() == (cut.path / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_paper_form_trims_over_the_whole_model(family, merged, tmp_path):
    """With one model whose embedding alone has moved far, one global trim keeps nothing else."""
    base = tiny_models.build("smollm")
    moved = tuned(base, 5, size=1e-4)
    with torch.no_grad():
        moved.model.embed_tokens.weight.add_(1.0)
    tiny_models.save(moved, tmp_path / "moved")
    share = moved.model.embed_tokens.weight.numel() / sum(p.numel() for p in moved.parameters())
    config = {
        "merge_method": "ties",
        "base_model": "base",
        "models": [{"model": str(tmp_path / "moved"), "parameters": {"weight": 1.0, "density": 0.9 * share}}],
    }
    name = "model.layers.0.mlp.up_proj.weight"
    untouched = tensors(family["base"])[name]
    assert torch.equal(tensors(merged(config, "paper", compat="paper").path)[name], untouched)
    assert not torch.equal(tensors(merged(config, "mergekit").path)[name], untouched)


def test_a_gradient_is_refused_where_one_trim_serves_the_whole_model(merged):
    config = json.loads(json.dumps(TIES))
    config["models"][0]["parameters"]["density"] = [0.2, 0.8]
    with pytest.raises(attar.SettingsError, match="density"):
        merged(config, compat="paper")


def test_an_adapter_is_a_parent(family, merged, tmp_path):
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(family["one"])
    peft = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    peft.save_pretrained(tmp_path / "adapter")
    config = {"merge_method": "passthrough", "models": [{"model": f"one+{tmp_path / 'adapter'}"}]}
    merge_dir = merged(config)
    want = peft.merge_and_unload().state_dict()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(tensors(merge_dir.path)[name], want[name])
    assert [parent.name for parent in merge_dir.card.parents] == ["one", "adapter"]


@pytest.mark.slow
def test_quality_of_every_parent_and_of_the_merge(merged):
    rows = merged(LINEAR, tokens=128, sequence_length=32).card.details["quality"]
    assert [row["name"] for row in rows] == ["one", "two", "merge"]
    assert all(math.isclose(row["perplexity"], math.exp(row["loss"])) for row in rows)
    assert all(0 < row["nats_per_byte"] < row["loss"] for row in rows)


@pytest.mark.slow
def test_a_greedy_soup_leaves_the_bad_ingredient_out(family, merged, tmp_path):
    bad = tiny_models.save(tuned(tiny_models.build("smollm"), 9, size=3.0), tmp_path / "bad")
    models = [{"model": "base"}, {"model": str(bad)}]
    merge_dir = merged(
        {"merge_method": "greedy_soup", "models": models}, samples=4, sequence_length=32, compat="paper"
    )
    rows = merge_dir.card.details["soup"]
    kept = [row["model"] for row in rows if row["kept"]]
    lowest = min(rows, key=lambda row: row["loss"])
    assert lowest["model"] in kept and len(kept) == 1
    assert "merge_method: linear" in (merge_dir.path / "found.yml").read_text()


def test_a_search_never_ends_worse_than_it_began(merged):
    merge_dir = merged(LINEAR, search=6, samples=4, sequence_length=32)
    actual = merge_dir.card.details["search"]
    assert actual["tried"] == 6
    assert actual["loss_after"] <= actual["loss_before"] == actual["losses"][0]
    again = merged((merge_dir.path / "found.yml").read_text(), "again")
    assert (again.path / "model.safetensors").read_bytes() == (
        merge_dir.path / "model.safetensors"
    ).read_bytes()


def test_nan_in_a_parent_names_tensor_and_file(family, merged, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(family["one"])
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    tiny_models.save(model, tmp_path / "broken")
    config = json.loads(json.dumps(LINEAR).replace('"one"', json.dumps(str(tmp_path / "broken"))))
    with pytest.raises(attar.AttarError, match=r"broken.*layers\.1\.mlp\.up_proj.*NaN"):
        merged(config)
    assert not (tmp_path / "out").exists()


def test_a_result_beyond_the_type_is_refused(merged):
    config = json.loads(json.dumps(LINEAR))
    config |= {"out_dtype": "float16", "parameters": {"normalize": False}}
    config["models"][0]["parameters"]["weight"] = 1e9
    with pytest.raises(attar.AttarError, match="float16"):
        merged(config)


@pytest.mark.slow
def test_packed_parents_are_decoded(family, merged, tmp_path):
    attar.quantize(family["one"], tmp_path / "w8", scheme="W8A16", method="rtn", group_size=32)
    config = json.loads(json.dumps(LINEAR).replace('"one"', json.dumps(str(tmp_path / "w8"))))
    merge_dir = merged(config)
    assert "quantization_config" not in merge_dir.config
    assert any("decoded" in note for note in merge_dir.card.details["notes"])
    one = tensors(merged(LINEAR, "dense").path)["model.layers.0.mlp.up_proj.weight"]
    got = tensors(merge_dir.path)["model.layers.0.mlp.up_proj.weight"]
    assert 0 < (got - one).abs().max() < 0.02


def test_too_short_a_text_is_reported_before_the_merge(merged, tmp_path, monkeypatch):
    text = tmp_path / "short.txt"
    text.write_text("a few words")
    monkeypatch.setattr(Merge, "write", lambda *_, **__: pytest.fail("the merge was made"))
    with pytest.raises(attar.AttarError, match=r"short\.txt"):
        merged(LINEAR, tokens=4096, data=str(text))
    assert not (tmp_path / "out").exists()


TWO_WITH_WEIGHTS = {  # methods, and what each needs besides two models with a weight
    **{key: {} for key in ("linear", "multislerp", "nuslerp", "greedy_soup", "uniform_soup")},
    **{key: {"base_model": "one", "parameters": {"t": 0.35}} for key in ("slerp", "nearswap")},
    "arcee_fusion": {"base_model": "one"},
    "ramplus_tl": {"base_model": "base", "parameters": {"r": 0.05, "alpha": 1.0}},
}


@pytest.mark.few(7)
@pytest.mark.parametrize("name", sorted({*METHODS, *SEARCHED} - {"passthrough"}))
def test_a_parameter_of_another_method_is_a_note(family, name, tmp_path):
    """Configurations in the wild write ``weight`` next to every model, whatever the method."""
    more = TWO_WITH_WEIGHTS.get(name, {"base_model": "base"})
    models = [
        {"model": "one", "parameters": {"weight": 0.6}},
        {"model": "two", "parameters": {"weight": 0.4}},
    ]
    file = tmp_path / "merge.yml"
    file.write_text(yaml.safe_dump({"merge_method": name, "models": models, **more}, sort_keys=False))
    notes = preview(MergeSettings(config=str(file)), family).to_dict()["documents"][0]["notes"]
    uses = "weight" in {parameter.name for parameter in method_of(name).per_model}
    unused = [f"{file}:{line}: weight is not a parameter of {name}: without effect" for line in (5, 8)]
    assert [note for note in notes if "not a parameter" in note] == ([] if uses else unused)


@pytest.mark.slow
def test_an_unused_parameter_changes_no_bit_and_is_reported(family, merged):
    config = {"merge_method": "slerp", "base_model": "one", "parameters": {"t": 0.35}}
    config["models"] = [{"model": "one"}, {"model": "two"}]
    plain = tensors(merged(config, "plain").path)
    config["models"][1]["parameters"] = {"weight": 0.4, "density": [1, 0.5]}
    merge_dir = merged(config, "weighted")
    assert [note.partition(": ")[2] for note in merge_dir.card.details["notes"]] == [
        "weight is not a parameter of slerp: without effect",
        "density is not a parameter of slerp: without effect",
    ]
    assert all(torch.equal(value, plain[name]) for name, value in tensors(merge_dir.path).items())


@pytest.mark.few(1)
@pytest.mark.parametrize(("keys", "stored"), [({}, "BF16"), ({"dtype": "float32"}, "F32")])
def test_a_gguf_parent_does_not_make_float32_of_the_merge(family, merged, tmp_path, keys, stored):
    attar.export(family["one"], tmp_path / "one.gguf", format="gguf", type="Q8_0")
    config = json.loads(json.dumps(LINEAR).replace('"one"', json.dumps(str(tmp_path / "one.gguf"))))
    assert config["models"][0]["model"].endswith("one.gguf")
    merge_dir = merged(config | keys)
    assert {info.dtype for info in merge_dir.tensors.values()} == {stored}
    reported = any("stored as bfloat16" in note for note in merge_dir.card.details["notes"])
    assert reported == (stored == "BF16")


def run_cli(arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "attar.cli.main", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_the_command_line(family, tmp_path, capsys):
    config = tmp_path / "merge.yml"
    config.write_text(
        json.dumps(TIES)
        .replace('"base"', f'"{family["base"]}"')
        .replace('"one"', f'"{family["one"]}"')
        .replace('"two"', f'"{family["two"]}"')
        .replace('"three"', f'"{family["three"]}"')
    )
    assert call(["merge", str(config), "--dry-run", "-q"]) == 0
    assert "29 tensors in 3 layers" in capsys.readouterr().out
    assert call(["merge", str(config), "-o", str(tmp_path / "out"), "-q", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["card"]["stage"] == "merge"
    assert call(["merge", str(config), "-o", str(tmp_path / "out"), "-q"]) == 1
    assert call(["merge", str(config), "-q"]) == 2


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(tmp_path):
    """kill -9 at four moments of a merge of several shards."""
    big = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12}
    for seed, name in enumerate(("base", "one", "two")):
        tiny_models.save(tiny_models.build("llama2", seed=seed, **big), tmp_path / name)
    config = tmp_path / "dare.yml"
    models = [
        {"model": str(tmp_path / n), "parameters": {"weight": 0.5, "density": 0.5}} for n in ("one", "two")
    ]
    config.write_text(
        yaml.safe_dump({"merge_method": "dare_ties", "base_model": str(tmp_path / "base"), "models": models})
    )

    def start(out):
        return run_cli(["merge", str(config), "-o", str(out), "-q", "--shard-size", "8MB"])

    began = time.monotonic()
    whole = start(tmp_path / "whole")
    assert whole.wait() == 0, whole.stderr.read()
    seconds = time.monotonic() - began
    for share in (0.5, 0.7, 0.85, 0.95):
        process = start(tmp_path / "cut")
        time.sleep(share * seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
    last = start(tmp_path / "cut")
    assert last.wait() == 0 or (tmp_path / "cut/attar.json").exists(), last.stderr.read()
    weights = [open_checkpoint(tmp_path / name).weight_files for name in ("whole", "cut")]
    assert len(weights[0]) == len(weights[1])
    for one, other in zip(*weights, strict=True):
        assert one.read_bytes() == other.read_bytes()


def renumbered(folder, target):
    """The same model with its tokens in another order: row i of the embedding is another token's."""
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    plain = [word for word, number in vocabulary.items() if number >= 3]
    turned = dict(zip(plain, [vocabulary[word] for word in reversed(plain)], strict=True))
    model = AutoModelForCausalLM.from_pretrained(folder)
    rows = model.model.embed_tokens.weight.detach().clone()
    with torch.no_grad():
        for word, number in turned.items():
            model.model.embed_tokens.weight[number] = rows[vocabulary[word]]
    vocabulary.update(turned)
    model.save_pretrained(target)
    tiny_models.tokenizer().save_pretrained(target)
    (target / "tokenizer.json").write_text(json.dumps(content))
    return target


def test_tokens_meet_by_their_text_and_not_by_their_number(family, merged, tmp_path):
    """A model merged with itself under other token numbers is itself again."""
    other = renumbered(family["one"], tmp_path / "renumbered")
    config = {
        "merge_method": "linear",
        "base_model": "one",
        "models": [{"model": "one"}, {"model": str(other)}],
        "parameters": {"weight": 1.0},
    }
    apart = tensors(merged(config, "apart").path)["model.embed_tokens.weight"]
    merge_dir = merged(config | {"tokenizer": {"source": "base"}}, "together", sequence_length=32, tokens=64)
    together, one = tensors(merge_dir.path)["model.embed_tokens.weight"], tensors(family["one"])
    assert not torch.allclose(apart, one["model.embed_tokens.weight"])
    assert torch.allclose(together, one["model.embed_tokens.weight"])
    assert merge_dir.card.details["vocabulary"]["models"][1]["shared"] == tiny_models.VOCABULARY
    losses = [row["loss"] for row in merge_dir.card.details["quality"]]
    assert max(losses) - min(losses) < 1e-5  # each reads the same text through its own tokenizer


@pytest.mark.slow
def test_every_tensor_of_every_model_has_a_mask_of_its_own(family, merged):
    """Equal models, equal shapes: what is kept differs from tensor to tensor and from model to model."""

    def kept(models, out):
        sources = [{"model": name, "parameters": {"weight": 1.0, "density": 0.5}} for name in models]
        config = {"merge_method": "dare_linear", "base_model": "base", "models": sources}
        got, base = tensors(merged(config, out).path), tensors(family["base"])
        names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)]
        return [got[name] != base[name] for name in names]

    first, second = kept(["one"], "alone")
    assert 0.4 < first.float().mean() < 0.6
    assert not torch.equal(first, second)
    both = kept(["one", "two"], "both")[0]
    assert 0.65 < both.float().mean() < 0.85  # 1 - 1/4, and not 1/2


@pytest.mark.few(1)
@pytest.mark.parametrize(("compat", "kept"), [("mergekit", 1), ("paper", 2)])
def test_an_ingredient_that_changes_nothing_stays_by_the_paper_alone(family, merged, tmp_path, compat, kept):
    twin = shutil.copytree(family["one"], tmp_path / "twin")
    models = [{"model": "one"}, {"model": str(twin)}]
    config = {"merge_method": "greedy_soup", "models": models}
    rows = merged(config, samples=2, sequence_length=32, compat=compat).card.details["soup"]
    assert sum(row["kept"] for row in rows) == kept


def test_quality_is_measured_on_text_that_no_search_sees(merged, monkeypatch):
    from attar.merging import quality
    from attar.merging.search import choose

    splits = []

    class Spy(quality.HeldOutText):
        @classmethod
        def of(cls, *args, **settings):
            splits.append(settings.get("split", "calibration"))
            return quality_of(*args, **settings)

    quality_of = quality.HeldOutText.of
    monkeypatch.setattr(choose, "HeldOutText", Spy)
    monkeypatch.setattr(quality, "HeldOutText", Spy)
    merged(LINEAR, search=2, tokens=64, samples=2, sequence_length=32)
    assert splits == ["calibration", "evaluation", "evaluation", "evaluation"]
