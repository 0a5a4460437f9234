"""The chat template of a merge: the parents' most common one, a built-in one, or one given as Jinja text.

Checkpoints store it in ``chat_template.jinja``, older ones in ``chat_template.json`` or
``tokenizer_config.json``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateSyntaxError

from attar.checkpoint.atomic import explain_os_errors
from attar.checkpoint.jsonfile import read_json
from attar.errors import SettingsError, nearest

AUTO = "auto"
FILE = "chat_template.jinja"
_GENERATION = re.compile(r"{%[-+]?\s*(end)?generation\s*[-+]?%}")  # a tag of transformers' own

_ALPACA = """\
{%- for message in messages %}
{%- if message['role'] == 'user' %}
{{- '### Instruction:\\n' + message['content'] + '\\n\\n' }}
{%- elif message['role'] == 'assistant' %}
{{- '### Response:\\n' + message['content'] + eos_token + '\\n\\n' }}
{%- else %}
{{- message['content'] + '\\n\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '### Response:\\n' }}
{%- endif %}
"""

_CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_EXAONE = """\
{%- for message in messages %}
{%- if loop.first and message['role'] != 'system' %}
{{- '[|system|][|endofturn|]\\n' }}
{%- endif %}
{{- '[|' + message['role'] + '|]' + message['content'] }}
{{- '\\n' if message['role'] == 'user' else '[|endofturn|]\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '[|assistant|]' }}
{%- endif %}
"""

_LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

_MISTRAL = """\
{{- bos_token }}
{%- set state = namespace(system='') %}
{%- for message in messages %}
{%- if message['role'] == 'system' %}
{%- set state.system = message['content'] + '\\n\\n' %}
{%- elif message['role'] == 'user' %}
{{- '[INST] ' + state.system + message['content'] + ' [/INST]' }}
{%- set state.system = '' %}
{%- else %}
{{- ' ' + message['content'] | trim + eos_token }}
{%- endif %}
{%- endfor %}
"""

BUILT_IN = {
    "alpaca": _ALPACA,
    "chatml": _CHATML,
    "exaone": _EXAONE,
    "llama3": _LLAMA3,
    "mistral": _MISTRAL,
}
"""Templates by mergekit's names for them."""


def choose_chat_template(setting: str | None, folders: Sequence[Path], base: int | None = None) -> str | None:
    """The template that a configuration asks for.

    Args:
        setting: ``auto``, one of :data:`BUILT_IN`, a Jinja text, or None.
        folders: of the models, in the order of the configuration.
        base: index of the base model, or None.

    Returns:
        the template. With ``auto`` the template of most models, of equally common ones the base's, else the
        first; None if no model has a template. None without a setting: the copied files keep their templates.

    Raises:
        SettingsError: no such name, or not a Jinja text.
        CheckpointError: a file that should hold a template is not JSON.
    """
    if setting is None:
        return None
    if setting == AUTO:
        return _most_common([read_chat_template(folder) for folder in folders], base)
    if setting in BUILT_IN:
        return BUILT_IN[setting]
    if "{" not in setting:
        close = nearest(setting, (AUTO, *BUILT_IN))
        raise SettingsError(
            "chat_template",
            setting,
            f"auto, {', '.join(BUILT_IN)}, or a Jinja text" + (f"; did you mean {close!r}?" if close else ""),
        )
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", setting))
    except TemplateSyntaxError as error:
        shown = setting if len(setting) <= 40 else setting[:40] + "..."
        raise SettingsError(
            "chat_template", shown, f"a Jinja text: line {error.lineno}: {error.message}"
        ) from error
    return setting


def _most_common(templates: Sequence[str | None], base: int | None) -> str | None:
    present = [template for template in templates if template]
    if not present:
        return None
    most = max(present.count(template) for template in present)
    of_base = templates[base] if base is not None else None
    if of_base and present.count(of_base) == most:
        return of_base
    return next(template for template in present if present.count(template) == most)


def read_chat_template(folder: Path) -> str | None:
    """The template in a model's folder, of several the one called ``default``; None: there is none.

    Raises:
        CheckpointError: a file that should hold it is not JSON.
    """
    if (folder / FILE).is_file():
        return (folder / FILE).read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = folder / name
        content: Any = read_json(path).get("chat_template") if path.is_file() else None
        if isinstance(content, list):
            named = {entry.get("name"): entry.get("template") for entry in content if isinstance(entry, dict)}
            content = named.get("default")
        if isinstance(content, str) and content:
            return content
    return None


def write_chat_template(folder: Path, template: str) -> None:
    """Make ``template`` the default one of a folder; the tokenizer's other settings stay.

    Raises:
        OutputError: no space, or no permission.
    """
    with explain_os_errors(folder):
        (folder / FILE).write_text(template, encoding="utf-8")
        (folder / "chat_template.json").unlink(missing_ok=True)
        path = folder / "tokenizer_config.json"
        config = read_json(path) if path.is_file() else {}
        if config.pop("chat_template", None) is not None:
            path.write_text(json.dumps(config, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
