"""Groups of tokens that cover the same bytes, and a student's row in its teacher's tokens."""

import random
from itertools import pairwise

import pytest
from tokenizers import normalizers

from attar.data.packing import PADDING
from attar.distillation.signals.alignment.retokenize import Retokenizer
from attar.distillation.signals.alignment.spans import NOWHERE, groups_of, texts_of
from tests import tiny_models
from tests.distillation.signals import other_tokenizers

TEXT = "the naïve café of the models: 12 + 3.5, 東京 🎉 def f(x):\n\treturn x"


def pairs(groups):
    return [(list(group.ours), list(group.theirs)) for group in groups]


def test_the_example_of_the_docstring():
    ours, theirs = [(0, 2), (2, 3), (3, 4), (4, 6)], [(0, 1), (1, 4), (4, 6)]
    assert pairs(groups_of(ours, theirs)) == [([0, 1, 2], [0, 1]), ([3], [2])]


def test_groups_agree_with_brute_force():
    """Every pair of runs of tokens that cover the same bytes and hold no smaller such pair."""
    draw = random.Random(0)
    for _ in range(200):
        sides = []
        for _ in range(2):
            edges = sorted({0, 20, *draw.sample(range(1, 20), draw.randint(1, 12))})
            sides.append(list(pairwise(edges)))
        ours, theirs = sides
        wanted, i, j = [], 0, 0
        while i < len(ours):
            a, b = i + 1, j + 1
            while ours[a - 1][1] != theirs[b - 1][1]:
                if ours[a - 1][1] < theirs[b - 1][1]:
                    a += 1
                else:
                    b += 1
            wanted.append((list(range(i, a)), list(range(j, b))))
            i, j = a, b
        assert pairs(groups_of(ours, theirs)) == wanted


def test_bytes_of_one_side_alone_are_in_no_group():
    assert pairs(groups_of([(0, 1), (1, 3), (3, 5)], [NOWHERE, (1, 3), (3, 5)])) == [([1], [1]), ([2], [2])]
    assert pairs(groups_of([(0, 2), (2, 6), (6, 7)], [(0, 2), (2, 4), (5, 6), (6, 7)])) == [
        ([0], [0]),
        ([2], [3]),
    ]
    assert groups_of([], [(0, 1)]) == []


def test_text_that_begins_and_ends_inside_a_character():
    content = "ï東x".encode()[1:] + "é".encode()[:1]
    assert list(texts_of(content)) == [(1, "東x")]
    assert list(texts_of(b"a\xffb")) == [(0, "a"), (2, "b")]


TOKENIZERS = {
    "tiny": tiny_models.tokenizer,
    "bytes": other_tokenizers.byte_level,
    "bos": lambda: other_tokenizers.byte_level(bos=True),
    "sentencepiece": other_tokenizers.sentencepiece,
}


@pytest.mark.parametrize("student", TOKENIZERS)
@pytest.mark.parametrize("teacher", TOKENIZERS)
def test_spans_are_the_bytes_of_the_text(student, teacher):
    """Checked by the bytes that the tokens of a group spell on both sides."""
    ours, theirs = TOKENIZERS[student](), TOKENIZERS[teacher]()
    retokenizer = Retokenizer(ours, theirs)
    row = ours(TEXT, add_special_tokens=False)["input_ids"] + [ours.eos_token_id]
    both = retokenizer([*row, PADDING, PADDING])
    assert len(both.ours) == len(row) and len(both.theirs) == len(both.tokens)
    groups = groups_of(both.ours, both.theirs)
    assert [*groups[-1].ours] == [len(row) - 1] and both.tokens[-1] == theirs.eos_token_id
    for group in groups[:-1]:
        one = b"".join(retokenizer.our_bytes[row[i]] for i in group.ours)
        other = b"".join(retokenizer.their_bytes[both.tokens[i]] for i in group.theirs)
        assert one == other
    covered = sum(len(group.ours) for group in groups)
    assert covered >= len(row) - 3  # the first one may have a blank that the other side lacks


def test_one_tokenizer_on_both_sides_gives_a_group_a_token():
    tokenizer = tiny_models.tokenizer()
    row = tokenizer(TEXT)["input_ids"]
    both = Retokenizer(tokenizer, tiny_models.tokenizer())(row)
    assert both.tokens == row
    assert pairs(groups_of(both.ours, both.theirs)) == [([i], [i]) for i in range(len(row))]


def test_a_first_token_of_one_side_alone_changes_no_group():
    """BOS in front of the teacher's tokens, and of the student's."""
    plain, bos = other_tokenizers.byte_level(), other_tokenizers.byte_level(bos=True)
    row = plain(TEXT)["input_ids"]
    wanted = [([i], [i]) for i in range(len(row))]
    teacher = Retokenizer(plain, bos)(row)
    assert teacher.tokens == [0, *row]
    assert pairs(groups_of(teacher.ours, teacher.theirs)) == [(one, [other[0] + 1]) for one, other in wanted]
    nobos = other_tokenizers.byte_level(specials=("<begin>", "</s>"))  # has no such token
    student = Retokenizer(tiny_models.tokenizer(), nobos)([1, *tiny_models.tokenizer()(TEXT)["input_ids"]])
    alone = Retokenizer(tiny_models.tokenizer(), nobos)(tiny_models.tokenizer()(TEXT)["input_ids"])
    assert student.tokens == alone.tokens
    assert len(groups_of(student.ours, student.theirs)) == len(groups_of(alone.ours, alone.theirs)) > 20


def test_a_row_that_is_cut_inside_a_character():
    ours, theirs = tiny_models.tokenizer(), other_tokenizers.byte_level()
    row = ours("🎉é of the models 🎉")["input_ids"]
    both = Retokenizer(ours, theirs)(row[1:-1])
    groups = groups_of(both.ours, both.theirs)
    assert theirs.decode(both.tokens) == "é of the models "
    assert both.theirs[0][0] == 3 and len(groups) > 5


def test_a_normalizer_of_the_teacher_is_followed_by_characters():
    """Its tokens spell other bytes than the text has."""
    theirs = other_tokenizers.byte_level()
    theirs.backend_tokenizer.normalizer = normalizers.NFC()
    ours = tiny_models.tokenizer()
    row = ours("cafe\u0301 of the models")["input_ids"]
    both = Retokenizer(ours, theirs)(row)
    last = groups_of(both.ours, both.theirs)[-1]
    assert theirs.decode(both.tokens) == "café of the models"
    assert both.theirs[-1][1] == both.ours[-1][1] and ours.decode([row[i] for i in last.ours]) == " models"
