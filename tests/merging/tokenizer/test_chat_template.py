"""Chat templates: rendered by transformers, chosen among inputs, written and read back."""

import json

import pytest
from transformers import AutoTokenizer

from attar.errors import SettingsError
from attar.merging.tokenizer.chat_template import (
    BUILT_IN,
    choose_chat_template,
    read_chat_template,
    write_chat_template,
)
from tests import tiny_models

EOS = "<|endoftext|>"
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Two?"},
]
RENDERED = {
    "alpaca": "Be brief.\n\n### Instruction:\nOne?\n\n### Response:\nYes." + EOS + "\n\n"
    "### Instruction:\nTwo?\n\n### Response:\n",
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n"
    "<|im_start|>assistant\nYes.<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n",
    "exaone": "[|system|]Be brief.[|endofturn|]\n[|user|]One?\n[|assistant|]Yes.[|endofturn|]\n"
    "[|user|]Two?\n[|assistant|]",
    "llama3": EOS + "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nOne?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nYes.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nTwo?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": EOS + "[INST] Be brief.\n\nOne? [/INST] Yes." + EOS + "[INST] Two? [/INST]",
}


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_built_in_templates_render_their_format(name, tmp_path):
    tiny_models.tokenizer().save_pretrained(tmp_path)
    write_chat_template(tmp_path, BUILT_IN[name])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text == RENDERED[name]


def test_exaone_opens_an_empty_system_turn():
    tokenizer = tiny_models.tokenizer()
    text = tokenizer.apply_chat_template(MESSAGES[1:2], tokenize=False, chat_template=BUILT_IN["exaone"])
    assert text == "[|system|][|endofturn|]\n[|user|]One?\n"


def folders(tmp_path, *templates):
    items = []
    for number, template in enumerate(templates):
        folder = tmp_path / f"m{number}"
        folder.mkdir()
        if template:
            (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        items.append(folder)
    return items


@pytest.mark.parametrize(
    ("templates", "base", "chosen"),
    [
        (("{a}", "{b}", "{b}"), 0, "{b}"),
        (("{a}", "{b}"), 1, "{b}"),
        (("{a}", "{b}"), None, "{a}"),
        (("{a}", "{b}", None), 2, "{a}"),
        ((None, None), 0, None),
    ],
)
def test_auto_takes_the_most_common(tmp_path, templates, base, chosen):
    assert choose_chat_template("auto", folders(tmp_path, *templates), base) == chosen


def test_a_template_is_found_wherever_it_stands(tmp_path):
    one, two, three = folders(tmp_path, "{old}", None, [{"name": "tool", "template": "{t}"}])
    (one / "chat_template.jinja").write_text("{new}")
    (two / "chat_template.json").write_text('{"chat_template": "{json}"}')
    assert [read_chat_template(folder) for folder in (one, two, three)] == ["{new}", "{json}", None]


def test_writing_removes_older_places(tmp_path):
    (folder,) = folders(tmp_path, "{old}")
    (folder / "chat_template.json").write_text('{"chat_template": "{json}"}')
    write_chat_template(folder, "{new}")
    assert read_chat_template(folder) == "{new}"
    assert not (folder / "chat_template.json").exists()
    assert json.loads((folder / "tokenizer_config.json").read_text()) == {}


@pytest.mark.parametrize(("setting", "words"), [("chatm", "'chatml'"), ("{% for x %}", "Jinja")])
def test_a_wrong_setting_is_named(setting, words):
    with pytest.raises(SettingsError, match=words):
        choose_chat_template(setting, [])


def test_no_setting_is_no_template():
    assert choose_chat_template(None, []) is None
    template = "{% generation %}{{ messages }}{% endgeneration %}"
    assert choose_chat_template(template, []) == template
