"""attar's settings as vLLM's options, and those that it does not have."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("fastapi")
from safetensors.torch import save_file

from attar.checkpoint import open_checkpoint
from attar.errors import ModelError, SettingsError
from attar.formats.draft_heads.table import HEAD_LAYOUTS
from attar.runtime.admission import Limits
from attar.serving.http import settings as of_server
from attar.serving.http.settings import ServerSettings, TemplateSettings
from attar.serving.http.tool_calls import FORMATS
from attar.serving.http.vllm.flags import more_options, speculation
from attar.serving.services.settings import ServiceSettings
from tests import tiny_models
from tests.formats.draft_heads.stored_heads import block, eagle, eagle3, medusa
from tests.serving.http.vllm.commands import options


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Llama with 128 positions."""
    folder = tmp_path_factory.mktemp("model")
    tiny_models.save(tiny_models.build("llama2", max_position_embeddings=128), folder / "llama")
    return open_checkpoint(folder / "llama")


NAME = ["--served-model-name", "org/model"]


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({}, []),
        ({"device": "cuda", "dtype": "bfloat16"}, ["--dtype", "bfloat16"]),
        ({"kv_dtype": "fp8"}, ["--kv-cache-dtype", "fp8"]),
        ({"kv_dtype": "int8"}, ["--kv-cache-dtype", "int8_per_token_head"]),
        ({"prefix_cache": "off"}, ["--no-enable-prefix-caching"]),
        ({"sequences": 9, "step_tokens": 99}, ["--max-num-seqs", "9", "--max-num-batched-tokens", "99"]),
        ({"kv_tokens": 999}, ["--block-size", "16", "--num-gpu-blocks-override", "63"]),
        (
            {"kv_tokens": 99},
            ["--block-size", "16", "--num-gpu-blocks-override", "7", "--max-model-len", "99"],
        ),
        (
            {"speculate": "ngram", "drafts": 3},
            ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'],
        ),
    ],
)
def test_settings_of_the_engine(model, engine, words):
    assert options(model, engine) == [*NAME, *words]


def test_settings_of_the_server(model):
    lora = of_server.LoraSettings(lora=("a=/b",), max_loras=2)
    assert options(model, name="my", engine={}, parts={"lora": lora}, priority=True) == [
        *("--served-model-name", "my", "--scheduling-policy", "priority", "--enable-lora"),
        *("--max-loras", "2", "--lora-modules", "a=/b"),
    ]
    answers = TemplateSettings(chat_template="t.jinja", generation_config="none")
    assert options(model, parts={"answers": answers})[2:] == [
        *("--chat-template", "t.jinja", "--generation-config", "vllm")
    ]


def test_options_of_vllms_own_follow():
    assert more_options("vllm -tp 2") == ["-tp", "2"]
    for text, words in (("vllm --port 3", "--port"), ("vllm '", "options of its own"), ("vllmx", "own")):
        with pytest.raises(SettingsError, match=words):
            more_options(text)
    with pytest.raises(SettingsError, match="attar, or vllm"):
        ServerSettings(engine="sglang")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("<tool_call> <think></think>", ["hermes", "qwen3"]),
        (FORMATS["harmony"].mark, ["openai", "openai_gptoss"]),
        ("[TOOL_CALLS]", ["mistral"]),
        ("plain", []),
    ],
)
def test_parsers_are_those_of_the_template(model, template, words):
    given = [word for word in options(model, template=template)[2:] if not word.startswith("--")]
    assert given == words


@pytest.mark.parametrize(
    ("engine", "parts", "name"),
    [
        ({"runner": "modules"}, {}, "runner"),
        ({"weights": "int4"}, {}, "weights"),
        ({"kv_dtype": "kivi4"}, {}, "kv_dtype"),
        ({"eviction": "streaming:4,32"}, {}, "eviction"),
        ({"device": "cuda:1"}, {}, "device"),
        ({"speculate": "lookahead"}, {}, "speculate"),
        ({"speculate": "ngram", "verification": "typical"}, {}, "verification"),
        ({"chunk": 64}, {}, "chunk"),
        ({}, {"services": ServiceSettings(role="draft")}, "role"),
        ({}, {"answers": TemplateSettings(tool_parser="json")}, "tool_parser"),
        ({}, {"answers": TemplateSettings(chat_template="plain")}, "chat_template"),
        ({}, {"embeddings": of_server.EmbeddingSettings(pooling="mean")}, "pooling"),
        ({}, {"settings": ServerSettings(engine="vllm", compare="other")}, "compare"),
        ({}, {"models": of_server.ModelsSettings(named_model=("a=b",))}, "named_model"),
    ],
)
def test_what_vllm_does_not_have_is_named(model, engine, parts, name):
    with pytest.raises(SettingsError) as refused:
        options(model, engine, parts=parts)
    assert refused.value.field == name


HEADS = {
    "dspark": ("speculators", block("dspark", rank=4)),
    "dflash": ("deepspec", block("dflash")),
    "eagle3": ("eagle", eagle3(layers=(0, 2))),
    "eagle": ("eagle", eagle(bias=False)),
}


@pytest.mark.parametrize("kind", HEADS)
def test_heads_are_drafters_of_their_kind(tmp_path, kind):
    layout, head = HEADS[kind]
    config = speculation({"draft": str(written(tmp_path, *HEAD_LAYOUTS[layout].encode(head)))})
    assert config == {"method": kind, "model": str(tmp_path), "num_speculative_tokens": 3}


def written(folder, config, tensors):
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors")
    return folder


def test_a_model_drafts_and_a_head_that_vllm_does_not_read_is_refused(model, tmp_path):
    assert speculation({"draft": model.path, "drafts": 2})["method"] == "draft_model"
    assert speculation({"speculate": "suffix"}) == {"method": "suffix"}
    written(tmp_path, *HEAD_LAYOUTS["medusa"].encode(medusa()))
    with pytest.raises(ModelError, match="vLLM has no medusa heads"):
        speculation({"draft": str(tmp_path)})


def test_attars_own_layout_of_heads_is_refused(tmp_path):
    config = {
        "model_type": "attar_draft_head",
        "architectures": ["AttarDraftHead"],
        "head": {"kind": "eagle3"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"a": block("dflash").tensors["norm.weight"]}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as refused:
        speculation({"draft": str(tmp_path)})
    assert "--format speculators" in refused.value.hint


def test_limits_have_no_field_that_is_passed_over():
    assert {*vars(Limits())} == {
        *("step_tokens", "sequences", "chunk", "waiting", "waiting_tokens", "prefix_first", "patience_s")
    }
