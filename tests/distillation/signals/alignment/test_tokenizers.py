"""Tokenizers are compared by what they are and do, never by the size of a vocabulary."""

import json

import pytest
import transformers
from tokenizers import AddedToken, Tokenizer

from attar.distillation.signals.alignment.tokenizers import PROBE, same_tokenizer
from tests import tiny_models
from tests.distillation.signals import other_tokenizers


def changed(edit):
    content = json.loads(tiny_models.tokenizer_json())
    edit(content)
    fast = Tokenizer.from_str(json.dumps(content))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<|endoftext|>")


def test_the_same_one():
    assert same_tokenizer(tiny_models.tokenizer(), tiny_models.tokenizer())


def test_special_tokens_of_one_side_do_not_matter():
    more = tiny_models.tokenizer()
    more.add_special_tokens({"additional_special_tokens": [AddedToken("<tool>", special=True)]})
    assert len(more) == 321
    assert same_tokenizer(tiny_models.tokenizer(), more) and same_tokenizer(more, tiny_models.tokenizer())


def swapped(content):
    words = content["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]


def swapped_out_of_sight(content):
    """Two bytes that the probe does not have."""
    words, used = content["model"]["vocab"], {*tiny_models.tokenizer()(PROBE)["input_ids"]}
    one, other = [token for token, number in words.items() if 3 <= number < 259 and number not in used][:2]
    words[one], words[other] = words[other], words[one]


def reordered(content):
    content["model"]["merges"].reverse()


def lowered(content):
    content["normalizer"] = {"type": "Lowercase"}


def other_end(content):
    for token in content["added_tokens"]:
        if token["id"] < 2:
            token["id"] = 1 - token["id"]
    words = content["model"]["vocab"]
    words["<|endoftext|>"], words["<pad>"] = 1, 0


@pytest.mark.parametrize("edit", [swapped, swapped_out_of_sight, reordered, lowered, other_end])
def test_other_ones_of_the_same_size(edit):
    other = changed(edit)
    assert len(other) == len(tiny_models.tokenizer())
    assert not same_tokenizer(tiny_models.tokenizer(), other)


def test_a_vocabulary_of_its_own():
    assert not same_tokenizer(tiny_models.tokenizer(), other_tokenizers.byte_level(vocabulary=320))
