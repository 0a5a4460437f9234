"""Prompts from lines, rows and topics; system prompts from a mixture; requests and their hashes."""

import json
from collections import Counter

import pytest

from attar.collection.prompts import ChatPrompt, read_prompts
from attar.collection.requests import make_requests
from attar.collection.settings import CollectSettings, PromptSettings
from attar.collection.systems import SYSTEMS, read_mixture, with_system
from attar.collection.textbook import AUDIENCES, GENRES, textbook_prompts
from attar.errors import DataError, SettingsError
from attar.options import nest


def user(text):
    return ChatPrompt(({"role": "user", "content": text},), "")


def texts(path, **options):
    return [prompt.messages[-1]["content"] for prompt in read_prompts(path, PromptSettings(**options), 0)]


def test_a_prompt_a_line(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes("\ufeffWhy?\r\n\r\n  How \nWhy?\n".encode())
    assert texts(path) == ["Why?", "How"]
    assert texts(path, limit=1) == ["Why?"]
    assert [prompt.where for prompt in read_prompts(path, PromptSettings(), 0)] == [f"{path}:1", f"{path}:3"]


def test_rows_of_prompts_and_messages(tmp_path):
    path = tmp_path / "p.jsonl"
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    path.write_text(json.dumps({"prompt": "two\nlines", "id": 7}) + "\n" + json.dumps({"messages": turns}))
    first, second = read_prompts(path, PromptSettings(), 0)
    assert first.messages == ({"role": "user", "content": "two\nlines"},)
    assert list(second.messages) == turns and second.where == f"{path}:2"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not JSON"),
        ("[]", "neither prompt nor messages"),
        ('{"text": "x"}', "neither prompt nor messages"),
        ('{"prompt": " "}', "prompt is empty"),
        ('{"prompt": 3}', "prompt is empty, or not text"),
        ('{"messages": []}', "messages is empty, or not a list"),
        ('{"messages": "x"}', "messages is empty, or not a list"),
        ('{"messages": ["x"]}', "must be a message"),
        ('{"messages": [{"role": "user"}]}', "has no content"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "is the assistant's already"),
        ('{"prompt": "\\ud800"}', "surrogate"),
    ],
)
def test_a_wrong_row_is_named(tmp_path, line, problem):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(DataError, match=problem) as info:
        read_prompts(path, PromptSettings(), 0)
    assert info.value.message.startswith(f"{path}:2")


def test_no_prompt_at_all(tmp_path):
    path = tmp_path / "p.txt"
    with pytest.raises(DataError, match="cannot be read"):
        read_prompts(path, PromptSettings(), 0)
    path.write_text("\n \n")
    with pytest.raises(DataError, match="no prompt in it"):
        read_prompts(path, PromptSettings(), 0)


def test_topics_become_every_combination_once(tmp_path):
    path = tmp_path / "topics.txt"
    path.write_text("sorting\nrecursion\nsorting\n")
    prompts = texts(path, read_as="topics")
    assert len(prompts) == len(set(prompts)) == 2 * len(AUDIENCES) * len(GENRES)
    for topic in ("sorting", "recursion"):
        for audience in AUDIENCES:
            assert sum(topic in prompt and audience in prompt for prompt in prompts) == len(GENRES)


def test_topics_are_drawn_evenly_and_a_larger_number_keeps_the_smaller():
    topics = ["sorting", "recursion", "graphs"]
    few = textbook_prompts(topics, PromptSettings(topic_prompts=10), 0)
    many = textbook_prompts(topics, PromptSettings(topic_prompts=40), 0)
    assert many[:10] == few and len(set(many)) == 40
    counts = Counter(topic for prompt in many for topic in topics if topic in prompt)
    assert sorted(counts.values()) == [13, 13, 14]
    assert textbook_prompts(topics, PromptSettings(topic_prompts=10), 1) != few


def test_own_audiences_and_genres():
    settings = PromptSettings(audiences=("a cook",), genres=("a poem", "summary"))
    prompts = textbook_prompts(["{braces}"], settings, 0)
    assert "Write a poem about {braces} for a cook." in prompts and len(prompts) == 2
    with pytest.raises(SettingsError, match="at most 2"):
        textbook_prompts(["x"], PromptSettings(audiences=("a",), genres=("b", "c"), topic_prompts=3), 0)


def test_a_mixture_is_drawn_by_its_weights():
    weights = read_mixture(("steps=3", "none=1"))
    systems = Counter(
        with_system(user(f"prompt {number}"), weights, 0).messages[0]["content"] for number in range(4000)
    )
    # three standard deviations of 4000 draws
    assert systems[SYSTEMS["steps"]] == pytest.approx(3000, abs=3 * (4000 * 0.75 * 0.25) ** 0.5)


def test_a_draw_depends_on_seed_and_prompt_alone():
    weights = read_mixture(("steps", "check", "learner"))
    drawn = [with_system(user(f"{number}"), weights, 0) for number in range(50)]
    assert drawn[20:] == [with_system(user(f"{number}"), weights, 0) for number in range(20, 50)]
    assert drawn != [with_system(user(f"{number}"), weights, 1) for number in range(50)]


def test_a_prompt_keeps_its_own_system_prompt():
    own = ChatPrompt(({"role": "system", "content": "mine"}, {"role": "user", "content": "x"}), "")
    assert with_system(own, {"other": 1.0}, 0) is own
    assert with_system(user("x"), {}, 0) == user("x")


def test_system_prompts_of_a_file(tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_text('{"system": "Reason.", "weight": 2}\n{"system": ""}\n')
    assert read_mixture((str(path), "none=0.5")) == {"Reason.": 2.0, "": 1.5}
    for row in ('{"system": 1}', '{"system": "x", "weight": 0}', '{"system": "x", "weight": true}', "[]"):
        path.write_text(row)
        with pytest.raises(DataError, match=r"s\.jsonl:1: not a system prompt"):
            read_mixture((str(path),))


@pytest.mark.parametrize("text", ["nosuch", "steps=0", "steps=-1", "steps=nan", "steps=inf", "steps=x"])
def test_a_wrong_mixture_is_refused(text):
    with pytest.raises(SettingsError, match="systems"):
        read_mixture((text,))


def test_a_request_is_named_by_all_that_it_asks():
    def ids(text="x", teacher="t", seeded=False, **options):
        return [
            request.id
            for request in make_requests([user(text)], nest(CollectSettings, options), teacher, seeded=seeded)
        ]

    base = ids()
    assert ids() == base and ids(seed=1) == base and ids(concurrency=1, price_in=1.0) == base
    others = [
        ids("y"),
        ids(teacher="u"),
        ids(max_tokens=7),
        ids(temperature=0.5),
        ids(extra=("a=1",)),
        ids(seeded=True),
        ids(seeded=True, seed=1),
    ]
    assert len({base[0], *(one[0] for one in others)}) == 8
    assert ids(samples=3)[0] == base[0] and len(set(ids(samples=3))) == 3, "more samples keep the first"


def test_what_is_not_set_is_not_sent():
    def options(**given):
        return make_requests([user("x")], nest(CollectSettings, given), "t", seeded=False)[0].options

    assert options() == {"max_tokens": 1024}
    assert options(limit_name="max_completion_tokens", max_tokens=9, temperature=0.0, stop=("a",)) == {
        "max_completion_tokens": 9,
        "temperature": 0.0,
        "stop": ["a"],
    }
    assert options(extra=("reasoning_effort=high", 'x={"y": [1]}'))["x"] == {"y": [1]}
    for wrong in ("x", "max_tokens=3", "messages=1", "a b=1"):
        with pytest.raises(SettingsError, match="extra"):
            options(extra=(wrong,))
