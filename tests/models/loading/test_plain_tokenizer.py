"""Tokenizers read without transformers: the same ids and texts, or left to transformers."""

import copy
import json

import pytest

from attar.checkpoint import open_checkpoint
from attar.formats.gguf.tokenizer.from_gguf import write_tokenizer
from attar.models.loading.load import load_tokenizer, read_tokenizer
from attar.models.loading.plain_tokenizer import PlainTokenizer, plain_tokenizer
from attar.runtime.speculate.vocabulary import special_prefix
from attar.serving.http.tokenizer import SpecialTokenEscaper
from tests.formats.gguf.making import NASTY, byte_level, save, sentencepiece_bpe, tokenizer_metadata, unigram
from tests.tiny_models import tokenizer

CHATML = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}{{ eos_token }}"
GENERIC = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
SPM = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def assert_same(ours, theirs):
    assert len(ours) == len(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.all_special_tokens == theirs.all_special_tokens
    assert ours.all_special_ids == theirs.all_special_ids
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.chat_template == theirs.chat_template
    assert str(ours.added_tokens_decoder) == str(theirs.added_tokens_decoder)
    assert special_prefix(ours) == special_prefix(theirs)
    for text in NASTY:
        for special in (True, False):
            ids = theirs(text, add_special_tokens=special)["input_ids"]
            assert ours(text, add_special_tokens=special, verbose=False)["input_ids"] == ids, text
            plain = {"skip_special_tokens": special, "clean_up_tokenization_spaces": False}
            assert ours.decode(ids, **plain) == theirs.decode(ids, **plain)
    for id in range(0, len(theirs), 7):
        assert ours.convert_ids_to_tokens(id) == theirs.convert_ids_to_tokens(id)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "unigram"])
def test_a_tokenizer_of_a_gguf_file_is_transformers_own(kind, tmp_path):
    content = {
        "byte_level": lambda: byte_level("qwen2"),
        "sentencepiece": sentencepiece_bpe,
        "unigram": unigram,
    }[kind]()
    named = {"eos_token": "<|endoftext|>"} if kind == "byte_level" else SPM
    if kind == "unigram":
        named = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    source, folder = save(tmp_path / "source", content, **named, chat_template=CHATML), tmp_path / "gguf"
    folder.mkdir()
    metadata = tokenizer_metadata(source, {"vocab_size": None})
    write_tokenizer(metadata, folder)
    ours = plain_tokenizer(folder, {"model_type": "llama"})
    assert isinstance(ours, PlainTokenizer)
    theirs = read_tokenizer(folder)
    assert_same(ours, theirs)
    messages = [{"role": "user", "content": "hello"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize("model", ["attar:tiny", "attar:draft"])
def test_the_tokenizers_that_come_with_attar_are_read_so(model):
    checkpoint = open_checkpoint(model)
    ours = plain_tokenizer(checkpoint.path, checkpoint.config)
    assert isinstance(ours, PlainTokenizer)
    assert_same(ours, load_tokenizer(checkpoint))
    assert SpecialTokenEscaper(copy.deepcopy(ours)).found_in([{"role": "user", "content": "<|endoftext|>"}])


def test_several_templates_by_name(tmp_path):
    reference = tokenizer()
    reference.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["chat_template"] = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = plain_tokenizer(tmp_path, {})
    messages = [{"role": "user", "content": "x"}]
    assert ours.apply_chat_template(messages) == "plain"
    assert ours.apply_chat_template(messages, tools=[{}]) == "tools"
    ours.chat_template = {"other": "x"}
    with pytest.raises(ValueError, match="no chat template that is the default"):
        ours.apply_chat_template(messages)


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer_class": "LlamaTokenizer"},
        {"tokenizer_class": None},
        {"add_bos_token": True},
        {"add_eos_token": False},
        {"extra_special_tokens": ["<mask>"]},
        {"fix_mistral_regex": True},
        {"split_special_tokens": True},
        {"eos_token": "<new>"},
        {"image_token": "<image>"},
        {"added_tokens_decoder": {"0": {"content": "<|endoftext|>", "lstrip": True}}},
        {"added_tokens_decoder": {"319": {"content": "<new>", "special": True}}},
    ],
)
def test_what_transformers_would_change_is_left_to_it(change, tmp_path):
    tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    assert plain_tokenizer(tmp_path, {"vocab_size": 320}) is not None
    file.write_text(json.dumps(settings | change))
    assert plain_tokenizer(tmp_path, {"vocab_size": 320}) is None


def test_other_files_and_sizes_are_left_to_transformers(tmp_path):
    tokenizer().save_pretrained(tmp_path)
    assert plain_tokenizer(tmp_path, {"vocab_size": 100}) is None
    (tmp_path / "tekken.json").write_text("{}")
    assert plain_tokenizer(tmp_path, {}) is None
