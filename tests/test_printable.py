"""No text of a file, a model or a peer reaches the terminal as it is."""

import json
import logging
import re
import shutil
import sys
import unicodedata

import pytest

from attar.checkpoint.card import Card, Parent
from attar.checkpoint.open import open_checkpoint
from attar.cli.guard import print_lines
from attar.cli.main import VERBS, _StderrHandler, call
from attar.printable import PrintableFormatter, for_stdout, one_line, printable
from attar.progress import Terminal

EVIL = "x\x1b]0;title\x07\x1b[2J\x1b]52;c;cm0gLXJm\x9b1mé\u202eltr\u2066\u2028y\x7f\r\U000e0041"
VISIBLE = "\n\t\u200c\u200d" + "".join(map(chr, [*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2]))
"""Joiners, and signs of Arabic and Syriac."""
HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")


def is_clean(text):
    return not [c for c in text if c not in VISIBLE and unicodedata.category(c) in HIDDEN]


def test_every_character_that_a_terminal_obeys_or_hides_is_escaped():
    every = "".join(map(chr, [*range(0x3000), *range(0xD800, 0xE000), 0xFEFF, 0xE0001, 0xE007F]))
    assert [c for c in every if is_clean(c) != (printable(c) == c) and unicodedata.category(c) != "Cn"] == []
    assert not is_clean(EVIL) and is_clean(printable(EVIL)) and "é" in printable(EVIL)
    assert printable("a\x1b[2J\u202eb\U000e0041") == "a\\u001b[2J\\u202eb\\udb40\\udc41"


def test_json_stays_what_it_says():
    text = json.dumps({"name": EVIL}, ensure_ascii=False)
    assert json.loads(printable(text)) == {"name": EVIL}


def test_one_line_is_one_line():
    assert one_line("a\n error: b\r\n\tc\x1b") == "a error: b c\\u001b"


VERB_WORDS = {
    "collect": ["--teacher", "attar:tiny", "-o", "OUT.jsonl"],
    "demo": ["--set"],
    "report": [],
    "run": [],
    "sweep": ["--set", "stages.a.b=1,2"],
    "serve": [],
    "upload": ["s3://b/m"],
    "verify": ["--against", "attar:tiny"],
    "extract": ["--base", "attar:tiny", "-o", "OUT"],
    "distill": ["--steps", "1", "-o", "OUT"],
    "generate": ["text"],
    "status": [],
    "inspect": [],
    "list": [],
    "mcp": [],
    "chat": [],
    "bench": [],
    "plan-kv": [],
    "plan": ["-o", "OUT.yaml"],
    "evaluate": [],
}


@pytest.mark.parametrize("verb", VERBS)
def test_the_error_of_a_verb(verb, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = VERB_WORDS.get(verb, ["-o", "OUT"])
    code = call([verb, *words, EVIL] if verb == "demo" else [verb, EVIL, *words])
    written = capsys.readouterr()
    assert code in (1, 2) and "\\u001b]0;title\\u0007" in written.err, written
    assert is_clean(written.err) and is_clean(written.out)
    assert "bug of attar" not in written.err


def test_the_traceback_of_debug(capsys, tmp_path):
    assert call(["inspect", EVIL, "--debug"]) == 1
    written = capsys.readouterr().err
    assert "Traceback" in written and is_clean(written)


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_what_inspect_shows_of_config_and_card(capsys, tmp_path, form):
    folder = shutil.copytree(open_checkpoint("attar:tiny").path, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"architectures": [EVIL + "\nerror: line"]}
    (folder / "config.json").write_text(json.dumps(config))
    parent = Parent(role="weights", name=EVIL, stage=EVIL, licence={"ids": [EVIL], "evidence": [EVIL]})
    measured = {EVIL: {"perplexity": 1.0}}
    Card(name="m", stage=EVIL, command=EVIL, parents=(parent,), measurements=measured).write(folder)
    assert call(["inspect", str(folder), *form]) == 0
    written = capsys.readouterr().out
    assert is_clean(written) and "\\u001b]0;title" in written
    assert not [line for line in written.splitlines() if line.startswith("error: line")]
    if form:
        assert json.loads(written)["architecture"] == EVIL + "\nerror: line"


def test_notes_bars_and_warnings(capsys, monkeypatch):
    progress = Terminal()
    progress.log(EVIL)
    with progress.task("[/red]" + EVIL, total=1) as task:
        task.advance()
    handler = _StderrHandler(logging.WARNING)
    handler.emit(logging.makeLogRecord({"msg": EVIL, "levelname": "WARNING", "levelno": logging.WARNING}))
    print_lines(EVIL)
    written = capsys.readouterr().err
    assert written.count("\\u001b]0;title") == 4 and is_clean(written)
    assert is_clean(PrintableFormatter("%(message)s").format(logging.makeLogRecord({"msg": EVIL})))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress.task("[/red]" + EVIL, total=1) as task:
        task.advance()
    drawn = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err).replace("\r", "")
    assert is_clean(drawn) and "[/red]" in drawn and "\\u001b]0;title" in drawn


def test_a_models_text_is_data_in_a_pipe_and_printable_on_a_terminal(monkeypatch):
    assert for_stdout(EVIL) == EVIL
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert is_clean(for_stdout(EVIL))
