"""Texts that tokenizers stumble over, and small tokenizers of every kind, trained without a network."""

import json
import math
import struct
from collections import Counter
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from attar.formats.gguf.tokenizer.files import read_tokenizer_files
from attar.formats.gguf.tokenizer.pretokenizers import pre_tokenizer
from attar.formats.gguf.tokenizer.to_gguf import source_metadata
from attar.formats.gguf.values import TypedValue

NASTY = [
    "",
    " ",
    "  ",
    "   \t \t\t  ",
    "\n",
    "\n\n\n",
    "\r\n",
    "a\r\nb\r\n\r\nc \r d",
    "\t\tif x:\n\t\t\treturn  y  # no\n\n\n",
    " leading",
    "   leading three",
    "trailing ",
    "trailing three   ",
    "a  b   c    d     e",
    "line one\n line two\n  line three   \n",
    " \n \n  \n",
    "x\u00a0y\u2003z\u3000w\u200b v\x0b\x0cu\x85t",
    "Hello, world!",
    "I'm you're HE'LL we'Ve they'd it's 'twas 'S 'Tis don't o'clock ''' '' '",
    "CamelCase iPhone HTTPServer snake_case kebab-case SCREAMING_CASE éÉtat ÀÉÎ straße ǅungla",
    "1 12 123 1234 12345 123456 1234567 0.5 3.14159 1,000,000 1e-10 0xFF v1.2.3 x2y3 ²³¹ ½¼ Ⅷ ٣٤٥ १२३ ３４",
    "a" * 70 + "b" * 3,
    "def f(a, *b, **c): return {k: v for k, v in a.items() if k != '_' and v >= 0}\n",
    '<div class="x">&amp;</div> /* c */ // d --- ==> != <= :: -> ~/.bashrc $HOME C:\\dir\\n \\t @me #tag',
    '!!! ??? ... ,,, ;;; ((())) [[]] {{}} """ ``` ~~~ ^^^ ||| \\\\\\ ___ +++ === <<<>>>',
    "🚀 👩\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈 👍🏽 🇩🇪 ❤️ ☃ ©®™ €£¥ →←",
    "中文字符，没有空格。日本語のテキスト、カタカナ！ 한국어 텍스트 ๑ ไทย",
    "我想在apple工作1314151天～ 北京2024年10月",
    "مرحبا بالعالم، كيف حالك؟ שלום עולם नमस्ते दुनिया বাংলা தமிழ்",
    "Привет, МИР! нещо на Български Ελληνικά Ὀδυσσεύς",
    "e\u0301 n\u0303 a\u0308\u0323 Z\u0351\u036b o\u0302\u0301 \u0301alone",
    "\u00e9 \u1e69 \uac01 \ufb01 \u2126",
    "\ufeffBOM \ufffd replacement \ud7ff \U0010ffff \x00 nul \x7f del \x1b[0m",
    "<s>hello</s> <unk> <pad>",
    "<|user|>hi there<|end|>\n<|assistant|> sure<|end|>",
    "text<|endoftext|>more <|endoftext|> text<|endoftext|>",
    "[tool]call[tool] [TOOL] [too l]",
    "<|user|<|end|><|use|end|>",
    "▁ ▁▁ a▁b",
    "Ġ Ċ Ā ĠĠ aĠb",
    "<0x0A> <0x20>",
    "one, two; three: four. five? six! (seven) \"eight\" 'nine'",
    "https://example.org/a/b?c=d&e=%20f#g mail@example.org 127.0.0.1:8080",
    "\\u00e9 \\n \\x41",
]
"""Texts."""

_PLAIN = [text for text in NASTY if not any(mark in text for mark in ("<|", "<s>", "\x00"))]
CORPUS = [
    *_PLAIN,
    *_PLAIN[::-1],
    "the quick brown fox jumps over the lazy dog. The dog's bark isn't as bad as it's said to be!\n" * 4,
    "import numpy as np\n\ndef main():\n    for i in range(100):\n        print(i, 'hello  world')\n\n" * 4,
    "In 1999, 2000 and 2024 there were 365 days, 366 days and 366 days; 12345678 seconds.\n" * 4,
    "Ein Haus, zwei Häuser. Où est-ce? ¿Qué pasa? 你好世界 你好 世界 世界\n" * 4,
]
SPECIAL = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>")
USER = "[tool]"


def byte_level(pre, *, size=900, whole=True, ignore_merges=False, normalizer=None, specials=SPECIAL):
    """A byte-level BPE with llama.cpp's pre-tokenizer ``pre``, or a tokenizer.json's.

    ``whole`` trains on uncut lines: then merges reach over every cut, and a wrong cut shows in the ids.
    """
    step = pre_tokenizer(pre) if isinstance(pre, str) else pre
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = level if whole else _stage("pre_tokenizer", step)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        max_token_length=12,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(USER, normalized=False)])
    content = json.loads(tokenizer.to_str())
    content["pre_tokenizer"], content["normalizer"] = step, normalizer
    content["model"]["ignore_merges"] = ignore_merges
    return content


def sentencepiece_bpe(*, scheme=None, size=700):
    """A BPE with bytes to fall back to, as Llama 2 has it: a Prepend normalizer, or a Metaspace step."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaced = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    if scheme is None:
        tokenizer.normalizer = normalizers.Sequence(spaced)
    elif scheme == "gemma":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    strip = [] if scheme in ("gemma", "never") else [decoders.Strip(" ", 1, 0)]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)
    specials = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[*specials, *bytes_], show_progress=False, max_token_length=10
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(list(SPECIAL[1:]))
    tokenizer.add_tokens([AddedToken(USER, normalized=False)])
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [
        token for token in content["added_tokens"] if not token["content"].startswith("<0x")
    ]
    return content


def unigram():
    """A unigram model, as T5 has it: extra spaces dropped, tabs and line breaks spaces. Its pieces are the
    frequent stretches of the corpus; stretches of one character are none, for their sums would tie."""
    words = [f"▁{word}" for text in CORPUS for word in text.split()]
    counts = Counter(
        word[start : start + length]
        for word in words
        for length in range(1, 6)
        for start in range(len(word) - length + 1)
    )
    kept = [
        piece
        for piece, count in sorted(counts.items())
        if len(piece) == 1 or (count > 5 and len(set(piece)) > 1 and "▁" not in piece[1:])
    ]
    total = sum(counts[piece] for piece in kept)
    scored = [(piece, math.log(counts[piece] / total)) for piece in kept]
    specials = [(text, 0.0) for text in ("<pad>", "</s>", "<unk>")]
    tokenizer = Tokenizer(models.Unigram([*specials, *scored], unk_id=2))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Precompiled(charsmap({9: " ", 10: " ", 13: " "})),
            normalizers.Strip(),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace("▁", prepend_scheme="always")
    tokenizer.add_special_tokens([text for text, _ in specials])
    tokenizer.add_tokens([AddedToken(USER, normalized=False)])
    return json.loads(tokenizer.to_str())


def charsmap(table):
    """SentencePiece's compiled normalization of single bytes, built by hand.

    A double array of u32: the child of a node at ``base`` by a byte c stands at ``base ^ c`` and has c as its
    label; bit 8 says that it has a value, which stands at its own place ^ its base, with bit 31 set.
    """
    units = [0] * 1024
    units[0] = 256 << 10
    texts = b""
    for byte, text in table.items():
        child = 256 ^ byte
        units[child] = byte | 1 << 8 | 512 << 10
        units[child ^ 512] = 1 << 31 | len(texts)
        texts += text.encode() + b"\0"
    return struct.pack("<I1024I", 4096, *units) + texts


def template(content, before=(), after=()):
    """A tokenizer.json with tokens put around a text."""
    ids = {token["content"]: token["id"] for token in content["added_tokens"]}
    single = " ".join([*before, "$A", *after])
    named = [(text, ids[text]) for text in dict.fromkeys([*before, *after])]
    result = processors.TemplateProcessing(single=single, pair=f"{single} $B:1", special_tokens=named)
    return {**content, "post_processor": json.loads(result.__getstate__())}


def save(folder, content, **settings):
    """Write a tokenizer.json and a tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **settings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def _stage(name, step):
    """A step of a tokenizer.json as the library's object."""
    empty = {"model": {"type": "BPE", "vocab": {}, "merges": []}, name: step}
    return getattr(Tokenizer.from_str(json.dumps(empty)), name)


def tokenizer_metadata(folder, config, pre=None):
    """The metadata of a folder's tokenizer, with as many tokens as config.json says."""
    return source_metadata(read_tokenizer_files(Path(folder), config), pre)


def typed(gguf):
    """The metadata of an opened file with its types, as a writer takes them."""
    return {key: TypedValue(gguf.kinds[key], value) for key, value in gguf.metadata.items()}
