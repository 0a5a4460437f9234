"""Prompts to train drafters of a chat model on: what people ask, and nothing of Spec-Bench.

    python benchmarks/heads_prompts.py DATA QUESTIONS -o prompts.jsonl

DATA has the folders gsm8k, choices, sst2 and wikitext-2; QUESTIONS is Spec-Bench's question.jsonl. Kinds:
mathematics, questions, requests for help, translation, summaries, questions about a given text, code of the
standard library explained. A prompt that shares eight words in a row with one of Spec-Bench's is left out
(its mathematics come from the same set). Prints how many of each kind remain.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from attar.data.sources import documents

SHARED = 8  # words
LANGUAGES = ("French", "German", "Spanish", "Italian")


def main() -> None:
    """Write the prompts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("questions", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--of-each", type=int, default=700, help="prompts of a kind at most")
    args = parser.parse_args()
    counts = write_prompts(args.data, args.questions, args.out, args.of_each)
    listed = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    print(f"{listed} = {counts.total()} prompts")


def write_prompts(data: Path, questions: Path, out: Path, of_each: int) -> Counter[str]:
    """Write the prompts as conversations, JSON lines; how many of each kind."""
    asked = [turn for row in _rows(questions) for turn in row["turns"]]
    known = {gram for text in asked for gram in _grams(text)}
    rng, kept, counts = random.Random(0), list[str](), Counter[str]()
    for kind, texts in _kinds(data, rng).items():
        for text in rng.sample(texts, len(texts)):
            if counts[kind] < of_each and not known & set(_grams(text)):
                counts[kind] += 1
                kept.append(text)
    rng.shuffle(kept)
    lines = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in kept]
    out.write_text("\n".join(lines) + "\n")
    return counts


def _kinds(data: Path, rng: random.Random) -> dict[str, list[str]]:
    """Prompts by kind."""
    sentences = [
        line.split("\t")[0].strip() for line in (data / "sst2/train.tsv").read_text().splitlines()[1:]
    ]
    passages = [
        _plain(line) for line in (data / "wikitext-2/valid.txt").read_text().splitlines() if len(line) > 400
    ]
    half = len(passages) // 2
    return {
        "mathematics": [row["question"] for row in _rows(data / "gsm8k/test.jsonl")],
        "questions": [
            row["q"]
            for name in ("ARC-Easy", "ARC-Challenge", "openbookqa")
            for row in _rows(data / f"choices/{name}.test.jsonl")
            if row["q"].endswith("?")
        ],
        "requests": [row["q"] for row in _rows(data / "choices/piqa.test.jsonl") if len(row["q"]) > 25],
        "translation": [
            f"Translate into {rng.choice(LANGUAGES)}: {text}" for text in sentences if len(text) > 40
        ],
        "summaries": [f"Summarize: {text[:1500]}" for text in passages[:half]],
        "reading": [
            f"Here is a text:\n{text[:1200]}\n\nWhat does it say about {_topic(text)}?"
            for text in passages[half:]
        ],
        "code": [f"Explain this Python code:\n```python\n{text}\n```" for text in _functions(rng)],
    }


def _plain(line: str) -> str:
    """A line of WikiText as people write it."""
    text = re.sub(r" @(.)@ ", r"\1", line.replace("<unk>", "").strip())
    return re.sub(r" +", " ", re.sub(r" ([.,;:!?)])", r"\1", text)).replace("( ", "(")


def _topic(text: str) -> str:
    """The longest word in capitals of a passage."""
    return max(
        (word for word in text.split() if word[:1].isupper() and word.isalpha()), key=len, default="it"
    )


def _functions(rng: random.Random) -> list[str]:
    """Functions of the standard library, of files to train on."""
    found = []
    for document in documents("python-stdlib", "train"):
        parts = str(document).split("\ndef ")[1:]
        found += [f"def {part[:600].rstrip()}" for part in parts if 120 < len(part) < 900]
    return rng.sample(found, min(len(found), 2000))


def _rows(path: Path) -> Iterator[dict[str, str]]:
    return (json.loads(line) for line in path.read_text().splitlines() if line)


def _grams(text: str) -> Iterator[tuple[str, ...]]:
    words = text.lower().split()
    return zip(*(words[n:] for n in range(SHARED)), strict=False)


if __name__ == "__main__":
    main()
