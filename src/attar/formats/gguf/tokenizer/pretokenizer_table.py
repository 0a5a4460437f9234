"""llama.cpp's pre-tokenizers, by the name in ``tokenizer.ggml.pre``.

A byte-level BPE splits a text into pieces before any merge. llama.cpp has the regular expressions in its
source (``src/llama-vocab.cpp``, ``llm_tokenizer_bpe``) under names; a tokenizer.json has the expressions and
no name. Each row here has the rules of a name in the spelling of tokenizer.json. Rules are applied one after
another, each to the pieces that the one before left: a match is a piece, and so is the text between two
matches.

llama.cpp runs most rules as written. Its engine has no Unicode classes except letters, numbers, marks,
punctuation and symbols, so it approximates ``tekken``, ``gpt-4o`` and those built on them: a letter outside
ASCII is upper and lower case at once, and a combining mark is no letter.
"""

from __future__ import annotations

from dataclasses import dataclass

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The rule of a ByteLevel pre-tokenizer (``use_regex``)."""

DIGIT, DIGITS, THREE = r"\p{N}", r"\p{N}+", r"\p{N}{1,3}"
PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"
NEWLINES = r"[^\n]+|[\n]+"
CODED = "bytes: "
"""Prefix of a rule after ByteLevel, where one character stands for one byte."""

_END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
LLAMA3 = rf"{CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}{_END}"
QWEN2 = rf"{CONTRACTIONS}|{_WORD}|\p{{N}}{_END}"
_QWEN35 = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPACES = "".join(rf"\s{{{count}}}(?!\S)|" for count in (512, 256, 128, 64, 32, 16, 8, 4))
_JAIS2 = LLAMA3.removesuffix(r"\s+(?!\S)|\s+") + _SPACES + r"\s{1,2}(?!\S)|\s{1}"
_SEED = rf"{CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_EXAONE = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?"
_CASED_END = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = rf"{_CASED}{_UPPER}*{_LOWER}+|{_CASED}{_UPPER}+{_LOWER}*|\p{{N}}{_CASED_END}"
_O200K_WORD = rf"{_CASED}{_UPPER}*{_LOWER}+{CONTRACTIONS}?|{_CASED}{_UPPER}+{_LOWER}*{CONTRACTIONS}?"
O200K = rf"{_O200K_WORD}|\p{{N}}{{1,3}}{_CASED_END}"

_IDEOGRAPHS = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102"
    "\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_DEEPSEEK_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _DEEPSEEK_ASIAN,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_ASIAN, DIGIT)
_STOPS = ".,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c"
_BLOOM = rf" ?[^(\s|{_STOPS})]+"
_BLOOM_NESTED = rf" ?[^(\s|[{_STOPS}])]+"


@dataclass(frozen=True)
class PreTokenizer:
    """A pre-tokenizer of llama.cpp.

    Attributes:
        name: ``tokenizer.ggml.pre``.
        rules: llama.cpp's, in the spelling of tokenizer.json.
        spelled: other spellings in tokenizer files.
        ignore_merges: a piece that is a token is not merged; implied by the name.
        composed: these tokenizers normalize the text to NFC. llama.cpp does not.
        recent: in llama.cpp since 2026, so written only where no older one fits.
        approximate: llama.cpp approximates the rules; see above.
        aliases: other names of the same rules.
    """

    name: str
    rules: tuple[str, ...]
    spelled: tuple[tuple[str, ...], ...] = ()
    ignore_merges: bool = False
    composed: bool = False
    recent: bool = False
    approximate: bool = False
    aliases: tuple[str, ...] = ()


TABLE = (
    PreTokenizer(
        "llama-bpe",
        (LLAMA3,),
        ignore_merges=True,
        aliases=(
            "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano",
            "glm4", "glm5",
        ),
    ),
    PreTokenizer("dbrx", (LLAMA3,), aliases=("smaug-bpe", "chatglm-bpe")),
    PreTokenizer(
        "qwen2",
        (QWEN2,),
        composed=True,
        aliases=(
            "stablelm2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "hunyuan", "solar-open",
            "grok-2", "bailingmoe", "bailingmoe2", "llada-moe",
        ),
    ),
    PreTokenizer("qwen35", (_QWEN35,), composed=True),
    PreTokenizer(
        "gpt-2",
        (GPT2,),
        aliases=(
            "olmo", "mpt", "jais", "phi-2", "mellum", "gigachat", "a.x-4.0", "modern-bert", "exaone4",
            "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "trillion", "granite-docling",
        ),
    ),
    PreTokenizer(
        "smollm",
        (DIGIT, GPT2),
        aliases=("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
    ),
    PreTokenizer(
        "falcon",
        (PUNCTUATION, GPT2, "[0-9][0-9][0-9]"),
        spelled=((PUNCTUATION, GPT2, CODED + DIGITS, CODED + "[0-9][0-9][0-9]"),),
    ),
    PreTokenizer("deepseek-llm", (*_DEEPSEEK_LLM, DIGITS), spelled=((*_DEEPSEEK_LLM, DIGIT),)),
    PreTokenizer("deepseek-coder", _DEEPSEEK_CODER),
    PreTokenizer(
        "deepseek-v3", (THREE, _IDEOGRAPHS, _DEEPSEEK3), aliases=("hunyuan-dense", "joyai-llm", "hy_v4")
    ),
    PreTokenizer("tekken", (TEKKEN,), ignore_merges=True, approximate=True),
    PreTokenizer("gpt-4o", (O200K,), approximate=True, aliases=("llama4", "kanana2", "talkie", "minimax-m2")),
    PreTokenizer("granite-embed-multi-97m", (O200K,), ignore_merges=True, recent=True, approximate=True),
    PreTokenizer("bloom", (_BLOOM,), spelled=((_BLOOM_NESTED,),), aliases=("poro-chat", "gpt3-finnish")),
    PreTokenizer("viking", (_BLOOM, DIGIT), spelled=((_BLOOM_NESTED, DIGIT),)),
    PreTokenizer("minicpm5", (THREE, LLAMA3.replace(r"{1,3}", "+")), ignore_merges=True),
    PreTokenizer("jais-2", (_JAIS2,)),
    PreTokenizer("seed-coder", (_SEED,)),
    PreTokenizer("exaone-moe", (_EXAONE,)),
    PreTokenizer("tiny_aya", (r"\d{1,3}(?=(?:\d{3})*\b)", O200K), approximate=True, aliases=("cohere2moe",)),
    PreTokenizer("ufakzeka", (QWEN2.removeprefix(CONTRACTIONS + "|"),)),
    PreTokenizer("laguna", (NEWLINES, QWEN2)),
    PreTokenizer("superbpe", (DIGITS, r"(?=(\d{3})+(?!\d))")),
    PreTokenizer("default", (PUNCTUATION.replace("`", ""), GPT2, DIGITS, "[0-9][0-9][0-9]")),
)  # fmt: skip
"""In order of preference: where two rows split alike, the first that fits is written."""
