"""``attar generate MODEL PROMPT...``: texts as they come, on stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attar.cli.command import (
    Answer,
    argument,
    flag,
    many_argument,
    many_option,
    read_settings,
    settings_options,
    text_option,
)
from attar.cli.command import build as build_command
from attar.errors import DataError, UsageError
from attar.progress import Progress
from attar.recipe.stages import load
from attar.verbs import check_models

_SETTINGS = "attar.runtime.settings"
_EXAMPLE = 'attar generate attar:tiny "def " --max-tokens 64 --temperature 0.8 --seed 1'


def build(verb: str) -> Any:
    """The command."""
    engine, texts = load(f"{_SETTINGS}:EngineSettings"), load(f"{_SETTINGS}:TextSettings")
    parameters = [
        argument("model", "a folder, a .gguf file, a hub id (org/name@revision) or attar:tiny"),
        many_argument("prompts", "text to continue; - or none at all: standard input", "[PROMPT]..."),
        many_option("prompt", "--prompt", "-p", help="text to continue"),
        text_option("file", "--file", "-f", help="a file of prompts, one in each line", metavar="FILE"),
        flag("chat", "--chat", help="each prompt is a user's message, put into the model's chat template"),
        *settings_options(texts),
        *settings_options(engine),
    ]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        check_models(values["model"])
        params = read_settings(texts, verb, values).params()
        options = read_settings(engine, verb, values).options()
        prompts = list(_prompts(values))
        llm = load("attar.runtime.llm:LLM")(values["model"], **options)
        shown = ["" if values["chat"] else prompt for prompt in prompts]
        said = [llm.encode_chat([_user(p)]) if values["chat"] else llm.encode(p) for p in prompts]
        if len(said) == 1 and params.n == 1:
            return Answer(
                lambda: _data(prompts, llm.generate([said[0]], params)),
                lambda: _stream(llm, shown[0], said[0], params),
            )
        return Answer(
            lambda: _data(prompts, llm.generate(said, params, progress=progress)),
            lambda: _print(shown, llm.generate(said, params, progress=progress)),
        )

    return build_command(verb, "Continue one or more prompts.", _EXAMPLE, parameters, act)


def _prompts(values: dict[str, Any]) -> Iterator[str]:
    """Those of the command line, of the file, and of standard input."""
    given = [*(values["prompts"] or ()), *(values["prompt"] or ())]
    if not given and not values["file"]:
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError("no prompt", hint='attar generate MODEL "text"')
        given = ["-"]
    for prompt in given:
        yield sys.stdin.read() if prompt == "-" else prompt
    if values["file"]:
        path = Path(values["file"])
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeError) as error:
            raise DataError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
        if not any(lines):
            raise DataError(f"{path} has no prompts", hint="one in each line")
        yield from (line for line in lines if line)


def _user(prompt: str) -> dict[str, str]:
    return {"role": "user", "content": prompt}


def _stream(llm: Any, prompt: str, ids: list[int], params: Any) -> None:
    """One text, piece by piece."""
    for event in llm.stream(ids, params):
        print(prompt + event.text, end="", flush=True)
        prompt = ""  # once, and not before the parameters are accepted
    print(flush=True)


def _print(prompts: list[str], results: list[Any]) -> None:
    texts = zip(prompts, results, strict=True)
    print("\n\n".join(prompt + text.text for prompt, result in texts for text in result.samples), flush=True)


def _data(prompts: list[str], results: list[Any]) -> dict[str, Any]:
    made = [result.to_dict() | {"prompt": prompt} for prompt, result in zip(prompts, results, strict=True)]
    completions = [{**_first(each), **each} for each in made]
    counts = {
        name: sum(each["usage"][name] for each in made) for name in ("prompt_tokens", "completion_tokens")
    }
    return {"completions": completions, "usage": counts | {"total_tokens": sum(counts.values())}}


def _first(made: dict[str, Any]) -> dict[str, Any]:
    """The first (often only) text of a prompt, as fields of the prompt's own."""
    return {name: made["samples"][0][name] for name in ("text", "token_ids", "finish_reason")}
