"""Tokenizer classes that build their own splitting tokenize as tokenizer.json says."""

import json
import logging

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer

from attar.models.loading import load
from attar.models.loading.load import read_tokenizer
from attar.models.loading.plain_tokenizer import plain_tokenizer
from tests.formats.gguf.making import NASTY, byte_level, save, sentencepiece_bpe, template, unigram

END = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "<|endoftext|>")
SPM = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
T5 = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
KINDS = {
    "bpe": (lambda: byte_level("tekken", size=700), END),
    "spm": (lambda: template(sentencepiece_bpe(scheme="always"), before=["<s>"]), SPM),
    "unigram": (lambda: template(unigram(), after=["</s>"]), T5),
}
CLASSES = [
    *(("bpe", name) for name in ("Qwen2Tokenizer", "GPT2Tokenizer", "GPTNeoXTokenizer", "CohereTokenizer")),
    *(("bpe", name) for name in ("RobertaTokenizer", "WhisperTokenizer", "Qwen3_5Tokenizer")),
    *(("spm", name) for name in ("LlamaTokenizer", "GemmaTokenizer", "CodeLlamaTokenizer")),
    *(("unigram", name) for name in ("T5Tokenizer", "XLMRobertaTokenizer", "AlbertTokenizer")),
]


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.few(5)
@pytest.mark.parametrize(("kind", "name"), CLASSES)
def test_the_file_goes_before_the_class(kind, name, tmp_path):
    make, named = KINDS[kind]
    folder = save(tmp_path, make(), **named, tokenizer_class=name)
    file, ours = Tokenizer.from_file(str(folder / "tokenizer.json")), read_tokenizer(folder)
    for text in NASTY:
        assert ids(ours, text) == file.encode(text, add_special_tokens=False).ids, text
        assert ours(text)["input_ids"] == file.encode(text).ids or file.post_processor is None, text
    assert ours.eos_token == named["eos_token"]


def test_a_class_that_cannot_be_built_from_the_file_gives_way_to_it(tmp_path):
    folder = save(tmp_path, byte_level("tekken", size=700), **END, tokenizer_class="AlbertTokenizer")
    with pytest.raises(Exception):  # noqa: B017 - transformers raises what its code happens to meet
        AutoTokenizer.from_pretrained(folder)
    file, ours = Tokenizer.from_file(str(folder / "tokenizer.json")), read_tokenizer(folder)
    assert all(ids(ours, text) == file.encode(text).ids for text in NASTY)


@pytest.mark.parametrize("family", ["qwen2", "phi3", "llama", "gemma2"])
def test_both_readers_of_a_generic_class_tokenize_alike(family, tmp_path):
    folder = save(tmp_path, byte_level("llama-bpe", size=700), eos_token="<|endoftext|>")
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    plain, ours = plain_tokenizer(folder, {"model_type": family}), read_tokenizer(folder)
    assert all(ids(plain, text) == ids(ours, text) for text in NASTY)
    assert plain.get_vocab() == ours.get_vocab()


def test_a_token_of_the_class_alone_is_left_out(tmp_path):
    content = byte_level("qwen2", size=700, specials=("<s>", "</s>"))
    folder = save(tmp_path, content, bos_token="<s>", eos_token="</s>", tokenizer_class="Qwen2Tokenizer")
    ours = read_tokenizer(folder)
    assert len(ours) == len(Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab())
    assert (ours.unk_token, ours.eos_token) == (None, "</s>")


def test_tokens_and_flags_of_the_other_files_are_kept(tmp_path):
    content = byte_level("tekken", size=700)
    entry = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    decoder = {str(token["id"]): {**entry, "content": token["content"]} for token in content["added_tokens"]}
    decoder["1"]["rstrip"] = True
    decoder["701"] = {**entry, "content": "<new>", "lstrip": True}
    folder = save(tmp_path, content, **END, tokenizer_class="Qwen2Tokenizer", added_tokens_decoder=decoder)
    ours, theirs = read_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    text = "a <new> b<|user|>  CamelCase"
    assert ours.get_vocab() == theirs.get_vocab() and theirs.convert_tokens_to_ids("<new>") in ids(ours, text)
    file = Tokenizer.from_file(str(folder / "tokenizer.json"))
    file.add_tokens([AddedToken("[tool]", normalized=False, special=True)])
    file.add_tokens([AddedToken("<|user|>", rstrip=True, normalized=False, special=True)])
    file.add_tokens([AddedToken("<new>", lstrip=True, normalized=False, special=True)])
    assert ids(ours, text) == file.encode(text).ids


def test_a_setting_that_contradicts_the_file_goes_before_it(tmp_path):
    content = byte_level({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}, size=700)
    folder = save(tmp_path, content, **END, tokenizer_class="GPT2Tokenizer", add_prefix_space=True)
    assert ids(read_tokenizer(folder), "word") == ids(AutoTokenizer.from_pretrained(folder), "word")


def test_a_warning_names_the_file_and_the_class_once(tmp_path, caplog):
    content = byte_level("qwen2", size=700, normalizer={"type": "NFC"})
    same = save(tmp_path / "same", content, **END, tokenizer_class="Qwen2Tokenizer")
    other = save(tmp_path / "other", byte_level("tekken", size=700), **END, tokenizer_class="Qwen2Tokenizer")
    load._warn_other_tokens.cache_clear()
    with caplog.at_level(logging.WARNING):
        for folder in (same, other, other):
            read_tokenizer(folder)
    (line,) = [record.getMessage() for record in caplog.records]
    assert str(other / "tokenizer.json") in line and "Qwen2Tokenizer" in line
