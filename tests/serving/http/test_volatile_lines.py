"""Lines that change come behind the conversation, in what form a template takes them."""

from __future__ import annotations

import pytest

from attar.errors import SettingsError
from attar.serving.http.settings import TemplateSettings
from attar.serving.http.tokenizer import ServerTokenizer
from attar.serving.http.volatile_lines import move_volatile
from tests import tiny_models

SYSTEM = {"role": "system", "content": "Time: 1\nBe brief.\nTimeless: yes"}
USER, ANSWER = {"role": "user", "content": "Go"}, {"role": "assistant", "content": "On"}


def moved(*messages, continued=False, starts=("Time:", "Date:")):
    return [(m["role"], m["content"]) for m in move_volatile(messages, starts, continued)]


def test_lines_come_behind_the_conversation():
    others = [("system", "Be brief.\nTimeless: yes"), ("user", "Go")]
    assert moved(SYSTEM, USER) == [*others, ("system", "Time: 1")]
    assert moved(SYSTEM, USER, ANSWER, continued=True) == [
        *others,
        ("system", "Time: 1"),
        ("assistant", "On"),
    ]
    several = {"role": "system", "content": "Date: 2\nTime: 3"}
    assert moved(several, USER) == [("user", "Go"), ("system", "Date: 2\nTime: 3")]
    assert moved(SYSTEM, USER, starts=()) == [("system", SYSTEM["content"]), ("user", "Go")]
    user = {"role": "user", "content": "Time: mine"}
    assert moved(user) == [("user", "Time: mine")], "what users write stays"
    with pytest.raises(SettingsError):
        TemplateSettings(volatile_line=("  ",))


@pytest.mark.parametrize(
    ("template", "last"),
    [
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", "<user>Go<system>Time: 1"),
        (
            "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
            "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
            "<{{ m.role }}>{{ m.content }}{% endfor %}",
            "<user>Go<user>Time: 1",
        ),
        (
            "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
            "{{ raise_exception('roles must alternate') }}{% endif %}"
            "<{{ m.role }}>{{ m.content }}{% endfor %}",
            "Go\n\nTime: 1",
        ),
    ],
)
def test_a_template_that_takes_no_late_system_message_gets_the_users_words(template, last):
    tokenizer = tiny_models.tokenizer()
    tokenizer.chat_template = template
    served = ServerTokenizer(tokenizer)
    messages = move_volatile([SYSTEM, USER], ("Time:",), False)
    assert served.decode(served.chat(messages)).replace(" ", "").endswith(last.replace(" ", ""))
