"""Labelled texts: what is read, how it is split, and one line for each fault."""

import json

import pytest
import torch

from attar.data.examples import Examples
from attar.data.labelled import (
    class_names,
    class_numbers,
    classification_examples,
    has_labels,
    labelled_note,
    labelled_record,
    labelled_split,
    read_labelled,
)
from attar.data.packing import PADDING, SimilarLengths
from attar.data.sources import documents
from attar.errors import DataError, ModelError
from tests import tiny_models


def write(path, *lines):
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def jsonl(path, *rows):
    return write(path, *(json.dumps(row) for row in rows))


def test_tsv_with_and_without_header_and_pairs(tmp_path):
    plain = read_labelled(write(tmp_path / "a.tsv", "a film to love\t1", "", "dull\t0"))
    assert [(row.text, row.pair, row.label) for row in plain] == [("a film to love", "", 1), ("dull", "", 0)]
    assert plain[1].where.endswith("a.tsv:3")
    headed = read_labelled(write(tmp_path / "b.tsv", "sentence\tlabel", "dull\tNEG"))
    assert [row.label for row in headed] == ["NEG"]
    pairs = read_labelled(write(tmp_path / "c.tsv", "it rains\tthe ground is wet\tentailment"))
    assert (pairs[0].text, pairs[0].pair, pairs[0].label) == ("it rains", "the ground is wet", "entailment")


def test_jsonl_with_names_numbers_and_pairs(tmp_path):
    rows = read_labelled(
        jsonl(tmp_path / "a.jsonl", {"text": "x", "label": "a"}, {"text": "y", "text_pair": "z", "label": 3})
    )
    assert [(row.text, row.pair, row.label) for row in rows] == [("x", "", "a"), ("y", "z", 3)]
    assert has_labels("whole:a.tsv") and not has_labels("a.txt") and not has_labels("a.txt + b.tsv")


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("x.tsv", ["good\t1", "no label here"], r"x\.tsv:2: no label"),
        ("x.tsv", ["good\t1", "bad\t"], r"x\.tsv:2: no label"),
        ("x.tsv", ["a\tb\tc\td"], r"x\.tsv:1: 4 columns"),
        ("x.tsv", ["good\t0.75"], r"x\.tsv:1: label 0\.75 is a score"),
        ("x.tsv", [" \t1"], r"x\.tsv:1: the text is empty"),
        ("x.tsv", [], "no labelled texts"),
        ("x.txt", ["text"], "holds no labels"),
        ("x.jsonl", ["{"], r"x\.jsonl:1: not JSON"),
        ("x.jsonl", ['{"label": 1}'], r"x\.jsonl:1: no text in field 'text'"),
        ("x.jsonl", ['{"text": "a"}'], r"x\.jsonl:1: no label"),
        ("x.jsonl", ['{"text": "a", "label": [1]}'], r"x\.jsonl:1: label \[1\] is no class"),
        ("x.jsonl", ['{"text": "a", "label": true}'], r"x\.jsonl:1: label True is no class"),
        ("x.jsonl", ['{"text": "a", "label": 0.5}'], r"x\.jsonl:1: label 0\.5 is a score"),
        ("x.jsonl", ['{"text": "a", "text_pair": 4, "label": 1}'], r"x\.jsonl:1: 'text_pair' is a int"),
    ],
)
def test_a_bad_line_is_named(tmp_path, name, lines, message):
    with pytest.raises(DataError, match=message):
        read_labelled(write(tmp_path / name, *lines))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_labelled(str(tmp_path / "nosuch.tsv"))


def rows_of(tmp_path, *labels):
    return read_labelled(write(tmp_path / "x.tsv", *(f"text {i}\t{label}" for i, label in enumerate(labels))))


def test_classes_of_the_data(tmp_path):
    assert class_names(rows_of(tmp_path, 1, 0, 1)) == ["LABEL_0", "LABEL_1"]
    assert class_names(rows_of(tmp_path, "pos", "neg", "pos")) == ["neg", "pos"]
    assert class_numbers(rows_of(tmp_path, "POS", 0), ["neg", "pos"]) == [1, 0]
    for labels, message in [
        ((1, 1), "x.tsv:1: every text has label 1"),
        ((0, "x"), r"x.tsv:2: label 'x' is a name"),
        ((0, 2), r"x.tsv:2: label 2, but no text has label 1"),
        (range(1001), "1,001 different labels"),
    ]:
        with pytest.raises(DataError, match=message):
            class_names(rows_of(tmp_path, *labels))
    with pytest.raises(DataError, match=r"x\.tsv:2: label 'other' is no class of the model"):
        class_numbers(rows_of(tmp_path, "neg", "other"), ["neg", "pos"])
    with pytest.raises(DataError, match=r"x\.tsv:1: label 2 is no class of the model"):
        class_numbers(rows_of(tmp_path, 2), ["neg", "pos"])


@pytest.mark.parametrize("count", [40, 400])
def test_splits_share_nothing_and_depend_on_the_text_alone(tmp_path, count):
    data = write(tmp_path / "x.tsv", *(f"a text of number {i}\t{i % 2}" for i in range(count)))
    parts = {name: labelled_split(data, name) for name in ("train", "calibration", "evaluation")}
    texts = {name: {row.text for row in part.rows} for name, part in parts.items()}
    assert sum(map(len, texts.values())) == count == len(set.union(*texts.values()))
    assert all(texts.values())
    flipped = write(tmp_path / "y.tsv", *(f"a text of number {i}\t{1 - i % 2}" for i in range(count)))
    assert {row.text for row in labelled_split(flipped, "evaluation").rows} == texts["evaluation"]
    assert len(labelled_split(f"whole:{data}", "evaluation").rows) == count
    ordered = [row.text for row in labelled_split(data, "train", 1).rows]
    assert ordered != [row.text for row in labelled_split(data, "train", 2).rows]


def test_few_texts_are_said_to_be_shared(tmp_path):
    part = labelled_split(write(tmp_path / "x.tsv", "a\t0", "b\t1"), "evaluation")
    assert len(part.rows) == 2 and "cannot be cut" in part.shared


def test_examples_have_the_tokenizers_own_tokens_segments_and_padding(tmp_path):
    tokenizer = tiny_models.encoder_tokenizer()
    rows = read_labelled(
        jsonl(
            tmp_path / "x.jsonl",
            {"text": "return", "label": 1},
            {"text": "def f", "text_pair": "return x", "label": 0},
        )
    )
    examples = classification_examples(tokenizer, rows, ["a", "b"], 16)
    assert examples.targets.tolist() == [1, 0]
    for number, row in enumerate(rows):
        encoded = tokenizer(*filter(None, (row.text, row.pair)))["input_ids"]
        assert examples.tokens[number][examples.mask[number]].tolist() == encoded
    second = tokenizer("return x", add_special_tokens=False)["input_ids"]
    assert int(examples.segments[1].sum()) == len(second) + 1 and not examples.segments[0].any()
    assert bool((examples.tokens[0][~examples.mask[0]] == PADDING).all())
    short = classification_examples(tokenizer, rows[:1], ["a", "b"], 3)
    assert short.tokens.shape == (1, 3) and short.segments is None
    assert short.tokens[0, -1] == tokenizer.sep_token_id
    with pytest.raises(ModelError, match="hold nothing but"):
        classification_examples(tokenizer, rows, ["a", "b"], 4)


def test_trimmed_examples_lose_padding_columns_alone(tmp_path):
    tokenizer = tiny_models.encoder_tokenizer()
    rows = rows_of(tmp_path, 0, 1)
    examples = classification_examples(tokenizer, rows, ["a", "b"], 64)
    padded = type(examples)(torch.nn.functional.pad(examples.tokens, (0, 5), value=PADDING), examples.targets)
    assert torch.equal(padded.trimmed().tokens, examples.tokens)
    assert examples.trimmed() is examples


def test_texts_that_were_read_are_recognised(tmp_path):
    data = write(tmp_path / "x.tsv", *(f"the story of number {i}\t{i % 2}" for i in range(200)))
    item = labelled_record("recover", data, "train", labelled_split(data, "train"))
    assert labelled_note(labelled_split(data, "evaluation"), [item]) == ""
    note = labelled_note(labelled_split(f"whole:{data}", "train"), [item])
    assert "of the texts were read by recover" in note


def test_batches_of_similar_lengths_cover_an_epoch_with_little_padding():
    lengths = torch.randint(1, 60, (1000,), generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(60).expand(1000, -1).masked_fill(torch.arange(60) >= lengths[:, None], PADDING)
    source = SimilarLengths(Examples(tokens, torch.arange(1000)), 16, 5)
    batches = [source.batch(number, None) for number in range(63)]
    assert sorted(torch.cat([batch.targets for batch in batches]).tolist()) == list(range(1000))
    padded = sum(batch.trimmed().tokens.numel() for batch in batches)
    assert padded < 1.15 * int(lengths.sum())
    again, epoch = source.batch(3, None), source.batch(66, None)
    assert torch.equal(again.targets, batches[3].targets) and not torch.equal(again.targets, epoch.targets)
    widths = [int(batch.trimmed().tokens.shape[1]) for batch in batches]
    assert widths != sorted(widths)


def test_other_verbs_read_the_texts_without_their_labels(tmp_path):
    data = write(tmp_path / "x.tsv", *(f"the text of number {i}\t{i % 2}" for i in range(200)))
    for split in ("train", "calibration", "evaluation"):
        texts = {row.text for row in labelled_split(data, split).rows}
        assert set(documents(data, split)) == texts
