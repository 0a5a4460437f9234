"""Adapters against peft's own merge_and_unload, bit for bit, and what is refused."""

import json

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from attar.checkpoint import open_checkpoint
from attar.errors import CheckpointError, ModelError
from attar.merging.adapters.apply import AdaptedCheckpoint, copy_companions_of
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
    "biases of its own": ("qwen2", {"target_modules": ATTENTION, "bias": "lora_only"}),
    "some layers": ("llama2", {"target_modules": ATTENTION, "layers_to_transform": [1]}),
    "bias of B": ("qwen2", {"target_modules": ATTENTION, "lora_bias": True}),
    "stored transposed": ("gpt2", {"target_modules": ["c_attn", "c_proj"]}),
    "stored transposed dora": ("gpt2", {"target_modules": ["c_proj"], "use_dora": True}),
    "encoder": ("bert", {"target_modules": ["query", "value"]}),
}


@pytest.mark.few(4)
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


@pytest.mark.few(1)
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


BOTH = ["embed_tokens", "lm_head"]
GROWN = {
    "saved by the list": ("llama2", {"target_modules": ATTENTION, "modules_to_save": BOTH}),
    "saved by the list and whole": ("llama2", {"target_modules": ATTENTION, "modules_to_save": BOTH}),
    "saved whole": ("llama2", {"target_modules": ATTENTION}),
    "with factors and whole": ("llama2", {"target_modules": BOTH}),
    "tied": (
        "smollm",
        {"target_modules": ATTENTION, "modules_to_save": BOTH[:1], "ensure_weight_tying": True},
    ),
}


def grown(tmp_path, case, rows=322):
    """A model, and what peft writes of an adapter of it with a larger vocabulary: the view, and peft's
    model."""
    family, settings = GROWN[case]
    model = tiny_models.build(family, **SIZE)
    tiny_models.save(model, tmp_path / "model")
    model.resize_token_embeddings(rows, mean_resizing=False)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=6, **settings))
    randomize(wrapped)
    wrapped.save_pretrained(tmp_path / "lora", save_embedding_layers="whole" in case)
    return AdaptedCheckpoint(open_checkpoint(tmp_path / "model"), tmp_path / "lora"), wrapped.eval()


@pytest.mark.few(2)
@pytest.mark.parametrize("case", sorted(GROWN))
def test_a_grown_vocabulary_is_read_as_peft_reads_it(case, tmp_path):
    view, wrapped = grown(tmp_path, case)
    tied = bool(view.config["tie_word_embeddings"])
    apart = tiny_models.build(GROWN[case][0], **SIZE, vocab_size=322, tie_word_embeddings=tied)
    assert view.config["vocab_size"] == 322 and view.tensors["model.embed_tokens.weight"].shape == (322, 64)
    missing, unexpected = apart.load_state_dict(
        {name: view.load(name) for name in view.tensors}, strict=False
    )
    assert not unexpected and missing in ([], ["lm_head.weight"]) and (tied or not missing)
    rows = torch.arange(300, 322)[None]
    expected = tiny_models.logits(wrapped, rows)
    assert torch.allclose(tiny_models.logits(apart, rows), expected, atol=1e-4)


def test_a_vocabulary_that_grows_in_a_part_alone_is_refused(tmp_path):
    view, _ = grown(tmp_path, "saved by the list")
    path = tmp_path / "lora" / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor for name, tensor in tensors.items() if "lm_head" not in name}, path)
    with pytest.raises(ModelError, match=r"320 rows of lm_head.weight, 322 rows of model.embed"):
        AdaptedCheckpoint(view.checkpoint, view.folder)


def test_a_saved_tensor_of_another_shape_is_refused(tmp_path):
    view, _ = adapted(tmp_path, target_modules=ATTENTION, modules_to_save=["norm"])
    path = tmp_path / "lora" / "adapter_model.safetensors"
    tensors = load_file(path)
    (name,) = [name for name in tensors if name.endswith("model.norm.weight")]
    save_file(tensors | {name: torch.ones(32)}, path)
    with pytest.raises(ModelError, match=r"'model.norm.weight' of shape \(32,\), where model has \(64,\)"):
        AdaptedCheckpoint(view.checkpoint, view.folder)


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


def with_tokenizer(folder, tokens, template=None):
    """A tokenizer of words, and a chat template."""
    words = {f"w{number}": number for number in range(tokens)}
    backend = Tokenizer(WordLevel(words, "w0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    ("tokens", "count", "template", "words"),
    [
        (322, 322, "adapter", "the tokenizer comes from lora"),
        (323, 320, "model", "323 tokens, and the model 322 rows"),
        (0, 320, "model", ""),  # the adapter has none
    ],
)
def test_the_adapters_tokenizer_and_template_come_along_where_they_fit(
    tokens, count, template, words, tmp_path
):
    view, _ = grown(tmp_path, "saved by the list")
    with_tokenizer(tmp_path / "model", 320, "model")
    if tokens:
        with_tokenizer(tmp_path / "lora", tokens, "adapter")
    (tmp_path / "model" / "LICENSE").write_text("free")
    view = AdaptedCheckpoint(view.checkpoint, view.folder)
    (tmp_path / "out").mkdir()
    copy_companions_of(view, tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (len(tokenizer), tokenizer.chat_template) == (count, template)
    assert (tmp_path / "out" / "LICENSE").read_text() == "free"
    assert words in "".join(view.notes) and len(view.notes) == bool(words)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"peft_type": "PROMPT_TUNING"}, "peft_type is 'PROMPT_TUNING'"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
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


@pytest.mark.few(3)
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


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.replace("lora_A.weight", "lora_A.default.weight"),
        lambda name: name.removeprefix("base_model.model."),
        lambda name: name.replace(".lora_B.weight", ".lora_B.other.weight"),
    ],
    ids=["peft before 0.3", "without a prefix", "another name of the adapter"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_spellings_and_types_are_read(rename, dtype, tmp_path):
    view, _ = adapted(tmp_path, target_modules=["q_proj"])
    path = tmp_path / "lora" / "adapter_model.safetensors"
    factors = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
    save_file(factors, path)
    before = AdaptedCheckpoint(view.checkpoint, view.folder)
    expected = {name: before.load(name) for name in before.updates}
    save_file({rename(name): tensor for name, tensor in factors.items()}, path)
    again = AdaptedCheckpoint(view.checkpoint, view.folder)
    assert expected and set(again.updates) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(again.load(name), tensor)


def test_missing_files_are_named(tmp_path):
    view, _ = adapted(tmp_path, target_modules=ATTENTION)
    with pytest.raises(CheckpointError, match=r"no adapter_config\.json"):
        AdaptedCheckpoint(view.checkpoint, tmp_path)
    path = tmp_path / "lora" / "adapter_model.safetensors"
    path.rename(path.with_suffix(".bin"))
    with pytest.raises(CheckpointError, match="pickled"):
        AdaptedCheckpoint(view.checkpoint, view.folder)
