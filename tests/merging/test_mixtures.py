"""Merges of mixtures of experts: experts, router and shared expert are tensors like any others."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import attar
from attar.merging.methods import METHODS
from tests import tiny_models

SIZE = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZE |= {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64}
SIZE |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1, "num_experts_per_tok": 2}
KINDS = {
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {"num_experts": 4, "moe_intermediate_size": 16}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
    ),
}
EACH = {
    "slerp": ({}, {"t": 0.3}),
    "nearswap": ({}, {"t": 0.01}),
    "passthrough": ({"scale": 0.5}, {}),
    "ties": ({"weight": 0.5, "density": 0.5}, {}),
    "della": ({"weight": 0.5, "density": 0.5}, {}),
    "breadcrumbs": ({"weight": 0.5, "density": 0.5}, {}),
    "dare_ties": ({"weight": 0.5, "density": 0.5}, {}),
}


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    """Folders ``base``, ``one`` and ``two`` of each kind."""
    import transformers

    made = {}
    for kind, (config, model, changes) in KINDS.items():
        made[kind] = {}
        built = getattr(transformers, model)(getattr(transformers, config)(**SIZE, **changes))
        base = {name: tensor.clone() for name, tensor in tiny_models.randomize(built).state_dict().items()}
        for seed, name in enumerate(("base", "one", "two")):
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for key, tensor in built.state_dict().items():
                    noise = torch.randn(tensor.shape, generator=generator)
                    tensor.copy_(base[key] + (0.05 * noise if seed else 0))
            made[kind][name] = tiny_models.save(built, tmp_path_factory.mktemp(kind) / name)
    return made


def document(method):
    kind = METHODS[method]
    each, shared = EACH.get(method, ({}, {}))
    if not each and any(p.name == "weight" for p in kind.per_model):
        each = {"weight": 0.5}
    names = ["one", "two"][: kind.models[1] or 2]
    content = {"merge_method": method, "dtype": "float32", "parameters": shared}
    content["models"] = [{"model": name, "parameters": each} for name in names]
    return content | ({"base_model": "base"} if kind.base in ("required", "optional") else {})


@pytest.mark.few(1)
@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("kind", list(KINDS))
def test_experts_merge_tensor_by_tensor(mixtures, kind, method, tmp_path):
    folders, content = mixtures[kind], document(method)
    out = attar.merge(json.loads(json.dumps(content)), tmp_path / "out", models=folders).path
    result, base = load_file(out / "model.safetensors"), load_file(folders["base"] / "model.safetensors")
    assert set(result) == set(base)
    model = AutoModelForCausalLM.from_pretrained(out)
    rows = tiny_models.tokens(model, batch=1, length=6)
    with torch.no_grad():
        assert torch.isfinite(model(rows).logits).all()
    if METHODS[method].random:
        return
    # an expert's merge is that of its matrices alone, as if it were a model with one tensor
    sources = [load_file(folders[entry["model"]] / "model.safetensors") for entry in content["models"]]
    kinds = METHODS[method]
    each = content["models"][0]["parameters"]
    for name in (n for n in base if ".experts.2." in n or "gate.weight" in n):
        per_model = {p.name: [each.get(p.name, p.default)] * len(sources) for p in kinds.per_model}
        shared = {p.name: content["parameters"].get(p.name, p.default) for p in kinds.shared}
        alone = kinds.merge(
            [tensors[name] for tensors in sources],
            base[name] if "base_model" in content else None,
            shared=shared,
            per_model=per_model,
            compat="mergekit",
            masks=(),
            scan_result={},
        )
        torch.testing.assert_close(result[name], alone, atol=1e-6, rtol=1e-5, msg=name)
