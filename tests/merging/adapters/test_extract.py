"""Extraction: the adapter against the models it came from, through peft and through AdaptedCheckpoint."""

import json
import warnings

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from attar.checkpoint import Card, open_checkpoint
from attar.errors import CheckpointError, ModelError, NumericsError, OutputError, SettingsError
from attar.merging.adapters import extract as extraction
from attar.merging.adapters.apply import AdaptedCheckpoint
from attar.merging.adapters.differences import ModelPair, TensorPair, saved_modules
from attar.merging.adapters.extract import extract
from attar.merging.adapters.settings import ExtractSettings
from tests import tiny_models

PAIRS = ((0, "a"), (0, "a"), (0, "b"), (1, "a"))
LINEAR = "model.layers.0.mlp.up_proj.weight"


def pair(tmp_path, family="llama2", rank=3, only="layers", dtype=None, **changes):
    """A base and a tuned model: Linear weights differ by updates of a rank, ``only`` some by name."""
    base = tiny_models.build(family, **(changes or {"num_hidden_layers": 1}))
    tiny_models.save(base, tmp_path / "base", dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if only in name and parameter.dim() == 2:
                left, right = (torch.randn(n, rank, generator=generator) for n in parameter.shape)
                parameter += 0.05 * (left @ right.T).to(parameter.dtype)
            elif only in name:
                parameter += 0.1
    tiny_models.save(base, tmp_path / "tuned")
    return tmp_path / "tuned", tmp_path / "base"


def by_peft(folder, base):
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(model, folder).eval()


def logits(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = tiny_models.tokens(model)
    return rows, tiny_models.logits(model, rows)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "only", "changes"),
    [
        ("qwen2", "", {"num_hidden_layers": 1}),
        ("smollm", "", {"num_hidden_layers": 1}),
        ("gpt2", "", {"n_layer": 1}),
        ("gpt_neox", "", {"num_hidden_layers": 1}),
    ],
)
def test_base_with_adapter_is_the_tuned_model(family, only, changes, tmp_path):
    tuned, base = pair(tmp_path, family, only=only, **changes)
    out = extract(tuned, base, tmp_path / "out", ExtractSettings(rank=8))
    details = Card.read(out).details["extraction"]
    assert not details["not_covered"] and {row["rank"] for row in details["linear"]} <= {3, 4, 5, 6, 7, 8}
    rows, expected = logits(tuned)
    start = (logits(base)[1] - expected).abs().max()
    wrapped = by_peft(out, base)
    assert (tiny_models.logits(wrapped, rows) - expected).abs().max() < 1e-4 * start
    merged = wrapped.merge_and_unload()
    assert (tiny_models.logits(merged, rows) - expected).abs().max() < 1e-4 * start
    view, goal = AdaptedCheckpoint(open_checkpoint(base), out), open_checkpoint(tuned)
    for name in goal.tensors:
        assert torch.allclose(view.load(name), goal.load(name), atol=1e-5), name


def test_ranks_by_energy_and_the_card(tmp_path):
    tuned, base = pair(tmp_path, rank=12)
    full = extract(tuned, base, tmp_path / "full", ExtractSettings(rank=64))
    some = extract(tuned, base, tmp_path / "some", ExtractSettings(rank=64, energy=0.8))
    rows = {row["module"]: row for row in Card.read(some).details["extraction"]["linear"]}
    ranks = [row["rank"] for row in rows.values()]
    assert all(row["energy"] >= 0.8 for row in rows.values()) and max(ranks) < 12 and len(set(ranks)) > 1
    row = rows[LINEAR.removesuffix(".weight")]
    new, old = (load_file(folder / "model.safetensors")[LINEAR] for folder in (tuned, base))
    D = (new - old).double()
    s = torch.linalg.svdvals(D)
    assert row["energy"] == pytest.approx(float(s[: row["rank"]].square().sum() / s.square().sum()), rel=1e-4)
    assert float(s[: row["rank"] - 1].square().sum() / s.square().sum()) < 0.8
    got = AdaptedCheckpoint(open_checkpoint(base), some).load(LINEAR)
    assert row["error"] == pytest.approx(float((got - new).norm() / D.norm()), rel=1e-3)
    assert row["weight_error"] == pytest.approx(float((got - new).norm() / old.norm()), rel=1e-3)
    config = json.loads((some / "adapter_config.json").read_text())
    loaded = by_peft(some, base)
    assert config["rank_pattern"] and config["lora_alpha"] == config["r"]
    A = loaded.get_submodule(f"base_model.model.{row['module']}.lora_A.default").weight
    assert A.shape[0] == row["rank"]
    assert all(detail["error"] < 1e-3 for detail in Card.read(full).details["extraction"]["linear"])
    assert (some / "tokenizer.json").is_file()
    card = Card.read(some)
    assert [parent.name for parent in card.parents] == ["tuned", "base"] and " --base " in card.command


def test_leaving_the_rest_out_says_so(tmp_path):
    tuned, base = pair(tmp_path, only="")
    out = extract(tuned, base, tmp_path / "out", ExtractSettings(others="leave"))
    details = Card.read(out).details["extraction"]
    names = {row["name"] for row in details["not_covered"]}
    assert {"lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"} <= names
    assert not details["saved"] and all(row["change"] > 0 for row in details["not_covered"])
    assert json.loads((out / "adapter_config.json").read_text())["modules_to_save"] is None
    assert all(".lora_" in name for name in load_file(out / "adapter_model.safetensors"))


def test_only_what_differs_is_in_the_adapter(tmp_path):
    tuned, base = pair(tmp_path, only="layers.0.mlp.up_proj")
    out = extract(tuned, base, tmp_path / "out", ExtractSettings(dtype="bfloat16"))
    tensors = load_file(out / "adapter_model.safetensors")
    stem = f"base_model.model.{LINEAR.removesuffix('.weight')}"
    assert sorted(tensors) == [f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"]
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert Card.read(out).details["extraction"]["unchanged"] == len(open_checkpoint(base).tensors) - 1


def test_same_bytes_after_an_interruption(tmp_path, monkeypatch):
    tuned, base = pair(tmp_path)
    settings = ExtractSettings(rank=2)
    whole = extract(tuned, base, tmp_path / "whole", settings)
    calls = []

    def interrupted(*args, **more):
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(*args, **more)

    original = extraction.low_rank
    monkeypatch.setattr(extraction, "low_rank", interrupted)
    with pytest.raises(KeyboardInterrupt):
        extract(tuned, base, tmp_path / "out", settings)
    assert not (tmp_path / "out").exists()
    done = sorted((tmp_path / ".out.work").glob("*/model.safetensors"))
    (done[0].parent / "row.json").unlink()
    out = extract(tuned, base, tmp_path / "out", settings)
    linear = len(Card.read(out).details["extraction"]["linear"])
    assert len(done) == 3 and len(calls) == linear + 2  # two of the three are not computed again
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    with pytest.raises(OutputError, match="exists"):
        extract(tuned, base, tmp_path / "out", settings)


def edited(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda t: t[LINEAR].__setitem__((0, 0), float("nan")), NumericsError, "up_proj"),
        (lambda t: t.update({LINEAR: torch.ones(96, 63)}), CheckpointError, r"up_proj.weight is \[96, 63\]"),
        (lambda t: t.pop(LINEAR), CheckpointError, r"no tensor for .*up_proj"),
        (lambda t: t.update(extra=torch.ones(2)), ModelError, "tensor extra has no place"),
    ],
)
def test_models_that_do_not_fit_are_named(change, error, words, tmp_path):
    tuned, base = pair(tmp_path)
    edited(tuned, change)
    with pytest.raises(error, match=words):
        extract(tuned, base, tmp_path / "out", ExtractSettings())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "tuned"]


def test_equal_models_have_nothing_to_extract(tmp_path):
    _, base = pair(tmp_path)
    with pytest.raises(ModelError, match="nothing to extract"):
        extract(base, base, tmp_path / "out", ExtractSettings())


def test_a_module_whose_name_ends_others_is_not_saved():
    parts = tuple(
        TensorPair(f"{name}.weight", f"{name}.weight", name, "weight", "whole") for name in ("norm", "a.head")
    )
    models = ModelPair(None, None, parts, False, (), ("", "a", "norm", "a.norm", "a.head"))
    assert saved_modules(models, parts) == {"a.head": {"weight": "a.head.weight"}}


def test_every_tensor_has_random_numbers_of_its_own():
    drawn = [torch.randn(4, generator=extraction._generator(seed, name)) for seed, name in PAIRS]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[3])


@pytest.mark.parametrize(
    ("name", "value"), [("rank", 0), ("energy", 1.5), ("others", "x"), ("dtype", "int8")]
)
def test_wrong_settings_are_named(name, value):
    with pytest.raises(SettingsError, match=name):
        ExtractSettings(**{name: value})
