"""Mixtures made of dense models against a plain version: names, numbers, and what transformers computes."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import attar
from attar.cli.main import call
from attar.errors import ModelError, RecipeError, SettingsError
from attar.merging.config.documents import read_configs
from tests import tiny_models

PROMPTS = {
    "one": ["def main():", "import os"],
    "two": ["Dear Sir or Madam"],
    "three": ["x = 1"],
}
RESULTS = {"smollm": "mixtral", "mistral": "mixtral", "qwen2": "qwen2_moe", "qwen3": "qwen3_moe"}


@pytest.fixture(scope="session")
def dense(tmp_path_factory):
    """Folders ``base``, ``one``, ``two`` and ``three`` of a family, each made once."""
    made = {}

    def folders(family, layers=3):
        if family not in made:
            root, names = tmp_path_factory.mktemp(family), ("base", *PROMPTS)
            models = [tiny_models.build(family, seed=k, num_hidden_layers=layers) for k in range(len(names))]
            saved = [tiny_models.save(model, root / name) for name, model in zip(names, models, strict=True)]
            made[family] = dict(zip(names, saved, strict=True))
        return made[family]

    return folders


def document(names=("one", "two"), shared=None, **changes):
    experts = [{"source_model": name, "positive_prompts": PROMPTS[name]} for name in names]
    content = {"base_model": "base", "gate_mode": "hidden", "dtype": "float32", "experts": experts, **changes}
    return content | ({"shared_experts": [shared]} if shared else {})


def build(content, folders, out, **settings):
    return attar.merge(json.loads(json.dumps(content)), out, models=folders, **settings).path


def rows_of(folder, prompts, average=False):
    """What enters each layer, from transformers' own hidden states: mean over prompts of (layers, D)."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    states = []
    for prompt in prompts:
        ids = tokenizer((tokenizer.bos_token or "") + prompt, add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            layers = model(input_ids=ids["input_ids"], output_hidden_states=True).hidden_states[:-1]
        states.append(torch.stack([h[0].mean(0) if average else h[0, -1] for h in layers]))
    return torch.stack(states).mean(0)


def normalized(rows):
    return rows / rows.norm(dim=-1, keepdim=True)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", list(RESULTS))
def test_equal_experts_compute_what_the_dense_model_does(dense, family, tmp_path):
    folders = dense(family)
    shared = {"source_model": "base", "residual_scale": 0.0, "positive_prompts": ["a"]}
    content = document(("one", "one", "one"), shared if family == "qwen2" else None, gate_mode="random")
    content["base_model"] = "one"
    out = build(content, folders, tmp_path / "out", seed=3)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.model_type == RESULTS[family]
    original = AutoModelForCausalLM.from_pretrained(folders["one"])
    rows = tiny_models.tokens(original, batch=2, length=7)
    with torch.no_grad():
        torch.testing.assert_close(model(rows).logits, original(rows).logits, atol=2e-5, rtol=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["smollm", "qwen3"])
def test_every_tensor_comes_from_where_it_should(dense, family, tmp_path):
    folders = dense(family)
    content = document(("one", "two", "three"))
    content["experts"][1] |= {"residual_scale": 0.5, "negative_prompts": ["Yours", "def f"]}
    result = load_file(build(content, folders, tmp_path / "out") / "model.safetensors")
    models = {name: load_file(folder / "model.safetensors") for name, folder in folders.items()}
    block, parts = ("block_sparse_moe", "132") if family == "smollm" else ("mlp", ("gate", "up", "down"))
    wanted = {name: tensor for name, tensor in models["base"].items() if ".mlp." not in name}
    rows = [rows_of(folders["base"], PROMPTS[name]) for name in PROMPTS]
    rows[1] = rows[1] - rows_of(folders["base"], ["Yours", "def f"])
    for layer in range(3):
        prefix = f"model.layers.{layer}."
        wanted[f"{prefix}{block}.gate.weight"] = torch.stack([normalized(row[layer]) for row in rows])
        for index, name in enumerate(PROMPTS):
            for ours, theirs in zip(parts, ("gate", "up", "down"), strict=True):
                ours = f"w{ours}" if family == "smollm" else f"{ours}_proj"
                weight = models[name][f"{prefix}mlp.{theirs}_proj.weight"]
                scale = 0.5 if name == "two" and theirs == "down" else 1.0
                wanted[f"{prefix}{block}.experts.{index}.{ours}.weight"] = scale * weight
    assert set(result) == set(wanted)
    for name, tensor in wanted.items():
        torch.testing.assert_close(result[name], tensor, atol=1e-5 if "gate.weight" in name else 0, rtol=0)


@pytest.mark.slow
def test_a_shared_expert_has_its_gate_and_llama_gets_biases_of_zeros(dense, tmp_path):
    folders = dense("smollm")
    shared = {"source_model": "three", "positive_prompts": ["all"], "residual_scale": 0.25}
    content = document(shared=shared, architecture="qwen", gate_mode="hidden_avg")
    out = build(content, folders, tmp_path / "out")
    result = load_file(out / "model.safetensors")
    mlp = "model.layers.1.mlp."
    row = normalized(rows_of(folders["base"], ["all"], average=True)[1:2])
    torch.testing.assert_close(result[f"{mlp}shared_expert_gate.weight"], row, atol=1e-5, rtol=0)
    three = load_file(folders["three"] / "model.safetensors")
    down = result[f"{mlp}shared_expert.down_proj.weight"]
    assert torch.equal(down, 0.25 * three[f"{mlp}down_proj.weight"])
    assert result["model.layers.0.self_attn.k_proj.bias"].eq(0).all()
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.shared_expert_intermediate_size == model.config.moe_intermediate_size == 96
    assert model.config.num_experts_per_tok == 2 and model.config.norm_topk_prob


def test_deepseek_is_written_as_its_own_code_reads_it(dense, tmp_path):
    folders = dense("smollm")
    content = document(shared={"source_model": "three"}, architecture="deepseek", experts_per_token=1)
    out = build(content, folders, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert (config["n_routed_experts"], config["n_shared_experts"], config["num_experts_per_tok"]) == (
        2,
        1,
        1,
    )
    assert config["model_type"] == "deepseek" and config["moe_intermediate_size"] == 96
    result, three = load_file(out / "model.safetensors"), load_file(folders["three"] / "model.safetensors")
    name = "model.layers.2.mlp.{}up_proj.weight"
    assert torch.equal(result[name.format("shared_experts.")], three[name.format("")])
    assert result["model.layers.2.mlp.gate.weight"].shape == (2, 64)


def test_cheap_embeddings_are_one_row_for_all_layers(dense, tmp_path):
    folders = dense("smollm")
    content = document(gate_mode="cheap_embed")
    content["experts"][0]["negative_prompts"] = ["no"]
    result = load_file(build(content, folders, tmp_path / "out") / "model.safetensors")
    tokenizer = AutoTokenizer.from_pretrained(folders["base"])
    embedding = load_file(folders["base"] / "model.safetensors")["model.embed_tokens.weight"]

    def summed(prompts):
        start = tokenizer.bos_token or ""
        rows = [tokenizer(start + text, add_special_tokens=False)["input_ids"] for text in prompts]
        return normalized(sum(embedding[token] for row in rows for token in row))

    wanted = torch.stack([normalized(summed(PROMPTS["one"]) - summed(["no"])), summed(PROMPTS["two"])])
    for layer in range(3):
        gate = result[f"model.layers.{layer}.block_sparse_moe.gate.weight"]
        torch.testing.assert_close(gate, wanted, atol=1e-6, rtol=0)


def test_random_gates_have_their_distribution_and_the_seed_decides(dense, tmp_path):
    folders, gates = dense("smollm"), {}
    for mode, seed in (("random", 0), ("random", 1), ("uniform_random", 0)):
        out = build(document(gate_mode=mode), folders, tmp_path / f"{mode}{seed}", seed=seed)
        tensors = load_file(out / "model.safetensors")
        gates[mode, seed] = torch.stack(
            [t for name, t in tensors.items() if name.endswith("moe.gate.weight")]
        )
    assert abs(gates["random", 0].std() - 1) < 0.15 and not torch.equal(
        gates["random", 0], gates["random", 1]
    )
    uniform = gates["uniform_random", 0]
    assert uniform.abs().max() <= 64**-0.5 and abs(uniform.std() - 64**-0.5 / 3**0.5) < 0.01


def test_noise_has_its_size_and_only_where_it_is_asked_for(dense, tmp_path):
    folders = dense("smollm")
    content = document(gate_mode="random")
    content["experts"][1]["noise_scale"] = 0.1
    result = load_file(build(content, folders, tmp_path / "out") / "model.safetensors")
    for index, name in enumerate(("one", "two")):
        source = load_file(folders[name] / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
        change = result[f"model.layers.0.block_sparse_moe.experts.{index}.w3.weight"] - source
        assert abs(change.std() - 0.1 * index) < 0.005


def test_documents_before_it_may_make_its_experts(dense, tmp_path):
    folders = dense("smollm")
    soup = {"name": "soup", "merge_method": "linear", "dtype": "float32"}
    soup["models"] = [{"model": str(folders[name]), "parameters": {"weight": 0.5}} for name in ("one", "two")]
    content = document(gate_mode="random", base_model=str(folders["base"]))
    for expert, model in zip(content["experts"], ("soup", str(folders["three"])), strict=True):
        expert["source_model"] = model
    text = yaml.safe_dump_all([content, soup])
    result = load_file(attar.merge(text, tmp_path / "out").path / "model.safetensors")
    one, two = (load_file(folders[name] / "model.safetensors") for name in ("one", "two"))
    name = "model.layers.0.mlp.gate_proj.weight"
    merged = result["model.layers.0.block_sparse_moe.experts.0.w1.weight"]
    torch.testing.assert_close(merged, (one[name] + two[name]) / 2)


def test_similar_prompts_are_warned_of_and_the_card_tells_the_mixture(dense, tmp_path):
    content = document(("one", "two", "three"))
    for expert, prompts in zip(content["experts"], (["def f"], ["def f "], ["def  f"]), strict=True):
        expert["positive_prompts"] = prompts
    out = build(content, dense("smollm"), tmp_path / "out")
    card = json.loads((out / "attar.json").read_text())
    assert "tell their experts badly apart" in " ".join(card["details"]["notes"])
    assert card["details"]["architecture"] == "Mixtral" and card["details"]["experts"] == 3
    assert [parent["name"] for parent in card["parents"]] == ["base", "one", "two", "three"]


def test_a_preview_and_the_same_bytes_again(dense, tmp_path, capsys):
    folders = dense("smollm")
    text = yaml.safe_dump(document())
    for name, folder in folders.items():
        text = text.replace(f"model: {name}\n", f"model: {folder}\n")
    (tmp_path / "moe.yml").write_text(text)
    assert call(["merge", str(tmp_path / "moe.yml"), "--dry-run"]) == 0
    assert "Mixtral of 2 experts, 2 a token" in capsys.readouterr().out
    first, again = (attar.merge(text, tmp_path / name).path for name in ("a", "b"))
    assert (first / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        (document(gate_mode="hiden"), 11, "unknown gate_mode 'hiden'; did you mean 'hidden'"),
        (document(experts_per_token=3), 11, "3 experts per token of 2"),
        (document(dtype="int8"), 2, "unknown dtype 'int8'"),
        (document(temperature=1), 12, "unknown key 'temperature' in a mixture of experts"),
        (
            {"base_model": "base", "experts": [{"source_model": "one"}]},
            3,
            "needs positive_prompts for every expert",
        ),
        (document(("one", "one")), 3, "all experts have the same prompts"),
        (document(architecture="gpt"), 1, "unknown architecture 'gpt'; known: Mixtral, DeepSeek MoE"),
    ],
)
def test_what_is_wrong_is_named_by_line(content, line, message, dense, tmp_path):
    text = yaml.safe_dump(content)
    with pytest.raises(RecipeError, match=message) as caught:
        attar.merge(text, tmp_path / "out", models=dense("smollm"))
    assert f"config:{line}:" in str(caught.value)


def test_what_does_not_fit_is_refused_before_anything_is_written(dense, tmp_path):
    folders = dense("smollm")
    cases = [
        (document(architecture="qwen3"), folders, ModelError, "made of qwen3 models, not of llama"),
        (document(), {**folders, "two": dense("qwen2")["two"]}, ModelError, "not of qwen2"),
        (
            document(),
            {**folders, "two": dense("llama3", 2)["two"]},
            ModelError,
            "2 layers, and the base model 3",
        ),
        (
            document(shared={"source_model": "one"}, architecture="mixtral"),
            folders,
            ModelError,
            "0 shared experts",
        ),
    ]
    for content, models, error, message in cases:
        with pytest.raises(error, match=message):
            build(content, models, tmp_path / "out")
    for setting in ({"search": 3}, {"tokens": 64}):
        with pytest.raises(SettingsError, match="a mixture"):
            build(document(), folders, tmp_path / "out", **setting)
    assert not list(tmp_path.iterdir())


def test_prompts_of_a_mixture_in_a_recipe_s_mapping(dense):
    (config,), _ = read_configs(yaml.safe_dump(document()))
    assert [expert.positive for expert in config.experts] == [tuple(PROMPTS["one"]), tuple(PROMPTS["two"])]
    assert [str(model) for model in config.models()] == ["base", "one", "two"]
