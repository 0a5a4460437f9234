"""Embeddings of several models brought into one vocabulary: each rule against rows written down by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from attar.errors import ModelError, RecipeError, SettingsError
from attar.merging.config.schema import ModelReference, ModelToken, TokenChoice, TokenizerChoice
from attar.merging.tokenizer.vocabulary import build_vocabulary, embedding_rows

A, B, C = (ModelReference(name) for name in ("a", "b", "c"))
WORDS = {"a": ["u", "x", "y"], "b": ["u", "y", "z"], "c": ["u", "z", "w", "x"]}


def view(folder, words, rows=None, dim=4):
    """A model of a few words: row r of its embedding is filled with its number times 100 plus r."""
    if not folder.exists():
        vocabulary = {word: number for number, word in enumerate(words)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="u"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="u").save_pretrained(folder)
    shape = (rows or len(words), dim)
    embedding = SimpleNamespace(shape=shape, dtype="F32")
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": SimpleNamespace(shape=(dim,))}
    return SimpleNamespace(path=folder, config={"vocab_size": shape[0]}, tensors=tensors)


def matrix(number, rows, dim=4, dtype=torch.float32):
    return (
        (torch.arange(rows, dtype=torch.float32) + 100 * number)[:, None].expand(rows, dim).to(dtype).clone()
    )


@pytest.fixture
def three(tmp_path):
    return [view(tmp_path / name, words) for name, words in WORDS.items()]


def choice(source="union", tokens=None, pad=None):
    return TokenizerChoice(source=source, tokens=tokens or {}, pad_to_multiple_of=pad)


def built(views, wanted, base=None):
    return build_vocabulary(wanted, views, [A, B, C][: len(views)], base)


def columns(vocabulary, **changes):
    """First column of each model's aligned matrix, as lists."""
    tensors = [
        changes.get(name, matrix(i, rows))
        for i, (name, rows) in enumerate(zip("abc", vocabulary.rows, strict=False))
    ]
    return [tensor[:, 0].tolist() for tensor in vocabulary.align(tensors)]


def test_union_without_base(three):
    vocabulary = built(three, choice())
    assert dict(vocabulary.tokens) == {"u": 0, "x": 1, "y": 2, "z": 3, "w": 4}
    z = (102 + 201) / 2
    x = (1 + 203) / 2
    y = (2 + 101) / 2
    w = 202
    assert columns(vocabulary) == [[0, 1, 2, z, w], [100, x, 101, 102, w], [200, 203, y, 201, 202]]


def test_the_base_fills_in_where_it_has_the_token(three):
    vocabulary = built(three, choice(), base=1)
    assert dict(vocabulary.tokens) == {"u": 0, "y": 1, "z": 2, "x": 3, "w": 4}
    x = (1 + 203) / 2
    assert columns(vocabulary) == [[0, 2, 102, 1, 202], [100, 101, 102, x, 202], [200, 101, 201, 203, 202]]
    rules = [model["defaults"] for model in vocabulary.report()["models"]]
    assert [(counts["base"], counts["only"], counts["mean"]) for counts in rules] == [
        (1, 1, 0),
        (0, 1, 1),
        (1, 0, 0),
    ]


def test_named_and_base_sources_keep_that_models_tokens(three):
    named = built(three, choice(C))
    assert dict(named.tokens) == {"u": 0, "z": 1, "w": 2, "x": 3} and named.source == 2
    assert columns(named)[1] == [100, 102, 202, (1 + 203) / 2]
    assert dict(built(three, choice("base"), base=1).tokens) == {"u": 0, "y": 1, "z": 2}
    assert dict(built(three, choice("base")).tokens) == {"u": 0, "x": 1, "y": 2}
    assert named.report()["models"][0]["dropped"] == 1  # y


def test_what_the_configuration_says_of_a_token(three):
    tokens = {
        "x": TokenChoice(B and ModelToken(B, token="z")),
        "y": TokenChoice(A, force=True),
        "z": TokenChoice("zero"),
        "w": TokenChoice(ModelToken(A, token_id=1), force=True),
        "new": TokenChoice(ModelToken(C, token="w")),
        "void": TokenChoice(None),
    }
    vocabulary = built(three, choice(tokens=tokens))
    assert list(vocabulary.tokens) == ["u", "x", "y", "z", "w", "new", "void"]
    assert columns(vocabulary) == [
        [0, 1, 2, 0, 1, 202, 0],
        [100, 102, 2, 102, 1, 202, 0],
        [200, 203, 2, 201, 1, 202, 0],
    ]
    counted = vocabulary.report()["models"][1]
    assert counted["defaults"] == {"set": 4, "only": 0, "base": 0, "mean": 0, "zero": 1}


def test_a_forced_token_without_a_source_takes_its_default_everywhere(three):
    vocabulary = built(three, choice(tokens={"z": TokenChoice(None, force=True)}))
    z = (102 + 201) / 2
    assert [column[3] for column in columns(vocabulary)] == [z, z, z]


def test_equal_tokenizers_cost_nothing(tmp_path):
    items = [view(tmp_path / "same", WORDS["a"]) for _ in range(2)]
    for wanted in (choice(), choice("base"), choice(B)):
        vocabulary = built(items, wanted, base=0)
        tensors = [matrix(0, 3), matrix(1, 3)]
        assert all(out is into for out, into in zip(vocabulary.align(tensors), tensors, strict=True))
        assert vocabulary.identity == (True, True) and vocabulary.report()["models"][1]["unchanged"]


def test_padding_never_shrinks(tmp_path):
    items = [view(tmp_path / "a", WORDS["a"], rows=8), view(tmp_path / "same", WORDS["a"], rows=4)]
    vocabulary = built(items, choice("base"), base=0)
    assert vocabulary.size == 8 and vocabulary.report()["padding"] == 5
    mean = (100 + 101 + 102) / 3
    assert columns(vocabulary) == [[0, 1, 2, 3, 4, 5, 6, 7], [100, 101, 102, 103, mean, mean, mean, mean]]
    assert vocabulary.identity == (True, False)
    other = built([items[0], view(tmp_path / "b", [*WORDS["b"], "q"], rows=5)], choice("base"), base=0)
    mean = float(torch.tensor((100 + 1 + 101) / 3))  # row 3 is a token of its own there, row 4 is free
    assert columns(other)[1] == [100, 1, 101, mean, 104, mean, mean, mean]
    assert built(items, choice("base", pad=6), base=0).size == 12
    assert built(items, choice("base", pad=4), base=0).size == 8
    assert built(items, choice(B), base=0).size == 4


def test_new_tokens_go_into_the_padding(tmp_path):
    items = [view(tmp_path / "a", WORDS["a"], rows=8), view(tmp_path / "b", WORDS["b"])]
    vocabulary = built(items, choice(), base=0)
    assert vocabulary.size == 8 and vocabulary.tokens["z"] == 3
    assert columns(vocabulary)[0] == [0, 1, 2, 102, 4, 5, 6, 7]


def test_a_token_beyond_its_models_rows_is_one_that_it_lacks(tmp_path):
    items = [view(tmp_path / "a", WORDS["a"], rows=2), view(tmp_path / "b", WORDS["b"])]
    vocabulary = built(items, choice("base"), base=0)
    assert vocabulary.size == 3
    assert columns(vocabulary) == [[0, 1, 101], [100, 1, 101]]
    alone = built(items[:1], choice("base"), base=0)
    assert dict(alone.tokens) == {"u": 0, "x": 1}  # y: no model has a row for it
    assert columns(alone) == [[0, 1]]


def padded(folder, extra, rows, words=("u", "x", "y")):
    """A model of ``rows`` rows whose tokenizer has further added tokens, the last of them for padding."""
    result = view(folder, words, rows=rows)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(extra[:-1])
    tokenizer.add_special_tokens({"pad_token": extra[-1]})
    tokenizer.save_pretrained(folder)
    return result


@pytest.mark.parametrize("base", [0, 1])
def test_a_token_that_no_model_has_a_row_for_is_dropped(tmp_path, base):
    """A head row of zeros would have the logit 0, and could be drawn."""
    unused = padded(tmp_path / "a", ["<a>", "<b>", "<pad>"], rows=3)
    items = [unused, view(tmp_path / "b", [*WORDS["b"], "<a>"])]
    vocabulary = built(items, choice(), base=base)
    assert set(vocabulary.tokens) == {"u", "x", "y", "z", "<a>"}  # <a> has a row in the other
    assert vocabulary.size == 5 and (vocabulary.token_rows.rules >= 0).all()
    assert sum(model["defaults"]["zero"] for model in vocabulary.report()["models"]) == 0
    out = tmp_path / "out"
    out.mkdir()
    vocabulary.write(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.get_vocab() == dict(vocabulary.tokens) and tokenizer.pad_token is None


def test_a_dropped_token_comes_back_where_the_configuration_names_it(tmp_path):
    items = [padded(tmp_path / "a", ["<a>", "<pad>"], rows=3), view(tmp_path / "b", WORDS["b"])]
    wish = {"<pad>": TokenChoice(ModelToken(A, token="u"))}
    vocabulary = built(items, choice(tokens=wish), base=0)
    assert "<a>" not in vocabulary.tokens and vocabulary.tokens["<pad>"] == 4
    assert columns(vocabulary)[1][4] == 0


def test_a_tokenizer_of_python_code_keeps_its_tokens_with_the_mean_for_a_row(tmp_path, monkeypatch):
    from attar.merging.tokenizer import vocabulary as module

    items = [padded(tmp_path / "a", ["<pad>"], rows=3)]
    read = module.read_tokenizer
    monkeypatch.setattr(module, "read_tokenizer", lambda path: replace(read(path), backend=None))
    kept = built(items, choice("base"), base=0)
    assert kept.tokens["<pad>"] == 3 and columns(kept) == [[0, 1, 2, 1]]


def test_biases_types_and_inputs(three):
    vocabulary = built(three, choice())
    biases = [torch.tensor([0.0, 1, 2]), torch.tensor([10.0, 11, 12]), torch.tensor([20.0, 21, 22, 23])]
    kept = [bias.clone() for bias in biases]
    aligned = vocabulary.align(biases)
    assert aligned[1].tolist() == [10, 12, 11, 12, 22]
    assert all(torch.equal(one, other) for one, other in zip(biases, kept, strict=True))
    half = vocabulary.align([matrix(i, rows, dtype=torch.bfloat16) for i, rows in enumerate(vocabulary.rows)])
    assert {tensor.dtype for tensor in half} == {torch.bfloat16}
    assert half[0][3, 0] == torch.tensor((102 + 201) / 2, dtype=torch.bfloat16)


def test_a_model_that_takes_no_part_gives_nothing(three):
    vocabulary = built(three, choice())
    aligned = vocabulary.align([matrix(0, 3), None, matrix(2, 4)])
    assert aligned[1] is None and aligned[0][:, 0].tolist() == [0, 1, 2, 201, 202]


def test_rows_are_those_of_the_embedding_of_tokens():
    shapes = {"transformer.wpe.weight": (64, 8), "transformer.wte.weight": (40, 8), "lm_head.weight": (50, 8)}
    tensors = {name: SimpleNamespace(shape=shape) for name, shape in shapes.items()}
    assert embedding_rows(SimpleNamespace(path="p", config={}, tensors=tensors)) == 40


def test_files_and_table(three, tmp_path):
    vocabulary = built(three, choice())
    out = tmp_path / "out"
    out.mkdir()
    assert vocabulary.write(out) == ["tokenizer.json", "tokenizer_config.json"]
    lines = vocabulary.table().splitlines()
    assert "5 tokens in 5 rows (0 of padding), from the tokenizer of a" in lines[0]
    assert (
        " ".join(lines[1].split()) == "model tokens rows shared alone missing dropped set only base mean zero"
    )
    assert lines[2].split() == ["a", "3", "3", "3", "0", "2", "0", "0", "1", "0", "1", "0"]


@pytest.mark.parametrize(
    ("wanted", "error", "words"),
    [
        (choice(ModelReference("aa")), RecipeError, "no model 'aa'"),
        (choice(pad=0), SettingsError, "pad_to_multiple_of"),
        (choice("unoin"), SettingsError, "union"),
        (choice(tokens={"x": TokenChoice(B, where="m.yml:7")}), RecipeError, "m.yml:7: .*b has no token 'x'"),
        (choice(tokens={"x": TokenChoice(ModelToken(A, token_id=3))}), RecipeError, "rows 0 to 2"),
        (choice(tokens={"x": TokenChoice(ModelToken(A, token="q"))}), RecipeError, "a has no token 'q'"),
    ],
)
def test_bad_choices_are_named(three, wanted, error, words):
    with pytest.raises(error, match=words):
        built(three, wanted)


def test_bad_matrices_are_named(three):
    vocabulary = built(three, choice())
    with pytest.raises(ModelError, match="a: a matrix of shape"):
        vocabulary.align([matrix(0, 5), None, None])
    with pytest.raises(ModelError, match="width"):
        vocabulary.align([matrix(0, 3), matrix(1, 3, dim=5), None])
    with pytest.raises(ModelError, match="no embedding"):
        embedding_rows(SimpleNamespace(path="p", config={}, tensors={}))
