"""``Modelfile``: how Ollama runs an exported GGUF file.

    FROM ./NAME.gguf     TEMPLATE (Go)     SYSTEM     PARAMETER stop, num_ctx     LICENSE

A chat template is a program in Jinja, Ollama's are in Go. Most templates write every message by itself,
between two texts that depend on its role alone. These texts are read off a rendered conversation, and what
they make of other conversations is compared with what the template makes. Only where all are equal is a
TEMPLATE written; else it is left out with a comment, and Ollama looks for its own template by the file's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attar.chat_template import render_chat

CONTEXT = 8192  # largest num_ctx; Ollama's own default is smaller
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")
_TEXTS = {"system": "Sierra", "user": "Uniform", "assistant": "Alpha"}
_TRIALS = (
    ("user",),
    ("user", "assistant", "user"),
    ("system", "user"),
    ("system", "user", "assistant", "user", "assistant", "user"),
)


@dataclass(frozen=True)
class Turns:
    """A chat template that writes each message by itself.

    Attributes:
        around: by role, the texts before and after a message.
        opening: the beginning of an answer, after the last message.
        system: the message that the template puts in where there is no system message; None: none.
    """

    around: Mapping[str, tuple[str, str]]
    opening: str
    system: str | None

    def render(self, roles: Sequence[str]) -> str:
        """A conversation of the words of _TEXTS."""
        chat = [(role, _TEXTS[role]) for role in roles]
        if self.system is not None and "system" not in roles:
            chat.insert(0, ("system", self.system))
        return "".join(text.join(self.around[role]) for role, text in chat) + self.opening

    def go(self) -> str:
        """The same in Go's language, texts quoted so that no blank is lost."""
        branches: list[str] = []
        for role, (before, after) in self.around.items():
            word = "else if" if branches else "if"
            body = "".join((_text(before), "{{ .Content }}", _text(after)))
            branches.append(f'{{{{- {word} eq .Role "{role}" }}}}{body}')
        return "\n".join(
            ["{{- range .Messages }}", *branches, "{{- end }}", f"{{{{- end }}}}{_text(self.opening)}"]
        )


def modelfile(name: str, metadata: Mapping[str, Any], licence: str, context: int | None) -> str:
    """The text.

    Args:
        name: of the GGUF file, in the same folder.
        metadata: of that file, values without types.
        licence: its line about the licence; empty: none.
        context: of the model, in tokens; None: not known.
    """
    lines = [f"FROM ./{name}"]
    template, special = metadata.get("tokenizer.chat_template"), special_tokens(metadata)
    turns = read_turns(template, special, _adds_bos(metadata)) if isinstance(template, str) else None
    if turns is not None:
        lines.append(f'TEMPLATE """{turns.go()}"""')
        if turns.system is not None:
            lines.append(f'SYSTEM """{turns.system}"""')
    elif template is not None:
        lines.append("# No TEMPLATE: the model's chat template has no exact form in Ollama's language.")
    else:
        lines.append("# No TEMPLATE: the model has no chat template; it continues text.")
    ends = [turns.around["assistant"][1].strip()] if turns is not None else []
    stops = [text for text in (*ends, special.get("eos_token", "")) if text]
    lines += [f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in dict.fromkeys(stops)]
    if context:
        lines.append(f"PARAMETER num_ctx {min(context, CONTEXT)}")
    if licence:
        lines.append(f'LICENSE """{licence}"""')
    return "\n".join(lines) + "\n"


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens by the names that chat templates use."""
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    keys = {"unk_token": "unknown_token_id", "pad_token": "padding_token_id"}
    ids = {role: metadata.get(f"tokenizer.ggml.{keys.get(role, f'{role}_id')}") for role in _NAMED}
    return {
        role: tokens[index] for role, index in ids.items() if isinstance(index, int) and index < len(tokens)
    }


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether llama.cpp puts the beginning-of-text token in front of every text."""
    spoken = metadata.get("tokenizer.ggml.add_bos_token")
    return bool(metadata.get("tokenizer.ggml.model") == "llama" if spoken is None else spoken)


def read_turns(template: str, special: Mapping[str, str], adds_bos: bool = True) -> Turns | None:
    """The texts around the messages of a template; None where it writes messages in another way.

    Args:
        adds_bos: Ollama adds the beginning-of-text token by itself, so the template must not.
    """

    variables: dict[str, Any] = dict(special)

    def rendered(roles: Sequence[str], prompt: bool = True) -> str | None:
        chat = [{"role": role, "content": _TEXTS[role]} for role in roles]
        try:
            text = render_chat(template, chat, add_generation_prompt=prompt, **variables)
        except Exception:  # a template is a program and may refuse roles in its own way
            return None
        return text.removeprefix(special.get("bos_token", "")) if adds_bos else text

    turns = _turns(rendered)
    if turns is None or '"""' in (turns.system or ""):
        return None
    trials = [roles for roles in _TRIALS if "system" in turns.around or "system" not in roles]
    return turns if all(rendered(roles) == turns.render(roles) for roles in trials) else None


def _turns(rendered: Any) -> Turns | None:
    """A guess at the texts, from conversations that differ by a message."""
    user_turn, dialogue = rendered(("user",), False), rendered(("user", "assistant", "user"), False)
    opened = rendered(("user",))
    if user_turn is None or dialogue is None or opened is None or not opened.startswith(user_turn):
        return None
    if dialogue.count(_TEXTS["user"]) != 2 or dialogue.count(_TEXTS["assistant"]) != 1:
        return None
    first, middle, after_assistant = _cut(dialogue, "user", "assistant")
    after_answer, _, after_user = after_assistant.partition(_TEXTS["user"])
    if not middle.startswith(after_user):
        return None
    return _with_system(
        rendered, first, middle[len(after_user) :], after_answer, after_user, opened[len(user_turn) :]
    )


def _with_system(
    rendered: Any, first: str, before_answer: str, after_answer: str, after_user: str, opening: str
) -> Turns | None:
    """The texts around a system message, and the text there without one."""
    with_system = rendered(("system", "user"), False)
    plain_user = _common_end(first, after_answer)
    if (
        with_system is None
        or with_system.count(_TEXTS["system"]) != 1
        or with_system.count(_TEXTS["user"]) != 1
    ):
        if not after_answer.endswith(first):
            return None
        after = after_answer[: len(after_answer) - len(first)]
        return Turns({"user": (first, after_user), "assistant": (before_answer, after)}, opening, None)
    before_system, joint, _ = _cut(with_system, "system", "user")
    before_user = _common_end(joint, plain_user)
    if after_user and before_user.startswith(after_user):  # a message's end belongs to the message before
        before_user = before_user[len(after_user) :]
    after_system = joint[: len(joint) - len(before_user)]
    missing = first[: len(first) - len(before_user)]
    default = missing.removeprefix(before_system).removesuffix(after_system) if missing else None
    if default is not None and f"{before_system}{default}{after_system}" != missing:
        return None
    if not after_answer.endswith(before_user):
        return None
    after = after_answer[: len(after_answer) - len(before_user)]
    around = {
        "system": (before_system, after_system),
        "user": (before_user, after_user),
        "assistant": (before_answer, after),
    }
    return Turns(around, opening, default)


def _cut(text: str, first_role: str, second_role: str) -> tuple[str, str, str]:
    """The text before, between and after two messages."""
    before, _, after_first = text.partition(_TEXTS[first_role])
    between, _, after = after_first.partition(_TEXTS[second_role])
    return before, between, after


def _common_end(first: str, second: str) -> str:
    """The longest text that both end with, beginning with a special token or a line where one does."""
    size = 0
    while size < min(len(first), len(second)) and first[-1 - size] == second[-1 - size]:
        size += 1
    common = first[len(first) - size :]
    starts = [index for index in (common.find("<"), common.find("[")) if index >= 0]
    return common[min(starts) :] if starts else common


def _text(text: str) -> str:
    """A text in Go, quoted."""
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if text else ""
