"""``attar generate MODEL PROMPT...``: completions on stdout as they are generated."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attar.cli.command import (
    MODEL_HELP,
    Answer,
    argument,
    build_command,
    flag,
    many_argument,
    many_option,
    read_settings,
    settings_options,
    text_option,
)
from attar.cluster.settings import ClusterSettings
from attar.errors import DataError, UsageError
from attar.printable import for_stdout
from attar.progress import Progress
from attar.runtime.settings import EngineSettings, TextSettings
from attar.verbs import check_models

_EXAMPLE = 'attar generate attar:tiny "def " --max-tokens 64 --temperature 0.8 --seed 1'


def build_generate(verb: str) -> Any:
    """The command."""
    parameters = [
        argument("model", MODEL_HELP),
        many_argument("prompts", "text to continue; - or none at all: standard input", "[PROMPT]..."),
        many_option("prompt", "--prompt", "-p", help="text to continue"),
        text_option("file", "--file", "-f", help="a file of prompts, one in each line", metavar="FILE"),
        text_option("out", "--out", "-o", help="write a line for each prompt", metavar="OUT.jsonl"),
        flag("force", "--force", help="replace an existing file; its journal stays"),
        text_option(
            "batch_rows", "--batch-rows", help="with -o: prompts of a task  [default: 32]", metavar="N"
        ),
        flag("chat", "--chat", help="each prompt is a user's message, put into the model's chat template"),
        *settings_options(TextSettings),
        *settings_options(EngineSettings),
        *settings_options(ClusterSettings),
    ]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        check_models(values["model"])
        params = read_settings(TextSettings, verb, values).params()
        options = read_settings(EngineSettings, verb, values).options()
        prompts = list(_prompts(values))
        cluster = read_settings(ClusterSettings, verb, values)
        if values["out"]:
            return _to_file(verb, values, prompts, cluster, progress)
        if cluster.on or cluster.jobs > 1:
            raise UsageError("--on and --jobs need a file for the answers", hint="-o OUT.jsonl")
        from attar.runtime.llm import LLM

        llm = LLM(values["model"], **options)
        shown = ["" if values["chat"] else prompt for prompt in prompts]
        token_ids = [llm.encode_chat([_user(p)]) if values["chat"] else llm.encode(p) for p in prompts]
        if len(token_ids) == 1 and params.n == 1:
            return Answer(
                lambda: _data(prompts, llm.generate([token_ids[0]], params)),
                lambda: _stream(llm, shown[0], token_ids[0], params),
            )
        return Answer(
            lambda: _data(prompts, llm.generate(token_ids, params, progress=progress)),
            lambda: _print(shown, llm.generate(token_ids, params, progress=progress)),
        )

    return build_command(verb, "Continue one or more prompts.", _EXAMPLE, parameters, act)


def _to_file(
    verb: str, values: dict[str, Any], prompts: list[str], cluster: ClusterSettings, progress: Progress
) -> Answer:
    from attar.serving.batch import generate_to_file

    size = values["batch_rows"] or "32"
    result = generate_to_file(
        values["model"],
        prompts,
        Path(values["out"]),
        read_settings(TextSettings, verb, values),
        read_settings(EngineSettings, verb, values),
        cluster,
        chat=values["chat"],
        batch=int(size) if size.isdigit() else 0,
        force=values["force"],
        progress=progress,
    )
    errors = f", {result.errors} of them with an error" if result.errors else ""
    return Answer(result.to_dict(), f"{result.path}: {result.prompts} prompts{errors}")


def _prompts(values: dict[str, Any]) -> Iterator[str]:
    """Prompts of the command line, of the file, and of standard input."""
    prompts = [*(values["prompts"] or ()), *(values["prompt"] or ())]
    if not prompts and not values["file"]:
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError("no prompt", hint='attar generate MODEL "text"')
        prompts = ["-"]
    for prompt in prompts:
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
    """Print one completion as it is generated."""
    for event in llm.stream(ids, params):
        print(for_stdout(prompt + event.text), end="", flush=True)
        prompt = ""  # printed once, after the parameters are accepted
    print(flush=True)


def _print(prompts: list[str], results: list[Any]) -> None:
    texts = zip(prompts, results, strict=True)
    samples = [prompt + text.text for prompt, result in texts for text in result.samples]
    print(for_stdout("\n\n".join(samples)), flush=True)


def _data(prompts: list[str], results: list[Any]) -> dict[str, Any]:
    records = [result.to_dict() | {"prompt": prompt} for prompt, result in zip(prompts, results, strict=True)]
    completions = [{**_first(record), **record} for record in records]
    names = ("prompt_tokens", "completion_tokens")
    counts = {name: sum(record["usage"][name] for record in records) for name in names}
    return {"completions": completions, "usage": counts | {"total_tokens": sum(counts.values())}}


def _first(record: dict[str, Any]) -> dict[str, Any]:
    """Fields of a prompt's first (often only) completion."""
    return {name: record["samples"][0][name] for name in ("text", "token_ids", "finish_reason")}
