"""Adapters against peft's own merge_and_unload, bit for bit, and what is refused."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from attar.checkpoint import open_checkpoint
from attar.errors import CheckpointError, ModelError
from attar.merging.adapters.apply import AdaptedCheckpoint
from attar.merging.parents import open_adapter
from tests import tiny_models

ATTENTION = ["q_proj", "v_proj"]
SIZE = {"num_hidden_layers": 2}


def randomize(model, seed=1):
    """Every factor filled, so that none can be left out unseen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = 0.1 * torch.randn(parameter.shape, generator=generator)
                parameter.copy_(parameter + noise)


def adapted(tmp_path, family="llama2", changes=None, dtype=None, **settings):
    """A model with an adapter of peft's: both on disk, the view, and peft's merge of them."""
    model = tiny_models.build(family, **(changes if changes is not None else SIZE))
    tiny_models.save(model, tmp_path / "model", dtype=dtype)
    wrapped = peft.get_peft_model(model.float(), peft.LoraConfig(**{"r": 4, "lora_alpha": 6, **settings}))
    randomize(wrapped)
    wrapped.save_pretrained(tmp_path / "lora")
    view = AdaptedCheckpoint(open_checkpoint(tmp_path / "model"), tmp_path / "lora")
    return view, wrapped


def merged(wrapped):
    return wrapped.merge_and_unload().state_dict()


CASES = {
    "plain": ("llama2", {"target_modules": ATTENTION}),
    "all linear": ("llama2", {"target_modules": "all-linear"}),
    "rank stabilised": ("llama2", {"target_modules": ATTENTION, "use_rslora": True}),
    "patterns": (
        "llama2",
        {
            "target_modules": ATTENTION,
            "rank_pattern": {"_proj": 1, "v_proj": 2, "^model.layers.1.self_attn.q_proj": 3},
            "alpha_pattern": {"layers.0.self_attn.q_proj": 11},
        },
    ),
    "dora": ("llama2", {"target_modules": [*ATTENTION, "down_proj"], "use_dora": True}),
    "dora embedding": ("llama2", {"target_modules": ["embed_tokens"], "use_dora": True}),
    "embedding and head": ("llama2", {"target_modules": ["embed_tokens", "lm_head"]}),
    "saved modules": ("llama2", {"target_modules": ATTENTION, "modules_to_save": ["lm_head", "norm"]}),
    "biases": ("qwen2", {"target_modules": ATTENTION, "bias": "all"}),
    "bias of B": ("qwen2", {"target_modules": ATTENTION, "lora_bias": True}),
    "stored transposed": ("gpt2", {"target_modules": ["c_attn", "c_proj"]}),
    "stored transposed dora": ("gpt2", {"target_modules": ["c_proj"], "use_dora": True}),
    "encoder": ("bert", {"target_modules": ["query", "value"]}),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_bits_are_pefts(case, tmp_path):
    family, settings = CASES[case]
    changes = {"n_layer": 2} if family == "gpt2" else SIZE
    view, wrapped = adapted(tmp_path, family, changes, **settings)
    stored = dict(view.checkpoint.tensors)
    state = merged(wrapped)
    assert set(view.tensors) == set(stored)
    touched = 0
    for name, info in view.tensors.items():
        tensor = view.load(name)
        assert torch.equal(tensor, state[name]), name
        assert tuple(tensor.shape) == info.shape and tensor.dtype == torch.float32
        touched += not torch.equal(tensor, view.checkpoint.load(name))
    assert touched == len(view.updates) > 0
    assert open_checkpoint(tmp_path / "model").config == view.config


def test_half_precision_is_rounded_once(tmp_path):
    view, _ = adapted(tmp_path, dtype=torch.bfloat16, target_modules=ATTENTION)
    name = "model.layers.0.self_attn.q_proj.weight"
    factors = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    stem = f"base_model.model.{name.removesuffix('.weight')}"
    A, B = (factors[f"{stem}.lora_{letter}.weight"].double() for letter in "AB")
    exact = view.checkpoint.load(name).double() + 1.5 * (B @ A)
    assert view.load(name).dtype == torch.bfloat16
    expected = exact.to(torch.bfloat16)
    assert (view.load(name) == expected).float().mean() > 0.999  # an update rounded by itself: below 0.9
    assert (view.load(name).double() - exact).abs().max() <= 2**-8 * exact.abs().max()


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["lm_head"]},
        {"target_modules": ATTENTION, "modules_to_save": ["lm_head"]},
    ],
)
def test_a_tied_model_gets_a_head_of_its_own(settings, tmp_path):
    view, wrapped = adapted(tmp_path, "smollm", **settings)
    assert view.checkpoint.config["tie_word_embeddings"] and not view.config["tie_word_embeddings"]
    assert set(view.tensors) - set(view.checkpoint.tensors) == {"lm_head.weight"}
    apart = tiny_models.build("smollm", **SIZE, tie_word_embeddings=False)
    apart.load_state_dict({name: view.load(name) for name in view.tensors})
    rows = tiny_models.tokens(apart)
    expected = tiny_models.logits(wrapped.eval(), rows)
    assert torch.allclose(tiny_models.logits(apart, rows), expected, atol=1e-4)


def test_a_tied_model_stays_tied_where_it_is_not_touched(tmp_path):
    view, _ = adapted(tmp_path, "smollm", target_modules=ATTENTION)
    assert view.config["tie_word_embeddings"] and "lm_head.weight" not in view.tensors


def test_a_larger_embedding_is_reported(tmp_path):
    model = tiny_models.build("llama2", **SIZE)
    tiny_models.save(model, tmp_path / "model")
    model.resize_token_embeddings(330)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    wrapped.save_pretrained(tmp_path / "lora", save_embedding_layers=True)
    view = AdaptedCheckpoint(open_checkpoint(tmp_path / "model"), tmp_path / "lora")
    assert view.config["vocab_size"] == 330 and view.load("lm_head.weight").shape == (330, 64)
    assert view.tensors["model.embed_tokens.weight"].shape == (330, 64)


def test_names_without_their_first_part_are_found(tmp_path):
    _, wrapped = adapted(tmp_path, "gpt2", {"n_layer": 2}, target_modules=["c_attn"])
    state = merged(wrapped)
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    short = {name.removeprefix("transformer."): tensor.clone() for name, tensor in tensors.items()}
    save_file(short, path, metadata={"format": "pt"})
    again = AdaptedCheckpoint(open_checkpoint(tmp_path / "model"), tmp_path / "lora")
    assert torch.equal(again.load("h.1.attn.c_attn.weight"), state["transformer.h.1.attn.c_attn.weight"])


def test_an_adapters_fingerprint_covers_its_config(tmp_path):
    view, _ = adapted(tmp_path, target_modules=ATTENTION)
    first = open_adapter(str(view.folder)).fingerprint()
    assert first == open_adapter(str(view.folder)).fingerprint()
    path = tmp_path / "lora" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "lora_alpha": 7}))
    assert open_adapter(str(view.folder)).fingerprint() != first
    assert view.name == "model+lora" and view.path == tmp_path / "model"
    with pytest.raises(CheckpointError, match="no tensor"):
        view.load("nothing")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
        ({"rank_pattern": {"q_proj": 3}}, "rank 3"),
        ({"use_dora": True}, "use_dora"),
    ],
)
def test_a_config_that_is_not_computed_is_refused(entry, words, tmp_path):
    view, _ = adapted(tmp_path, target_modules=ATTENTION)
    path = tmp_path / "lora" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entry}))
    with pytest.raises(ModelError, match=words):
        AdaptedCheckpoint(view.checkpoint, view.folder)


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda t: {**t, "base_model.model.other.lora_A.weight": t[f"{Q}.lora_A.weight"].clone()},
            "'other' has no lora_B",
        ),
        (lambda t: {k: v for k, v in t.items() if k != f"{Q}.lora_A.weight"}, "has no lora_A"),
        (lambda t: {**t, f"{Q}.lora_A.weight": torch.ones(4, 7)}, r"shape \(64, 7\)"),
        (lambda t: {**t, "base_model.model.score.weight": torch.ones(2, 2)}, "no tensor 'score.weight'"),
        (lambda t: {**t, f"{Q}.vera_lambda": torch.ones(2)}, "vera_lambda"),
        (lambda t: {k.replace("layers.0", "layers.9"): v for k, v in t.items()}, "layers.9"),
    ],
)
def test_a_tensor_without_a_place_is_named(change, words, tmp_path):
    view, _ = adapted(tmp_path, target_modules=["q_proj"])
    path = tmp_path / "lora" / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)
    with pytest.raises(ModelError, match=words):
        AdaptedCheckpoint(view.checkpoint, view.folder)


def test_missing_files_are_named(tmp_path):
    view, _ = adapted(tmp_path, target_modules=ATTENTION)
    with pytest.raises(CheckpointError, match=r"no adapter_config\.json"):
        AdaptedCheckpoint(view.checkpoint, tmp_path)
    path = tmp_path / "lora" / "adapter_model.safetensors"
    path.rename(path.with_suffix(".bin"))
    with pytest.raises(CheckpointError, match="pickled"):
        AdaptedCheckpoint(view.checkpoint, view.folder)
