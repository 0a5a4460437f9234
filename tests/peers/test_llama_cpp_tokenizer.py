"""llama.cpp on the tokenizers we write, text by text, against transformers on the folder they came from.

Needs llama-cpp-python in an environment of its own, ``$ATTAR_PEERS/llama-cpp``.

What is known to differ, and held here so that a change shows:

- tekken, gpt-4o, granite-embed-multi-97m and tiny_aya, whose Unicode classes llama.cpp approximates: ASCII
  texts are the same;
- NFC: llama.cpp does not compose a text (qwen2, qwen35);
- a Metaspace pre-tokenizer, where a text begins with a space or a special token stands in it;
- a unigram's special tokens within a text, where they are not to be recognised: Hugging Face takes them;
- a U+2581 at the very beginning of a text, for a unigram with Metaspace;
- ``llama_detokenize`` tidies spaces before punctuation for pre-tokenizers of some names; the tokens' own
  texts, which generation uses, are whole;
- bytes that are no UTF-8: llama.cpp has one U+FFFD for each, Python one for each broken character.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from attar.checkpoint import open_checkpoint
from attar.formats.gguf.container import GGUFWriter
from attar.formats.gguf.tokenizer.from_gguf import write_tokenizer
from attar.formats.gguf.tokenizer.pretokenizer_table import TABLE
from attar.formats.gguf.tokenizer.to_gguf import PIPELINE
from tests.formats.gguf.making import (
    NASTY,
    byte_level,
    save,
    sentencepiece_bpe,
    template,
    tokenizer_metadata,
    unigram,
)

PEER = Path(os.environ.get("ATTAR_PEERS", "/nowhere")) / "llama-cpp" / "bin" / "python"
pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not PEER.exists(), reason="no llama-cpp-python under $ATTAR_PEERS"),
]
ASK = Path(__file__).with_name("llama_cpp_tokens.py")
END = {"eos_token": "<|endoftext|>"}
SPM = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
APPROXIMATE = tuple(row.name for row in TABLE if row.approximate)
TIDY = ("llama-bpe", "dbrx", "gpt-2", "falcon", "bloom", "minicpm5", "jais-2", "exaone-moe", "default")
DECOMPOSED = [text for text in NASTY if "e\u0301" in text or "\u2126" in text]


def ask(jobs):
    """llama.cpp's answers to {"path", "texts"}; a text is a string or bytes."""
    asked = [
        {
            "path": str(job["path"]),
            "texts": [(t.encode() if isinstance(t, str) else t).hex() for t in job["texts"]],
        }
        for job in jobs
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [PEER, ASK], input=json.dumps(asked).encode(), stdout=subprocess.PIPE, check=True, env=environment
    )
    return json.loads(done.stdout)


def write(path, metadata):
    path.unlink(missing_ok=True)
    GGUFWriter(path, {"general.architecture": "llama", **metadata}, []).finish()
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Every kind of tokenizer: its folder, what llama.cpp said of each text, its metadata."""
    root = tmp_path_factory.mktemp("tokenizers")
    contents = {
        row.name: (
            byte_level(
                row.name,
                ignore_merges=row.ignore_merges,
                normalizer={"type": "NFC"} if row.composed else None,
            ),
            END,
        )
        for row in TABLE
    }
    for scheme in (None, "always", "first", "never", "gemma"):
        contents[f"spm {scheme}"] = (template(sentencepiece_bpe(scheme=scheme), before=["<s>"]), SPM)
    t5 = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    contents["unigram"] = (template(unigram(), after=["</s>"]), t5)
    folders = {name: save(root / name, content, **named) for name, (content, named) in contents.items()}
    folders["tiny"] = open_checkpoint("attar:tiny").path
    actual = {}
    for name, folder in folders.items():
        pre = name if any(row.name == name for row in TABLE) else None
        actual[name] = tokenizer_metadata(folder, {"vocab_size": 2048}, pre)
    paths = {name: write(root / f"{name}.gguf", metadata) for name, metadata in actual.items()}
    answers = ask([{"path": path, "texts": NASTY} for path in paths.values()])
    return {name: (folders[name], answer, actual[name]) for name, answer in zip(actual, answers, strict=True)}


def differing(folder, answer, which):
    """Texts of which transformers makes other tokens than llama.cpp."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    options = {
        "parsed": {"add_special_tokens": False},
        "added": {},
        "plain": {"add_special_tokens": False, "split_special_tokens": True},
    }
    return [
        text
        for text, got in zip(NASTY, answer["texts"], strict=True)
        if tokenizer.encode(text, **options[which]) != got[which]
    ]


def expected(name, which):
    """Texts that are known to differ."""
    if name in APPROXIMATE:
        return lambda text: not text.isascii()
    if name in ("qwen2", "qwen35"):
        return lambda text: text in DECOMPOSED
    if name in ("spm always", "spm first"):
        return lambda text: text[:1] in (" ", "▁") or "<" in text or "[tool]" in text
    if name == "unigram":
        return lambda text: text.startswith("▁") or (which == "plain" and "<unk>" in text)
    return lambda text: False


NAMES = [*(row.name for row in TABLE), *(f"spm {s}" for s in (None, "always", "first", "never", "gemma"))]
NAMES += ["unigram", "tiny"]


@pytest.mark.parametrize("which", ["parsed", "plain", "added"])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_transformers(name, which, files):
    folder, answer, _ = files[name]
    assert answer is not None, "llama.cpp does not load it"
    differ = differing(folder, answer, which)
    known = expected(name, which)
    assert [text for text in differ if not known(text)] == []


@pytest.mark.parametrize("name", ["tekken", "gpt-4o", "tiny_aya", "qwen2", "spm first", "unigram"])
def test_what_is_known_to_differ_does(name, files):
    folder, answer, _ = files[name]
    assert differing(folder, answer, "parsed")


@pytest.mark.parametrize("name", NAMES)
def test_texts_of_tokens_are_those_of_transformers(name, files):
    folder, answer, _ = files[name]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tidied = 0
    for got in answer["texts"]:
        wanted = tokenizer.decode(got["parsed"])
        spaced = name.startswith("spm") or name == "unigram"  # its first space is the tokenizer's own
        whole = bytes.fromhex(got["detokenized" if spaced else "pieces"]).decode(errors="replace")
        assert whole == wanted
        tidied += got["detokenized"] != got["pieces"]
    assert bool(tidied) is (name in TIDY or (spaced and name not in ("spm never", "spm gemma")))


@pytest.mark.parametrize("name", NAMES)
def test_what_comes_back_from_a_foreign_file_is_what_llama_cpp_does(name, files, tmp_path):
    """Without our own key: the tokenizer is made from llama.cpp's keys alone."""
    _, answer, metadata = files[name]
    write_tokenizer({key: value for key, value in metadata.items() if key != PIPELINE}, tmp_path)
    for which in ("parsed", "plain", "added"):
        known = (
            expected(name, which) if name in APPROXIMATE or name.startswith("qwen") else lambda text: False
        )
        if name == "unigram" and which == "plain":
            known = expected(name, which)
        assert [text for text in differing(tmp_path, answer, which) if not known(text)] == []


def test_special_ids_reach_llama_cpp(files, tmp_path):
    folder, answer, _ = files["tiny"]
    assert (answer["tokens"], answer["bos"], answer["eos"], answer["pad"]) == (2048, 0, 0, 0)
    assert answer["ends"] == [0]
    folder = save(tmp_path / "in", byte_level("gpt-2"), **END)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1, 2, 3]}))
    path = write(tmp_path / "x.gguf", tokenizer_metadata(folder, {"vocab_size": 950}))
    (answer,) = ask([{"path": path, "texts": ["<|user|>"]}])
    assert (answer["tokens"], answer["eos"], answer["eot"]) == (950, 0, 3)
    assert answer["ends"] == [0, 1, 3]  # four ends, and places for three
    assert answer["texts"][0]["parsed"] == [1]


def test_bytes_that_are_no_text(files, tmp_path):
    texts = [b"\xff", b"a\x80b", b"\xf0\x9f\x98", b"ok \xe4\xb8"]
    for name in ("tiny", "spm None"):
        folder, _, metadata = files[name]
        (answer,) = ask([{"path": write(tmp_path / "x.gguf", metadata), "texts": texts}])
        tokenizer = AutoTokenizer.from_pretrained(folder)
        for text, got in zip(texts, answer["texts"], strict=True):
            if name == "tiny":
                one_each = text.decode(errors="surrogateescape")
                one_each = "".join("\ufffd" if 0xDC80 <= ord(c) <= 0xDCFF else c for c in one_each)
                assert got["parsed"] == tokenizer.encode(one_each)
            else:
                bytes_ = [f"<0x{byte:02X}>" for byte in text if byte > 127]
                read = tokenizer.convert_ids_to_tokens(got["parsed"])
                assert [token for token in read if token.startswith("<0x")] == bytes_
                assert bytes.fromhex(got["detokenized"]) == text
