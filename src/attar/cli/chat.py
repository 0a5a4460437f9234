"""``attar chat MODEL``: a conversation in the terminal, or with the lines of standard input."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from attar.chat_template import PLAIN_NOTE
from attar.cli.command import Answer, argument, build_command, read_settings, settings_options, text_option
from attar.cli.guard import error_lines, print_lines
from attar.errors import AttarError, nearest
from attar.printable import for_stdout, printable
from attar.progress import Progress
from attar.runtime.settings import ChatSettings, EngineSettings
from attar.verbs import check_models

_EXAMPLE = "attar chat attar:smollm2"
_NOT_FOR_CHAT = ("n", "logprobs", "prompt_logprobs", "skip_special_tokens", "ignore_eos")
_QUOTES = '"""'
_HELP = f"""\
/system TEXT   set the system message; without TEXT: show it
/clear, /new   forget the conversation; the system message stays
/stats         tokens, speed and cache hits of the answers
/help          this
/exit          end; Ctrl-D too
Ctrl-C stops an answer. {_QUOTES} begins and ends a message of several lines."""


def build_chat(verb: str) -> Any:
    """The command."""
    parameters = [
        argument("model", "a folder, a .gguf file, a hub id (org/name@revision) or attar:smollm2"),
        text_option("system", "--system", "-s", help="the system message"),
        *settings_options(ChatSettings, without=_NOT_FOR_CHAT),
        *settings_options(EngineSettings),
    ]

    def act(values: dict[str, Any], progress: Progress) -> Answer:
        check_models(values["model"])
        params = read_settings(ChatSettings, verb, values).params()
        options = read_settings(EngineSettings, verb, values).options()
        from attar.runtime.llm import LLM
        from attar.serving.chat import Chat

        with progress.task("load", total=1) as task:
            llm = LLM(values["model"], **options)
            task.advance()
        chat = Chat(llm, params, values["system"])
        if not chat.tells_roles:
            progress.log(f"note: {PLAIN_NOTE}")
        terminal = sys.stdin is not None and sys.stdin.isatty()
        return Answer(
            lambda: _data(chat, _messages(terminal)), lambda: _converse(chat, _messages(terminal), terminal)
        )

    return build_command(verb, "Talk with a model.", _EXAMPLE, parameters, act)


def _messages(terminal: bool) -> Iterator[str]:
    """The user's messages: lines, or blocks in triple quotes; ends with the input."""
    if terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  # gives input() line editing and a history
    while True:
        try:
            line = _line("> ", terminal)
            if line.lstrip().startswith(_QUOTES):
                line = _block(line.lstrip().removeprefix(_QUOTES), terminal)
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /exit ends)", flush=True)
            continue
        except EOFError:
            if terminal:
                print(flush=True)
            return
        if line.strip():
            yield line.strip()


def _line(prompt: str, terminal: bool) -> str:
    if terminal:
        return input(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def _block(first: str, terminal: bool) -> str:
    """Lines up to the closing quotes."""
    lines = [first]
    while not lines[-1].rstrip().endswith(_QUOTES):
        lines.append(_line(". ", terminal))
    lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
    return "\n".join(lines)


def _converse(chat: Any, messages: Iterator[str], terminal: bool) -> None:
    if terminal:
        facts = chat.llm.describe()
        named = f"{facts.model}: {facts.runner}, {facts.weights} weights"
        print(printable(f"{named}, {chat.limit:,} tokens; /help"))
    for message in messages:
        if message.startswith("/"):
            if not _command(chat, message):
                return
            continue
        try:
            _answer(chat, message)
        except AttarError as error:
            if not terminal:
                raise
            print_lines(*error_lines(error))


def _answer(chat: Any, message: str) -> None:
    """Print an answer as it is generated; Ctrl-C stops it."""
    with _interrupts() as stopped:
        for piece in chat.ask(message, stopped):
            print(for_stdout(piece), end="", flush=True)
    last = chat.stats[-1]
    print(" (stopped)" if last.stopped else "", flush=True)
    if last.dropped:
        print(f"({last.dropped} oldest messages dropped: {chat.limit:,} tokens are full)", file=sys.stderr)


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: it takes effect after a step, so that the engine stays consistent."""
    pressed: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, previous)


def _command(chat: Any, line: str) -> bool:
    """Run a command of a line with a slash; False ends the conversation."""
    name, _, argument = line.partition(" ")
    if name in ("/exit", "/quit"):
        return False
    if name == "/system":
        chat.system = argument.strip() or chat.system
        print(f"system: {chat.system or '(what the template says by itself)'}", flush=True)
    elif name in ("/clear", "/new"):
        chat.clear()
        print("(a new conversation)", flush=True)
    elif name == "/stats":
        print("\n".join(_stats(chat)), flush=True)
    elif name == "/help":
        print(_HELP, flush=True)
    else:
        names = ("/system", "/clear", "/new", "/stats", "/help", "/exit", "/quit")
        close = nearest(name, names)
        print(f"no command {name}{f'; did you mean {close}?' if close else ''} (/help)", flush=True)
    return True


def _stats(chat: Any) -> list[str]:
    """Statistics of the last answer, and of all answers."""
    if not chat.stats:
        return ["no answer yet"]
    last = chat.stats[-1]
    first = "-" if last.first_token_s is None else f"{last.first_token_s:.2f} s"
    speed = "-" if last.tokens_per_second is None else f"{last.tokens_per_second:.1f}"
    answers, tokens = len(chat.stats), sum(stats.tokens for stats in chat.stats)
    prompts, cached = (
        sum(getattr(stats, f"{name}_tokens") for stats in chat.stats) for name in ("prompt", "cached")
    )
    return [
        f"last answer   {last.tokens:,} tokens, {speed} tokens/s, first token after {first}",
        f"its prompt    {last.prompt_tokens:,} tokens, {last.cached_tokens:,} of them cached",
        f"all {answers:<9,} {tokens:,} tokens, prompts {prompts:,}, {cached:,} of them cached",
        f"context       {chat.limit:,} tokens",
    ]


def _data(chat: Any, messages: Iterator[str]) -> dict[str, Any]:
    """The conversation for ``--json``; output of commands goes to stderr."""
    _converse(chat, messages, terminal=False)
    system = [] if chat.system is None else [{"role": "system", "content": chat.system}]
    return {"messages": [*system, *chat.messages], "answers": [stats.to_dict() for stats in chat.stats]}
