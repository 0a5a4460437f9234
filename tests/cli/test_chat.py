"""``attar chat`` on attar:tiny with a template: the conversation itself, piped input, and a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from attar.chat_template import PLAIN_NOTE
from attar.checkpoint import open_checkpoint
from attar.cli.main import call
from attar.errors import DataError, ModelError
from attar.runtime.llm import LLM
from attar.runtime.sampling.params import SamplingParams
from attar.serving.chat import Chat

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "# {{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}# assistant: {% endif %}"
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "tiny"
    shutil.copytree(open_checkpoint("attar:tiny").path, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, kv_tokens=512)


def answer(chat: Chat, text: str, **more: Any) -> str:
    return "".join(chat.ask(text, **more))


def test_an_answer_is_that_of_the_whole_conversation(llm: LLM) -> None:
    chat = Chat(llm, GREEDY, system="Be brief.")
    first, second = answer(chat, "def f("), answer(chat, "and then")
    whole = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "def f("},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "and then"},
    ]
    assert chat.messages == [*whole[1:], {"role": "assistant", "content": second}]
    assert second == llm.chat(whole, GREEDY).text
    assert [stat.tokens for stat in chat.stats] == [8, 8]


def test_a_turn_reads_what_the_turns_before_wrote(llm: LLM) -> None:
    chat = Chat(llm, GREEDY)
    answer(chat, "def reuse(" + "x, " * 30)
    answer(chat, "again")
    last = chat.stats[-1]
    assert last.prompt_tokens > last.cached_tokens >= chat.stats[0].prompt_tokens - 16
    assert last.first_token_s is not None and last.tokens_per_second is not None


def test_special_tokens_in_a_message_stay_text(llm: LLM) -> None:
    chat = Chat(llm, GREEDY)
    ids = chat._encode([{"role": "user", "content": "a<|endoftext|>b"}])
    assert not set(ids) & set(llm.engine.ends)


@pytest.mark.slow
def test_the_oldest_turns_are_dropped_first(llm: LLM) -> None:
    chat = Chat(llm, GREEDY)
    for turn in range(6):
        answer(chat, f"turn {turn} " + "word " * 60)
    assert sum(stat.dropped for stat in chat.stats) >= 2
    assert all(stat.prompt_tokens + 8 <= chat.limit for stat in chat.stats)
    assert chat.messages[-2]["content"].startswith("turn 5")
    assert chat.messages[0]["role"] == "user"


def test_a_message_that_fills_the_context_is_refused_and_not_kept(llm: LLM) -> None:
    chat = Chat(llm, GREEDY)
    with pytest.raises(DataError, match="holds 512 with the answer"):
        answer(chat, "word " * 600)
    assert chat.messages == []
    assert answer(chat, "def f(")


def test_a_stopped_answer_is_kept_as_far_as_it_came(llm: LLM) -> None:
    chat = Chat(llm, SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True))
    steps = iter([False] * 5 + [True] * 5)
    shown = answer(chat, "def f(", stopped=lambda: next(steps))
    assert chat.stats[-1].stopped and 0 < chat.stats[-1].tokens <= 7
    assert chat.messages[-1] == {"role": "assistant", "content": shown}
    assert llm.engine.idle
    assert answer(chat, "more") and not chat.stats[-1].stopped


def test_a_model_without_a_template_is_refused_with_the_right_command() -> None:
    llm = LLM("attar:tiny", kv_tokens=64)
    llm.tokenizer.chat_template = None
    with pytest.raises(ModelError, match="no chat template") as error:
        Chat(llm, GREEDY)
    assert "attar generate" in str(error.value)


def test_the_embedded_model_continues_the_messages() -> None:
    llm = LLM("attar:tiny", kv_tokens=256)
    chat = Chat(llm, SamplingParams(temperature=0, max_tokens=12))
    first = answer(chat, "def add(a, b):")
    assert first == llm.generate("def add(a, b):", chat.params)[0].text and not chat.tells_roles
    second = answer(chat, "def area(a):")
    whole = f"def add(a, b):{first}\ndef area(a):"
    assert second == llm.generate(whole, chat.params)[0].text
    assert chat.stats[-1].cached_tokens > 0


def lines(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_piped_lines_are_messages_and_commands(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines(
        monkeypatch,
        '/help\n/system Be brief.\n\ndef f(\n/stats\n"""two\nlines"""\n/clear\n/sytem x\n'
        "import\n/exit\nnever\n",
    )
    line = ["chat", str(model), "--max-tokens", "4", "-q", "--kv-tokens", "512"]
    assert call(line) == 0
    out = capsys.readouterr().out
    assert "/system TEXT" in out and "system: Be brief." in out
    assert "tokens/s" in out and "(a new conversation)" in out
    assert "no command /sytem; did you mean /system?" in out
    lines(monkeypatch, '/system S\n"""two\nlines"""\n')
    assert call(["chat", str(model), "--max-tokens", "4", "--json", "-q", "--kv-tokens", "512"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["messages"][:2] == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "two\nlines"},
    ]
    assert len(data["answers"]) == 1 and data["answers"][0]["tokens"] <= 4


def test_a_model_without_a_template_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "base"  # of nobody that attar knows
    shutil.copytree(open_checkpoint("attar:tiny").path, base)
    lines(monkeypatch, "hello\n")
    assert call(["chat", str(base), "-q", "--kv-tokens", "64"]) == 1
    error = capsys.readouterr().err
    assert "has no chat template" in error and "hint: it continues text: attar generate" in error


def test_the_embedded_model_on_the_command_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines(monkeypatch, "def add(a, b):\n")
    assert call(["chat", "attar:tiny", "--temperature", "0", "--max-tokens", "12", "--kv-tokens", "64"]) == 0
    shown = capsys.readouterr()
    assert "add" in shown.out and PLAIN_NOTE in shown.err


class Terminal:
    """``attar chat`` in a terminal of its own."""

    def __init__(self, model: Path) -> None:
        ours, theirs = pty.openpty()
        command = ["chat", str(model), "--max-tokens", "1500", "-q", "--kv-tokens", "2048"]
        # As a shell starts it: what runs the tests may ignore or block SIGINT, and its children would.
        code = "import signal; signal.pthread_sigmask(signal.SIG_SETMASK, []); "
        code += "signal.signal(signal.SIGINT, signal.default_int_handler); "
        code += "from attar.cli.main import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "dumb"},
            start_new_session=True,
        )
        os.close(theirs)
        self.ours, self.shown = ours, ""

    def type(self, text: str) -> None:
        os.write(self.ours, text.encode())

    def wait(self, text: str, after: int = 0) -> int:
        """Reads until a text stands behind a place; the place behind it."""
        limit = time.monotonic() + 120
        while text not in self.shown[after:]:
            ready, _, _ = select.select([self.ours], [], [], 1)
            assert time.monotonic() < limit, self.shown
            if ready:
                self.shown += os.read(self.ours, 4096).decode(errors="replace").replace("\r\n", "\n")
        return self.shown.index(text, after) + len(text)


def _interrupt_prompt(terminal: Terminal, offset: int) -> int:
    """Ctrl-C at the prompt; again where it came just before the prompt's ``select`` and was lost."""
    limit = time.monotonic() + 120
    while "Ctrl-D or /exit ends" not in terminal.shown[offset:]:
        assert time.monotonic() < limit, terminal.shown
        terminal.process.send_signal(signal.SIGINT)
        while select.select([terminal.ours], [], [], 2)[0]:
            terminal.shown += os.read(terminal.ours, 4096).decode(errors="replace").replace("\r\n", "\n")
    return len(terminal.shown)


def _interrupted(terminal: Terminal, offset: int) -> int:
    """Asks, and sends Ctrl-C when the answer has begun; the place behind what that came to."""
    terminal.type("def f(\n")
    offset = terminal.wait("def f(\n", offset)
    limit = time.monotonic() + 60
    while len(terminal.shown) < offset + 5 and time.monotonic() < limit:
        terminal.shown += os.read(terminal.ours, 4096).decode(errors="replace").replace("\r\n", "\n")
    terminal.process.send_signal(signal.SIGINT)
    while not any(text in terminal.shown[offset:] for text in (" (stopped)\n", "Ctrl-D or /exit ends")):
        assert time.monotonic() < limit, terminal.shown
        terminal.shown += os.read(terminal.ours, 4096).decode(errors="replace").replace("\r\n", "\n")
    return len(terminal.shown)


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_ctrl_d_the_program(model: Path) -> None:
    terminal = Terminal(model)
    interrupted_at = terminal.wait("> ")
    interrupted_at = _interrupt_prompt(terminal, interrupted_at)
    for _ in range(5):  # on a crowded machine an answer may end before the signal comes
        interrupted_at = _interrupted(terminal, interrupted_at)
        if " (stopped)\n" in terminal.shown[:interrupted_at]:
            break
    interrupted_at = terminal.wait("> ", terminal.wait(" (stopped)\n"))
    terminal.type("/stats\n")
    interrupted_at = terminal.wait("> ", terminal.wait("first token after", interrupted_at))
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0
    os.close(terminal.ours)
