"""``attar generate MODEL -p TEXT``."""

from __future__ import annotations

from typing import Any

from attar.cli.command import Answer, argument, many_option, read_settings, settings_options
from attar.cli.command import build as build_command
from attar.progress import Progress
from attar.verbs import GenerateSettings, run_generate

_EXAMPLE = 'attar generate attar:tiny -p "def " --max-tokens 64 --temperature 0.8 --seed 1'


def build(verb: str) -> Any:
    """The command."""
    parameters = [
        argument("model", "a folder, a .gguf file, a hub id (org/name@revision) or attar:tiny"),
        many_option("prompt", "--prompt", "-p", help="text to continue", required=True),
        *settings_options(GenerateSettings),
    ]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        settings = read_settings(GenerateSettings, verb, values)
        made = run_generate(values["model"], values["prompt"], settings, progress=progress).to_dict()
        texts = zip(values["prompt"], made["completions"], strict=True)
        return Answer(made, "\n\n".join(prompt + completion["text"] for prompt, completion in texts))

    return build_command(verb, "Continue one or more prompts.", _EXAMPLE, parameters, act)
