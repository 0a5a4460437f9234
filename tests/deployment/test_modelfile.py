"""Modelfiles: Ollama's template says what the model's says, or there is none."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from attar.chat_template import render_chat
from attar.checkpoint import open_checkpoint
from attar.checkpoint.card import Card
from attar.checkpoint.hashing import sha256_file
from attar.deployment.modelfile import modelfile, read_turns
from attar.deployment.settings import ExportSettings
from attar.deployment.stage import export

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
SMOLLM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are SmolLM.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + "
    "'\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{% set content = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'"
    " + "
    "m['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role'])"
    " + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}\n{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token }}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% else %}{{ raise_exception('no') }}"
    "{% endif %}{% endfor %}"
)
KNOWN = {
    "smollm": SMOLLM,
    "chatml": CHATML,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "zephyr": ZEPHYR,
    "mistral": MISTRAL,
}
LAST = (  # the system message stands in the last user's
    "{% for m in messages %}{% if m.role == 'user' %}[INST] "
    "{% if loop.last and messages[0].role == 'system' %}"
    "{{ messages[0].content }}\n{% endif %}{{ m.content }}[/INST]{% elif m.role == 'assistant' %}"
    "{{ m.content }}</s>{% endif %}{% endfor %}"
)
COUNTING = "{% for m in messages %}{{ loop.index }} {{ m.role }}: {{ m.content }}\n{% endfor %}"


def go(template: str, messages: list[dict[str, str]]) -> str:
    """What Go's text/template makes of the few words that a Modelfile uses."""
    template = re.sub(r"\s*\{\{- ", "{{ ", template)
    body, _, opening = template.removeprefix("{{ range .Messages }}").rpartition("{{ end }}{{ end }}")
    branches = re.findall(
        r'\{\{ (?:else )?if eq \.Role "(\w+)" \}\}(.*?)(?=\{\{ else if|\Z)', body, re.DOTALL
    )
    assert branches

    def text(part: str, content: str) -> str:
        words = re.findall(r'\{\{ (\.Content|"(?:[^"\\]|\\.)*") \}\}', part)
        return "".join(content if word == ".Content" else json.loads(word) for word in words)

    of = dict(branches)
    return "".join(text(of[m["role"]], m["content"]) for m in messages) + text(opening, "")


@pytest.mark.parametrize("name", KNOWN)
def test_a_template_says_the_same_in_go(name: str) -> None:
    turns = read_turns(KNOWN[name], SPECIAL)
    assert turns is not None
    chat = [
        {"role": "user", "content": 'What is <|x|> "this"?'},
        {"role": "assistant", "content": "{{ A }}"},
        {"role": "user", "content": "And?"},
    ]
    chats = [chat[:1], chat]
    if "system" in turns.around:
        chats += [[{"role": "system", "content": "Be brief."}, *item] for item in chats]
    for messages in chats:
        expected = render_chat(KNOWN[name], messages, add_generation_prompt=True, **SPECIAL)
        default = turns.system is not None and messages[0]["role"] != "system"
        asked = [{"role": "system", "content": turns.system or ""}, *messages] if default else messages
        assert go(turns.go(), asked) == expected.removeprefix("<s>")
    assert (turns.system == "You are SmolLM.") == (name == "smollm")
    assert ("system" in turns.around) == (name not in ("gemma", "mistral"))


@pytest.mark.parametrize("template", [LAST, COUNTING, "{{ damaged", "same for all"])
def test_a_template_of_another_kind_is_left_out(template: str) -> None:
    assert read_turns(template, SPECIAL) is None
    text = modelfile("m.gguf", {"tokenizer.chat_template": template}, "", None)
    assert text.splitlines()[0] == "FROM ./m.gguf"
    assert 'TEMPLATE """' not in text and "# No TEMPLATE" in text


def test_the_beginning_token_stays_where_ollama_adds_none() -> None:
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    turns = read_turns(CHATML, special, adds_bos=False)
    assert turns is not None and turns.around["system"][0] == "<|im_start|>system\n"


def test_parameters(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.chat_template": CHATML,
        "tokenizer.ggml.tokens": ["<s>", "</s>"],
        "tokenizer.ggml.eos_token_id": 1,
    }
    text = modelfile("m.gguf", metadata, "Apache License 2.0", 2048)
    assert 'PARAMETER stop "<|im_end|>"\nPARAMETER stop "</s>"\nPARAMETER num_ctx 2048\n' in text
    assert 'LICENSE """Apache License 2.0"""' in text
    assert "num_ctx 8192" in modelfile("m.gguf", metadata, "", 131072)


def test_an_exported_file_has_one_under_its_own_name(tmp_path: Path) -> None:
    for name, kind in (("one", "Q8_0"), ("two", "Q4_K_M")):  # the second has an importance matrix
        settings = ExportSettings(format="gguf", type=kind, samples=4, sequence_length=16)
        export("attar:tiny", tmp_path / f"{name}.gguf", settings)
    for name in ("one", "two"):
        assert (tmp_path / f"{name}.Modelfile").read_text().startswith(f"FROM ./{name}.gguf\n")
        readme = (tmp_path / f"{name}.md").read_text()
        assert f"ollama create {name} -f {name}.Modelfile" in readme and str(tmp_path) not in readme
        named = set(re.findall(r"[\w.-]+\.(?:gguf|json|md|Modelfile)\b", readme))
        assert {f"{name}.gguf", f"{name}.attar.json"} <= named
        assert all((tmp_path / file).is_file() for file in named), named
        assert f"`attar inspect {name}.gguf`" in readme
        card = open_checkpoint(tmp_path / f"{name}.gguf").card
        assert card is not None and card.name == name
        read = {f"{name}.attar-text.json"} if name == "two" else set()
        assert set(card.files) == {f"{name}.Modelfile", f"{name}.gguf", f"{name}.md"} | read
        assert all(sha256_file(tmp_path / file) == mark for file, mark in card.files.items())


@pytest.mark.slow
def test_an_exported_folder_has_one(tmp_path: Path) -> None:
    export("attar:tiny", tmp_path / "out", ExportSettings(format="gguf", type="Q8_0"))
    card = Card.read(tmp_path / "out")
    assert card is not None and {"Modelfile", "README.md"} <= set(card.files)
    text = (tmp_path / "out" / "Modelfile").read_text()
    assert text.startswith("FROM ./attar-tiny-Q8_0.gguf\n") and 'stop "<|endoftext|>"' in text
    export("attar:tiny", tmp_path / "parts", ExportSettings(format="gguf", type="Q8_0", max_file="4MB"))
    assert not (tmp_path / "parts" / "Modelfile").exists()
