"""Texts of conversations to measure on: prompts of Spec-Bench, and GSM8K's questions with their answers.

    python benchmarks/chat_texts.py --data DIR --prompts SPEC-PROMPTS.jsonl --answered GSM.jsonl

DIR holds spec-bench/question.jsonl and gsm8k/test.jsonl. Of Spec-Bench first turns of less than 1,200
characters are taken, every fourth; ``attar collect`` lets a model answer them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LONGEST, EVERY = 1_200, 4


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="file of Spec-Bench's prompts")
    parser.add_argument("--answered", type=Path, required=True, help="file of GSM8K's conversations")
    options = parser.parse_args()
    turns = [row["turns"][0] for row in rows(options.data / "spec-bench" / "question.jsonl")]
    short = [turn for turn in turns if len(turn) < LONGEST]
    write(options.prompts, ({"prompt": turn} for turn in short[::EVERY]))
    write(options.answered, map(conversation, rows(options.data / "gsm8k" / "test.jsonl")))


def conversation(row: dict[str, str]) -> dict[str, Any]:
    """A question and its answer as messages."""
    messages = [("user", row["question"]), ("assistant", row["answer"])]
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


def rows(file: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file's lines."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def write(file: Path, contents: Iterable[dict[str, Any]]) -> None:
    """JSON lines."""
    file.write_text("".join(json.dumps(content) + "\n" for content in contents))


if __name__ == "__main__":
    main()
