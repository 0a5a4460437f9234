"""A checkpoint as teacher: batched, and each answer its own seed's."""

import asyncio

import pytest

from attar.checkpoint.open import open_checkpoint
from attar.collection.prompts import ChatPrompt
from attar.collection.requests import make_requests
from attar.collection.retry import TeacherFailure
from attar.collection.settings import CollectSettings
from attar.collection.teachers.local import LocalTeacher, split_reasoning
from attar.options import nest


def answers(prompts, together, **options):
    """The replies to some prompts, all at a time or one after the other."""
    settings = nest(CollectSettings, {"max_tokens": 12, **options})
    teacher = LocalTeacher(open_checkpoint("attar:tiny"), settings)
    requests = make_requests(prompts, settings, teacher.identity, seeded=True)

    async def run():
        teacher.prepare()
        try:
            if together:
                return await asyncio.gather(*(teacher.ask(request) for request in requests))
            return [await teacher.ask(request) for request in requests]
        finally:
            await teacher.close()

    return asyncio.run(run())


def user(text):
    return ChatPrompt(({"role": "user", "content": text},), "here")


PROMPTS = [user(text) for text in ("def add(a, b):", "class Stack:", "import os\n", "def add(a, b):\n    ")]


@pytest.mark.slow
def test_answers_do_not_depend_on_what_else_is_in_the_batch():
    together, alone = answers(PROMPTS, True, samples=2), answers(PROMPTS, False, samples=2)
    assert together == alone
    assert len({answer.content for answer in together}) > len(PROMPTS), "samples have seeds of their own"
    assert all(0 < answer.completion_tokens <= 12 and answer.prompt_tokens for answer in together)


def test_temperature_zero_is_greedy():
    first, second = answers(PROMPTS[:1], True, samples=2, temperature=0.0)
    assert first == second


@pytest.mark.slow
def test_prompts_that_cannot_be_answered_are_refused_one_by_one():
    system = ChatPrompt(({"role": "system", "content": "x"}, *user("y").messages), "here")
    long = user("word " * 100_000)
    fine, no_template, too_long = answers([PROMPTS[0], system, long], True)
    assert fine.content
    assert isinstance(no_template, TeacherFailure) and isinstance(too_long, TeacherFailure)
    assert no_template.effect == too_long.effect == "refuse"
    assert "chat template" in no_template.message


def test_the_lineage_has_name_fingerprint_and_licence():
    checkpoint = open_checkpoint("attar:tiny")
    parent = LocalTeacher(checkpoint, CollectSettings()).lineage()
    assert (parent.role, parent.name) == ("signal", "attar:tiny")
    assert parent.fingerprint == checkpoint.fingerprint() and parent.licence["ids"] == ["apache-2.0"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("<think>\na b\n</think>\n\nc", ("a b", "c")),
        ("<think></think>c", ("", "c")),
        ("c", ("", "c")),
        ("c </think> d", ("", "c </think> d")),
        ("<think>never ends", ("", "<think>never ends")),
    ],
)
def test_reasoning_is_split_off(text, parts):
    assert split_reasoning(text) == parts
