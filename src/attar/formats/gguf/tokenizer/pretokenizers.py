"""The name of llama.cpp's pre-tokenizer for the ``pre_tokenizer`` of a tokenizer.json, and back.

A pre_tokenizer is a tree of steps. It is converted to a list of rules: regular expressions that split by
their matches.

    Split by a regex, Isolated                 the regex
    Split by a regex, Removed and inverted     the same, if the regex matches everything, as all known ones do
    Digits                                     a run of digits, or each digit
    Punctuation, Contiguous                    a run of punctuation
    ByteLevel with use_regex                   GPT-2's regex

A rule is then normalized to one spelling: possessive quantifiers that change nothing, the three ways of
writing the contractions, a line break as character or as escape. The list is looked up in
pretokenizer_table.py.

Differs from llama.cpp's converter, which hashes the ids of one text, so that it knows no new vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from attar.errors import ModelError, SettingsError
from attar.formats.gguf.tokenizer.pretokenizer_table import (
    CODED,
    CONTRACTIONS,
    DIGIT,
    DIGITS,
    GPT2,
    PUNCTUATION,
    TABLE,
    PreTokenizer,
)

_SAME = (
    ("\r", r"\r"),
    ("\n", r"\n"),
    ("\t", r"\t"),
    ("(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])", CONTRACTIONS),
    ("'(?i:[sdmt]|ll|ve|re)", CONTRACTIONS),
    (r"]?+\p{L}", r"]?\p{L}"),
    (r"\p{L}++", r"\p{L}+"),
    (r"\p{L}\p{N}]++", r"\p{L}\p{N}]+"),
    (r"[\r\n]*+", r"[\r\n]*"),
    (r"[\r\n/]*+", r"[\r\n/]*"),
    (r"\s*[\r\n]|", r"\s*[\r\n]+|"),
    (r"\p{N}{1}", r"\p{N}"),
)
"""Spellings that split alike. ``\\s*[\\r\\n]`` reaches the last line break of its white space as well.
``{1,3}+`` is none of them: the tokenizers library reads it as a repetition."""

PROBE = (
    "I've 'told HE'S there, we'Ll Ankara'dan 12 345 6789 x²+½ v1.2.3\n\n  def f(a_b):\n"
    "\treturn a[0] != b // 2  \r\n naïve Café déjà CamelCASE iPhone 北京 1984年 こんにちは 안녕 "
    "мир МИР مرحبا ٣٤ नमस्ते "
    "🚀👩\u200d👩\u200d👧 !!!...``` ~~ a\u00a0b   c\t\t d       e  12 \n "
)
"""A text that pre-tokenizers split differently."""


def known() -> tuple[str, ...]:
    """Every name of the table, aliases too."""
    return tuple(name for row in TABLE for name in (row.name, *row.aliases))


def by_name(name: str) -> PreTokenizer:
    """The row of a name or an alias.

    Raises:
        SettingsError: no pre-tokenizer of that name is known.
    """
    for row in TABLE:
        if name == row.name or name in row.aliases:
            return row
    raise SettingsError("pretokenizer", name, "a pre-tokenizer of llama.cpp: " + ", ".join(known()))


def pre_tokenizer_rules(pre_tokenizer: Mapping[str, Any] | None) -> tuple[str, ...]:
    """A tokenizer.json's ``pre_tokenizer`` as a list of rules. A step of another kind becomes its JSON, which
    equals no rule of the table."""
    rules: list[str] = []
    coded = ""
    for step in pre_tokenizer_steps(pre_tokenizer):
        rule = _rule(step)
        if rule is not None:
            rules.append(coded + rule)
        if step.get("type") == "ByteLevel":
            coded = CODED
    return tuple(rules)


def recognise(
    pre_tokenizer: Mapping[str, Any] | None,
    ignore_merges: bool,
    complete: Callable[[], bool],
    where: str,
) -> str:
    """llama.cpp's name of a pre-tokenizer.

    Args:
        complete: whether merges make every token, so that ignore_merges changes nothing. Called only where
            the name implies another ignore_merges than the tokenizer has.

    Raises:
        ModelError: llama.cpp has no such pre-tokenizer; names it and the nearest.
    """
    wanted = pre_tokenizer_rules(pre_tokenizer)
    rows = [row for row in TABLE if wanted == row.rules or wanted in row.spelled]
    if not rows:
        raise ModelError(
            f"{where}: llama.cpp has no pre_tokenizer {' then '.join(wanted) or '(none)'}",
            hint=f"name one with --pretokenizer; {_describe_nearest(pre_tokenizer)}",
        )
    fitting = [row for row in rows if row.ignore_merges == ignore_merges]
    if fitting and not fitting[0].recent:
        return fitting[0].name
    if complete():
        return rows[0].name
    if fitting:
        return fitting[0].name
    raise ModelError(
        f"{where}: llama.cpp's pre_tokenizer {rows[0].name!r} has ignore_merges={rows[0].ignore_merges}, "
        "and some tokens of this vocabulary are not made by its merges",
        hint=f"accept that with --pretokenizer {rows[0].name}",
    )


def pre_tokenizer(name: str) -> dict[str, Any]:
    """The ``pre_tokenizer`` of a tokenizer.json that splits as llama.cpp's of a name."""
    cuts = by_name(name).rules
    last = cuts[-1] == GPT2
    before = [_step(rule) for rule in (cuts[:-1] if last else cuts)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": last}
    return {"type": "Sequence", "pretokenizers": [*before, level]} if before else level


def nearest_pre_tokenizer(given: Mapping[str, Any] | None) -> tuple[str, float]:
    """The pre-tokenizer of the table that splits the probe text most similarly. Returns its name, and the
    number of common cuts divided by the number of all cuts of both."""
    mine = _cuts(given)
    best = ("", -1.0)
    for row in TABLE:
        theirs = _cuts(pre_tokenizer(row.name))
        share = len(mine & theirs) / len(mine | theirs)
        if share > best[1]:
            best = (row.name, share)
    return best


def pre_tokenizer_steps(tree: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The leaves of a tree of pre-tokenizers, in their order."""
    if not tree:
        return []
    if tree.get("type") != "Sequence":
        return [tree]
    return [leaf for branch in tree.get("pretokenizers", ()) for leaf in pre_tokenizer_steps(branch)]


def _rule(step: Mapping[str, Any]) -> str | None:
    """A step's rule; None for one that does not split."""
    kind, behavior = step.get("type"), step.get("behavior", "Isolated")
    if kind == "ByteLevel" and not step.get("add_prefix_space", True):
        return GPT2 if step.get("use_regex", True) else None
    if kind == "Digits":
        return DIGIT if step.get("individual_digits") else DIGITS
    if kind == "Punctuation" and behavior == "Contiguous":
        return PUNCTUATION
    keeps_matches = (behavior, bool(step.get("invert"))) in (("Isolated", False), ("Removed", True))
    if kind == "Split" and keeps_matches and "Regex" in step.get("pattern", {}):
        return canonical_regex(step["pattern"]["Regex"])
    return json.dumps(dict(step), ensure_ascii=False)


def canonical_regex(regex: str) -> str:
    """A regular expression with known spellings replaced by the spellings of the table."""
    for spelling, same in _SAME:
        regex = regex.replace(spelling, same)
    return regex


def _step(rule: str) -> dict[str, Any]:
    """The step of a tokenizer.json for a rule."""
    if rule in (DIGIT, DIGITS):
        return {"type": "Digits", "individual_digits": rule == DIGIT}
    return {"type": "Split", "pattern": {"Regex": rule}, "behavior": "Isolated", "invert": False}


def _describe_nearest(given: Mapping[str, Any] | None) -> str:
    try:
        name, share = nearest_pre_tokenizer(given)
    except Exception as error:  # the step may be one that the library does not know
        return f"none could be compared: {error}"
    return f"{name!r} makes {share:.0%} of its cuts in a probe text"


def _cuts(tree: Mapping[str, Any] | None) -> set[int]:
    """The positions at which a pre-tokenizer splits the probe text."""
    from tokenizers import Tokenizer

    model = {"type": "BPE", "vocab": {}, "merges": []}
    cutter = Tokenizer.from_str(json.dumps({"model": model, "pre_tokenizer": tree})).pre_tokenizer
    if cutter is None:
        return {len(PROBE)}
    return {end for _, (_, end) in cutter.pre_tokenize_str(PROBE)}
