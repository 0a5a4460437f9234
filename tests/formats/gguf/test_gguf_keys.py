"""Every key that is written is read: with another value in the file, the reader makes another model of it or
refuses the file. Keys that it passes over stand here, with the reason."""

import copy
import json
import math
import re

import pytest
import torch

from attar.errors import AttarError
from attar.formats.gguf.config import file_placements, hf_config
from attar.formats.gguf.generation import KEY, SAMPLING, generation_config
from attar.formats.gguf.metadata import metadata
from attar.formats.gguf.open import _check_model
from attar.formats.gguf.tensor_map import expected_placements
from attar.formats.gguf.tokenizer.from_gguf import tokenizer_files
from attar.formats.gguf.tokenizer.to_gguf import PIPELINE
from attar.models.loading.configs import parse_config
from tests.formats.gguf import variants
from tests.formats.gguf.making import (
    byte_level,
    save,
    sentencepiece_bpe,
    template,
    tokenizer_metadata,
    unigram,
)
from tests.formats.gguf.variants import VARIANTS, said

ONE_WAY = {
    "general.name": "a title; a model is named after its file",
    "general.size_label": "a title; parameters are counted",
    "vocab_size": "the rows of token_embd.weight are counted",
    "gpt-oss.feed_forward_length": "llama.cpp takes expert_feed_forward_length",
    "qwen35moe.feed_forward_length": "llama.cpp takes expert_feed_forward_length",
    "mamba2.attention.head_count": "there is no attention; llama.cpp asks for the key",
    "mamba2.feed_forward_length": "there is no MLP; llama.cpp asks for the key",
    "mamba2.context_length": "a state has no limit; llama.cpp asks for the key",
}


def other_values(value):
    """Values of the same type that say something else."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value + 8, max(value - 1, 0)]
    if isinstance(value, float):
        return [value * 1.5 + 0.25, 0.0]
    if isinstance(value, str):
        return ["other"]
    places = (0, len(value) - 1)
    single = [[*value[:i], item, *value[i + 1 :]] for i in places for item in other_values(value[i])]
    return [*single, [-number for number in value] if isinstance(value[0], float) else value[::-1]]


def unread(keys, read):
    """The keys of which no other value makes a difference."""
    before = json.dumps(read(keys), sort_keys=True)

    def differs(other):
        try:
            return json.dumps(read(other), sort_keys=True) != before
        except AttarError:
            return True

    for key, value in keys.items():
        others = [item for item in other_values(value) if item != value]
        if not any(differs({**keys, key: item}) for item in others):
            yield key


def one_way(key):
    return key in ONE_WAY or key.partition(".")[2] in ONE_WAY


@pytest.fixture(scope="module")
def files():
    """Metadata and the tensors of each variant's file, the experts one by one."""
    made = {}
    for variant in VARIANTS:
        config = said(variants.config(variant))
        placed = expected_placements(config)
        tensors = {one.piece: torch.empty(one.shape) if one.stored else one.value for one in placed}
        made[variant] = metadata(config, "tiny"), tensors
    return made


def config_reader(tensors):
    def read(keys):
        _check_model(keys)
        config = hf_config(keys, tensors)
        file_placements(config, tensors)
        parse_config(copy.deepcopy(config))
        return config

    return read


@pytest.mark.few(8)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_key_of_an_architecture_is_read(variant, files):
    keys, tensors = files[variant]
    silent = set(unread(keys, config_reader(tensors)))
    assert not {key for key in silent if not one_way(key)}


GENERIC = [
    ("rope.scale_linear", 4.0, {"rope_type": "linear", "factor": 4.0}),
    ("rope.scaling.factor", 4.0, {"rope_type": "linear", "factor": 4.0}),
    ("rope.scaling.factor", 0.0, {"rope_type": "default"}),
    ("rope.scaling.attn_factor", 1.5, {"rope_type": "longrope", "attention_factor": 1.5}),
    ("rope.freq_base", 5e5, {"rope_theta": 5e5}),
]


@pytest.mark.parametrize(("key", "value", "settings"), GENERIC)
def test_rotary_keys_of_other_writers_are_read(key, value, settings, files):
    keys, tensors = files["llama3"]
    rope = config_reader(tensors)({**keys, f"llama.{key}": value})["rope_parameters"]
    assert {name: rope[name] for name in settings} == settings


def test_the_scale_of_yarn_is_read_and_written(files):
    keys, tensors = files["llama with yarn"]
    config = config_reader(tensors)({**keys, "llama.rope.scaling.attn_factor": 0.5})
    usual = 0.1 * math.log(4.0) + 1
    assert config["rope_parameters"]["attention_factor"] == pytest.approx(0.5 * usual)
    assert metadata(config, "tiny")["llama.rope.scaling.attn_factor"] == pytest.approx(0.5)
    config["rope_parameters"]["attention_factor"] = usual
    assert "llama.rope.scaling.attn_factor" not in metadata(config, "tiny")


def test_a_type_of_none_scales_nothing(files):
    keys, tensors = files["llama with linear rope"]
    assert keys["llama.rope.scaling.factor"] == 4.0
    rope = config_reader(tensors)({**keys, "llama.rope.scaling.type": "none"})["rope_parameters"]
    assert rope["rope_type"] == "default"


@pytest.mark.parametrize(
    ("variant", "key", "value", "message"),
    [
        ("llama3", "rope.scaling.type", "ntk", "rope.scaling.type is 'ntk'"),
        ("llama3", "rope.scaling.factor", -2.0, "rope.scaling.factor is -2.0"),
        ("llama3", "rope.freq_base", 0.0, "rope.freq_base is 0.0"),
        ("llama3", "rope.dimension_count", 4, "rope.dimension_count is 4"),
        ("phi", "rope.dimension_count", 3, "rope.dimension_count is 3"),
        ("phi", "rope.dimension_count", 64, "rope.dimension_count is 64"),
        ("llama with yarn", "rope.scaling.yarn_ext_factor", 0.0, "yarn_ext_factor is 0.0"),
        ("llama with yarn", "rope.scaling.yarn_beta_fast", 16.0, "yarn_beta_fast is 16.0"),
        ("qwen2", "rope.scaling.attn_factor", 1.5, "no rotary embedding that qwen2 has"),
        ("deepseek_v2 without a rank of queries", "rope.scaling.attn_factor", 1.5, "that deepseek_v2 has"),
        ("llama with yarn", "rope.scaling.original_context_length", 0, "original_context_length is 0"),
        ("mistral", "attention.sliding_window", -1, "attention.sliding_window is -1"),
        ("gemma2", "attention.sliding_window_pattern", [True], "names 1 blocks, the model has 3"),
        ("deepseek_v3", "attention.head_count_kv", 4, "head_count_kv is 4, but must be 1"),
        ("deepseek_v3", "attention.key_length", 40, "key_length is 40, but must be 24"),
        ("deepseek_v3", "expert_gating_func", 3, "expert_gating_func is 3"),
        ("glm4_moe", "expert_gating_func", 1, "expert_gating_func is 1"),
        ("gpt2", "attention.head_count_kv", 2, "as many KV heads as heads"),
        ("llama3", "context_length", 0, "context_length is 0"),
        ("llama3", "context_length", 12.5, "context_length is 12.5"),
    ],
)
def test_senseless_values_are_refused_by_key(variant, key, value, message, files):
    keys, tensors = files[variant]
    with pytest.raises(AttarError, match=re.escape(message)):
        config_reader(tensors)({**keys, f"{keys['general.architecture']}.{key}": value})


def test_rotary_tensors_must_fit(files):
    keys, tensors = files["phi3 with longrope"]
    alone = {name: tensor for name, tensor in tensors.items() if "factors_long" not in name}
    with pytest.raises(AttarError, match="there is only one"):
        config_reader(alone)(keys)
    short = {**tensors, "rope_factors_long.weight": torch.ones(1)}
    with pytest.raises(AttarError, match="has 1 factors"):
        config_reader(short)(keys)


TOKENIZERS = {
    "bpe": (byte_level("qwen2", normalizer={"type": "NFC"}), {"eos_token": "<|endoftext|>"}),
    "bpe with bos": (
        template(byte_level("llama-bpe", ignore_merges=True), before=["<|user|>"]),
        {"bos_token": "<|user|>", "eos_token": "<|endoftext|>", "pad_token": "<|end|>"}
        | {"chat_template": [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]},
    ),
    "spm": (
        template(sentencepiece_bpe(), before=["<s>"]),
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<|end|>"},
    ),
    "unigram": (
        template(unigram(), after=["</s>"]),
        {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "</s>"},
    ),
}
GENERATION = {"eos_token_id": [0, 3], "top_k": 7, "temperature": 0.5, "top_p": 0.25, "min_p": 0.125}
GENERATION |= {"repetition_penalty": 1.5, "suppress_tokens": [5], "do_sample": True}
PASSED_OVER = {
    "tokenizer.ggml.pre": "of a SentencePiece or unigram tokenizer llama.cpp reads no pre",
    "tokenizer.chat_templates": "the templates' own keys have the names",
    KEY: "tests/formats/gguf/test_gguf_generation.py",
    PIPELINE: "test_gguf_tokenizer.py",
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_every_key_of_a_tokenizer_is_read(kind, tmp_path):
    content, named = TOKENIZERS[kind]
    folder = save(tmp_path, content, **named)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    keys = {key: getattr(value, "value", value) for key, value in tokenizer_metadata(folder, {}).items()}

    def read(keys):
        return [tokenizer_files(keys), generation_config(keys)]

    assert {f"general.sampling.{key}" for key, _ in SAMPLING.values()} <= keys.keys()
    silent = set(unread(keys, read))
    assert not silent - PASSED_OVER.keys()
    assert "tokenizer.ggml.pre" not in silent or not kind.startswith("bpe")
