"""Tokenizers into GGUF metadata and back, against the tokenizers library; and what is refused."""

import json
import random
import struct
from itertools import pairwise

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from attar.checkpoint import open_checkpoint
from attar.errors import CheckpointError, ModelError, SettingsError
from attar.formats.byte_alphabet import BYTE_ALPHABET
from attar.formats.gguf.tokenizer import pretokenizers
from attar.formats.gguf.tokenizer.files import read_tokenizer_files
from attar.formats.gguf.tokenizer.from_gguf import write_tokenizer
from attar.formats.gguf.tokenizer.pretokenizer_table import CODED, GPT2, LLAMA3, QWEN2, TABLE
from attar.formats.gguf.tokenizer.sentencepiece import read_model
from attar.formats.gguf.tokenizer.to_gguf import (
    PIPELINE,
    tokenizer_differences,
)
from attar.formats.gguf.tokenizer.vocabulary import (
    apply_merges,
    merge_scores,
    merges_make_all,
    merges_of,
    read_merges,
)
from tests.formats.gguf import making
from tests.formats.gguf.making import (
    NASTY,
    byte_level,
    save,
    sentencepiece_bpe,
    template,
    tokenizer_metadata,
    unigram,
)

END = {"eos_token": "<|endoftext|>"}
SPM = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
T5 = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def bare(metadata):
    return {key: getattr(value, "value", value) for key, value in metadata.items()}


def made(folder, content, settings, size=None, **more):
    return bare(tokenizer_metadata(save(folder, content, **settings), {"vocab_size": size}, **more))


def library(folder):
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def back(folder, metadata, *, as_ours=True):
    """The tokenizer written from metadata, or from what a foreign writer would have put there."""
    folder.mkdir(exist_ok=True)
    write_tokenizer({k: v for k, v in metadata.items() if as_ours or k != PIPELINE}, folder)
    return library(folder)


def assert_same(one, other, texts=NASTY):
    """The same ids, with and without special tokens recognised and added, and the same texts from them."""
    for text in texts:
        for special in (False, True):
            ids = one.encode(text, add_special_tokens=special).ids
            assert other.encode(text, add_special_tokens=special).ids == ids, text
        assert other.decode(ids, skip_special_tokens=False) == one.decode(ids, skip_special_tokens=False)
    one.encode_special_tokens = other.encode_special_tokens = True
    for text in texts:
        assert other.encode(text).ids == one.encode(text).ids, text


@pytest.mark.few(6)
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_byte_level_tokenizers_come_back(row, tmp_path):
    normalizer = {"type": "NFC"} if row.composed else None
    content = byte_level(row.name, ignore_merges=row.ignore_merges, normalizer=normalizer)
    metadata = made(tmp_path / "in", content, END, 1000)
    assert metadata["tokenizer.ggml.model"] == "gpt2"
    assert pretokenizers.by_name(metadata["tokenizer.ggml.pre"]).rules == row.rules
    assert len(metadata["tokenizer.ggml.tokens"]) == 1000
    for as_ours in (True, False):
        got = back(tmp_path / "out", metadata, as_ours=as_ours)
        assert_same(library(tmp_path / "in"), got)


@pytest.mark.few(2)
@pytest.mark.parametrize("scheme", [None, "always", "first", "never", "gemma"])
def test_sentencepiece_tokenizers_come_back(scheme, tmp_path):
    content = template(sentencepiece_bpe(scheme=scheme), before=["<s>"])
    metadata = made(tmp_path / "in", content, SPM, 800)
    assert metadata["tokenizer.ggml.model"] == "llama"
    assert metadata["tokenizer.ggml.add_space_prefix"] is (scheme not in ("never", "gemma"))
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    types = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True))
    assert (types["<unk>"], types["<s>"], types["<0x0A>"], types[making.USER]) == (2, 3, 6, 4)
    assert_same(library(tmp_path / "in"), back(tmp_path / "out", metadata))
    foreign = back(tmp_path / "out", metadata, as_ours=False)
    metaspace = scheme in ("always", "first")  # puts no space before one; llama.cpp has no key for that
    texts = [text for text in NASTY if not metaspace or (text[:1] not in (" ", "▁") and "<" not in text)]
    assert_same(library(tmp_path / "in"), foreign, [text for text in texts if making.USER not in text])


def test_a_unigram_model_comes_back(tmp_path):
    metadata = made(tmp_path / "in", template(unigram(), after=["</s>"]), T5, 2000)
    assert metadata["tokenizer.ggml.model"] == "t5"
    assert metadata["tokenizer.ggml.remove_extra_whitespaces"] is True
    assert metadata["tokenizer.ggml.add_eos_token"] is True
    charsmap = making.charsmap({9: " ", 10: " ", 13: " "})
    assert bytes(metadata["tokenizer.ggml.precompiled_charsmap"]) == charsmap
    assert_same(library(tmp_path / "in"), back(tmp_path / "out", metadata))
    foreign = back(tmp_path / "out", metadata, as_ours=False)
    for text in NASTY:
        if not text.startswith("▁"):
            assert foreign.encode(text).ids == library(tmp_path / "in").encode(text).ids, text


def test_the_embedded_model(tmp_path):
    checkpoint = open_checkpoint("attar:tiny")
    metadata = bare(tokenizer_metadata(checkpoint.path, checkpoint.config))
    assert metadata["tokenizer.ggml.pre"] == "smollm"
    assert len(metadata["tokenizer.ggml.tokens"]) == checkpoint.config["vocab_size"]
    assert metadata["tokenizer.ggml.tokens"][0] == "<|endoftext|>"
    assert metadata["tokenizer.ggml.token_type"].count(3) == 1
    assert metadata["tokenizer.ggml.eos_token_id"] == metadata["tokenizer.ggml.bos_token_id"] == 0
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    merges = json.loads((checkpoint.path / "tokenizer.json").read_text())["model"]["merges"]
    assert metadata["tokenizer.ggml.merges"] == [" ".join(pair) for pair in merges]
    for as_ours in (True, False):
        assert_same(library(checkpoint.path), back(tmp_path / "out", metadata, as_ours=as_ours))


@pytest.mark.few(4)
@pytest.mark.parametrize("model_type", [None, "llama", "gemma2", "mistral"])
@pytest.mark.parametrize("kind", ["bpe", "spm", "unigram"])
def test_transformers_loads_what_comes_back(kind, model_type, tmp_path):
    content, settings = {
        "bpe": (byte_level("qwen2"), END),
        "spm": (template(sentencepiece_bpe(), before=["<s>"]), SPM),
        "unigram": (template(unigram(), after=["</s>"]), T5),
    }[kind]
    metadata = made(tmp_path / "in", content, settings)
    back(tmp_path / "out", {**metadata, "llama.context_length": 77})
    if model_type:
        (tmp_path / "out" / "config.json").write_text(json.dumps({"model_type": model_type}))
    one, other = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("in", "out"))
    assert other.model_max_length == 77
    assert other.eos_token == one.eos_token and other.bos_token == one.bos_token
    for text in NASTY:
        assert other.encode(text) == one.encode(text)
        assert other.decode(other.encode(text)) == one.decode(one.encode(text))


# ---- recognition


def split(regex, behavior="Isolated", invert=False):
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": invert}


def level(use_regex=False, add_prefix_space=False):
    return {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def sequence(*steps):
    return {"type": "Sequence", "pretokenizers": list(steps)}


CASED = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
POSSESSIVE = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
SPELLINGS = [
    (sequence(split(LLAMA3), level()), False, "dbrx"),
    (sequence(split(LLAMA3), level()), True, "llama-bpe"),
    (sequence(split(LLAMA3, "Removed", True), level()), True, "llama-bpe"),
    (sequence(split(POSSESSIVE), level()), False, "dbrx"),
    (sequence(split(QWEN2.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)", CASED)), level()), False, "qwen2"),
    (sequence(split(QWEN2.replace(r"\r\n", "\r\n")), level()), False, "qwen2"),
    (sequence(split(GPT2), level()), False, "gpt-2"),
    (level(True), False, "gpt-2"),
    (sequence(sequence({"type": "Digits", "individual_digits": True}), level(True)), False, "smollm"),
    (sequence(split(r"\p{N}"), split(GPT2), level()), False, "smollm"),
    (
        sequence(
            {"type": "Punctuation", "behavior": "Contiguous"},
            level(True),
            {"type": "Digits", "individual_digits": False},
            split("[0-9][0-9][0-9]"),
        ),
        False,
        "falcon",
    ),
    (sequence(split(" ?[^(\\s|[.,!?…。，、।۔،])]+"), level()), False, "bloom"),
]


@pytest.mark.parametrize(("tree", "ignore_merges", "name"), SPELLINGS)
def test_spellings_of_a_pre_tokenizer_are_recognised(tree, ignore_merges, name):
    assert pretokenizers.recognise(tree, ignore_merges, lambda: False, "x") == name


@pytest.mark.parametrize(("tree", "name"), [(tree, name) for tree, _, name in SPELLINGS if name != "falcon"])
def test_spellings_that_are_taken_for_the_same_cut_alike(tree, name):
    mine, theirs = (
        making._stage("pre_tokenizer", step) for step in (tree, pretokenizers.pre_tokenizer(name))
    )
    signs = [
        "a",
        "B",
        "é",
        "1",
        "23",
        "٣",
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "'s",
        "'LL",
        "'",
        "!",
        "._",
        "中",
        "\u0301",
    ]
    generator = random.Random(0)
    for text in [*NASTY, *("".join(generator.choices(signs, k=12)) for _ in range(400))]:
        assert mine.pre_tokenize_str(text) == theirs.pre_tokenize_str(text), text


def test_a_repeated_count_is_not_possessive():
    assert pretokenizers.canonical_regex(r"\p{N}{1,3}+") == r"\p{N}{1,3}+"
    cutter = making._stage("pre_tokenizer", split(r"\p{N}{1,3}+"))
    assert [piece for piece, _ in cutter.pre_tokenize_str("a12345")] == ["a", "12345"]


def test_a_rule_on_bytes_is_not_the_rule_on_text():
    tree = sequence(level(True), {"type": "Digits", "individual_digits": True})
    assert pretokenizers.pre_tokenizer_rules(tree) == (GPT2, CODED + r"\p{N}")
    with pytest.raises(ModelError, match="bytes: "):
        pretokenizers.recognise(tree, False, lambda: True, "x")


def test_an_unknown_pre_tokenizer_is_refused_by_name_with_the_nearest(tmp_path):
    odd = LLAMA3.replace("{1,3}", "{1,2}")
    content = byte_level(sequence(split(odd), level()))
    with pytest.raises(ModelError) as error:
        made(tmp_path, content, END)
    assert odd in error.value.message and "tokenizer.json" in error.value.message
    assert "'llama-bpe' makes 9" in error.value.hint and "--pretokenizer" in error.value.hint
    assert made(tmp_path, content, END, pre="dbrx")["tokenizer.ggml.pre"] == "dbrx"
    with pytest.raises(SettingsError, match="llama-bpe"):
        made(tmp_path, content, END, pre="llama-4")


@pytest.mark.parametrize(
    "tree",
    [
        level(True, add_prefix_space=True),
        {"type": "Whitespace"},
        sequence(split(QWEN2, "Removed"), level()),
        sequence(split(QWEN2, "MergedWithPrevious"), level()),
        sequence(split(QWEN2, "Isolated", True), level()),
        sequence(
            {"type": "Split", "pattern": {"String": GPT2}, "behavior": "Isolated", "invert": False}, level()
        ),
        sequence({"type": "Punctuation", "behavior": "Isolated"}, level(True)),
        None,
    ],
)
def test_steps_that_cut_in_another_way_are_refused(tree):
    with pytest.raises(ModelError, match="has no pre_tokenizer"):
        pretokenizers.recognise(tree, False, lambda: True, "x")


@pytest.mark.slow
def test_the_nearest_is_itself_for_each():
    for row in TABLE:
        name, share = pretokenizers.nearest_pre_tokenizer(pretokenizers.pre_tokenizer(row.name))
        assert share == 1.0
        assert row.rules == pretokenizers.by_name(name).rules


def test_ignore_merges_counts_only_where_a_token_is_not_made_by_merges(tmp_path):
    content = byte_level("tekken", ignore_merges=False)
    assert made(tmp_path, content, END)["tokenizer.ggml.pre"] == "tekken"
    content["added_tokens"].pop()  # it would get another id
    content["model"]["vocab"]["zqzq"] = 902
    with pytest.raises(ModelError, match="ignore_merges=True"):
        made(tmp_path, content, END)
    content["model"]["ignore_merges"] = True
    assert made(tmp_path, content, END)["tokenizer.ggml.pre"] == "tekken"


# ---- merges and scores


def test_both_spellings_of_merges():
    assert read_merges(["a b", "ab c"], "x") == {("a", "b"): 0, ("ab", "c"): 1}
    assert read_merges([["a", "b"], ["a b", "c"]], "x") == {("a", "b"): 0, ("a b", "c"): 1}
    assert list(read_merges(["a b", "c d", "a b"], "x")) == [("c", "d"), ("a", "b")]
    with pytest.raises(CheckpointError, match=r"x: merge 1 .*'a b c'"):
        read_merges(["a b", "a b c"], "x")


def test_a_token_with_a_space_keeps_its_id_and_harms_no_merge(tmp_path):
    content = byte_level("gpt-2")
    vocabulary, merges = content["model"]["vocab"], content["model"]["merges"]
    vocabulary["a b"] = size = len(vocabulary)
    merges.insert(0, ["a b", "c"])
    vocabulary["a bc"] = size + 1
    content["added_tokens"].pop()  # it had that id
    metadata = made(tmp_path / "in", content, END)
    assert metadata["tokenizer.ggml.tokens"][size] == f"a{BYTE_ALPHABET[32]}b"
    assert all(merge.count(" ") == 1 for merge in metadata["tokenizer.ggml.merges"])
    assert_same(library(tmp_path / "in"), back(tmp_path / "out", metadata))


def joined_by_score(text, score):
    """llama.cpp's SentencePiece, as its description says: the neighbours whose text is the best token."""
    symbols = list(text)
    while True:
        results = [(score[a + b], -index) for index, (a, b) in enumerate(pairwise(symbols)) if a + b in score]
        if not results:
            return symbols
        index = -max(results)[1]
        symbols[index : index + 2] = [symbols[index] + symbols[index + 1]]


def random_merges(generator, letters, count):
    """Merges as training makes them: of tokens that are there, each token once."""
    tokens, pairs = list(letters), []
    while len(pairs) < count:
        pair = (generator.choice(tokens), generator.choice(tokens))
        if "".join(pair) not in tokens:
            tokens.append("".join(pair))
            pairs.append(pair)
    return tokens, pairs


@pytest.mark.parametrize("seed", range(40))
def test_scores_do_what_merges_do(seed):
    generator = random.Random(seed)
    tokens, pairs = random_merges(generator, "abc", 12)
    ranks = read_merges(pairs, "x")
    texts = ["".join(generator.choices("abc", k=14)) for _ in range(60)]
    if any(len(apply_merges(token, ranks)[0]) == 2 for token in tokens):
        with pytest.raises(ModelError, match="would join"):
            merge_scores(tokens, ranks, "x")
        return
    score = dict(zip(tokens, merge_scores(tokens, ranks, "x"), strict=True))
    for text in texts:
        assert joined_by_score(text, score) == apply_merges(text, ranks)[0], text


def test_the_scores_of_random_merges_are_tried_both_ways():
    kinds = set()
    for seed in range(40):
        tokens, pairs = random_merges(random.Random(seed), "abc", 12)
        kinds.add(any(len(apply_merges(token, read_merges(pairs, "x"))[0]) == 2 for token in tokens))
    assert kinds == {True, False}


@pytest.mark.parametrize("seed", range(20))
def test_merges_do_what_scores_do(seed):
    generator = random.Random(seed)
    words = {"".join(generator.choices("abc", k=length)) for length in (2, 2, 2, 3, 3, 4, 4, 5, 6)}
    tokens = [*"abc", *sorted(words)]
    score = {token: -float(index) for index, token in enumerate(generator.sample(tokens, len(tokens)))}
    ranks = read_merges(merges_of(tokens, score), "x")
    for _ in range(60):
        text = "".join(generator.choices("abc", k=14))
        assert apply_merges(text, ranks)[0] == joined_by_score(text, score), text


def test_derive_is_what_the_library_does():
    content = byte_level("gpt-2")
    tokenizer = Tokenizer.from_str(json.dumps({**content, "added_tokens": [], "pre_tokenizer": level()}))
    ranks = read_merges(content["model"]["merges"], "x")
    for text in NASTY[1:]:
        coded = "".join(BYTE_ALPHABET[byte] for byte in text.encode())
        assert apply_merges(coded, ranks)[0] == tokenizer.encode(text).tokens
    assert merges_make_all(content["model"]["vocab"].keys() - set(making.SPECIAL), ranks)
    assert not merges_make_all(["<|user|>"], ranks)


# ---- SentencePiece files


def varint(number):
    out = b""
    number &= (1 << 64) - 1
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    raw = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(raw)) + raw


def model_bytes(pieces, *, kind=2, trainer=b"", normalizer=b""):
    """A SentencePiece model, written by the protocol buffers' rules; unknown fields of all kinds among it."""
    raw = b"".join(field(1, field(1, t) + field(2, s) + field(3, k)) for t, s, k in pieces)
    spec = field(3, kind) + field(10, 0.5) + field(40, 0) + field(43, -1) + trainer
    unknown = field(90, 7) + field(91, b"x" * 200) + varint(92 << 3 | 1) + bytes(8)
    return raw + field(2, spec) + unknown + field(3, field(1, "identity") + normalizer)


PIECES = [
    ("<unk>", 0.0, 2),
    ("<s>", 0.0, 3),
    ("</s>", 0.0, 3),
    ("▁a", -0.5, 1),
    ("日本", -1.25, 1),
    ("x y", 0.0, 4),
]


def test_a_sentencepiece_model_is_read(tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(
        model_bytes(PIECES, trainer=field(35, 1) + field(24, 1), normalizer=field(2, b"\0\xff") + field(4, 0))
    )
    read = read_model(path)
    assert list(zip(read.pieces, read.scores, read.types, strict=True)) == PIECES
    assert read.kind == 2 and read.byte_fallback and read.treat_whitespace_as_suffix
    assert read.ids == {"unk": 0, "bos": 1, "eos": 2}
    assert read.charsmap == b"\0\xff" and read.add_dummy_prefix and not read.remove_extra_whitespaces


def test_defaults_of_a_sentencepiece_model(tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(field(1, field(1, "a")) + field(1, field(1, "b")))
    read = read_model(path)
    assert (read.scores, read.types, read.kind) == ([0.0, 0.0], [1, 1], 1)
    assert read.add_dummy_prefix and read.remove_extra_whitespaces and not read.byte_fallback


def test_a_damaged_sentencepiece_model_is_refused_by_name(tmp_path):
    path = tmp_path / "tokenizer.model"
    whole = model_bytes(PIECES)
    refused = 0
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        try:
            read = read_model(path)
        except CheckpointError as error:
            assert "tokenizer.model: no SentencePiece model" in error.message
            refused += 1
        else:
            assert read.pieces == [piece[0] for piece in PIECES][: len(read.pieces)]
    assert refused > 0.8 * len(whole)
    path.write_bytes(b"IQ== 0\nIg== 1\n" * 20)  # a list for tiktoken
    with pytest.raises(CheckpointError, match="no SentencePiece model"):
        read_model(path)


def as_model(content):
    """The SentencePiece file that a tokenizer.json was made of."""
    vocabulary = content["model"]["vocab"]
    ranks = read_merges(content["model"]["merges"], "x")
    made = {"".join(pair): -float(rank) for pair, rank in reversed(ranks.items())}
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3}
    return model_bytes(
        [
            (text, made.get(text, -5000.0), 6 if text.startswith("<0x") else kinds.get(text, 1))
            for text in sorted(vocabulary, key=vocabulary.get)
        ],
        trainer=field(35, 1),
        normalizer=field(4, 0),
    )


def test_a_folder_with_both_files_takes_the_scores_of_the_model(tmp_path):
    content = template(sentencepiece_bpe(), before=["<s>"])
    save(tmp_path / "in", content, **SPM)
    (tmp_path / "in" / "tokenizer.model").write_bytes(as_model(content))
    metadata = bare(tokenizer_metadata(tmp_path / "in", {"vocab_size": 800}))
    assert -5000.0 in metadata["tokenizer.ggml.scores"]
    assert metadata["tokenizer.ggml.tokens"][799] == "[PAD799]"
    assert_same(library(tmp_path / "in"), back(tmp_path / "out", metadata))
    content["model"]["vocab"]["other"] = content["model"]["vocab"].pop("▁a")
    content["model"]["merges"] = [m for m in content["model"]["merges"] if "▁a" not in ("".join(m), *m)]
    save(tmp_path / "in", content, **SPM)
    with pytest.raises(ModelError, match=r"'other', but tokenizer\.model has another"):
        tokenizer_metadata(tmp_path / "in", {})


def test_a_folder_with_a_sentencepiece_model_alone(tmp_path):
    content = template(sentencepiece_bpe(), before=["<s>"])
    save(tmp_path / "in", content, **SPM)
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "tokenizer.model").write_bytes(as_model(content))
    added = {str(t["id"]): {**t} for t in content["added_tokens"]}
    (alone / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": added, "add_bos_token": True})
    )
    metadata = bare(tokenizer_metadata(alone, {}))
    assert metadata["tokenizer.ggml.eos_token_id"] == 2
    assert PIPELINE not in metadata
    assert_same(library(tmp_path / "in"), back(tmp_path / "out", metadata))
    (alone / "tokenizer.model").write_bytes(as_model(content) + field(3, field(4, 1)))
    with pytest.raises(ModelError, match="its normalizer changes a text"):
        tokenizer_metadata(alone, {})


def test_user_defined_spaces_are_written_as_spaces(tmp_path):
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("▁▁", 0.0, 4), ("\n\n", 0.0, 4)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)] + [("▁", -2.0, 1), ("a", -1.0, 1)]
    normalizer = field(3, 0) + field(4, 0)
    (tmp_path / "tokenizer.model").write_bytes(
        model_bytes(pieces, trainer=field(35, 1), normalizer=normalizer)
    )
    metadata = bare(tokenizer_metadata(tmp_path, {}))
    assert (
        metadata["tokenizer.ggml.tokens"][3] == "  " and metadata["tokenizer.ggml.add_space_prefix"] is False
    )
    got = back(tmp_path / "out", metadata)
    assert got.encode("a   a\n\n").ids == [262, 3, 261, 262, 4]
    assert got.decode([262, 3, 261, 262, 4]) == "a   a\n\n"
    content = sentencepiece_bpe(scheme="gemma")
    index = content["model"]["vocab"]["▁▁"]
    content["added_tokens"].append({**content["added_tokens"][-1], "id": index, "content": "▁▁"})
    metadata = made(tmp_path / "json", content, SPM)
    assert metadata["tokenizer.ggml.tokens"][index] == "  "
    assert metadata["tokenizer.ggml.token_type"][index] == 4


# ---- special tokens, templates, padding


def tokens(folder, settings, config=None, generation=None, content=None):
    save(
        folder,
        content or byte_level("gpt-2", specials=(*making.SPECIAL, "<|eot_id|>", "<|eom_id|>")),
        **settings,
    )
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    actual = bare(tokenizer_metadata(folder, config or {}))
    return {
        key.removeprefix("tokenizer.ggml.").removesuffix("_token_id"): value
        for key, value in actual.items()
        if key.endswith("_id")
    }


def test_ids_come_from_names_then_from_the_config(tmp_path):
    named = {"bos_token": {"content": "<|user|>"}, "eos_token": "<|end|>", "pad_token": "<|endoftext|>"}
    assert tokens(tmp_path, named, {"eos_token_id": 0, "sep_token_id": 2, "vocab_size": 1000}) == {
        "bos": 1,
        "eos": 3,
        "padding": 0,
        "seperator": 2,
        "eot": 4,
        "eom": 5,
    }
    actual_tokens = tokens(tmp_path, {}, {"text_config": {"eos_token_id": [2, 3], "bos_token_id": 1}})
    assert (actual_tokens["bos"], actual_tokens["eos"]) == (1, 2)


def test_further_ends_take_the_places_that_llama_cpp_has(tmp_path):
    actual_tokens = tokens(tmp_path, END, generation={"eos_token_id": [0, 3, 5]})
    assert (actual_tokens["eos"], actual_tokens["eot"], actual_tokens["eom"]) == (0, 3, 5)
    content = byte_level("gpt-2")
    actual_tokens = tokens(tmp_path, END, generation={"eos_token_id": [0, 3, 2]}, content=content)
    assert (actual_tokens["eos"], actual_tokens["eot"], actual_tokens["eom"]) == (0, 3, 2)


def test_llama_cpp_would_invent_an_end_where_there_is_none(tmp_path):
    with pytest.raises(ModelError, match="no token ends a text"):
        tokens(tmp_path, {})


def test_what_is_put_around_a_text(tmp_path):
    content = byte_level("gpt-2")
    settings = {**END, "bos_token": "<|user|>"}

    def around(content, **more):
        result = made(tmp_path, content, {**settings, **more})
        return result["tokenizer.ggml.add_bos_token"], result["tokenizer.ggml.add_eos_token"]

    assert around(content) == (False, False)
    assert around(content, add_bos_token=True) == (True, False)
    both = template(content, before=["<|user|>"], after=["<|endoftext|>"])
    assert around(both) == (True, True)
    assert around(both, add_bos_token=False) == (True, True)
    nested = {"type": "Sequence", "processors": [level(), both["post_processor"]]}
    assert around({**content, "post_processor": nested}) == (True, True)
    with pytest.raises(ModelError, match=r"puts <\|assistant\|> before a text"):
        around(template(content, before=["<|assistant|>"]))
    with pytest.raises(ModelError, match=r"puts <\|user\|> <\|assistant\|> before"):
        around(template(content, before=["<|user|>", "<|assistant|>"]))


def test_chat_templates(tmp_path):
    content = byte_level("gpt-2")
    result = made(tmp_path, content, {**END, "chat_template": "{{ 1 }}"})
    assert result["tokenizer.chat_template"] == "{{ 1 }}"
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == "{{ 1 }}"
    named = [{"name": "default", "template": "A"}, {"name": "tool-use", "template": "B"}]
    result = made(tmp_path, content, {**END, "chat_template": named})
    assert result["tokenizer.chat_template"] == "A" and result["tokenizer.chat_template.tool_use"] == "B"
    assert result.pop("tokenizer.chat_templates") == ["tool_use"]  # which some writers leave out
    back(tmp_path / "out", result)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == {"default": "A", "tool_use": "B"}
    (tmp_path / "chat_template.jinja").write_text("C")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("D")
    result = made(tmp_path, content, {**END, "chat_template": named})
    assert result["tokenizer.chat_template"] == "C" and result["tokenizer.chat_template.rag"] == "D"
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == {"default": "C", "rag": "D"}


def test_named_tokens_are_special_and_added_ones_keep_their_flags(tmp_path):
    content = byte_level("gpt-2")
    for token in content["added_tokens"]:
        token["rstrip"] = token["content"] == "<|user|>"
        token["special"] = token["content"] == "<|end|>"
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] != "<|assistant|>"]
    settings = {**END, "additional_special_tokens": ["<|assistant|>"]}
    result = made(tmp_path / "in", content, settings)
    assert result["tokenizer.ggml.token_type"][:4] == [3, 4, 3, 3]
    back(tmp_path / "out", result)
    tokens_back = json.loads((tmp_path / "out" / "tokenizer.json").read_text())["added_tokens"]
    assert [token["rstrip"] for token in tokens_back[:4]] == [False, True, False, False]
    one, other = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("in", "out"))
    for text in NASTY:
        assert other.encode(text) == one.encode(text)
    for text in NASTY:
        assert other.encode(text, split_special_tokens=True) == one.encode(text, split_special_tokens=True)


def test_as_many_tokens_as_the_embedding_has_rows(tmp_path):
    content = byte_level("gpt-2")
    gone, hole = next(
        (text, index)
        for text, index in reversed(content["model"]["vocab"].items())
        if index > 500 and not any(text in pair for pair in content["model"]["merges"])
    )
    del content["model"]["vocab"][gone]
    content["model"]["merges"] = [pair for pair in content["model"]["merges"] if "".join(pair) != gone]
    user = content["added_tokens"].pop()
    result = made(tmp_path / "in", content, END, 950)
    assert len(result["tokenizer.ggml.tokens"]) == 950
    assert result["tokenizer.ggml.tokens"][hole] == f"[PAD{hole}]"
    assert result["tokenizer.ggml.token_type"][hole] == result["tokenizer.ggml.token_type"][949] == 5
    assert_same(library(tmp_path / "in"), back(tmp_path / "out", result))
    content = byte_level("gpt-2")
    assert user in content["added_tokens"]
    result = made(tmp_path / "in", content, END, 900)  # the user-defined token has no row
    assert making.USER not in result["tokenizer.ggml.tokens"]
    with pytest.raises(ModelError, match="beyond vocab_size 700"):
        made(tmp_path / "in", content, END, 700)


def only_of_the_model(content):
    """A tokenizer.json without added tokens that the model does not have: a changed vocabulary changes
    their ids."""
    added = [token for token in content["added_tokens"] if token["content"] in content["model"]["vocab"]]
    return {**content, "added_tokens": added}


def test_texts_that_llama_cpp_cannot_hold(tmp_path):
    content = only_of_the_model(sentencepiece_bpe())
    size = max(content["model"]["vocab"].values()) + 9
    content["model"]["vocab"].update({"\0": size, "": size + 1})
    result = made(tmp_path, content, SPM)
    assert result["tokenizer.ggml.tokens"][size:] == [f"[PAD{size}]", f"[PAD{size + 1}]"]
    content["added_tokens"].append({"id": size + 2, "content": "[PAD" + str(size) + "]", "special": True})
    with pytest.raises(ModelError, match=f"tokens {size} and {size + 2} have the same text"):
        made(tmp_path, content, SPM)


# ---- what is refused


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda: {"model": {"type": "WordPiece", "vocab": {}}}, "model WordPiece"),
        (lambda: byte_level("gpt-2", normalizer={"type": "Lowercase"}), "normalizer Lowercase"),
        (lambda: byte_level("gpt-2", normalizer={"type": "NFKC"}), "normalizer NFKC"),
    ],
)
def test_byte_level_tokenizers_that_are_refused(content, message, tmp_path):
    with pytest.raises(ModelError, match=message):
        made(tmp_path, content(), END)


def test_models_that_are_refused(tmp_path):
    content = only_of_the_model(byte_level("gpt-2"))
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        with pytest.raises(ModelError, match=f"model.{name} is '##'"):
            made(tmp_path, {**content, "model": {**content["model"], name: "##"}}, END)
    fewer = {text: index for text, index in content["model"]["vocab"].items() if text != "ÿ"}
    with pytest.raises(ModelError, match="unk_token"):
        made(tmp_path, {**content, "model": {**content["model"], "vocab": fewer, "unk_token": "!"}}, END)
    made(tmp_path, {**content, "model": {**content["model"], "vocab": fewer}}, END)


def test_sentencepiece_tokenizers_that_are_refused(tmp_path):
    content = only_of_the_model(sentencepiece_bpe(scheme="first"))
    model, metaspace = content["model"], content["pre_tokenizer"]
    for wrong, message in [
        ({"model": {**model, "byte_fallback": False}}, "byte_fallback is false"),
        ({"model": {**model, "vocab": {**model["vocab"], "qz": 5000}}}, "'qz' as 'q' and 'z'"),
        ({"normalizer": {"type": "Lowercase"}}, "normalizer .*Lowercase"),
        ({"pre_tokenizer": {**metaspace, "split": True}}, "Metaspace cuts at spaces"),
        ({"pre_tokenizer": sequence(metaspace, {"type": "Digits"})}, "does not cut a text"),
        ({"pre_tokenizer": None}, "nothing writes spaces"),
    ]:
        with pytest.raises(ModelError, match=message):
            made(tmp_path, {**content, **wrong}, SPM)
    qzx = {**model, "vocab": {**model["vocab"], "qzx": 5000}}
    assert len(made(tmp_path, {**content, "model": qzx}, SPM)["tokenizer.ggml.tokens"]) == 5001
    fewer = {text: index for text, index in model["vocab"].items() if text != "<0x41>"}
    with pytest.raises(ModelError, match="no token for each byte"):
        made(tmp_path, {**content, "model": {**model, "vocab": fewer}}, SPM)


def test_unigram_models_that_are_refused(tmp_path):
    content = unigram()
    steps = content["normalizer"]["normalizers"]
    for wrong, message in [
        ({"model": {**content["model"], "byte_fallback": True}}, "no bytes to fall back to"),
        ({"normalizer": {"type": "NFKC"}}, "precompiled_charsmap only"),
        ({"normalizer": {"type": "Sequence", "normalizers": [steps[0], steps[2]]}}, "everywhere or nowhere"),
        ({"pre_tokenizer": {**content["pre_tokenizer"], "prepend_scheme": "never"}}, "no space goes before"),
        ({"pre_tokenizer": {"type": "Punctuation", "behavior": "Isolated"}}, "Punctuation"),
    ]:
        with pytest.raises(ModelError, match=message):
            made(tmp_path, {**content, **wrong}, T5)


def test_a_folder_without_a_tokenizer_and_damaged_files(tmp_path):
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        tokenizer_metadata(tmp_path, {})
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json:1: not JSON"):
        tokenizer_metadata(tmp_path, {})
    content = byte_level("gpt-2")
    content["added_tokens"][0].pop("id")
    with pytest.raises(CheckpointError, match="an added token lacks"):
        made(tmp_path, content, END)


def test_damaged_metadata_is_refused_by_its_key(tmp_path):
    metadata = made(tmp_path, byte_level("gpt-2"), END)
    for key in ("model", "tokens", "token_type", "merges"):
        with pytest.raises(CheckpointError, match=f"tokenizer.ggml.{key} is missing"):
            write_tokenizer({k: v for k, v in metadata.items() if k != f"tokenizer.ggml.{key}"}, tmp_path)
    for key, value, message in [
        ("tokenizer.ggml.token_type", [1], "has 1 entries for"),
        ("tokenizer.ggml.merges", ["ab"], "'ab' is no pair"),
        (PIPELINE, "[", "not JSON"),
        (PIPELINE, "[]", "not a JSON object"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            write_tokenizer({**metadata, key: value}, tmp_path)
    for key, value in [("tokenizer.ggml.model", "rwkv"), ("tokenizer.ggml.pre", "no-such")]:
        with pytest.raises(ModelError, match=value):
            write_tokenizer({**metadata, key: value}, tmp_path)


def test_types_in_the_file_are_those_that_llama_cpp_asks_for(tmp_path):
    actual = tokenizer_metadata(save(tmp_path, template(unigram(), after=["</s>"]), **T5), {})
    kinds = {key: value.kind for key, value in actual.items() if hasattr(value, "kind")}
    assert kinds == {
        "tokenizer.ggml.tokens": "[str]",
        "tokenizer.ggml.token_type": "[i32]",
        "tokenizer.ggml.scores": "[f32]",
        "tokenizer.ggml.precompiled_charsmap": "[u8]",
    }
    again = tokenizer_metadata(tmp_path, {})
    assert list(again.items()) == list(actual.items())


def test_a_foreign_file_with_a_fill_in_the_middle_of_a_unigram(tmp_path):
    content = template(unigram(), after=["</s>"])
    content["model"]["vocab"][40] = ["[PAD40]", -3.0]
    result = made(tmp_path / "in", content, T5)
    assert result["tokenizer.ggml.token_type"][40] == 5
    back(tmp_path / "out", result, as_ours=False)
    vocabulary = json.loads((tmp_path / "out" / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(vocabulary) == len(content["model"]["vocab"]) + 1
    assert vocabulary[40][1] == min(score for _, score in content["model"]["vocab"][3:])


def test_what_llama_cpp_does_differently_is_reported(tmp_path):
    def limits(content, settings, generation=None):
        folder = save(tmp_path, content, **settings)
        (folder / "generation_config.json").write_text(json.dumps(generation or {}))
        return tokenizer_differences(read_tokenizer_files(folder, {}), bare(tokenizer_metadata(folder, {})))

    checkpoint = open_checkpoint("attar:tiny")
    metadata = bare(tokenizer_metadata(checkpoint.path, checkpoint.config))
    assert tokenizer_differences(read_tokenizer_files(checkpoint.path, checkpoint.config), metadata) == []
    plain = byte_level("gpt-2")
    assert limits(plain, END) == []
    assert "NFC" in limits(byte_level("qwen2", normalizer={"type": "NFC"}), END)[0]
    assert "outside ASCII" in limits(byte_level("tekken", ignore_merges=True), END)[0]
    assert limits(sentencepiece_bpe(), SPM) == []
    assert "after a special token" in limits(sentencepiece_bpe(scheme="first"), SPM)[0]
    assert "several marks" in limits(unigram(), T5)[0]
    assert limits(plain, END, {"eos_token_id": [0, 1, 2, 3]}) == [
        "token 2 does not end a text: eos, eot and eom are taken"
    ]
    plain["added_tokens"][1]["rstrip"] = True
    assert limits(plain, END) == ["1 added tokens (<|user|>, ...) leave adjacent spaces as they are"]
    plain["added_tokens"] = [t for t in plain["added_tokens"] if t["content"] != "<|end|>"]
    assert limits(plain, END)[1] == "the plain token <|end|> ends a text, by its look"


def test_an_added_token_has_the_id_that_the_library_gives_it(tmp_path):
    content = byte_level("gpt-2")
    later = {**content["added_tokens"][-1], "content": "[later]"}
    size = len(content["model"]["vocab"])
    assert content["added_tokens"][-1]["id"] == size
    beside = {**content, "added_tokens": [*content["added_tokens"], {**later, "id": size + 1}]}
    assert made(tmp_path, beside, END)["tokenizer.ggml.tokens"][size + 1] == "[later]"
    hole = {**content, "added_tokens": [*content["added_tokens"], {**later, "id": size + 9}]}
    assert library(save(tmp_path, hole, **END)).token_to_id("[later]") == size + 1
    with pytest.raises(ModelError, match=rf"'\[later\]' has the id {size + 9}, but .* gives it {size + 1}"):
        made(tmp_path, hole, END)


def test_a_plain_end_of_another_writer_is_a_control_token(tmp_path):
    specials = (*making.SPECIAL, "<|im_end|>")
    metadata = made(tmp_path / "in", byte_level("gpt-2", specials=specials), END)
    index = metadata["tokenizer.ggml.tokens"].index("<|im_end|>")
    metadata["tokenizer.ggml.token_type"][index] = 1
    for as_ours in (True, False):
        ids = back(tmp_path / "out", metadata, as_ours=as_ours).encode("a<|im_end|>b").ids
        assert (index in ids) is not as_ours
