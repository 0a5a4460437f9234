"""Generation configs in GGUF: the tokens that end a text and the sampling, of attar's files and of others."""

import json

import pytest

from attar.checkpoint import open_checkpoint
from attar.errors import CheckpointError
from attar.formats.gguf.generation import KEY, end_tokens, generation_config
from attar.models.loading.load import load_model
from attar.models.loading.plain_config import end_tokens as ends_of_files
from attar.runtime.loading import load
from tests import tiny_models
from tests.formats.gguf.gguf_files import write_gguf
from tests.formats.gguf.making import byte_level, save, tokenizer_metadata

TOKENS = [f"t{index}" for index in range(12)]


def bare(metadata):
    return {key: getattr(value, "value", value) for key, value in metadata.items()}


def foreign(ids, texts=(), kind="gpt2"):
    """Metadata of another writer: ids by their role, tokens by their text."""
    tokens = [*TOKENS, *texts]
    keys = {f"tokenizer.ggml.{role}_token_id": index for role, index in ids.items()}
    return {"tokenizer.ggml.model": kind, "tokenizer.ggml.tokens": tokens, **keys}


@pytest.mark.parametrize(
    ("ids", "texts", "ends"),
    [
        ({"eos": 3}, (), [3]),
        ({"eos": 3, "eot": 1}, (), [3, 1]),
        ({"eos": 3, "eot": 1, "eom": 2}, (), [3, 1, 2]),
        ({"eos": 3, "fim_pad": 4, "fim_rep": 5, "fim_sep": 6, "fim_mid": 7}, (), [3, 4, 5, 6]),
        ({"eos": 3}, ("<|im_end|>", "<|im_start|>", "<|endoftext|>"), [3, 12, 14]),
        ({"eos": 12}, ("<end_of_turn>", "<eos>", "[PAD]"), [12, 13, 14]),
        ({"eos": 12}, ("<|return|>", "<|call|>", "<|end|>"), [12, 13]),
        ({"eos": 14, "eot": 14}, ("<|calls|>", "<|flush|>", "<|end|>"), [12, 13]),
        ({"eos": 12}, ("<|tool_response>", "</s>"), [12]),
        ({"eos": 3}, ("[e~[",), [3, 12]),
        ({"eos": 3, "eot": 1}, ("[e~[",), [3, 1]),
        ({"eos": 3, "eot": 99, "eom": -1}, (), [3]),
        ({}, ("<|eot_id|>",), [12]),
        ({}, (), []),
    ],
)
def test_another_writers_file_ends_where_llama_cpp_does(ids, texts, ends):
    assert end_tokens(foreign(ids, texts)) == ends


def test_a_llama_tokenizer_ends_at_two_unless_it_says_otherwise():
    assert end_tokens(foreign({}, kind="llama")) == [2]
    assert end_tokens(foreign({"eos": 5}, kind="llama")) == [5]
    assert generation_config(foreign({}, kind="llama")) == {"bos_token_id": 1, "eos_token_id": 2}


def test_another_writers_sampling_and_suppressed_tokens_are_read():
    keys = {"temp": 0.6000000238418579, "top_k": 20, "top_p": 0.949999988079071, "penalty_repeat": 1.5}
    metadata = foreign({"eos": 3}) | {f"general.sampling.{key}": value for key, value in keys.items()}
    metadata["tokenizer.ggml.suppress_tokens"] = [7, 8]
    assert generation_config(metadata) == {
        "eos_token_id": 3,
        "suppress_tokens": [7, 8],
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "repetition_penalty": 1.5,
    }
    assert generation_config({**metadata, "general.sampling.temp": 0.0})["do_sample"] is False


SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eom_id|>", "<a>", "<b>", "<c>", "<d>")
FILES = [
    ({}, {}),
    ({}, {"eos_token_id": 2}),
    ({"eos_token_id": 0}, {}),
    ({"eos_token_id": [0, 2]}, {}),
    ({"eos_token_id": [0, 4]}, {}),
    ({"eos_token_id": [4, 5, 6, 7]}, {"eos_token_id": 0}),
    ({"eos_token_id": [2, 0], "bos_token_id": 1, "pad_token_id": 4, "transformers_version": "5"}, {}),
    ({"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.05}, {}),
    ({"repetition_penalty": 1.1, "max_new_tokens": 9, "suppress_tokens": [5, 6]}, {"eos_token_id": 7}),
    ({"temperature": None, "top_k": "many", "begin_suppress_tokens": [3]}, {}),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save(
        tmp_path_factory.mktemp("t"), byte_level("gpt-2", specials=SPECIALS), eos_token="<|endoftext|>"
    )


@pytest.mark.parametrize(("generation", "config"), FILES)
def test_a_generation_config_comes_back(generation, config, tokenizer):
    (tokenizer / "generation_config.json").write_text(json.dumps(generation))
    metadata = bare(tokenizer_metadata(tokenizer, config))
    actual = generation_config(metadata)
    ends = ends_of_files(generation, config, {"eos_token_id": 0})
    assert ends_of_files(actual) == ends
    others = {name: value for name, value in actual.items() if name != "eos_token_id"}
    assert others == {name: value for name, value in generation.items() if name != "eos_token_id"}
    without = generation_config({key: value for key, value in metadata.items() if key != KEY})
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "suppress_tokens"):
        stated = generation.get(name)
        assert without.get(name) == (None if isinstance(stated, str) else stated)


def test_a_key_that_was_changed_since_counts(tokenizer):
    (tokenizer / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [0, 4], "temperature": 0.5})
    )
    metadata = bare(tokenizer_metadata(tokenizer, {}))
    assert (metadata["tokenizer.ggml.eos_token_id"], metadata["tokenizer.ggml.eot_token_id"]) == (0, 4)
    changed = generation_config({**metadata, "tokenizer.ggml.eot_token_id": 5})
    assert {0, 5} <= set(changed["eos_token_id"]) and 4 not in changed["eos_token_id"]
    assert generation_config({**metadata, "general.sampling.temp": 0.25})["temperature"] == 0.25


@pytest.mark.parametrize("value", ["[", "[]", '{"content": {}}', '{"content": 1, "keys": {}}', 7])
def test_a_damaged_key_is_refused_by_name(value):
    with pytest.raises(CheckpointError, match=KEY):
        generation_config({KEY: value})


def test_a_folder_and_its_file_end_alike_in_every_loader(tmp_path):
    folder = tiny_models.save(tiny_models.build("smollm"), tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 4], "top_k": 7}))
    config = open_checkpoint(folder).config
    file = write_gguf(folder, tmp_path / "m.gguf", extra=tokenizer_metadata(folder, config))
    assert load(folder).ends == load(file).ends == (0, 4)
    assert load_model(file).generation_config.eos_token_id == [0, 4]
    written = open_checkpoint(file).path / "generation_config.json"
    assert json.loads(written.read_text()) == {"eos_token_id": [0, 4], "top_k": 7}
