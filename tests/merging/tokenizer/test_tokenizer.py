"""Tokenizers extended by others' tokens: numbers, how text is cut, and files that transformers loads."""

import functools
import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from attar.errors import CheckpointError, ModelError
from attar.merging.tokenizer.tokenizer import (
    TokenizerTokens,
    extend_tokenizer,
    read_tokenizer,
    with_stored_tokens,
    write_tokenizer,
)
from tests import tiny_models

TEXTS = ["def merge(self, tokens):\n    return tokens", "naïve café 42", "the quick brown fox jumps"]
WORDS = ["the quick brown fox", "the lazy dog jumps over the quick fox", "brown dogs and brown foxes"] * 3


def byte_bpe(size, texts=WORDS, special=("<|endoftext|>",)):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@functools.lru_cache
def unigram(texts, size):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=size, special_tokens=["<unk>", "<s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def word_piece(words):
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *words])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def stored(folder, tokenizer, **special):
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


@pytest.fixture
def tiny(tmp_path):
    tiny_models.tokenizer().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def written(tokens, folder):
    folder.mkdir()
    write_tokenizer(tokens, folder)
    return AutoTokenizer.from_pretrained(folder)


def test_nothing_new_is_the_same_tokenizer_copied(tiny, tmp_path):
    tokens = read_tokenizer(tiny)
    assert extend_tokenizer(tokens, [read_tokenizer(tiny)]) is tokens
    out = tmp_path / "out"
    out.mkdir()
    (out / "vocab.txt").write_text("stale")
    names = write_tokenizer(tokens, out)
    assert names == sorted(path.name for path in out.iterdir()) == sorted(p.name for p in tiny.iterdir())
    assert all((out / name).read_bytes() == (tiny / name).read_bytes() for name in names)


def test_union_with_a_longer_training_cuts_text_as_that_one_does(tmp_path):
    short = read_tokenizer(stored(tmp_path / "short", byte_bpe(270), eos_token="<|endoftext|>"))
    long = read_tokenizer(stored(tmp_path / "long", byte_bpe(300), eos_token="<|endoftext|>"))
    union = extend_tokenizer(short, [long])
    assert dict(union.ids) == dict(long.ids)
    tokenizer = written(union, tmp_path / "union")
    reference = AutoTokenizer.from_pretrained(tmp_path / "long")
    for text in (*TEXTS, *WORDS):
        assert tokenizer(text).input_ids == reference(text).input_ids
    assert tokenizer.eos_token == "<|endoftext|>"


def test_a_text_without_new_tokens_is_cut_as_before(tiny, tmp_path):
    other = read_tokenizer(stored(tmp_path / "other", byte_bpe(300)))
    union = extend_tokenizer(read_tokenizer(tiny), [other])
    tokenizer, before = written(union, tmp_path / "union"), AutoTokenizer.from_pretrained(tiny)
    assert len(tokenizer) == len(union.ids) > len(before)
    assert tokenizer("naïve café 42").input_ids == before("naïve café 42").input_ids
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    fox = tokenizer("the quick brown fox").input_ids
    assert len(fox) < len(before("the quick brown fox").input_ids)


def test_numbers_of_the_first_stay_and_added_tokens_follow_plain_ones(tmp_path):
    first, second = byte_bpe(270), byte_bpe(280)
    first.add_special_tokens(["<|first|>"])
    second.add_special_tokens(["<|second|>"])
    second.add_tokens(["loose"])
    one, two = (read_tokenizer(stored(tmp_path / n, t)) for n, t in (("one", first), ("two", second)))
    union = extend_tokenizer(one, [two], ["<|extra|>"])
    assert all(union.ids[text] == number for text, number in one.ids.items())
    assert sorted(union.ids.values()) == list(range(len(union.ids)))
    assert list(union.ids)[-3:] == ["<|second|>", "loose", "<|extra|>"]
    assert union.added["<|second|>"]["special"] and not union.added["loose"]["special"]
    tokenizer = written(union, tmp_path / "out")
    ids = tokenizer("fox<|second|><|first|>fox<|extra|>").input_ids
    marks = [union.ids[text] for text in ("<|second|>", "<|first|>", "<|extra|>")]
    assert [number for number in ids if number in marks] == marks
    assert tokenizer.decode(ids, skip_special_tokens=True) == "foxfox<|extra|>"


def test_unigram_keeps_scores_and_word_piece_its_longest_match(tmp_path):
    one = read_tokenizer(stored(tmp_path / "one", unigram(("a bc abc ab", "cab bac"), 12)))
    two = read_tokenizer(stored(tmp_path / "two", unigram(tuple(WORDS), 40)))
    union = extend_tokenizer(one, [two])
    tokenizer = written(union, tmp_path / "union")
    assert tokenizer.get_vocab() == dict(union.ids)
    theirs = AutoTokenizer.from_pretrained(two.folder)
    assert [tokenizer.tokenize(text) for text in ("quick fox", "dog")] == [
        theirs.tokenize(text) for text in ("quick fox", "dog")
    ]
    scores, known = (dict(tokens.backend["model"]["vocab"]) for tokens in (union, two))
    new = [piece for piece in union.ids if piece not in one.ids]
    assert new and all(scores[piece] == known[piece] for piece in new)
    pieces = (
        read_tokenizer(stored(tmp_path / "three", word_piece(["fox", "##es"]))),
        read_tokenizer(stored(tmp_path / "four", word_piece(["dog", "##es", "foxes"]))),
    )
    tokenizer = written(extend_tokenizer(*pieces[:1], pieces[1:]), tmp_path / "words")
    assert tokenizer.tokenize("fox foxes dog") == ["fox", "foxes", "dog"]


def test_old_settings_list_new_added_tokens_too(tiny, tmp_path):
    path = tiny / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config |= {"added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True}}}
    path.write_text(json.dumps(config))
    union = extend_tokenizer(read_tokenizer(tiny), [], ["<|im_start|>"])
    tokenizer = written(union, tmp_path / "out")
    number = union.ids["<|im_start|>"]
    listed = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert listed[str(number)]["content"] == "<|im_start|>"
    assert tokenizer("<|im_start|>").input_ids == [number]


def test_what_cannot_be_done_is_reported(tmp_path):
    with pytest.raises(CheckpointError, match="no tokenizer"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        read_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="Python code"):
        extend_tokenizer(TokenizerTokens(tmp_path, {"a": 0}), [], ["b"])
    holes = {"model": {"type": "Unigram", "vocab": [["a", 0.0]]}, "added_tokens": []}
    with pytest.raises(ModelError, match="no token 1"):
        extend_tokenizer(TokenizerTokens(tmp_path, {"a": 0, "c": 2}, {}, holes), [], ["b"])


def test_inputs_are_not_changed(tiny, tmp_path):
    tokens = read_tokenizer(tiny)
    before = json.dumps([dict(tokens.ids), dict(tokens.added), tokens.backend])
    extend_tokenizer(tokens, [read_tokenizer(stored(tmp_path / "other", byte_bpe(300)))], ["<|x|>"])
    assert json.dumps([dict(tokens.ids), dict(tokens.added), tokens.backend]) == before


@pytest.mark.parametrize("kind", ["bpe", "unigram", "word_piece"])
def test_tokens_that_no_model_stores_leave_the_file(tmp_path, kind):
    tokenizer = {
        "bpe": lambda: byte_bpe(300),
        "unigram": lambda: unigram(tuple(WORDS), 30),
        "word_piece": lambda: word_piece(["the", "fox", "##es"]),
    }[kind]()
    folder = stored(tmp_path / "one", tokenizer)
    before = read_tokenizer(folder)
    last = list(before.ids)[-2:]
    result = with_stored_tokens(before, frozenset(before.ids) - set(last))
    assert with_stored_tokens(before, before.ids) is before and list(before.ids)[-2:] == last
    loaded = written(result, tmp_path / "out")
    assert set(before.ids) - set(loaded.get_vocab()) == set(last)
    assert loaded.get_vocab() == dict(result.ids)
