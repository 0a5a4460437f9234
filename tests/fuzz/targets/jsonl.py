"""Training and calibration text: JSONL rows, through a chat template and a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from attar.data.packing import pack
from attar.errors import AttarError
from tests import tiny_models

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def seeds(folder: Path) -> list[bytes]:
    """One row of each form."""
    talk = [{"role": "user", "content": "hi " * 20}, {"role": "assistant", "content": "hello " * 20}]
    rows = [{"text": "some text " * 20, "id": 3}, {"messages": talk}, {"text": talk}]
    return [json.dumps(row).encode() for row in rows]


def target(folder: Path) -> Callable[[bytes], bool]:
    """Packs the row as the only one of a file."""
    tokenizer = tiny_models.tokenizer()
    tokenizer.chat_template = TEMPLATE
    path = folder / "input.jsonl"

    def handle(data: bytes) -> bool:
        path.write_bytes(data.replace(b"\n", b" "))
        try:
            pack(tokenizer, str(path), "evaluation", length=8, rows=2, seed=0)
            return True
        except AttarError:
            return False

    return handle
