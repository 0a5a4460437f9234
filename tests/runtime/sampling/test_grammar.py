"""Texts drawn at random among what the masks allow: each must be one of the grammar's."""

from __future__ import annotations

import json
import random
import re
import sys

import pytest
import torch

pytest.importorskip("llguidance")

from attar.errors import GrammarError, MissingExtraError, SettingsError
from attar.models.loading.load import load_tokenizer
from attar.runtime.sampling import grammar, grammar_trial
from attar.runtime.sampling.grammar import KEPT, LIMITS, Grammars, Matcher
from attar.runtime.sampling.params import MAX_GRAMMAR_CHARACTERS, SamplingParams
from attar.runtime.sampling.warp import SamplingRow, warp
from tests.runtime.schemas import SCHEMAS, follows

END = 0  # attar:tiny's end token
BOMB = "(.{1,5000}){1,5000}x"
REGEXES = [
    r"[a-z]{3,8}@[a-z]{1,5}\.(com|org)",
    r"(yes|no|perhaps)",
    r"[0-9]{4}-[0-9]{2}-\W",
    r"(?:[^\n]{0,10}\n){2}",
    r"ä+ö?",
]
TOKENIZER = load_tokenizer("attar:tiny")
V = len(TOKENIZER)
SHORT = [len(TOKENIZER.decode([token])) < 3 for token in range(V)]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER, V)


def start(grammars: Grammars, **guide: str) -> Matcher:
    matcher = grammars.matcher(SamplingParams(**guide))  # type: ignore[arg-type]
    assert matcher is not None
    return matcher


def walk(matcher: Matcher, draws: random.Random, most: int = 400) -> tuple[str, bool]:
    """A random text, and whether it ended where it may."""
    tokens: list[int] = []
    while len(tokens) < most and not matcher.complete:
        choices = matcher.allowed([END]).nonzero().flatten().tolist()
        short = [token for token in choices if SHORT[token]] or choices
        token = draws.choice(short if len(tokens) > 30 else choices)  # else strings grow and grow
        if token == END:
            return TOKENIZER.decode(tokens), True
        tokens.append(token)
        matcher.consume(token)
    return TOKENIZER.decode(tokens), matcher.complete


@pytest.mark.few(3)
@pytest.mark.parametrize("name", SCHEMAS)
def test_random_texts_follow_the_schema(grammars: Grammars, name: str) -> None:
    schema = SCHEMAS[name]
    ended = 0
    for seed in range(12):
        text, whole = walk(start(grammars, json_schema=json.dumps(schema)), random.Random(seed))
        if whole:
            ended += 1
            follows(json.loads(text), schema, schema)
    assert ended >= 3


@pytest.mark.parametrize("pattern", REGEXES)
def test_random_texts_match_the_pattern(grammars: Grammars, pattern: str) -> None:
    for seed in range(12):
        text, whole = walk(start(grammars, regex=pattern), random.Random(seed), 2000)
        assert whole and re.fullmatch(pattern, text), text


def test_a_lark_grammar(grammars: Grammars) -> None:
    grammar = 'start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[1-9][0-9]{0,3}/'
    for seed in range(8):
        text, whole = walk(start(grammars, grammar=grammar), random.Random(seed), 2000)
        assert whole and re.fullmatch(r"[1-9]\d{0,3}(\+[1-9]\d{0,3})*", text), text


def test_the_end_comes_where_the_grammar_is_satisfied_and_nowhere_else(grammars: Grammars) -> None:
    matcher = start(grammars, regex="zq?")
    assert not matcher.allowed([END])[END]
    a, b = (TOKENIZER(letter)["input_ids"][0] for letter in "zq")
    assert a in matcher.allowed().nonzero().flatten().tolist()
    matcher.consume(a)
    assert not matcher.complete
    assert matcher.allowed([END]).nonzero().flatten().tolist() == [END, b]
    assert matcher.allowed().nonzero().flatten().tolist() == [b]
    matcher.consume(b)
    assert matcher.complete


def test_copies_go_their_own_ways(grammars: Grammars) -> None:
    one = start(grammars, regex="[ab]{4}")
    a, b = (TOKENIZER(letter)["input_ids"][0] for letter in "ab")
    before = one.allowed().clone()
    drafted = one.after([a, b])
    two = one.copy()
    two.consume(a)
    assert torch.equal(one.allowed(), before)
    for matcher, left in ((one, 4), (two, 3), (drafted, 2)):
        for _ in range(left):
            assert not matcher.complete
            matcher.consume(b)
        assert matcher.complete
    none = start(grammars, regex="[ab]{4}").after([END, a])  # a draft that is not allowed counts for nothing
    assert torch.equal(none.allowed(), before)


def test_masked_tokens_have_no_probability(grammars: Grammars) -> None:
    allowed = start(grammars, json_schema='{"type": "integer"}').allowed([END])
    logits = torch.randn(2, V, generator=torch.Generator().manual_seed(0))
    likely = int(logits[0].argmax())
    assert not allowed[likely]
    rows = [SamplingRow(SamplingParams(temperature=t, top_p=0.9), allowed=allowed) for t in (0.0, 2.0)]
    p = warp(logits, rows)
    assert p[:, ~allowed].sum() == 0 and torch.allclose(p.sum(-1), torch.ones(2))


@pytest.mark.parametrize(
    ("guide", "why"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": ""}, "empty text alone"),
        ({"json_schema": "{"}, "EOF"),
        ({"json_schema": "[1]"}, "Expecting object schema"),
        ({"json_schema": '{"type": "wrong"}'}, "Invalid type: wrong"),
        ({"json_schema": '{"type": "array", "uniqueItems": true}'}, "uniqueItems"),
        ({"json_schema": '{"allOf": [{"type": "null"}, {"type": "string"}]}'}, "incompatible types"),
        ({"json_schema": '{"$ref": "http://example.org/a"}'}, "does not fetch"),
        ({"grammar": "start: x"}, "unknown name"),
    ],
)
def test_a_wrong_grammar_is_refused_in_a_line(grammars: Grammars, guide: dict[str, str], why: str) -> None:
    with pytest.raises(SettingsError, match=why) as caught:
        start(grammars, **guide)
    assert caught.value.field == next(iter(guide)) and "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "guide",
    [
        {"json_schema": '{"$ref": "#"}'},
        {"json_schema": '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'},
        {"grammar": "start: start"},
        {"grammar": "start: a\na: b\nb: a"},
    ],
    ids=str,
)
def test_what_no_text_can_follow_is_refused_when_it_is_compiled(
    grammars: Grammars, guide: dict[str, str]
) -> None:
    with pytest.raises(GrammarError, match="no text can follow it") as caught:
        start(grammars, **guide)
    assert caught.value.kind == "grammar_too_complex" and caught.value.field == next(iter(guide))


def test_what_takes_too_much_is_refused_when_it_is_compiled(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LIMITS, "step_lexer_fuel", 10)
    with pytest.raises(GrammarError, match=r"regex is '\(a\|b.*, but must be one that can be enforced"):
        start(Grammars(TOKENIZER, V), regex="(a|bc|d.{3,90}){1,50}x")


def test_what_takes_too_much_later_says_the_same(grammars: Grammars) -> None:
    """The states behind a few tokens are more than the first; a draft that leads there says so, too."""
    matcher = start(grammars, regex=BOMB)
    with pytest.raises(GrammarError, match="enforced") as caught:
        for _ in range(200):
            token = int(matcher.allowed().nonzero()[-1])
            ahead = matcher.after([token])
            matcher.consume(token)
            assert ahead._mask.failure == matcher._mask.failure
    assert caught.value.kind == "grammar_too_complex"
    with pytest.raises(GrammarError):
        matcher.copy().allowed()


def test_parameters_take_one_grammar_and_schemas_as_mappings() -> None:
    assert SamplingParams(json_schema={"type": "null"}) == SamplingParams(json_schema='{"type": "null"}')
    with pytest.raises(SettingsError, match="regex is 'a', but must be None where json_schema is given"):
        SamplingParams(regex="a", json_schema="{}")
    with pytest.raises(SettingsError, match="json_schema is 3, but must be text"):
        SamplingParams(json_schema=3)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="at most 262,144 characters"):
        SamplingParams(regex="a" * (MAX_GRAMMAR_CHARACTERS + 1))


def test_a_grammar_is_compiled_once_and_old_ones_go(monkeypatch: pytest.MonkeyPatch) -> None:
    result = Grammars(TOKENIZER, V)
    compiled: list[str] = []
    compile_one = result._compile
    monkeypatch.setattr(
        result, "_compile", lambda name, text: compiled.append(text) or compile_one(name, text)
    )
    for number in [*range(KEPT + 1), KEPT, 0]:
        start(result, regex=f"a{number}")
    assert len(compiled) == KEPT + 2 and compiled[-1] == "a0" and len(result._compiled) == KEPT


COSTLY = {
    "an intersection with a complement": {"grammar": "start: T\nT: /.*a.{15}/ & /.*b.{14}/ & ~/.*c.{13}.*/"},
    "multiples": {"json_schema": {"anyOf": [{"type": "integer", "multipleOf": 9000 + i} for i in range(20)]}},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", COSTLY)
def test_what_takes_too_long_to_compile_is_refused_and_the_next_is_not(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """In a server: the time of a thread that compiles has no bound."""
    monkeypatch.setattr(grammar_trial, "SECONDS", 0.4)
    result = Grammars(TOKENIZER, V)
    result.prepare()
    start(result, regex="ab?")
    with pytest.raises(GrammarError, match=r"to compile it needs more than 0.4 s or 2,048 MiB"):
        start(result, **COSTLY[name])
    start(result, regex="ab")


def test_tenants_share_no_compiled_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or its time would tell what another asks for; and nobody evicts those of another."""
    result, compiled = Grammars(TOKENIZER, V), []
    compile_one = result._compile
    monkeypatch.setattr(
        result, "_compile", lambda name, text: compiled.append(text) or compile_one(name, text)
    )
    for number in range(KEPT + 5):
        result.matcher(SamplingParams(regex=f"a{number}"), "two")
        result.matcher(SamplingParams(regex="a3"), "one")
    assert compiled.count("a3") == 2 and len(compiled) == KEPT + 6


def test_the_vocabulary_is_read_once_and_before_the_first_grammar_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result, read = Grammars(TOKENIZER, V), grammar._make_trie
    reads: list[int] = []
    monkeypatch.setattr(grammar, "_make_trie", lambda *given: reads.append(1) or read(*given))
    result.prepare()
    for pattern in ("a", "b"):
        start(result, regex=pattern)
    assert reads == [1]
    Grammars(object(), V).prepare()  # a tokenizer that no grammar can be had for
    monkeypatch.setitem(sys.modules, "llguidance", None)
    Grammars(TOKENIZER, V).prepare()


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"\.\[grammar\]"):
        start(Grammars(TOKENIZER, V), regex="a")


def test_a_tokenizer_that_has_no_fast_kind_is_refused() -> None:
    with pytest.raises(SettingsError, match="no fast kind"):
        start(Grammars(object(), V), regex="a")
